"""Versions that change most words of a chunk, of which the journal has all, or half, where it has masks.
There, back, folded, to engines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from core_cases import Model, Tensor, bytes_of, read_checkpoint, some_changed, tensor, write_checkpoint
from local_cases import Run, following, patch_keeping_undo, staged, step_to
from opening import open_publisher
from test_engine_patch import patched, read

from weightcast.publisher import init_channel
from weightcast.publisher.maintenance.upkeep import UpkeepOptions
from weightcast.shared.channel.channel import Channel
from weightcast.shared.checkpoint.local_updater import LocalUpdater
from weightcast.shared.checkpoint.state.state import Step
from weightcast.shared.checkpoint.update.engine_patch import write_engine_patch
from weightcast.shared.checkpoint.update.journal import JournalReader
from weightcast.shared.checkpoint.update.journal_records import PackedRecord
from weightcast.shared.checkpoint.verify.hashing import full_hash

FRESH = ("w.large", "w.odd")
"""tensors of one chunk that are new in versions 1 and 2"""
UPKEEP = UpkeepOptions(skip_span=8, history_share=1000.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    rng = np.random.default_rng(3)
    base: Model = {"w.large": tensor(rng, "F16", 90_000), "w.odd": tensor(rng, "F16", 4001)}
    base["half"] = tensor(rng, "F32", 100, 91)
    base |= {"w.still": tensor(rng, "F16", 77), "other": tensor(rng, "BF16", 50, 40)}
    run = Run(tmp_path_factory.mktemp("whole"), [base])
    write_checkpoint(run.base, base)
    init_channel(run.channel, run.base)
    for version in range(1, 5):
        model = some_changed(run.latest, rng)
        if version < 3:
            model |= {name: tensor(rng, "F16", *model[name].shape) for name in FRESH}
            model["w.still"] = base["w.still"]
        model["half"] = half_changed(run.latest["half"], rng)
        run.models.append(model)
    options = {"local": run.root / "pub", "base": run.base}
    with open_publisher(run.channel, **options, upkeep=UPKEEP) as publisher:
        for version, model in enumerate(run.models[1:], 1):
            publisher.publish_checkpoint(write_checkpoint(run.root / f"new-{version}", model), step=version)
        assert publisher.make_due()
    return run


def half_changed(before: Tensor, rng: np.random.Generator) -> Tensor:
    """By small steps."""
    words = before.data.view(np.uint32).copy()
    words[rng.random(len(words)) < 0.5] ^= 1
    return before._replace(data=words.view(np.uint8))


def records(updater: LocalUpdater, step: Step) -> dict[str, PackedRecord]:
    assert updater.local is not None
    table = updater.local.table
    with JournalReader(updater.paths.journal(step.journal), table) as journal:
        return {table[record.tensor].name: record for record in journal.packed()}


def holds(updater: LocalUpdater, run: Run, version: int) -> None:
    assert read_checkpoint(updater.paths.directory) == bytes_of(run.models[version])
    assert updater.local is not None and full_hash(updater.local).intact
    assert updater.local.state.position.version == version


def test_there_and_back(run: Run, tmp_path: Path) -> None:
    with following(run, tmp_path / "host") as updater:
        step_to(updater, 0)
        kept = records(updater, staged(updater, 1).step)
        assert [kept[name].whole for name in FRESH] == [90_000, 4001]
        assert "w.still" not in kept and not any(one.whole for one in kept.values() if one.tensor == 0)
        assert kept["half"].masked == 9_100 and 4_000 < kept["half"].changes < 5_000
        assert 0.9 * 90_000 < kept["w.large"].changes < 90_000
        patch_keeping_undo(updater, 1)
        holds(updater, run, 1)
        with updater.local.patching():  # type: ignore[union-attr]
            updater.undo()
        holds(updater, run, 0)
        for version in (1, 2, 3, 4):
            step_to(updater, version)
            holds(updater, run, version)


def test_folded(run: Run, tmp_path: Path) -> None:
    """Whole chunks with each other and with a list."""
    for first, last in ((0, 3), (1, 4)):
        with following(run, tmp_path / f"host-{first}") as updater:
            step_to(updater, first)
            step = staged(updater, last).step
            kept = records(updater, step)
            assert kept["w.large"].whole and kept["half"].masked
            patch_keeping_undo(updater, last)
            holds(updater, run, last)
            with updater.local.patching():  # type: ignore[union-attr]
                updater.undo()
            holds(updater, run, first)


def test_as_a_patch_for_engines(run: Run, tmp_path: Path) -> None:
    """Only what changes is in it."""
    with following(run, tmp_path / "host") as updater:
        step_to(updater, 0)
        step, local = staged(updater, 1).step, updater.local
        assert local is not None
        patch = write_engine_patch(local, [step], 0)
        assert patch.changes == sum(one.changes for one in records(updater, step).values())
        assert patched(bytes_of(run.models[0]), *read(local, patch)) == bytes_of(run.models[1])


def test_deltas_over_several_versions_are_made_from_it(run: Run, tmp_path: Path) -> None:
    with following(run, tmp_path / "host") as updater:
        step_to(updater, 0)
        channel = Channel.open(run.channel)
        pointer = channel.pointer()
        assert pointer is not None
        route = updater.route(channel, pointer, 4, exact=True)
        assert route.plan.legs == ((4,),)  # type: ignore[union-attr]
        step_to(updater, 4)
        holds(updater, run, 4)

"""Versions that change most words of a chunk, of which the journal has all, or half, where it has masks.
There, back, folded, to engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from core_cases import Model, Tensor, bytes_of, read_checkpoint, some_changed, tensor, write_checkpoint
from local_cases import Run, following, patch_keeping_undo, staged, step_to
from test_engine_patch import patched, read

from weightcast.publisher import Publisher, init_channel
from weightcast.publisher.maintenance.upkeep import UpkeepOptions
from weightcast.shared.channel.store import Channel
from weightcast.shared.checkpoint.follower import Follower
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
    with Publisher.open(run.channel, **options, upkeep=UPKEEP) as publisher:
        for version, model in enumerate(run.models[1:], 1):
            publisher.publish_checkpoint(write_checkpoint(run.root / f"new-{version}", model), step=version)
        assert publisher.make_due()
    return run


def half_changed(before: Tensor, rng: np.random.Generator) -> Tensor:
    """By small steps."""
    words = before.data.view(np.uint32).copy()
    words[rng.random(len(words)) < 0.5] ^= 1
    return replace(before, data=words.view(np.uint8))


def records(follower: Follower, step: Step) -> dict[str, PackedRecord]:
    assert follower.local is not None
    table = follower.local.table
    with JournalReader(follower.paths.journal(step.journal), table) as journal:
        return {table[record.tensor].name: record for record in journal.packed()}


def holds(follower: Follower, run: Run, version: int) -> None:
    assert read_checkpoint(follower.paths.directory) == bytes_of(run.models[version])
    assert follower.local is not None and full_hash(follower.local).intact
    assert follower.local.state.position.version == version


def test_there_and_back(run: Run, tmp_path: Path) -> None:
    with following(run, tmp_path / "host") as follower:
        step_to(follower, 0)
        kept = records(follower, staged(follower, 1).step)
        assert [kept[name].whole for name in FRESH] == [90_000, 4001]
        assert "w.still" not in kept and not any(one.whole for one in kept.values() if one.tensor == 0)
        assert kept["half"].masked == 9_100 and 4_000 < kept["half"].changes < 5_000
        assert 0.9 * 90_000 < kept["w.large"].changes < 90_000
        patch_keeping_undo(follower, 1)
        holds(follower, run, 1)
        with follower.local.patching():  # type: ignore[union-attr]
            follower.undo()
        holds(follower, run, 0)
        for version in (1, 2, 3, 4):
            step_to(follower, version)
            holds(follower, run, version)


def test_folded(run: Run, tmp_path: Path) -> None:
    """Whole chunks with each other and with a list."""
    for first, last in ((0, 3), (1, 4)):
        with following(run, tmp_path / f"host-{first}") as follower:
            step_to(follower, first)
            step = staged(follower, last).step
            kept = records(follower, step)
            assert kept["w.large"].whole and kept["half"].masked
            patch_keeping_undo(follower, last)
            holds(follower, run, last)
            with follower.local.patching():  # type: ignore[union-attr]
                follower.undo()
            holds(follower, run, first)


def test_as_a_patch_for_engines(run: Run, tmp_path: Path) -> None:
    """Only what changes is in it."""
    with following(run, tmp_path / "host") as follower:
        step_to(follower, 0)
        step, local = staged(follower, 1).step, follower.local
        assert local is not None
        patch = write_engine_patch(local, [step], 0)
        assert patch.changes == sum(one.changes for one in records(follower, step).values())
        assert patched(bytes_of(run.models[0]), *read(local, patch)) == bytes_of(run.models[1])


def test_deltas_over_several_versions_are_made_from_it(run: Run, tmp_path: Path) -> None:
    with following(run, tmp_path / "host") as follower:
        step_to(follower, 0)
        channel = Channel.open(run.channel)
        pointer = channel.pointer()
        assert pointer is not None
        route = follower.route(channel, pointer, 4, exact=True)
        assert route.plan.legs == ((4,),)  # type: ignore[union-attr]
        step_to(follower, 4)
        holds(follower, run, 4)

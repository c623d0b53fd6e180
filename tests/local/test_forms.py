"""Whatever form a journal's records have: the same words, the same patches for engines, the same way back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from core_cases import ITEM_SIZES, Model, bytes_of, much_changed, read_checkpoint, tensor
from local_cases import Run, following, patch_keeping_undo, run_of, staged, step_to
from test_engine_patch import patched, read

from weightcast.publisher.maintenance.upkeep import UpkeepOptions
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.checkpoint.local_updater import LocalUpdater
from weightcast.shared.checkpoint.update.engine_patch import write_engine_patch
from weightcast.shared.checkpoint.update.journal import JournalReader, PackedRecord
from weightcast.shared.checkpoint.update.plan import Patch
from weightcast.shared.checkpoint.verify.hashing import full_hash
from weightcast.shared.codec import changes, container


@pytest.fixture(scope="module", params=["fast", "small", "xor"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Every dtype at odd places, elements of 8 bytes among them; the last version changes much of it back."""
    rng = np.random.default_rng(23)
    base: Model = {"odd": tensor(rng, "I8", 3)}
    for dtype in ITEM_SIZES:
        base |= {f"{dtype}.{n}": tensor(rng, dtype, 4_200 + n) for n in range(2)}
    first = much_changed(base, rng)
    second = much_changed(first, rng) | {name: base[name] for name in ("BF16.0", "F32.1")}
    return run_of(tmp_path_factory.mktemp("forms"), [base, first, second], files=2, encoding=request.param)


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is told by masks, or with all words."""
    monkeypatch.setattr(container, "_FEW_STAY", 1 << 40)
    monkeypatch.setattr(changes, "_LISTED_BITS", 0)
    yield


def form_of(record: PackedRecord) -> str:
    return "listed" if record.listed else "masked" if record.masked else "whole"


def followed(run: Run, local: Path) -> tuple[set[str], list[bytes]]:
    """Forms of records; what engines are given: before a step is written, and with the one before it."""
    forms, payloads = set(), []
    with following(run, local) as updater:
        step_to(updater, 0)
        for version in (1, 2):
            step, own = staged(updater, version).step, updater.local
            assert own is not None
            with JournalReader(updater.paths.journal(step.journal), own.table) as journal:
                forms |= {form_of(record) for record in journal.packed()}
            for steps in ([step], [*own.state.undo, step]):
                first = steps[0].base.version
                header, payload = read(own, write_engine_patch(own, steps, first))
                assert patched(bytes_of(run.models[first]), header, payload) == bytes_of(run.models[version])
                payloads.append(payload)
            patch_keeping_undo(updater, version)
            assert read_checkpoint(local) == bytes_of(run.models[version])
        goes_back(updater, run, steps=2)
        patch_keeping_undo(updater, 2)
        assert read_checkpoint(local) == bytes_of(run.models[2])
        goes_back(updater, run, steps=1)
    return forms, payloads


def goes_back(updater: LocalUpdater, run: Run, steps: int) -> None:
    """To version 0. `steps`: journals; one where the versions were folded."""
    assert updater.local is not None and len(updater.local.state.undo) == steps
    with updater.local.patching():
        updater.undo()
    assert full_hash(updater.local).intact
    assert read_checkpoint(updater.paths.directory) == bytes_of(run.models[0])


def test_as_they_are(run: Run, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    forms, payloads = followed(run, tmp_path / "host")
    request.getfixturevalue("listed")
    others, same = followed(run, tmp_path / "other")
    assert "masked" in forms and others == {"listed"} and payloads == same


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Words of one width in one file, so that a thread has records of all forms at once. The last version
    changes some tensors back to the first."""
    rng = np.random.default_rng(29)
    tiny: Model = {f"tiny.{n:02}": tensor(rng, "BF16", 50) for n in range(60)}
    halves: Model = {f"half.{n:02}": tensor(rng, "F16", 4_101) for n in range(20)}
    fresh: Model = {f"fresh.{n:02}": tensor(rng, "I16", 70) for n in range(20)}
    base = tiny | fresh | halves
    first = {name: one.changed(rng, 2) for name, one in tiny.items()} | much_changed(halves, rng, (0.5,))
    first |= {name: tensor(rng, "I16", 70) for name in fresh}
    second = first | {name: base[name] for name in ("tiny.07", "half.03")}
    second |= {name: second[name].changed(rng, 1) for name in ("tiny.08", "half.04", "fresh.05")}
    return run_of(tmp_path_factory.mktemp("mixed"), [base, first, second])


def test_all_forms_beside_each_other(mixed: Run, tmp_path: Path) -> None:
    with following(mixed, tmp_path / "host") as updater:
        step_to(updater, 0)
        step, own = staged(updater, 1).step, updater.local
        assert own is not None
        with JournalReader(updater.paths.journal(step.journal), own.table) as journal:
            forms = [form_of(record) for record in journal.packed()]
        assert [forms.count(form) for form in ("listed", "masked", "whole")] == [60, 20, 20]
        for version in (1, 2):
            patch_keeping_undo(updater, version)
            assert read_checkpoint(tmp_path / "host") == bytes_of(mixed.models[version])
        goes_back(updater, mixed, steps=2)


def test_what_changes_back_is_in_no_journal(mixed: Run, tmp_path: Path) -> None:
    with following(mixed, tmp_path / "host") as updater:
        step_to(updater, 0)
        step, own = staged(updater, 2).step, updater.local
        assert own is not None and (step.base.version, step.target.version) == (0, 2)
        first, last = (bytes_of(mixed.models[version]) for version in (0, 2))
        with JournalReader(updater.paths.journal(step.journal), own.table) as journal:
            names = {own.table[record.tensor].name for record in journal.packed()}
            assert all((record.old != record.new).all() for record in journal.records())
        assert names == {name for name in first if first[name] != last[name]}
        assert not names & {"tiny.07", "half.03"}


def test_deltas_over_several_versions_are_made_of_them(mixed: Run, tmp_path: Path) -> None:
    run = run_of(tmp_path, mixed.models, upkeep=UpkeepOptions(skip_span=2, history_share=1000.0))
    with following(run, tmp_path / "host") as updater:
        step_to(updater, 0)
        channel = Channel.open(open_store(run.channel))
        pointer = channel.pointer()
        assert pointer is not None
        plan = updater.route(channel, pointer, 2, exact=True).plan
        assert isinstance(plan, Patch) and plan.legs == ((2,),)
        step_to(updater, 2)
        assert read_checkpoint(tmp_path / "host") == bytes_of(run.latest)

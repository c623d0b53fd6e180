"""The background verify: its rate, what it remembers over versions, what it finds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from core_cases import Model, bytes_of, every_dtype, read_checkpoint, rot, tensor
from local_cases import Run, following, run_of, state_of, step_to

from weightcast.shared.base.errors import NeedsReseed
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.checkpoint.local_updater import LocalUpdater
from weightcast.shared.checkpoint.verify.hashing import Differs, Scrub

PIECE = 8 << 20
LONG = 5 * PIECE


@dataclass
class Clock:
    at: float = 100.0
    turns: list[int] = field(default_factory=list)

    def __call__(self) -> float:
        return self.at


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Version 1 changes the long tensor, version 2 only `scalar`."""
    rng = np.random.default_rng(5)
    base: Model = {**every_dtype(rng), "zz.long": tensor(rng, "BF16", LONG // 2)}
    first = {**base, "zz.long": base["zz.long"].changed(rng, 3)}
    second = {**first, "scalar": first["scalar"].changed(rng, 1)}
    return run_of(tmp_path_factory.mktemp("scrub"), [base, first, second])


@pytest.fixture
def updater(run: Run, tmp_path: Path) -> Iterator[LocalUpdater]:
    with following(run, tmp_path / "local") as updater:
        step_to(updater, 0)
        yield updater


def opened(updater: LocalUpdater) -> LocalCheckpoint:
    assert updater.local is not None
    return updater.local


def scrub_of(clock: Clock, rate: int = PIECE) -> Scrub:
    return Scrub(rate, clock=clock, now=lambda: clock.at)


def turn(scrub: Scrub, updater: LocalUpdater, clock: Clock, seconds: float = 1.0) -> int:
    """Bytes of the pass that are done after it."""
    clock.at += seconds
    scrub.turn(opened(updater))
    return scrub.status.done_bytes


def test_a_pass_takes_the_time_that_the_rate_says(updater: LocalUpdater) -> None:
    clock = Clock()
    scrub = scrub_of(clock)
    done = [turn(scrub, updater, clock) for _ in range(5)]
    assert all(PIECE * n <= nbytes < PIECE * (n + 2) for n, nbytes in enumerate(done)), done
    assert scrub.status.passes == 0 and scrub.status.total_bytes == opened(updater).table.nbytes
    while not scrub.status.passes:
        turn(scrub, updater, clock)
    assert clock.at - 101 <= LONG / PIECE + 2
    assert state_of(updater.paths.directory)["last_full_hash"] == scrub.status.full_pass == 101.0


def test_time_that_nobody_used_is_not_made_up_for(updater: LocalUpdater) -> None:
    clock = Clock()
    scrub = scrub_of(clock, PIECE // 10)
    assert turn(scrub, updater, clock, seconds=10_000) <= 2 * PIECE


def test_switched_off_it_reads_nothing(updater: LocalUpdater) -> None:
    clock = Clock()
    scrub = scrub_of(clock, 0)
    before = updater.paths.state.read_bytes()
    assert turn(scrub, updater, clock, seconds=1000) == 0 and scrub.status.passes == 0
    assert updater.paths.state.read_bytes() == before


def test_what_was_read_stays_read_when_a_version_comes(run: Run, updater: LocalUpdater) -> None:
    clock = Clock()
    scrub = scrub_of(clock)
    step_to(updater, 1)
    before = [turn(scrub, updater, clock) for _ in range(3)][-1]
    step_to(updater, 2)
    assert turn(scrub, updater, clock) > before, "the long tensor did not change"


def test_a_tensor_that_changes_is_read_anew_without_pauses(run: Run, updater: LocalUpdater) -> None:
    clock = Clock()
    scrub = scrub_of(clock)
    for _ in range(3):
        turn(scrub, updater, clock)
    assert 0 < scrub.status.done_bytes < LONG
    step_to(updater, 1)
    assert turn(scrub, updater, clock) == opened(updater).table.nbytes
    assert scrub.status.faults == 0
    assert turn(scrub, updater, clock) == opened(updater).table.nbytes, "the debt is worked off first"


def test_what_was_repaired_after_it_was_read_is_no_fault(run: Run, updater: LocalUpdater) -> None:
    clock = Clock()
    scrub = scrub_of(clock)
    step_to(updater, 2)
    rot(updater.paths.directory, "zz.long", 100)
    while scrub.status.done_bytes < PIECE:
        turn(scrub, updater, clock)
    assert scrub.status.done_bytes < LONG
    updater.rehash()
    assert updater.repair(Channel.open(open_store(run.channel))) is not None
    while not scrub.status.passes:
        turn(scrub, updater, clock)
    assert scrub.status.faults == 0


@pytest.mark.parametrize(("name", "byte"), [("zz.long", LONG - 1), ("scalar", 0), ("odd.first", 2)])
def test_rot_is_found_and_repaired(run: Run, updater: LocalUpdater, name: str, byte: int) -> None:
    clock = Clock()
    scrub = scrub_of(clock, LONG)
    step_to(updater, 2)
    rot(updater.paths.directory, name, byte)
    with pytest.raises(Differs, match=name) as found:
        for _ in range(100):
            turn(scrub, updater, clock)
    assert found.value.tensors == (name,) and not found.value.whole
    assert scrub.status.faults == 1 and name in scrub.status.last_fault
    hashed = opened(updater).state.last_full_hash
    updater.mark_damaged(found.value)
    assert updater.local is None and state_of(updater.paths.directory)["phase"] == "dirty"
    done = updater.repair(Channel.open(open_store(run.channel)))
    assert done is not None and (done.tensors, done.words) == ((name,), 1)
    assert read_checkpoint(updater.paths.directory) == bytes_of(run.models[2])
    assert opened(updater).state.last_full_hash == hashed, "the others were not read"
    while not scrub.status.passes:
        turn(scrub, updater, clock)
    assert scrub.status.faults == 1


def test_a_file_that_was_replaced_is_a_fault(updater: LocalUpdater) -> None:
    clock = Clock()
    scrub = scrub_of(clock)
    path = updater.paths.directory / "model.safetensors"
    copy = path.with_name("aside")
    copy.write_bytes(path.read_bytes())
    copy.rename(path)
    with pytest.raises(NeedsReseed, match="replaced"):
        turn(scrub, updater, clock)


def test_it_steps_aside_for_a_patch(run: Run, updater: LocalUpdater) -> None:
    clock = Clock()
    scrub = scrub_of(clock)
    with opened(updater).patching():
        assert turn(scrub, updater, clock) == 0
    assert turn(scrub, updater, clock) > 0


def test_what_it_read_counts_as_proof(updater: LocalUpdater) -> None:
    """Before a reload only tensors that it did not read lately are hashed again."""
    local, clock = opened(updater), Clock()
    began = local.proofs.clock()
    assert len(local.proofs.before(began)) == len(local.table)
    scrub = Scrub(PIECE, clock=clock, now=clock)
    while not scrub.status.passes:
        turn(scrub, updater, clock)
    assert not len(local.proofs.before(began)) and local.proofs.age < 60

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from channel_paths import Layout

from weightcast.shared.base.errors import DamagedFile, Refused
from weightcast.shared.channel.claims import (
    Claim,
    Claimant,
    claim,
    current_epoch,
    is_dead,
    parse_claim,
    this_process,
    write_claim,
)
from weightcast.shared.channel.directory_store import open_store

FIRST = Claimant("trainer-0", 10, "boot-a", "pid:[1]", "100")
SECOND = Claimant("trainer-1", 10, "boot-b", "pid:[2]", "200")


@dataclass
class Time:
    """A clock that runs as far as its owner sleeps; `meanwhile` happens at every sleep."""

    now: float = 0.0
    meanwhile: Callable[[], object] = lambda: None
    slept: list[float] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        self.meanwhile()


def take(channel: Path, claimant: Claimant, time: Time | None = None, *, take_over: bool = False) -> Claim:
    time = Time() if time is None else time
    return claim(open_store(channel), claimant, take_over=take_over, clock=time.clock, sleep=time.sleep)


def dead_process() -> Claimant:
    script = (
        "from weightcast.shared.channel.claims import this_process\n"
        "print(this_process().pid, this_process().process_start)"
    )
    pid, start = subprocess.check_output([sys.executable, "-c", script], text=True).split()
    return replace(this_process(), pid=int(pid), process_start=start)


def test_the_first_claim_is_epoch_one(tmp_path: Path) -> None:
    assert current_epoch(open_store(tmp_path)) == 0
    assert take(tmp_path, FIRST).epoch == current_epoch(open_store(tmp_path)) == 1


def test_epochs_rise_as_numbers(tmp_path: Path) -> None:
    for epoch in range(1, 12):
        found = take(tmp_path, FIRST, take_over=True)
        assert found.epoch == epoch
    (tmp_path / "publishers" / "99.json.bak").touch()
    (tmp_path / "publishers" / "0x7f.json").touch()
    assert current_epoch(open_store(tmp_path)) == 11


def test_a_silent_owner_gives_way_after_a_minute_of_the_takers_clock(tmp_path: Path) -> None:
    old = take(tmp_path, FIRST)
    time = Time()
    new = take(tmp_path, SECOND, time)
    assert new.epoch == 2
    assert 60 <= time.now < 62
    new.check()
    with pytest.raises(Refused, match="process 10 on trainer-1"):
        old.check()


def test_a_living_owner_keeps_the_channel(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    old = take(tmp_path, FIRST)
    time = Time()
    time.meanwhile = lambda: old.beat() if time.now > 50 else None
    with pytest.raises(Refused, match=r"process 10 on trainer-0 .*--take-over"):
        take(tmp_path, SECOND, time)
    assert current_epoch(open_store(tmp_path)) == 1
    old.check()
    [said] = caplog.messages
    assert f"{tmp_path} belongs to process 10 on trainer-0 (epoch 1): waiting up to 60 s" in said


def test_take_over_does_not_wait(tmp_path: Path) -> None:
    old = take(tmp_path, FIRST)
    time = Time()
    assert take(tmp_path, SECOND, time, take_over=True).epoch == 2
    assert time.slept == []
    old.beat()
    with pytest.raises(Refused):
        old.check()


def test_a_released_channel_is_free(tmp_path: Path) -> None:
    take(tmp_path, FIRST).release()
    time = Time()
    assert take(tmp_path, SECOND, time).epoch == 2
    assert time.slept == []


def test_a_dead_process_of_this_machine_is_known_to_be_dead(tmp_path: Path) -> None:
    take(tmp_path, dead_process())
    time = Time()
    take(tmp_path, this_process(), time)
    assert time.slept == []


def test_a_living_process_of_this_machine_is_not_dead(tmp_path: Path) -> None:
    take(tmp_path, this_process())
    time = Time()
    take(tmp_path, this_process(), time)
    assert time.now >= 60


def test_death_is_only_judged_where_the_pid_means_something() -> None:
    dead = dead_process()
    observer = this_process()
    assert is_dead(dead, observer)
    assert not is_dead(replace(dead, host="elsewhere"), observer)
    assert not is_dead(replace(dead, boot_id="another"), observer)
    assert not is_dead(replace(dead, pid_namespace="pid:[7]"), observer)
    assert not is_dead(replace(dead, boot_id=""), replace(observer, boot_id=""))
    assert not is_dead(observer, observer)
    assert is_dead(replace(observer, process_start="1"), observer)
    assert not is_dead(replace(observer, process_start=""), observer)


def test_of_two_takers_at_the_same_moment_one_is_refused(tmp_path: Path) -> None:
    take(tmp_path, FIRST)
    time = Time()
    third = Claimant("trainer-2", 11)
    time.meanwhile = lambda: time.now >= 60 and take(tmp_path, third, take_over=True)
    with pytest.raises(Refused, match="process 11 on trainer-2"):
        take(tmp_path, SECOND, time)
    assert current_epoch(open_store(tmp_path)) == 2


def test_an_unreadable_claim_still_owns_the_channel(tmp_path: Path) -> None:
    take(tmp_path, FIRST)
    path = Layout(tmp_path).claim(1)
    path.write_bytes(b"{")
    time = Time()
    time.meanwhile = lambda: path.write_bytes(b"{" * (1 + int(time.now)))
    with pytest.raises(Refused, match="unreadable"):
        take(tmp_path, SECOND, time)
    assert take(tmp_path, SECOND).epoch == 2


def test_a_claim_file_comes_back(tmp_path: Path) -> None:
    owner = take(tmp_path, FIRST)
    owner.beat()
    owner.beat()
    data = Layout(tmp_path).claim(1).read_bytes()
    record = parse_claim(data, "f")
    assert record == owner.record
    assert (record.counter, record.released, record.claimant) == (2, False, FIRST)
    assert write_claim(record) == data


@pytest.mark.parametrize("damage", [b"{}", b'{"format":1}', b"[]", b"", b'{"format":1,"host":"h","pid":0}'])
def test_damaged_claims(damage: bytes) -> None:
    with pytest.raises(DamagedFile):
        parse_claim(damage, "claim 1")


def test_this_process_is_described() -> None:
    assert this_process() == this_process()
    assert this_process().host and this_process().pid > 0

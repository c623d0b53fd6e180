"""`weightcast doctor` on real directories, and its rules on made-up machines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_cases import Tensor, write_checkpoint
from in_process import Command
from tls import Authority
from waiting import wait_until

from weightcast.publisher.api import Publisher
from weightcast.publisher.channel_init import init_channel
from weightcast.shared.checkpoint.update.fetch import JOURNAL_BYTES
from weightcast.shared.cli.main import run
from weightcast.shared.doctor.observe import (
    PROBES,
    Hangs,
    LocalFacts,
    MachineFacts,
    PlaceFacts,
    ProbeOutcome,
    RunFacts,
    observe_contents,
    observe_machine,
    run_probes,
    within_seconds,
)
from weightcast.shared.doctor.rules import (
    Finding,
    Level,
    exit_code,
    judge_channel,
    judge_local,
    judge_machine,
    step_bytes,
)
from weightcast.shared.files.disk_errors import DiskError
from weightcast.shared.files.system import Mount, Space

GB = 10**9


@dataclass(frozen=True)
class Told:
    code: int
    facts: dict[str, Any]

    def finding(self, place: str, check: str) -> dict[str, Any]:
        (found,) = (f for f in self.facts["findings"] if (f["place"], f["check"]) == (place, check))
        return dict(found)

    def bad(self) -> set[tuple[str, str]]:
        return {(f["place"], f["check"]) for f in self.facts["findings"] if f["level"] == "failure"}


Doctor = Callable[..., Told]


@pytest.fixture
def doctor(weightcast: Command, monkeypatch: pytest.MonkeyPatch) -> Iterator[Doctor]:
    for name in ("CHANNEL", "LOCAL", "ENGINE"):
        monkeypatch.delenv(f"WEIGHTCAST_{name}", raising=False)

    def call(*arguments: str | Path) -> Told:
        code, out, _ = weightcast("doctor", *arguments, "--json")
        return Told(code, json.loads(out))

    yield call


@pytest.fixture
def channel(tmp_path: Path) -> Path:
    """With one version."""
    base = write_checkpoint(tmp_path / "base", {"w": Tensor("F32", (4, 5), np.zeros(80, np.uint8))})
    init_channel(tmp_path / "channel", base)
    with Publisher.open(tmp_path / "channel", local=tmp_path / "publisher", base=base) as publisher:
        publisher.publish({"w": np.full((4, 5), 2.5, np.float32)})
    return tmp_path / "channel"


def everything(root: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in root.rglob("*")}


def test_a_good_machine_and_nothing_stays(doctor: Doctor, channel: Path, tmp_path: Path) -> None:
    before = everything(tmp_path)
    told = doctor("--channel", channel, "--local", tmp_path / "host")
    assert told.code == 0 and told.bad() == set()
    assert everything(tmp_path) == before
    assert told.finding("channel", "run")["says"] == "version 1, weights of 80 B"
    assert told.finding("local", "permissions")["says"].startswith("not there yet")
    for check in ("rename", "exclusive create", "visibility", "mmap", "lock", "clock", "space"):
        assert told.finding("channel", check)["level"] == "ok"
        assert told.finding("local", check)["level"] == "ok"
    counts = told.facts["counts"]
    assert sum(counts.values()) == len(told.facts["findings"]) and counts["failure"] == 0


@pytest.mark.parametrize("local", ["channel", "channel/host", "link/host", "."])
def test_a_local_checkpoint_must_lie_apart_from_the_channel(
    doctor: Doctor, channel: Path, tmp_path: Path, local: str
) -> None:
    (tmp_path / "link").symlink_to(channel)
    told = doctor("--channel", channel, "--local", tmp_path / local)
    found = told.finding("local", "apart")
    assert told.code == 3 and found["level"] == "failure" and "a directory of its own" in found["remedy"]


def test_a_local_checkpoint_in_use_is_tried_where_no_engine_looks(
    doctor: Doctor, channel: Path, tmp_path: Path
) -> None:
    seen: set[str] = set()
    local, ended = tmp_path / "publisher", threading.Event()

    def look() -> None:
        while not ended.is_set():
            seen.update(os.listdir(local))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        told = doctor("--channel", channel, "--local", local)
    finally:
        ended.set()
        looking.join()
    assert told.code == 0
    assert not any("doctor" in name for name in seen)


def test_a_table_for_people(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["doctor", "--local", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["place", "check", "found"]
    assert lines[-1].split(",")[0].endswith(" ok")
    assert any("exclusive create" in line for line in lines)


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    doctor = [sys.executable, "-m", "weightcast.shared.cli.main", "doctor", "--local"]
    command = [*doctor, str(tmp_path / "x")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: any(tmp_path.iterdir()) or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) in (130, 0), "0: it was done by then"
    assert list(tmp_path.iterdir()) == []


def test_only_what_is_given_is_looked_at(doctor: Doctor) -> None:
    assert {finding["place"] for finding in doctor().facts["findings"]} == {"machine"}


def test_a_channel_that_is_not_there(doctor: Doctor, tmp_path: Path) -> None:
    told = doctor("--channel", tmp_path / "missing")
    assert told.code == 3 and told.bad() == {("channel", "run")}
    assert "mount it" in told.finding("channel", "run")["remedy"]
    assert not (tmp_path / "missing").exists()


def test_an_empty_mount_point(doctor: Doctor, tmp_path: Path) -> None:
    told = doctor("--channel", tmp_path)
    assert told.code == 0
    assert told.finding("channel", "run")["level"] == "warning"


def test_a_damaged_channel(doctor: Doctor, channel: Path) -> None:
    (channel / "base.json").unlink()
    told = doctor("--channel", channel)
    assert told.code == 3 and "base.json is missing" in told.finding("channel", "run")["says"]


def test_directories_that_are_none(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "channel")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").touch()
    assert ("local", "path") in doctor("--local", tmp_path / "file").bad()
    assert ("channel", "path") in doctor("--channel", tmp_path / "link").bad()
    assert doctor("--local", tmp_path / "full").bad() == {("local", "path")}
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["letter.txt"]


def test_a_link_to_a_directory_is_fine(doctor: Doctor, channel: Path, tmp_path: Path) -> None:
    for name, place in (("channel", channel), ("local", tmp_path / "publisher")):
        link = tmp_path / f"{name}-link"
        link.symlink_to(place)
        told = doctor(f"--{name}", link)
        assert told.code == 0 and told.finding(name, "path")["level"] == "note"


def test_who_may_replace_files(doctor: Doctor, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    told = doctor("--local", tmp_path)
    assert told.code == 0 and told.finding("local", "writers")["level"] == "warning"
    assert "chmod o-w" in told.finding("local", "writers")["remedy"]
    tmp_path.chmod(0o1777)
    assert "writers" not in {f["check"] for f in doctor("--local", tmp_path).facts["findings"]}


def test_every_trial_passes_here(tmp_path: Path) -> None:
    found, left = run_probes(tmp_path)
    assert left == ""
    assert {name: outcome.problem for name, outcome in found.items()} == dict.fromkeys(PROBES, "")
    assert found["readers"].measured > 0 and abs(found["clock"].measured) < 1
    assert list(tmp_path.iterdir()) == []


def test_what_hangs_is_left_and_what_fails_is_raised() -> None:
    release = threading.Event()
    with pytest.raises(Hangs, match=r"within 0\.05 s"):
        within_seconds(lambda: release.wait(20), 0.05)
    release.set()
    assert within_seconds(lambda: 7, 20) == 7

    def fail() -> None:
        raise OSError(5, "by design")

    with pytest.raises(OSError, match="by design"):
        within_seconds(fail, 20)


# rules

MACHINE = MachineFacts(
    cores=8,
    memory_bytes=64 * GB,
    limit_bytes=64 * GB,
    available_bytes=32 * GB,
    dirty_bytes=25 * GB,
    shm_bytes=32 * GB,
    open_files=1024,
    open_files_most=4096,
    file_bytes=None,
    locked_bytes=None,
    boot_id=True,
    machine_id=True,
    kernels="numba",
    kernel_problem="",
)
PLACE = PlaceFacts(
    path=Path("/c"),
    there=True,
    is_link=False,
    is_directory=True,
    probed=Path("/c"),
    refused=None,
    mount=Mount(Path("/"), "8:1", "ext4", frozenset({"rw"})),
    space=Space(1000 * GB, 500 * GB, 10**6),
    world_writable=False,
    left="",
    probes=dict.fromkeys(PROBES, ProbeOutcome(0.001)),
)
RUN = RunFacts(version=3, full_bytes=20 * GB, elements=10 * GB, delta_bytes=100_000_000, changed=10**8)
NEW = LocalFacts(seeded=False, foreign=False, files=0)


def levels(findings: Iterable[Finding]) -> dict[str, Level]:
    """Of what is not ok."""
    return {finding.check: finding.level for finding in findings if finding.level != "ok"}


def mounted(kind: str, *options: str) -> PlaceFacts:
    return replace(PLACE, mount=Mount(Path("/c"), "0:9", kind, frozenset(options)))


def probed(name: str, problem: str = "odd", measured: float = 0.0) -> PlaceFacts:
    return replace(PLACE, probes={**PLACE.probes, name: ProbeOutcome(measured, problem)})


def free(nbytes: int, kind: str = "ext4") -> PlaceFacts:
    return replace(mounted(kind), space=Space(1000 * GB, nbytes, None))


def test_good_facts_are_good() -> None:
    assert levels(judge_channel(PLACE, RUN, None)) == {}
    assert levels(judge_local(PLACE, NEW, RUN, MACHINE)) == {}
    assert levels(judge_machine(MACHINE, RUN, NEW)) == {}


def test_this_machine_is_judged() -> None:
    facts = observe_machine()
    assert 0 < facts.available_bytes <= facts.limit_bytes <= facts.memory_bytes
    assert facts.dirty_bytes > 0
    assert exit_code(judge_machine(facts, None, None)) == 0


@pytest.mark.parametrize(
    ("probe", "channel", "local"),
    [
        ("rename", {"rename": "failure"}, {"rename": "failure"}),
        ("readers", {"rename, seen": "warning"}, {}),
        ("exclusive", {"exclusive create": "failure"}, {"exclusive create": "note"}),
        ("lock", {"lock": "note"}, {"lock": "failure"}),
        ("map", {"mmap": "note"}, {"mmap": "failure"}),
        ("allocate", {}, {"allocation": "failure"}),
        ("visible", {"visibility": "failure"}, {"visibility": "failure"}),
    ],
)
def test_what_a_trial_means(probe: str, channel: dict[str, Level], local: dict[str, Level]) -> None:
    assert levels(judge_channel(probed(probe), RUN, None)) == channel
    assert levels(judge_local(probed(probe), NEW, RUN, MACHINE)) == local


def test_kinds_of_file_systems() -> None:
    assert levels(judge_channel(mounted("nfs4", "hard"), RUN, None)) == {}
    assert levels(judge_channel(mounted("nfs4", "soft"), RUN, None)) == {"file system": "warning"}
    assert levels(judge_channel(mounted("tmpfs"), RUN, None)) == {"file system": "warning"}
    assert levels(judge_local(mounted("fuse.s3fs"), NEW, RUN, MACHINE)) == {"file system": "warning"}
    assert levels(judge_local(mounted("overlay"), NEW, RUN, MACHINE)) == {"file system": "warning"}
    assert levels(judge_local(replace(PLACE, mount=None), NEW, RUN, MACHINE)) == {}


def test_clocks_and_delays() -> None:
    (found,) = (f for f in judge_channel(probed("clock", "", -7.25), RUN, None) if f.level != "ok")
    assert (found.check, found.level) == ("clock", "warning") and "7.2 s behind" in found.says
    assert levels(judge_channel(probed("visible", "", 1.5), RUN, None)) == {"delay": "note"}
    assert levels(judge_channel(probed("rename", "", 2.0), RUN, None)) == {"pace": "warning"}


def test_rights_depend_on_the_role() -> None:
    none = replace(
        PLACE, probed=None, refused=DiskError("/c: Read-only file system", remedy="mount it"), probes={}
    )
    reports = replace(PLACE, probed=Path("/c/hosts"))
    assert levels(judge_channel(none, RUN, "publisher")) == {"permissions": "failure"}
    assert levels(judge_channel(none, RUN, "subscriber")) == {"permissions": "note"}
    assert levels(judge_channel(none, RUN, None)) == {"permissions": "warning"}
    assert levels(judge_channel(reports, RUN, "subscriber")) == {}
    assert levels(judge_channel(reports, RUN, "publisher")) == {"permissions": "failure"}
    assert levels(judge_local(none, NEW, RUN, MACHINE)) == {"permissions": "failure"}


def test_space_of_a_channel() -> None:
    def judged(nbytes: int) -> dict[str, Level]:
        return levels(judge_channel(free(nbytes), RUN, None))

    assert judged(20 * GB) == {} and judged(20 * GB - 1) == {"space": "warning"}
    assert judged(100_000_000) == {"space": "failure"}
    assert levels(judge_channel(free(0), RUN, "subscriber")) == {}


def test_a_spare_counts_as_free(tmp_path: Path) -> None:
    assert observe_contents(tmp_path).spare_bytes == 0
    (tmp_path / ".weightcast").mkdir()
    (tmp_path / ".weightcast/spare").write_bytes(bytes(8192))
    assert observe_contents(tmp_path).spare_bytes == 8192


def test_space_of_a_local_checkpoint() -> None:
    step = step_bytes(RUN)
    assert RUN.delta_bytes is not None and RUN.changed is not None
    twice_as_large = 2 * (RUN.delta_bytes + JOURNAL_BYTES * RUN.changed)
    assert step == step_bytes(replace(RUN, delta_bytes=0, changed=0)) + twice_as_large
    seeded = replace(NEW, seeded=True, files=9)
    for inside, wanted in ((NEW, 20 * GB + step), (seeded, step)):
        assert levels(judge_local(free(wanted), inside, RUN, MACHINE)) == {}
        assert levels(judge_local(free(wanted - 1), inside, RUN, MACHINE)) == {"space": "failure"}
    assert levels(judge_local(free(step_bytes(None)), NEW, None, MACHINE)) == {}
    spare = replace(seeded, spare_bytes=step)
    assert levels(judge_local(free(0), spare, RUN, MACHINE)) == {}
    no_files = replace(PLACE, space=Space(GB, GB, 3))
    assert levels(judge_local(no_files, seeded, None, MACHINE)) == {"files": "failure"}


def test_weights_beyond_the_dirty_pages_that_may_wait() -> None:
    """Of a disk: memory has none to wait for. Unknown weights are not judged."""
    little = replace(MACHINE, dirty_bytes=20 * GB - 1)
    assert levels(judge_local(PLACE, NEW, RUN, little)) == {"dirty pages": "note"}
    assert levels(judge_local(PLACE, NEW, RUN, replace(MACHINE, dirty_bytes=20 * GB))) == {}
    assert levels(judge_local(PLACE, NEW, None, little)) == {}
    assert "dirty pages" not in levels(judge_local(mounted("tmpfs"), NEW, RUN, little))


def test_a_tmpfs_counts_as_memory() -> None:
    tight = replace(MACHINE, available_bytes=21 * GB, limit_bytes=2000 * GB)
    assert levels(judge_local(free(500 * GB, "tmpfs"), NEW, RUN, tight)) == {"memory": "failure"}
    roomy = replace(tight, available_bytes=30 * GB)
    assert levels(judge_local(free(500 * GB, "tmpfs"), NEW, RUN, roomy)) == {}
    small = replace(roomy, limit_bytes=64 * GB)
    assert levels(judge_local(free(500 * GB, "tmpfs"), NEW, RUN, small)) == {"memory": "warning"}


def test_kernels_that_are_not_compiled_yet_are_not_called_compiled() -> None:
    found = judge_machine(replace(MACHINE, kernels_kept=False), RUN, NEW)
    assert ["can be compiled" in one.says for one in found if one.check == "kernels"] == [True]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"kernels": "unusable", "kernel_problem": "no numba"}, {"kernels": "failure"}),
        ({"kernel_problem": "no directory"}, {"kernels": "warning"}),
        ({"available_bytes": 1 << 20}, {"memory": "failure"}),
        ({"shm_bytes": 64 << 20}, {"/dev/shm": "note"}),
        ({"shm_bytes": 0}, {"/dev/shm": "note"}),
        ({"open_files": 200}, {"open files": "failure"}),
        ({"file_bytes": GB}, {"file size": "warning"}),
        ({"boot_id": False}, {"boot id": "warning"}),
        ({"machine_id": False}, {"machine id": "note"}),
    ],
)
def test_machines(change: dict[str, Any], found: dict[str, Level]) -> None:
    assert levels(judge_machine(replace(MACHINE, **change), RUN, NEW)) == found


def test_many_weight_files_need_many_descriptors() -> None:
    many = replace(NEW, files=600)
    assert levels(judge_machine(MACHINE, RUN, many)) == {"open files": "failure"}


def test_foreign_and_unreadable_channels() -> None:
    foreign = RunFacts(foreign=True, version=4)
    assert levels(judge_channel(PLACE, foreign, None)) == {"run": "note"}
    assert exit_code(judge_channel(PLACE, foreign, "publisher")) == 3
    assert levels(judge_channel(PLACE, RunFacts(problem="torn"), None)) == {"run": "failure"}


def test_exit_codes() -> None:
    def failure(code: int) -> Finding:
        return Finding("p", "c", "failure", "bad", exit_code=code)

    assert exit_code([]) == exit_code([Finding("p", "c", "warning", "so so")]) == 0
    assert exit_code([failure(5)]) == 5
    assert exit_code([failure(5), failure(3)]) == 3
    assert exit_code([failure(3), failure(4), failure(5)]) == 4


def test_certificates_are_judged_by_dates_names_key_and_authority(doctor: Doctor, tmp_path: Path) -> None:
    ours, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    good, soon, old = (ours.issue(name, days=days) for name, days in (("good", 40), ("soon", 1), ("old", -1)))
    asked = doctor("--tls-cert", good, "--ca", ours.file)
    assert asked.code == 0 and "gates.example" in asked.finding("tls", "trust")["says"]
    assert doctor("--tls-cert", good, "--ca", stranger.file).bad() == {("tls", "trust")}
    assert doctor("--tls-cert", good, "--tls-key", soon).bad() == {("tls", "files")}
    assert doctor("--tls-cert", old).bad() == {("tls", "dates")}
    asked = doctor("--tls-cert", soon)
    assert asked.code == 0 and asked.finding("tls", "dates")["level"] == "warning"
    assert asked.finding("tls", "trust")["level"] == "warning"

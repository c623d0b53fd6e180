"""Rules over engines' records, and the host's report."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from channel_paths import Layout
from doubles import TRICKLES, Double, Trickle, serve
from hypothesis import given
from hypothesis import strategies as st

from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.reports import Report, Update, pack_report, parse_report, read_reports
from weightcast.shared.checkpoint.state.state import Blocked, EngineState, Mark
from weightcast.shared.daemon.fleet import REPORTS_PATH
from weightcast.shared.daemon.reporter import (
    CHANGE_SECONDS,
    EVERY_SECONDS,
    PHASE_SECONDS,
    InChannel,
    Reporter,
    ToPublisher,
    Undelivered,
    ahead_by,
)
from weightcast.shared.daemon.status import LoopStatus
from weightcast.subscriber.daemon.report import describe
from weightcast.subscriber.engines.base import EngineFacts, HeldWeights
from weightcast.subscriber.engines.rules import (
    MOST_BLOCKED,
    EngineResult,
    Observation,
    block,
    is_in_sync,
    may_relabel,
    needs_undo,
    retry_delay,
    rolls_back,
    without_served,
)
from weightcast.subscriber.engines.rules import ResultState as Came
from weightcast.subscriber.status import (
    EngineStatus,
    GateStatus,
    HostStatus,
    LastError,
    UpdateStatus,
    served,
    weakest,
)
from weightcast.subscriber.sync.host import known

SERVED = EngineState(Mark.SERVED, 7, "label", "p1")
FACTS = EngineFacts(reachable=True, label="7", process="p1")
states: st.SearchStrategy[Came] = st.sampled_from(("served", "refused", "suspect", "failed"))


def result(state: Came, attempts: int = 1) -> EngineResult:
    return EngineResult("e", state, 7, attempts=attempts)


@pytest.mark.parametrize(
    ("record", "facts", "steady", "aligned"),
    [
        (SERVED, FACTS, False, True),
        (None, FACTS, True, False),
        (replace(SERVED, version=6), FACTS, True, False),
        (replace(SERVED, mark=Mark.PAUSING), FACTS, True, False),
        (replace(SERVED, mark=Mark.SUSPECT), FACTS, True, False),
        (SERVED, replace(FACTS, process="p2"), True, False),
        (SERVED, replace(FACTS, label="default"), True, False),
        (SERVED, replace(FACTS, reachable=False), True, False),
        (SERVED, replace(FACTS, process=None), False, False),
        (SERVED, replace(FACTS, process=None), True, True),
        (replace(SERVED, process=None), FACTS, False, False),
        (replace(SERVED, confirmed_by="status-only"), replace(FACTS, label="x"), False, True),
        (SERVED, replace(FACTS, held=HeldWeights(7, "r")), False, True),
        (SERVED, replace(FACTS, held=HeldWeights(7, "another run's")), True, False),
        (SERVED, replace(FACTS, held=HeldWeights(6, "r")), True, False),
    ],
)
def test_who_is_aligned(record: EngineState | None, facts: EngineFacts, steady: bool, aligned: bool) -> None:
    assert is_in_sync(record, Observation(facts, steady), HeldWeights(7, "r")) is aligned


@pytest.mark.parametrize(
    ("record", "facts", "allowed"),
    [
        (SERVED, FACTS, True),
        (SERVED, replace(FACTS, held=HeldWeights(7, "r")), True),
        (SERVED, replace(FACTS, held=HeldWeights(7, "another run's")), False),
        (SERVED, replace(FACTS, process=None), False),
        (SERVED, replace(FACTS, process="p2"), False),
        (SERVED, replace(FACTS, label=None), False),
        (SERVED, replace(FACTS, label="8"), False),
        (SERVED, replace(FACTS, in_doubt=True), False),
        (replace(SERVED, version=6), replace(FACTS, label="6"), False),
        (replace(SERVED, mark=Mark.SUSPECT), FACTS, False),
    ],
)
def test_who_gets_a_new_label(record: EngineState, facts: EngineFacts, allowed: bool) -> None:
    assert may_relabel(record, Observation(facts, steady=True), HeldWeights(7, "r")) is allowed


@given(st.lists(states, max_size=4), st.integers(0, 1), st.integers(0, 5))
def test_going_back_needs_the_way_back(came: list[Came], attempts: int, failures: int) -> None:
    results = [result(state, attempts) for state in came]
    if rolls_back(results, failures):
        assert needs_undo(results) and attempts > 0


def test_going_back_at_once_and_later() -> None:
    assert rolls_back([result("refused"), result("refused")], 1)
    assert not rolls_back([result("refused"), result("failed")], 2)
    assert rolls_back([result("refused"), result("failed")], 3)
    assert not rolls_back([result("refused", attempts=0), result("failed", attempts=0)], 9)
    assert not rolls_back([], 9)


def test_unaligned_keeps_what_may_be_paused() -> None:
    records = {"a": SERVED, "b": EngineState(Mark.PAUSING), "c": EngineState(Mark.SUSPECT)}
    assert set(without_served(records)) == {"b", "c"}


@given(st.lists(st.integers(0, 100), max_size=200))
def test_the_list_of_refused_versions_is_bounded(versions: list[int]) -> None:
    blocked: tuple[Blocked, ...] = ()
    for version in versions:
        blocked = block(blocked, Blocked(version, f"d{version}", ""))
        assert blocked[-1].version == version
    assert len(blocked) <= MOST_BLOCKED + 1
    assert len({one.digest for one in blocked}) == len(blocked)


def test_refused_versions_are_tried_ever_more_rarely() -> None:
    delays = [retry_delay(attempts) for attempts in range(1, 100)]
    assert delays[:3] == [60.0, 240.0, 960.0] and delays == sorted(delays) and delays[-1] == 6 * 3600


def engine(mark: str, version: int | None, confirmed_by: str = "label") -> EngineStatus:
    facts: Any = {
        "name": "e",
        "kind": "sglang",
        "url": "u",
        "mark": mark,
        "version": version,
        "confirmed_by": confirmed_by,
        "process": None,
        "aligned": True,
        "reachable": True,
        "reason": "",
    }
    return EngineStatus(**facts)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EROFS, "mount the file system read-write"),
        (errno.EACCES, "check owner, mode and mount options"),
        (errno.ENOSPC, "free space"),
        (errno.EIO, "check the disk or its server"),
    ],
)
def test_what_a_file_system_says_has_its_remedy(number: int, remedy: str) -> None:
    error = known(OSError(number, "by design", "/data/policy"))
    assert error.message == "/data/policy: by design" and remedy in error.remedy


def test_served_is_the_lowest_that_is_sure() -> None:
    assert served([], 4) == 4
    assert served([engine("served", 7), engine("served", 6)], 7) == 6
    assert served([engine("served", 7), engine("suspect", 7)], 7) is None
    assert weakest(["digest", "status-only", "label"]) == "status-only" and weakest([]) == ""


STATUS = HostStatus(
    software="weightcast 0", host="h", channel="/c", local="/l", target="latest", run_id="r", local_version=3
)


def channel(directory: Path) -> Path:
    Layout(directory).channel_json.touch()
    return directory


def in_channel(directory: Path, clock: Callable[[], float] = lambda: 0.0) -> Reporter:
    return Reporter(InChannel(directory), clock=clock)


def test_an_engine_that_served_and_is_silent_is_the_host_s_error() -> None:
    silent = engine("served", 3).but(state="silent", reason="http://e does not answer")
    said = describe(STATUS.but(engines=(silent,)))
    assert said.last_error == f"engine {silent.name} does not serve: http://e does not answer" and said.remedy
    assert describe(STATUS.but(engines=(silent.but(version=None),))).last_error == "", "it starts"


def test_reports_are_written_on_change_and_when_time_is_up(tmp_path: Path) -> None:
    now = [0.0]
    reporter = in_channel(channel(tmp_path), lambda: now[0])
    reporter.report(describe(STATUS))
    [first] = read_reports(open_store(tmp_path))
    changed = STATUS.but(local_version=4)
    reporter.report(describe(changed))
    assert read_reports(open_store(tmp_path)) == [first], "not more often than once a second"
    now[0] += CHANGE_SECONDS
    reporter.report(describe(STATUS))
    assert read_reports(open_store(tmp_path)) == [first], "nothing changed"
    reporter.report(describe(changed))
    [second] = read_reports(open_store(tmp_path))
    assert (second.local_version, second.counter) == (4, first.counter + 1)
    assert (first.clock_offset, second.clock_offset) == (None, 0.0)
    now[0] += CHANGE_SECONDS
    fetching = changed.but(state="fetching", ready=True)
    ready = changed.but(ready=True)
    reporter.report(describe(ready))
    now[0] += CHANGE_SECONDS
    reporter.report(describe(fetching))
    [third] = read_reports(open_store(tmp_path))
    assert (third.state, third.phase) == ("ready", "starting"), "a phase that may pass in a moment"
    now[0] += PHASE_SECONDS
    reporter.report(describe(fetching))
    [fourth] = read_reports(open_store(tmp_path))
    assert (fourth.state, fourth.phase) == ("ready", "fetching")
    now[0] += 2 * EVERY_SECONDS
    reporter.report(describe(fetching))
    [fifth] = read_reports(open_store(tmp_path))
    assert fifth == replace(fourth, counter=fourth.counter + 1)
    reporter.last(describe(fetching))
    assert read_reports(open_store(tmp_path))[0].counter == fifth.counter + 1


def test_requests_at_the_gate_are_reported_but_no_reason_to_report(tmp_path: Path) -> None:
    now = [0.0]
    reporter = in_channel(channel(tmp_path), lambda: now[0])

    def with_gate(answered: int, version: int | None) -> Report:
        gate = GateStatus(
            port=1, version=version, requests={"a": 2, "b": 1}, waiting=4,
            outcomes={"answered": answered}, tokens={"3": 10 * answered},
        )  # fmt: skip
        return describe(STATUS.but(gate=gate))

    reporter.report(with_gate(1, None))
    [first] = read_reports(open_store(tmp_path))
    assert first.requests == {"under_way": 3, "waiting": 4, "closed": 1, "answered": 1}
    now[0] += PHASE_SECONDS + CHANGE_SECONDS
    reporter.report(with_gate(2, 3))
    assert read_reports(open_store(tmp_path)) == [first]
    now[0] += 2 * EVERY_SECONDS
    reporter.report(with_gate(3, 3))
    [second] = read_reports(open_store(tmp_path))
    assert (second.requests["answered"], second.requests["closed"], second.tokens) == (3, 0, {"3": 30})


def test_a_report_that_cannot_be_written_is_told_and_tried_again_less_and_less_often(tmp_path: Path) -> None:
    now = [0.0]
    Layout(channel(tmp_path)).hosts_dir.write_text("in the way")
    reporter = in_channel(tmp_path, lambda: now[0])
    reporter.report(describe(STATUS))
    assert "no report of this host can be written" in reporter.error and "--report-to" in reporter.error
    Layout(tmp_path).hosts_dir.unlink()
    reporter.report(describe(STATUS))
    assert reporter.error != ""
    now[0] += 2 * CHANGE_SECONDS
    reporter.report(describe(STATUS))
    assert reporter.error == "" and len(read_reports(open_store(tmp_path))) == 1


@pytest.mark.parametrize("act", TRICKLES.values(), ids=TRICKLES)
def test_a_publisher_whose_answer_never_ends_is_given_up(act: Trickle) -> None:
    publisher = Double()
    publisher.script(REPORTS_PATH, act)
    with (
        serve(publisher) as url,
        closing(ToPublisher(url, None, seconds=0.2)) as endpoint,
        pytest.raises(Undelivered, match="incomplete after"),
    ):
        endpoint.deliver(describe(STATUS))


def test_a_host_that_is_not_seeded_is_heard_of_and_nothing_is_made_without_a_channel(tmp_path: Path) -> None:
    in_channel(tmp_path / "gone").report(describe(STATUS))
    in_channel(tmp_path).report(describe(STATUS))
    assert list(tmp_path.iterdir()) == [], "where nothing is mounted"
    in_channel(channel(tmp_path)).report(describe(STATUS.but(run_id=None)))
    [found] = read_reports(open_store(tmp_path))
    assert found.run_id == ""


def test_what_a_host_says_of_itself() -> None:
    failure = LastError(error="RetryLater", message="no space", remedy="free some", at=5.0)
    move = UpdateStatus(
        kind="patch", from_version=2, version=3, folded=1, bytes=700, changes=9,
        seconds={"fetch": 0.25, "total": 1.5}, pause_seconds=None, at=100.0,
    )  # fmt: skip
    status = STATUS.but(
        engines=(engine("served", 3),),
        last_error=failure,
        updates=(move.but(kind="undo"), move),
        loop=LoopStatus(retries=4),
        bytes_by_cause={"step": 700, "skip": 0},
        target_version=5,
    )
    report = parse_report(pack_report(describe(status)), "r")
    assert (report.last_error, report.remedy, report.retries) == ("RetryLater: no space", "free some", 4)
    assert (report.bytes, report.target_version, report.phase) == ({"step": 700, "skip": 0}, 5, "starting")
    newest, before = report.updates
    assert newest == Update(3, "patch", 98.5, {"fetch": 0.25, "total": 1.5}, 700, "done")
    assert (before.kind, before.outcome) == ("undo", "refused")
    assert report.engines[0]["version"] == 3 and "state" in report.engines[0]


@pytest.mark.parametrize(("there", "ahead"), [(10.0, 0.0), (9.97, 0.0), (7.0, 3.0), (15.0, -4.0)])
def test_clock_offset(there: float, ahead: float) -> None:
    assert ahead_by(10.0, 11.0, there) == ahead

"""What the page shows of versions: what catching up costs, what pruning would do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from channel_paths import Layout
from publisher_cases import Place

from weightcast.publisher.fleet.report_intake import (
    BURST,
    PER_HOST_SECONDS,
    SILENT_SECONDS,
    WAITING_BYTES,
    ReportIntake,
    TooMany,
)
from weightcast.publisher.fleet.versions import (
    History,
    VersionHistory,
    catch_up,
    prune_plan,
    steps,
    version_rows,
)
from weightcast.publisher.maintenance.retention import CheapestWay, Hop, Retention, Situation
from weightcast.shared.base.errors import Refused, RetryLater, WrongRun
from weightcast.shared.channel.channel import Shown
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.layout import write_pointer
from weightcast.shared.channel.reports import REPORTS_LIMIT, Report, Update, pack_report, read_reports
from weightcast.shared.daemon.fleet import Host


def held(nbytes: int = 10, skips: dict[int, int] | None = None, anchor: int | None = None) -> Shown:
    return Shown(nbytes, skips or {}, anchor)


def host(**facts: Any) -> Host:
    known: dict[str, Any] = {
        "key": "k", "host": "h", "local": "/l", "run_id": "run", "presence": "live", "heard_seconds_ago": 0.0,
        "state": "ready", "ready": True, "standing": "ready", "phase": "idle", "local_version": 5,
        "served_version": 5, "target": "latest", "target_version": 5, "lag": 0, "last_error": "",
        "remedy": "", "retries": 0, "bytes": {}, "engines": (), "software": "s",
        "clock_offset_seconds": None, "updates": (),
    }  # fmt: skip
    return Host.model_validate(known | facts)


def patch(nbytes: int, **seconds: float) -> dict[str, Any]:
    return {
        "version": 1,
        "kind": "patch",
        "began": 0.0,
        "seconds": seconds,
        "bytes": nbytes,
        "outcome": "done",
    }


def test_steps_in_words() -> None:
    hops = (Hop(4, None), Hop(8, 4), Hop(9, 8), Hop(10, 9), Hop(12, 10), Hop(13, 12))
    assert steps(CheapestWay(0, hops)) == (
        "anchor 4",
        "delta 4 to 8",
        "steps 9 to 10",
        "delta 10 to 12",
        "step 13",
    )
    assert steps(CheapestWay(0, ())) == ()


def test_the_way_of_the_fewest_bytes_for_every_lag() -> None:
    versions = {version: held() for version in range(1, 7)}
    versions[4] = held(skips={0: 15}, anchor=100)
    page = History(6, versions, {})
    cost = catch_up(page, [host(lag=3), host(lag=None), host(lag=-1), host(lag=60)])
    assert [(row.lag, row.bytes, row.steps) for row in cost.rows] == [
        (1, 10, ("step 6",)),
        (2, 20, ("steps 5 to 6",)),
        (3, 30, ("steps 4 to 6",)),
        (4, 40, ("steps 3 to 6",)),
    ], "6 is no power of two, and no host is so far behind; 60 is before the channel"
    assert (cost.joiner.bytes, cost.joiner.steps) == (35, ("delta 0 to 4", "steps 5 to 6"))
    assert cost.joiner.without_base is not None and cost.joiner.without_base.bytes == 120
    assert cost.rows[0].seconds is None and cost.joiner.seconds is None, "nobody said how quick hosts are"


def test_how_long_it_takes_is_what_hosts_took() -> None:
    page = History(2, {1: held(1000), 2: held(1000)}, {})
    updates = (
        patch(1000, fetch=1.0, stage=0.5, reload=3.0, total=4.5),
        patch(3000, fetch=2.0, patch=0.5, pause=0.5, reload=0.5),
        {**patch(9, fetch=900.0), "kind": "seed"},
    )
    rows = catch_up(page, [host(updates=updates)]).rows
    assert [row.seconds for row in rows] == [pytest.approx(1.0 + 2.0), pytest.approx(2.0 + 2.0)]


def test_nothing_is_published() -> None:
    assert catch_up(History(), []).rows == () and catch_up(History(), []).joiner.steps == ()
    assert version_rows(History(complete=True), {}, ()).versions == ()
    plan = prune_plan(Situation(0, {}, 0.0), Retention(keep_versions=1))
    assert (plan.why_not, plan.keep) == ("nothing is published", ())


def test_why_versions_stay_and_go() -> None:
    versions = {version: held() for version in range(1, 11)}
    versions[6] = held(anchor=50)
    plan = prune_plan(Situation(10, versions, 0.0, wanted=(3,)), Retention(keep_versions=3))
    assert plan.horizon == 6
    whys = {one.version: one.why for one in plan.keep}
    assert {one.version for one in plan.remove} | set(whys) == set(range(1, 11))
    assert whys[3] == "kept by name or tagged" and whys[2].startswith("on the way")
    assert "full weights of version 6" in whys[7] and "from version 8 on" in whys[10]
    assert [one.version for one in plan.remove] == [4, 5]
    assert next(one.bytes for one in plan.keep if one.version == 6) == 60
    unbound = prune_plan(Situation(10, versions, 0.0), Retention())
    assert len(unbound.keep) == 10 and unbound.keep[0].why == "no bound is set" == unbound.why_not


@pytest.mark.timeout(60)
def test_a_long_chain_costs_little() -> None:
    """It takes a few milliseconds; with the square of its length it would not come to its end."""
    versions = {version: held() for version in range(1, 10_001)}
    [row] = [row for row in catch_up(History(10_000, versions, {}), []).rows if row.lag == 1 << 13]
    assert row.steps == (f"steps {10_001 - (1 << 13)} to 10000",)


def test_the_ledger_reads_every_index_once_and_sees_what_is_pruned(place: Place) -> None:
    now = [0.0]
    ledger = VersionHistory(open_store(place.channel), lambda: now[0])
    assert ledger.read(look_around=True) == History(complete=True)
    with place.publisher() as publisher:
        for _ in range(3):
            publisher.publish_checkpoint(place.new(place.model))
        page = ledger.read(look_around=False)
        assert page.pointer == 3 and page.complete and set(page.facts) == {1, 2, 3}
        first = page.facts[1]
        publisher.write_anchor()
    shutil.rmtree(place.channel / "weight_v000001")
    now[0] += 1
    again = ledger.read(look_around=False)
    assert (again.facts or {})[1] is first, "nobody watches"
    now[0] += 60
    page = ledger.read(look_around=True)
    assert set(page.facts) == {2, 3}
    created = page.facts[3].created

    def update(kind: str, at: float, outcome: str = "done") -> Update:
        return Update(3, kind, created + at, {"total": 1.0, "reload": 2.0, "pause_total": at}, 0, outcome)

    # the second host's engine took it late, the third's not at all; only the first confirmation counts
    hosts = [
        host(updates=(update("reload", 90.0), update("patch", 4.0))),
        host(updates=(update("reload", 9.0), update("patch", 1.0, "refused"))),
        host(updates=(update("patch", 1.0, "refused"),)),
        host(updates=(update("patch", 8.0),), clock_offset_seconds=2.0),
    ]
    rows = version_rows(page, {3: 1.5}, hosts).versions
    assert [(row.version, row.anchor, row.publish_seconds) for row in rows] == [
        (3, True, 1.5),
        (2, False, None),
    ]
    assert (rows[0].served_seconds, rows[0].pause_seconds) == (pytest.approx(7.0, abs=1e-3), 9.0)
    assert (rows[1].served_seconds, rows[1].pause_seconds) == (None, None)


def test_what_is_made_beside_the_newest_versions_is_seen_though_nobody_watches(place: Place) -> None:
    now = [0.0]
    ledger = VersionHistory(open_store(place.channel), lambda: now[0])

    def shown() -> dict[int, bool]:
        now[0] += 60
        rows = version_rows(ledger.read(look_around=False), {}, ()).versions
        return {row.version: row.anchor for row in rows}

    with place.publisher() as publisher:
        for _ in range(20):
            publisher.publish_checkpoint(place.new(place.model))
        assert shown() == dict.fromkeys(range(20, 0, -1), False)
        publisher.write_anchor()
        assert [version for version, anchor in shown().items() if anchor] == [20]
        publisher.publish_checkpoint(place.new(place.model))
        shutil.rmtree(place.channel / "weight_v000001")
        shutil.rmtree(place.channel / "weight_v000018")
        left = shown()
    assert [version for version, anchor in left.items() if anchor] == [20]
    assert set(left) == set(range(1, 22)) - {18}, "the older ones are looked at while somebody watches"


def test_a_ledger_that_nobody_watches_forgets_what_is_pruned(place: Place) -> None:
    ledger = VersionHistory(open_store(place.channel), lambda: 0.0)
    with place.publisher() as publisher:
        publisher.publish_checkpoint(place.new(place.model))
    assert ledger.read(look_around=False).pointer == 1
    versions = [place.channel / f"weight_v{number:06d}" for number in range(1, 71)]
    for directory in versions[1:]:
        shutil.copytree(versions[0], directory)
    write_pointer(open_store(place.channel), 70)
    assert len(ledger.read(look_around=False).versions or {}) == 70
    for directory in versions[:60]:
        shutil.rmtree(directory)
    assert set(ledger.read(look_around=False).versions or {}) == set(range(61, 71))


def test_a_channel_that_is_made_after_the_first_look(place: Place, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    ledger = VersionHistory(open_store(tmp_path / "made"))
    assert ledger.read(look_around=True).pointer == 0
    place.publish(place.model)
    shutil.copytree(place.channel, tmp_path / "made", dirs_exist_ok=True)
    assert ledger.read(look_around=True).pointer == 1


def test_a_channel_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RetryLater):
        VersionHistory(open_store(tmp_path / "none")).read(look_around=True)


def report(host: str, counter: int = 1) -> bytes:
    return pack_report(Report(host, "/l", "run", "idle", 1, None, "latest", 0, "", (), counter, "weightcast"))


def taking(report_intake: ReportIntake) -> Callable[[bytes], bool]:
    def take(data: bytes) -> bool:
        try:
            report_intake.take(data, "run")
        except TooMany:
            return False
        return True

    return take


def test_posted_reports_are_bounded_and_written_once(tmp_path: Path) -> None:
    now = [0.0]
    report_intake = ReportIntake(open_store(tmp_path), lambda: now[0])
    take = taking(report_intake)
    assert take(report("a")) and take(report("b"))
    assert not take(report("a", 2)), "too soon"
    now[0] += PER_HOST_SECONDS
    assert take(report("a", 3))
    report_intake.write()
    assert [(one.host, one.counter) for one in read_reports(open_store(tmp_path))] == [("a", 3), ("b", 1)]
    for path in (tmp_path / "hosts").iterdir():
        path.unlink()
    report_intake.write()
    assert read_reports(open_store(tmp_path)) == []
    with pytest.raises(WrongRun):
        report_intake.take(report("c"), "another")
    now[0] += 3600
    assert sum(take(report(f"h{number}")) for number in range(BURST + 5)) == BURST


def test_hosts_that_are_long_silent_make_room_for_new_ones(tmp_path: Path) -> None:
    now = [0.0]
    report_intake = ReportIntake(open_store(tmp_path), lambda: now[0])
    for number in range(REPORTS_LIMIT):
        now[0] += 1.0
        report_intake.take(report(f"pod{number}"), None)
    # the first one still reports
    report_intake.take(report("pod0", 2), None)
    with pytest.raises(Refused, match="more than 4096 hosts"):
        report_intake.take(report("new"), None)
    now[0] += SILENT_SECONDS - REPORTS_LIMIT + 3.5
    for host in ("new", "newer"):
        report_intake.take(report(host), None)
    with pytest.raises(Refused, match="more than 4096 hosts"):
        report_intake.take(report("newest"), None)
    with pytest.raises(TooMany):
        report_intake.take(report("newer", 2), None)


def test_what_waits_to_be_written_is_bounded(tmp_path: Path) -> None:
    report_intake = ReportIntake(open_store(tmp_path), lambda: 0.0)
    take = taking(report_intake)
    engine = {"name": "x" * 1000}
    known = Report("h", "/l", "run", "idle", 1, None, "latest", 0, "", (engine,) * 60, 1, "weightcast")
    size = len(pack_report(known))
    tried = WAITING_BYTES // size + 20
    assert sum(take(pack_report(replace(known, host=f"h{number:04d}"))) for number in range(tried)) in range(
        tried - 21, tried - 10
    )
    report_intake.write()
    assert take(report("again"))


def test_what_cannot_be_written_is_kept(tmp_path: Path) -> None:
    report_intake = ReportIntake(open_store(tmp_path), lambda: 0.0)
    report_intake.take(report("a"), None)
    (tmp_path / "hosts").write_text("in the way")
    for _ in range(3):
        report_intake.write()
        assert "hosts" in report_intake.problem
    (tmp_path / "hosts").unlink()
    report_intake.write()
    assert [one.host for one in read_reports(open_store(tmp_path))] == ["a"] and report_intake.problem == ""


def test_what_cannot_be_written_is_tried_after_the_others(tmp_path: Path) -> None:
    report_intake, layout = ReportIntake(open_store(tmp_path), lambda: 0.0), Layout(tmp_path)
    bad = [f"bad{number}" for number in range(40)]
    for host in (*bad, "good"):
        report_intake.take(report(host), None)
    for host in bad:
        layout.report(host, "/l").mkdir(parents=True)
    for _ in range(3):
        report_intake.write()
    assert [one.host for one in read_reports(open_store(tmp_path))] == ["good"]
    assert report_intake.problem.startswith("bad") and report_intake.problem.endswith("and 23 more")
    for host in bad:
        layout.report(host, "/l").rmdir()
    report_intake.write()
    assert len(read_reports(open_store(tmp_path))) == 41 and report_intake.problem == ""

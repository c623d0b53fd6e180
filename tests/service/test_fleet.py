"""The fleet from its reports: presence, standing, lag; what the commands print."""

from __future__ import annotations

import io
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from channel_paths import Layout
from hypothesis import given
from hypothesis import strategies as st
from in_process import Command
from rich.console import Console

from weightcast.shared.base.errors import RetryLater
from weightcast.shared.channel.claims import Claimant, ClaimRecord, this_process, write_claim
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.reports import (
    WHOLE_BYTES,
    AdapterReport,
    ChannelClock,
    Heard,
    Report,
    Silence,
    StoredReport,
    Update,
    pack_report,
    write_report,
)
from weightcast.shared.channel.run_files import ChannelFile, write_channel_file
from weightcast.shared.cli.fleet import MOST, table
from weightcast.shared.daemon.fleet import (
    PAGE_BYTES,
    Bounds,
    Fleet,
    FleetReader,
    Host,
    RunHead,
    lag_of,
    presence_of,
    standing_of,
)

REPORT = Report("a", "/l", "run", "ready", 3, 3, "latest", 0, "", (), 1, "weightcast 0", phase="idle")


@pytest.fixture
def channel(tmp_path: Path) -> Path:
    layout = Layout(tmp_path / "channel")
    layout.channel.mkdir()
    layout.channel_json.write_bytes(write_channel_file(ChannelFile("run", 0.0)))
    layout.latest.write_text("000005")
    return layout.channel


def age(channel: Path, report: Report, seconds: float) -> None:
    path = Layout(channel).report(report.host, report.local)
    at = path.stat().st_mtime - seconds
    os.utime(path, (at, at))


def test_presence_is_judged_by_the_readers_clock(channel: Path) -> None:
    now = [0.0]
    reader = FleetReader(
        open_store(channel), Bounds(stale_seconds=10, lost_seconds=20), lambda: now[0], lambda: 99.0
    )
    write_report(open_store(channel), REPORT)
    assert [host.presence for host in reader.read().hosts] == ["live"]
    for passed, presence in ((9.0, "live"), (10.0, "stale"), (19.0, "stale"), (20.0, "lost")):
        now[0] = passed
        # the host's own times say nothing
        [host] = reader.read().hosts
        assert (host.presence, host.heard_seconds_ago) == (presence, pytest.approx(passed, abs=0.5))
    write_report(open_store(channel), replace(REPORT, counter=2))
    [host] = reader.read().hosts
    assert (host.presence, host.heard_seconds_ago) == ("live", 0.0)
    Layout(channel).report("a", "/l").unlink()
    assert reader.read().hosts == ()


def test_who_was_silent_before_the_first_look_is_known_by_the_files(channel: Path) -> None:
    write_report(open_store(channel), REPORT)
    write_report(open_store(channel), replace(REPORT, host="gone"))
    age(channel, replace(REPORT, host="gone"), 1000.0)
    fleet = FleetReader(open_store(channel), clock=lambda: 0.0).read()
    assert [(host.host, host.presence) for host in fleet.hosts] == [("a", "live"), ("gone", "lost")]


def test_only_what_was_replaced_is_read_again(channel: Path) -> None:
    reader = FleetReader(open_store(channel))
    write_report(open_store(channel), REPORT)
    write_report(open_store(channel), replace(REPORT, host="b"))
    first = reader.read().hosts
    write_report(open_store(channel), replace(REPORT, host="b", local_version=9))
    second = reader.read().hosts
    assert second[0].engines is first[0].engines and second[1].local_version == 9
    (Layout(channel).hosts_dir / "c-00000000.json").write_bytes(b"{")
    assert [host.host for host in reader.read().hosts] == ["a", "b"]


def host(**facts: Any) -> Host:
    known = {
        "key": "k", "host": "h", "local": "/l", "run_id": "run", "presence": "live", "heard_seconds_ago": 0.0,
        "state": "ready", "ready": True, "standing": "ready", "phase": "idle", "local_version": 5,
        "served_version": 5, "target": "latest", "target_version": 5, "lag": 0, "last_error": "",
        "remedy": "", "retries": 0, "bytes": {}, "engines": (), "software": "s",
        "clock_offset_seconds": None, "updates": (),
    }  # fmt: skip
    return Host.model_validate(known | facts)


RUN = RunHead("run", 5)
FAILED = {"name": "e", "kind": "vllm", "state": "failed", "version": None, "confirmed_by": ""}
SILENT = FAILED | {"state": "silent"}


@pytest.mark.parametrize(
    ("facts", "standing", "lag"),
    [
        ({}, "ready", 0),
        ({"served_version": 3}, "behind", 2),
        ({"served_version": 3, "target": "3"}, "ready", 0),
        ({"served_version": None, "ready": False}, "behind", None),
        ({"ready": False}, "behind", 0),
        ({"last_error": "E: m"}, "ready", 0),
        ({"last_error": "E: m", "ready": False}, "failed", 0),
        ({"last_error": "EngineLoads: m", "ready": False, "state": "starting"}, "behind", 0),
        ({"engines": (FAILED,)}, "failed", 0),
        ({"engines": (SILENT,), "ready": False}, "behind", 0),
        ({"run_id": "another"}, "failed", 0),
        ({"run_id": "", "served_version": None, "ready": False}, "behind", None),
        ({"state": "stopped", "ready": False, "last_error": "E: m", "engines": (FAILED,)}, "stopped", 0),
    ],
)
def test_where_a_host_stands(facts: dict[str, Any], standing: str, lag: int | None) -> None:
    assert standing_of(host(**facts), "live", RUN) == standing
    assert lag_of(host(**facts), RUN) == lag
    assert standing_of(host(**facts), "lost", RUN) == ("stopped" if standing == "stopped" else "lost")


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1e6), st.booleans()), max_size=20))
def test_a_report_is_never_older_than_the_reader(steps: list[tuple[int, float, bool]]) -> None:
    """Whatever counters and times do, what changed was heard since the last look."""
    now = 0.0
    heard = Heard(lambda: now)
    counter = 0
    for _, written, changes in steps:
        counter += changes
        now += 1.0
        silence = heard.silences([StoredReport("a", replace(REPORT, counter=counter), written)], now)["a"]
        assert silence.exact and 0 <= silence.seconds <= now
        assert not changes or silence.seconds <= 1.0


def test_the_counts_are_those_of_the_hosts(channel: Path) -> None:
    write_report(open_store(channel), replace(REPORT, served_version=5))
    write_report(open_store(channel), replace(REPORT, host="b"))
    write_report(open_store(channel), replace(REPORT, host="c", state="fetching", served_version=None))
    write_report(open_store(channel), replace(REPORT, host="d", state="waiting", last_error="E: m"))
    fleet = FleetReader(open_store(channel)).read()
    assert fleet.counts.model_dump() == {
        "ready": 1,
        "behind": 2,
        "stale": 0,
        "lost": 0,
        "failed": 1,
        "stopped": 0,
    }
    assert [(row.lag, row.hosts) for row in fleet.lag] == [(0, 1), (2, 2)]
    assert Fleet.model_validate_json(fleet.model_dump_json()) == fleet


def test_hosts_in_a_channel_without_channel_json(tmp_path: Path) -> None:
    with pytest.raises(RetryLater, match="not a directory"):
        FleetReader(open_store(tmp_path / "none")).read()
    (tmp_path / "latest").write_text("000002")
    write_report(open_store(tmp_path), replace(REPORT, run_id="foreign-1", served_version=2))
    fleet = FleetReader(open_store(tmp_path)).read()
    assert (fleet.run_id, fleet.latest, fleet.counts.ready) == (None, 2, 1)


def long_report(host: str) -> Report:
    """As long as a report may be, all of it members that are shown."""
    texts = dict.fromkeys(("name", "kind", "state", "confirmed_by"), "x" * 220)
    return replace(REPORT, host=host, engines=(texts,) * 60, last_error="e" * 4000)


def test_a_fleet_of_long_reports_is_bounded(channel: Path) -> None:
    """Hosts that say as much as a host does are shown as ever."""
    updates = tuple(Update(n, "patch", 1.0, {"fetch": 0.5, "total": 1.0}, 9, "done") for n in range(20))
    engine = {"name": "a", "kind": "vllm", "state": "serving", "version": 3, "confirmed_by": "label"}
    mine = replace(REPORT, host="mine", engines=(engine,), updates=updates)
    write_report(open_store(channel), mine)
    longest = len(pack_report(long_report("a0000")))
    assert longest > 55_000
    for number in range(WHOLE_BYTES // longest + 60):
        write_report(open_store(channel), long_report(f"a{number:04d}"))
    fleet = FleetReader(open_store(channel)).read()
    *others, last = fleet.hosts
    assert last.host == "mine" and len(last.updates) == 20 and last.engines[0].confirmed_by == "label"
    assert {host.last_error for host in others} == {"e" * 256}, "of equal lengths none is preferred"
    assert max(len(host.model_dump_json()) for host in others) < 10_000
    page = json.loads(fleet.page())["hosts"]
    assert len(page) == len(fleet.hosts)
    assert page[-1] == {**json.loads(last.model_dump_json()), "updates": []}


def test_the_page_of_a_fleet_has_an_end(channel: Path) -> None:
    host = FleetReader(open_store(channel)).read
    write_report(open_store(channel), long_report("long"))
    write_report(open_store(channel), replace(REPORT, host="short"))
    fleet = host()
    long, short = fleet.hosts
    many = fleet.model_copy(update={"hosts": (*[long] * 3000, *[short] * 1000)})
    body = many.page()
    assert len(body) < 1.1 * PAGE_BYTES
    page = json.loads(body)["hosts"]
    assert [len(page), page[0]["engines"], page[0]["standing"]] == [4000, [], long.standing]
    assert page[-1] == {**json.loads(short.model_dump_json()), "updates": []}


def test_the_table_has_the_worst_first_and_no_control_characters(channel: Path, weightcast: Command) -> None:
    write_report(open_store(channel), replace(REPORT, served_version=5))
    write_report(
        open_store(channel),
        replace(REPORT, host="bad", state="waiting", last_error="E: no space", remedy="free it"),
    )
    path = Layout(channel).report("bad", "/l")
    path.write_bytes(path.read_bytes().replace(b'"bad"', b'"b\\u2028d"'))
    code, out, _ = weightcast("fleet", "--channel", channel)
    lines = out.splitlines()
    assert code == 0 and lines[0].endswith(" (1 without an engine); b\\u2028d: E: no space")
    assert lines[1].endswith("2 hosts: 1 up to date, 1 failed") and lines[2].split()[:3] == [
        "host",
        "doing",
        "served",
    ]
    assert lines[3].startswith("b\\u2028d") and lines[6].startswith("a")
    assert [line.strip() for line in lines[4:6]] == ["E: no space", "free it"]
    code, out, _ = weightcast("fleet", "--channel", channel, "--json")
    assert [host["host"] for host in json.loads(out)["hosts"]] == ["a", "b\u2028d"]


def test_a_ready_host_that_lacks_an_adapter_is_named(channel: Path, weightcast: Command) -> None:
    lacks = AdapterReport("adapter/wide", None, 1, None, "failed")
    trouble = {"last_error": "adapter wide: has rank 32", "remedy": "restart it"}
    serves = replace(REPORT, state="ready", served_version=5, adapters=(lacks,), **trouble)
    write_report(open_store(channel), serves)
    code, out, _ = weightcast("fleet", "--channel", channel)
    said = "1 of 1 host serves version 5 (1 without an engine); a: adapter wide: has rank 32"
    assert code == 0 and out.startswith(said)
    assert "    restart it" in out.splitlines()


def test_a_long_error_does_not_push_out_its_remedy(channel: Path, weightcast: Command) -> None:
    long = replace(REPORT, host="bad", state="waiting", last_error="E: " + "e" * 400, remedy="free it")
    write_report(open_store(channel), long)
    _, out, _ = weightcast("fleet", "--channel", channel)
    assert "ee...\n" in out and "    free it" in out.splitlines()


def test_the_worst_fifty_are_enough_unless_all_are_wanted(channel: Path, weightcast: Command) -> None:
    for number in range(MOST + 1):
        write_report(open_store(channel), replace(REPORT, host=f"host-{number:02}", served_version=5))
    write_report(open_store(channel), replace(REPORT, host="late"))
    code, out, _ = weightcast("fleet", "--channel", channel)
    assert code == 0 and "late" in out.splitlines()[3] and out.splitlines()[-1].startswith("and 2 more")
    code, out, _ = weightcast("fleet", "--channel", channel, "--all")
    assert code == 0 and f"host-{MOST}" in out and "more" not in out


def test_hosts_of_one_machine_are_told_apart(channel: Path, weightcast: Command) -> None:
    write_report(open_store(channel), replace(REPORT, local="/data/a", served_version=5))
    write_report(open_store(channel), replace(REPORT, local="/data/b", served_version=4))
    write_report(open_store(channel), replace(REPORT, host="other"))
    code, out, _ = weightcast("fleet", "--channel", channel)
    assert code == 0 and {"a:a", "a:b", "other"} <= set(out.split())
    wait = ("wait", "--channel", channel, "--version", 5, "--timeout", 0)
    code, out, _ = weightcast(*wait, "--json")
    assert code == 0 and json.loads(out)["hosts"] == ["a:/data/a"]
    code, _, err = weightcast(*wait, "--min-hosts", 3)
    assert code == 4 and "a:/data/b (ready, version 4)" in err and "other (ready" in err


def test_wait_says_what_it_waits_for(channel: Path, weightcast: Command) -> None:
    write_report(open_store(channel), REPORT)
    wait = ("wait", "--channel", channel, "--version", 7, "--timeout", 2)
    code, out, err = weightcast(*wait)
    line = "waiting up to 2 s for version 7; newest of main: 5; behind: a (ready, version 3)"
    assert (code, out, err.splitlines()[0]) == (4, "", line) and err.count("waiting") == 1
    assert weightcast(*wait, "--json").err == ""


def test_a_reload_that_no_engine_took_is_none(channel: Path, weightcast: Command) -> None:
    write_report(
        open_store(channel),
        replace(REPORT, updates=(Update(5, "reload", 1.5, {"total": 0.25}, 0, "refused"),)),
    )
    code, out, _ = weightcast("fleet", "--channel", channel)
    assert code == 0 and "reload 5 not taken in 0.25 s" in out


def test_usage(channel: Path, weightcast: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEIGHTCAST_CHANNEL", raising=False)
    assert weightcast("fleet")[0] == 2
    assert weightcast("fleet", "--url", "ftp://x")[0] == 2
    assert weightcast("wait", "--channel", channel, "--version", 5, "--fraction", 2)[0] == 2
    code, _, err = weightcast("fleet", "--url", "127.0.0.1:9")
    assert code == 4 and "no answer from http://127.0.0.1:9/v1/fleet" in err
    assert weightcast("wait", "--channel", channel, "--version", 5, "--timeout", 0)[0] == 4


def test_a_large_fleet_is_cut_to_the_screen(channel: Path) -> None:
    for number in range(30):
        write_report(open_store(channel), replace(REPORT, host=f"host-{number:02}"))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table(FleetReader(open_store(channel)).read(), console.width, most=5))
    said = console.export_text()
    assert "and 25 more" in said and "host-04" in said and "host-05" not in said


def test_the_last_update_is_shown_and_json_has_all(channel: Path, weightcast: Command) -> None:
    updates = tuple(Update(n, "patch", 1.5, {"total": n / 4}, 3, "done") for n in (5, 4, 3))
    write_report(open_store(channel), replace(REPORT, updates=updates))
    code, out, _ = weightcast("fleet", "--channel", channel)
    assert code == 0 and "patch 5 in 1.25 s" in out
    code, out, _ = weightcast("fleet", "--channel", channel, "--json")
    assert [row["version"] for row in json.loads(out)["hosts"][0]["updates"]] == [5, 4, 3]


GHOST = replace(REPORT, host="ghost", run_id="", state="starting", local_version=None, served_version=None)
STOPPED = replace(REPORT, host="ended", state="stopped", served_version=5)


def write_aged(channel: Path, report: Report, seconds: float) -> None:
    write_report(open_store(channel), report)
    age(channel, report, seconds)


def claim_of(
    channel: Path, seconds: float, claimant: Claimant = Claimant("trainer", 12), **facts: Any
) -> None:
    path = Layout(channel).claim(1)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(write_claim(ClaimRecord(claimant, 0.0, **facts)))
    at = path.stat().st_mtime - seconds
    os.utime(path, (at, at))


def test_a_fleet_that_died_together_is_not_heard_now(channel: Path, weightcast: Command) -> None:
    """One look, no publisher alive: ages are those of the files, by the file system's clock."""
    for name in ("a", "b"):
        write_aged(channel, replace(REPORT, host=name, served_version=5), 1320)
    claim_of(channel, 1320)
    _, out, _ = weightcast("fleet", "--channel", channel)
    lines = out.splitlines()
    assert (
        lines[0]
        == "0 of 2 hosts serve version 5; publisher silent, heard 22 min ago; a: lost (and 1 more lost)"
    )
    assert lines[2].startswith("publisher silent, heard 22 min ago: process 12 on trainer")
    assert [line.split()[:3] for line in lines[4:6]] == [["a", "lost", "5"], ["b", "lost", "5"]], (
        "doing nothing"
    )
    assert "22 min" in lines[4]
    assert [path.name[:2] for path in sorted(Layout(channel).hosts_dir.iterdir())] == ["a-", "b-"]
    _, out, _ = weightcast("fleet", "--channel", channel, "--json")
    said = json.loads(out)
    assert said["time_source"] == "channel" and said["verdict"]["level"] == "bad"
    assert all(1320 <= host["heard_seconds_ago"] < 1400 for host in said["hosts"])


def test_a_publisher_that_stopped_is_not_one_that_is_silent(channel: Path) -> None:
    assert FleetReader(open_store(channel)).read().owner is None
    claim_of(channel, 5)
    assert FleetReader(open_store(channel)).read().owner.state == "alive"
    claim_of(channel, 500, released=True)
    fleet = FleetReader(open_store(channel)).read()
    assert fleet.owner.state == "stopped" and "publisher stopped, heard 8 min ago" in fleet.verdict.text
    assert fleet.verdict.level == "warning"


def test_a_publisher_killed_on_this_machine_is_dead_at_once(channel: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        facts = {"pid": process.pid, "process_start": "1"}
        claim_of(channel, 0, claimant=replace(this_process(), **facts))
        process.kill()
    fleet = FleetReader(open_store(channel)).read()
    assert fleet.owner.state == "dead" and fleet.verdict.level == "bad"


def test_a_report_read_after_a_long_pause_is_as_old_as_its_file(channel: Path) -> None:
    """A mount that hung between two looks must not make hosts that died meanwhile look alive."""
    now = [0.0]
    reader = FleetReader(open_store(channel), clock=lambda: now[0])
    write_report(open_store(channel), REPORT)
    reader.read()
    now[0] = 600.0
    write_aged(channel, replace(REPORT, counter=2), 500)
    [host] = reader.read().hosts
    assert host.standing == "lost" and 500 <= host.heard_seconds_ago < 510


@pytest.mark.parametrize("ahead", [5.0, -5000.0])
def test_without_a_place_to_write_ages_are_plausible_or_unknown(tmp_path: Path, ahead: float) -> None:
    """A clock behind the newest report is wrong, and says nothing; a host is live once it is heard."""
    now, written = [0.0], 1e9
    local = ChannelClock(open_store(tmp_path / "read-only"), lambda: now[0], lambda: written + ahead + now[0])
    heard = Heard(lambda: now[0])

    def silence(counter: int) -> Silence:
        reports = [StoredReport("a", replace(REPORT, counter=counter), written)]
        return heard.silences(reports, local.read(written).now)["a"]

    assert local.read(written).source == ("local" if ahead > 0 else "unknown")
    assert silence(1) == Silence(max(ahead, 0.0), exact=ahead > 0)
    assert presence_of(Silence(0.0, exact=False), Bounds()) == "stale"
    now[0] = 200.0
    assert presence_of(silence(1), Bounds()) == "lost"
    now[0] = 201.0
    assert presence_of(silence(2), Bounds()) == "live"


def test_hosts_that_stopped_or_never_started_are_not_waited_for(channel: Path, weightcast: Command) -> None:
    write_report(open_store(channel), replace(REPORT, served_version=5))
    write_report(open_store(channel), STOPPED)
    write_aged(channel, GHOST, 90)
    write_aged(channel, replace(REPORT, host="gone"), 1000)
    fleet = FleetReader(open_store(channel)).read()
    found = [(host.host, host.standing) for host in fleet.hosts]
    assert found == [("a", "ready"), ("ended", "stopped"), ("ghost", "stale"), ("gone", "lost")]
    assert [(row.lag, row.hosts) for row in fleet.lag] == [(0, 1)]
    wait = ("wait", "--channel", channel, "--version", 5, "--fraction", 1.0, "--timeout", 0)
    assert weightcast(*wait)[0] == 0
    write_report(open_store(channel), replace(STOPPED, host="a"))
    code, _, err = weightcast(*wait)
    assert code == 4 and "not counted: a (stopped), ended (stopped), ghost (stale), gone (lost)" in err
    assert "start the subscribers" in err


def test_a_fleet_that_was_stopped_is_no_alarm(channel: Path, weightcast: Command) -> None:
    write_aged(channel, STOPPED, 5000)
    code, out, _ = weightcast("fleet", "--channel", channel)
    assert code == 0 and out.splitlines()[0] == "no host is running"
    assert FleetReader(open_store(channel)).read().verdict.level == "good"


def test_ghosts_come_last_and_problems_fit_into_the_screen(channel: Path) -> None:
    for number in range(20):
        write_aged(channel, replace(GHOST, host=f"ghost-{number:02}", last_error="E: m", remedy="r"), 4000)
    write_report(
        open_store(channel),
        replace(REPORT, host="bad", state="waiting", last_error="E: " + "m" * 300, remedy="r"),
    )
    fleet = FleetReader(open_store(channel)).read()
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(fleet, 80, rows=24))
    lines = console.export_text().splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert lines[3].startswith("bad") and lines[6].startswith("ghost-00") and "more, none worse" in lines[-1]


def test_eighty_columns_fit(channel: Path) -> None:
    engines = tuple(
        {"name": f"engine-{n}", "kind": "vllm", "state": "serving", "version": 5, "confirmed_by": "digest"}
        for n in range(8)
    )
    updates = (Update(5, "patch", 1.5, {"total": 12.5}, 3, "done"),)
    for name in ("one", "two"):
        local = f"/mnt/a/long/way/down/{name}/policy"
        write_report(
            open_store(channel),
            replace(REPORT, host="rollout", local=local, engines=engines, updates=updates),
        )
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(FleetReader(open_store(channel)).read(), 80))
    lines = console.export_text().splitlines()
    assert lines[3].startswith("rollout:one/policy  behind") and lines[3].endswith("8 serving")
    assert max(map(len, lines)) <= 80


def test_forget(channel: Path, weightcast: Command) -> None:
    write_report(open_store(channel), replace(REPORT, served_version=5))
    for local in ("/data/a", "/data/b"):
        write_aged(channel, replace(GHOST, local=local), 4000)
    write_report(open_store(channel), STOPPED)
    forget = ("fleet", "--channel", channel, "--forget")

    def hosts() -> list[str]:
        return sorted(host.host for host in FleetReader(open_store(channel)).read().hosts)

    code, _, err = weightcast(*forget, "ended", "--forget", "a")
    assert code == 3 and "a (/l) is ready, heard" in err and len(hosts()) == 4, "all or none"
    assert weightcast(*forget, "ended", "--watch")[0] == 2
    code, _, err = weightcast(*forget, "ghost")
    assert code == 3 and "2 hosts named 'ghost'" in err and "ghost:a, ghost:b" in err
    code, _, err = weightcast(*forget, "nobody")
    assert code == 3 and "no host named 'nobody'" in err and len(hosts()) == 4
    code, out, _ = weightcast(*forget, "ghost:a", "--forget", "ended")
    assert code == 0 and "forgot ghost (/data/a), lost" in out and "forgot ended (/l), stopped" in out
    code, out, _ = weightcast(*forget, "ghost", "--json")
    [row] = json.loads(out)["forgotten"]
    assert code == 0 and (row["host"], row["local"], row["standing"]) == ("ghost", "/data/b", "lost")
    assert hosts() == ["a"]


def test_forget_takes_the_part_of_a_name_that_tells_hosts_apart(channel: Path, weightcast: Command) -> None:
    for host, local in (
        ("vm", "/data/host_b"),
        ("vm", "/data/host_c"),
        ("host_b", "/l"),
        ("other", "/x/host_c"),
    ):
        write_aged(channel, replace(GHOST, host=host, local=local), 4000)
    forget = ("fleet", "--channel", channel, "--forget")
    code, _, err = weightcast(*forget, "host_c")
    assert code == 3 and "2 hosts named 'host_c'" in err and "other, vm:host_c" in err
    code, out, _ = weightcast(*forget, "host_b")
    assert code == 0 and "forgot host_b (/l), lost" in out, "an exact name comes first"
    code, out, _ = weightcast(*forget, "other", "--forget", "host_b")
    assert code == 0 and "forgot vm (/data/host_b), lost" in out
    code, out, _ = weightcast(*forget, "host_c")
    assert code == 0 and "forgot vm (/data/host_c), lost" in out


def test_the_verdict_counts_three_kinds_of_trouble(channel: Path, weightcast: Command) -> None:
    silent = {"served_version": 5, "state": "x", "last_error": "engine e does not serve: no answer"}
    errors = ("R: no space at /a/1: 7 MiB", "R: no space at /b/2: 9 MiB", "S: cut off", "T: denied")
    for number, error in enumerate(errors):
        write_report(open_store(channel), replace(REPORT, host=f"h{number}", state="x", last_error=error))
    write_report(open_store(channel), replace(REPORT, host="i", **silent))
    write_report(open_store(channel), replace(STOPPED, host="j", engines=(SILENT | {"state": "serving"},)))
    code, out, _ = weightcast("fleet", "--channel", channel)
    kinds = [f"h0: {errors[0]} (and 1 more failed)", f"h2: {errors[2]}", f"h3: {errors[3]}"]
    assert code == 0 and out.startswith("; ".join(["0 of 5 hosts serve version 5", *kinds, "also 1 failed"]))
    assert "engine e does not serve" in out and "1 serving" not in out


def test_the_verdict_names_an_error_of_several_hosts_once_and_cuts_it_after_a_word(
    channel: Path, weightcast: Command
) -> None:
    error = "E: " + "shard " * 30
    for name in ("a", "b"):
        write_report(open_store(channel), replace(REPORT, host=name, state="x", last_error=error))
    verdict = weightcast("fleet", "--channel", channel)[1].splitlines()[0]
    assert verdict.endswith("; 2 hosts: E: " + " ".join(["shard"] * 19) + "...")


def test_a_host_of_another_run_says_so(channel: Path, weightcast: Command) -> None:
    write_report(open_store(channel), replace(REPORT, run_id="another"))
    _, out, _ = weightcast("fleet", "--channel", channel)
    assert "a: follows another run, another" in out.splitlines()[0]
    assert "    give it this run's channel" in out

"""The publisher's fleet over real HTTP: hosts, versions, what catching up costs, events, posted reports."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from channel_paths import Layout
from daemonkit import Daemon, Places, base_tensors, changed, rename_in, unprivileged
from in_process import Command
from waiting import wait_until

from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.pins import keep, set_tag
from weightcast.shared.channel.reports import REPORT_LIMIT, Report, Update, pack_report, write_report
from weightcast.shared.channel.run_files import ChannelFile, write_channel_file

HOSTS = 1100
"""whose page is larger than what a socket of the kernel takes"""
UPDATE = Update(1, "patch", 1.0, {"fetch": 0.5, "stage": 0.25, "reload": 2.0, "total": 2.75}, 3000, "done")


def report(host: str, run_id: str, served: int | None, counter: int = 1, **facts: Any) -> Report:
    known = Report(
        host, "/data/policy", run_id, "ready", served, served, "latest", 0, "", (), counter, "weightcast 0"
    )
    return replace(known, phase="idle", updates=(UPDATE,), bytes={"step": 3000}, **facts)


@pytest.fixture
def daemon(places: Places) -> Iterator[Daemon]:
    started = Daemon.start(places, "--stale-seconds", "2", "--lost-seconds", "4", "--keep-hours", "99")
    yield started.ready()
    started.kill()


@pytest.fixture
def run_id(daemon: Daemon) -> str:
    return str(daemon.status()["run_id"])


def host_of(daemon: Daemon, name: str) -> dict[str, Any]:
    found = daemon.get("/v1/fleet").json()["hosts"]
    return next((host for host in found if host["host"] == name), {})


@contextmanager
def events(daemon: Daemon) -> Iterator[Callable[[], tuple[str, Any]]]:
    """The next event: its name and data."""
    with (
        httpx.Client(base_url=daemon.client.base_url, trust_env=False, timeout=20) as client,
        client.stream("GET", "/v1/events") as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()

        def following() -> tuple[str, Any]:
            name = next(line for line in lines if line.startswith("event: "))
            return name[7:], json.loads(next(lines).removeprefix("data: "))

        yield following


def test_hosts_are_shown_grow_old_and_come_back(places: Places, daemon: Daemon, run_id: str) -> None:
    engines = ({"name": "a", "kind": "vllm", "state": "serving", "version": 0, "confirmed_by": "label"},)
    write_report(open_store(places.channel), report("one", run_id, 0, engines=engines))
    write_report(
        open_store(places.channel), report("two", run_id, None, state="seeding", target="3", lag=None)
    )
    write_report(
        open_store(places.channel), report("bad", run_id, 0, state="waiting", last_error="E: m", remedy="r")
    )
    fleet = wait_until(
        lambda: fleet if len((fleet := daemon.get("/v1/fleet").json())["hosts"]) == 3 else None
    )
    assert (fleet["channel"], fleet["run_id"], fleet["latest"]) == (str(places.channel), run_id, 0)
    assert fleet["counts"] == {"ready": 1, "behind": 1, "stale": 0, "lost": 0, "failed": 1, "stopped": 0}
    assert fleet["lag"] == [{"lag": 0, "hosts": 2}]
    wait_until(
        lambda: daemon.get("/v1/lag-history").json()["samples"][-1]["behind"] == {"0": 2, "unknown": 1}
    )
    bad, one, two = fleet["hosts"]
    assert (one["host"], one["ready"], one["presence"], one["lag"]) == ("one", True, "live", 0)
    assert one["engines"] == list(engines) and one["bytes"] == {
        "step": 3000,
        "skip": 0,
        "anchor": 0,
        "repair": 0,
    }
    assert one["updates"][0]["seconds"]["reload"] == 2.0 and one["updates"][0]["outcome"] == "done"
    assert (two["state"], two["ready"], two["standing"]) == ("seeding", False, "behind")
    assert (bad["last_error"], bad["remedy"], bad["standing"]) == ("E: m", "r", "failed")
    assert daemon.get(f"/v1/hosts/{one['key']}").json()["updates"] == one["updates"]
    assert daemon.get("/v1/hosts/nobody").status_code == 404
    assert [host["host"] for host in daemon.status()["hosts"]] == ["bad", "one", "two"]

    rename_in(places.watch / "step_7", changed(base_tensors(), 7))
    daemon.wait_for_version(1)
    lost = wait_until(lambda: host if (host := host_of(daemon, "one"))["presence"] == "lost" else None)
    assert (lost["served_version"], lost["lag"], lost["standing"]) == (0, 1, "lost"), "the host itself said 0"
    assert lost["heard_seconds_ago"] >= 4
    write_report(open_store(places.channel), report("one", run_id, 1, counter=2))
    wait_until(lambda: host_of(daemon, "one")["presence"] == "live")
    assert host_of(daemon, "one")["lag"] == 0


def test_versions_catching_up_and_pruning(places: Places, daemon: Daemon, run_id: str) -> None:
    for step in (1, 2, 3, 4):
        rename_in(places.watch / f"step_{step}", changed(base_tensors(), step))
        daemon.wait_for_version(step)
    keep(open_store(places.channel), 2)
    set_tag(open_store(places.channel), "best", 3)
    write_report(open_store(places.channel), report("one", run_id, 1))

    def shown() -> list[dict[str, Any]]:
        found = daemon.get("/v1/versions").json()
        rows: list[dict[str, Any]] = found["versions"]
        return rows if found["complete"] and len(rows) == 4 and rows[2]["kept"] else []

    rows = wait_until(shown)
    assert [row["version"] for row in rows] == [4, 3, 2, 1] and [row["step"] for row in rows] == [4, 3, 2, 1]
    assert [row["tags"] for row in rows] == [[], ["best"], [], []]
    newest = rows[0]
    lies = sum(
        path.stat().st_size for path in Layout(places.channel).version_dir(4).iterdir() if path.is_file()
    )
    assert newest["bytes"] == lies and newest["publish_seconds"] > 0
    assert newest["density"] == newest["changed"] / newest["elements"] > 0
    full = sum(len(data) for _, _, data in base_tensors().values())
    assert newest["ratio"] == pytest.approx(full / lies)
    assert len(daemon.get("/v1/versions?limit=2").json()["versions"]) == 2
    assert daemon.get("/v1/versions?limit=0").status_code == 422

    cost = wait_until(
        lambda: cost if (cost := daemon.get("/v1/catch-up").json())["rows"][0]["seconds"] else None
    )
    assert [row["lag"] for row in cost["rows"]] == [1, 2, 3, 4], "3 is that of a host"
    assert cost["rows"][0]["steps"] == ["step 4"] and cost["rows"][0]["bytes"] == newest["bytes"]
    assert cost["rows"][0]["seconds"] == pytest.approx(newest["bytes"] * 0.75 / 3000 + 2.0)
    assert cost["joiner"]["bytes"] <= sum(row["bytes"] for row in rows)

    plan = daemon.get("/v1/prune-plan").json()
    planned = {row["version"]: row["why"] for row in plan["keep"]}
    assert set(planned) | {row["version"] for row in plan["remove"]} == {1, 2, 3, 4}
    assert planned[2] == "kept by name or tagged" == planned[3]
    assert (
        plan["why_not"] == planned[4] == "no full weights at or before version 1, the first that must be kept"
    )


def test_events_tell_hosts_and_versions(places: Places, daemon: Daemon, run_id: str) -> None:
    with events(daemon) as following:
        name, fleet = following()
        assert (name, fleet["hosts"]) == ("fleet", [])
        write_report(open_store(places.channel), report("one", run_id, 0))
        name, fleet = following()
        assert (name, [host["host"] for host in fleet["hosts"]]) == ("fleet", ["one"])
        rename_in(places.watch / "step_1", changed(base_tensors(), 1))
        # in any order, and the fleet as often as something in it changes
        newest, latest = None, None
        while (newest, latest) != (1, 1):
            name, data = following()
            newest = data["newest"] if name == "versions" else newest
            latest = data["latest"] if name == "fleet" else latest


@pytest.fixture
def many_hosts(places: Places, daemon: Daemon, run_id: str) -> int:
    engines = ({"name": "n" * 60, "kind": "k" * 60, "state": "s" * 60, "confirmed_by": "c" * 60},) * 60
    for number in range(HOSTS):
        write_report(
            open_store(places.channel),
            report(f"host{number}", run_id, 0, engines=engines, last_error="e" * 4000),
        )
    wait_until(lambda: len(daemon.get("/v1/fleet").json()["hosts"]) == HOSTS)
    return HOSTS


def test_a_large_fleet_comes_whole(daemon: Daemon, many_hosts: int) -> None:
    asked = daemon.get("/v1/fleet")
    assert len(asked.content) == int(asked.headers["content-length"]) > 1 << 20
    with events(daemon) as following:
        name, fleet = following()
        assert (name, len(fleet["hosts"])) == ("fleet", many_hosts)
    host = asked.json()["hosts"][0]
    assert (len(host["engines"]), len(host["last_error"])) == (16, 512)
    one = daemon.get(f"/v1/hosts/{host['key']}").json()
    assert (len(one["engines"]), len(one["last_error"]), len(one["updates"])) == (60, 4000, 1)


def test_pages_that_nobody_reads_share_their_bytes(daemon: Daemon, many_hosts: int) -> None:
    before = anonymous_bytes(daemon)
    with ExitStack() as stack:
        for _ in range(60):
            watcher = stack.enter_context(unread(daemon))
            assert wait_until(lambda: watcher.recv(2000, socket.MSG_PEEK)[9:12]) == b"200"  # noqa: B023
        assert anonymous_bytes(daemon) - before < 40 << 20


def unread(daemon: Daemon) -> socket.socket:
    port = daemon.client.base_url.port
    assert port is not None
    watcher = socket.socket()
    watcher.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    watcher.connect(("127.0.0.1", port))
    watcher.sendall(b"GET /v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    return watcher


def anonymous_bytes(daemon: Daemon) -> int:
    lines = Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def test_an_open_page_does_not_keep_the_publisher_from_ending(daemon: Daemon) -> None:
    with events(daemon) as following:
        following()
        assert daemon.stop() == 0


def test_reports_are_posted_where_the_channel_is_read_only(
    places: Places, daemon: Daemon, run_id: str
) -> None:
    mine = report("far", run_id, 0)

    def post(data: bytes) -> httpx.Response:
        return daemon.client.post("/v1/reports", content=data, headers={"Content-Type": "application/json"})

    taken = post(pack_report(mine))
    assert taken.status_code == 202 and taken.json()["now"] > 0
    wait_until(lambda: host_of(daemon, "far").get("presence") == "live")
    assert Layout(places.channel).report("far", "/data/policy").exists(), "for whoever reads the channel"
    assert post(pack_report(replace(mine, counter=2))).status_code in (202, 429)
    wait_until(lambda: post(pack_report(replace(mine, counter=3))).status_code == 202)
    early = post(pack_report(replace(mine, counter=4)))
    assert early.status_code == 429 and "Retry-After" in early.json()["remedy"], "twice in half a second"

    other = post(pack_report(replace(mine, host="lost", run_id="another")))
    assert (other.status_code, other.json()["error"]) == (422, "WrongRun")
    assert post(b'{"format":1}').json()["error"] == "DamagedFile"
    long = post(b"x" * (REPORT_LIMIT + 1))
    assert long.status_code == 413 and "updates" in long.json()["remedy"]
    assert host_of(daemon, "lost") == {}


def test_a_posted_report_that_cannot_be_written_stops_no_other(
    places: Places, daemon: Daemon, run_id: str
) -> None:
    Layout(places.channel).report("bad", "/data/policy").mkdir(parents=True)
    for host in ("bad", "good", "better"):
        assert (
            daemon.client.post("/v1/reports", content=pack_report(report(host, run_id, 0))).status_code == 202
        )
    wait_until(lambda: host_of(daemon, "good") and host_of(daemon, "better"))
    assert daemon.status()["report_error"].startswith("bad: ")
    assert host_of(daemon, "bad") == {}
    assert daemon.log.read_text().count("posted reports not written") == 1


@pytest.mark.parametrize("value", [b"1e999", b"[" * 400 + b"]" * 400, b"[" * 3000 + b"]" * 3000])
def test_a_posted_report_that_cannot_be_written_again_is_refused(
    places: Places, daemon: Daemon, run_id: str, value: bytes
) -> None:
    good = [pack_report(report(name, run_id, 0)) for name in ("good", "better")]
    bad = pack_report(report("bad", run_id, 0, engines=({"version": 0},))).replace(
        b'n":0}]', b'n":%s}]' % value
    )
    answers = [daemon.client.post("/v1/reports", content=data) for data in (good[0], bad, good[1])]
    assert [answer.status_code for answer in answers] == [202, 422, 202]
    assert answers[1].json()["error"] == "DamagedFile"
    wait_until(lambda: host_of(daemon, "good") and host_of(daemon, "better"))
    # whoever can write into the channel needs no post
    Layout(places.channel).report("bad", "/data/policy").write_bytes(bad)
    write_report(open_store(places.channel), report("later", run_id, 0))
    wait_until(lambda: host_of(daemon, "later"))
    assert host_of(daemon, "bad") == {}


def test_a_host_s_token_lets_it_report_and_nothing_else(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTCAST_REPORT_TOKEN", "report-only")
    daemon = Daemon.start(places, token="the-publishers")
    try:
        report_intake = pack_report(report("far", "", None))
        for token, taken, shown in (("report-only", 202, 401), ("the-publishers", 202, 200), ("x", 401, 401)):
            daemon.client.headers["Authorization"] = f"Bearer {token}"
            wait_until(
                lambda: daemon.client.post("/v1/reports", content=report_intake).status_code == taken  # noqa: B023
            )
            assert daemon.get("/v1/fleet").status_code == shown
    finally:
        daemon.kill()


def test_a_reader_without_rights_says_whose_clock_it_is(weightcast: Command) -> None:
    with unprivileged() as channel:
        layout = Layout(channel)
        layout.channel_json.write_bytes(write_channel_file(ChannelFile("run", 0.0)))
        layout.latest.write_text("000001")
        write_report(open_store(channel), report("a", "run", 1))
        layout.hosts_dir.chmod(0o555)
        path, now = layout.report("a", "/data/policy"), time.time()
        os.utime(path, (now - 1320, now - 1320))
        code, out, _ = weightcast("fleet", "--channel", channel)
        assert code == 0 and "ages are by this machine's clock" in out and "22 min" in out
        # a host whose clock is ahead of this machine's
        os.utime(path, (now + 1320, now + 1320))
        code, out, _ = weightcast("fleet", "--channel", channel)
        assert (
            code == 0
            and "latest 1;" in out
            and "ages are unknown (?)" in out
            and "a     stale" in out
            and " 0 s" not in out
        )
        code, _, err = weightcast("fleet", "--channel", channel, "--forget", "a")
        assert code == 3 and "stale, heard at an unknown time" in err
        os.utime(path, (now - 1320, now - 1320))
        code, _, err = weightcast("fleet", "--channel", channel, "--forget", "a")
        assert code == 3 and "cannot be deleted" in err and path.exists()
        layout.hosts_dir.chmod(0o755)

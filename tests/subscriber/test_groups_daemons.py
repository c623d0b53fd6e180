"""One engine over several hosts: real daemons, real files, a network that fails."""

from __future__ import annotations

import errno
import socket
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from disk_errors import watched
from doubles import Answer
from groups import SECONDS, Copies, Group, Host, Maps, Process, journals
from hosts import Site, on_disk
from waiting import wait_until

from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.checkpoint.state.locks import FileLock
from weightcast.shared.checkpoint.state.state import Blocked, read_state, write_state

UPDATE = "/update_weights_from_disk"
LEADERS_OWN = ("engine.", "group.", "lock.")
"""failpoints that no disk has a part in"""
SHORT = 3.0
"""a lease that a test waits for"""


@pytest.mark.parametrize("kind", [Copies, Maps])
def test_all_hosts_hold_a_version_while_the_engine_reads_it(site: Site, kind: type[Copies | Maps]) -> None:
    run, engine = site.run(), kind()
    group = Group(site, run, engine, members=2).start()
    group.await_served(0)
    for version in (1, 2):
        run.publish()
        group.await_served(version)
    assert engine.reads == [run.digest(version) for version in range(3)] == engine.served
    assert not getattr(engine, "patched_under", False)
    status = group.leader.status
    assert status.group.role == "leader" and "group" in status.updates[-1].seconds
    wait_until(lambda: [m.version for m in group.leader.status.group.members] == [2, 2])
    wait_until(lambda: not journals(group.member.local))
    assert journals(group.leader.local) == []
    same = run.publish(run.versions[-1])
    group.await_served(same)
    assert len(engine.reads) == 3, "the same bytes are not read again"


def test_an_adapter_is_loaded_once_all_hosts_have_exported_it(site: Site) -> None:
    run, engine = site.run(), Copies()
    group = Group(site, run, engine).start()
    group.await_served(0)

    def loaded(*versions: int) -> bool:
        return any(one.loaded == versions for one in group.leader.status.adapters)

    def at_the_member() -> list[str]:
        return sorted(path.name for path in (group.member.local / "adapters").glob("*-v*"))

    run.publish_adapter()
    wait_until(lambda: loaded(1) and group.leader.status.ready, SECONDS)
    group.member.stop()
    run.publish_adapter()
    wait_until(lambda: any("127.0.0.1" in one.error for one in group.leader.status.adapters), SECONDS)
    assert engine.adapters.keys() == {"math@1"} and loaded(1)
    group.member.start()
    wait_until(lambda: loaded(2, 1), SECONDS)
    assert at_the_member() == ["math-v000001", "math-v000002"]
    run.publish()
    wait_until(lambda: engine.held == run.digest(1) and not engine.adapters, SECONDS)
    run.publish_adapter()
    wait_until(lambda: loaded(3) and group.serves(1), SECONDS)
    wait_until(lambda: at_the_member() == ["math-v000003"], SECONDS)
    assert all(len(each) == 1 and "" not in each for each in engine.loads_of_adapters)


def test_a_newer_version_during_the_reload_moves_nobody(site: Site) -> None:
    run, engine = site.run(), Copies()
    group = Group(site, run, engine).start()
    group.await_served(0)
    engine.shut()
    run.publish()
    engine.await_reading()
    run.publish()
    wait_until(lambda: group.member.status.group.state == "held", SECONDS)
    steps = group.member.status.loop.steps
    wait_until(lambda: group.member.status.loop.steps > steps + 3, SECONDS)
    assert on_disk(group.member.local) == run.digest(1) == on_disk(group.leader.local)
    engine.gate.set()
    group.await_served(2)
    assert engine.reads == [run.digest(version) for version in range(3)]


def test_a_member_that_ends_grants_nothing_once_others_may_write(site: Site) -> None:
    """It answers for a while yet: its last report is on the way to a publisher that does not answer."""
    run, engine = site.run(), Copies()
    group = Group(site, run, engine)
    member = group.member
    member.stop()
    silent = site.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    member.start(report=True, report_to=f"http://127.0.0.1:{silent.getsockname()[1]}")
    group.start().await_served(0)
    engine.shut()
    run.publish()
    engine.await_reading()
    wait_until(lambda: member.status.group.state == "held", SECONDS)
    member.daemon.stop.set()
    member.daemon.wakeup.set()
    writes = FileLock(member.local / ".weightcast" / "patch")
    with writes.holding(seconds=SECONDS), suppress(httpx.TransportError):
        assert member.call("GET", "/v1/hold").json()["state"] == "free"
    engine.gate.set()


def test_a_group_that_starts_behind_comes_to_the_newest(site: Site) -> None:
    run, engine = site.run(), Copies()
    run.publish()
    run.publish()
    group = Group(site, run, engine, members=2).start()
    group.await_served(2)
    group.members[1].replaced()
    run.publish()
    group.await_served(3)
    assert set(engine.reads) <= {run.digest(0), run.digest(2), run.digest(3)}


def test_a_reload_that_outlives_the_lease_does_not_count(site: Site) -> None:
    run, engine = site.run(), Copies()
    group = Group(site, run, engine, group_lease=SHORT).start()
    group.await_served(0)
    engine.shut()
    run.publish()
    engine.await_reading()
    group.network.cut = True
    wait_until(lambda: group.member.is_free, SECONDS)
    engine.gate.set()
    wait_until(lambda: group.leader.status.engines[0].mark == "suspect", SECONDS)
    wait_until(lambda: not group.leader.status.ready, SECONDS)
    assert engine.paused
    served = list(engine.served)
    group.network.cut = False
    group.await_served(1)
    assert engine.served == [*served, run.digest(1)], "resumed after the reload that counts, only"
    assert len(engine.reads) >= len(served) + 2


def test_a_network_that_comes_back_within_the_lease_costs_nothing(site: Site) -> None:
    run, engine = site.run(), Copies()
    group = Group(site, run, engine).start()
    group.await_served(0)
    engine.shut()
    run.publish()
    engine.await_reading()
    group.network.cut = True
    engine.gate.set()
    wait_until(lambda: len(engine.reads) == 2, SECONDS)
    group.network.cut = False
    group.await_served(1)
    assert len(engine.reads) == 2


def test_nobody_moves_without_a_member(site: Site) -> None:
    run, engine = site.run(), Copies()
    group = Group(site, run, engine, group_lease=SHORT).start()
    group.await_served(0)
    group.member.stop()
    run.publish()
    wait_until(lambda: group.leader.status.last_error is not None, SECONDS)
    error = group.leader.status.last_error
    assert error.error == "RetryLater" and group.network.target not in error.message and error.remedy
    assert "group member http://127.0.0.1" in error.message
    assert on_disk(group.leader.local) == run.digest(0) == engine.held
    assert group.leader.status.ready and group.leader.status.lag_versions == 1
    group.member.start()
    group.await_served(1)


def test_a_version_that_a_member_refuses_is_taken_by_nobody(site: Site) -> None:
    run, engine = site.run(), Copies()
    group = Group(site, run, engine, group_lease=SHORT).start()
    group.await_served(0)
    group.member.stop()
    run.publish()
    _block(group.member, 1)
    group.member.start()
    wait_until(lambda: any("refused" in one for one in group.leader.status.degraded), SECONDS)
    assert on_disk(group.leader.local) == run.digest(0) == on_disk(group.member.local)
    assert group.leader.status.ready and group.leader.status.served_version == 0
    run.publish()
    group.await_served(2)


def _block(member: Host, version: int) -> None:
    channel = Channel.open(open_store(member.run.channel))
    pointer = channel.pointer()
    assert pointer is not None and channel.base is not None
    index = channel.index(pointer, version, channel.base.table)
    path = member.local / ".weightcast" / "state.json"
    state = read_state(path)
    assert index is not None and state is not None
    write_state(path, replace(state, blocked=(Blocked(version, index.digest, "no"),)))


@pytest.mark.parametrize("kind", [Copies, Maps])
def test_a_member_with_another_disk_is_brought_back(site: Site, kind: type[Copies | Maps]) -> None:
    run, engine = site.run(), kind()
    group = Group(site, run, engine).start()
    group.await_served(0)
    run.publish()
    group.await_served(1)
    group.member.replaced()
    wait_until(lambda: group.member.version == 1, SECONDS)
    wait_until(lambda: len(engine.reads) == (2 if kind is Copies else 3), SECONDS)
    group.await_served(1)


def test_what_the_engine_refuses_is_undone_everywhere(site: Site) -> None:
    run, engine = site.run(), Copies()
    group = Group(site, run, engine).start()
    group.await_served(0)
    engine.script(UPDATE, Answer(400, engine.reply(False, "Failed to get weights iterator: no.")))
    run.publish()
    wait_until(lambda: group.leader.status.blocked, SECONDS)
    group.await_served(0)
    assert "undo" in [move.kind for move in group.member.status.updates]
    assert group.leader.status.ready and group.leader.status.degraded
    run.publish()
    group.await_served(2)
    wait_until(lambda: not journals(group.member.local))


def test_a_leader_whose_disk_fails_keeps_an_engine_paused_that_maps_patched_files(site: Site) -> None:
    run, engine = site.run(), Maps()
    group = Group(site, run, engine).start()
    group.await_served(0)
    failed: list[str] = []
    held: list[int] = []

    def fail(name: str, where: Path | None) -> None:
        if name == "group.held":
            held.append(threading.get_ident())
        elif held == [threading.get_ident()] and not failed and not name.startswith(LEADERS_OWN):
            failed.append(name)
            raise OSError(errno.EIO, "the disk failed")

    with watched(fail):
        run.publish()
        group.await_served(1)
    assert failed and not engine.patched_under


def test_an_engine_that_restarts_is_aligned_although_the_channel_is_gone(site: Site) -> None:
    run, engine = site.run(), Copies()
    group = Group(site, run, engine).start()
    group.await_served(0)
    run.publish()
    group.await_served(1)
    run.channel.rename(run.root / "unmounted")
    group.member.stop()
    group.member.start()
    engine.held = "nothing"
    engine.restart()
    group.await_served(1)
    assert engine.reads == [run.digest(0), run.digest(1), run.digest(1)]
    (run.root / "unmounted").rename(run.channel)


def test_a_second_leader_waits(site: Site) -> None:
    run, engine = site.run(), Copies()
    group = Group(site, run, engine).start()
    group.await_served(0)
    engine.shut()
    run.publish()
    engine.await_reading()
    other = Host(
        run, site.root / "other", site.stack, group_member=(group.member.url,), group_deadline=SHORT
    ).start()
    wait_until(lambda: other.status.last_error is not None, SECONDS)
    assert "held by another leader" in other.status.last_error.message
    assert on_disk(group.member.local) == run.digest(1)
    engine.gate.set()
    group.await_served(1)
    wait_until(lambda: other.status.ready and other.status.local_version == 1, SECONDS)
    other.stop()


def test_a_killed_member_undoes_the_reload_that_it_was_held_for(site: Site) -> None:
    run, engine = site.run(), Copies()
    group = Group(site, run, engine)
    group.member.stop()
    member = Process(group.member, "--group-follower")
    site.stack.callback(member.kill)
    group.start()
    wait_until(lambda: group.serves(0), SECONDS)
    engine.shut()
    run.publish()
    engine.await_reading()
    member.kill()
    engine.gate.set()
    group.member.start()
    group.await_served(1)
    assert engine.served == [run.digest(0), run.digest(1)]
    assert len(engine.reads) >= 3, "the reload during which it was killed did not count"


def test_a_killed_leader_leaves_nobody_stuck(site: Site) -> None:
    run, engine = site.run(), Copies()
    group = Group(site, run, engine)
    [network] = group.leader.members
    arguments = ("--engine", group.option, "--group-member", network, "--group-lease", str(SHORT))
    leader = Process(group.leader, *arguments)
    site.stack.callback(leader.kill)
    wait_until(lambda: leader.status()["served_version"] == 0, SECONDS)
    engine.shut()
    run.publish()
    engine.await_reading()
    leader.kill()
    run.publish()
    wait_until(lambda: group.member.is_free, SECONDS)
    assert on_disk(group.member.local) == run.digest(1), "where its leader left it"
    group.leader.start(engine=(group.option,), group_lease=SHORT)
    wait_until(lambda: len(engine.of(UPDATE)) == 3, SECONDS)
    assert engine.paused and on_disk(group.leader.local) == on_disk(group.member.local) == run.digest(1)
    engine.gate.set()
    group.await_served(2)
    assert engine.served == [run.digest(version) for version in range(3)]

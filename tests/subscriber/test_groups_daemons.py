"""One engine over several hosts: real daemons, real files, a network that fails."""

from __future__ import annotations

from groups import Copies, Group, journals
from hosts import Site, wait_until


def test_all_hosts_hold_a_version_while_the_engine_reads_it(site: Site) -> None:
    run, engine = site.run(), Copies()
    group = Group(site, run, engine, members=2).start()
    group.await_served(0)
    for version in (1, 2, 3):
        run.publish()
        group.await_served(version)
    assert engine.reads == [run.digest(version) for version in range(4)]
    assert engine.served == engine.reads
    status = group.leader.status
    assert status.group.role == "leader"
    wait_until(lambda: [m.version for m in group.leader.status.group.members] == [3, 3])
    assert "group" in status.updates[-1].seconds
    wait_until(lambda: not journals(group.member.local))
    assert journals(group.leader.local) == []

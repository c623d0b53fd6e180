"""A disk error at any step of a version, in place of a kill: the same process goes on."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from disk_errors import Disk, watched
from doubles import Answer
from hosts import Host, Mapping_, Run, SGLang, Site

from weightcast.shared.base.errors import WeightcastError

UPDATE = "/update_weights_from_disk"
REFUSAL = Answer(400, SGLang.reply(False, "Failed to get weights iterator: no."))
ELSEWHERE = ("engine.", "hook.", "lock.", "refused.", "group.")
MOST_STEPS = 6
MOST_VERSIONS = 200


@dataclass
class HostDisk(Disk):
    engine: Mapping_ = field(kw_only=True)
    torn: list[str] = field(default_factory=list)
    """what had failed when words were written under an engine that served"""

    def __call__(self, name: str, where: Path | None) -> None:
        if name == "patch.record" and not self.engine.paused:
            self.torn.append(f"{self.failed_at}")
        super().__call__(name, where)


def stepped_until_ready(host: Host, disk: HostDisk) -> bool:
    """As the daemon does, whatever a step raises."""
    for _ in range(MOST_STEPS):
        with suppress(WeightcastError), watched(disk):
            if host.retry().ready:
                return True
    return False


def check(run: Run, host: Host, engines: tuple[Mapping_, SGLang], disk: HostDisk, version: int) -> None:
    mapping, copying = engines
    assert stepped_until_ready(host, disk), disk.failed_at
    assert disk.torn == []
    assert host.at(run, version) and host.journals == [], disk.failed_at
    held = run.digest(version)
    assert copying.held == held and mapping.seen[-1] == ("resume", held), disk.failed_at
    assert not mapping.paused and not copying.paused and not copying.resumed_broken, disk.failed_at
    assert {one.version for one in host.state.engines.values()} == {version}, disk.failed_at


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lasting", [0, 1])
def test_at_every_failpoint_of_a_version(site: Site, lasting: int) -> None:
    """One error; and one together with the next, so that what answers to it fails too."""
    run = site.run()
    engines = Mapping_(site.root / "host"), SGLang()
    host = site.host(run, *engines)
    assert host.step().ready
    for number in range(1, MOST_VERSIONS):
        version = run.publish()
        disk = HostDisk(number, lasting, ELSEWHERE, engine=engines[0])
        check(run, host, engines, disk, version)
        if not disk.failed_at:
            break
    assert number > 20, "a version passes that many"

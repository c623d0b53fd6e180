"""A disk error at any step of a publication, in place of a kill: the same process goes on."""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from core_cases import Model, bytes_of, read_checkpoint
from daemonkit import INDEX, Places, base_tensors, changed, rename_in
from disk_errors import Disk, watched

from weightcast.publisher.daemon.publish_loop import PublishLoop
from weightcast.publisher.daemon.settings import PublisherSettings
from weightcast.shared.base.errors import WeightcastError
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.checkpoint.local_updater import LocalUpdater
from weightcast.shared.daemon.loop import Stop, Wakeup
from weightcast.shared.daemon.metrics import Metrics

ELSEWHERE = ("hook.", "lock.")
BESIDE = ("upkeep", "weightcast-claim")
"""threads whose work is not the publication's"""
MOST_STEPS = 12
MOST_VERSIONS = 300


class PublicationDisk(Disk):
    """Fails what the publication does, not what is done beside it."""

    def __call__(self, name: str, where: Path | None) -> None:
        if threading.current_thread().name not in BESIDE:
            super().__call__(name, where)


@pytest.fixture
def publish_loop(places: Places) -> Iterator[PublishLoop]:
    settings = PublisherSettings(
        channel=places.channel,
        base=places.base,
        local=places.local,
        watch=places.watch,
        threads=1,
        settle_seconds=0.0,
        consume=True,
    )
    made = PublishLoop(settings, Metrics(), Wakeup(), Stop(), deque[str]())
    made.start()
    yield made
    made.close()


def stepped_until_done(
    publish_loop: PublishLoop, places: Places, disk: Disk, tensors: Model, version: int
) -> None:
    """As the daemon does, whatever a step raises: the version is out, and nothing is left to do."""
    with watched(disk):
        for _ in range(MOST_STEPS):
            with suppress(WeightcastError, OSError):
                publish_loop.step(Stop())
                follows = read_checkpoint(places.local) == bytes_of(tensors)
                if follows and places.latest() == f"{version:06d}" and _has_consumed(places):
                    return
    pytest.fail(f"not done after errors at {disk.failed_at}")


def _has_consumed(places: Places) -> bool:
    return [path.name for path in places.watch.iterdir() if path.name != ".probe"] == []


def indexes(places: Places) -> dict[str, bytes]:
    """Of all versions, without what is made beside them."""
    return {path.parent.name: path.read_bytes() for path in places.channel.glob(f"weight_v*/{INDEX}")}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lasting", [0, 2])
def test_at_every_failpoint_of_a_publication(publish_loop: PublishLoop, places: Places, lasting: int) -> None:
    tensors, known = base_tensors(), indexes(places)
    for version in range(1, MOST_VERSIONS):
        tensors = changed(tensors, version)
        rename_in(places.watch / f"step_{version}", tensors)
        disk = PublicationDisk(version, lasting, ELSEWHERE, errno.ENOSPC)
        stepped_until_done(publish_loop, places, disk, tensors, version)
        found = indexes(places)
        assert len(found) == version, f"one version of one checkpoint, after {disk.failed_at}"
        assert known.items() <= found.items(), f"a committed version changed after {disk.failed_at}"
        known = found
        if not disk.failed_at:
            break
    assert version > 40, "a publication passes that many"
    host = LocalUpdater(open_store(places.channel), places.local.parent / "host", places.base)
    host.update_to(Channel.open(open_store(places.channel)))
    host.close()
    assert read_checkpoint(places.local.parent / "host") == bytes_of(tensors)
    assert not list(places.channel.glob("*.parts"))

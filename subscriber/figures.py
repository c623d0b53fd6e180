"""What a subscriber shows as Prometheus metrics, taken from its status."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from weightcast.shared.service.metrics import byte_count, count, duration, number
from weightcast.shared.service.verify import VerifyFigures
from weightcast.subscriber.status import HostStatus, UpdateStatus

_NONE = -1


class Figures:
    """`show` is called with every status; updates are counted once each."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._local = number(registry, "local_version", "Version on disk; -1: none.")
        self._target = number(registry, "target_version", "Version to be reached; -1: not known.")
        self._served = number(registry, "served_version", "Lowest version an engine confirmed; -1: none.")
        self._ready = number(registry, "ready", "1 when every engine serves the local version.")
        self._degraded = number(registry, "degraded", "1 when the host is not where it should be.")
        self._blocked = number(registry, "blocked_versions", "Versions that the engines refused.")
        self._read = byte_count(registry, "channel_read", "Bytes of versions read from the channel.")
        self._updates = count(registry, "updates", "Moves of the local checkpoint and reloads.", ("kind",))
        self._seconds = duration(registry, "update_phase", "Time of an update by phase.", ("phase",))
        self._paused = duration(registry, "engine_pause", "Longest pause of an engine in an update.")
        self._engine_ready = number(
            registry, "engine_ready", "1 when this engine serves the local version.", ("engine",)
        )
        self._engine_failures = number(
            registry, "engine_failures", "Rounds of reloads in vain, in a row.", ("engine",)
        )
        self._verify = VerifyFigures(registry)
        self._bytes_seen = 0
        self._newest: UpdateStatus | None = None

    def show(self, status: HostStatus) -> None:
        self._local.set(_number(status.local_version))
        self._target.set(_number(status.target_version))
        self._served.set(_number(status.served_version))
        self._ready.set(status.ready)
        self._degraded.set(bool(status.degraded))
        self._blocked.set(len(status.blocked))
        self._read.inc(status.bytes_read - self._bytes_seen)
        self._bytes_seen = status.bytes_read
        for engine in status.engines:
            self._engine_ready.labels(engine.name).set(engine.ready)
            self._engine_failures.labels(engine.name).set(engine.failures)
        self._verify.show(status.verify, status.last_full_hash)
        for update in self._unseen(status):
            self._count(update)

    def _unseen(self, status: HostStatus) -> list[UpdateStatus]:
        found: list[UpdateStatus] = []
        for update in reversed(status.updates):
            if update is self._newest:
                break
            found.append(update)
        if status.updates:
            self._newest = status.updates[-1]
        return found[::-1]

    def _count(self, update: UpdateStatus) -> None:
        self._updates.labels(update.kind).inc()
        for phase, seconds in update.seconds.items():
            self._seconds.labels(phase).observe(seconds)
        if update.pause_seconds is not None:
            self._paused.observe(update.pause_seconds)


def _number(version: int | None) -> int:
    return _NONE if version is None else version

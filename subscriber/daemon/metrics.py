"""What a subscriber shows as Prometheus metrics, taken from its status."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from prometheus_client import Counter

from weightcast.shared.daemon.metrics import NONE, OTHER, Metrics, VerifyMetrics, one_of
from weightcast.subscriber.engines.live import Why
from weightcast.subscriber.status import (
    Cause,
    EngineCondition,
    HostStatus,
    LiveStatus,
    MoveKind,
    UpdateStatus,
)
from weightcast.subscriber.sync.options import FOLLOW_LATEST

PHASES = (
    "plan", "seed", "repair", "fetch", "stage", "offer", "group", "lock", "patch", "verify", "pause",
    "reload", "read_back", "resume", OTHER,
)  # fmt: skip
CAUSES: tuple[str, ...] = get_args(Cause)
CONDITIONS: tuple[str, ...] = get_args(EngineCondition)
WHYS: tuple[str, ...] = (*get_args(Why), OTHER)
_NAN = float("nan")


def _number(version: int | None) -> int:
    return NONE if version is None else version


def _or_nan(value: float | None) -> float:
    return _NAN if value is None else value


_NUMBERS: tuple[tuple[str, str, Callable[[HostStatus], float]], ...] = (
    ("local_version", "Version on disk; -1: none.", lambda s: _number(s.local_version)),
    ("target_version", "Version to be reached; -1: not known.", lambda s: _number(s.target_version)),
    ("served_version", "Lowest version an engine confirmed; -1: none.", lambda s: _number(s.served_version)),
    (
        "lag_versions",
        "Target less served version; NaN while either is not known.",
        lambda s: _or_nan(s.lag_versions),
    ),
    (
        "follows_latest",
        "1 when the target is latest, 0 for a version or a tag.",
        lambda s: s.target == FOLLOW_LATEST.text,
    ),
    ("ready", "1 when every engine serves the local version.", lambda s: s.ready),
    ("degraded", "1 when the host is not where it should be.", lambda s: bool(s.degraded)),
    ("blocked_versions", "Versions that the engines refused.", lambda s: len(s.blocked)),
    (
        "reload_proof_age_seconds",
        "Age of the oldest hash of the local weights when engines were last reloaded; NaN: never.",
        lambda s: _or_nan(s.reload_proof.age_seconds if s.reload_proof else None),
    ),
    (
        "reload_proof_bound_seconds",
        "Age from which weights are hashed again before a reload.",
        lambda s: _or_nan(s.reload_proof.bound_seconds if s.reload_proof else None),
    ),
)
"""metrics that are one number of the status"""


class SubscriberMetrics:
    """`show` is called with every status, `count` with every update."""

    def __init__(self, registry: Metrics) -> None:
        self._run = registry.facts(
            "run",
            "The run that is followed here; always 1.",
            {"run_id": "the channel's", "role": ("subscriber",), "software": "this daemon's"},
        )
        self._numbers = [(registry.number(what, help), value) for what, help, value in _NUMBERS]
        self._bytes = registry.count(
            "channel_bytes",
            "Bytes of versions, by direction and by what they were for.",
            {"direction": ("read",), "cause": CAUSES},
        )
        self._changes = registry.count("changed_words", "Words changed on disk by updates.")
        self._updates = registry.count(
            "updates", "Moves of the local checkpoint and reloads.", {"kind": get_args(MoveKind)}
        )
        self._seconds = registry.duration("update", "A whole update.", {"kind": get_args(MoveKind)})
        self._phases = registry.duration("update_phase", "Time of an update by phase.", {"phase": PHASES})
        self._paused = registry.duration("engine_pause", "Longest pause of an engine in an update.")
        self._damage = registry.count(
            "digest_mismatches",
            "Files of the channel and tensors on disk that were not what their digests say.",
            {"place": ("channel", "local")},
        )
        engine = {"engine": "as --engine names it"}
        self._state = registry.number(
            "engine_state", "1 for the state that the engine is in.", {**engine, "state": CONDITIONS}
        )
        self._version = registry.number("engine_version", "Version it confirmed last; -1: none.", engine)
        self._failures = registry.number("engine_failures", "Rounds of failed reloads in a row.", engine)
        self._ways = registry.count(
            "engine_updates",
            "How engines with via=live came to versions: by a patch of their memory, or from disk.",
            {**engine, "way": ("live", "reload")},
        )
        self._because = registry.count(
            "engine_disk_reloads",
            "Reloads from disk of engines with via=live, by their cause.",
            {**engine, "because": WHYS},
        )
        self._faults = registry.count(
            "engine_verify_faults", "Times that an engine's memory was found wrong.", engine
        )
        adapter = {"adapter": "its name"}
        self._adapter = registry.number(
            "adapter_version", "Newest version that every engine has; -1: none.", adapter
        )
        self._adapter_target = registry.number(
            "adapter_target_version", "Newest version in the channel; -1: not known.", adapter
        )
        self._adapters: set[str] = set()
        self._verify = VerifyMetrics(registry)
        self._totals: dict[Counter, int] = {}
        """of counters that show totals of a status"""

    def show(self, status: HostStatus) -> None:
        self._run.info({"run_id": status.run_id or "", "role": "subscriber", "software": status.software})
        for gauge, value in self._numbers:
            gauge.set(value(status))
        self._verify.show(status.verify, status.last_full_hash)
        for cause, nbytes in status.bytes_by_cause.items():
            self._follow(self._bytes, nbytes, "read", cause)
        for engine in status.engines:
            for condition in CONDITIONS:
                self._state.labels(engine.name, condition).set(engine.state == condition)
            self._version.labels(engine.name).set(_number(engine.version))
            self._failures.labels(engine.name).set(engine.failures)
            if engine.live is not None:
                self._show_live(engine.name, engine.live)

        names = {one.name for one in status.adapters}
        for name in self._adapters - names:
            self._adapter.remove(name)
            self._adapter_target.remove(name)
        self._adapters = names
        for one in status.adapters:
            self._adapter.labels(one.name).set(one.loaded[0] if one.loaded else NONE)
            self._adapter_target.labels(one.name).set(_number(one.target))

    def _show_live(self, name: str, live: LiveStatus) -> None:
        self._follow(self._ways, live.patches, name, "live")
        self._follow(self._ways, live.reloads, name, "reload")
        self._follow(self._faults, 0 if live.verify is None else live.verify.faults, name)
        for why, times in live.because.items():
            self._follow(self._because, times, name, why)

    def _follow(self, counter: Counter, total: int, *labels: str) -> None:
        series = counter.labels(*labels)
        series.inc(total - self._totals.get(series, 0))
        self._totals[series] = total

    def count(self, update: UpdateStatus) -> None:
        self._updates.labels(update.kind).inc()
        self._changes.inc(update.changes)
        for phase, seconds in update.seconds.items():
            if phase == "total":
                self._seconds.labels(update.kind).observe(seconds)
            else:
                self._phases.labels(one_of(phase, PHASES)).observe(seconds)
        if update.pause_seconds is not None:
            self._paused.observe(update.pause_seconds)
        self._damage.labels("channel").inc(len(update.around))
        self._damage.labels("local").inc(update.kind == "repair")

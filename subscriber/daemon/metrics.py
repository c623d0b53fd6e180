"""What a subscriber shows as Prometheus metrics, taken from its status."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from prometheus_client import Counter

from weightcast.shared.daemon.metrics import (
    NONE,
    OTHER,
    Metrics,
    VerifyMetrics,
    one_of,
)
from weightcast.subscriber.engines.live import Why
from weightcast.subscriber.status import (
    Cause,
    EngineCondition,
    EngineStatus,
    HostStatus,
    LiveStatus,
    MoveKind,
    ReloadProof,
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
Way = Literal["live", "reload"]
_ENGINE = "as --engine names it"
_NAN = float("nan")


class SubscriberMetrics:
    """`show` is called with every status, `count` with every update."""

    def __init__(self, registry: Metrics) -> None:
        self._run = registry.facts(
            "run",
            "The run that is followed here; always 1.",
            {"run_id": "the channel's", "role": ("subscriber",), "software": "this daemon's"},
        )
        self._local = registry.number("local_version", "Version on disk; -1: none.")
        self._target = registry.number("target_version", "Version to be reached; -1: not known.")
        self._served = registry.number("served_version", "Lowest version an engine confirmed; -1: none.")
        self._lag = registry.number(
            "lag_versions", "Target less served version; NaN while either is not known."
        )
        self._follows = registry.number(
            "follows_latest", "1 when the target is latest, 0 for a version or a tag."
        )
        self._ready = registry.number("ready", "1 when every engine serves the local version.")
        self._degraded = registry.number("degraded", "1 when the host is not where it should be.")
        self._blocked = registry.number("blocked_versions", "Versions that the engines refused.")
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
        self._proof_age = registry.number(
            "reload_proof_age_seconds",
            "Age of the oldest hash of the local weights when engines were last reloaded; NaN: never.",
        )
        self._proof_bound = registry.number(
            "reload_proof_bound_seconds", "Age from which weights are hashed again before a reload."
        )
        self._engines = _EngineMetrics(registry)
        self._verify = VerifyMetrics(registry)
        self._totals = _Totals()

    def show(self, status: HostStatus) -> None:
        self._run.info({"run_id": status.run_id or "", "role": "subscriber", "software": status.software})
        self._local.set(_number(status.local_version))
        self._target.set(_number(status.target_version))
        self._served.set(_number(status.served_version))
        self._lag.set(_NAN if status.lag_versions is None else status.lag_versions)
        self._follows.set(status.target == FOLLOW_LATEST.text)
        self._ready.set(status.ready)
        self._degraded.set(bool(status.degraded))
        self._blocked.set(len(status.blocked))
        self._engines.show(status.engines)
        self._verify.show(status.verify, status.last_full_hash)
        self._show_proof(status.reload_proof)
        for cause, nbytes in status.bytes_by_cause.items():
            self._totals.follow(self._bytes, nbytes, "read", cause)

    def _show_proof(self, proof: ReloadProof | None) -> None:
        known = _NAN if proof is None or proof.age_seconds is None else proof.age_seconds
        self._proof_age.set(known)
        self._proof_bound.set(_NAN if proof is None else proof.bound_seconds)

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


class _EngineMetrics:
    def __init__(self, registry: Metrics) -> None:
        engine = {"engine": _ENGINE}
        self._state = registry.number(
            "engine_state",
            "1 for the state that the engine is in.",
            {**engine, "state": CONDITIONS},
        )
        self._version = registry.number("engine_version", "Version it confirmed last; -1: none.", engine)
        self._failures = registry.number("engine_failures", "Rounds of failed reloads in a row.", engine)

        self._ways = registry.count(
            "engine_updates",
            "How engines with via=live came to versions: by a patch of their memory, or from disk.",
            {**engine, "way": get_args(Way)},
        )
        self._because = registry.count(
            "engine_disk_reloads",
            "Reloads from disk of engines with via=live, by their cause.",
            {**engine, "because": WHYS},
        )
        self._faults = registry.count(
            "engine_verify_faults", "Times that an engine's memory was found wrong.", engine
        )
        self._totals = _Totals()

    def show(self, engines: Iterable[EngineStatus]) -> None:
        for engine in engines:
            for condition in CONDITIONS:
                self._state.labels(engine.name, condition).set(engine.state == condition)
            self._version.labels(engine.name).set(_number(engine.version))
            self._failures.labels(engine.name).set(engine.failures)
            if engine.live is not None:
                self._show_live(engine.name, engine.live)

    def _show_live(self, name: str, live: LiveStatus) -> None:
        self._totals.follow(self._ways, live.patches, name, "live")
        self._totals.follow(self._ways, live.reloads, name, "reload")
        self._totals.follow(self._faults, 0 if live.verify is None else live.verify.faults, name)
        for why, times in live.because.items():
            self._totals.follow(self._because, times, name, why)


class _Totals:
    """Counters that show totals of a status."""

    def __init__(self) -> None:
        self._shown: dict[Counter, int] = {}

    def follow(self, counter: Counter, total: int, *labels: str) -> None:
        series = counter.labels(*labels)
        series.inc(total - self._shown.get(series, 0))
        self._shown[series] = total


def _number(version: int | None) -> int:
    return NONE if version is None else version

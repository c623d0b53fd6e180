"""What a host reports of itself."""

from __future__ import annotations

from weightcast.shared.base.errors import FIX_ENGINE
from weightcast.shared.channel.components import ADAPTER
from weightcast.shared.channel.reports import UPDATES_LIMIT, AdapterReport, Report, Update
from weightcast.shared.channel.run_files import DRAFT
from weightcast.shared.checkpoint.state.locks import EngineLoads
from weightcast.shared.daemon.reporter import report_of
from weightcast.subscriber.status import AdapterStatus, GateStatus, HostStatus, UpdateStatus

_ENGINE = ("name", "kind", "state", "mark", "version", "confirmed_by", "aligned")
"""what is reported of an engine's status"""
_ERROR = 256
VERIFY_CHANNEL = "check the mount; run `weightcast channel verify` on the publisher's machine"


def describe(status: HostStatus) -> Report:
    """`counter` is 0."""
    rows = [] if status.draft is None else [_adapter(status.draft, DRAFT)]
    return report_of(
        status,
        *_trouble(status),
        engines=tuple({name: getattr(one, name) for name in _ENGINE} for one in status.engines),
        bytes={str(cause): nbytes for cause, nbytes in status.bytes_by_cause.items()},
        updates=tuple(map(_update, reversed(status.updates[-UPDATES_LIMIT:]))),
        adapters=(*rows, *(_adapter(one, ADAPTER + one.name) for one in status.adapters)),
        gate="" if status.gate is None else status.gate.url,
        requests={} if status.gate is None else _requests(status.gate),
        tokens={} if status.gate is None else status.gate.tokens,
    )


def _requests(gate: GateStatus) -> dict[str, int]:
    now = {"under_way": sum(gate.requests.values()), "waiting": gate.waiting}
    return {**now, "closed": int(gate.version is None), **gate.outcomes}


def _trouble(status: HostStatus) -> tuple[str, str]:
    """What went wrong, and what to do about it. A failed engine does not fail the host's step; a silent
    engine that never served is still starting."""
    error = status.last_error
    if error is not None:
        kind = "waits" if error.error == EngineLoads.__name__ else error.error
        return f"{kind}: {error.message}", error.remedy
    waiting = status.waiting_for
    if waiting is not None:
        return str(waiting), VERIFY_CHANNEL
    failed = [
        f"engine {one.name} {'failed' if one.state == 'failed' else 'does not serve'}: {one.reason}"
        for one in status.engines
        if one.state == "failed" or (one.state == "silent" and one.version is not None)
    ]
    if failed:
        return "; ".join(failed), FIX_ENGINE
    troubles = {name: one for name, one in status.components.items() if one.state == "failed"}
    texts = "; ".join(f"{name}: {one.error}" for name, one in troubles.items())
    return texts, next((one.remedy for one in troubles.values()), "")


def _adapter(one: AdapterStatus, name: str) -> AdapterReport:
    return AdapterReport(
        name=name,
        version=one.loaded[0] if one.loaded else None,
        target=one.target,
        main_version=one.main_version,
        state="ready" if one.state == "loaded" else one.state,
        error=one.error[:_ERROR],
        remedy=one.remedy[:_ERROR],
    )


def _update(update: UpdateStatus) -> Update:
    paused = {} if update.pause_seconds is None else {"pause_total": update.pause_seconds}
    return Update(
        version=update.version,
        kind=update.kind,
        began=round(update.at - update.seconds.get("total", 0.0), 3),
        seconds={phase: round(seconds, 4) for phase, seconds in {**update.seconds, **paused}.items()},
        bytes=update.bytes,
        outcome="refused" if update.kind == "undo" or not update.taken else "done",
    )

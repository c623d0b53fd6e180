"""What a host reports of itself."""

from __future__ import annotations

from weightcast.shared.base.errors import FIX_ENGINE
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.reports import UPDATES_LIMIT, Report, Update
from weightcast.shared.daemon.reporter import InChannel, Reporter, ToPublisher
from weightcast.subscriber.daemon.settings import SubscriberSettings
from weightcast.subscriber.status import HostStatus, UpdateStatus

_HOST = ("host", "local", "software", "target", "target_version", "local_version", "served_version")
"""what is reported of the status as it is"""
_ENGINE = ("name", "kind", "state", "mark", "version", "confirmed_by", "aligned")
"""what is reported of an engine's status"""
VERIFY_CHANNEL = "check the mount; run `weightcast channel verify` on the publisher's machine"


def open_reporter(settings: SubscriberSettings) -> Reporter | None:
    """None where this host reports to nobody."""
    if settings.report_to is not None:
        return Reporter(
            ToPublisher(settings.report_to, settings.secret(settings.report_token)), settings.report_seconds
        )
    if not settings.report or open_store(settings.channel).is_static:
        return None
    return Reporter(InChannel(settings.channel), settings.report_seconds)


def describe(status: HostStatus) -> Report:
    """`counter` is 0."""
    error, remedy = _trouble(status)
    return Report(
        **{name: getattr(status, name) for name in _HOST},
        run_id=status.run_id or "",
        state="ready" if status.ready else status.state,
        lag=status.lag_versions,
        last_error=error,
        engines=tuple({name: getattr(one, name) for name in _ENGINE} for one in status.engines),
        counter=0,
        phase=status.state,
        remedy=remedy,
        retries=status.loop.retries,
        bytes={str(cause): nbytes for cause, nbytes in status.bytes_by_cause.items()},
        updates=tuple(map(_update, reversed(status.updates[-UPDATES_LIMIT:]))),
        gate="" if status.gate is None else status.gate.url,
    )


def _trouble(status: HostStatus) -> tuple[str, str]:
    """What went wrong, and what to do about it. A failed engine does not fail the host's step."""
    error = status.last_error
    if error is not None:
        return f"{error.error}: {error.message}", error.remedy
    waiting = status.waiting_for
    if waiting is not None:
        return str(waiting), VERIFY_CHANNEL
    failed = [f"engine {one.name} failed: {one.reason}" for one in status.engines if one.state == "failed"]
    return "; ".join(failed), FIX_ENGINE if failed else ""


def _update(update: UpdateStatus) -> Update:
    return Update(
        version=update.version,
        kind=update.kind,
        began=round(update.at - update.seconds.get("total", 0.0), 3),
        seconds={phase: round(seconds, 4) for phase, seconds in update.seconds.items()},
        bytes=update.bytes,
        outcome="refused" if update.kind == "undo" or not update.taken else "done",
    )

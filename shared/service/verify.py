"""What a daemon says of its background verify."""

from __future__ import annotations

from weightcast.shared.local.scrub import ScrubStatus
from weightcast.shared.service.metrics import Metrics, count, moment, share
from weightcast.shared.service.snapshot import Frozen

_NEVER = -1


class VerifyStatus(Frozen):
    """Of the background verify, since the start."""

    rate: int
    """bytes per second, at most; 0: off"""
    done_bytes: int
    """of this pass"""
    total_bytes: int
    passes: int
    full_pass: float | None
    """unix time at which the last whole pass began: every byte was read since"""
    faults: int
    last_fault: str
    last_fault_at: float | None
    """unix time"""


def verify_status(scrub: ScrubStatus | None) -> VerifyStatus | None:
    if scrub is None:
        return None
    return VerifyStatus(
        rate=scrub.rate,
        done_bytes=scrub.done_bytes,
        total_bytes=scrub.total_bytes,
        passes=scrub.passes,
        full_pass=scrub.full_pass,
        faults=scrub.faults,
        last_fault=scrub.last_fault,
        last_fault_at=scrub.last_fault_at,
    )


class VerifyFigures:
    def __init__(self, registry: Metrics) -> None:
        self._progress = share(registry, "verify_progress", "Share of this pass of the verify that is done.")
        self._faults = count(registry, "verify_faults", "Tensors that the verify found wrong.")
        self._hashed = moment(
            registry, "last_full_hash", "Unix time since which every byte was read; -1: never."
        )
        self._seen = 0

    def show(self, status: VerifyStatus | None, last_full_hash: float | None) -> None:
        self._hashed.set(_NEVER if last_full_hash is None else last_full_hash)
        if status is not None:
            self._progress.set(status.done_bytes / max(status.total_bytes, 1))
            self._faults.inc(status.faults - self._seen)
            self._seen = status.faults

"""What a daemon says of its background verify."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightcast.shared.service.facts import Facts

if TYPE_CHECKING:
    from weightcast.shared.local.scrub import ScrubStatus


class VerifyStatus(Facts):
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

"""The background verify as metrics."""

from __future__ import annotations

from weightcast.shared.service.metrics import Metrics, count, moment, share
from weightcast.shared.service.verify import VerifyStatus

_NEVER = -1


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

"""Proves the bytes of the local checkpoint before engines load them: what was last hashed longer ago than a
bound is hashed again."""

from __future__ import annotations

from weightcast.shared.local.hashing import Damaged
from weightcast.shared.local.patch import prove
from weightcast.shared.progress import Advance
from weightcast.subscriber.status import ReloadProof
from weightcast.subscriber.step.host import StepHost

ALWAYS_BYTES = 1 << 30
"""a local checkpoint up to this size is hashed in full before every reload; that takes about 0.1 s"""


class Prover:
    """Raises Damaged: the caller repairs before an engine is reloaded."""

    def __init__(self, host: StepHost) -> None:
        self._host = host

    @property
    def _bound(self) -> float:
        is_small = self._host.local().table.nbytes <= ALWAYS_BYTES
        return 0.0 if is_small else self._host.options.verified_within

    def ahead(self) -> None:
        """While engines serve and nothing is locked. At half the bound, so that the reload that follows finds
        little or nothing to hash."""
        if self._bound:
            self._host.enter("hashing")
            self._prove(self._bound / 2, self._host.advance)

    def now(self) -> None:
        """Under the patch lock, right before a reload. A stop is not obeyed: engines may be paused."""
        self._prove(self._bound, None)
        age = round(self._host.local().proofs.age, 3)
        self._host.view.proof = self._known.but(
            bound_seconds=self._bound, age_seconds=age, at=self._host.calls.now()
        )

    @property
    def _known(self) -> ReloadProof:
        return self._host.view.proof or ReloadProof(bound_seconds=self._bound)

    def _prove(self, seconds: float, advance: Advance | None) -> None:
        try:
            with self._host.watch.timed("verify"):
                prove(self._host.local(), seconds, threads=self._host.options.threads, advance=advance)
        except Damaged as found:
            self._host.view.proof = self._known.but(
                faults=self._known.faults + len(found.tensors),
                last_fault=found.message,
                last_fault_at=self._host.calls.now(),
            )
            raise

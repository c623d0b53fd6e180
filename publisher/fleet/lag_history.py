"""How far behind hosts were in the last hour: a sample every half minute, in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pydantic import BaseModel

from weightcast.shared.daemon.fleet import Fleet

LAGS = {"0": 0, "1": 1, "2-3": 3, "4-15": 15, "16-63": 63}
"""labels of lags, by the most that they hold"""
MORE, UNKNOWN = "64+", "unknown"
SAMPLE_SECONDS, MOST_SAMPLES = 30.0, 120


def lag_label(lag: int | None) -> str:
    if lag is None:
        return UNKNOWN
    return next((label for label, most in LAGS.items() if lag <= most), MORE)


def lag_counts(fleet: Fleet) -> Counter[str]:
    """Hosts that take part, by versions behind."""
    return Counter(lag_label(host.lag) for host in fleet.hosts if host.takes_part)


class LagSample(BaseModel, frozen=True):
    at: float
    """unix time on the publisher's clock"""
    behind: Mapping[str, int]
    """hosts that neither stopped nor are lost, by versions behind; `unknown`: they serve none yet"""
    lost: int
    held: str
    """why publishing was held; empty: it was not"""


class LagHistory(BaseModel, frozen=True):
    samples: tuple[LagSample, ...] = ()
    """oldest first"""

    def after(self, fleet: Fleet) -> LagHistory:
        """With what a look found: of a half minute the look with most hosts up to date counts, so that hosts
        which take a new version are not behind; and any hold."""
        kept = [one for one in self.samples if one.at // SAMPLE_SECONDS != fleet.now // SAMPLE_SECONDS]
        known = self.samples[len(kept) :]
        held = "" if fleet.publisher is None else fleet.publisher.held
        sample = LagSample(
            at=fleet.now,
            behind=lag_counts(fleet),
            lost=sum(host.standing == "lost" and not host.is_ghost for host in fleet.hosts),
            held=held or "".join(one.held for one in known),
        )
        best = max((sample, *known), key=lambda one: one.behind.get("0", 0))
        best = best.model_copy(update={"held": sample.held})
        return LagHistory(samples=(*kept, best)[-MOST_SAMPLES:])

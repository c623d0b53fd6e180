"""What the hosts of an engine group send each other, checked as it comes in."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from weightcast.shared.checkpoint.state.state import Position
from weightcast.shared.daemon.frozen import Frozen
from weightcast.subscriber.groups.order import (
    LEASE_LIMIT,
    NAME_LIMIT,
    NUMBER_LIMIT,
    REASON_LIMIT,
    HoldState,
    Order,
    OrderPhase,
)


class _Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    leader: str = Field(min_length=1, max_length=NAME_LIMIT)
    term: int = Field(ge=0, le=NUMBER_LIMIT)


class HoldRequest(_Request):
    phase: OrderPhase
    version: int = Field(ge=0, le=NUMBER_LIMIT)
    run_id: str = Field("", max_length=NAME_LIMIT)
    digest: str = Field("", max_length=NAME_LIMIT)
    root: str = Field("", max_length=NAME_LIMIT)
    seconds: float = Field(gt=0, le=LEASE_LIMIT, allow_inf_nan=False)
    """lease, from the arrival of the request; every repetition renews it"""

    def order(self) -> Order:
        return Order(
            leader=self.leader,
            term=self.term,
            phase=self.phase,
            version=self.version,
            run_id=self.run_id,
            digest=self.digest,
            root=self.root,
        )


class ReleaseRequest(_Request):
    served: bool = False
    """an engine took the version: the way back may be dropped"""


class Hold(Frozen):
    """What a follower says: the order it has, and where its local checkpoint is."""

    state: HoldState = "free"
    leader: str = Field("", max_length=NAME_LIMIT)
    """whose order it has, or had last"""
    term: int = Field(0, ge=0, le=NUMBER_LIMIT)
    phase: OrderPhase | None = None
    version: int | None = Field(None, ge=0, le=NUMBER_LIMIT)
    """ordered; null when free"""
    reason: str = Field("", max_length=REASON_LIMIT)
    grant: str = Field("", max_length=NAME_LIMIT)
    """while held; the same one means that nothing was written in between"""
    seconds_left: float | None = Field(None, allow_inf_nan=False)
    local_version: int | None = Field(None, ge=0, le=NUMBER_LIMIT)
    local_digest: str = Field("", max_length=NAME_LIMIT)
    local_root: str = Field("", max_length=NAME_LIMIT)

    def lies_at(self, position: Position) -> bool:
        here = (self.local_version, self.local_digest, self.local_root)
        return here == (position.version, position.digest, position.root)

    def answers(self, order: Order) -> bool:
        return (self.leader, self.term, self.phase) == (order.leader, order.term, order.phase)

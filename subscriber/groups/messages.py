"""What the hosts of an engine group send each other: `POST /v1/hold`, `POST /v1/release`, `GET /v1/hold`,
`POST /v1/adapters`.

A leader orders; a follower answers with what it does for the order that it has, which need not be the one
that just came: an order of a lower term, or of another leader while a lease runs, is not taken. Plain values,
whose bounds pydantic and FastAPI check where they come in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le, MaxLen, MinLen

from weightcast.shared.base.choices import LEASE_LIMIT
from weightcast.shared.checkpoint.state.state import Position

NAME_LIMIT = 300
REASON_LIMIT = 1000
HOLD_PATH, RELEASE_PATH, ADAPTERS_PATH = "/v1/hold", "/v1/release", "/v1/adapters"

Name = Annotated[str, MaxLen(NAME_LIMIT)]
Leader = Annotated[str, MinLen(1), MaxLen(NAME_LIMIT)]
Number = Annotated[int, Ge(0), Le(1 << 62)]
Lease = Annotated[float, Gt(0), Le(LEASE_LIMIT)]
Reason = Annotated[str, MaxLen(REASON_LIMIT)]
OrderPhase = Literal["prepare", "hold"]
HoldState = Literal["free", "working", "prepared", "held", "refused", "failed"]
"""free: no order. refused: this version is not taken here. failed: it is tried again."""
_NOTHING_MORE = {"extra": "forbid"}


@dataclass(frozen=True)
class Order:
    """What a leader wants of every follower. Two orders of one term are about the same version."""

    __pydantic_config__: ClassVar = _NOTHING_MORE

    leader: Leader
    term: Number
    phase: OrderPhase
    version: Number
    run_id: Name = ""
    """empty: of a foreign channel"""
    digest: Name = ""
    """of the version's index; while preparing it may be unknown, and empty"""
    root: Name = ""
    seconds: Lease = field(kw_only=True, compare=False)
    """lease, from the arrival of the order; every repetition renews it"""

    def is_at(self, position: Position) -> bool:
        return (self.version, self.digest, self.root) == (position.version, position.digest, position.root)


@dataclass(frozen=True)
class Release:
    """The leader's order of this term ends before its lease does. `served`: an engine took the version, and
    the way back may be dropped."""

    __pydantic_config__: ClassVar = _NOTHING_MORE

    leader: Leader
    term: Number
    served: bool = False


@dataclass(frozen=True)
class AdaptersUsed:
    """Versions of adapters (math@17) that the leader's engines have loaded, or are about to. The answer has
    all that are exported on the follower: digests by name. It deletes none of these."""

    __pydantic_config__: ClassVar = _NOTHING_MORE

    labels: Annotated[tuple[Name, ...], MaxLen(1 << 16)] = ()


@dataclass(frozen=True)
class Hold:
    """What a follower says: the order it has, and where its local checkpoint is."""

    state: HoldState = "free"
    leader: Name = ""
    """whose order it has, or had last"""
    term: Number = 0
    phase: OrderPhase | None = None
    version: Number | None = None
    """ordered; null when free"""
    reason: Reason = ""
    grant: Name = ""
    """while held; the same one means that nothing was written in between"""
    seconds_left: Annotated[float, Ge(-LEASE_LIMIT), Le(LEASE_LIMIT)] | None = None
    local_version: Number | None = None
    local_digest: Name = ""
    local_root: Name = ""

    def answers(self, order: Order) -> bool:
        return (self.leader, self.term, self.phase) == (order.leader, order.term, order.phase)

    def is_at(self, place: Order | Position) -> bool:
        here = (self.local_version, self.local_digest, self.local_root)
        return here == (place.version, place.digest, place.root)

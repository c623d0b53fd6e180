"""Words that the hosts of an engine group exchange: `POST /v1/hold`, `POST /v1/release`, `GET /v1/hold`.

A leader orders; a follower answers with what it does for the order that it has, which need not be the one
that just came: an order of a lower term, or of another leader while a lease runs, is not taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

from weightcast.shared.local.state import Position
from weightcast.shared.service.snapshot import Frozen

NAME_LIMIT = 300
REASON_LIMIT = 1000
NUMBER_LIMIT = 1 << 62
LEASE_LIMIT = 3600.0
HOLD_PATH, RELEASE_PATH = "/v1/hold", "/v1/release"

Phase = Literal["prepare", "hold"]
HoldState = Literal["free", "working", "prepared", "held", "refused", "failed"]
"""free: no order. refused: this version is not taken here. failed: it is tried again."""


def is_member_url(url: str) -> bool:
    """Whether it is `http(s)://host[:port]` and nothing more."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    rest = (parts.path.strip("/"), parts.query, parts.fragment, parts.username, parts.password)
    return known and url.isascii() and url.isprintable() and " " not in url and not any(rest)


@dataclass(frozen=True)
class Order:
    """What a leader wants of every follower. Two orders of one term are about the same version."""

    leader: str
    term: int
    phase: Phase
    version: int
    run_id: str = ""
    """empty: of a foreign channel"""
    digest: str = ""
    """of the version's index; while preparing it may be unknown, and empty"""
    root: str = ""

    def is_at(self, position: Position) -> bool:
        return (self.version, self.digest, self.root) == (position.version, position.digest, position.root)


class _Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    leader: str = Field(min_length=1, max_length=NAME_LIMIT)
    term: int = Field(ge=0, le=NUMBER_LIMIT)


class HoldRequest(_Request):
    phase: Phase
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
    phase: Phase | None = None
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

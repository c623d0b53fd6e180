"""Words that the hosts of an engine group exchange: `POST /v1/hold`, `POST /v1/release`, `GET /v1/hold`.

A leader orders; a follower answers with what it does for the order that it has, which need not be the one
that just came: an order of a lower term, or of another leader while a lease runs, is not taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weightcast.shared.checkpoint.state.state import Position
from weightcast.shared.daemon.environment import http_parts

NAME_LIMIT = 300
REASON_LIMIT = 1000
NUMBER_LIMIT = 1 << 62
LEASE_LIMIT = 3600.0
HOLD_PATH, RELEASE_PATH = "/v1/hold", "/v1/release"

OrderPhase = Literal["prepare", "hold"]
HoldState = Literal["free", "working", "prepared", "held", "refused", "failed"]
"""free: no order. refused: this version is not taken here. failed: it is tried again."""


def is_member_url(url: str) -> bool:
    """Whether it is `http(s)://host[:port]` and nothing more."""
    parts = http_parts(url)
    if parts is None:
        return False
    return not any((parts.path.strip("/"), parts.query, parts.fragment, parts.username, parts.password))


@dataclass(frozen=True)
class Order:
    """What a leader wants of every follower. Two orders of one term are about the same version."""

    leader: str
    term: int
    phase: OrderPhase
    version: int
    run_id: str = ""
    """empty: of a foreign channel"""
    digest: str = ""
    """of the version's index; while preparing it may be unknown, and empty"""
    root: str = ""

    def is_at(self, position: Position) -> bool:
        return (self.version, self.digest, self.root) == (position.version, position.digest, position.root)

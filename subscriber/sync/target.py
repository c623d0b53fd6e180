"""The target: what a host follows. `latest`, a version, or a tag that names a version."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from weightcast.shared.base.errors import USAGE, DamagedFile, Refused, RetryLater
from weightcast.shared.channel.layout import Pointer
from weightcast.shared.channel.pins import tagged
from weightcast.shared.channel.store import Store
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.checkpoint.state.state import Blocked
from weightcast.shared.files.paths import file_name
from weightcast.subscriber.engines.rules import REASON_LIMIT, block, retry_delay

LATEST = "latest"
_NUMBER = re.compile(r"\d{1,15}", re.ASCII)


class BadTarget(Refused):
    """A usage error: the text of a target is wrong."""

    exit_code = USAGE


@dataclass(frozen=True)
class Target:
    """`version` is set when the target was given as a number; else `text` is `latest` or a tag's name."""

    text: str = LATEST
    version: int | None = None

    @property
    def exact(self) -> bool:
        """A version is meant, also when it is older than the local one."""
        return self.text != LATEST


FOLLOW_LATEST = Target()


def parse_target(text: str) -> Target:
    """Raises BadTarget."""
    if _NUMBER.fullmatch(text):
        return Target(text, int(text))
    try:
        if not text.startswith(".") and not _NUMBER.fullmatch(text.removeprefix("-")):
            return Target(file_name(text))
    except DamagedFile:
        pass
    raise BadTarget(f"target {text[:80]!r} is none", remedy="give latest, a version's number or a tag")


def resolve(target: Target, store: Store, pointer: Pointer) -> int:
    """The version that the target names now. Raises RetryLater for a tag that does not exist (yet)."""
    if target.text == LATEST:
        return pointer.version
    if target.version is not None:
        return target.version
    return read_tag(store, target.text)


def read_tag(store: Store, name: str) -> int:
    """The six digits in `tags/<name>`."""
    try:
        return tagged(store, name)
    except FileNotFoundError as error:
        raise RetryLater(
            f"{error.filename}: no such tag",
            remedy=f"make it with `weightcast channel tag {name} VERSION`, or follow latest",
        ) from error


class Blocklist:
    """The list itself is part of the local state, by digest; here is when each is due."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._retry_at: dict[str, float] = {}
        self._attempts: dict[str, int] = {}

    def unblock_due(self, local: LocalCheckpoint) -> None:
        """Versions whose time has come are taken again."""
        now = self._clock()
        kept: list[Blocked] = []
        for one in local.state.blocked:
            if self._retry_at.setdefault(one.digest, now + retry_delay(one.attempts)) > now:
                kept.append(one)
            else:
                self._attempts[one.digest] = one.attempts
                del self._retry_at[one.digest]
        if len(kept) < len(local.state.blocked):
            local.save(local.state.but(blocked=tuple(kept)))

    def unblock(self, local: LocalCheckpoint, digest: str) -> None:
        kept = tuple(one for one in local.state.blocked if one.digest != digest)
        if kept != local.state.blocked:
            local.save(local.state.but(blocked=kept))

    def blocked_with(self, local: LocalCheckpoint, reason: str) -> tuple[Blocked, ...]:
        """The list with the local version."""
        refused = local.state.position
        attempts = self._attempts.pop(refused.digest, 0) + 1
        one = Blocked(refused.version, refused.digest, reason[:REASON_LIMIT], attempts)
        return block(local.state.blocked, one)

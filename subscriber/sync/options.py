"""What a host follows and how: the options of a sync, with the target as the user gave it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from weightcast.shared.base.errors import USAGE, DamagedFile, Refused, RetryLater
from weightcast.shared.channel.layout import Pointer
from weightcast.shared.channel.pins import tagged
from weightcast.shared.channel.signing import Trust
from weightcast.shared.channel.store import Store
from weightcast.shared.checkpoint.local_checkpoint import Readers
from weightcast.shared.checkpoint.update.fetch import PreRead
from weightcast.shared.files.paths import ChannelAddress, file_name

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

    def resolve(self, store: Store, pointer: Pointer) -> int:
        """The version that the target names now. Raises RetryLater for a tag that does not exist (yet)."""
        if self.text == LATEST:
            return pointer.version
        if self.version is not None:
            return self.version
        try:
            return tagged(store, self.text)
        except FileNotFoundError as error:
            raise RetryLater(
                f"{error.filename}: no such tag",
                remedy=f"make it with `weightcast channel tag {self.text} VERSION`, or follow latest",
            ) from error


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


@dataclass(frozen=True)
class SyncOptions:
    """`visible_seconds`: how long what the pointer implies may stay invisible."""

    channel: ChannelAddress
    local: Path
    base: Path | None = None
    target: Target = FOLLOW_LATEST
    threads: int = 1
    visible_seconds: float = 120.0
    pre_read: PreRead | None = None
    fetch_ahead: bool = False
    """fetch the next version while one is patched and engines reload"""
    fetch_rate: int = 0
    """bytes per second that are read from the channel; 0: no limit"""
    trust: Trust | None = None
    """whose versions are followed; None: anybody's"""
    readable_by: Readers | None = None
    """set by mode; None: as the umask has it"""
    verified_within: float = 600.0
    """seconds; bytes last hashed longer ago are hashed again before engines load them"""
    group_patch: bool = False
    """a follower also stages patches for the group's engines"""
    transfer_patch: bool = False
    """stage each version's patch for an engine that a training framework drives"""
    group_follower: bool = False
    """the local checkpoint moves only by the orders given to `Sync.sync_once`"""
    base_version: int = 0
    """whose full weights `base` has; above 0 only in foreign channels, whose runs may begin at any version"""
    draft: Path | None = None
    """local checkpoint of the draft model; None: it is not followed"""
    adapters: tuple[str, ...] = ("*",)
    """patterns of the names of adapters that are followed"""
    adapters_kept: int = 2
    """versions of each that engines keep loaded"""
    adapters_plain_names: bool = False
    """engines also know the newest version by the adapter's name alone"""
    allow_base_drift: bool = False
    """load adapters over other main weights than they were trained on"""

"""The target: what a host follows. `latest`, a version, or a tag that stands for a version."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from weightcast.shared.base.errors import USAGE, DamagedFile, Refused, RetryLater
from weightcast.shared.channel.layout import Pointer
from weightcast.shared.channel.pins import tagged
from weightcast.shared.files.paths import file_name

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
        """A version is meant, also when it is older than the one that lies here."""
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


def resolve(target: Target, channel: Path, pointer: Pointer) -> int:
    """The version that the target stands for now. Raises RetryLater for a tag that does not exist (yet)."""
    if target.text == LATEST:
        return pointer.version
    if target.version is not None:
        return target.version
    return read_tag(channel, target.text)


def read_tag(channel: Path, name: str) -> int:
    """The six digits in `tags/<name>`."""
    try:
        return tagged(channel, name)
    except FileNotFoundError as error:
        raise RetryLater(
            f"{error.filename}: there is no such tag",
            remedy=f"make it with `weightcast channel tag {name} VERSION`, or follow latest",
        ) from error

"""The pointer: the file `latest`, in both dialects of the field. docs/FORMAT.md, Pointer."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weightcast.shared.channel.layout import Layout, digits, version_of
from weightcast.shared.errors import DamagedFile, RetryLater
from weightcast.shared.files.durable import read_file, replace
from weightcast.shared.files.paths import file_name

_LIMIT = 4096
_TORN = re.compile(r"(?:[^/]+/weight_v)?\d{0,5}", re.ASCII)
_RUN_DIRECTORY = "updates"


class TornPointer(RetryLater):
    """The pointer was read while it was being written."""


@dataclass(frozen=True)
class Pointer:
    """`run`: the run that the pointer names, None in the plain dialect; `prefix`: the directory that holds
    the version directories."""

    version: int
    run: str | None
    prefix: Path


def read_pointer(channel: Path) -> Pointer | None:
    """None when there is no pointer. Raises TornPointer, and DamagedFile for what can never be one."""
    path = Layout(channel).latest
    try:
        data = read_file(path, _LIMIT)
    except FileNotFoundError:
        return None
    return parse_pointer(data, channel)


def parse_pointer(data: bytes, channel: Path) -> Pointer:
    text = data.decode("ascii", errors="replace").strip()
    if _TORN.fullmatch(text):
        raise TornPointer(f"{Layout(channel).latest} is half written: {text!r}", remedy="read it again")
    run, slash, name = text.rpartition("/")
    version = version_of(name if slash else f"weight_v{name}")
    if version is None or (slash and not _is_name(run)):
        raise DamagedFile(
            f"{Layout(channel).latest}: pointer content that can't be parsed: {text[:80]!r}",
            remedy="write the version to be served into it, six digits",
        )
    return Pointer(version, run, channel / _RUN_DIRECTORY) if slash else Pointer(version, None, channel)


def _is_name(text: str) -> bool:
    try:
        return file_name(text) == text
    except DamagedFile:
        return False


def write_pointer(channel: Path, version: int, allowed: Callable[[], None] | None = None) -> None:
    """Tells the fleet: durable, at once, by rename, before which `allowed` may raise. Raises OSError."""
    replace(Layout(channel).latest, digits(version).encode(), allowed)

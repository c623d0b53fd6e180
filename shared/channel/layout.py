"""Where things lie in a channel: names to paths, and nothing else. docs/FORMAT.md, Layout."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from weightcast.shared.base.errors import DamagedFile, RetryLater
from weightcast.shared.channel.index import INDEX_NAME
from weightcast.shared.files.durable import read_file, replace
from weightcast.shared.files.paths import file_name

ANCHOR = "anchor"
_VERSION = re.compile(r"weight_v(\d{6,15})", re.ASCII)
_FROM = re.compile(r"from_v(\d{6,15})", re.ASCII)
_NOT_IN_HOST_NAMES = re.compile(r"[^A-Za-z0-9._-]")
_HOST_LIMIT = 100


def digits(version: int) -> str:
    """At least six."""
    return f"{version:06d}"


def version_name(version: int) -> str:
    return f"weight_v{digits(version)}"


def version_of(name: str) -> int | None:
    """The version whose directory has this name; None for any other name."""
    match = _VERSION.fullmatch(name)
    if match is None or version_name(int(match[1])) != name:
        return None
    return int(match[1])


def from_name(base_version: int) -> str:
    return f"from_v{digits(base_version)}"


def base_of(name: str) -> int | None:
    """The base version of the delta in a directory of this name beside a version's; None for other names."""
    match = _FROM.fullmatch(name)
    if match is None or from_name(int(match[1])) != name:
        return None
    return int(match[1])


@dataclass(frozen=True)
class Layout:
    channel: Path

    @property
    def latest(self) -> Path:
        return self.channel / "latest"

    @property
    def channel_json(self) -> Path:
        return self.channel / "channel.json"

    @property
    def base_json(self) -> Path:
        return self.channel / "base.json"

    def version_dir(self, version: int) -> Path:
        return self.channel / version_name(version)

    def index(self, version: int) -> Path:
        return self.version_dir(version) / INDEX_NAME

    def parts_dir(self, version: int, epoch: int, attempt: str) -> Path:
        return self.channel / f"{version_name(version)}.parts" / file_name(f"{epoch}-{attempt}")

    def from_dir(self, version: int, base_version: int) -> Path:
        """The delta of `version` from a version older than the one before it."""
        return self.version_dir(version) / from_name(base_version)

    def anchor_dir(self, version: int) -> Path:
        return self.version_dir(version) / ANCHOR

    @property
    def publishers_dir(self) -> Path:
        return self.channel / "publishers"

    def claim(self, epoch: int) -> Path:
        return self.publishers_dir / f"{epoch}.json"

    @property
    def hosts_dir(self) -> Path:
        return self.channel / "hosts"

    def report(self, host: str, local_path: Path | str) -> Path:
        """`local_path`: absolute; it tells apart subscribers of one machine."""
        name = _NOT_IN_HOST_NAMES.sub("-", host)[:_HOST_LIMIT].lstrip(".")
        mark = blake3(str(local_path).encode(errors="surrogateescape")).hexdigest()[:8]
        return self.hosts_dir / file_name(f"{name}-{mark}.json")

    @property
    def trash(self) -> Path:
        return self.channel / ".trash"


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
            remedy="run `weightcast channel repair`, or write the six digits of a version into it",
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

"""Names in a channel, and its pointer. docs/FORMAT.md, Layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from weightcast.shared.base.errors import DamagedFile, RetryLater
from weightcast.shared.channel.index import INDEX_NAME
from weightcast.shared.channel.store import AlreadyExists, Changed, Store, joined, read_if_there
from weightcast.shared.files.paths import file_name

LATEST, CHANNEL_JSON, BASE_JSON = "latest", "channel.json", "base.json"
HOSTS, PUBLISHERS, ANCHOR, ATTEMPTS = "hosts", "publishers", "anchor", ".parts"
_VERSION = re.compile(r"weight_v(\d{6,15})", re.ASCII)
_FROM = re.compile(r"from_v(\d{6,15})", re.ASCII)
_DELTA = re.compile(r"delta-(\d{8})", re.ASCII)
MANIFEST = "manifest.json"
"""of SkyRL's versions, in place of an index"""
_NOT_IN_HOST_NAMES = re.compile(r"[^A-Za-z0-9._-]")
_HOST_LIMIT = 100


def digits(version: int) -> str:
    """At least six."""
    return f"{version:06d}"


def version_name(version: int) -> str:
    return f"weight_v{digits(version)}"


def version_of(name: str) -> int | None:
    """The version whose directory has this name; None for any other name."""
    return _number(_VERSION, name, version_name)


def _number(pattern: re.Pattern[str], name: str, name_of: Callable[[int], str]) -> int | None:
    """Of a name that `name_of` makes; None for any other."""
    match = pattern.fullmatch(name)
    return int(match[1]) if match is not None and name_of(int(match[1])) == name else None


def delta_name(version: int) -> str:
    """Of the directory of a version of SkyRL."""
    return f"delta-{version:08d}"


def delta_version(name: str) -> int | None:
    """The version of SkyRL whose directory has this name; None for any other name."""
    return _number(_DELTA, name, delta_name)


def from_name(base_version: int) -> str:
    return f"from_v{digits(base_version)}"


def base_of(name: str) -> int | None:
    """The base version of the multi-step delta in a directory of this name; None for other names."""
    return _number(_FROM, name, from_name)


def index_key(version: int) -> str:
    """Of the version's main index."""
    return f"{version_name(version)}/{INDEX_NAME}"


def anchor_key(version: int) -> str:
    """Of the directory of a version's full weights."""
    return f"{version_name(version)}/{ANCHOR}"


def multi_step_key(version: int, base_version: int) -> str:
    """Of the directory of the delta from a version older than the one before it."""
    return f"{version_name(version)}/{from_name(base_version)}"


def multi_step_bases(version: int, oldest: int) -> Iterator[int]:
    """From where there may be multi-step deltas to `version`, not before `oldest`: v - 2^k where 2^k divides
    v."""
    span = 2
    while version % span == 0 and version - span >= oldest:
        yield version - span
        span *= 2


def attempts_key(version: int) -> str:
    """Of the directory in which attempts at a version are."""
    return f"{version_name(version)}{ATTEMPTS}"


def claim_key(epoch: int) -> str:
    return f"{PUBLISHERS}/{epoch}.json"


def report_key(host: str, local_path: Path | str) -> str:
    """`local_path`: absolute; it distinguishes subscribers of one machine."""
    name = _NOT_IN_HOST_NAMES.sub("-", host)[:_HOST_LIMIT].lstrip(".")
    mark = blake3(str(local_path).encode(errors="surrogateescape")).hexdigest()[:8]
    return f"{HOSTS}/{file_name(f'{name}-{mark}.json')}"


POINTER_LIMIT = 4096
_TORN = re.compile(r"(?:[^/]+/weight_v)?\d{0,5}", re.ASCII)
RUN_DIRECTORY = "updates"
"""of Stitch's versions, next to its pointer"""


class TornPointer(RetryLater):
    """The pointer was read while it was being written."""


@dataclass(frozen=True)
class Pointer:
    """`run`: the run that the pointer names, None in the plain dialect; `prefix`: of the keys of version
    directories, empty in the plain dialect; `is_skyrl`: the versions are SkyRL's, which has no pointer."""

    version: int
    run: str | None = None
    prefix: str = ""
    is_skyrl: bool = False

    @property
    def index_name(self) -> str:
        return MANIFEST if self.is_skyrl else INDEX_NAME

    def version_of(self, name: str) -> int | None:
        """The version whose directory has this name; None for any other name."""
        return delta_version(name) if self.is_skyrl else version_of(name)

    def version_key(self, version: int) -> str:
        """Of the directory of a version."""
        if self.is_skyrl:
            return delta_name(version)
        return joined(self.prefix, version_name(version))


def read_pointer(store: Store) -> Pointer | None:
    """None without a pointer. Raises TornPointer, and DamagedFile for content that can never be one."""
    data = read_if_there(store, LATEST, POINTER_LIMIT)
    return None if data is None else parse_pointer(data, store.place(LATEST))


def parse_pointer(data: bytes, place: str) -> Pointer:
    """`place`: of the pointer, for messages."""
    text = data.decode("ascii", errors="replace").strip()
    if _TORN.fullmatch(text):
        raise TornPointer(f"{place} is half written: {text!r}", remedy="read it again")
    run, slash, name = text.rpartition("/")
    version = version_of(name if slash else f"weight_v{name}")
    if version is None or (slash and not _is_name(run)):
        raise DamagedFile(
            f"{place}: pointer content that can't be parsed: {text[:20]!r}",
            remedy="run `weightcast channel repair`, or write the six digits of a version into it",
        )
    return Pointer(version, run, RUN_DIRECTORY) if slash else Pointer(version)


def _is_name(text: str) -> bool:
    try:
        return file_name(text) == text
    except DamagedFile:
        return False


def write_pointer(store: Store, version: int, allowed: Callable[[], None] | None = None) -> None:
    """Announces a version to all hosts: durable, at once; `allowed` is called last, and may raise. Raises
    Changed where another writer moved it meanwhile, in a store that compares."""
    data = digits(version).encode()
    before = None if store.renames else read_if_there(store, LATEST, POINTER_LIMIT)
    if store.renames or before is not None:
        store.replace(LATEST, data, expected=before, allowed=allowed)
        return
    if allowed is not None:
        allowed()
    try:
        store.create(LATEST, data)
    except AlreadyExists as error:
        # of our own put the answer may be lost
        if read_if_there(store, LATEST, POINTER_LIMIT) != data:
            raise Changed.at(store.place(LATEST)) from error

"""Names from files and peers, before they become part of a path."""

from __future__ import annotations

import os
import re
import stat
from errno import EBADF, ELOOP, ENOENT, ENOTDIR
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeAlias

from weightcast.shared.base.errors import DamagedFile, Refused

_DEPTH = 16
"""directories within directories"""


def file_name(name: str) -> str:
    """`name`, if it is one plain file name of at most 255 bytes. Raises DamagedFile."""
    if name in ("", ".", "..") or "/" in name or not is_plain(name) or len(name.encode()) > 255:
        raise DamagedFile(
            f"{name[:80]!r} is not a plain file name",
            remedy="restore the file that contains it: it is damaged or hostile; nothing was read",
        )
    return name


def relative_name(name: str) -> str:
    """`name`, if it names a file within a directory: plain names with `/` between them, none of them hidden.
    Raises DamagedFile."""
    parts = name.split("/")
    if len(parts) > _DEPTH or any(part.startswith(".") for part in parts):
        raise DamagedFile(
            f"{name[:80]!r} is not a file name within a checkpoint directory",
            remedy="restore the file that contains it: it is damaged or hostile; nothing was read",
        )
    return "/".join(map(file_name, parts))


def is_plain(text: str) -> bool:
    """Whether `text` can be encoded and holds no control characters: fit for names and log lines."""
    if text.isascii():
        return text.isprintable()
    return all(ord(c) >= 0x20 and not 0x7F <= ord(c) < 0xA0 and not 0xD800 <= ord(c) < 0xE000 for c in text)


class NotAnAddress(Refused, ValueError):
    """Of a channel."""


ChannelAddress: TypeAlias = Path | str
"""where a channel is: a directory, or the URL of a bucket and a prefix"""
_URL = re.compile(r"[a-z][a-z0-9+.-]+://.+", re.DOTALL)
_ALMOST_URL = re.compile(r"(s3|gs|az|hf|https?|file):/?([^/].*)", re.DOTALL | re.IGNORECASE)


def channel_address(given: Path | str) -> ChannelAddress:
    """As a user names a channel: a URL stays text, everything else is a path, also with `file://`. Raises
    NotAnAddress for a URL that lacks a slash: a directory of that name would be made."""
    text = os.fspath(given).removeprefix("file://")
    if (almost := _ALMOST_URL.fullmatch(text)) is not None:
        scheme, rest = almost.groups()
        raise NotAnAddress(
            f"{text} is not a directory or URL",
            remedy=f"give {scheme.lower()}://{rest}, or ./{text} for a directory",
        )
    return text if _URL.fullmatch(text) else at_home(Path(text))


def shown_address(channel: ChannelAddress) -> str:
    return channel if isinstance(channel, str) else str(channel.absolute())


def at_home(path: Path) -> Path:
    """`~/x` in the home directory: no shell expands it after `--flag=`, nor do files of settings."""
    text = os.fspath(path)
    return Path(os.path.expanduser(text)) if text == "~" or text.startswith("~/") else path


def printable(text: str) -> str:
    """`text` with control characters written as escapes: a file name may hold terminal sequences."""
    if text.isprintable():
        return text
    return "".join(
        char if char == "\n" or char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )


def is_within(path: Path, directory: Path) -> bool:
    """Whether `path` is that directory or inside it; links are followed, also across mounts."""
    inner, outer = Path(os.path.realpath(path)), Path(os.path.realpath(directory))
    return inner.is_relative_to(outer) or any(_is_one(above, outer) for above in (inner, *inner.parents))


def is_same(path: Path, other: Path) -> bool:
    """As `is_within`."""
    return os.path.realpath(path) == os.path.realpath(other) or _is_one(path, other)


def _is_one(path: Path, other: Path) -> bool:
    """Whether both are there, and the same: a directory may be mounted under several names."""
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False


def require_no_overlap(one: str, path: Path, other: str, another: ChannelAddress) -> None:
    """Raises Refused where one of two directories is the other or inside it. `one`, `other`: what they are,
    for the message."""
    if isinstance(another, str):
        return
    if not is_within(path, another):
        one, path, other, another = other, another, one, path
    if is_within(path, another):
        raise _overlap(one, path, other, another, is_same(path, another))


def _overlap(one: str, path: Path, other: str, another: Path, same: bool) -> Refused:
    return Refused(
        f"{one} {path} {'is' if same else 'is inside'} {other} {another}",
        remedy="give each a directory of its own",
    )


def require_places(channel: ChannelAddress, local: Path) -> None:
    """Raises Refused where a run's local checkpoint is not a directory, or one of the two is the other or
    inside it, by their names: a channel whose mount hangs or fails is not touched. Call
    `require_no_overlap` before anything is made there."""
    require_directory("--local", local)
    if isinstance(channel, str):
        return
    here, there = Path(os.path.abspath(local)), Path(os.path.abspath(channel))
    if here.is_relative_to(there):
        raise _overlap("--local", local, "--channel", channel, here == there)
    if there.is_relative_to(here):
        raise _overlap("--channel", channel, "--local", local, False)


def require_directory(what: str, path: ChannelAddress) -> None:
    """Raises Refused for something else that is there. `what`: for the message, with the option."""
    if isinstance(path, Path) and exists(path) and not is_directory(path):
        raise Refused(f"{what} {path} is not a directory", remedy="give another path, or move that file away")


_MISSING = frozenset({ENOENT, ENOTDIR, EBADF, ELOOP})


def exists(path: Path) -> bool:
    """A link counts as what it leads to. Raises OSError, as all of these do."""
    return _mode(path) is not None


def is_directory(path: Path) -> bool:
    """A directory, or a link to one."""
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def is_own_directory(path: Path) -> bool:
    """A directory, and no link to one."""
    mode = _mode(path, follow_symlinks=False)
    return mode is not None and stat.S_ISDIR(mode)


def is_file(path: Path) -> bool:
    """A regular file, or a link to one."""
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def is_link(path: Path) -> bool:
    """A symbolic link, whether or not it leads anywhere."""
    mode = _mode(path, follow_symlinks=False)
    return mode is not None and stat.S_ISLNK(mode)


def matching(directory: Path, pattern: str) -> list[Path]:
    """Entries whose names match a shell's `pattern`, sorted; none for a missing directory."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [directory / name for name in sorted(names) if fnmatchcase(name, pattern)]


def _mode(path: Path, follow_symlinks: bool = True) -> int | None:
    try:
        return os.stat(path, follow_symlinks=follow_symlinks).st_mode
    except ValueError:
        return None  # a name that no file can have
    except OSError as error:
        if error.errno in _MISSING:
            return None
        raise

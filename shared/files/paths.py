"""Names from files and peers, before they become part of a path."""

from __future__ import annotations

import os
from pathlib import Path

from weightcast.shared.errors import DamagedFile

_DEPTH = 16
"""directories within directories"""


def file_name(name: str) -> str:
    """`name`, if it is one plain file name of at most 255 bytes. Raises DamagedFile."""
    if name in ("", ".", "..") or "/" in name or not is_plain(name) or len(name.encode()) > 255:
        raise DamagedFile(
            f"{name[:80]!r} is not a plain file name",
            remedy="the file that contains it is damaged or hostile; nothing was read through it",
        )
    return name


def relative_name(name: str) -> str:
    """`name`, if it names a file within a directory: plain names with `/` between them, none of them hidden.
    Raises DamagedFile."""
    parts = name.split("/")
    if len(parts) > _DEPTH or any(part.startswith(".") for part in parts):
        raise DamagedFile(
            f"{name[:80]!r} is not a file name within a checkpoint directory",
            remedy="the file that contains it is damaged or hostile; nothing was read through it",
        )
    return "/".join(map(file_name, parts))


def is_plain(text: str) -> bool:
    """Whether `text` can be encoded and holds no control characters: fit for names and log lines."""
    if text.isascii():
        return text.isprintable()
    return all(ord(c) >= 0x20 and not 0x7F <= ord(c) < 0xA0 and not 0xD800 <= ord(c) < 0xE000 for c in text)


def at_home(path: Path) -> Path:
    """`~/x` in the home directory: no shell expands it after `--flag=`, nor do files of settings."""
    text = os.fspath(path)
    return Path(os.path.expanduser(text)) if text == "~" or text.startswith("~/") else path


def is_utf8(path: str) -> bool:
    """Whether a path of the operating system, whose bytes may be any, is text that can be sent."""
    return not any(0xD800 <= ord(c) < 0xE000 for c in path)


def printable(text: str) -> str:
    """`text` with control characters written as escapes: a file name may hold terminal sequences."""
    if text.isprintable():
        return text
    return "".join(
        char if char == "\n" or char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )

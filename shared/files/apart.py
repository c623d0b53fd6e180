"""Directories that must not lie in each other: a channel, a local checkpoint, checkpoints of others."""

from __future__ import annotations

import os
from pathlib import Path

from weightcast.shared.errors import Refused
from weightcast.shared.files.entries import exists, is_directory


def is_within(path: Path, directory: Path) -> bool:
    """Whether `path` is that directory or lies somewhere in it, links followed, under whatever name it is
    mounted."""
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


def require_apart(one: str, path: Path, other: str, another: Path) -> None:
    """Raises Refused where one of two directories is the other or lies in it. `one`, `other`: what they are,
    for the message."""
    if not is_within(path, another):
        one, path, other, another = other, another, one, path
    if is_within(path, another):
        raise _not_apart(one, path, other, another, is_same(path, another))


def _not_apart(one: str, path: Path, other: str, another: Path, same: bool) -> Refused:
    return Refused(
        f"{one} {path} {'is' if same else 'lies inside'} {other} {another}",
        remedy="give each a directory of its own",
    )


def require_places(channel: Path, local: Path) -> None:
    """Raises Refused where a run's local checkpoint is no directory, or one of the two is the other or lies
    in it, by their names: a channel whose mount hangs or fails is not touched. Before anything is made there
    it is looked at with `require_apart`."""
    require_directory("--local", local)
    here, there = Path(os.path.abspath(local)), Path(os.path.abspath(channel))
    if here.is_relative_to(there):
        raise _not_apart("--local", local, "--channel", channel, here == there)
    if there.is_relative_to(here):
        raise _not_apart("--channel", channel, "--local", local, False)


def require_directory(what: str, path: Path) -> None:
    """Raises Refused for something else that is there. `what`: for the message, with the option."""
    if exists(path) and not is_directory(path):
        raise Refused(f"{what} {path} is no directory", remedy="give another path, or move what lies there")

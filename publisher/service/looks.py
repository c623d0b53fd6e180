"""Looking at a watched directory, and removing from it what was published: IO without rules."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from weightcast.publisher.service.inbox import FileMark, Marks, Sighting, holds_weights, is_candidate
from weightcast.shared.errors import Refused, RetryLater, WeightcastError
from weightcast.shared.failpoints import failpoint
from weightcast.shared.files.checkpoint import Checkpoint, open_checkpoint
from weightcast.shared.files.entries import exists, is_link
from weightcast.shared.files.paths import is_plain
from weightcast.shared.service.daemon import failure_of

_CONSUMED = ".weightcast-consumed-"


@dataclass(frozen=True)
class Look:
    """`unknown`: of directories whose files are not known; `names`: of all that are there."""

    unknown: tuple[Sighting, ...]
    names: frozenset[str]


def look(
    watch: Path,
    marker: str | None,
    is_known: Callable[[str, Marks], bool],
    has_arrived: Callable[[str, Marks], bool],
) -> Look:
    """Reads the headers of unknown directories only. `has_arrived`: whether that was seen to be renamed into
    place. Raises RetryLater when `watch` is not there."""
    names, unknown = set(), []
    for directory in _directories(watch):
        try:
            files = marks(directory)
            names.add(directory.name)
            if files and not is_known(directory.name, files):
                unknown.append(sight(directory, files, marker, has_arrived(directory.name, files)))
        except FileNotFoundError:
            continue  # removed meanwhile
    return Look(tuple(unknown), frozenset(names))


def _directories(watch: Path) -> Iterator[Path]:
    try:
        with os.scandir(watch) as scan:
            names = sorted(
                entry.name
                for entry in scan
                if is_candidate(entry.name) and entry.is_dir(follow_symlinks=True)
            )
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RetryLater(f"{watch} is not a directory", remedy="mount it, or correct --watch") from error
    return (watch / name for name in names)


def marks(directory: Path) -> Marks:
    """Of all regular files in it that are not hidden, through links. Raises FileNotFoundError."""
    found = set()
    with os.scandir(directory) as scan:
        for entry in scan:
            # The memory of the inbox takes no others.
            if not entry.name.startswith(".") and is_plain(entry.name):
                at = _stat(entry)
                if at is not None and stat.S_ISREG(at.st_mode):
                    found.add(FileMark(entry.name, at.st_ino, at.st_size, at.st_mtime_ns))
    return frozenset(found)


def _stat(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        # Not entry.stat(): that may answer from what the listing knew.
        return os.stat(entry.path)
    except OSError:
        return None


def sight(directory: Path, files: Marks, marker: str | None, arrived: bool) -> Sighting:
    """`files`: the marks taken before. Raises FileNotFoundError."""
    finished = arrived or was_moved_in(directory) if marker is None else _is_marked(directory, files, marker)
    try:
        checkpoint = open_checkpoint(directory, follow_links=True)
    except FileNotFoundError:
        raise
    except (WeightcastError, OSError) as error:
        return Sighting(directory.name, files, frozenset(), 0, finished, failure_of(error))
    names = weight_names(checkpoint)
    weights = frozenset(mark for mark in files if mark.name in names)
    if len(weights) != len(names):
        raise FileNotFoundError(f"{directory} grew while it was looked at")
    signs = names if marker is None else names | {marker}
    return Sighting(directory.name, files, weights, _completed_ns(directory, signs, finished), finished)


def weight_names(checkpoint: Checkpoint) -> set[str]:
    index = () if checkpoint.index_file is None else (checkpoint.index_file,)
    return {path.name for path in (*checkpoint.weight_files, *index)}


def _is_marked(directory: Path, files: Marks, marker: str) -> bool:
    """Whether the marker is there, and was put there after all weights: one of the save before says nothing
    of this one. Raises FileNotFoundError."""
    if not any(mark.name == marker for mark in files):
        return False
    put = _put_ns(directory / marker)
    return all(_put_ns(directory / mark.name) <= put for mark in files if holds_weights(mark.name))


def _put_ns(path: Path) -> int:
    """When it was last changed or given its name: the link, or what it leads to."""
    return max(path.lstat().st_ctime_ns, path.stat().st_ctime_ns)


def was_moved_in(directory: Path) -> bool:
    """Whether it got its name after the last file was made and written in it. A rename touches the ctime of
    what is renamed, making files in a directory its mtime too. False where one tick of the clock has both."""
    at = directory.stat()
    if at.st_ctime_ns <= at.st_mtime_ns:
        return False
    with os.scandir(directory) as scan:
        return all(entry.stat(follow_symlinks=False).st_ctime_ns <= at.st_ctime_ns for entry in scan)


def _completed_ns(directory: Path, names: set[str], finished: bool) -> int:
    """ctime, since copies keep the mtime of their originals."""
    times = [(directory / name).lstat().st_ctime_ns for name in names if exists(directory / name)]
    return max([*times, directory.stat().st_ctime_ns] if finished else times, default=0)


def consume(watch: Path, name: str, weights: Marks) -> None:
    """Deletes a published directory if it is as it was, and holds nothing but files. Raises Refused; the
    directory is then untouched."""
    directory = watch / name
    problem = _reason_to_keep(directory, weights)
    if problem:
        raise Refused(f"{directory} is not consumed: {problem}", remedy="remove it by hand")
    grave = watch / f"{_CONSUMED}{secrets.token_hex(8)}"
    directory.rename(grave)
    failpoint("inbox.buried", directory)
    _remove(grave)
    failpoint("inbox.deleted", directory)


def _reason_to_keep(directory: Path, weights: Marks) -> str:
    if is_link(directory):
        return "it is a link"
    if not weights <= marks(directory):
        return "it was changed after it was published"
    return "" if _only_files(directory) else "it holds links or directories"


def _only_files(directory: Path) -> bool:
    with os.scandir(directory) as scan:
        return all(entry.is_file(follow_symlinks=False) for entry in scan)


def bury_leftovers(watch: Path) -> None:
    """What a kill left of directories being consumed."""
    for entry in list(os.scandir(watch)):
        if entry.name.startswith(_CONSUMED) and entry.is_dir(follow_symlinks=False):
            _remove(Path(entry.path))


def _remove(grave: Path) -> None:
    fd = os.open(grave, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for name in os.listdir(fd):
            os.unlink(name, dir_fd=fd)
    finally:
        os.close(fd)
    grave.rmdir()

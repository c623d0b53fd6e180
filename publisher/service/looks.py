"""Looking at a watched directory, and removing from it what was published: IO without rules."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from errno import EEXIST, ELOOP, ENOENT, ENOTEMPTY
from pathlib import Path

from blake3 import blake3

from weightcast.publisher.service.inbox import (
    FileMark,
    Marks,
    Sighting,
    Waiting,
    holds_weights,
    is_candidate,
    without_ctime,
)
from weightcast.shared.errors import Refused, RetryLater, WeightcastError
from weightcast.shared.failpoints import failpoint
from weightcast.shared.files.checkpoint import Checkpoint, open_checkpoint
from weightcast.shared.files.entries import exists, is_link, is_own_directory, matching
from weightcast.shared.files.paths import is_plain
from weightcast.shared.local.seed import ReadCheckpoint
from weightcast.shared.service.daemon import failure_of

_ASIDE = ".weightcast-consuming-"
"""before a checkpoint's name: out of its writer's reach, not compared yet"""
_CONSUMED = ".weightcast-consumed-"
"""compared with what was published: to be deleted"""
_READ_WHOLE = 64 << 20
_BLOCK, _BLOCKS = 16 << 10, 256
"""bytes of a block of a larger checkpoint's sample, and how many"""


@dataclass(frozen=True)
class InboxLook:
    """`unknown`: of directories whose files are not known; `names`: of all that are there; `unreadable`:
    which of them could not be looked into."""

    unknown: tuple[Sighting, ...]
    names: frozenset[str]
    unreadable: tuple[Waiting, ...] = ()


def look(
    watch: Path,
    marker: str | None,
    is_known: Callable[[str, Marks], bool],
    has_arrived: Callable[[str, Marks], bool],
) -> InboxLook:
    """Reads the headers of unknown directories only. `has_arrived`: whether that was seen to be renamed into
    place. Raises RetryLater when `watch` is not there."""
    names, unknown, unreadable = set(), [], []
    for entry in _candidates(watch):
        directory = watch / entry.name
        try:
            if not entry.is_dir(follow_symlinks=True):
                continue
            files = marks(directory)
            names.add(directory.name)
            if files and not is_known(directory.name, files):
                unknown.append(sight(directory, files, marker, has_arrived(directory.name, files)))
        except FileNotFoundError:
            continue  # removed meanwhile
        except OSError as error:
            # One that cannot be read is no reason to publish no other.
            names.add(directory.name)
            unreadable.append(Waiting(directory.name, failure_of(error).message))
    return InboxLook(tuple(unknown), frozenset(names), tuple(unreadable))


def _candidates(watch: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(watch) as scan:
            return sorted((entry for entry in scan if is_candidate(entry.name)), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RetryLater(f"{watch} is not a directory", remedy="mount it, or correct --watch") from error


def marks(directory: Path) -> Marks:
    """Of all regular files in it that are not hidden, through links. Raises FileNotFoundError."""
    return frozenset(mark for mark in _all_files(directory) if is_plain(mark.name) and not _is_hidden(mark))


def _is_hidden(mark: FileMark) -> bool:
    return mark.name.startswith(".")


def _all_files(directory: Path) -> Marks:
    found = set()
    with os.scandir(directory) as scan:
        for entry in scan:
            at = _stat(entry)
            if at is not None and stat.S_ISREG(at.st_mode):
                found.add(FileMark(entry.name, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns))
    return frozenset(found)


def _stat(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        # Not entry.stat(): that may answer from what the listing knew.
        return os.stat(entry.path)
    except OSError as error:
        if error.errno in (ENOENT, ELOOP):
            return None
        raise


def sight(directory: Path, files: Marks, marker: str | None, arrived: bool) -> Sighting:
    """`files`: the marks taken before. Raises OSError where it cannot be read."""
    finished = arrived or was_moved_in(directory) if marker is None else _is_marked(directory, files, marker)
    link = is_link(directory)
    try:
        checkpoint = open_checkpoint(directory, follow_links=True)
    except WeightcastError as error:
        return Sighting(directory.name, files, frozenset(), 0, finished, failure_of(error), link=link)
    names = weight_names(checkpoint)
    weights = frozenset(mark for mark in files if mark.name in names)
    if len(weights) != len(names):
        raise FileNotFoundError(f"{directory} grew while it was looked at")
    signs = names if marker is None else names | {marker}
    hidden = frozenset(mark for mark in _all_files(directory) if is_plain(mark.name) and _is_hidden(mark))
    completed_ns = _completed_ns(directory, signs, finished)
    return Sighting(directory.name, files, weights, completed_ns, finished, hidden=hidden, link=link)


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


def sample(directory: Path) -> str:
    """Digest of a checkpoint's tensors in whatever files: of all their bytes, or of blocks spread evenly over
    them where they are many. Raises WeightcastError and OSError where it cannot be read."""
    checkpoint = open_checkpoint(directory, follow_links=True)
    table, digest, at = checkpoint.table, blake3(), 0
    with ReadCheckpoint(checkpoint) as read:
        for number in sorted(range(len(table)), key=lambda number: table[number].name):
            spec, place = table[number], checkpoint.places[number]
            digest.update(f"{spec.name}\0{spec.dtype}{list(spec.shape)}".encode())
            for start, nbytes in _blocks(spec.nbytes, at, table.nbytes):
                digest.update(read.bytes_at(place._replace(offset=place.offset + start, nbytes=nbytes)).data)
            at += spec.nbytes
    return digest.hexdigest()


def _blocks(nbytes: int, at: int, total: int) -> Iterator[tuple[int, int]]:
    """First byte and size of what is read of a tensor that begins at byte `at` of `total`."""
    if total <= _READ_WHOLE:
        yield 0, nbytes
        return
    stride = total // _BLOCKS
    for start in range(-at % stride, nbytes, stride):
        yield start, min(_BLOCK, nbytes - start)


def consume(watch: Path, name: str, known: Marks) -> None:
    """Deletes a published directory if all files in it, hidden ones too, are `known`, and nothing else is in
    it. Raises Refused; it is then untouched, or set aside where something else has its name by now."""
    directory = watch / name
    _require_known(directory, directory, known)
    # What comes under its name from here on is another one.
    directory.rename(watch / f"{_ASIDE}{name}")
    failpoint("inbox.aside", directory)
    consume_aside(watch, name, known)


def consume_aside(watch: Path, name: str, known: Marks) -> None:
    """The rest of `consume`, for one that was renamed first: its writer may have been at it until then."""
    directory, aside = watch / name, watch / f"{_ASIDE}{name}"
    try:
        _require_known(aside, directory, known)
    except Refused as error:
        if _put_back(aside, directory):
            raise
        raise Refused(
            f"{error.message}, and another has its name by now", remedy=f"look what {aside} holds"
        ) from error
    grave = watch / f"{_CONSUMED}{secrets.token_hex(8)}"
    aside.rename(grave)
    failpoint("inbox.buried", directory)
    _remove(grave)
    failpoint("inbox.deleted", directory)


def set_aside(watch: Path) -> list[str]:
    """Names of checkpoints that a kill or an error left renamed and not compared."""
    found = [path for path in matching(watch, f"{_ASIDE}*") if is_own_directory(path)]
    return [path.name.removeprefix(_ASIDE) for path in found]


def _require_known(at: Path, directory: Path, known: Marks) -> None:
    """`directory`: what it was called when it was published."""
    problem = _reason_to_keep(at, known)
    if problem:
        raise Refused(f"{directory} is not consumed: {problem}", remedy="remove it by hand")


def _reason_to_keep(directory: Path, known: Marks) -> str:
    if is_link(directory):
        return "it is a link"
    if not _only_files(directory):
        return "it holds links or directories"
    found = _all_files(directory)
    return "" if known in (found, without_ctime(found)) else "it was changed after it was chosen"


def _put_back(aside: Path, directory: Path) -> bool:
    """False where its name is taken: nothing is ever replaced but an empty directory of our own."""
    try:
        directory.mkdir()
        aside.rename(directory)
    except OSError as error:
        if error.errno in (EEXIST, ENOTEMPTY):
            return False
        raise
    # Or the rename would say that all of it was written before it got its name.
    os.utime(directory)
    return True


def _only_files(directory: Path) -> bool:
    with os.scandir(directory) as scan:
        return all(entry.is_file(follow_symlinks=False) for entry in scan)


def bury_leftovers(watch: Path) -> None:
    """What a kill left of directories being deleted."""
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

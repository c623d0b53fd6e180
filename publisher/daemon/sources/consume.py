"""Deleting published checkpoints from the watched directory, exactly as they were when they were chosen."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable
from errno import EEXIST, ENOTEMPTY
from pathlib import Path

from weightcast.publisher.daemon.sources.inbox import Inbox, Marks, without_ctime
from weightcast.publisher.daemon.sources.layouts import ROOT
from weightcast.publisher.daemon.sources.observation import OURS, all_files
from weightcast.shared.base.errors import Refused
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.daemon.logs import get_log
from weightcast.shared.daemon.timing import Backoff
from weightcast.shared.files.disk_errors import disk_text
from weightcast.shared.files.paths import is_link, is_own_directory, matching

_ASIDE = f"{OURS}consuming-"
"""before a checkpoint's name: out of its writer's reach, not compared yet"""
_CONSUMED = f"{OURS}consumed-"
"""compared with what was published: to be deleted"""
_PAUSE = Backoff(0.5, 300.0)

log = get_log("inbox")


class Consumer:
    """Of one watched directory and thread."""

    def __init__(self, directory: Path, inbox: Inbox) -> None:
        self.changed: set[str] = set()
        """published, and not what was published any more"""
        self._directory, self._inbox = directory, inbox
        self._unfinished = {ROOT}
        """published, and kept from being deleted by an error of the disk; ROOT: there may be leftovers"""
        self._warned: set[str] = set()
        self._failures, self._next_try = 0, 0.0

    def consume(self, name: str) -> None:
        self._try(name, consume)

    def _try(self, name: str, consume: Callable[[Path, str, Marks], None]) -> None:
        try:
            consume(self._directory, name, self._inbox.consumable(name))
            self.changed.discard(name)
            self._inbox.consumed(name)
        except FileNotFoundError:
            return  # by the process that was killed, or it is still set aside
        except Refused as error:
            log.warning("checkpoint not consumed", checkpoint=name, reason=str(error))
            self.changed.add(name)
        except OSError as error:
            self._unfinished.add(name)
            self._warn(name, error)

    def _warn(self, name: str, error: OSError) -> None:
        if name not in self._warned:
            reason = disk_text(error, self._directory)
            log.warning("checkpoint not consumed yet", checkpoint=name, reason=reason)
            self._warned.add(name)

    def finish(self) -> None:
        """What a kill or an error left: in the next look, and ever more rarely while it lasts."""
        if not self._unfinished or time.monotonic() < self._next_try:
            return
        names, self._unfinished = self._unfinished, set()
        try:
            delete_leftovers(self._directory, self._inbox.entries)
            for name in set_aside(self._directory, self._inbox.entries):
                self._try(name, consume_aside)
        except OSError as error:
            self._unfinished |= names | {ROOT}
            self._warn(ROOT, error)
        else:
            for name in sorted(names & self._inbox.entries.keys() - {ROOT}):
                self.consume(name)
        self._warned &= self._unfinished
        self._failures = self._failures + 1 if self._unfinished else 0
        self._next_try = time.monotonic() + _PAUSE.pause(self._failures) if self._unfinished else 0.0


def consume(watch: Path, name: str, known: Marks) -> None:
    """Deletes a published directory if all files in it, hidden ones too, are `known`, and nothing else is in
    it. Raises Refused; it is then untouched, or set aside where something else has its name by now."""
    directory = watch / name
    if name == ROOT:
        raise Refused(
            f"{directory} is not consumed: it is the watched directory itself",
            remedy="save into a subdirectory, or run without --consume",
        )
    _require_known(directory, directory, known)
    # What comes under its name from here on is another one.
    directory.rename(_aside(directory))
    failpoint("inbox.aside", directory)
    consume_aside(watch, name, known)


def consume_aside(watch: Path, name: str, known: Marks) -> None:
    """The rest of `consume`, for a checkpoint that was renamed first: its writer may have changed it."""
    directory, aside = watch / name, _aside(watch / name)
    try:
        _require_known(aside, directory, known)
    except Refused as error:
        if _put_back(aside, directory):
            raise
        raise Refused(f"{error.message}, and its name is in use again", remedy=f"check {aside}") from error
    grave = directory.with_name(f"{_CONSUMED}{secrets.token_hex(8)}")
    aside.rename(grave)
    failpoint("inbox.buried", directory)
    _remove(grave)
    failpoint("inbox.deleted", directory)


def _aside(directory: Path) -> Path:
    return directory.with_name(f"{_ASIDE}{directory.name}")


def set_aside(watch: Path, names: Iterable[str] = ()) -> list[str]:
    """Names of checkpoints that a kill or an error left renamed and not compared. `names`: of checkpoints
    that may be among them, where they are not directly in `watch`."""
    asides = [path.relative_to(watch) for path in _left_behind(watch, names, _ASIDE)]
    return [str(path.with_name(path.name.removeprefix(_ASIDE))) for path in asides]


def delete_leftovers(watch: Path, names: Iterable[str] = ()) -> None:
    """What a kill left of directories being deleted. `names`: see `set_aside`."""
    for path in _left_behind(watch, names, _CONSUMED):
        _remove(path)


def _left_behind(watch: Path, names: Iterable[str], prefix: str) -> list[Path]:
    parents = sorted({watch, *((watch / name).parent for name in names if name != ROOT)})
    return [path for parent in parents for path in matching(parent, f"{prefix}*") if is_own_directory(path)]


def _require_known(at: Path, directory: Path, known: Marks) -> None:
    """`directory`: what it was called when it was published."""
    if is_link(at):
        problem = "it is a link"
    elif not _only_files(at):
        problem = "it holds links or directories"
    elif known not in (found := all_files(at), without_ctime(found)):
        problem = "it was changed after it was chosen"
    else:
        return
    raise Refused(f"{directory} is not consumed: {problem}", remedy="remove it by hand")


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


def _remove(grave: Path) -> None:
    fd = os.open(grave, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for name in os.listdir(fd):
            os.unlink(name, dir_fd=fd)
    finally:
        os.close(fd)
    grave.rmdir()

"""What a file system does when it is asked, tried in a directory of our own that is removed again.

A trial returns a figure (seconds, mostly) and raises Odd for behaviour that differs, OSError for what is
refused. All of it is seen from this machine alone: that two machines exclude each other cannot be tried here.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from weightcast.shared.errors import WeightcastError
from weightcast.shared.files.durable import create, replace
from weightcast.shared.files.entries import exists
from weightcast.shared.files.space import taken_bytes

# readers of hosts/ pass over temporary names
_ROOM_PREFIX = ".weightcast-tmp-doctor-"
_ROUNDS = 100
_RACERS = 8
_COMMITS = 3
_SIZE = 1 << 20
_SEEN_SECONDS = 3.0
_LOOK_EVERY = 0.01
_POINTERS = tuple(b"%06d" % number for number in range(_ROUNDS))


class Odd(Exception):
    """The file system did something else than weightcast builds on."""


@dataclass(frozen=True)
class TrialOutcome:
    """`problem` is empty where all went as it must; `figure`: what the trial measures."""

    figure: float = 0.0
    problem: str = ""


Trial = Callable[[Path], float]


@dataclass(frozen=True)
class Tried:
    """`left`: why something of ours is still there; empty: nothing is."""

    outcomes: Mapping[str, TrialOutcome]
    left: str = ""


def try_all(directory: Path) -> Tried:
    """Every trial by name, each in a directory of its own. Raises OSError when none can be made."""
    room = directory / f"{_ROOM_PREFIX}{secrets.token_hex(8)}"
    room.mkdir(mode=0o700)
    found, left = {}, ""
    try:
        for name, trial in TRIALS.items():
            own = room / name
            own.mkdir()
            found[name] = _outcome(trial, own)
    finally:
        left = _remove(room)
    return Tried(found, left)


def _remove(room: Path) -> str:
    """Where listings are late a directory is empty only some time after its files were removed."""
    deadline = time.monotonic() + _SEEN_SECONDS
    while True:
        try:
            shutil.rmtree(room)
            return ""
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or time.monotonic() > deadline:
                return f"{room} cannot be removed again: {error.strerror}"
        time.sleep(_LOOK_EVERY)


def _outcome(trial: Trial, room: Path) -> TrialOutcome:
    try:
        return TrialOutcome(trial(room))
    except Odd as odd:
        return TrialOutcome(problem=str(odd))
    except WeightcastError as error:
        return TrialOutcome(problem=error.message.replace(f"{room}{os.sep}", ""))
    except OSError as error:
        return TrialOutcome(problem=error.strerror or str(error))


def _rename(room: Path) -> float:
    """Seconds of a durable replacement, the middle one of a few."""
    path = room / "latest"
    replace(path, b"old")
    seconds = []
    for _ in range(_COMMITS):
        with path.open("rb") as reader:
            began = time.monotonic()
            replace(path, b"new")
            seconds.append(time.monotonic() - began)
            if reader.read() not in (b"old", b"new"):
                raise Odd("a file that is replaced changes for who has it open")
    if path.read_bytes() != b"new" or os.listdir(room) != ["latest"]:
        raise Odd("what a rename replaced is still there")
    return statistics.median(seconds)


def _readers(room: Path) -> float:
    """Reads of a pointer that is replaced meanwhile."""
    path, ended, reads = room / "latest", threading.Event(), 0
    path.write_bytes(_POINTERS[0])

    def write() -> None:
        try:
            for text in _POINTERS:
                (room / "new").write_bytes(text)
                (room / "new").rename(path)
        finally:
            ended.set()

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        while not ended.is_set():
            _read_pointer(path)
            reads += 1
        writing.result()
    return reads


def _read_pointer(path: Path) -> None:
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise Odd("a reader found no file while it was replaced") from None
    if text not in _POINTERS:
        raise Odd(f"a reader found {text[:20]!r} while whole files were replaced")


def _exclusive(room: Path) -> float:
    path = room / "claim"
    create(path, b"first")
    for again in (_create_again, _open_again):
        if not again(path):
            raise Odd("a file was made although it was there")
    if path.read_bytes() != b"first":
        raise Odd("a refused file changed the one that was there")
    won = _race(room)
    if won != 1:
        raise Odd(f"{won} of {_RACERS} that made the same file at once were told that they did")
    return 0.0


def _create_again(path: Path) -> bool:
    try:
        create(path, b"second")
    except FileExistsError:
        return True
    return False


def _open_again(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
    except FileExistsError:
        return True
    return False


def _race(room: Path) -> int:
    target, start = room / "raced", threading.Barrier(_RACERS)

    def link(number: int) -> bool:
        own = room / f"racer-{number}"
        own.touch()
        start.wait(_SEEN_SECONDS)
        try:
            os.link(own, target)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(_RACERS) as pool:
        return sum(pool.map(link, range(_RACERS)))


def _lock(room: Path) -> float:
    path = room / "lock"
    path.touch()
    with path.open("rb+") as one, path.open("rb+") as two:
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _locks(two.fileno(), fcntl.LOCK_SH):
            raise Odd("a lock is given to two at once")
        fcntl.flock(one, fcntl.LOCK_UN)
        fcntl.flock(one, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not _locks(two.fileno(), fcntl.LOCK_SH):
            raise Odd("a shared lock is not shared")
    return 0.0


def _locks(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _map(room: Path) -> float:
    """A mapped file and a read one are the same."""
    with (room / "mapped").open("w+b") as file:
        file.write(bytes(_SIZE))
        file.flush()
        with mmap.mmap(file.fileno(), _SIZE) as mapped:
            mapped[:5] = b"first"
            if os.pread(file.fileno(), 5, 0) != b"first":
                raise Odd("what is written to a mapping is not read from its file")
            os.pwrite(file.fileno(), b"other", _SIZE - 5)
            if mapped[-5:] != b"other":
                raise Odd("what is written to a file is not seen in its mapping")
            mapped.flush()
    return 0.0


def _allocate(room: Path) -> float:
    with (room / "allocated").open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, _SIZE)
        # small files lie in their inodes, compressed ones in fewer blocks
        if taken_bytes(os.fstat(file.fileno())) < _SIZE:
            raise Odd("space that was allocated is not taken: a full disk kills who writes to a mapping")
    return 0.0


def _visible(room: Path) -> float:
    """Seconds until a new file is there under the name that was looked for before."""
    path, data = room / "late", secrets.token_bytes(4096)
    if exists(path):
        raise Odd("a file is there that nobody made")
    path.write_bytes(data)
    began = time.monotonic()
    while not _shown(path, data):
        if time.monotonic() - began > _SEEN_SECONDS:
            raise Odd(f"a file that was written is not seen whole within {_SEEN_SECONDS:g} s")
        time.sleep(_LOOK_EVERY)
    return time.monotonic() - began


def _shown(path: Path, data: bytes) -> bool:
    try:
        whole = path.stat().st_size == len(data) and path.read_bytes() == data
    except FileNotFoundError:
        return False
    return whole and path.name in os.listdir(path.parent)


def _clock(room: Path) -> float:
    """Seconds by which a new file's time is ahead of this machine's."""
    before = time.time()
    (room / "now").write_bytes(b"now")
    after = time.time()
    stamp = (room / "now").stat().st_mtime
    return stamp - min(max(stamp, before), after)


TRIALS: Mapping[str, Trial] = {
    "rename": _rename,
    "readers": _readers,
    "exclusive": _exclusive,
    "lock": _lock,
    "map": _map,
    "allocate": _allocate,
    "visible": _visible,
    "clock": _clock,
}

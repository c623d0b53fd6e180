"""What a file system does when it is asked, tried in a directory of our own that is removed again.

A trial returns a figure (seconds, mostly) and raises Unfit for behaviour that differs, OSError for what is
refused. What a first start tries is in `shared/files/probes`; the rest is for people who ask.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from weightcast.shared.files import probes
from weightcast.shared.files.disk_errors import call_text, disk_remedy, is_lasting
from weightcast.shared.files.probes import SEEN_SECONDS, Unfit, scratch_in

_ROUNDS = 100
_RACERS = 8
_COMMITS = 3
_POINTERS = tuple(b"%06d" % number for number in range(_ROUNDS))


@dataclass(frozen=True)
class ProbeOutcome:
    """`problem` is empty where all went as it must; `measured`: what the trial measures."""

    measured: float = 0.0
    problem: str = ""
    remedy: str = ""
    """where the problem is none of the file system's kind"""


Probe = Callable[[Path], float]


@dataclass(frozen=True)
class ProbeResults:
    """`left`: why something of ours is still there; empty: nothing is."""

    outcomes: Mapping[str, ProbeOutcome]
    left: str = ""


def run_probes(directory: Path) -> ProbeResults:
    """Every trial by name, each in a directory of its own. Raises OSError when none can be made."""
    found = {}
    with scratch_in(directory) as scratch:
        for name, probe in PROBES.items():
            own = scratch.directory / name
            own.mkdir()
            found[name] = _outcome(probe, own)
    return ProbeResults(found, scratch.left)


def _outcome(probe: Probe, room: Path) -> ProbeOutcome:
    try:
        return ProbeOutcome(probe(room))
    except Unfit as unfit:
        return ProbeOutcome(problem=str(unfit))
    except OSError as error:
        return ProbeOutcome(problem=call_text(error), remedy="" if is_lasting(error) else disk_remedy(error))


def _rename(room: Path) -> float:
    """The middle one of a few."""
    seconds = []
    for number in range(_COMMITS):
        own = room / str(number)
        own.mkdir()
        seconds.append(probes.rename(own))
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
        raise Unfit("a reader found no file while it was replaced") from None
    if text not in _POINTERS:
        raise Unfit(f"a reader found {text[:20]!r} while whole files were replaced")


def _exclusive(room: Path) -> float:
    probes.exclusive(room)
    won = _race(room)
    if won != 1:
        raise Unfit(f"{won} of {_RACERS} that made the same file at once were told that they did")
    return 0.0


def _race(room: Path) -> int:
    target, start = room / "raced", threading.Barrier(_RACERS)

    def link(number: int) -> bool:
        own = room / f"racer-{number}"
        own.touch()
        start.wait(SEEN_SECONDS)
        try:
            os.link(own, target)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(_RACERS) as pool:
        return sum(pool.map(link, range(_RACERS)))


def _clock(room: Path) -> float:
    """Seconds by which a new file's time is ahead of this machine's."""
    before = time.time()
    (room / "now").write_bytes(b"now")
    after = time.time()
    stamp = (room / "now").stat().st_mtime
    return stamp - min(max(stamp, before), after)


PROBES: Mapping[str, Probe] = {
    "rename": _rename,
    "rename_directory": probes.rename_directory,
    "readers": _readers,
    "exclusive": _exclusive,
    "lock": probes.lock,
    "map": probes.map_file,
    "allocate": probes.allocate,
    "visible": probes.visible,
    "clock": _clock,
}

"""What a directory is and does: facts, no judgement."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from weightcast.shared.channel.index import Index
from weightcast.shared.channel.layout import Layout
from weightcast.shared.channel.store import Channel
from weightcast.shared.errors import WeightcastError
from weightcast.shared.files.disk_errors import DiskError, disk_error, disk_remedy, disk_text
from weightcast.shared.files.entries import exists, is_directory, is_link
from weightcast.shared.files.mounts import Mount, mount_of
from weightcast.shared.files.space import Space, nearest_directory, space_of
from weightcast.shared.local.local_checkpoint import LocalPaths, is_foreign
from weightcast.shared.local.spare import spare_bytes
from weightcast.shared.service.doctor.trials import TrialOutcome, Tried, try_all

T = TypeVar("T")
_END_SECONDS = 5.0


@dataclass(frozen=True)
class PlaceFacts:
    """`tried`: where the trials ran: the directory or one below it; None where nothing may be written."""

    asked: Path
    there: bool
    is_link: bool
    is_directory: bool
    tried: Path | None
    refused: DiskError | None
    """why nothing could be tried; None: it was tried, or there is nowhere to"""
    mount: Mount | None
    space: Space
    open_to_all: bool
    """everybody on the machine may replace files"""
    left: str
    """why something of the trials is still there; empty: nothing is"""
    trials: Mapping[str, TrialOutcome] = field(default_factory=dict)


@dataclass(frozen=True)
class RunFacts:
    """Of the channel's run; None where it does not say. `delta_bytes`, `changed`: of the newest version."""

    foreign: bool = False
    version: int | None = None
    full_bytes: int | None = None
    elements: int | None = None
    delta_bytes: int | None = None
    changed: int | None = None
    problem: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class LocalFacts:
    """`seeded`: weights lie there already; `strange`: files that are not weightcast's, and nothing of it;
    `spare_bytes`: of files that those of the next version are written over."""

    seeded: bool
    strange: bool
    files: int
    spare_bytes: int = 0


def answered(look: Callable[[], T], seconds: float) -> T | None:
    """None when `look` hangs, as calls into a dead network mount do. The thread is left behind: nothing can
    end it. Raises what `look` raises."""
    results: list[T] = []
    failures: list[Exception] = []
    # not `join`: once it is interrupted, Python takes the thread for ended
    ended = threading.Event()

    def run() -> None:
        try:
            results.append(look())
        except Exception as error:  # for the thread that waits
            failures.append(error)
        finally:
            ended.set()

    try:
        threading.Thread(target=run, name="doctor", daemon=True).start()
        ended.wait(seconds)
    except KeyboardInterrupt:
        # what it made it removes by itself, unless the place hangs
        ended.wait(min(seconds, _END_SECONDS))
        raise
    if failures:
        raise failures[0]
    return results[0] if results else None


def look_at_channel(channel: Path) -> PlaceFacts:
    """Hosts need not write there: where only `hosts/` lets them, that is tried. Raises OSError when not even
    what is there can be looked at."""
    places = [channel, Layout(channel).hosts_dir] if is_directory(channel) else []
    return _facts(channel, places)


def look_at_local(local: Path) -> PlaceFacts:
    """A directory in use is tried in weightcast's own part, where no engine looks. Raises OSError."""
    room = LocalPaths(local).room
    return _facts(local, [room if is_directory(room) else local.absolute()])


def _facts(asked: Path, places: Sequence[Path]) -> PlaceFacts:
    nearest = nearest_directory(asked)
    place, refused, tried = _tried(places)
    return PlaceFacts(
        asked=asked,
        there=os.path.lexists(asked),
        is_link=is_link(asked),
        is_directory=is_directory(asked),
        tried=place,
        refused=refused,
        mount=mount_of(nearest),
        space=space_of(nearest),
        open_to_all=exists(asked) and _open_to_all(asked),
        left=tried.left,
        trials=tried.outcomes,
    )


def _tried(places: Sequence[Path]) -> tuple[Path | None, DiskError | None, Tried]:
    refused: DiskError | None = None
    for place in places:
        try:
            return place, None, try_all(place)
        except OSError as error:
            refused = refused or disk_error(error, place)
    return None, refused, Tried({})


def _open_to_all(path: Path) -> bool:
    mode = path.stat().st_mode
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX


def look_at_run(channel: Path) -> RunFacts:
    """Reads channel.json, base.json, pointer and the newest index."""
    try:
        return _run_facts(Channel.open(channel))
    except WeightcastError as error:
        return RunFacts(problem=error.message, remedy=error.remedy)
    except OSError as error:
        return RunFacts(problem=disk_text(error, channel), remedy=disk_remedy(error))


def _run_facts(channel: Channel) -> RunFacts:
    pointer = channel.pointer()
    version = None if pointer is None else pointer.version
    if channel.base is None:
        return RunFacts(foreign=True, version=version)
    table = channel.base.table
    index = None if pointer is None else channel.index(pointer, pointer.version, table)
    ours = index if isinstance(index, Index) else None
    return RunFacts(
        version=version,
        full_bytes=table.nbytes,
        elements=table.elements,
        delta_bytes=None if ours is None else ours.totals.delta_bytes,
        changed=None if ours is None else ours.totals.changed,
    )


def look_into_local(local: Path) -> LocalFacts:
    """Raises OSError."""
    names = set(os.listdir(local)) if is_directory(local) else set()
    paths = LocalPaths(local)
    room = paths.room.name
    weights = [name for name in names if name.endswith(".safetensors")]
    return LocalFacts(
        seeded=room in names and bool(weights),
        strange=is_foreign(paths),
        files=len(weights),
        spare_bytes=spare_bytes(paths),
    )

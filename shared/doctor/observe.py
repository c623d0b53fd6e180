"""What places and the machine are and do: facts, no judgement.

A file system is probed in a directory of our own that is removed again. A probe returns a number (seconds,
mostly); it raises Unfit for behaviour that differs, OSError for what is refused. `shared/files/probes` has
what a first start tries; the rest is for people who ask.
"""

from __future__ import annotations

import os
import resource
import secrets
import stat
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from weightcast.shared.base.errors import WeightcastError
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.index import Index
from weightcast.shared.channel.layout import HOSTS, Pointer
from weightcast.shared.channel.store import AlreadyExists, Changed, Store
from weightcast.shared.checkpoint.local_checkpoint import LocalPaths, is_foreign
from weightcast.shared.checkpoint.state.state import Boot
from weightcast.shared.checkpoint.update.buffer_reuse import spare_bytes
from weightcast.shared.checkpoint.update.plan import MOST_FOLDED
from weightcast.shared.daemon.environment import usable_cores
from weightcast.shared.daemon.status import are_kept, kernel_status
from weightcast.shared.files import probes
from weightcast.shared.files.disk_errors import (
    DiskError,
    call_text,
    disk_error,
    disk_remedy,
    disk_text,
    is_lasting,
)
from weightcast.shared.files.paths import ChannelAddress, exists, is_directory, is_link
from weightcast.shared.files.probes import SEEN_SECONDS, Unfit, scratch_in
from weightcast.shared.files.system import Mount, Space, mount_of, nearest_directory, space_of

T = TypeVar("T")
_ROUNDS = 100
_RACERS = 8
_COMMITS = 3
_POINTERS = tuple(b"%06d" % number for number in range(_ROUNDS))


@dataclass(frozen=True)
class ProbeOutcome:
    """`problem` is empty where all went as it must; `measured`: what the probe measures."""

    measured: float = 0.0
    problem: str = ""
    remedy: str = ""
    """where the problem is none of the file system's kind"""


Probe = Callable[[Path], float | None]


def run_probes(directory: Path) -> tuple[Mapping[str, ProbeOutcome], str]:
    """Every probe by name, each in a directory of its own, and why something of ours is still there (empty:
    nothing is). Raises OSError when none can be made."""
    found = {}
    with scratch_in(directory) as scratch:
        for name, probe in PROBES.items():
            own = scratch.directory / name
            own.mkdir()
            try:
                found[name] = ProbeOutcome(probe(own) or 0.0)
            except Unfit as unfit:
                found[name] = ProbeOutcome(problem=str(unfit))
            except OSError as error:
                remedy = "" if is_lasting(error) else disk_remedy(error)
                found[name] = ProbeOutcome(problem=call_text(error), remedy=remedy)
    return found, scratch.left


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
            try:
                text = path.read_bytes()
            except FileNotFoundError:
                raise Unfit("a reader found no file while it was replaced") from None
            if text not in _POINTERS:
                raise Unfit(f"a reader found {text[:20]!r} while whole files were replaced")
            reads += 1
        writing.result()
    return reads


def _exclusive(room: Path) -> None:
    probes.exclusive(room)
    racers = [room / f"racer-{number}" for number in range(_RACERS)]
    for own in racers:
        own.touch()
    won = _winners(lambda own: os.link(own, room / "raced"), racers, FileExistsError)
    if won != 1:
        raise Unfit(f"{won} of {_RACERS} concurrent creators of one file succeeded, expected 1")


def _winners(write: Callable[[T], None], written: Sequence[T], lost: type[OSError]) -> int:
    """How many of the writes, made at the same time, did not fail with `lost`."""
    start = threading.Barrier(len(written))

    def won(data: T) -> bool:
        start.wait(SEEN_SECONDS)
        try:
            write(data)
        except lost:
            return False
        return True

    with ThreadPoolExecutor(len(written)) as pool:
        return sum(pool.map(won, written))


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

_END_SECONDS = 5.0


@dataclass(frozen=True)
class BucketFacts:
    """Whether exactly one of several writers created an object, and replaced what all of them had read.
    `ignored`: a condition of writes that has no effect, empty where all have."""

    creates_once: bool
    replaces_once: bool
    ignored: str


@dataclass(frozen=True)
class PlaceFacts:
    """`probed`: where the probes ran: the directory or one below it; None where nothing may be written."""

    path: Path
    there: bool
    is_link: bool
    is_directory: bool
    probed: Path | None
    refused: DiskError | None
    """why nothing could be tried; None: it was tried, or there is nowhere to"""
    mount: Mount | None
    space: Space
    world_writable: bool
    """everybody on the machine may replace files"""
    left: str
    """why something of the probes is still there; empty: nothing is"""
    probes: Mapping[str, ProbeOutcome] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Of its file system; empty: unknown."""
        return "" if self.mount is None else self.mount.kind

    def measured(self, probe: str) -> float | None:
        """None where the probe failed or was not made."""
        outcome = self.probes.get(probe)
        return None if outcome is None or outcome.problem else outcome.measured


@dataclass(frozen=True)
class RunFacts:
    """Of the channel's run; None where it does not say. `delta_bytes`, `changed`: of the newest version;
    `ahead`, `ahead_bytes`: deltas that a new host takes at once, after full weights."""

    foreign: bool = False
    version: int | None = None
    full_bytes: int | None = None
    elements: int | None = None
    delta_bytes: int | None = None
    changed: int | None = None
    ahead: int = 0
    ahead_bytes: int = 0
    problem: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class LocalFacts:
    """`seeded`: weights lie there already; `foreign`: files that are not weightcast's, and nothing of it;
    `spare_bytes`: of files that those of the next version are written over."""

    seeded: bool
    foreign: bool
    files: int
    spare_bytes: int = 0


class Hangs(Exception):
    pass


def within_seconds(look: Callable[[], T], seconds: float) -> T:
    """Raises Hangs when `look` does, as calls into a dead network mount do, and what `look` raises. The
    thread is left behind: nothing can end it."""
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(look())
        except BaseException as error:  # for the thread that waits
            found.set_exception(error)

    threading.Thread(target=run, name="doctor", daemon=True).start()
    try:
        wait([found], seconds)
    except KeyboardInterrupt:
        # what it made it removes by itself, unless the place hangs
        wait([found], min(seconds, _END_SECONDS))
        raise
    if not found.done():
        raise Hangs(f"did not answer within {seconds:g} s")
    return found.result()


def observe_channel(channel: Path) -> PlaceFacts:
    """Hosts need not write there: where only `hosts/` lets them, that is tried. Raises OSError when not even
    what is there can be looked at."""
    places = [channel, channel / HOSTS] if is_directory(channel) else []
    return _facts(channel, places)


def observe_local(local: Path) -> PlaceFacts:
    """A directory in use is tried in weightcast's own part, where no engine looks. Raises OSError."""
    room = LocalPaths(local).room
    return _facts(local, [room if is_directory(room) else local.absolute()])


def _facts(path: Path, places: Sequence[Path]) -> PlaceFacts:
    nearest, mode = nearest_directory(path), path.stat().st_mode if exists(path) else 0
    probed: Path | None = None
    refused: DiskError | None = None
    outcomes: Mapping[str, ProbeOutcome] = {}
    left = ""
    for place in places:
        try:
            outcomes, left = run_probes(place)
            probed, refused = place, None
            break
        except OSError as error:
            refused = refused or disk_error(error, place)
    return PlaceFacts(
        path=path,
        there=os.path.lexists(path),
        is_link=is_link(path),
        is_directory=is_directory(path),
        probed=probed,
        refused=refused,
        mount=mount_of(nearest),
        space=space_of(nearest),
        world_writable=bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX,
        left=left,
        probes=outcomes,
    )


def observe_bucket(channel: str | Store) -> BucketFacts | None:
    """Races writers for one object. None for a channel that nobody can write to. Raises Refused, and
    StoreError where nothing can be written or read."""
    if open_store(channel).is_static:
        return None
    store, key = open_store(channel), f".weightcast-tmp-probe-{secrets.token_hex(4)}"
    names = [f"writer {number}".encode() for number in range(_RACERS)]
    try:
        created = _winners(partial(store.create, key), names, AlreadyExists)
        replace = partial(store.replace, key, expected=store.read(key, 100))
        replaced = _winners(replace, [name + b"!" for name in names], Changed)
        return BucketFacts(created == 1, replaced == 1, store.ignored())
    finally:
        store.delete(key)


def observe_run(channel: ChannelAddress) -> RunFacts:
    """Reads channel.json, base.json, pointer and the newest index; lists the versions before it."""
    try:
        opened = Channel.open(open_store(channel))
        pointer = opened.pointer()
        version = None if pointer is None else pointer.version
        if opened.base is None:
            return RunFacts(foreign=True, version=version)
        table = opened.base.table
        index = None if pointer is None else opened.index(pointer, pointer.version, table)
        ahead = [] if pointer is None else _ahead(opened, pointer)
    except WeightcastError as error:
        return RunFacts(problem=error.message, remedy=error.remedy)
    except OSError as error:
        return RunFacts(problem=disk_text(error, channel), remedy=disk_remedy(error))
    ours = index if isinstance(index, Index) else None
    return RunFacts(
        version=version,
        full_bytes=table.nbytes,
        elements=table.elements,
        delta_bytes=None if ours is None else ours.totals.delta_bytes,
        changed=None if ours is None else ours.totals.changed,
        ahead=len(ahead),
        ahead_bytes=sum(ahead),
    )


def _ahead(channel: Channel, pointer: Pointer) -> list[int]:
    """Bytes of the deltas since the last full weights, newest first; at most those that are folded."""
    oldest = max(0, pointer.version - MOST_FOLDED)
    found = channel.shown(pointer, above=oldest)
    deltas = list[int]()
    for version in range(pointer.version, oldest, -1):
        if version not in found or found[version].full is not None:
            break
        deltas.append(found[version].nbytes)
    return deltas


def observe_contents(local: Path) -> LocalFacts:
    """Raises OSError."""
    names = set(os.listdir(local)) if is_directory(local) else set()
    paths = LocalPaths(local)
    room = paths.room.name
    weights = [name for name in names if name.endswith(".safetensors")]
    return LocalFacts(
        seeded=room in names and bool(weights),
        foreign=is_foreign(paths),
        files=len(weights),
        spare_bytes=spare_bytes(paths),
    )


_CGROUPS = Path("/sys/fs/cgroup")
_SHM = Path("/dev/shm")
_NONE = 1 << 62


@dataclass(frozen=True)
class MachineFacts:
    cores: int
    memory_bytes: int
    """of the machine"""
    limit_bytes: int
    """of the machine or of the control group that allows less"""
    available_bytes: int
    """that may still be taken, page cache included"""
    dirty_bytes: int
    """of pages that may wait for their disk before the kernel slows down who writes more"""
    shm_bytes: int
    """size of /dev/shm; 0: there is none"""
    open_files: int
    """RLIMIT_NOFILE: soft"""
    open_files_most: int
    """hard"""
    file_bytes: int | None
    """RLIMIT_FSIZE; None: no limit"""
    boot_id: bool
    """whether the kernel tells one"""
    machine_id: bool
    kernels: str
    """numba or numpy"""
    kernel_problem: str
    kernels_kept: bool = True
    """all are compiled"""


def observe_machine() -> MachineFacts:
    """Compiles a first kernel where none is kept."""
    rows = _meminfo()
    memory, available = (rows.get(name, _NONE) for name in ("MemTotal", "MemAvailable"))
    limit, used = _control_group()
    host, kernels = Boot.here(), kernel_status()
    open_files, open_files_most = resource.getrlimit(resource.RLIMIT_NOFILE)
    largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return MachineFacts(
        cores=usable_cores(),
        memory_bytes=memory,
        limit_bytes=min(memory, limit),
        available_bytes=min(available, max(0, limit - used)),
        dirty_bytes=_unthrottled(rows, limit),
        shm_bytes=space_of(_SHM).total_bytes if is_directory(_SHM) else 0,
        open_files=open_files,
        open_files_most=open_files_most,
        file_bytes=None if largest == resource.RLIM_INFINITY else largest,
        boot_id=bool(host.boot_id),
        machine_id=_text("/etc/machine-id") != "",
        kernels=kernels.kind,
        kernel_problem=kernels.problem,
        kernels_kept=kernels.kind == "numba" and are_kept(),
    )


def _meminfo() -> dict[str, int]:
    """Of proc(5), in bytes."""
    rows = dict(line.split(":", 1) for line in _text("/proc/meminfo").splitlines() if ":" in line)
    numbers = {name: row.split()[:1] for name, row in rows.items()}
    return {name: int(one[0]) << 10 for name, one in numbers.items() if one and one[0].isdigit()}


def _unthrottled(meminfo: dict[str, int], limit: int) -> int:
    """The kernel's mm/page-writeback.c: half way between the amounts at which it begins to write back and at
    which it stops writers, shares of the memory that files may have."""
    files = sum(meminfo.get(name, 0) for name in ("MemFree", "Active(file)", "Inactive(file)"))
    most, least = (_amount(name, min(files, limit)) for name in ("dirty", "dirty_background"))
    return (most + (least if least < most else most // 2)) // 2 if most else _NONE


def _amount(name: str, memory: int) -> int:
    """Of the pair vm.NAME_bytes and vm.NAME_ratio: one is always 0."""
    nbytes, percent = (_number(_text(f"/proc/sys/vm/{name}_{unit}")) or 0 for unit in ("bytes", "ratio"))
    return nbytes or memory * percent // 100


def _control_group() -> tuple[int, int]:
    """Limit and use of the tightest control group (version 2) that this process is in. What the page cache
    of files holds can be taken back and is not counted; files in a tmpfs cannot, and are."""
    own = next((line[3:] for line in _text("/proc/self/cgroup").splitlines() if line.startswith("0::")), "/")
    found = [(_NONE, 0)]
    directory = _CGROUPS / own.lstrip("/")
    for place in (directory, *directory.parents):
        if place.is_relative_to(_CGROUPS):
            limit = _number(_text(place / "memory.max"))
            if limit is not None:
                found.append((limit, _in_use(place)))
    return min(found, key=lambda each: each[0] - each[1])


def _in_use(group: Path) -> int:
    rows = dict(line.split(" ", 1) for line in _text(group / "memory.stat").splitlines() if " " in line)
    cached = (_number(rows.get("file", "")) or 0) - (_number(rows.get("shmem", "")) or 0)
    return max(0, (_number(_text(group / "memory.current")) or 0) - max(0, cached))


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""

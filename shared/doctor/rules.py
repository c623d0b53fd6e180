"""What observations mean: findings, each with its remedy, and what they mean for the exit code. No IO."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from weightcast.shared.base.errors import OK, EngineFailed, NotInTime, Refused
from weightcast.shared.checkpoint.update.fetch import JOURNAL_BYTES, ROOM_BYTES
from weightcast.shared.daemon.environment import DAEMON_BYTES
from weightcast.shared.daemon.logs import size_text
from weightcast.shared.doctor.observe import BucketFacts, LocalFacts, MachineFacts, PlaceFacts, RunFacts
from weightcast.shared.files.disk_errors import GROW_TMPFS
from weightcast.shared.files.probes import EXCLUSIVE, LOCAL_NEEDS, RENAME, RENAME_DIRECTORY, VISIBLE, Need
from weightcast.shared.files.system import IN_MEMORY, Space

Level = Literal["ok", "note", "warning", "failure"]
"""`note`: nothing is wrong, but it is good to know; `failure`: something of weightcast will not work here."""
LEVELS: Sequence[Level] = ("ok", "note", "warning", "failure")
Role = Literal["publisher", "subscriber"]


@dataclass(frozen=True)
class Finding:
    place: str
    """`channel`, `local`, `machine` or an engine's name"""
    check: str
    level: Level
    says: str
    remedy: str = ""
    exit_code: int = Refused.exit_code
    """of a failure"""


def exit_code(findings: Iterable[Finding]) -> int:
    """0 without failures. What hangs (4) hides the rest, and a wrong place (3) matters before an engine (5),
    which may only not have been started yet."""
    codes = {finding.exit_code for finding in findings if finding.level == "failure"}
    order = (NotInTime.exit_code, Refused.exit_code, EngineFailed.exit_code)
    return next((code for code in order if code in codes), OK)


def counts(findings: Iterable[Finding]) -> dict[Level, int]:
    found = [finding.level for finding in findings]
    return {level: found.count(level) for level in LEVELS}


CHANNEL, LOCAL, MACHINE = "channel", "local", "machine"

_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "beegfs", "gpfs", "ceph", "9p", "afs", "wekafs")
_CLOCK_SECONDS = 2.0
_SLOW_COMMIT_SECONDS = 1.0
_LATE_SECONDS = 1.0
_FEW_FILES = 1000
_LEAST_FREE = 256 << 20
_DELTAS = 20
_GUESSED_SHARE = 0.05
"""of the elements, changed by the largest step that space is kept for while none has been seen"""
_BYTES_PER_GUESSED_CHANGE = 2
_OTHER_FILES = 256
"""descriptors of a daemon besides weight files: connections, locks, logs, libraries"""
_FILES_OF_A_PIECE = 2
"""a weight file may be open in the local checkpoint and in its source"""
_SMALL_SHM = 1 << 30


def judge_channel(facts: PlaceFacts, run: RunFacts, role: Role | None) -> Iterator[Finding]:
    """`role`: what runs here; None: not given, and missing write access is a warning."""
    yield from _place(CHANNEL, facts)
    if role == "publisher" and not facts.there:
        remedy = "check the path and its mount; the first start of the publisher creates the directory"
        yield Finding(CHANNEL, "run", "warning", run.problem, remedy)
    else:
        yield from _run(run, role)
    if facts.is_directory:
        yield _channel_kind(facts)
        yield _channel_rights(facts, role)
        yield from _judge_probes(CHANNEL, facts, _CHANNEL_PROBES)
        yield from _pace(facts)
        yield from _clock(CHANNEL, facts)
        yield _channel_space(facts.space, run, role)


def judge_bucket(facts: BucketFacts | None, run: RunFacts, role: Role | None) -> Iterator[Finding]:
    """As `judge_channel`, of an object store. `facts`: None for a host, which replaces nothing of others, and
    over HTTP."""
    if facts is not None:
        yield from _races(facts)
    elif role != "subscriber":
        yield Finding(
            CHANNEL,
            "writable",
            "failure" if role == "publisher" else "note",
            "the channel is read-only over HTTP",
            "publish to its directory or bucket; hosts report to the publisher with --report-to",
        )
    yield from _run(run, role)


def _races(facts: BucketFacts) -> Iterator[Finding]:
    remedy = "use another store, or one publisher with --unfenced: two are not kept apart here"
    if facts.ignored:
        says = f"the store ignores {facts.ignored} of a put"
        yield Finding(CHANNEL, "conditional writes", "failure", says, remedy)
    for check, good, verb in (
        ("exclusive create", facts.creates_once, "create an object"),
        ("compare and swap", facts.replaces_once, "replace the object that all of them read"),
    ):
        if good:
            yield Finding(CHANNEL, check, "ok", f"one of several writers could {verb}")
        else:
            yield Finding(CHANNEL, check, "failure", f"several writers could {verb} at the same time", remedy)


def judge_local(
    facts: PlaceFacts, inside: LocalFacts, run: RunFacts | None, machine: MachineFacts
) -> Iterator[Finding]:
    """`run`: of the channel to follow; None: not given."""
    yield from _place(LOCAL, facts)
    if inside.foreign:
        says = f"{facts.path} is not empty and is not a weightcast local checkpoint"
        yield Finding(LOCAL, "path", "failure", says, "choose an empty or new directory for --local")
    yield _local_kind(facts)
    if facts.probed is None:
        yield Finding(LOCAL, "permissions", "failure", *_not_tried(facts))
    else:
        says = "this user may write" if facts.there else "not there yet; can be made"
        yield Finding(LOCAL, "permissions", "ok", says)
    yield from _judge_probes(LOCAL, facts, _LOCAL_PROBES)
    yield from _clock(LOCAL, facts)
    # weights that a seed has yet to write
    missing = 0 if inside.seeded or run is None else run.full_bytes or 0
    step = step_bytes(run)
    yield _local_space(facts, inside, run, missing, step)
    if facts.kind in IN_MEMORY:
        yield from _tmpfs_memory(facts.space.total_bytes, missing + step, machine)
    elif run is not None and run.full_bytes is not None:
        yield _dirty_pages(run.full_bytes, machine.dirty_bytes)


# probes: check, probe, level of a failed one, what a good one shows, remedy

ProbeRule = tuple[str, str, Level, str, str]


def _needed(need: Need, probe: str, good: str) -> ProbeRule:
    return need.check, probe, "failure", good, need.remedy


_CHANNEL_PROBES: Sequence[ProbeRule] = (
    _needed(RENAME, "rename", "a rename replaces a file atomically; open readers keep the old one"),
    _needed(RENAME_DIRECTORY, "rename_directory", "a directory with files can be renamed to an unused name"),
    (
        "rename, seen",
        "readers",
        "warning",
        "readers find a whole file while it is replaced",
        "hosts read the pointer again, which costs retries; index and shards are never replaced",
    ),
    _needed(
        EXCLUSIVE, "exclusive", "exactly one of several creators of a file wins (tried from this machine)"
    ),
    _needed(VISIBLE, "visible", "a new file is seen whole, by size, by name and in its directory"),
)
_LOCAL_GOOD = (
    ("rename", "a rename replaces a file atomically"),
    ("lock", "flock excludes a second writer"),
    ("map", "mapped and read bytes agree"),
    ("allocate", "space can be allocated before it is written"),
    ("visible", "a new file is seen whole at once"),
)
_LOCAL_PROBES: Sequence[ProbeRule] = tuple(
    _needed(need, *good) for need, good in zip(LOCAL_NEEDS, _LOCAL_GOOD, strict=True)
)


def _judge_probes(place: str, facts: PlaceFacts, rules: Sequence[ProbeRule]) -> Iterator[Finding]:
    for check, probe, level, good, remedy in rules:
        outcome = facts.probes.get(probe)
        if outcome is None:
            continue
        if outcome.problem:
            yield Finding(place, check, level, outcome.problem, outcome.remedy or remedy)
        else:
            yield Finding(place, check, "ok", good)


# any directory


def _place(place: str, facts: PlaceFacts) -> Iterator[Finding]:
    if facts.is_link and facts.is_directory:
        yield Finding(place, "path", "note", f"{facts.path} is a symbolic link: its target is examined")
    if facts.there and not facts.is_directory:
        says, remedy = f"{facts.path} is not a directory", "give another directory, or move it"
        yield Finding(place, "path", "failure", says, remedy)
    if facts.left:
        remedy = "remove it by hand; weightcast cannot use a file system that shows removed files"
        yield Finding(place, "removal", "failure", facts.left, remedy)
    if facts.world_writable:
        remedy = f"chmod o-w {facts.path}: who may write decides what engines run"
        yield Finding(place, "writers", "warning", "every user of the machine may replace files here", remedy)
    left = facts.space.free_files
    if left is not None and left < _FEW_FILES:
        yield Finding(place, "files", "failure", f"{left} more files can be made", "free inodes")


def _clock(place: str, facts: PlaceFacts) -> Iterator[Finding]:
    """Ages, retention and lag in seconds come from times that others wrote; they alone decide nothing."""
    ahead = facts.measured("clock")
    if ahead is None:
        return
    if abs(ahead) <= _CLOCK_SECONDS:
        yield Finding(place, "clock", "ok", "new files bear this machine's time")
    else:
        direction = "ahead of" if ahead > 0 else "behind"
        says = f"new files are {abs(ahead):.1f} s {direction} this machine's clock"
        remedy = "run an NTP client on both machines: ages and lag in seconds are wrong by that much"
        yield Finding(place, "clock", "warning", says, remedy)


def _kind_text(facts: PlaceFacts) -> str:
    return (
        f"{facts.kind}, mounted at {facts.mount.point}"
        if facts.mount and facts.kind
        else "of an unknown kind"
    )


def _not_tried(facts: PlaceFacts) -> tuple[str, str]:
    """What to say of a place where nothing could be tried, and its remedy."""
    if facts.refused is None:
        return "nothing can be written", "make the directory, or mount it"
    return f"nothing can be written: {facts.refused.message}", facts.refused.remedy


# the channel


def _run(run: RunFacts, role: Role | None) -> Iterator[Finding]:
    if run.problem:
        yield Finding(CHANNEL, "run", "failure", run.problem, run.remedy)
    elif run.foreign and run.version is None:
        # as an empty mount point looks
        remedy = "mount the channel, or: `weightcast channel init` or the publisher makes it"
        yield Finding(CHANNEL, "run", "warning", "neither channel.json nor a pointer", remedy)
    elif run.foreign:
        says = f"another system's format, version {run.version}; not all can be checked"
        yield Finding(CHANNEL, "run", "note", says)
        if role == "publisher":
            remedy = "publish into a directory of its own"
            yield Finding(CHANNEL, "run", "failure", "another tool's channel", remedy)
    else:
        weights = "" if run.full_bytes is None else f", weights of {size_text(run.full_bytes)}"
        yield Finding(CHANNEL, "run", "ok", f"version {run.version or 0}{weights}")


def _channel_kind(facts: PlaceFacts) -> Finding:
    text = _kind_text(facts)
    if facts.kind in (*IN_MEMORY, "overlay"):
        says = f"{text}: only this machine sees it, and not for long"
        remedy = "fine for a trial; a fleet needs a directory that all machines mount"
        return Finding(CHANNEL, "file system", "warning", says, remedy)
    if facts.kind in ("nfs", "nfs4") and facts.mount and "soft" in facts.mount.options:
        remedy = "mount it hard: a soft mount gives errors for a slow server (daemons try again)"
        return Finding(CHANNEL, "file system", "warning", f"{text}, soft", remedy)
    return Finding(CHANNEL, "file system", "ok", text)


def _channel_rights(facts: PlaceFacts, role: Role | None) -> Finding:
    """Hosts read; they write nothing but their reports."""
    if facts.probed == facts.path:
        return Finding(CHANNEL, "permissions", "ok", "this user may write")
    if facts.probed is not None:
        says, remedy = f"this user may write in {facts.probed.name}/ alone", "give its user the directory"
        if role == "subscriber":
            return Finding(CHANNEL, "permissions", "ok", f"{says}: enough for a host")
    else:
        says, remedy = _not_tried(facts)
        if role == "subscriber":
            remedy = "fine for a host; for its reports: let it write to hosts/, or --report-to the publisher"
            return Finding(CHANNEL, "permissions", "note", says, remedy)
    remedy = f"a publisher must write here: {remedy}"
    if role is None:
        remedy = f"{remedy}; a host need not (--role subscriber)"
        return Finding(CHANNEL, "permissions", "warning", says, remedy)
    return Finding(CHANNEL, "permissions", "failure", says, remedy)


def _pace(facts: PlaceFacts) -> Iterator[Finding]:
    """A version's commit is about seven durable steps."""
    seconds, delay = facts.measured("rename"), facts.measured("visible")
    if seconds is not None:
        slow = seconds > _SLOW_COMMIT_SECONDS
        remedy = "each version takes several of these: find what makes this file system slow" if slow else ""
        says = f"a small file is durable after {seconds * 1000:.0f} ms"
        yield Finding(CHANNEL, "pace", "warning" if slow else "ok", says, remedy)
    if delay is not None and delay > _LATE_SECONDS:
        remedy = "hosts wait --visible-deadline (120 s) for a new version's files"
        yield Finding(CHANNEL, "delay", "note", f"a new file is seen after {delay:.1f} s", remedy)


def _channel_space(space: Space, run: RunFacts, role: Role | None) -> Finding:
    free, says = space.free_bytes, f"{size_text(space.free_bytes)} of {size_text(space.total_bytes)} free"
    remedy = "free space, or let versions go: --keep-versions, `weightcast channel prune`"
    least = max(_LEAST_FREE, run.delta_bytes or 0)
    level: Level = "warning"
    if role == "subscriber":
        level, remedy = "ok", ""
    elif free < least:
        level, says = "failure", f"{says}: a version needs {size_text(least)}"
    elif run.delta_bytes is not None and free < _DELTAS * run.delta_bytes:
        says += f": {free // max(run.delta_bytes, 1)} versions like the newest"
    elif run.full_bytes is not None and free < run.full_bytes:
        says += f": an anchor ({size_text(run.full_bytes)}) does not fit"
    else:
        level, remedy = "ok", ""
    return Finding(CHANNEL, "space", level, says, remedy)


# the local checkpoint


def _local_kind(facts: PlaceFacts) -> Finding:
    text = _kind_text(facts)
    if facts.kind in _NETWORK or facts.kind.startswith("fuse."):
        says = f"{text}: every patch and every load crosses the network"
        remedy = "put --local on a local disk (ext4, xfs) or in /dev/shm"
        return Finding(LOCAL, "file system", "warning", says, remedy)
    if facts.kind == "overlay":
        says = f"{text}: the container's own layer, gone with it"
        return Finding(LOCAL, "file system", "warning", says, "mount a volume for --local")
    return Finding(LOCAL, "file system", "ok", text)


def step_bytes(run: RunFacts | None) -> int:
    """Spool and journal of one step twice as large as the newest, as `check_space` of a host computes."""
    if run is None or run.elements is None:
        return ROOM_BYTES
    if run.delta_bytes is not None and run.changed is not None:
        return ROOM_BYTES + 2 * (run.delta_bytes + JOURNAL_BYTES * run.changed)
    guessed = int(run.elements * _GUESSED_SHARE)
    return ROOM_BYTES + guessed * (JOURNAL_BYTES + _BYTES_PER_GUESSED_CHANGE)


def _staged_bytes(run: RunFacts) -> int:
    """Spool and journal of all versions that a new host takes at once, at most, as changes of the newest."""
    share = JOURNAL_BYTES * (run.changed or 0) / max(1, run.delta_bytes or 0)
    return ROOM_BYTES + int(run.ahead_bytes * (1 + share))


def _local_space(
    facts: PlaceFacts, inside: LocalFacts, run: RunFacts | None, missing: int, step: int
) -> Finding:
    free = facts.space.free_bytes + inside.spare_bytes
    says = f"{size_text(free)} of {size_text(facts.space.total_bytes)} free"
    many = 0 if run is None or inside.seeded else _staged_bytes(run)
    if free >= missing + max(step, many):
        return Finding(LOCAL, "space", "ok", says)
    what = f"{size_text(missing)} of weights and " if missing else ""
    remedy = "free space or give another disk"
    if facts.kind in IN_MEMORY:
        remedy = GROW_TMPFS
    if free >= missing + step and run is not None:
        says = f"{says}: {what}{size_text(many)} for {run.ahead} versions at once are needed"
        return Finding(LOCAL, "space", "warning", says, f"{remedy}; else a new host takes fewer at a time")
    says = f"{says}: {what}{size_text(step)} for a step are needed"
    return Finding(LOCAL, "space", "failure", says, remedy)


def _tmpfs_memory(size: int, wanted: int, machine: MachineFacts) -> Iterator[Finding]:
    """Files in a tmpfs are memory: of the machine, and of the container's limit."""
    if wanted > machine.available_bytes:
        says = f"{size_text(wanted)} are needed in memory, {size_text(machine.available_bytes)} available"
        remedy = "raise the container's memory limit, or put --local on a disk"
        yield Finding(LOCAL, "memory", "failure", says, remedy)
    elif size > machine.limit_bytes:
        says = f"a tmpfs of {size_text(size)} is larger than the memory"
        remedy = "nothing if the weights fit; a full memory kills processes before the tmpfs is full"
        yield Finding(LOCAL, "memory", "warning", says, remedy)


def _dirty_pages(weights: int, dirty_bytes: int) -> Finding:
    """A patch of half a percent changes a word in nearly every page."""
    may_wait = size_text(dirty_bytes)
    if weights <= dirty_bytes:
        return Finding(LOCAL, "dirty pages", "ok", f"{may_wait} may wait for the disk")
    return Finding(
        LOCAL,
        "dirty pages",
        "note",
        f"a patch changes most pages of {size_text(weights)}; beyond {may_wait} it goes at the disk's speed",
        "--local in /dev/shm, more memory, or larger vm.dirty_background_bytes and vm.dirty_bytes",
    )


# the machine


def judge_machine(facts: MachineFacts, run: RunFacts | None, inside: LocalFacts | None) -> Iterator[Finding]:
    """`run`, `inside`: of channel and local directory, where they were given."""
    yield _kernels(facts)
    yield _memory(facts)
    yield _shm(facts)
    yield _open_files(facts, 0 if inside is None else inside.files)
    limit, most = facts.file_bytes, None if run is None else run.full_bytes
    if limit is not None and (most is None or limit < most):
        remedy = "ulimit -f unlimited, or LimitFSIZE=infinity in the unit"
        yield Finding(MACHINE, "file size", "warning", f"no file may grow beyond {size_text(limit)}", remedy)
    yield _identity(facts)


def _kernels(facts: MachineFacts) -> Finding:
    if facts.kernels != "numba":
        says = f"not usable: {facts.kernel_problem}"
        remedy = "install the numba and llvmlite releases that weightcast requires"
        return Finding(MACHINE, "kernels", "failure", says, remedy)
    if facts.kernel_problem:
        remedy = "set WEIGHTCAST_CACHE to a private directory with room, or free space in the named one"
        return Finding(MACHINE, "kernels", "warning", facts.kernel_problem, remedy)
    compiled = "compiled" if facts.kernels_kept else "can be compiled; the first start takes about a minute"
    return Finding(MACHINE, "kernels", "ok", f"{compiled}; {facts.cores} cores")


def _memory(facts: MachineFacts) -> Finding:
    says = f"{size_text(facts.available_bytes)} available of {size_text(facts.limit_bytes)}"
    if facts.limit_bytes < facts.memory_bytes:
        says += f", the control group's limit (the machine has {size_text(facts.memory_bytes)})"
    if facts.available_bytes >= DAEMON_BYTES:
        return Finding(MACHINE, "memory", "ok", says)
    says += f": a daemon takes up to {size_text(DAEMON_BYTES)}"
    return Finding(MACHINE, "memory", "failure", says, "more memory, or a smaller --memory-budget")


def _shm(facts: MachineFacts) -> Finding:
    if facts.shm_bytes == 0:
        remedy = "give --hand-over and --local other directories"
        return Finding(MACHINE, "/dev/shm", "note", "there is none", remedy)
    says = f"a tmpfs of {size_text(facts.shm_bytes)}"
    if facts.shm_bytes >= min(_SMALL_SHM, facts.limit_bytes // 4):
        return Finding(MACHINE, "/dev/shm", "ok", says)
    remedy = "too small for weights: --shm-size, or an emptyDir of medium Memory with a sizeLimit"
    return Finding(MACHINE, "/dev/shm", "note", says, remedy)


def _open_files(facts: MachineFacts, weight_files: int) -> Finding:
    wanted = _OTHER_FILES + _FILES_OF_A_PIECE * weight_files
    if facts.open_files >= wanted:
        return Finding(MACHINE, "open files", "ok", f"{facts.open_files} may be open")
    says = f"{facts.open_files} files may be open (hard limit {facts.open_files_most}), {wanted} are needed"
    remedy = f"ulimit -n {wanted}, or LimitNOFILE= in the unit"
    return Finding(MACHINE, "open files", "failure", says, remedy)


def _identity(facts: MachineFacts) -> Finding:
    """How a restart is recognized: shared/checkpoint/state/state.py."""
    if not facts.boot_id:
        says = "the kernel gives none: after every start all weights are read again"
        return Finding(MACHINE, "boot id", "warning", says, "make /proc/sys/kernel/random/boot_id readable")
    if not facts.machine_id:
        says = "there is no /etc/machine-id: the container's host name is used instead"
        remedy = "give the container a stable host name, or mount /etc/machine-id"
        return Finding(MACHINE, "machine id", "note", says, remedy)
    return Finding(MACHINE, "identity", "ok", "machine restarts and process restarts can be distinguished")

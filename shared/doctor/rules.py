"""What observations mean: tables of checks, each with the rule that judges it and names the remedy. No IO."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from weightcast.shared.checkpoint.update.fetch import JOURNAL_BYTES, ROOM_BYTES
from weightcast.shared.daemon.threads import DAEMON_BYTES
from weightcast.shared.doctor.findings import Finding, Level, Role, size_text
from weightcast.shared.doctor.observe import LocalFacts, MachineFacts, PlaceFacts, RunFacts
from weightcast.shared.files.probes import EXCLUSIVE, LOCAL_NEEDS, RENAME, RENAME_DIRECTORY, VISIBLE, Need

CHANNEL, LOCAL, MACHINE = "channel", "local", "machine"

_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "beegfs", "gpfs", "ceph", "9p", "afs", "wekafs")
_IN_MEMORY = ("tmpfs", "ramfs")
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


@dataclass(frozen=True)
class Verdict:
    level: Level
    says: str
    remedy: str = ""


@dataclass(frozen=True)
class ChannelSeen:
    """`role`: what runs here; None: not given, and missing write access is a warning."""

    place: PlaceFacts
    run: RunFacts
    role: Role | None


@dataclass(frozen=True)
class LocalSeen:
    """`run`: of the channel to follow; None: not given."""

    place: PlaceFacts
    inside: LocalFacts
    run: RunFacts | None
    machine: MachineFacts

    @property
    def missing_bytes(self) -> int:
        """Weights that a seed has yet to write."""
        return 0 if self.inside.seeded or self.run is None else self.run.full_bytes or 0


@dataclass(frozen=True)
class MachineSeen:
    """`run`, `inside`: of channel and local directory, where they were given."""

    facts: MachineFacts
    run: RunFacts | None
    inside: LocalFacts | None


Seen = TypeVar("Seen")
Rules = Sequence[tuple[str, Callable[[Seen], Verdict | None]]]
"""Check and rule; None: nothing to report."""


def judge_channel(facts: PlaceFacts, run: RunFacts, role: Role | None) -> Iterator[Finding]:
    seen = ChannelSeen(facts, run, role)
    yield from _judge(CHANNEL, _PLACE, facts)
    yield from _judge(CHANNEL, _RUN, seen)
    if facts.is_directory:
        yield from _judge(CHANNEL, _CHANNEL, seen)
        yield from _judge_probes(CHANNEL, facts, _CHANNEL_PROBES)
        yield from _judge(CHANNEL, _CHANNEL_PACE, facts)
        yield from _judge(CHANNEL, (("space", _channel_space),), seen)


def judge_local(
    facts: PlaceFacts, inside: LocalFacts, run: RunFacts | None, machine: MachineFacts
) -> Iterator[Finding]:
    seen = LocalSeen(facts, inside, run, machine)
    yield from _judge(LOCAL, _PLACE, facts)
    yield from _judge(LOCAL, _LOCAL, seen)
    yield from _judge_probes(LOCAL, facts, _LOCAL_PROBES)
    yield from _judge(LOCAL, (("clock", _clock),), facts)
    yield from _judge(LOCAL, _LOCAL_SIZES, seen)


def judge_machine(facts: MachineFacts, run: RunFacts | None, inside: LocalFacts | None) -> Iterator[Finding]:
    yield from _judge(MACHINE, _MACHINE, MachineSeen(facts, run, inside))


def _judge(place: str, rules: Rules[Seen], seen: Seen) -> Iterator[Finding]:
    for check, rule in rules:
        if (verdict := rule(seen)) is not None:
            yield Finding(place, check, verdict.level, verdict.says, verdict.remedy)


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
    ("lock", "lock", "note", "flock excludes; a channel needs none", "nothing: a channel needs no locks"),
    ("mmap", "map", "note", "mapped and read bytes agree", "nothing: channel files are read, never mapped"),
)
_ONE_WRITER = "nothing: a local checkpoint has one writer"
_LOCAL_GOOD = (
    ("rename", "a rename replaces a file atomically"),
    ("lock", "flock excludes a second writer"),
    ("map", "mapped and read bytes agree"),
    ("allocate", "space can be allocated before it is written"),
    ("visible", "a new file is seen whole at once"),
)
_LOCAL_PROBES: Sequence[ProbeRule] = (
    *(_needed(need, *good) for need, good in zip(LOCAL_NEEDS, _LOCAL_GOOD, strict=True)),
    (EXCLUSIVE.check, "exclusive", "note", "exactly one of several creators of a file wins", _ONE_WRITER),
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


def _path(facts: PlaceFacts) -> Verdict | None:
    if facts.is_link and facts.is_directory:
        return Verdict("note", f"{facts.path} is a symbolic link: its target is examined")
    if facts.there and not facts.is_directory:
        return Verdict("failure", f"{facts.path} is not a directory", "give another directory, or move it")
    return None


def _removal(facts: PlaceFacts) -> Verdict | None:
    remedy = "remove it by hand; weightcast cannot use a file system that shows removed files"
    return Verdict("failure", facts.left, remedy) if facts.left else None


def _writers(facts: PlaceFacts) -> Verdict | None:
    if not facts.world_writable:
        return None
    remedy = f"chmod o-w {facts.path}: who may write decides what engines run"
    return Verdict("warning", "every user of the machine may replace files here", remedy)


def _inodes(facts: PlaceFacts) -> Verdict | None:
    left = facts.space.free_files
    if left is None or left >= _FEW_FILES:
        return None
    return Verdict("failure", f"{left} more files can be made", "free inodes")


_PLACE: Rules[PlaceFacts] = (
    ("path", _path),
    ("removal", _removal),
    ("writers", _writers),
    ("files", _inodes),
)


def _pace(facts: PlaceFacts) -> Verdict | None:
    """A version's commit is about seven durable steps."""
    rename = facts.probes.get("rename")
    if rename is None or rename.problem:
        return None
    says = f"a small file is durable after {rename.measured * 1000:.0f} ms"
    if rename.measured <= _SLOW_COMMIT_SECONDS:
        return Verdict("ok", says)
    remedy = "each version takes several of these: find what makes this file system slow"
    return Verdict("warning", says, remedy)


def _delay(facts: PlaceFacts) -> Verdict | None:
    visible = facts.probes.get("visible")
    if visible is None or visible.problem or visible.measured <= _LATE_SECONDS:
        return None
    remedy = "hosts wait --visible-deadline (120 s) for a new version's files"
    return Verdict("note", f"a new file is seen after {visible.measured:.1f} s", remedy)


def _clock(facts: PlaceFacts) -> Verdict | None:
    """Ages, retention and lag in seconds come from times that others wrote; they alone decide nothing."""
    outcome = facts.probes.get("clock")
    if outcome is None or outcome.problem:
        return None
    ahead = outcome.measured
    if abs(ahead) <= _CLOCK_SECONDS:
        return Verdict("ok", "new files bear this machine's time")
    direction = "ahead of" if ahead > 0 else "behind"
    remedy = "run an NTP client on both machines: ages and lag in seconds are wrong by that much"
    return Verdict("warning", f"new files are {abs(ahead):.1f} s {direction} this machine's clock", remedy)


_CHANNEL_PACE: Rules[PlaceFacts] = (("pace", _pace), ("delay", _delay), ("clock", _clock))


def _kind(facts: PlaceFacts) -> str:
    return "" if facts.mount is None else facts.mount.kind


def _kind_text(facts: PlaceFacts) -> str:
    kind = _kind(facts)
    return f"{kind}, mounted at {facts.mount.point}" if facts.mount and kind else "of an unknown kind"


def _not_tried(facts: PlaceFacts) -> tuple[str, str]:
    """What to say of a place where nothing could be tried, and its remedy."""
    if facts.refused is None:
        return "nothing can be written", "make the directory, or mount it"
    return f"nothing can be written: {facts.refused.message}", facts.refused.remedy


# the channel


def _run(seen: ChannelSeen) -> Verdict:
    run = seen.run
    if run.problem:
        return Verdict("failure", run.problem, run.remedy)
    if run.foreign and run.version is None:
        # as an empty mount point looks
        remedy = "mount the channel, or: `weightcast channel init` or the publisher makes it"
        return Verdict("warning", "neither channel.json nor a pointer", remedy)
    if run.foreign:
        return Verdict("note", f"the plain slime format, version {run.version}; not all can be checked")
    weights = "" if run.full_bytes is None else f", weights of {size_text(run.full_bytes)}"
    return Verdict("ok", f"version {run.version or 0}{weights}")


def _foreign(seen: ChannelSeen) -> Verdict | None:
    if seen.run.foreign and seen.role == "publisher" and seen.run.version is not None:
        return Verdict("failure", "another tool's channel", "publish into a directory of its own")
    return None


_RUN: Rules[ChannelSeen] = (("run", _run), ("run", _foreign))


def _channel_kind(seen: ChannelSeen) -> Verdict:
    kind, text = _kind(seen.place), _kind_text(seen.place)
    if kind in (*_IN_MEMORY, "overlay"):
        remedy = "fine for a trial; a fleet needs a directory that all machines mount"
        return Verdict("warning", f"{text}: only this machine sees it, and not for long", remedy)
    if kind in ("nfs", "nfs4") and seen.place.mount and "soft" in seen.place.mount.options:
        remedy = "mount it hard: a soft mount gives errors for a slow server (daemons try again)"
        return Verdict("warning", f"{text}, soft", remedy)
    return Verdict("ok", text)


def _channel_rights(seen: ChannelSeen) -> Verdict:
    """Hosts read; they write nothing but their reports."""
    place, role = seen.place, seen.role
    if place.probed == place.path:
        return Verdict("ok", "this user may write")
    if place.probed is not None:
        says, remedy = f"this user may write in {place.probed.name}/ alone", "give its user the directory"
        if role == "subscriber":
            return Verdict("ok", f"{says}: enough for a host")
    else:
        says, remedy = _not_tried(place)
        if role == "subscriber":
            remedy = "fine for a host; for its reports: let it write to hosts/, or --report-to the publisher"
            return Verdict("note", says, remedy)
    remedy = f"a publisher must write here: {remedy}"
    if role is None:
        return Verdict("warning", says, f"{remedy}; a host need not (--role subscriber)")
    return Verdict("failure", says, remedy)


def _channel_space(seen: ChannelSeen) -> Verdict:
    run, free = seen.run, seen.place.space.free_bytes
    says = f"{size_text(free)} of {size_text(seen.place.space.total_bytes)} free"
    if seen.role == "subscriber":
        return Verdict("ok", says)
    remedy = "free space, or let versions go: --keep-versions, `weightcast channel prune`"
    least = max(_LEAST_FREE, run.delta_bytes or 0)
    if free < least:
        return Verdict("failure", f"{says}: a version needs {size_text(least)}", remedy)
    if run.delta_bytes is not None and free < _DELTAS * run.delta_bytes:
        left = free // max(run.delta_bytes, 1)
        return Verdict("warning", f"{says}: {left} versions like the newest", remedy)
    if run.full_bytes is not None and free < run.full_bytes:
        return Verdict("warning", f"{says}: an anchor ({size_text(run.full_bytes)}) does not fit", remedy)
    return Verdict("ok", says)


_CHANNEL: Rules[ChannelSeen] = (("file system", _channel_kind), ("permissions", _channel_rights))

# the local checkpoint


def _not_a_checkpoint(seen: LocalSeen) -> Verdict | None:
    if not seen.inside.foreign:
        return None
    says = f"{seen.place.path} is not empty and is not a weightcast local checkpoint"
    return Verdict("failure", says, "choose an empty or new directory for --local")


def _local_kind(seen: LocalSeen) -> Verdict:
    kind, text = _kind(seen.place), _kind_text(seen.place)
    if kind in _NETWORK or kind.startswith("fuse."):
        remedy = "put --local on a local disk (ext4, xfs) or in /dev/shm"
        return Verdict("warning", f"{text}: every patch and every load crosses the network", remedy)
    if kind == "overlay":
        says = f"{text}: the container's own layer, gone with it"
        return Verdict("warning", says, "mount a volume for --local")
    return Verdict("ok", text)


def _local_rights(seen: LocalSeen) -> Verdict:
    if seen.place.probed is None:
        return Verdict("failure", *_not_tried(seen.place))
    return Verdict("ok", "this user may write" if seen.place.there else "not there yet; can be made")


def step_bytes(run: RunFacts | None) -> int:
    """Spool and journal of one step twice as large as the newest, as `check_space` of a host computes."""
    if run is None or run.elements is None:
        return ROOM_BYTES
    if run.delta_bytes is not None and run.changed is not None:
        return ROOM_BYTES + 2 * (run.delta_bytes + JOURNAL_BYTES * run.changed)
    guessed = int(run.elements * _GUESSED_SHARE)
    return ROOM_BYTES + guessed * (JOURNAL_BYTES + _BYTES_PER_GUESSED_CHANGE)


def _local_space(seen: LocalSeen) -> Verdict:
    space, full, step = seen.place.space, seen.missing_bytes, step_bytes(seen.run)
    free = space.free_bytes + seen.inside.spare_bytes
    says = f"{size_text(free)} of {size_text(space.total_bytes)} free"
    if free >= full + step:
        return Verdict("ok", says)
    what = f"{size_text(full)} of weights and " if full else ""
    remedy = "free space or give another disk"
    if _kind(seen.place) in _IN_MEMORY:
        remedy = "make it larger: `mount -o remount,size=`, --shm-size, or an emptyDir's sizeLimit"
    return Verdict("failure", f"{says}: {what}{size_text(step)} for a step are needed", remedy)


def _dirty_pages(seen: LocalSeen) -> Verdict | None:
    """A patch of half a percent changes a word in nearly every page."""
    weights = None if seen.run is None else seen.run.full_bytes
    if weights is None or _kind(seen.place) in _IN_MEMORY:
        return None
    may_wait = size_text(seen.machine.dirty_bytes)
    if weights <= seen.machine.dirty_bytes:
        return Verdict("ok", f"{may_wait} may wait for the disk")
    return Verdict(
        "note",
        f"a patch changes most pages of {size_text(weights)}; beyond {may_wait} it goes at the disk's speed",
        "--local in /dev/shm, more memory, or larger vm.dirty_background_bytes and vm.dirty_bytes",
    )


def _tmpfs_memory(seen: LocalSeen) -> Verdict | None:
    """Files in a tmpfs are memory: of the machine, and of the container's limit."""
    if _kind(seen.place) not in _IN_MEMORY:
        return None
    wanted, machine = step_bytes(seen.run) + seen.missing_bytes, seen.machine
    if wanted > machine.available_bytes:
        available = size_text(machine.available_bytes)
        remedy = "raise the container's memory limit, or put --local on a disk"
        return Verdict("failure", f"{size_text(wanted)} are needed in memory, {available} available", remedy)
    total = seen.place.space.total_bytes
    if total > machine.limit_bytes:
        remedy = "nothing if the weights fit; a full memory kills processes before the tmpfs is full"
        return Verdict("warning", f"a tmpfs of {size_text(total)} is larger than the memory", remedy)
    return None


_LOCAL: Rules[LocalSeen] = (
    ("path", _not_a_checkpoint),
    ("file system", _local_kind),
    ("permissions", _local_rights),
)
_LOCAL_SIZES: Rules[LocalSeen] = (
    ("space", _local_space),
    ("memory", _tmpfs_memory),
    ("dirty pages", _dirty_pages),
)

# the machine


def _kernels(seen: MachineSeen) -> Verdict:
    problem = seen.facts.kernel_problem
    if seen.facts.kernels != "numba":
        remedy = "install the numba and llvmlite releases that weightcast requires"
        return Verdict("failure", f"not usable: {problem}", remedy)
    if problem:
        remedy = "set WEIGHTCAST_CACHE to a private directory with room, or free space in the named one"
        return Verdict("warning", problem, remedy)
    return Verdict("ok", f"compiled; {seen.facts.cores} cores")


def _memory(seen: MachineSeen) -> Verdict:
    facts = seen.facts
    says = f"{size_text(facts.available_bytes)} available of {size_text(facts.limit_bytes)}"
    if facts.limit_bytes < facts.memory_bytes:
        says += f", the control group's limit (the machine has {size_text(facts.memory_bytes)})"
    if facts.available_bytes >= DAEMON_BYTES:
        return Verdict("ok", says)
    remedy = "more memory, or a smaller --memory-budget"
    return Verdict("failure", f"{says}: a daemon takes up to {size_text(DAEMON_BYTES)}", remedy)


def _shm(seen: MachineSeen) -> Verdict:
    nbytes = seen.facts.shm_bytes
    if nbytes == 0:
        return Verdict("note", "there is none", "give --hand-over and --local other directories")
    says = f"a tmpfs of {size_text(nbytes)}"
    if nbytes >= min(_SMALL_SHM, seen.facts.limit_bytes // 4):
        return Verdict("ok", says)
    remedy = "too small for weights: --shm-size, or an emptyDir of medium Memory with a sizeLimit"
    return Verdict("note", says, remedy)


def _open_files(seen: MachineSeen) -> Verdict:
    facts = seen.facts
    wanted = _OTHER_FILES + _FILES_OF_A_PIECE * (0 if seen.inside is None else seen.inside.files)
    if facts.open_files >= wanted:
        return Verdict("ok", f"{facts.open_files} may be open")
    says = f"{facts.open_files} files may be open (hard limit {facts.open_files_most}), {wanted} are needed"
    return Verdict("failure", says, f"ulimit -n {wanted}, or LimitNOFILE= in the unit")


def _file_size(seen: MachineSeen) -> Verdict | None:
    limit, most = seen.facts.file_bytes, None if seen.run is None else seen.run.full_bytes
    if limit is None or (most is not None and limit >= most):
        return None
    remedy = "ulimit -f unlimited, or LimitFSIZE=infinity in the unit"
    return Verdict("warning", f"no file may grow beyond {size_text(limit)}", remedy)


def _locked_memory(seen: MachineSeen) -> Verdict:
    limit = seen.facts.locked_bytes
    return Verdict("ok", f"{'no limit' if limit is None else size_text(limit)}; weightcast locks none")


def _boot_id(seen: MachineSeen) -> Verdict | None:
    """How a restart is recognized: shared/checkpoint/state/state.py."""
    if seen.facts.boot_id:
        return None
    says = "the kernel gives none: after every start all weights are read again"
    return Verdict("warning", says, "make /proc/sys/kernel/random/boot_id readable")


def _machine_id(seen: MachineSeen) -> Verdict | None:
    if not seen.facts.boot_id or seen.facts.machine_id:
        return None
    says = "there is no /etc/machine-id: the container's host name is used instead"
    return Verdict("note", says, "give the container a stable host name, or mount /etc/machine-id")


def _identity(seen: MachineSeen) -> Verdict | None:
    known = seen.facts.boot_id and seen.facts.machine_id
    return Verdict("ok", "machine restarts and process restarts can be distinguished") if known else None


_MACHINE: Rules[MachineSeen] = (
    ("kernels", _kernels),
    ("memory", _memory),
    ("/dev/shm", _shm),
    ("open files", _open_files),
    ("file size", _file_size),
    ("locked memory", _locked_memory),
    ("boot id", _boot_id),
    ("machine id", _machine_id),
    ("identity", _identity),
)

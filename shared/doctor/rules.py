"""Rules for any directory: its file system, what the trials showed, who may write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from weightcast.shared.checkpoint.update.fetch import JOURNAL_BYTES, ROOM_BYTES
from weightcast.shared.daemon.threads import DAEMON_BYTES
from weightcast.shared.doctor.findings import Finding, Level, Role, size_text
from weightcast.shared.doctor.observe import LocalFacts, MachineFacts, PlaceFacts, RunFacts
from weightcast.shared.files.probes import EXCLUSIVE, LOCAL_NEEDS, RENAME, RENAME_DIRECTORY, VISIBLE, Need

NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "beegfs", "gpfs", "ceph", "9p", "afs", "wekafs")
IN_MEMORY = ("tmpfs", "ramfs")
CLOCK_SECONDS = 2.0
SLOW_COMMIT_SECONDS = 1.0
LATE_SECONDS = 1.0
FEW_FILES = 1000
_NOT_REMOVED = "a file system that shows removed files does not do for weightcast"


@dataclass(frozen=True)
class TrialRule:
    """How one trial counts in one place."""

    check: str
    trial: str
    level: Level
    """when it goes wrong"""
    good: str
    remedy: str

    @classmethod
    def of(cls, need: Need, trial: str, good: str) -> TrialRule:
        """What a first start refuses with the same remedy."""
        return cls(need.check, trial, "failure", good, need.remedy)


def judge_trials(place: str, facts: PlaceFacts, rules: Sequence[TrialRule]) -> Iterator[Finding]:
    """One finding for each trial that was made."""
    for rule in rules:
        outcome = facts.trials.get(rule.trial)
        if outcome is None:
            continue
        if outcome.problem:
            yield Finding(place, rule.check, rule.level, outcome.problem, outcome.remedy or rule.remedy)
        else:
            yield Finding(place, rule.check, "ok", rule.good)


def judge_clock(place: str, facts: PlaceFacts) -> Iterator[Finding]:
    """Ages, retention and lag in seconds come from times that others wrote; nothing is decided by them
    alone."""
    outcome = facts.trials.get("clock")
    if outcome is None or outcome.problem:
        return
    ahead = outcome.figure
    if abs(ahead) <= CLOCK_SECONDS:
        yield Finding(place, "clock", "ok", "new files bear this machine's time")
        return
    yield Finding(
        place,
        "clock",
        "warning",
        f"new files are {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} this machine's clock",
        "run an NTP client on both machines: ages and lag in seconds are wrong by that much",
    )


def judge_pace(place: str, facts: PlaceFacts) -> Iterator[Finding]:
    """How long small things take: a version's commit is about seven durable steps."""
    rename, visible = facts.trials.get("rename"), facts.trials.get("visible")
    if rename is not None and not rename.problem:
        slow = rename.figure > SLOW_COMMIT_SECONDS
        yield Finding(
            place,
            "pace",
            "warning" if slow else "ok",
            f"a small file is durable after {rename.figure * 1000:.0f} ms",
            "each version takes several of these: find what makes this file system slow" if slow else "",
        )
    if visible is not None and not visible.problem and visible.figure > LATE_SECONDS:
        yield Finding(
            place,
            "delay",
            "note",
            f"a new file is seen after {visible.figure:.1f} s",
            "hosts wait --visible-deadline (120 s) for what the pointer names",
        )


def judge_access(place: str, facts: PlaceFacts) -> Iterator[Finding]:
    if facts.is_link and facts.is_directory:
        yield Finding(place, "path", "note", f"{facts.asked} is a symbolic link: where it leads is looked at")
    elif facts.there and not facts.is_directory:
        yield Finding(
            place,
            "path",
            "failure",
            f"{facts.asked} is not a directory",
            "give another directory, or move it",
        )
    if facts.left:
        yield Finding(place, "removal", "failure", facts.left, "remove it by hand; " + _NOT_REMOVED)
    if facts.open_to_all:
        yield Finding(
            place,
            "writers",
            "warning",
            "every user of the machine may replace files here",
            f"chmod o-w {facts.asked}: who may write decides what engines run",
        )
    if facts.space.free_files is not None and facts.space.free_files < FEW_FILES:
        yield Finding(
            place, "files", "failure", f"{facts.space.free_files} more files can be made", "free inodes"
        )


def not_tried(facts: PlaceFacts) -> tuple[str, str]:
    """What is said of a place where nothing could be tried, and its remedy."""
    if facts.refused is None:
        return "nothing can be written", "make the directory, or mount it"
    return f"nothing can be written: {facts.refused.message}", facts.refused.remedy


def kind_of(facts: PlaceFacts) -> str:
    return "" if facts.mount is None else facts.mount.kind


def is_network(kind: str) -> bool:
    return kind in NETWORK or kind.startswith("fuse.")


def kind_text(facts: PlaceFacts) -> str:
    kind = kind_of(facts)
    if facts.mount is None or not kind:
        return "of an unknown kind"
    return f"{kind}, mounted at {facts.mount.point}"


def option(facts: PlaceFacts, name: str) -> str | None:
    """The value of a mount option; empty for one without; None where it is not set."""
    options: Mapping[str, str] = {} if facts.mount is None else dict(map(_pair, facts.mount.options))
    return options.get(name)


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


CHANNEL = "channel"
_LEAST_FREE = 256 << 20
_DELTAS = 20
_CHANNEL_TRIAL_RULES = (
    TrialRule.of(RENAME, "rename", "a rename replaces a file at once; who has the old one open keeps it"),
    TrialRule.of(RENAME_DIRECTORY, "rename_directory", "a directory with files takes a name that nobody has"),
    TrialRule(
        "rename, seen",
        "readers",
        "warning",
        "readers find a whole file while it is replaced",
        "hosts read the pointer again, so this costs looks; index and shards are never replaced",
    ),
    TrialRule.of(
        EXCLUSIVE, "exclusive", "of several that make a file one is told so (seen from this machine)"
    ),
    TrialRule.of(VISIBLE, "visible", "a new file is seen whole, by size, by name and in its directory"),
    TrialRule(
        "lock", "lock", "note", "flock excludes; a channel needs none", "nothing: a channel needs no locks"
    ),
    TrialRule(
        "mmap",
        "map",
        "note",
        "mapped and read bytes agree; channel files are read",
        "nothing: channel files are read, never mapped",
    ),
)


def judge_channel(facts: PlaceFacts, run: RunFacts, role: Role | None) -> Iterator[Finding]:
    """`role`: what runs here; None: not said, so that a missing right to write is a warning."""
    yield from judge_access(CHANNEL, facts)
    yield from _run(run, role)
    if not facts.is_directory:
        return
    yield from _channel_kind(facts)
    yield from _channel_rights(facts, role)
    yield from judge_trials(CHANNEL, facts, _CHANNEL_TRIAL_RULES)
    yield from judge_pace(CHANNEL, facts)
    yield from judge_clock(CHANNEL, facts)
    yield from _channel_space(facts, run, role)


def _run(run: RunFacts, role: Role | None) -> Iterator[Finding]:
    if run.problem:
        yield Finding(CHANNEL, "run", "failure", run.problem, run.remedy)
    elif run.foreign and run.version is None:
        # as an empty mount point looks
        made = "`weightcast channel init` or the publisher makes it"
        yield Finding(
            CHANNEL, "run", "warning", "neither channel.json nor a pointer", f"mount the channel, or: {made}"
        )
    elif run.foreign:
        yield Finding(
            CHANNEL, "run", "note", f"the field's plain format, version {run.version}; not all can be checked"
        )
    else:
        weights = "" if run.full_bytes is None else f", weights of {size_text(run.full_bytes)}"
        yield Finding(CHANNEL, "run", "ok", f"version {run.version or 0}{weights}")
    if run.foreign and role == "publisher" and run.version is not None:
        yield Finding(
            CHANNEL, "run", "failure", "another tool's channel", "publish into a directory of its own"
        )


def _channel_kind(facts: PlaceFacts) -> Iterator[Finding]:
    kind = kind_of(facts)
    found = Finding(CHANNEL, "file system", "ok", kind_text(facts))
    if kind in IN_MEMORY or kind == "overlay":
        found = replace(
            found,
            level="warning",
            says=f"{kind_text(facts)}: only this machine sees it, and not for long",
            remedy="fine for a trial; a fleet needs a directory that all machines mount",
        )
    elif kind in ("nfs", "nfs4") and option(facts, "soft") is not None:
        found = replace(
            found,
            level="warning",
            says=f"{kind_text(facts)}, soft",
            remedy="mount it hard: a soft mount gives errors for a slow server (daemons try again)",
        )
    yield found


def _channel_rights(facts: PlaceFacts, role: Role | None) -> Iterator[Finding]:
    if facts.tried == facts.asked:
        yield Finding(CHANNEL, "permissions", "ok", "this user may write")
    elif facts.tried is not None:
        says = f"this user may write in {facts.tried.name}/ alone"
        yield _needs_write(says, "give its user the directory", role, "ok")
    else:
        yield _needs_write(*not_tried(facts), role, "note")


def _needs_write(says: str, remedy: str, role: Role | None, enough: str) -> Finding:
    """Hosts read; their reports are all that they write."""
    if role == "subscriber":
        if enough == "ok":
            return Finding(CHANNEL, "permissions", "ok", f"{says}: enough for a host")
        remedy = "fine for a host; for its reports: let it write to hosts/, or --report-to the publisher"
        return Finding(CHANNEL, "permissions", "note", says, remedy)
    remedy = f"a publisher must write here: {remedy}"
    if role is None:
        remedy += "; a host need not (--role subscriber)"
    return Finding(CHANNEL, "permissions", "failure" if role == "publisher" else "warning", says, remedy)


def _channel_space(facts: PlaceFacts, run: RunFacts, role: Role | None) -> Iterator[Finding]:
    free = facts.space.free_bytes
    says = f"{size_text(free)} of {size_text(facts.space.total_bytes)} free"
    if role == "subscriber":
        yield Finding(CHANNEL, "space", "ok", says)
        return
    remedy = "free space, or let versions go: --keep-versions, `weightcast channel prune`"
    least = max(_LEAST_FREE, run.delta_bytes or 0)
    if free < least:
        yield Finding(CHANNEL, "space", "failure", f"{says}: a version needs {size_text(least)}", remedy)
    elif run.delta_bytes is not None and free < _DELTAS * run.delta_bytes:
        left = f"{says}: {free // max(run.delta_bytes, 1)} versions like the newest"
        yield Finding(CHANNEL, "space", "warning", left, remedy)
    elif run.full_bytes is not None and free < run.full_bytes:
        says = f"{says}: an anchor ({size_text(run.full_bytes)}) does not fit"
        yield Finding(CHANNEL, "space", "warning", says, remedy)
    else:
        yield Finding(CHANNEL, "space", "ok", says)


LOCAL = "local"
_GUESSED_SHARE = 0.05
"""of the elements, changed by the largest step that space is kept for while none has been seen"""
_BYTES_PER_GUESSED_CHANGE = 2
_ELSEWHERE = "put --local on a local disk (ext4, xfs) or in /dev/shm"
_GOOD = (
    ("rename", "a rename replaces a file at once"),
    ("lock", "flock excludes a second writer"),
    ("map", "mapped and read bytes agree"),
    ("allocate", "space can be taken before it is written"),
    ("visible", "a new file is seen whole at once"),
)
_LOCAL_TRIAL_RULES = (
    *(TrialRule.of(need, trial, good) for need, (trial, good) in zip(LOCAL_NEEDS, _GOOD, strict=True)),
    TrialRule(
        "exclusive create",
        "exclusive",
        "note",
        "of several that make a file one is told so",
        "nothing: a local checkpoint has one writer",
    ),
)


def judge_local(
    facts: PlaceFacts, inside: LocalFacts, run: RunFacts | None, machine: MachineFacts
) -> Iterator[Finding]:
    """`run`: of the channel that is to be followed; None: not given."""
    yield from judge_access(LOCAL, facts)
    if inside.strange:
        yield Finding(
            LOCAL,
            "path",
            "failure",
            f"{facts.asked} is not empty and is not a weightcast local checkpoint",
            "choose an empty or new directory for --local",
        )
    yield from _local_kind(facts)
    yield from _local_rights(facts)
    yield from judge_trials(LOCAL, facts, _LOCAL_TRIAL_RULES)
    yield from judge_clock(LOCAL, facts)
    yield from _local_space(facts, inside, run)
    if kind_of(facts) in IN_MEMORY:
        yield from _local_memory(facts, inside, run, machine)
    elif run is not None and run.full_bytes is not None:
        yield _dirty(run.full_bytes, machine)


def _local_kind(facts: PlaceFacts) -> Iterator[Finding]:
    kind = kind_of(facts)
    if is_network(kind):
        yield Finding(
            LOCAL,
            "file system",
            "warning",
            f"{kind_text(facts)}: every patch and every load crosses the network",
            _ELSEWHERE,
        )
    elif kind == "overlay":
        yield Finding(
            LOCAL,
            "file system",
            "warning",
            f"{kind_text(facts)}: the container's own layer, gone with it",
            "mount a volume for --local",
        )
    else:
        yield Finding(LOCAL, "file system", "ok", kind_text(facts))


def _local_rights(facts: PlaceFacts) -> Iterator[Finding]:
    if facts.tried is not None:
        where = "this user may write" if facts.there else "not there yet; can be made"
        yield Finding(LOCAL, "permissions", "ok", where)
        return
    yield Finding(LOCAL, "permissions", "failure", *not_tried(facts))


def step_bytes(run: RunFacts | None) -> int:
    """Spool and journal of one step, as `check_space` of a host reckons, with room for one twice as large
    as the newest."""
    if run is None or run.elements is None:
        return ROOM_BYTES
    if run.delta_bytes is not None and run.changed is not None:
        return ROOM_BYTES + 2 * (run.delta_bytes + JOURNAL_BYTES * run.changed)
    guessed = int(run.elements * _GUESSED_SHARE)
    return ROOM_BYTES + guessed * (JOURNAL_BYTES + _BYTES_PER_GUESSED_CHANGE)


def _local_space(facts: PlaceFacts, inside: LocalFacts, run: RunFacts | None) -> Iterator[Finding]:
    free, total = facts.space.free_bytes + inside.spare_bytes, facts.space.total_bytes
    full = 0 if run is None or run.full_bytes is None or inside.seeded else run.full_bytes
    wanted = full + step_bytes(run)
    says = f"{size_text(free)} of {size_text(total)} free"
    if free >= wanted:
        yield Finding(LOCAL, "space", "ok", says)
        return
    what = f"{size_text(full)} of weights and " if full else ""
    remedy = "free space or give another disk"
    if kind_of(facts) in IN_MEMORY:
        remedy = "make it larger: `mount -o remount,size=`, --shm-size, or an emptyDir's sizeLimit"
    yield Finding(
        LOCAL,
        "space",
        "failure",
        f"{says}: {what}{size_text(wanted - full)} for a step are needed",
        remedy,
    )


def _dirty(weights: int, machine: MachineFacts) -> Finding:
    """A patch of half a percent changes a word in nearly every page."""
    may_wait = size_text(machine.dirty_bytes)
    if weights <= machine.dirty_bytes:
        return Finding(LOCAL, "dirty pages", "ok", f"{may_wait} may wait for the disk")
    return Finding(
        LOCAL,
        "dirty pages",
        "note",
        f"a patch changes most pages of {size_text(weights)}; when {may_wait} wait for the disk, it goes on "
        "at the disk's speed",
        "--local in /dev/shm, more memory, or larger vm.dirty_background_bytes and vm.dirty_bytes",
    )


def _local_memory(
    facts: PlaceFacts, inside: LocalFacts, run: RunFacts | None, machine: MachineFacts
) -> Iterator[Finding]:
    """Files in a tmpfs are memory: of the machine, and of the container's limit."""
    wanted = step_bytes(run)
    if run is not None and run.full_bytes is not None and not inside.seeded:
        wanted += run.full_bytes
    if wanted > machine.available_bytes:
        yield Finding(
            LOCAL,
            "memory",
            "failure",
            f"{size_text(wanted)} are needed in memory, {size_text(machine.available_bytes)} are available",
            "raise the container's memory limit, or put --local on a disk",
        )
    elif facts.space.total_bytes > machine.limit_bytes:
        yield Finding(
            LOCAL,
            "memory",
            "warning",
            f"a tmpfs of {size_text(facts.space.total_bytes)} is larger than the memory that there is",
            "nothing if the weights fit; a full memory kills processes before the tmpfs is full",
        )


MACHINE = "machine"
_OTHER_FILES = 256
"""descriptors of a daemon besides weight files: connections, locks, logs, libraries"""
_FILES_OF_A_PIECE = 2
"""a weight file may be open in the local checkpoint and in its source"""
_PRIVATE = "give WEIGHTCAST_CACHE a private directory with room, or free space in the one that is told"
_SMALL_SHM = 1 << 30


def judge_machine(facts: MachineFacts, run: RunFacts | None, inside: LocalFacts | None) -> Iterator[Finding]:
    """`run`, `inside`: of channel and local directory, where they were given."""
    yield from _kernels(facts)
    yield from _machine_memory(facts)
    yield from _files(facts, run, inside)
    yield from _identity(facts)


def _kernels(facts: MachineFacts) -> Iterator[Finding]:
    if facts.kernels != "numba":
        yield Finding(
            MACHINE,
            "kernels",
            "failure",
            f"not usable: {facts.kernel_problem}",
            "install the numba and llvmlite releases that weightcast requires",
        )
    elif facts.kernel_problem:
        yield Finding(MACHINE, "kernels", "warning", facts.kernel_problem, _PRIVATE)
    else:
        yield Finding(MACHINE, "kernels", "ok", f"compiled; {facts.cores} cores")


def _machine_memory(facts: MachineFacts) -> Iterator[Finding]:
    says = f"{size_text(facts.available_bytes)} available of {size_text(facts.limit_bytes)}"
    if facts.limit_bytes < facts.memory_bytes:
        says += f", the control group's limit (the machine has {size_text(facts.memory_bytes)})"
    if facts.available_bytes < DAEMON_BYTES:
        yield Finding(
            MACHINE,
            "memory",
            "failure",
            f"{says}: a daemon takes up to {size_text(DAEMON_BYTES)}",
            "more memory, or a smaller --memory-budget",
        )
    else:
        yield Finding(MACHINE, "memory", "ok", says)
    if facts.shm_bytes == 0:
        yield Finding(
            MACHINE, "/dev/shm", "note", "there is none", "give --hand-over and --local other directories"
        )
        return
    remedy = "too small for weights: --shm-size, or an emptyDir of medium Memory with a sizeLimit"
    small = facts.shm_bytes < min(_SMALL_SHM, facts.limit_bytes // 4)
    yield Finding(
        MACHINE,
        "/dev/shm",
        "note" if small else "ok",
        f"a tmpfs of {size_text(facts.shm_bytes)}",
        remedy if small else "",
    )


def _files(facts: MachineFacts, run: RunFacts | None, inside: LocalFacts | None) -> Iterator[Finding]:
    wanted = _OTHER_FILES + _FILES_OF_A_PIECE * (0 if inside is None else inside.files)
    if facts.open_files < wanted:
        yield Finding(
            MACHINE,
            "open files",
            "failure",
            f"{facts.open_files} files may be open (hard limit {facts.open_files_most}), {wanted} are needed",
            f"ulimit -n {wanted}, or LimitNOFILE= in the unit",
        )
    else:
        yield Finding(MACHINE, "open files", "ok", f"{facts.open_files} may be open")
    most = None if run is None else run.full_bytes
    if facts.file_bytes is not None and (most is None or facts.file_bytes < most):
        yield Finding(
            MACHINE,
            "file size",
            "warning",
            f"no file may grow beyond {size_text(facts.file_bytes)}",
            "ulimit -f unlimited, or LimitFSIZE=infinity in the unit",
        )
    locked = "no limit" if facts.locked_bytes is None else size_text(facts.locked_bytes)
    yield Finding(MACHINE, "locked memory", "ok", f"{locked}; weightcast locks none")


def _identity(facts: MachineFacts) -> Iterator[Finding]:
    """What a restart is told by: shared/checkpoint/state/state.py."""
    if not facts.boot_id:
        yield Finding(
            MACHINE,
            "boot id",
            "warning",
            "the kernel tells none: after every start all weights are read again",
            "make /proc/sys/kernel/random/boot_id readable",
        )
    elif not facts.machine_id:
        yield Finding(
            MACHINE,
            "machine id",
            "note",
            "there is no /etc/machine-id: a container's host name stands for it",
            "give the container a host name that stays, or mount /etc/machine-id",
        )
    else:
        yield Finding(MACHINE, "identity", "ok", "a restart of the machine is told from one of the process")

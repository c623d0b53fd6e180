"""What is asked of a local checkpoint's directory."""

from __future__ import annotations

from collections.abc import Iterator

from weightcast.shared.files.probes import LOCAL_NEEDS
from weightcast.shared.local.fetch import JOURNAL_BYTES, ROOM_BYTES
from weightcast.shared.service.doctor.findings import Finding, size_text
from weightcast.shared.service.doctor.machine import MachineFacts
from weightcast.shared.service.doctor.place_rules import (
    IN_MEMORY,
    TrialRule,
    is_network,
    judge_access,
    judge_clock,
    judge_trials,
    kind_of,
    kind_text,
    not_tried,
)
from weightcast.shared.service.doctor.places import LocalFacts, PlaceFacts, RunFacts

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
_TRIAL_RULES = (
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
    yield from _kind(facts)
    yield from _rights(facts)
    yield from judge_trials(LOCAL, facts, _TRIAL_RULES)
    yield from judge_clock(LOCAL, facts)
    yield from _space(facts, inside, run)
    if kind_of(facts) in IN_MEMORY:
        yield from _memory(facts, inside, run, machine)
    elif run is not None and run.full_bytes is not None:
        yield _dirty(run.full_bytes, machine)


def _kind(facts: PlaceFacts) -> Iterator[Finding]:
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


def _rights(facts: PlaceFacts) -> Iterator[Finding]:
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


def _space(facts: PlaceFacts, inside: LocalFacts, run: RunFacts | None) -> Iterator[Finding]:
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


def _memory(
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

"""What is asked of a channel's directory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weightcast.shared.files.probes import EXCLUSIVE, RENAME, RENAME_DIRECTORY, VISIBLE
from weightcast.shared.service.doctor.findings import Finding, Role, size_text
from weightcast.shared.service.doctor.place_rules import (
    IN_MEMORY,
    TrialRule,
    judge_access,
    judge_clock,
    judge_pace,
    judge_trials,
    kind_of,
    kind_text,
    not_tried,
    option,
)
from weightcast.shared.service.doctor.places import PlaceFacts, RunFacts

CHANNEL = "channel"
_LEAST_FREE = 256 << 20
_DELTAS = 20
_TRIAL_RULES = (
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
    yield from _kind(facts)
    yield from _rights(facts, role)
    yield from judge_trials(CHANNEL, facts, _TRIAL_RULES)
    yield from judge_pace(CHANNEL, facts)
    yield from judge_clock(CHANNEL, facts)
    yield from _space(facts, run, role)


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


def _kind(facts: PlaceFacts) -> Iterator[Finding]:
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


def _rights(facts: PlaceFacts, role: Role | None) -> Iterator[Finding]:
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


def _space(facts: PlaceFacts, run: RunFacts, role: Role | None) -> Iterator[Finding]:
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

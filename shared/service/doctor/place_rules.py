"""Rules for any directory: its file system, what the trials showed, who may write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from weightcast.shared.files.probes import Need
from weightcast.shared.service.doctor.findings import Finding, Level
from weightcast.shared.service.doctor.places import PlaceFacts

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

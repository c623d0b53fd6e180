"""Layouts of trainers' directories: which checkpoints of a watched tree are alike, and which layout is
published where there are several. Rules without IO.

A layout is the relative path of a checkpoint with `*` for each number: `global_step_*/actor/huggingface`.
Checkpoints directly in the watched directory, and the watched directory itself, are always published; deeper
ones where it is clear which layout is meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import Field

from weightcast.shared.base.elements import TensorTable

ROOT = "."
"""name of a checkpoint saved into the watched directory itself"""
_FLAT = "*"
_STEP = re.compile(r"(\d{1,15})$", re.ASCII)
_NUMBER = re.compile(r"\d+", re.ASCII)


@dataclass(frozen=True)
class Unpublished:
    """A checkpoint, or all of a layout, that is not published now."""

    name: str
    reason: str
    remedy: str = ""
    still: Annotated[bool, Field(exclude=True)] = True
    """it is a checkpoint, and did not change for as long as one takes to settle"""


@dataclass(frozen=True, order=True)
class Fit:
    """How well the tensors of a checkpoint fit those of the base. Greater is better."""

    complete: bool = False
    found: int = 0
    """tensors of the base, by name and shape"""
    fewer_others: int = 0

    @classmethod
    def of(cls, table: TensorTable, base: TensorTable) -> Fit:
        forms = {(spec.name, spec.shape) for spec in base}
        found = sum((spec.name, spec.shape) in forms for spec in table)
        return cls(found == len(forms), found, found - len(table))


def step_of(name: str) -> int | None:
    """The number in which the innermost numbered component ends (`step_100`, `global_step_20/actor`)."""
    matches = [_STEP.search(part) for part in reversed(name.split("/"))]
    return next((int(match[1]) for match in matches if match is not None), None)


def save_of(name: str) -> str:
    """The directory of one save, to which a checkpoint belongs: up to the innermost numbered component."""
    parts = name.split("/")
    numbered = [at for at, part in enumerate(parts) if _STEP.search(part)]
    return "/".join(parts[: numbered[-1] + 1 if numbered else 1])


def parents_of(name: str) -> list[str]:
    """Innermost first, without the watched directory."""
    parts = name.split("/")
    return ["/".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


def pattern_of(name: str) -> str:
    return _NUMBER.sub("*", name)


def matches(name: str, pattern: str) -> bool:
    """`pattern`: a glob per component; `**` is any number of components, `.` for the root."""
    return _matches(
        *([part for part in text.split("/") if part not in ("", ".")] for text in (name, pattern))
    )


def _matches(parts: Sequence[str], globs: Sequence[str]) -> bool:
    if not globs or globs[0] == "**":
        return any(_matches(parts[at:], globs[1:]) for at in range(len(parts) + 1)) if globs else not parts
    return bool(parts) and fnmatchcase(parts[0], globs[0]) and _matches(parts[1:], globs[1:])


@dataclass
class Layouts:
    """Which layouts are published. A layout that was not clear once stays so until the next start."""

    pattern: str | None = None
    left: dict[str, Unpublished] = field(default_factory=dict)
    """by the layout's pattern"""
    _clear: set[str] = field(default_factory=lambda: {_FLAT})

    def is_left(self, name: str) -> bool:
        """Whether it needs no look: its layout is not published."""
        if self.pattern is not None and not matches(name, self.pattern):
            reason = f"does not match --watch-pattern '{self.pattern}'"
            self._leave(pattern_of(name), reason, "nothing to do, or change --watch-pattern")
            return True
        return self.pattern is None and _layout(name) != _FLAT and pattern_of(name) in self.left

    def is_clear(self, name: str) -> bool:
        return self.pattern is not None or _layout(name) in self._clear

    def judge(self, ready: Mapping[str, Fit], published: Iterable[tuple[int, str]]) -> None:
        """`ready`: complete checkpoints that are not published yet, by name; `published`: version, name."""
        before = sorted(published)
        self._clear |= {_layout(name) for _, name in before}
        new: dict[str, Fit] = {}
        for name, fit in ready.items():
            if not self.is_clear(name):
                new[_layout(name)] = max(fit, new.get(_layout(name), fit))
        flat = max((fit for name, fit in ready.items() if _layout(name) == _FLAT), default=None)
        best = max(new.values(), default=None)
        if flat is not None and best is not None and flat >= best:
            self._leave_all(new, "there are checkpoints directly in the watched directory, too")
            return
        self._leave_all(
            [each for each in new if new[each] != best],
            "the tensors of other checkpoints fit the base better",
        )
        fitting = {each for each in new if new[each] == best}
        # not what is within another: that one's checkpoint is the whole
        rivals = [each for each in new if each in fitting and fitting.isdisjoint(parents_of(each))]
        if before and not all(
            _follows(name, ready[name], before[-1][1]) for name in ready if _layout(name) in rivals
        ):
            self._leave_all(rivals, f"checkpoints were published from {pattern_of(before[-1][1])}")
        elif len(rivals) > 1:
            rivals.sort()
            remedy = f"start the publisher with --watch-pattern '{rivals[0]}' or another of them"
            left = Unpublished(" and ".join(rivals), "it is not clear which of these to publish", remedy)
            self.left |= dict.fromkeys(rivals, left)
        else:
            self._clear |= set(rivals)

    def _leave_all(self, layouts: Iterable[str], reason: str) -> None:
        for layout in layouts:
            self._leave(layout, reason, f"to publish it, start with --watch-pattern '{layout}'")

    def _leave(self, layout: str, reason: str, remedy: str) -> None:
        self.left.setdefault(layout, Unpublished(layout, reason, remedy))


def _layout(name: str) -> str:
    return pattern_of(name) if "/" in name else _FLAT


def _follows(name: str, fit: Fit, published: str) -> bool:
    """Whether it is a later step of the same training, though saved in another layout."""
    step, before = step_of(name), step_of(published)
    return fit.complete and step is not None and (before is None or step > before)

"""What a publication did, typed: for callers, `--json` and status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PublishReport:
    """One committed version. Counts are of elements, sizes of bytes, `seconds` by phase."""

    run_id: str
    version: int
    base_version: int
    kind: str
    """delta or anchor"""
    step: int | None
    root: str
    encoding: str | None
    elements: int
    changed_elements: int
    full_bytes: int
    changed_bytes: int
    """bytes of the changed elements"""
    delta_bytes: int
    """all files of the version, index included"""
    tensors_changed: int
    seconds: Mapping[str, float] = field(default_factory=dict)
    mapped: Mapping[str, int] = field(default_factory=dict)
    """what was done to the names that were given, and to how many: `{"-module.": 291}`"""
    non_finite: Mapping[str, int] = field(default_factory=dict)
    """elements by tensor that became NaN or infinite with this version, of what this rank compared; empty for
    an anchor, which is compared with nothing"""
    anchor_problem: str = ""
    """why an anchor that was due could not be written; it is tried again beside the next version"""

    @property
    def density_elements(self) -> float:
        return self.changed_elements / self.elements if self.elements else 0.0

    @property
    def density_bytes(self) -> float:
        return self.changed_bytes / self.full_bytes if self.full_bytes else 0.0

    @property
    def non_finite_elements(self) -> int:
        return sum(self.non_finite.values())

    @property
    def bits_per_change(self) -> float:
        return 8 * self.delta_bytes / self.changed_elements if self.changed_elements else 0.0

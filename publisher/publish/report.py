"""What a publication did, typed: for callers, `--json` and status."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import field, fields

import numpy as np

from weightcast.publisher.weights.tensors import NO_FACTS, InputFacts
from weightcast.shared.base.elements import TensorTable
from weightcast.shared.base.errors import WeightcastError
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.index import Index
from weightcast.shared.daemon.status import Facts


class Publication(Facts):
    """A committed version as status and answers show it; sizes in bytes, `seconds` by phase."""

    version: int
    kind: str = ""
    """delta or anchor"""
    step: int | None = None
    resumed_from_step: int | None = None
    """the step of the version before, where this one's is lower"""
    root: str = ""
    """digest of all tensors, by which a retry is compared; empty in records of older releases"""
    source: str = ""
    """the checkpoint's name or path"""
    changed_elements: int = 0
    density_elements: float = 0.0
    density_bytes: float = 0.0
    delta_bytes: int = 0
    full_bytes: int = 0
    bits_per_change: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    mapped: dict[str, int] = field(default_factory=dict)
    """what was done to the names that were given, and to how many"""
    cast: int = 0
    """tensors that were rounded to the run's dtype"""
    renamed: int = 0
    dropped: int = 0
    """tensors of the checkpoint that were left out"""
    notes: tuple[str, ...] = ()
    """what was tolerated in the checkpoint, and options that had no effect on it"""
    config_changed: tuple[str, ...] = ()
    """config files of the checkpoint that differ from the base's; once per change"""
    carried: tuple[str, ...] = ()
    """config files that hosts of this version have in place of the base's"""
    non_finite_elements: int = 0
    """that became NaN or infinite with this version"""
    at: float = 0.0
    """unix time of the publisher's clock"""

    @property
    def total_seconds(self) -> float:
        return self.seconds["total"] if "total" in self.seconds else sum(self.seconds.values())

    @property
    def not_carried(self) -> tuple[str, ...]:
        """Changed config files that hosts do not get."""
        return tuple(name for name in self.config_changed if name not in self.carried)

    @property
    def adapted(self) -> dict[str, int]:
        """Tensors by what options did to them."""
        return {"cast": self.cast, "renamed": self.renamed, "dropped": self.dropped}


class PublishReport(Publication):
    """One committed version, for who published it. Counts are of elements."""

    run_id: str
    base_version: int
    encoding: str | None
    elements: int
    changed_bytes: int
    """bytes of the changed elements"""
    tensors_changed: int
    non_finite: Mapping[str, int]
    """elements by tensor that became NaN or infinite with this version, of what this rank compared; empty for
    an anchor, which is compared with nothing"""
    anchor_problem: str = ""
    """why an anchor that was due could not be written; it is tried again beside the next version"""

    def shown(self, source: str) -> Publication:
        """As status and answers show it. `source`: the checkpoint's name or path."""
        facts = {each.name: getattr(self, each.name) for each in fields(Publication)}
        return Publication(**facts).but(source=source, at=time.time())


def report_of(
    index: Index,
    table: TensorTable,
    index_bytes: int,
    facts: InputFacts = NO_FACTS,
    *,
    seconds: Mapping[str, float] | None = None,
    step_before: int | None = None,
    configs_before: Mapping[str, str] | None = None,
    non_finite: Mapping[str, int] | None = None,
) -> PublishReport:
    """`step_before`: of the previous version; `configs_before`: `facts.configs` of the previous input from
    files."""
    resumed = step_before is not None and index.step is not None and index.step < step_before
    known = configs_before or {}
    changed = {name: digest for name, digest in (facts.configs or {}).items() if digest}
    changed_elements, changed_bytes = index.totals.changed, _changed_bytes(index, table)
    delta_bytes = index.totals.delta_bytes + index_bytes
    found = non_finite or {}
    return PublishReport(
        run_id=index.run_id,
        version=index.version,
        base_version=index.base_version,
        kind=index.kind,
        step=index.step,
        resumed_from_step=step_before if resumed else None,
        root=index.root,
        encoding=index.encoding,
        elements=table.elements,
        changed_elements=changed_elements,
        density_elements=changed_elements / table.elements if table.elements else 0.0,
        full_bytes=table.nbytes,
        changed_bytes=changed_bytes,
        density_bytes=changed_bytes / table.nbytes if table.nbytes else 0.0,
        delta_bytes=delta_bytes,
        bits_per_change=8 * delta_bytes / changed_elements if changed_elements else 0.0,
        tensors_changed=len(index.tensors),
        seconds=dict(seconds or {}),
        mapped=dict(facts.mapped),
        **facts.adapted._asdict(),
        notes=facts.notes,
        config_changed=tuple(name for name, digest in changed.items() if digest != known.get(name)),
        carried=tuple(record.name for record in index.carried),
        non_finite=dict(found),
        non_finite_elements=sum(found.values()),
    )


def _changed_bytes(index: Index, table: TensorTable) -> int:
    numbers = index.tensors.numbers(table)
    widths = table.sizes[numbers] // np.maximum(1, table.counts[numbers])
    return int((index.tensors.changed * widths).sum())


def step_of_version(channel: Channel, version: int) -> int | None:
    """None where the version's index has none, or cannot be read."""
    pointer = channel.pointer()
    with contextlib.suppress(WeightcastError, OSError):
        index = None if pointer is None else channel.index(pointer, version, channel.require_ours()[1].table)
        return index.step if isinstance(index, Index) else None
    return None

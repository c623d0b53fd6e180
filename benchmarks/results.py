"""What a run of the benchmark found: the schema of results.json. Sizes in bytes, times in seconds."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

FORMAT = 1


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Spread(_Row):
    """Median, least and most of the measured rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Raises StatisticsError when there are none."""
        known = list(values)
        return cls(median=median(known), low=min(known), high=max(known))


class ChunkRow(_Row):
    """Chunks in memory, digests included. `publish`: compare, digest the new bytes, encode; `apply`: decode,
    check, write the new words."""

    trace: Literal["simulated", "trained", "unrelated"]
    case: str
    threads: int
    encoding: str
    modes: str
    """mode bytes of the blobs"""
    raw_bytes: int
    chunks: int
    words: int
    changed: int
    payload_bytes: int
    bound_bits: float | None
    """entropy of what the encoding says, per changed word"""
    publish: Spread
    apply: Spread

    @property
    def density(self) -> float:
        return self.changed / self.words

    @property
    def bits(self) -> float | None:
        return 8 * self.payload_bytes / self.changed if self.changed else None


class FloorRow(_Row):
    """Single passes over memory with so many threads."""

    threads: int
    nbytes: int
    seconds: dict[str, Spread]


class Work(_Row):
    """Publications or syncs of one contender. `seconds`: until the next one can begin; `pointer`: of a
    daemon's publication, until the pointer names the version. `cpu`: of its process; `anon_bytes`: most
    growth of RssAnon while at it (of a command: all of its RssAnon); `phases`: medians, as the contender
    tells them."""

    seconds: Spread
    pointer: Spread | None = None
    cpu: Spread
    anon_bytes: int
    phases: dict[str, float]


class FileRow(_Row):
    """Whole publications and syncs on files, every check, journal and fsync included."""

    doors: Literal["daemons", "commands"]
    cache: Literal["warm", "cold"]
    model_bytes: int
    experts: int = 0
    """so many tensors of one size are the model; 0: few large ones"""
    asked_density: float
    threads: int
    encoding: str
    """fast, small, or field: the field's own path"""
    rounds: int
    elements: int
    changed: int
    """elements, median"""
    version_bytes: int
    """all files of a version, median"""
    publish: Work
    sync: Work

    @property
    def density(self) -> float:
        return self.changed / self.elements

    @property
    def bits(self) -> float | None:
        return 8 * self.version_bytes / self.changed if self.changed else None


class ReadRow(_Row):
    """Reading a checkpoint's files block by block and doing nothing with it."""

    model_bytes: int
    cache: Literal["warm", "cold"]
    threads: int
    seconds: Spread


class FirstUse(_Row):
    """A fresh interpreter until every kernel is ready."""

    what: str
    seconds: float


class Machine(_Row):
    cpu: str
    cores: int
    memory_bytes: int
    system: str
    file_system: str
    versions: dict[str, str]


class Results(_Row):
    format: int = FORMAT
    quick: bool
    seed: int
    seconds: float
    machine: Machine
    chunks: tuple[ChunkRow, ...] = ()
    floors: tuple[FloorRow, ...] = ()
    files: tuple[FileRow, ...] = ()
    reads: tuple[ReadRow, ...] = ()
    first_use: tuple[FirstUse, ...] = ()


def load(path: Path) -> Results:
    """Raises ValueError for a file that is not one of these."""
    try:
        found = Results.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{path} holds no results: {error}") from error
    if found.format != FORMAT:
        raise ValueError(f"{path} has format {found.format}, this reads {FORMAT}")
    return found


def dump(results: Results) -> str:
    """Floats keep four significant digits: more would be noise, and churn in the repository."""
    return json.dumps(_rounded(results.model_dump()), indent=1) + "\n"


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return value

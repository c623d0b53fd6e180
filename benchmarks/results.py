"""What a run of the benchmark found: the schema of results.json. Sizes in bytes, times in seconds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
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
    """fast, small, or field: slime's format"""
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


# -- goals

ANON_BYTES = 512 << 20
CHUNK_OVERHEAD = 64
_GIGABYTE, _LARGE = 0.9e9, 3.6e9
"""least bytes of a model of nominally 1 GB, 4 GB"""
TYPICAL = 0.014
"""share of changed elements of a usual step"""
_NEAR = 1.25
"""factor within which a measured density is the one asked for"""


@dataclass(frozen=True)
class Goal:
    """`found`: the worst point that was measured, None where nothing was; at most `bound`, or at least."""

    text: str
    bound: float
    at_least: bool
    found: float | None
    where: str = ""
    low: float | None = None
    high: float | None = None
    """least and most of the rounds, where `found` is a ratio of medians of times"""

    @property
    def held(self) -> bool | None:
        if self.found is None:
            return None
        return self.found >= self.bound if self.at_least else self.found <= self.bound


@dataclass(frozen=True)
class _Point:
    value: float
    where: str
    low: float | None = None
    high: float | None = None


def goals(results: Results) -> list[Goal]:
    near = {"fast": (1.04, 0.45, 0.50), "small": (1.06, 0.34, 0.37)}
    found = []
    for name, (bound, usual, sparse) in near.items():
        found.append(
            _at_most(f"`{name}`, 0.3 to 4%: bits over entropy bound", bound, _over_bound(results, name))
        )
        found.append(
            _at_most(f"`{name}`, 1 to 4%: bytes over `field`", usual, _bytes(results, name, 0.01, 0.05))
        )
        found.append(
            _at_most(f"`{name}`, 0.3%: bytes over `field`", sparse, _bytes(results, name, 0.002, 0.005))
        )
    found.append(_at_most("any input: bytes above raw per chunk", CHUNK_OVERHEAD, _overhead(results)))
    found += [_chunk_speeds(results, verb) for verb in ("publish", "apply")]
    found += [_worst_chunk_speeds(results, verb) for verb in ("publish", "apply")]
    for doors, bounds in (("daemons", (3.0, 4.0)), ("commands", (2.0, 2.0))):
        found += [
            _at_least(
                f"{doors}, 4 GB, 1.4%: {verb}, times `field`",
                bound,
                _file_speeds(results, doors, verb),
            )
            for verb, bound in zip(("publish", "sync"), bounds, strict=True)
        ]
    found.append(
        _at_least(
            "daemons, 4 GB, 1.4%: to the pointer, times `field`",
            3.0,
            _pointer_speeds(results),
        )
    )
    found += [_worst_file_speeds(results, verb) for verb in ("publish", "sync")]
    found.append(_at_most("daemons: growth of anonymous memory, MiB", ANON_BYTES >> 20, _memory(results)))
    return found


def _at_most(text: str, bound: float, points: Iterable[_Point]) -> Goal:
    return _goal(text, bound, False, max(points, key=lambda point: point.value, default=None))


def _at_least(text: str, bound: float, points: Iterable[_Point]) -> Goal:
    return _goal(text, bound, True, min(points, key=lambda point: point.value, default=None))


def _goal(text: str, bound: float, at_least: bool, worst: _Point | None) -> Goal:
    if worst is None:
        return Goal(text, bound, at_least, None)
    return Goal(text, bound, at_least, worst.value, worst.where, worst.low, worst.high)


def _over_bound(results: Results, name: str) -> Iterator[_Point]:
    for row in results.chunks:
        if row.encoding == name and row.bits and row.bound_bits and 0.0025 < row.density < 0.05:
            yield _Point(row.bits / row.bound_bits, f"{row.trace}, {row.density:.2%}")


def _overhead(results: Results) -> Iterator[_Point]:
    for row in results.chunks:
        if row.encoding != "field":
            yield _Point((row.payload_bytes - row.raw_bytes) / row.chunks, f"{row.trace}, {row.density:.1%}")


def _bytes(results: Results, name: str, low: float, high: float) -> Iterator[_Point]:
    for row in results.files:
        if row.encoding == name and row.model_bytes > _GIGABYTE and low < row.density < high:
            other = _field_of(results, row)
            if other is not None and other.version_bytes:
                value = row.version_bytes / other.version_bytes
                yield _Point(value, f"{_gigabytes(row)}, {row.density:.2%}")


def _field_of(results: Results, row: FileRow) -> FileRow | None:
    same = ("doors", "cache", "model_bytes", "experts", "asked_density", "threads")
    for other in results.files:
        if other.encoding == "field" and all(getattr(other, one) == getattr(row, one) for one in same):
            return other
    return None


def _chunk_speeds(results: Results, verb: str) -> Goal:
    rows = [row for row in results.chunks if row.trace == "simulated" and _is_near(row.density, TYPICAL)]
    points = map(partial(_chunk_ratio, results, verb), _most_threads(rows, "fast"))
    return _at_least(f"`fast` in memory, 1.4%: {verb}, times `field`", 5.0, filter(None, points))


def _worst_chunk_speeds(results: Results, verb: str) -> Goal:
    points = map(partial(_chunk_ratio, results, verb), _most_threads(results.chunks, "fast"))
    text = f"`fast` in memory, any density: {verb}, times `field`"
    return _at_least(text, 0.5, filter(None, points))


def _is_near(found: float, wanted: float) -> bool:
    return wanted / _NEAR < found < wanted * _NEAR


def _most_threads(rows: Iterable[ChunkRow], name: str) -> list[ChunkRow]:
    mine = [row for row in rows if row.encoding == name]
    most = max((row.threads for row in mine), default=0)
    return [row for row in mine if row.threads == most]


def _chunk_ratio(results: Results, verb: str, row: ChunkRow) -> _Point | None:
    for other in results.chunks:
        same = (other.trace, other.case, other.threads) == (row.trace, row.case, row.threads)
        if same and other.encoding == "field":
            return _ratio(getattr(other, verb), getattr(row, verb), f"{row.trace}, {row.density:.1%}")
    return None


def _file_speeds(results: Results, doors: str, verb: str) -> Iterator[_Point]:
    for row, other in _large_pairs(results, doors):
        theirs: Work = getattr(other, verb)
        mine: Work = getattr(row, verb)
        yield _ratio(theirs.seconds, mine.seconds, f"{_gigabytes(row)}, {row.threads} threads")


def _worst_file_speeds(results: Results, verb: str) -> Goal:
    """Of models large enough that fixed costs of a version do not matter."""
    points = []
    for row in results.files:
        other = _field_of(results, row)
        shown = row.encoding == "fast" and (row.doors, row.cache) == ("daemons", "warm")
        if shown and row.model_bytes > _GIGABYTE and other is not None:
            where = f"{_gigabytes(row)}, {row.density:.1%}"
            points.append(_ratio(getattr(other, verb).seconds, getattr(row, verb).seconds, where))
    return _at_least(f"daemons, any density: {verb}, times `field`", 0.5, points)


def _pointer_speeds(results: Results) -> Iterator[_Point]:
    for row, other in _large_pairs(results, "daemons"):
        theirs, mine = other.publish.pointer, row.publish.pointer
        if theirs is not None and mine is not None:
            yield _ratio(theirs, mine, f"{_gigabytes(row)}, {row.threads} threads")


def _large_pairs(results: Results, doors: str) -> Iterator[tuple[FileRow, FileRow]]:
    """Rows of `fast` with those of `field`."""
    for row in results.files:
        large = row.model_bytes > _LARGE and _is_near(row.asked_density, TYPICAL)
        if row.encoding == "fast" and row.doors == doors and row.cache == "warm" and large:
            other = _field_of(results, row)
            if other is not None:
                yield row, other


def _ratio(theirs: Spread, mine: Spread, where: str) -> _Point:
    return _Point(theirs.median / mine.median, where, theirs.low / mine.high, theirs.high / mine.low)


def _memory(results: Results) -> Iterator[_Point]:
    for row in results.files:
        if row.doors == "daemons" and row.encoding != "field":
            for verb, work in (("publish", row.publish), ("sync", row.sync)):
                where = f"{row.encoding}, {verb}, {_gigabytes(row)}, {row.density:.1%}"
                yield _Point(work.anon_bytes / (1 << 20), where)


def _gigabytes(row: FileRow) -> str:
    return f"{row.model_bytes / 1e9:.2f} GB"

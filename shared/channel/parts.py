"""The split of a version into parts, compact: runs of whole tensors and pieces. docs/FORMAT.md, Parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import cast

from weightcast.shared.errors import DamagedFile
from weightcast.shared.files.safetensors import naturals
from weightcast.shared.files.strict_json import Members
from weightcast.shared.words import BLOCK_WORDS, Part, Segment, TensorTable, whole_part


def write_parts(parts: Sequence[Part], table: TensorTable) -> list[list[list[int]]] | None:
    """None for a single part that is the whole table."""
    if tuple(parts) == (whole_part(table),):
        return None
    return [_rows(part, table) for part in parts]


def _rows(part: Part, table: TensorTable) -> list[list[int]]:
    rows: list[list[int]] = []
    for segment in part.segments:
        number = segment.tensor
        if (segment.start, segment.stop) != (0, table[number].words):
            rows.append([number, segment.start, segment.stop])
        elif rows and len(rows[-1]) == 2 and rows[-1][1] == number - 1:
            rows[-1][1] = number
        else:
            rows.append([number, number])
    return rows


def parse_parts(facts: Members, table: TensorTable, what: str) -> tuple[Part, ...]:
    """The member `parts`; `check_parts` is still to be called. Raises DamagedFile."""
    if facts.is_null("parts"):
        return (whole_part(table),)
    room = len(table)
    parts: list[Part] = []
    for number, rows in enumerate(facts.array("parts")):
        segments = tuple(_segments(rows, table, room, what))
        # Disjoint parts hold each whole tensor once: more would be memory spent on an index to be refused.
        room -= sum(
            segment.start == 0 and segment.stop == table[segment.tensor].words for segment in segments
        )
        parts.append(Part(number, segments))
    return tuple(parts)


def _segments(rows: object, table: TensorTable, room: int, what: str) -> Iterator[Segment]:
    if type(rows) is not list:
        raise DamagedFile(f"{what}: a part is not an array")
    for row in cast(list[object], rows):
        numbers = naturals(row, 3)
        if numbers is None or len(numbers) < 2 or max(numbers[: 4 - len(numbers)]) >= len(table):
            raise DamagedFile(f"{what}: bad row {repr(row)[:60]} in a part")
        if len(numbers) == 3:
            yield Segment(*numbers)
            continue
        first, last = numbers
        room -= last - first + 1
        if last < first or room < 0:
            raise DamagedFile(f"{what}: a part holds a tensor twice")
        for number in range(first, last + 1):
            yield Segment(number, 0, table[number].words)


def check_parts(parts: Sequence[Part], table: TensorTable, what: str) -> None:
    """Segments lie inside their tensors on block borders, ascend within a part, and no two overlap. Raises
    DamagedFile."""
    if tuple(parts) == (whole_part(table),):
        return
    if [part.number for part in parts] != list(range(len(parts))):
        raise DamagedFile(f"{what}: parts are not numbered from 0")
    for part in parts:
        for segment in part.segments:
            _check_segment(segment, table, what)
        _check_ascending([(segment.tensor, segment.start) for segment in part.segments], what)
    _check_disjoint([segment for part in parts for segment in part.segments], what)


def _check_segment(segment: Segment, table: TensorTable, what: str) -> None:
    number, start, stop = segment.tensor, segment.start, segment.stop
    words = table[number].words if 0 <= number < len(table) else -1
    fits = 0 <= start < stop <= words and start % BLOCK_WORDS == 0
    if not fits and (start, stop, words) != (0, 0, 0):
        raise DamagedFile(f"{what}: words {start} to {stop} of tensor {number} cannot be a part's")


def _check_ascending(starts: Sequence[tuple[int, int]], what: str) -> None:
    if any(later <= earlier for earlier, later in itertools.pairwise(starts)):
        raise DamagedFile(f"{what}: segments of a part are not in table order")


def _check_disjoint(segments: Sequence[Segment], what: str) -> None:
    ordered = sorted((segment.tensor, segment.start, segment.stop) for segment in segments)
    for earlier, later in itertools.pairwise(ordered):
        if earlier[0] == later[0] and (later[1] < earlier[2] or later == earlier):
            raise DamagedFile(f"{what}: two segments of tensor {later[0]} overlap")

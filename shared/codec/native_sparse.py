"""Payloads of `fast`, written and read in one call each.

Between two calls a thread asks for the interpreter again, and waits while another thread has it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import ByteArray, WordKind, Words
from weightcast.shared.codec.contexts import EXPONENTS, Table
from weightcast.shared.codec.native_codes import read_gaps
from weightcast.shared.codec.native_ordinals import facts
from weightcast.shared.codec.native_rice import plan_contexts, write_gaps, write_magnitudes
from weightcast.shared.codec.native_scan import split_all
from weightcast.shared.codec.native_steps import read_steps, room_for
from weightcast.shared.codec.places import BAD_GAPS, BAD_PLACE, BAD_STEPS, GOOD, Taken
from weightcast.shared.codec.scratch import scratch
from weightcast.shared.digest.native import I64, SHIFTS, U64, frozen, kernel, unwritable

Array32 = NDArray[np.uint32]
Counts = NDArray[np.int64]


@kernel
def _put_fast(
    near: Any,
    before: Any,
    after: Any,
    kind: Any,
    k: Any,
    magnitude: Any,
    exponents: Any,
    signs: Any,
    grouped: Any,
    tallies: Any,
    contexts: Any,
    sizes: Any,
    out: Any,
    most: Any,
) -> Any:
    """First exponent, bytes of the gaps, of all; -1 where those are more than `most`."""
    start = I64(write_gaps(near, k, out, most))
    behind = start + ((near.size + 7) >> 3)
    if start < 0 or behind > most:
        return I64(0), start, I64(-1)
    split_all(before, after, kind, magnitude, exponents, signs, tallies)
    for pair in range((near.size + 15) >> 4):
        place = start + 2 * pair
        out[place] = signs[pair] & 255
        out[place + 1] = signs[pair] >> 8
    first = I64(plan_contexts(tallies, contexts))
    size = I64(
        write_magnitudes(magnitude, exponents, first, contexts, grouped, out[behind:], most - behind, sizes)
    )
    return first, start, (behind + size if size >= 0 else I64(-1))


def put_fast(
    near: Array32,
    before: Words,
    after: Words,
    kind: WordKind,
    k: int,
    contexts: Table,
    out: ByteArray,
    most: int,
) -> tuple[int, Counts, int, int] | None:
    """What changes from `before` to `after` at `near`, positions without padding: gaps with parameter `k`,
    signs and magnitudes, one behind the other. Fills `contexts` as `plan_contexts` does. Returns the first
    exponent, bytes per context, of the gaps, of all."""
    room, count = scratch(), len(near)
    sizes = np.zeros(len(contexts), np.int64)
    first, start, stop = _put_fast(
        unwritable(near),
        unwritable(before),
        unwritable(after),
        facts(kind),
        U64(k),
        room.take("magnitude", np.uint32, count),
        room.take("exponents", np.uint8, count),
        room.take("signs", np.uint16, count // 16 + 1),
        room.take("grouped", np.uint32, count),
        np.zeros((EXPONENTS, 3), np.int64),
        contexts,
        sizes,
        out,
        most,
    )
    return None if stop < 0 else (first, sizes, start, stop)


@kernel
def _take_fast(
    data: Any,
    start: Any,
    stop: Any,
    k: Any,
    index: Any,
    words: Any,
    borders: Any,
    shifts: Any,
    streams: Any,
    book: Any,
    first: Any,
    old: Any,
    kind: Any,
    shift: Any,
    ends: Any,
    numbers_of: Any,
    before: Any,
    after: Any,
    sums: Any,
    changed: Any,
) -> Any:
    end = read_gaps(data, start, stop, k, borders, shifts, index)
    if end < 0:
        return BAD_GAPS
    if end > words:
        return BAD_PLACE
    good = read_steps(
        data, U64(stop), streams, book, first, old, index, kind, shift, ends, numbers_of, before, after, sums,
        changed,
    )  # fmt: skip
    return GOOD if good else BAD_STEPS


def take_fast(
    data: ByteArray,
    gaps: tuple[int, int],
    k: int,
    index: Array32,
    words: int,
    borders: Counts,
    shifts: Counts,
    streams: Counts,
    first: int,
    old: Words,
    kind: WordKind,
    ends: Counts,
    numbers: Counts,
) -> Taken | int:
    """`take_gaps` of bytes `gaps` into `index`, in a chunk of so many `words` without padding, then
    `take_steps` of what follows. Returns what is wrong where something is."""
    taken, book = room_for(len(index), len(ends), streams.shape[1], old)
    shift = U64(SHIFTS[old.itemsize])
    found = _take_fast(
        frozen(data), *gaps, U64(k), index, words, borders, shifts, streams, book, first, frozen(old),
        facts(kind), shift, ends, numbers, *taken,
    )  # fmt: skip
    return taken if found == GOOD else int(found)

"""The kernels of digest and codec once more, in numpy: the oracle that compiled kernels are compared with.

Names, arguments and results are those of `weightcast.shared.kernels.native` and of
`weightcast.shared.kernels.mix`.
"""

from __future__ import annotations

import struct
import sys

import numpy as np
import xxhash
from numpy.typing import NDArray

from weightcast.shared.base.elements import ByteArray, WordKind, Words
from weightcast.shared.digest import checksums
from weightcast.shared.digest.checksums import ZERO, Lanes, LanesArray, mix_a, mix_b
from weightcast.shared.kernels import load
from weightcast.shared.kernels.constants import (
    CODING,
    COUNT,
    ESCAPE,
    ESCAPED_GAP,
    GREATEST,
    K_REST,
    LONGEST,
    MIX_A,
    MIX_B,
    NOTHING,
    RICE,
    RUNS,
    SLACK,
    Array32,
    Begin,
    Counts,
    K,
    Masks,
    Table,
    Taken,
    at_once,
    check_masks,
    places_under,
)
from weightcast.shared.kernels.constants import plan_contexts as plan_contexts


def install() -> None:
    """Makes this process compute with this module, to test the oracle itself."""
    for module in (load, checksums):
        module.kernels = lambda: sys.modules[__name__]


MASK64 = (1 << 64) - 1


def _mix_a(word: int, number: int) -> int:
    x = word ^ (number * MIX_A[0] & MASK64)
    x = (x ^ x >> 32) * MIX_A[1] & MASK64
    x = (x ^ x >> 29) * MIX_A[2] & MASK64
    return x ^ x >> 32


def _mix_b(word: int, number: int) -> int:
    x = (word + number * MIX_B[0]) & MASK64
    x = (x ^ x >> 31) * MIX_B[1] & MASK64
    x = (x ^ x >> 33) * MIX_B[2] & MASK64
    return x ^ x >> 30


def finalise(lanes: Lanes, nbytes: int) -> bytes:
    """16 bytes, a then b, each little-endian: the lanes of a whole tensor bound to its length in bytes."""
    number = 2 * nbytes + 1
    return _mix_a(lanes.a, number).to_bytes(8, "little") + _mix_b(lanes.b, number).to_bytes(8, "little")


BLOCK = 1 << 17
"""bytes hashed at once; a multiple of 8"""


def _block(data: ByteArray, first_number: int) -> Lanes:
    words = np.zeros(-(-len(data) // 8), "<u8")
    words.view(np.uint8)[: len(data)] = data
    numbers = np.arange(len(words), dtype=np.uint64) + np.uint64(first_number)
    return Lanes(int(mix_a(words, numbers).sum()), int(mix_b(words, numbers).sum()))


def hash_bytes(data: ByteArray, first_word: int) -> Lanes:
    lanes = ZERO
    for start in range(0, len(data), BLOCK):
        lanes = lanes.plus(_block(data[start : start + BLOCK], first_word + start // 8 + 1))
    return lanes


def hash_pieces(data: ByteArray, pieces: NDArray[np.int64]) -> LanesArray:
    lanes = [hash_bytes(data[start:stop], first) for start, stop, first in pieces.tolist()]
    return np.array(lanes, np.uint64).reshape(-1, 2)


def touched(
    old: Words, index: NDArray[np.uint32], new: Words, ends: NDArray[np.int64], numbers: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Sums over the touched 8-byte words, uint64[spans, 4] (old a, b, new a, b), and changed words,
    int64[spans]. `index`: positions in the chunk, ascending. `ends`, `numbers`: per span its end in the chunk
    and the number of the chunk's 8-byte word 0 in its tensor's count."""
    per_word = 8 // old.itemsize
    place = index // per_word
    starts = np.flatnonzero(np.diff(place, prepend=np.int64(-1)))
    bits = (index % per_word).astype(np.uint64) * np.uint64(8 * old.itemsize)
    flips = (old[index] ^ new).astype(np.uint64) << bits
    before = old.view("<u8")[place[starts]]
    after: NDArray[np.uint64] = np.bitwise_xor(before, np.bitwise_or.reduceat(flips, starts))
    span = np.searchsorted(ends, index[starts], side="right")
    counted = (place[starts] + numbers[span]).astype(np.uint64)
    sums = np.zeros((len(ends), 4), np.uint64)
    mixed = [mix(words, counted) for words in (before, after) for mix in (mix_a, mix_b)]
    firsts = np.flatnonzero(np.diff(span, prepend=-1))
    sums[span[firsts]] = np.stack([np.add.reduceat(lane, firsts) for lane in mixed], axis=1)
    every = np.searchsorted(ends, index, side="right")
    return sums, np.bincount(every, minlength=len(ends)).astype(np.int64)


_LONG = 255


def compared(old: Words, new: Words) -> tuple[Array32, Words, Words]:
    index = np.flatnonzero(old != new).astype(np.uint32)
    return index, old[index], new[index]


def scanned(
    old: Words, new: Words, spans: Counts, book: NDArray[np.uint64], *, whole: bool = True
) -> tuple[Array32, Words, Words]:
    index, before, after = compared(old, new)
    per_word = 8 // old.itemsize
    hashed = len(spans) if whole else 0
    for row, (offset, words, number) in zip(book[:hashed], spans[:hashed].tolist(), strict=True):
        data = new[offset : offset + words].view(np.uint8)
        lanes = hash_bytes(data, number + offset // per_word - 1)
        row[0], row[1] = lanes.a, lanes.b
    if len(index):
        ends = spans[:, 0] + spans[:, 1]
        book[:, 2:6], book[:, 6] = touched(old, index, after, ends, spans[:, 2])
    return index, before, after


def sums_of_all(old: Words, new: Words, spans: Counts, book: NDArray[np.uint64]) -> None:
    scanned(old, new, spans, book, whole=False)


def masked(old: Words, new: Words, spans: Counts, book: NDArray[np.uint64]) -> tuple[Masks, Words, Words]:
    index, before, after = scanned(old, new, spans, book, whole=False)
    return masks_of(index, len(old)), before, after


def masks_of(index: Array32, words: int) -> Masks:
    bits = np.zeros(words, np.uint8)
    bits[index] = 1
    return np.packbits(bits, bitorder="little").view("<u8")


def scatter(words: Words, index: Array32, new: Words) -> None:
    words[index] = new


def exchange_at(
    words: Words, index: NDArray[np.int64], before: Words, after: Words, *, again: bool
) -> int | None:
    found = words[index]
    expected = found == before
    if again:
        expected |= found == after
    if expected.all():
        words[index] = after
        expected = words[index] == after
    return None if expected.all() else int(np.argmin(expected))


def pack_lists(heads: Counts, index: Array32, bounds: Counts, old: Words, new: Words) -> ByteArray:
    data = b""
    for (tensor, first), start, stop in zip(heads.tolist(), bounds, bounds[1:], strict=False):
        gaps = np.empty(stop - start, np.uint8)
        escapes, _ = pack_gaps(index[start:stop], np.array([0, stop - start]), gaps)
        payload = b"".join(each.tobytes() for each in (gaps, escapes, old[start:stop], new[start:stop]))
        facts = struct.pack("<IIQII", tensor, new.itemsize, first, len(gaps), len(escapes))
        checksum = xxhash.xxh3_64_intdigest(payload) ^ xxhash.xxh3_64_intdigest(facts)
        data += facts + checksum.to_bytes(8, "little") + payload
    return np.frombuffer(data, np.uint8)


def pack_gaps(index: Array32, starts: Counts, gaps: ByteArray) -> tuple[Array32, Counts]:
    distances = np.diff(index, prepend=index[:1])
    distances[starts[:-1]] = 0
    gaps[:] = np.minimum(distances, ESCAPED_GAP)
    escaped = distances >= ESCAPED_GAP
    return distances[escaped], np.add.reduceat(escaped, starts[:-1], dtype=np.int64)


def exchange_masked(
    words: Words,
    first: int,
    length: int,
    masks: Masks,
    before: Words,
    after: Words,
    *,
    again: bool,
    begin: Begin = at_once,
) -> int | None:
    check_masks(length, masks, len(after))
    begin(words[first : first + length], len(after))
    index = places_under(masks) + first
    wrong = exchange_at(words, index, before, after, again=again)
    return None if wrong is None else int(index[wrong])


def split(
    old: Words, new: Words, kind: WordKind, magnitude: Array32, exponents: ByteArray, signs: ByteArray
) -> Counts:
    steps = _steps(old, new, kind)
    magnitude[:] = np.abs(steps) - 1
    exponents[:] = (old >> kind.exponent_shift) & kind.exponent_mask
    packed = np.packbits(steps < 0, bitorder="little")
    signs[: len(packed)] = packed
    tallies = np.zeros((256, 3), np.int64)
    np.add.at(tallies, exponents, np.stack([np.ones_like(steps), magnitude, magnitude != 0], axis=1))
    return tallies


def _steps(old: Words, new: Words, kind: WordKind) -> Counts:
    steps = _ordinals(new, kind) - _ordinals(old, kind)
    half = 1 << (8 * kind.width - 1)
    return steps if kind.sign_bit else (steps + half) % (2 * half) - half


def _ordinals(words: Words, kind: WordKind) -> Counts:
    wide = words.astype(np.int64)
    return np.where(wide & kind.sign_bit, -1 - (wide ^ kind.sign_bit), wide)


def _stepped(old: Words, steps: Counts, kind: WordKind) -> Words | None:
    half = 1 << (8 * kind.width - 1)
    moved = _ordinals(old, kind) + steps
    bounded = moved if kind.sign_bit else np.where(np.abs(steps) <= half, 0, half)
    if ((bounded < -half) | (bounded >= half)).any():
        return None
    below = np.where(moved < 0, (-1 - moved) | half, moved) if kind.sign_bit else moved % (2 * half)
    return below.astype(old.dtype)


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
    start = put_gaps(near, k, out, most)
    magnitude, exponents = np.empty(len(near), np.uint32), np.empty(len(near), np.uint8)
    behind = start + (len(near) + 7) // 8
    if start < 0 or behind > most:
        return None
    tallies = split(before, after, kind, magnitude, exponents, out[start:])
    first = plan_contexts(tallies, contexts)
    grouped, room = np.empty(len(near), np.uint32), out[behind:]
    sizes = put_magnitudes(magnitude, exponents, first, contexts, grouped, room, most - behind)
    return None if sizes is None else (first, sizes, start, behind + int(sizes.sum()))


def put_gaps(index: Array32, k: int, out: ByteArray, most: int) -> int:
    """Rice codes of the distances between positions, less one; the first is counted from 0. Returns bytes."""
    gaps = index.copy()
    gaps[1:] -= index[:-1] + np.uint32(1)
    return put_values(gaps, k, out, most)


def put_values(values: Array32, k: int, out: ByteArray, most: int) -> int:
    return _put(_coded(values, np.full(len(values), k, np.uint64)), out, most)


def _put(data: ByteArray, out: ByteArray, most: int) -> int:
    if len(data) > most:
        return -1
    out[: len(data)] = data
    return len(data)


def put_magnitudes(
    magnitude: Array32,
    exponents: ByteArray,
    first: int,
    contexts: Table,
    grouped: Array32,
    out: ByteArray,
    most: int,
) -> Counts | None:
    order = np.argsort(np.clip(exponents - np.int64(first), 0, len(contexts) - 1), kind="stable")
    grouped[:] = magnitude[order]
    pieces = []
    ends = contexts[:, COUNT].cumsum()
    for values, row in zip(np.split(grouped, ends[:-1]), contexts.tolist(), strict=True):
        if row[CODING] == RUNS:
            pieces.append(_runs(values, row[K], row[K_REST]))
        elif row[CODING] == RICE:
            pieces.append(_coded(values, np.full(len(values), row[K], np.uint64)))
        else:
            pieces.append(np.zeros(0, np.uint8))
    if _put(np.concatenate(pieces), out, most) < 0:
        return None
    return np.array([len(piece) for piece in pieces], np.int64)


def _runs(values: Array32, k: int, k_rest: int) -> ByteArray:
    ends = np.flatnonzero(values)
    alternating = np.zeros(2 * len(ends) + 1, np.uint32)
    alternating[0::2] = np.diff(ends, prepend=-1, append=len(values)) - 1
    alternating[1::2] = values[ends] - np.uint32(1)
    parameters = np.full(len(alternating), k, np.uint64)
    parameters[1::2] = k_rest
    return _coded(alternating, parameters)


def _coded(values: Array32, k: NDArray[np.uint64]) -> ByteArray:
    """`values` with a parameter of its own for each."""
    wide, one = values.astype(np.uint64), np.uint64(1)
    zeros = wide >> k
    escaped = zeros >= ESCAPE
    zeros[escaped] = ESCAPE
    low = np.where(escaped, wide, wide & ((one << k) - one))
    codes = (one << zeros) | (low << (zeros + one))
    return _packed(codes, np.where(escaped, LONGEST, (zeros + one + k).astype(np.int64)))


def _packed(codes: NDArray[np.uint64], lengths: Counts) -> ByteArray:
    ends = np.cumsum(lengths)
    bits = int(ends[-1]) if len(ends) else 0
    places = ends - lengths
    word, shift = places >> 6, (places & 63).astype(np.uint64)
    packed = np.zeros((bits >> 6) + 2, "<u8")
    np.bitwise_or.at(packed, word, codes << shift)
    np.bitwise_or.at(packed, word + 1, (codes >> np.uint64(1)) >> (np.uint64(63) - shift))
    return packed.view(np.uint8)[: (bits + 7) >> 3]


def take_gaps(
    data: ByteArray, start: int, stop: int, k: int, borders: Counts, shifts: Counts, index: Array32
) -> int:
    """Positions, with padding, whose gaps fill bytes [start, stop) of `data`; rice.SLACK bytes follow them.
    `shifts`: the padding before each span; `borders`: where those begin without padding, then one that no
    position reaches. Returns where the next one without padding could be at the earliest."""
    gaps = np.empty(len(index), np.uint32)
    if not take_values(data, start, stop, k, gaps):
        return -1
    ends = np.cumsum(gaps, dtype=np.int64) + np.arange(1, len(gaps) + 1)
    index[:] = (ends - 1 + shifts[np.searchsorted(borders[1:], ends - 1, side="right")]).astype(np.uint32)
    return int(ends[-1]) if len(ends) else 0


def take_values(data: ByteArray, start: int, stop: int, k: int, values: Array32) -> bool:
    stream = _Stream(data, start, stop)
    try:
        for i in range(len(values)):
            values[i] = stream.take(k)
    except ValueError:
        return False
    return stream.used_up


class _Stream:
    """Rice codes from bytes [start, stop), one after the other."""

    def __init__(self, data: ByteArray, start: int, stop: int) -> None:
        self._data = data[: stop + SLACK].tobytes()
        self._at, self._stop = 8 * start, stop

    def take(self, k: int) -> int:
        at = self._at
        if at >= 8 * self._stop:
            raise ValueError("a stream ends early")
        bits = int.from_bytes(self._data[at >> 3 : (at >> 3) + 8], "little") >> (at & 7)
        zeros = (bits & -bits).bit_length() - 1
        if not 0 <= zeros <= ESCAPE:
            raise ValueError("a stream holds no code where one must begin")
        if zeros == ESCAPE:
            self._at = at + LONGEST
            return bits >> (ESCAPE + 1) & GREATEST
        self._at = at + zeros + 1 + k
        value = zeros << k | bits >> (zeros + 1) & ((1 << k) - 1)
        if value > GREATEST:
            raise ValueError("a value is too great")
        return value

    @property
    def used_up(self) -> bool:
        return (self._at + 7) >> 3 == self._stop


def take_steps(
    data: ByteArray,
    signs: int,
    streams: Counts,
    first: int,
    old: Words,
    index: Array32,
    kind: WordKind,
    ends: Counts,
    numbers: Counts,
) -> Taken | None:
    before = old[index]
    exponents = ((before >> kind.exponent_shift) & kind.exponent_mask).astype(np.int64)
    context = np.clip(exponents - first, 0, streams.shape[1] - 1)
    magnitude = np.zeros(len(index), np.int64)
    try:
        for number, stream in enumerate(streams.T.tolist()):
            hit = context == number
            magnitude[hit] = _magnitudes(data, stream, int(hit.sum()))
    except ValueError:
        return None
    negative = np.unpackbits(data[signs:], count=len(index), bitorder="little").astype(np.bool_)
    after = _stepped(before, np.where(negative, -1 - magnitude, 1 + magnitude), kind)
    if after is None:
        return None
    if not len(index):
        return before, after, np.zeros((len(ends), 4), np.uint64), np.zeros(len(ends), np.int64)
    return before, after, *touched(old, index, after, ends, numbers)


def _magnitudes(data: ByteArray, stream_row: list[int], count: int) -> Counts:
    coding, k, k_rest, start, stop = stream_row
    if (coding == NOTHING) != (count == 0):
        raise ValueError("the magnitudes of a context are missing or too many")
    values = np.zeros(count, np.int64)
    stream = _Stream(data, start, stop)
    if coding == RICE:
        values[:] = [stream.take(k) for _ in range(count)]
    elif coding == RUNS:
        filled = stream.take(k)
        while filled < count:
            values[filled] = stream.take(k_rest) + 1
            filled += 1 + stream.take(k)
        if filled > count:
            raise ValueError("a run is longer than what it counts")
    if not stream.used_up:
        raise ValueError("a stream is longer than its values")
    return values


def exponents_of_all(old: Words, spans: Counts, every: int, kind: WordKind) -> Counts:
    tallies = np.zeros(256, np.int64)
    for offset, words in spans.tolist():
        chosen = (np.arange(words) // 64) % every == 0
        exponents = (old[offset : offset + words][chosen] >> kind.exponent_shift) & kind.exponent_mask
        tallies += np.bincount(exponents, minlength=256)
    return tallies


def put_classes(
    old: Words,
    spans: Counts,
    index: Array32,
    least: NDArray[np.uint64],
    inverted: Counts,
    table: ByteArray,
    kind: WordKind,
    room: Counts,
    gaps: Array32,
) -> Counts | None:
    places, classes = _classes_of(old, spans, least, kind)
    changed = np.zeros(len(old), np.bool_)
    changed[index] = True
    counts, start = np.zeros(len(room), np.int64), 0
    for c in range(len(room)):
        events = np.flatnonzero(changed[places[classes == c]] != bool(inverted[c]))
        if len(events) > room[c]:
            return None
        gaps[start : start + len(events)] = np.diff(events, prepend=-1) - 1
        counts[c], start = len(events), start + int(room[c])
    return counts


def _classes_of(
    old: Words, spans: Counts, least: NDArray[np.uint64], kind: WordKind
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Positions of all words of the spans, and their classes."""
    places = np.concatenate([np.arange(offset, offset + words) for offset, words in spans.tolist()])
    low = kind.sign_bit - 1
    return places, np.searchsorted(least[1:], (old[places] & low).astype(np.uint64), side="right")


def take_classes(
    old: Words,
    spans: Counts,
    least: NDArray[np.uint64],
    inverted: Counts,
    kind: WordKind,
    gaps: Array32,
    ends: Counts,
    index: Array32,
) -> int:
    places, classes = _classes_of(old, spans, least, kind)
    changed, start = np.zeros(len(old), np.bool_), 0
    for c, end in enumerate(ends.tolist()):
        mine = places[classes == c]
        ranks = np.cumsum(gaps[start:end], dtype=np.int64) + np.arange(end - start)
        if len(ranks) and ranks[-1] >= len(mine):
            return -1
        changed[mine] = bool(inverted[c])
        changed[mine[ranks]] = not inverted[c]
        start = end + 1
    found = np.flatnonzero(changed)
    if len(found) > len(index) - 64:
        return -1
    index[: len(found)] = found
    return len(found)


def step_bytes(old: Words, new: Words, kind: WordKind, out: ByteArray) -> int:
    steps = _steps(old, new, kind)
    out[:] = np.minimum((steps << 1) ^ (steps >> 63), _LONG)
    return int(np.count_nonzero(out == _LONG))


def escapes(steps: ByteArray, count: int) -> NDArray[np.int64]:
    return np.flatnonzero(steps == _LONG)


def add_steps(old: Words, steps: ByteArray, kept: Words, kind: WordKind) -> Words | None:
    longer = steps == _LONG
    wide = np.where(longer, 0, steps).astype(np.int64)
    new = _stepped(old, (wide >> 1) ^ -(wide & 1), kind)
    if new is None or np.count_nonzero(longer) != len(kept):
        return None
    new[longer] = kept
    return new


def split_planes(words: Words, planes: ByteArray) -> None:
    planes[:] = words.view(np.uint8).reshape(len(words), words.itemsize).T


def join_planes(planes: ByteArray, kind: WordKind) -> Words:
    joined: Words = np.ascontiguousarray(planes.T).reshape(-1).view(kind.numpy)
    return joined

"""From words to changes, from changes to steps in their contexts; a byte for the step of every word."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from weightcast.shared.base.elements import ByteArray, WordKind, Words
from weightcast.shared.kernels.compiler import (
    I64,
    SHIFTS,
    U64,
    frozen,
    intrinsic,
    kernel,
    on_zen,
    types,
    unwritable,
)
from weightcast.shared.kernels.constants import Array32
from weightcast.shared.kernels.mix import SUMS, closed, empty, keep8, mix64, mix_changed64, mixed_tail, opened
from weightcast.shared.kernels.parallel import scratch
from weightcast.shared.kernels.vectors import (
    FLOATS,
    HALF,
    LOW,
    MASK,
    SHIFT,
    SIGN,
    Lanes,
    copy16,
    differing64,
    excess,
    exponent,
    facts,
    keep64,
    list16,
    moves_lanes,
    on_stack,
    ordinal,
    prefetch,
    prefetch64_early,
    reaching64,
    set_bits,
    set_word,
    step_between,
    trailing_zeros,
    word_at,
    word_of,
)

_COUNT = 16
_OLD, _NEW, _AT, _KIND, _MAGNITUDE, _EXPONENTS = range(6)


@intrinsic
def split16(typing, old, new, at, kind, magnitude, exponents):
    """|step| - 1 from old[i] to new[i] and the exponent of old[i], for 16 words from `at` on. Returns their
    signs as bits, 1 for a step down. `kind`: as `facts`."""

    def build(context, builder, signature, args):
        split = _Split(context, builder, signature.args, args)
        step = split.step()
        down = builder.icmp_signed("<", step, split.each(0))
        length = builder.select(down, builder.not_(step), builder.sub(step, split.each(1)))
        split.write(_MAGNITUDE, length, 32)
        split.write(_EXPONENTS, split.exponent(), 8)
        return builder.zext(builder.bitcast(down, ir.IntType(_COUNT)), ir.IntType(64))

    return types.uint64(old, new, types.int64, kind, magnitude, exponents), build


class _Split(Lanes):
    """16 old and 16 new words in lanes that hold any step between them."""

    def __init__(self, context: Any, builder: Any, kinds: Any, args: Any) -> None:
        word = kinds[_OLD].dtype.bitwidth
        super().__init__(context, builder, kinds, args, _COUNT, 64 if word == 32 else 32, _AT, _KIND)
        self._before, self._after = (self.read(number, word) for number in (_OLD, _NEW))

    def _ordinal(self, words: Any) -> Any:
        builder = self._builder
        signed = builder.icmp_unsigned("!=", builder.and_(words, self.fact(SIGN)), self.each(0))
        return builder.xor(builder.and_(words, self.fact(LOW)), builder.sext(signed, self.form))

    def step(self) -> Any:
        """Of floats as it is, of integers modulo their width."""
        builder, half = self._builder, self.fact(HALF)
        step = builder.sub(self._ordinal(self._after), self._ordinal(self._before))
        kept = builder.or_(self.fact(LOW), self.fact(FLOATS))
        return builder.sub(builder.and_(builder.add(step, half), kept), half)

    def exponent(self) -> Any:
        return self._builder.and_(self._builder.lshr(self._before, self.fact(SHIFT)), self.fact(MASK))


Tallies = NDArray[np.int64]

_BLOCK = 1 << 12
"""words compared before those that differ are gathered: they are still in the nearest cache"""
_MASKS = (_BLOCK >> 6) + 1
_AHEAD = 48
"""changes between the prefetch of a cache line and its use"""


_WORTH_LENDING = 1024
"""words per change up to which lists are lent instead of copied, since new memory is slow; shorter ones are
not worth a buffer"""
_SPARSE = 8
"""words per change from which cache lines are prefetched"""
_AHEAD_WORDS = 3072 if on_zen() else 1024
"""words between prefetch and comparison"""
_NO_POSITION = (1 << 32) - 1
_DENSE = 3
"""changes per 64 words, on the average of a block, from which it counts as one of many"""
_ROOM = 17
"""extra entries: some are written that do not count"""


@kernel
def _masks(old, new, start, stop, like, whole, masks, sums):
    """A set bit for every word that differs; if `whole`, the new words are added to `sums`."""
    for first in range(start, stop, 64):
        prefetch64_early(old, first + _AHEAD_WORDS, like)
        prefetch64_early(new, first + _AHEAD_WORDS, like)
        masks[(first - start) >> 6] = differing64(old, new, first, like)
        if whole:
            mix64(new, first, like, sums)


@kernel
def _listed(masks, count, start, index, found):
    """Writes three positions for every mask, to avoid unpredictable branches. Subscripts are unsigned, so
    that numba checks for no negative index."""
    behind = U64(found)
    for group in range(count):
        mask, first, at = masks[group], U64(start + (group << 6)), behind
        behind += U64(set_bits(mask))
        for j in range(3):
            index[at + U64(j)] = first + trailing_zeros(mask)
            mask &= mask - U64(1)
        at += U64(3)
        while mask != U64(0):
            index[at] = first + trailing_zeros(mask)
            mask &= mask - U64(1)
            at += U64(1)
    return I64(behind)


@kernel
def _many(masks, count):
    """Whether passes over all words are faster than one change at a time."""
    changed = I64(0)
    for group in range(count):
        changed += set_bits(masks[group])
    return changed > count * _DENSE


@kernel
def _listed_all(old, new, start, stop, number, index, before, after, at, sums):
    """Does for a block of many changes what `_listed` and `keep8` do. `number`: of its first 8-byte word."""
    place = on_stack(SUMS, U64(0))
    opened(place, number)
    for first in range(start, stop, 64):
        mix_changed64(old, new, first, before, place, sums)
        for part in range(first, first + 64, 16):
            at = list16(old, new, part, index, before, after, at)
    return at


@kernel
def _scanned(old, new, spans, shift, all_new, index, before, after, book):
    """`spans`: int64[n, 3], offset, words, number of the chunk's 8-byte word 0 in its tensor's count. Blocks
    pass through here while they are in the nearest cache, so memory is read once. `index` starts after a
    placeholder."""
    masks, found = on_stack(_MASKS, U64(0)), I64(1)
    sums, touched = on_stack(SUMS, U64(0)), on_stack(SUMS, U64(0))
    for n in range(spans.shape[0]):
        first_found, at, end = found, spans[n, 0], spans[n, 0] + spans[n, 1]
        number = U64(spans[n, 2])
        opened(sums, number + U64(at >> shift))
        empty(touched)
        while at < end:
            stop = min(end, at + _BLOCK)
            whole = at + ((stop - at) & ~63)
            _masks(old, new, at, whole, before, all_new, masks, sums)
            count = (whole - at) >> 6
            here = at
            if _many(masks, count):
                first_number = number + U64(at >> shift)
                found = _listed_all(old, new, at, whole, first_number, index, before, after, found, touched)
                here, count = whole, 0
            if whole < stop:
                valid = (U64(1) << U64(stop - whole)) - U64(1)
                masks[count] = differing64(old, new, whole, before) & valid
                count += 1
                width = 8 >> shift
                a, b = mixed_tail(new, whole * width, stop * width, number + U64(whole >> shift))
                book[n, 0] += a
                book[n, 1] += b
            taken, found = found, _listed(masks, count, here, index, found)
            for i in range(found, found + 7):
                index[i] = index[found - 1]
            for i in range(taken, found, 8):
                keep8(old, new, index, i, number, before, after, touched)
            at = stop
        for column, (a, b) in enumerate((closed(sums, 0), closed(touched, 0), closed(touched, 2))):
            book[n, 2 * column] += a
            book[n, 2 * column + 1] += b
        book[n, 6] = found - first_found
    return found


def scanned(
    old: Words, new: Words, spans: NDArray[np.int64], book: NDArray[np.uint64], *, whole: bool = True
) -> tuple[Array32, Words, Words]:
    """Positions where two arrays differ, and the words there. `spans`: int64[n, 3], offset, words, number of
    the chunk's 8-byte word 0 in the tensor's count. Into `book`, uint64[n, 7], zeros, per span: lanes of its
    new words; lanes of the old and the new 8-byte words that hold changes; how many words change. Padding
    between spans is zeros. Lanes of all new words only if `whole`."""
    room, most = scratch(), len(old) + _ROOM
    index = room.lend("scanned index", np.uint32, most)
    index[0] = _NO_POSITION
    before, after = (room.lend(f"scanned {side}", old.dtype, most) for side in ("before", "after"))
    shift = SHIFTS[old.itemsize]
    end = _scanned(frozen(old), frozen(new), spans, shift, whole, index, before, after, book)
    if end > len(old) // _WORTH_LENDING:
        return index[1:end], before[1:end], after[1:end]
    return index[1:end].copy(), before[1:end].copy(), after[1:end].copy()


@kernel
def _sums_of_all(old, new, spans, shift, like, book):
    """Padding is zeros on both sides, and so changes nothing."""
    place, sums = on_stack(SUMS, U64(0)), on_stack(SUMS, U64(0))
    for n in range(spans.shape[0]):
        at, changed = spans[n, 0], I64(0)
        opened(place, U64(spans[n, 2]) + U64(at >> shift))
        empty(sums)
        for first in range(at, at + spans[n, 1], 64):
            mix_changed64(old, new, first, like, place, sums)
            changed += set_bits(differing64(old, new, first, like))
        for column, (a, b) in enumerate((closed(sums, 0), closed(sums, 2))):
            book[n, 2 * column + 2], book[n, 2 * column + 3] = a, b
        book[n, 6] = changed


def sums_of_all(old: Words, new: Words, spans: NDArray[np.int64], book: NDArray[np.uint64]) -> None:
    """As `scanned`, with no list and no lanes of all new words."""
    shift = SHIFTS[old.itemsize]
    _sums_of_all(frozen(old), frozen(new), spans, shift, unwritable(old[:0]), book)


@kernel
def _masked(old, new, spans, shift, masks, before, after, book):
    """`before`, `after`: room for 64 more than all words. Padding is zeros on both sides."""
    place, sums, found = on_stack(SUMS, U64(0)), on_stack(SUMS, U64(0)), I64(0)
    for n in range(spans.shape[0]):
        at, first_found = spans[n, 0], found
        opened(place, U64(spans[n, 2]) + U64(at >> shift))
        empty(sums)
        for first in range(at, at + spans[n, 1], 64):
            mix_changed64(old, new, first, before, place, sums)
            mask = differing64(old, new, first, before)
            masks[first >> 6] = mask
            if moves_lanes():
                keep64(old, new, first, mask, before, after, found)
                found += set_bits(mask)
            else:
                while mask != U64(0):
                    at_word = first + I64(trailing_zeros(mask))
                    before[found] = word_at(old, at_word, before)
                    after[found] = word_at(new, at_word, before)
                    found += 1
                    mask &= mask - U64(1)
        for column, (a, b) in enumerate((closed(sums, 0), closed(sums, 2))):
            book[n, 2 * column + 2], book[n, 2 * column + 3] = a, b
        book[n, 6] = found - first_found
    return found


def masked(
    old: Words, new: Words, spans: NDArray[np.int64], book: NDArray[np.uint64]
) -> tuple[NDArray[np.uint64], Words, Words]:
    """As `scanned` without lanes of all new words, with a bit per word instead of positions: for where many
    differ."""
    room, most = scratch(), len(old) + 64
    masks = room.lend("masks", np.uint64, len(old) >> 6)
    masks[:] = 0
    before, after = (room.lend(f"scanned {side}", old.dtype, most) for side in ("before", "after"))
    shift = SHIFTS[old.itemsize]
    found = _masked(frozen(old), frozen(new), spans, shift, masks, before, after, book)
    return masks, before[:found], after[:found]


@kernel
def _scatter(words, index, new):
    asking = U64(max(index.size - _AHEAD, 0))
    for i in range(asking):
        prefetch(words, I64(index[i + U64(_AHEAD)]), new)
        set_word(words, I64(index[i]), new[i])
    for i in range(asking, U64(index.size)):
        set_word(words, I64(index[i]), new[i])


@kernel
def _scatter_many(words, index, new):
    """Positions ascend: 16 that end 15 behind their first are neighbours."""
    whole = index.size & ~15
    for i in range(0, whole, 16):
        first = I64(index[i])
        if I64(index[i + 15]) - first == 15:
            copy16(words, first, new, i)
        else:
            for j in range(i, i + 16):
                set_word(words, I64(index[j]), new[j])
    for j in range(whole, index.size):
        set_word(words, I64(index[j]), new[j])


def scatter(words: Words, index: Array32, new: Words) -> None:
    if len(index) and index[-1] >= len(words):
        raise IndexError(f"a change of word {index[-1]} in {len(words)} words")
    if len(index):
        write = _scatter_many if len(index) * _SPARSE > len(words) else _scatter
        write(words.view(np.uint8), unwritable(index), unwritable(new))


_FOUR = 4 * 256 * 2


@kernel
def split_all(old, new, kind, magnitude, exponents, signs, tallies):
    """`four`: tables of 256 pairs, how many (and 2**32 times how many are not 0), sum. Four, so that equal
    neighbours do not wait for each other."""
    four, whole = on_stack(_FOUR, U64(0)), old.size & ~15
    for n in range(_FOUR):
        four[n] = U64(0)
    for first in range(0, whole, 16):
        signs[first >> 4] = split16(old, new, first, kind, magnitude, exponents)
        for i in range(first, first + 16):
            row, value = (U64(i & 3) << U64(9)) | (U64(exponents[i]) << U64(1)), U64(magnitude[i])
            four[row] += U64(1) + (U64(value != U64(0)) << U64(32))
            four[row | U64(1)] += value
    bits = U64(0)
    for i in range(whole, old.size):
        step = step_between(old[i], new[i], kind)
        magnitude[i], exponents[i] = abs(step) - 1, exponent(old[i], kind)
        bits |= U64(step < 0) << U64(i & 15)
        row = U64(exponents[i]) << U64(1)
        four[row] += U64(1) + (U64(magnitude[i] != 0) << U64(32))
        four[row | U64(1)] += U64(magnitude[i])
    if whole < old.size:
        signs[whole >> 4] = bits
    for power in range(256):
        for n in range(4):
            row = U64((n << 9) | (power << 1))
            tallies[power, 0] += I64(four[row] & U64(0xFFFFFFFF))
            tallies[power, 1] += I64(four[row | U64(1)])
            tallies[power, 2] += I64(four[row] >> U64(32))


def split(
    old: Words, new: Words, kind: WordKind, magnitude: Array32, exponents: ByteArray, signs: ByteArray
) -> Tallies:
    """Steps from `old` to `new` into |step| - 1, the exponent of the old word, and bits that say step < 0
    (room for 2 bytes more). Returns int64[256, 3], of old words with each exponent: how many, the sum of
    |step| - 1, how many of those are not 0."""
    tallies = np.zeros((256, 3), np.int64)
    pairs = signs[: (len(old) + 15) // 16 * 2].view(np.uint16)
    split_all(unwritable(old), unwritable(new), facts(kind), magnitude, exponents, pairs, tallies)
    return tallies


_WIDE = 64


@intrinsic
def step_bytes64(typing, old, new, at, kind, out):
    """Bytes of the steps of 64 words from `at` on. Bit j of the result: step j does not fit
    into a byte. `kind`: as `facts`."""

    def build(context, builder, signature, args):
        lanes = _WordLanes(context, builder, signature.args, args, old.dtype.bitwidth)
        before, after = (lanes.ordinal(lanes.read(n, old.dtype.bitwidth)) for n in (0, 1))
        step = builder.sub(after, before)
        signs = builder.and_(builder.xor(after, before), builder.xor(after, step))
        unheld = builder.and_(lanes.negative(signs), lanes.fact(FLOATS))  # integers wrap
        twice = builder.xor(builder.shl(step, lanes.each(1)), lanes.negative(step))
        wide = builder.or_(twice, unheld)
        longer = builder.icmp_unsigned(">=", wide, lanes.each(_LONG))
        lanes.write(4, builder.select(longer, lanes.each(_LONG), wide), 8)
        return builder.bitcast(longer, ir.IntType(_WIDE))

    return types.uint64(old, new, types.int64, kind, out), build


@intrinsic
def add_steps64(typing, old, steps, at, kind, new):
    """The way back. Returns bits of longer steps, whose words stay, and of those that lead to no word."""

    def build(context, builder, signature, args):
        lanes = _WordLanes(context, builder, signature.args, args, old.dtype.bitwidth)
        twice = lanes.read(1, 8)
        longer = builder.icmp_unsigned("==", twice, lanes.each(_LONG))
        down = builder.sub(lanes.each(0), builder.and_(twice, lanes.each(1)))
        length = builder.xor(builder.lshr(twice, lanes.each(1)), down)
        step = builder.select(longer, lanes.each(0), length)
        before = lanes.ordinal(lanes.read(0, old.dtype.bitwidth))
        moved = builder.add(before, step)
        signs = builder.and_(builder.xor(moved, before), builder.xor(moved, step))
        over = builder.icmp_signed("<", builder.and_(signs, lanes.fact(FLOATS)), lanes.each(0))
        below = builder.and_(lanes.negative(moved), lanes.fact(FLOATS))
        number = builder.and_(builder.xor(moved, below), lanes.fact(LOW))
        lanes.write(4, builder.or_(number, builder.and_(below, lanes.fact(SIGN))), old.dtype.bitwidth)
        found = [builder.bitcast(mask, ir.IntType(_WIDE)) for mask in (longer, over)]
        return context.make_tuple(builder, signature.return_type, found)

    return types.UniTuple(types.uint64, 2)(old, steps, types.int64, kind, new), build


class _WordLanes(Lanes):
    """Lanes as wide as the words."""

    def __init__(self, context: Any, builder: Any, kinds: Any, args: Any, bits: int) -> None:
        super().__init__(context, builder, kinds, args, _WIDE, bits, 2, 3)

    def negative(self, values: Any) -> Any:
        """All bits of a lane whose number is negative."""
        return self._builder.ashr(values, self.each(self._bits - 1))

    def ordinal(self, words: Any) -> Any:
        """A float's sign is its word's highest bit, so that an ordinal fits into as many bits."""
        signed = self._builder.and_(self.negative(words), self.fact(FLOATS))
        return self._builder.xor(self._builder.and_(words, self.fact(LOW)), signed)


_LONG = 255


@kernel
def _step_bytes(old, new, kind, out):
    longer, whole = 0, old.size & ~63
    for first in range(0, whole, 64):
        longer += set_bits(step_bytes64(old, new, first, kind, out))
    for i in range(whole, old.size):
        step = step_between(old[i], new[i], kind)
        byte = min((step << 1) ^ (step >> 63), _LONG)
        out[i] = byte
        longer += byte == _LONG
    return longer


def step_bytes(old: Words, new: Words, kind: WordKind, out: ByteArray) -> int:
    """Of every word: 2 |step|, less one for a step down, or 255 for all that are longer; how many are."""
    return int(_step_bytes(unwritable(old), unwritable(new), facts(kind), out))


@kernel
def _escapes(steps, like, places):
    found, whole = 0, steps.size & ~63
    for first in range(0, whole, 64):
        mask = reaching64(steps, first, like, U64(_LONG), U64(_LONG))
        while mask != U64(0):
            places[found] = first + I64(trailing_zeros(mask))
            found += 1
            mask &= mask - U64(1)
    for i in range(whole, steps.size):
        if steps[i] == _LONG:
            places[found] = i
            found += 1


def escapes(steps: ByteArray, count: int) -> NDArray[np.int64]:
    """The `count` words whose step byte is 255."""
    places = np.empty(count, np.int64)
    _escapes(frozen(steps), np.empty(0, np.uint8), places)
    return places


@kernel
def _add_steps(old, steps, kind, new):
    over, beyond, longer, whole = U64(0), U64(0), 0, old.size & ~63
    for first in range(0, whole, 64):
        long64, over64 = add_steps64(old, steps, first, kind, new)
        longer += set_bits(long64)
        beyond |= over64
    for i in range(whole, old.size):
        byte = np.int64(steps[i])
        long = byte == _LONG
        step = 0 if long else (byte >> 1) ^ -(byte & 1)
        moved = ordinal(old[i], kind) + step
        over |= excess(moved, abs(step), kind)
        new[i] = word_of(moved, kind)
        longer += long
    return longer if over < U64(2 * kind[HALF]) and beyond == U64(0) else -1


def add_steps(old: Words, steps: ByteArray, kept: Words, kind: WordKind) -> Words | None:
    """New words after step bytes and, `kept`, the words of the longer steps."""
    new = scratch().lend("dense words", old.dtype, len(old))
    if _add_steps(unwritable(old), unwritable(steps), facts(kind), new) != len(kept):
        return None
    if len(kept):
        new[escapes(steps, len(kept))] = kept
    return new


@kernel
def _split_planes(words, planes):
    for i in range(words.size):
        planes[0, i] = words[i] & 255
    if planes.shape[0] >= 2:
        for i in range(words.size):
            planes[1, i] = (words[i] >> 8) & 255
    if planes.shape[0] == 4:
        for i in range(words.size):
            planes[2, i] = (words[i] >> 16) & 255
        for i in range(words.size):
            planes[3, i] = words[i] >> 24


def split_planes(words: Words, planes: ByteArray) -> None:
    """`planes`: uint8[width, words], all first bytes, all second bytes and so on."""
    _split_planes(unwritable(words), planes)


@kernel
def _join_planes(planes, words):
    """A loop per width: with one for all, nothing is done side by side."""
    if planes.shape[0] == 1:
        for i in range(words.size):
            words[i] = planes[0, i]
    elif planes.shape[0] == 2:
        for i in range(words.size):
            words[i] = U64(planes[0, i]) | (U64(planes[1, i]) << U64(8))
    else:
        for i in range(words.size):
            low = U64(planes[0, i]) | (U64(planes[1, i]) << U64(8))
            words[i] = low | (U64(planes[2, i]) << U64(16)) | (U64(planes[3, i]) << U64(24))


def join_planes(planes: ByteArray, kind: WordKind) -> Words:
    words = scratch().lend("dense words", kind.numpy, planes.shape[1])
    _join_planes(unwritable(planes), words)
    return words

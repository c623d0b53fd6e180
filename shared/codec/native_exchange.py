"""A journal's words: packed; compared, written, read back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numpy.typing import NDArray

from weightcast.shared.base.elements import ByteArray, Words
from weightcast.shared.codec.places import (
    ESCAPED_GAP,
    OUT_OF_ORDER,
    Begin,
    Masks,
    at_once,
    check_masks,
)
from weightcast.shared.digest.native import (
    I64,
    U64,
    address,
    cgutils,
    chosen_features,
    differing64,
    frozen,
    inlined,
    intrinsic,
    kernel,
    load64,
    on_stack,
    prefetch,
    set_bits,
    set_word,
    trailing_zeros,
    types,
    unwritable,
    word_at,
)

_COUNT = 64
_WORD = ir.IntType(64)
_VECTOR = 512


def machine_has(feature: str) -> bool:
    """Of the machine that kernels are compiled for, by LLVM's name."""
    chosen = chosen_features()
    features = binding.get_host_cpu_features().flatten() if chosen is None else chosen
    return f"+{feature}" in features.split(",")


@intrinsic
def moves_lanes(typing: Any) -> Any:
    """Whether the machine moves lanes under a mask by itself: a constant. Where not, the others of these
    operations do nothing."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.IntType(1), machine_has("avx512f"))

    return types.boolean(), build


@intrinsic
def keep64(typing: Any, old: Any, new: Any, at: Any, mask: Any, before: Any, after: Any, found: Any) -> Any:
    """Of 64 words of two byte arrays from word `at` on, those under `mask`: both words, from `found` on. Up
    to 64 are written."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        masked = _Masked(context, builder, signature.args, args, signature.args[4].dtype.bitwidth)
        if masked.works:
            for piece in masked.pieces(args[2], args[3], args[6]):
                for source, target in ((0, 4), (1, 5)):
                    words = masked.load(source, piece.word)
                    masked.store(target, piece.found, masked.moved("compress", words, piece.mask))
        return context.get_dummy_value()

    return types.none(old, new, types.int64, types.uint64, before, after, types.int64), build


@intrinsic
def exchange64(
    typing: Any, words: Any, at: Any, mask: Any, before: Any, other: Any, after: Any, found: Any, like: Any
) -> Any:
    """Of 64 words from word `at` on, those under `mask` become those of `after` from `found` on, if all are
    those of `before` or of `other` there. Returns the bits of words that are neither; then nothing is
    written. All are byte arrays, that hold words of `like`'s dtype; 64 are read of each."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        masked = _Masked(context, builder, signature.args, args, signature.args[7].dtype.bitwidth)
        wrong: Any = ir.Constant(_WORD, 0)
        kept = []
        for piece in masked.pieces(args[1], args[2], args[6]) if masked.works else ():
            here = masked.load(0, piece.word)
            expected, or_this, wanted = (
                masked.moved("expand", masked.load(n, piece.found), piece.mask) for n in (3, 4, 5)
            )
            neither = builder.and_(
                builder.icmp_unsigned("!=", here, expected), builder.icmp_unsigned("!=", here, or_this)
            )
            wrong = builder.or_(wrong, masked.bits(builder.and_(neither, piece.mask), piece.first))
            kept.append((piece, here, wanted))
        right = builder.icmp_unsigned("==", wrong, ir.Constant(_WORD, 0))
        with builder.if_then(right):
            for piece, here, wanted in kept:
                masked.store(0, piece.word, builder.select(piece.mask, wanted, here))
        return wrong

    shape = (words, types.int64, types.uint64, before, other, after, types.int64, like)
    return types.uint64(*shape), build


@intrinsic
def differing_under64(typing: Any, words: Any, at: Any, mask: Any, after: Any, found: Any, like: Any) -> Any:
    """Bits of those of 64 words under `mask` that are not those of `after`."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        masked = _Masked(context, builder, signature.args, args, signature.args[5].dtype.bitwidth)
        wrong: Any = ir.Constant(_WORD, 0)
        for piece in masked.pieces(args[1], args[2], args[4]) if masked.works else ():
            wanted = masked.moved("expand", masked.load(3, piece.found), piece.mask)
            other = builder.icmp_unsigned("!=", masked.load(0, piece.word), wanted)
            wrong = builder.or_(wrong, masked.bits(builder.and_(other, piece.mask), piece.first))
        return wrong

    return types.uint64(words, types.int64, types.uint64, after, types.int64, like), build


@dataclass(frozen=True)
class _Piece:
    """Some of the 64: their first, its number among all words, their mask, where their chosen words lie."""

    first: int
    word: Any
    mask: Any
    found: Any


class _Masked:
    """Lanes are as wide as a word where the machine moves such, else of 32 bits."""

    def __init__(self, context: Any, builder: Any, kinds: Any, args: Any, bits: int) -> None:
        self._context, self._builder, self._kinds, self._args, self._bits = (
            context,
            builder,
            kinds,
            args,
            bits,
        )
        self.works = machine_has("avx512f")
        lane = bits if machine_has("avx512vbmi2") else 32
        self._lanes = ir.VectorType(ir.IntType(lane), _VECTOR // lane)
        self._words = ir.VectorType(ir.IntType(bits), self._lanes.count)

    def pieces(self, at: Any, mask: Any, found: Any) -> Iterator[_Piece]:
        builder, count = self._builder, self._lanes.count
        for first in range(0, _COUNT, count):
            part = builder.lshr(mask, ir.Constant(_WORD, first))
            bits = part if count == _COUNT else builder.trunc(part, ir.IntType(count))
            lanes = builder.bitcast(bits, ir.VectorType(ir.IntType(1), count))
            yield _Piece(first, builder.add(at, ir.Constant(_WORD, first)), lanes, found)
            taken = builder.ctpop(bits)
            found = builder.add(found, taken if count == _COUNT else builder.zext(taken, _WORD))

    def _place(self, number: int, at: Any) -> Any:
        builder = self._builder
        offset = builder.mul(at, ir.Constant(_WORD, self._bits // 8))
        start = address(self._context, builder, self._kinds[number], self._args[number], offset, 8)
        return builder.bitcast(start, self._words.as_pointer())

    def load(self, number: int, at: Any) -> Any:
        return self._builder.load(self._place(number, at), align=1)

    def store(self, number: int, at: Any, words: Any) -> None:
        self._builder.store(words, self._place(number, at), align=1)

    def moved(self, operation: str, words: Any, mask: Any) -> Any:
        """`compress`: chosen lanes to the front; `expand`: the first to the chosen lanes. Others are 0."""
        builder, lanes = self._builder, self._lanes
        narrow = self._words != lanes
        wide = builder.zext(words, lanes) if narrow else words
        form = ir.FunctionType(lanes, [lanes, lanes, mask.type])
        name = f"llvm.x86.avx512.mask.{operation}.v{lanes.count}i{lanes.element.width}"
        function = cgutils.get_or_insert_function(builder.module, form, name)
        moved = builder.call(function, [wide, ir.Constant(lanes, [0] * lanes.count), mask])
        return builder.trunc(moved, self._words) if narrow else moved

    def bits(self, lanes: Any, first: int) -> Any:
        """Truth values of lanes as bits, from bit `first` on."""
        builder, count = self._builder, self._lanes.count
        bits = builder.bitcast(lanes, ir.IntType(count))
        wide = bits if count == _COUNT else builder.zext(bits, _WORD)
        return builder.shl(wide, ir.Constant(_WORD, first))


Array32 = NDArray[np.uint32]
Counts = NDArray[np.int64]

_BLOCK = 1 << 9
"""changes written before they are read back; also how far ahead cache lines are asked for"""


@kernel
def _pack_gaps(index: Any, starts: Any, gaps: Any, escapes: Any, counts: Any) -> Any:
    """Without branches: an escape is written for each gap, and written over unless it is one."""
    found = U64(0)
    for n in range(counts.size):
        first, last = found, U64(index[starts[n]])
        for i in range(starts[n], starts[n + 1]):
            gap = U64(index[i]) - last
            last += gap
            gaps[i] = min(gap, U64(ESCAPED_GAP))
            escapes[found] = gap
            found += U64(gap >= U64(ESCAPED_GAP))
        counts[n] = found - first
    return found


def pack_gaps(index: Array32, starts: Counts, gaps: ByteArray) -> tuple[Array32, Counts]:
    """Of records that begin at `starts` (the last is where all end): into `gaps` the distance of each change
    from the one before in its record, at most ESCAPED_GAP; returned are those from there on, and how many of
    them each record has."""
    escapes, counts = np.empty(len(index) + 1, np.uint32), np.empty(len(starts) - 1, np.int64)
    found = _pack_gaps(unwritable(index), starts, gaps, escapes, counts)
    return escapes[:found], counts


@kernel
def _distance(gaps: Any, escapes: Any, like: Any) -> Any:
    total, escaped, still = I64(0), I64(0), I64(0)
    for i in range(gaps.size):
        gap = I64(gaps[i])
        total += gap
        escaped += gap == ESCAPED_GAP
        still += gap == 0
    for i in range(escapes.size >> 2):
        value = I64(word_at(escapes, i, like))
        if value < ESCAPED_GAP:
            return I64(-1)
        total += value - ESCAPED_GAP
    if escaped != escapes.size >> 2 or gaps[0] != 0 or still != 1:
        return I64(-1)
    return total


@inlined
def _stride(gaps: Any, escapes: Any, i: Any, used: Any, like: Any) -> Any:
    gap = I64(gaps[i])
    if gap < ESCAPED_GAP:
        return gap, used
    return I64(word_at(escapes, used, like)), used + 1


@kernel
def _exchange(
    words: Any, first: Any, gaps: Any, escapes: Any, like: Any, before: Any, other: Any, after: Any, word: Any
) -> Any:
    """`like`, `word`: arrays of the dtypes of escapes and words. While a block is exchanged, the next one's
    places are found and asked for."""
    here, there = on_stack(_BLOCK, I64(0)), on_stack(_BLOCK, I64(0))
    position, used, ready = I64(first), I64(0), min(_BLOCK, gaps.size)
    for j in range(ready):
        gap, used = _stride(gaps, escapes, j, used, like)
        position += gap
        there[j] = position
        prefetch(words, position, word)
    for start in range(0, gaps.size, _BLOCK):
        here, there = there, here
        count, following = ready, min(_BLOCK, gaps.size - start - ready)
        for j in range(count):
            if j < following:
                gap, used = _stride(gaps, escapes, start + count + j, used, like)
                position += gap
                there[j] = position
                prefetch(words, position, word)
            found, new = word_at(words, here[j], word), word_at(after, start + j, word)
            if found != word_at(before, start + j, word) and found != word_at(other, start + j, word):
                return here[j]
            set_word(words, here[j], new)
        for j in range(count):
            if word_at(words, here[j], word) != word_at(after, start + j, word):
                return here[j]
        ready = following
    return I64(-1)


def exchange_packed(
    words: Words,
    first: int,
    gaps: ByteArray,
    escapes: Array32,
    before: Words,
    after: Words,
    *,
    again: bool,
    begin: Begin = at_once,
) -> int | None:
    """Writes `after` where `words` holds `before` (or, `again`, already `after`) and reads it back, from word
    `first` on at distances as `pack_gaps` makes them, one change at least. `begin` is called first, once the
    places are known to be good. Returns the first word at which that fails; some of those before it are
    written then. Raises ValueError, with nothing written, for places that do not ascend, or lie past the
    end."""
    steps, longer, like = unwritable(gaps), frozen(escapes), np.empty(0, np.uint32)
    distance = _distance(steps, longer, like)
    if distance < 0 or first + distance >= len(words):
        raise ValueError(OUT_OF_ORDER)
    begin(words[first : first + distance + 1], len(gaps))
    old, new = frozen(before), frozen(after)
    failed = _exchange(
        words.view(np.uint8),
        first,
        steps,
        longer,
        like,
        old,
        new if again else old,
        new,
        np.empty(0, words.dtype),
    )
    return None if failed < 0 else int(failed)


@kernel
def _masks_of(index: Any, masks: Any) -> None:
    group, bits = U64(0), U64(0)
    for i in range(index.size):
        place = U64(index[i])
        if place >> U64(6) != group:
            masks[group], bits = bits, U64(0)
            group = place >> U64(6)
        bits |= U64(1) << (place & U64(63))
    masks[group] = bits


def masks_of(index: Array32, words: int) -> Masks:
    """Bits of positions. `words`: a multiple of 64, more than the last position."""
    masks = np.zeros(words >> 6, np.uint64)
    _masks_of(unwritable(index), masks)
    return masks


_GROUPS = 8
"""of 64 words, written before they are read back"""


@inlined
def _whole(found: Any, changes: Any) -> Any:
    """Whether 64 of the changes are left, and so 64 words from the next one's group on."""
    return moves_lanes() and found + 64 <= changes


@kernel
def _exchange_masked(
    words: Any,
    first: Any,
    masks: Any,
    like: Any,
    before: Any,
    other: Any,
    after: Any,
    changes: Any,
) -> Any:
    """`like`: an array of the words' dtype; all others are bytes."""
    groups, found = masks.size >> 3, I64(0)
    for start in range(0, groups, _GROUPS):
        stop, begun = min(groups, start + _GROUPS), found
        for group in range(start, stop):
            mask, place = load64(masks, group << 3), first + (group << 6)
            if _whole(found, changes):
                if mask != U64(0):
                    wrong = exchange64(words, place, mask, before, other, after, found, like)
                    if wrong != U64(0):
                        return place + I64(trailing_zeros(wrong))
                    found += set_bits(mask)
                continue
            while mask != U64(0):
                word = place + I64(trailing_zeros(mask))
                here, new = word_at(words, word, like), word_at(after, found, like)
                if here != word_at(before, found, like) and here != word_at(other, found, like):
                    return word
                set_word(words, word, new)
                found += 1
                mask &= mask - U64(1)
        again = begun
        for group in range(start, stop):
            mask, place = load64(masks, group << 3), first + (group << 6)
            if _whole(again, changes):
                wrong = differing_under64(words, place, mask, after, again, like)
                if wrong != U64(0):
                    return place + I64(trailing_zeros(wrong))
                again += set_bits(mask)
                continue
            while mask != U64(0):
                word = place + I64(trailing_zeros(mask))
                if word_at(words, word, like) != word_at(after, again, like):
                    return word
                again += 1
                mask &= mask - U64(1)
    return I64(-1)


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
    """As `exchange_packed`, of those of `length` words from `first` on, all of them there, whose bits are
    set. Raises ValueError, with nothing written, for bits of no words, or another number of them than `after`
    has words."""
    check_masks(length, masks, len(after))
    begin(words[first : first + length], len(after))
    old, new = frozen(before), frozen(after)
    failed = _exchange_masked(
        words.view(np.uint8),
        first,
        frozen(masks),
        np.empty(0, words.dtype),
        old,
        new if again else old,
        new,
        len(after),
    )
    return None if failed < 0 else int(failed)


_WORDS = 1 << 12
"""written before they are read back"""


@kernel
def _first_other(words: Any, wanted: Any, start: Any, stop: Any, like: Any) -> Any:
    """-1 for none."""
    whole = start + ((stop - start) & ~63)
    for first in range(start, whole, 64):
        mask = differing64(words, wanted, first, like)
        if mask != U64(0):
            return first + I64(trailing_zeros(mask))
    for i in range(whole, stop):
        if word_at(words, i, like) != word_at(wanted, i, like):
            return i
    return I64(-1)


@kernel
def _exchange_all(words: Any, before: Any, after: Any, count: Any, like: Any) -> Any:
    for start in range(0, count, _WORDS):
        stop = min(count, start + _WORDS)
        wrong = _first_other(words, before, start, stop, like)
        if wrong >= 0:
            return wrong
        for i in range(start, stop):
            set_word(words, i, word_at(after, i, like))
        wrong = _first_other(words, after, start, stop, like)
        if wrong >= 0:
            return wrong
    return I64(-1)


def exchange_all(words: Words, before: Words, after: Words) -> int | None:
    """As `exchange_packed`, of all words."""
    like = np.empty(0, words.dtype)
    failed = _exchange_all(words.view(np.uint8), frozen(before), frozen(after), len(words), like)
    return None if failed < 0 else int(failed)

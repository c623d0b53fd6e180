"""The mix of 64 words at a time, in vectors as wide as the machine has them.

LLVM left alone takes half of a 512-bit machine's width; vectors that the code names are not narrowed. A sum
in progress is uint64[32], 8 lanes each: both sums, both products of the words' numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from weightcast.shared.base.elements import ByteArray
from weightcast.shared.kernels.compiler import (
    U64,
    frozen,
    inlined,
    intrinsic,
    kernel,
    types,
    unwritable,
)
from weightcast.shared.kernels.constants import MIX_A, MIX_B
from weightcast.shared.kernels.vectors import Arrays, on_stack, prefetch64, repeated

_WORD = ir.IntType(64)
_LANES = ir.VectorType(_WORD, 8)
_LINE = 64
"""bytes"""

A0, A1, A2 = (U64(value) for value in MIX_A)
B0, B1, B2 = (U64(value) for value in MIX_B)


def _each(value: int) -> Any:
    return ir.Constant(_LANES, [value % (1 << 64)] * 8)


def _rounds(builder: Any, x: Any, shifts: tuple[int, int, int], factors: tuple[int, int, int]) -> Any:
    for shift, factor in zip(shifts[:2], factors[1:], strict=True):
        x = builder.mul(builder.xor(x, builder.lshr(x, _each(shift))), _each(factor))
    return builder.xor(x, builder.lshr(x, _each(shifts[2])))


def mixed_a(builder: Any, words: Any, products: Any) -> Any:
    return _rounds(builder, builder.xor(words, products), (32, 29, 32), MIX_A)


def mixed_b(builder: Any, words: Any, products: Any) -> Any:
    return _rounds(builder, builder.add(words, products), (31, 33, 30), MIX_B)


def _products(builder: Any, numbers: Any) -> list[Any]:
    return [builder.mul(numbers, _each(mix[0])) for mix in (MIX_A, MIX_B)]


def _count(
    arrays: Arrays, builder: Any, sums: int, row: int, words: Any, products: list[Any], counted: Any
) -> None:
    """Adds both mixes of the words that are `counted` to the two sums from `row` of argument `sums` on."""
    for lane, mixed in enumerate((mixed_a, mixed_b)):
        here = arrays.pointer(sums, ir.Constant(_WORD, 8 * (row + lane)), _LANES)
        chosen = builder.select(counted, mixed(builder, words, products[lane]), _each(0))
        builder.store(builder.add(builder.load(here, align=8), chosen), here, align=8)


class _Rows:
    """Rows of 8 lanes of a uint64 array: loaded, added to, stored."""

    def __init__(self, arrays: Arrays, builder: Any, number: int, chosen: Iterable[int] = range(4)) -> None:
        self._builder = builder
        self._places = [arrays.pointer(number, ir.Constant(_WORD, 8 * row), _LANES) for row in chosen]
        self.rows = [builder.load(place, align=8) for place in self._places]

    def add(self, row: int, words: Any) -> None:
        self.rows[row] = self._builder.add(self.rows[row], words)

    def store(self) -> None:
        for row, place in zip(self.rows, self._places, strict=True):
            self._builder.store(row, place, align=8)


class _Sum(_Rows):
    """A sum in progress, moved on by vectors of words."""

    def move_on(self, words: Any) -> None:
        _, _, product_a, product_b = self.rows
        self.add(0, mixed_a(self._builder, words, product_a))
        self.add(1, mixed_b(self._builder, words, product_b))
        self.add(2, _each(8 * MIX_A[0]))
        self.add(3, _each(8 * MIX_B[0]))


def _lines(builder: Any, like: Any, first: Any) -> list[Any]:
    """Offsets of the cache lines of 64 words of `like`'s dtype from word `first` on."""
    width = like.dtype.bitwidth // 8
    start = builder.mul(first, ir.Constant(_WORD, width))
    return [builder.add(start, ir.Constant(_WORD, line * _LINE)) for line in range(width)]


@intrinsic
def mix64(typing, data, first, like, sums):
    """Adds 64 words of `like`'s dtype, from word `first` of a byte array on, to a sum in progress."""

    def build(context, builder, signature, args):
        arrays = Arrays(context, builder, signature.args, args)
        running = _Sum(arrays, builder, 3)
        for line in _lines(builder, signature.args[2], args[1]):
            running.move_on(builder.load(arrays.at_byte(0, line, _LANES), align=1))
        running.store()
        return context.get_dummy_value()

    return types.none(data, types.int64, like, sums), build


@intrinsic
def mix_changed64(typing, old, new, first, like, place, sums):
    """Of 64 words from word `first` of two byte arrays on, the 8-byte words that differ into `sums` as
    `keep8` has them. `place`: a sum in progress; only its products advance."""

    def build(context, builder, signature, args):
        arrays = Arrays(context, builder, signature.args, args)
        products, kept = _Rows(arrays, builder, 4, (2, 3)), _Rows(arrays, builder, 5)
        for line in _lines(builder, signature.args[3], args[2]):
            before, after = (builder.load(arrays.at_byte(n, line, _LANES), align=1) for n in (0, 1))
            changed = builder.icmp_unsigned("!=", before, after)
            for row, (words, lane) in enumerate(((before, 0), (before, 1), (after, 0), (after, 1))):
                mixed = (mixed_a, mixed_b)[lane](builder, words, products.rows[lane])
                kept.add(row, builder.select(changed, mixed, _each(0)))
            for lane, mix in enumerate((MIX_A, MIX_B)):
                products.add(lane, _each(8 * mix[0]))
        products.store()
        kept.store()
        return context.get_dummy_value()

    return types.none(old, new, types.int64, like, place, sums), build


_INDEX_ENTRY = ir.IntType(32)
_OLD, _NEW, _INDEX, _AT, _FIRST, _BEFORE, _AFTER, _SUMS = range(8)


@intrinsic
def keep8(typing, old, new, index, at, first, before, after, sums):
    """Words of `old` and `new` at 8 positions from index[at] on into `before` and `after`; the 8-byte words
    that hold them, with numbers from `first` on, into `sums`: uint64[32], both sums of the old, of the new.
    Each counts once, for the first position in it."""

    def build(context, builder, signature, args):
        touched = _Touched(context, builder, signature.args, args)
        for row, (source, kept) in enumerate(((_OLD, _BEFORE), (_NEW, _AFTER))):
            words = touched.gathered(source)
            touched.keep(words, kept)
            touched.add(words, 2 * row)
        return context.get_dummy_value()

    return types.none(old, new, index, types.int64, types.uint64, before, after, sums), build


class _Touched(Arrays):
    """8 positions, their 8-byte words, and which of those occur for the first time."""

    def __init__(self, context: Any, builder: Any, kinds: Any, args: Any) -> None:
        super().__init__(context, builder, kinds, args)
        self._bits = kinds[_BEFORE].dtype.bitwidth
        self._shift = {8: 3, 16: 2, 32: 1}[self._bits]
        positions = self._positions(args[_AT])
        places = builder.lshr(positions, _each(self._shift))
        behind = self._positions(builder.sub(args[_AT], ir.Constant(_WORD, 1)))
        self._fresh = builder.icmp_unsigned("!=", places, builder.lshr(behind, _each(self._shift)))
        lane = builder.and_(positions, _each((1 << self._shift) - 1))
        self._lane_bits = builder.mul(lane, _each(self._bits))
        numbers = builder.add(places, repeated(builder, args[_FIRST], 64, 8))
        self._products = _products(builder, numbers)

    def _positions(self, at: Any) -> Any:
        return self._builder.zext(self.load(_INDEX, at, ir.VectorType(_INDEX_ENTRY, 8), align=4), _LANES)

    def gathered(self, source: int) -> Any:
        """One by one: where gather instructions are patched against leaks, they are slower than that."""
        builder, words = self._builder, ir.Constant(_LANES, ir.Undefined)
        for lane in range(8):
            at = builder.add(self._args[_AT], ir.Constant(_WORD, lane))
            position = builder.zext(self.load(_INDEX, at, _INDEX_ENTRY, align=4), _WORD)
            word = self.load(source, builder.lshr(position, ir.Constant(_WORD, self._shift)), _WORD)
            words = builder.insert_element(words, word, ir.Constant(ir.IntType(32), lane))
        return words

    def keep(self, words: Any, kept: int) -> None:
        builder = self._builder
        lanes = ir.VectorType(ir.IntType(self._bits), 8)
        picked = builder.trunc(builder.lshr(words, self._lane_bits), lanes)
        self.store(kept, self._args[_AT], picked)

    def add(self, words: Any, row: int) -> None:
        _count(self, self._builder, _SUMS, row, words, self._products, self._fresh)


MARGIN = 8
"""entries before the first in the arrays of `merge8` and `add8` that others are compared with"""


@intrinsic
def merge8(typing, merged, flips, places, at, behind):
    """Into merged[at : at + 8] what flips in the words `behind` before them, where those have the same of
    `places`. Returns a bit for each that has. `flips` and `places` begin with MARGIN entries."""

    def build(context, builder, signature, args):
        lanes, at = Arrays(context, builder, signature.args, args), args[3]
        here = builder.add(at, ir.Constant(_WORD, MARGIN))
        there = builder.sub(here, args[4])
        same = builder.icmp_unsigned(
            "==", lanes.load(2, here, _LANES, align=8), lanes.load(2, there, _LANES, align=8)
        )
        flipped = builder.select(same, lanes.load(1, there, _LANES, align=8), _each(0))
        lanes.store(0, at, builder.or_(lanes.load(0, at, _LANES, align=8), flipped), align=8)
        return builder.zext(builder.bitcast(same, ir.IntType(8)), _WORD)

    return types.uint64(merged, flips, places, types.uint64, types.uint64), build


@intrinsic
def add8(typing, old, merged, places, at, number, sums):
    """The 8-byte words old[at : at + 8] into `sums` as `keep8` has them: as they are, and with `merged`
    flipped. Of those with the same of `places` the last counts. `places` begins with MARGIN entries, goes on
    for one more, and counts from `number` on."""

    def build(context, builder, signature, args):
        lanes, at = Arrays(context, builder, signature.args, args), args[3]
        here, following = (
            lanes.load(2, builder.add(at, ir.Constant(_WORD, MARGIN + step)), _LANES, align=8)
            for step in (0, 1)
        )
        last = builder.icmp_unsigned("!=", here, following)
        numbers = builder.add(here, repeated(builder, args[4], 64, 8))
        products = _products(builder, numbers)
        before = lanes.load(0, at, _LANES, align=8)
        after = builder.xor(before, lanes.load(1, at, _LANES, align=8))
        _count(lanes, builder, 5, 0, before, products, last)
        _count(lanes, builder, 5, 2, after, products, last)
        return context.get_dummy_value()

    return types.none(old, merged, places, types.uint64, types.uint64, sums), build


SUMS = 32
"""words of a sum in progress; aligned on the stack, because crossing cache lines is slow"""


@inlined
def empty(sums):
    for lane in range(SUMS):
        sums[lane] = U64(0)


@inlined
def opened(sums, number):
    """A sum in progress whose next word is `number` in its tensor's count."""
    for lane in range(8):
        sums[lane] = sums[lane + 8] = U64(0)
        sums[16 + lane] = (number + U64(lane)) * A0
        sums[24 + lane] = (number + U64(lane)) * B0


@kernel
def closed(sums, row):
    """Both sums from row `row` of 8 lanes on."""
    a, b = U64(0), U64(0)
    for lane in range(8 * row, 8 * row + 8):
        a += sums[lane]
        b += sums[lane + 8]
    return a, b


@inlined
def rounds_a(x):
    x = (x ^ (x >> U64(32))) * A1
    x = (x ^ (x >> U64(29))) * A2
    return x ^ (x >> U64(32))


@inlined
def rounds_b(x):
    x = (x ^ (x >> U64(31))) * B1
    x = (x ^ (x >> U64(33))) * B2
    return x ^ (x >> U64(30))


@kernel
def mixed_tail(data, start, stop, number):
    """Sums over bytes [start, stop), word by word; a partial word is padded with zeros."""
    a, b = U64(0), U64(0)
    for place in range(start, stop, 8):
        word = U64(0)
        for i in range(place, min(place + 8, stop)):
            word |= U64(data[i]) << U64((i - place) << 3)
        a += rounds_a(word ^ (number * A0))
        b += rounds_b(word + number * B0)
        number += U64(1)
    return a, b


_AHEAD_BYTES = 2048


@kernel
def _hash(data, pieces, lanes):
    """`pieces`: rows of first byte, end byte, first 8-byte word. `lanes`: uint64[n, 2]."""
    sums = on_stack(SUMS, U64(0))
    for row in range(pieces.shape[0]):
        start, stop, number = pieces[row, 0], pieces[row, 1], U64(pieces[row, 2] + 1)
        opened(sums, number)
        whole = (stop - start) & ~63
        for place in range(start, start + whole, 64):
            prefetch64(data, place + _AHEAD_BYTES, data)
            mix64(data, place, data, sums)
        a, b = closed(sums, 0)
        tail_a, tail_b = mixed_tail(data, start + whole, stop, number + U64(whole >> 3))
        lanes[row, 0], lanes[row, 1] = a + tail_a, b + tail_b


def hash_pieces(data: ByteArray, pieces: NDArray[np.int64]) -> NDArray[np.uint64]:
    lanes = np.empty((len(pieces), 2), np.uint64)
    _hash(frozen(data), unwritable(np.ascontiguousarray(pieces)), lanes)
    return lanes

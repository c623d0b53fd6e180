"""Machine operations that numba lacks, as intrinsics, and elements as ordered numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from llvmlite import binding, ir

from weightcast.shared.base.elements import WordKind
from weightcast.shared.kernels.compiler import (
    I64,
    U64,
    KernelPart,
    _extending,
    array_at,
    cgutils,
    chosen_features,
    inlined,
    intrinsic,
    on_zen,
    processor,
    types,
)

_WORD = ir.IntType(64)


def address(context: Any, builder: Any, array_type: Any, array: Any, offset: Any, bits: int) -> Any:
    """Inside an intrinsic: pointer to the integer of `bits` at byte `offset` of an array."""
    start = builder.bitcast(
        context.make_array(array_type)(context, builder, array).data, ir.IntType(8).as_pointer()
    )
    return builder.bitcast(builder.gep(start, [offset]), ir.IntType(bits).as_pointer())


@intrinsic
def load64(typing: Any, data: Any, offset: Any) -> Any:
    """The little-endian 8 bytes at `offset` of a byte array, aligned or not. The caller keeps the bounds."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = address(context, builder, signature.args[0], args[0], args[1], 64)
        return builder.load(place, align=1)

    return types.uint64(data, types.int64), build


@intrinsic
def store64(typing: Any, data: Any, offset: Any, value: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = address(context, builder, signature.args[0], args[0], args[1], 64)
        builder.store(args[2], place, align=1)
        return context.get_dummy_value()

    return types.none(data, types.int64, types.uint64), build


@intrinsic
def trailing_zeros(typing: Any, value: Any) -> Any:
    """Of a uint64; 64 for zero."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), build


@intrinsic
def set_bits(typing: Any, value: Any) -> Any:
    """How many bits of a uint64 are one."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), build


@intrinsic
def word_at(typing: Any, data: Any, position: Any, like: Any) -> Any:
    """Word `position` of bytes that hold words of `like`'s dtype, aligned or not."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_word_address(context, builder, signature, args, signature.args[2]), align=1)

    return like.dtype(data, types.int64, like), build


@intrinsic
def set_word(typing: Any, data: Any, position: Any, word: Any) -> Any:
    """Writes a word into bytes that hold words of its dtype, aligned or not."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _word_address(context, builder, signature, args, None)
        builder.store(args[2], place, align=1)
        return context.get_dummy_value()

    return types.none(data, types.int64, word), build


def _word_address(context: Any, builder: Any, signature: Any, args: Any, like: Any) -> Any:
    bits = (signature.args[2] if like is None else like.dtype).bitwidth
    offset = builder.mul(args[1], ir.Constant(_WORD, bits // 8))
    return address(context, builder, signature.args[0], args[0], offset, bits)


_NEAREST, _SECOND = 3, 2
"""prefetch into this cache and all farther ones; llvm.prefetch's numbers"""
_FOR_WORDS = _SECOND if processor() == "znver4" else _NEAREST
_FOR_RUNS = _SECOND if on_zen() else _NEAREST
"""Zen 4 has few fill buffers for the nearest cache, and all other loads wait when they are taken
(docs/adr/0017, 0019)"""


@intrinsic
def prefetch(typing: Any, data: Any, position: Any, like: Any) -> Any:
    """Prefetches the cache line of `word_at(data, position, like)`."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        offset = builder.mul(args[1], ir.Constant(_WORD, signature.args[2].dtype.bitwidth // 8))
        _asked(builder, address(context, builder, signature.args[0], args[0], offset, 8), _FOR_WORDS)
        return context.get_dummy_value()

    return types.none(data, types.int64, like), build


def _asking64(cache: int) -> Any:
    def asking64(typing: Any, data: Any, first: Any, like: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            width = signature.args[2].dtype.bitwidth // 8
            offset = builder.mul(args[1], ir.Constant(_WORD, width))
            start = address(context, builder, signature.args[0], args[0], offset, 8)
            for line in range(width):
                _asked(builder, builder.gep(start, [ir.Constant(_WORD, 64 * line)]), cache)
            return context.get_dummy_value()

        return types.none(data, types.int64, like), build

    return intrinsic(asking64)


prefetch64, prefetch64_early = _asking64(_NEAREST), _asking64(_FOR_RUNS)
"""Prefetch the cache lines of 64 words from `first` on, which may be past the end of the array. Code that
computes more than it waits needs them in the nearest cache."""


def _asked(builder: Any, place: Any, cache: int) -> None:
    number, read, data = ir.IntType(32), 0, 1
    form = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, form, "llvm.prefetch.p0")
    builder.call(function, [place, *(ir.Constant(number, flag) for flag in (read, cache, data))])


def _lanes64(context: Any, builder: Any, array_type: Any, array: Any, first: Any, bits: int) -> Any:
    """64 words from word `first` on as a vector."""
    offset = builder.mul(first, ir.Constant(_WORD, bits // 8))
    start = address(context, builder, array_type, array, offset, 8)
    lanes = ir.VectorType(ir.IntType(bits), 64)
    return builder.load(builder.bitcast(start, lanes.as_pointer()), align=1)


@intrinsic
def differing64(typing: Any, one: Any, other: Any, first: Any, like: Any) -> Any:
    """Bit j says whether word first + j differs in two byte arrays that hold words of `like`'s dtype."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = signature.args[3].dtype.bitwidth
        left, right = (_lanes64(context, builder, signature.args[n], args[n], args[2], bits) for n in (0, 1))
        return builder.bitcast(builder.icmp_unsigned("!=", left, right), _WORD)

    return types.uint64(one, other, types.int64, like), build


@intrinsic
def reaching64(typing: Any, data: Any, first: Any, like: Any, mask: Any, least: Any) -> Any:
    """Bit j says whether word first + j, under `mask`, is at least `least`."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = signature.args[2].dtype.bitwidth
        words = _lanes64(context, builder, signature.args[0], args[0], args[1], bits)
        masked = builder.and_(words, repeated(builder, args[3], bits, 64))
        reached = builder.icmp_unsigned(">=", masked, repeated(builder, args[4], bits, 64))
        return builder.bitcast(reached, _WORD)

    return types.uint64(data, types.int64, like, types.uint64, types.uint64), build


def repeated(builder: Any, value: Any, bits: int, count: int) -> Any:
    """Inside an intrinsic: the low `bits` of a 64-bit integer in each of `count` lanes."""
    lane, number = ir.IntType(bits), ir.IntType(32)
    narrow = value if bits == 64 else builder.trunc(value, lane)
    lanes = ir.Constant(ir.VectorType(lane, count), ir.Undefined)
    single = builder.insert_element(lanes, narrow, ir.Constant(number, 0))
    return builder.shuffle_vector(single, single, ir.Constant(ir.VectorType(number, count), [0] * count))


def _prefers_literals(function: Callable[..., Any]) -> Any:
    return KernelPart(lambda: _extending.intrinsic(prefer_literal=True)(function))


@_prefers_literals
def on_stack(typing: Any, count: Any, like: Any) -> Any:
    """An array of `count` words, a constant, of `like`'s type: uninitialised, at a multiple of 64 bytes, gone
    when the kernel returns."""
    form = types.Array(like, 1, "C")

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lane, size = context.get_data_type(like), ir.Constant(_WORD, count.literal_value)
        with builder.goto_entry_block():  # numba's own way fills it, a store per word: minutes of compiling
            room = builder.alloca(ir.ArrayType(lane, count.literal_value))
        room.align = 64
        return array_at(context, builder, form, builder.ptrtoint(room, _WORD), [size])

    return form(count, like), build


SIGN, LOW, HALF, SHIFT, MASK, FLOATS = range(6)


def facts(kind: WordKind) -> tuple[int, int, int, int, int, int]:
    """Sign bit (0: integers), the bits that an ordinal keeps of its word, half of all words, shift and mask
    of the exponent, -1 for floats and 0 for integers."""
    half = 1 << (8 * kind.width - 1)
    low, floats = (half - 1, -1) if kind.sign_bit else (2 * half - 1, 0)
    return kind.sign_bit, low, half, kind.exponent_shift, kind.exponent_mask, floats


@inlined
def ordinal(word: Any, kind: Any) -> Any:
    value = I64(word)
    return (value & kind[LOW]) ^ -I64((value & kind[SIGN]) != 0)


@inlined
def step_between(old: Any, new: Any, kind: Any) -> Any:
    step = ordinal(new, kind) - ordinal(old, kind)
    return step if kind[SIGN] else ((step + kind[HALF]) & kind[LOW]) - kind[HALF]


@inlined
def word_of(ordinal_: Any, kind: Any) -> Any:
    """As int64; of integers modulo their width. Without branches, which keeps loops around it quick."""
    below = (ordinal_ >> 63) & kind[FLOATS]
    return ((ordinal_ ^ below) & kind[LOW]) | (below & kind[SIGN])


@inlined
def excess(ordinal_: Any, length: Any, kind: Any) -> Any:
    """Has bits from 2 * HALF on if a step of `length` (0: none) leads to no word. May be collected by or."""
    reached = (ordinal_ & kind[FLOATS]) | ((length - 1) & ~kind[FLOATS])
    return U64(reached + kind[HALF])


@inlined
def exponent(word: Any, kind: Any) -> Any:
    return (I64(word) >> kind[SHIFT]) & kind[MASK]


_COUNT = 64
_VECTOR = 512


def machine_has(feature: str) -> bool:
    """Whether the CPU that kernels are compiled for has a feature, by LLVM's name."""
    chosen = chosen_features()
    features = binding.get_host_cpu_features().flatten() if chosen is None else chosen
    return f"+{feature}" in features.split(",")


@intrinsic
def moves_lanes(typing: Any) -> Any:
    """Whether the machine can move lanes under a mask: a constant. If not, the other operations of this kind
    do nothing."""

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
    """Some of the 64: the first, its number among all words, the mask, where the chosen words start."""

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


_LISTED = 16
_NUMBER = ir.IntType(32)
_LANES = ir.VectorType(_NUMBER, _LISTED)
_OLD, _NEW, _AT, _INDEX, _BEFORE, _AFTER, _FOUND = range(7)


@intrinsic
def list16(typing: Any, old: Any, new: Any, at: Any, index: Any, before: Any, after: Any, found: Any) -> Any:
    """Of 16 words of two byte arrays from word `at` on, those that differ: positions and both words, from
    `found` on. Returns where the next ones go; up to 16 are written."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        listing = _Listing(context, builder, signature.args, args)
        return listing.compressed() if machine_has("avx512f") else listing.one_by_one()

    return types.int64(old, new, types.int64, index, before, after, types.int64), build


class _Listing:
    def __init__(self, context: Any, builder: Any, kinds: Any, args: Any) -> None:
        self._context, self._builder, self._kinds, self._args = context, builder, kinds, args
        self._bits = kinds[_BEFORE].dtype.bitwidth

    def _place(self, array: int, at: Any, bits: int) -> Any:
        offset = self._builder.mul(at, ir.Constant(_WORD, bits // 8))
        return address(self._context, self._builder, self._kinds[array], self._args[array], offset, bits)

    def compressed(self) -> Any:
        builder, lanes = self._builder, ir.VectorType(ir.IntType(self._bits), _LISTED)
        words = [
            builder.load(
                builder.bitcast(self._place(n, self._args[_AT], self._bits), lanes.as_pointer()), align=1
            )
            for n in (_OLD, _NEW)
        ]
        mask = builder.icmp_unsigned("!=", *words)
        self._keep(_INDEX, self._positions(), mask, 32)
        for array, each in zip((_BEFORE, _AFTER), words, strict=True):
            self._keep(array, each, mask, self._bits)
        count = builder.ctpop(builder.bitcast(mask, ir.IntType(_LISTED)))
        return builder.add(self._args[_FOUND], builder.zext(count, _WORD))

    def _positions(self) -> Any:
        builder = self._builder
        first = builder.trunc(self._args[_AT], _NUMBER)
        single = builder.insert_element(ir.Constant(_LANES, ir.Undefined), first, ir.Constant(_NUMBER, 0))
        each = builder.shuffle_vector(single, single, ir.Constant(_LANES, [0] * _LISTED))
        return builder.add(each, ir.Constant(_LANES, list(range(_LISTED))))

    def _keep(self, array: int, words: Any, mask: Any, bits: int) -> None:
        """Stores all lanes: storing only those that count is slow on some machines."""
        builder = self._builder
        wide = words if bits == 32 else builder.zext(words, _LANES)
        form = ir.FunctionType(_LANES, [_LANES, _LANES, mask.type])
        compress = cgutils.get_or_insert_function(
            builder.module, form, "llvm.x86.avx512.mask.compress.v16i32"
        )
        moved = builder.call(compress, [wide, ir.Constant(_LANES, [0] * _LISTED), mask])
        lanes = ir.VectorType(ir.IntType(bits), _LISTED)
        narrow = moved if bits == 32 else builder.trunc(moved, lanes)
        place = self._place(array, self._args[_FOUND], bits)
        builder.store(narrow, builder.bitcast(place, lanes.as_pointer()), align=1)

    def one_by_one(self) -> Any:
        """Without branches: each is written, and written over unless it differs."""
        builder, found = self._builder, self._args[_FOUND]
        for lane in range(_LISTED):
            at = builder.add(self._args[_AT], ir.Constant(_WORD, lane))
            words = [builder.load(self._place(n, at, self._bits), align=1) for n in (_OLD, _NEW)]
            builder.store(builder.trunc(at, _NUMBER), self._place(_INDEX, found, 32), align=1)
            for array, word in zip((_BEFORE, _AFTER), words, strict=True):
                builder.store(word, self._place(array, found, self._bits), align=1)
            found = builder.add(found, builder.zext(builder.icmp_unsigned("!=", *words), _WORD))
        return found


@intrinsic
def copy16(typing: Any, target: Any, to: Any, source: Any, at: Any) -> Any:
    """16 words of `source` from `at` on into bytes that hold such words, from word `to` on."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = signature.args[2].dtype.bitwidth
        lanes, width = (
            ir.VectorType(ir.IntType(bits), _LISTED),
            ir.Constant(_WORD, bits // 8),
        )
        there, here = (
            builder.bitcast(
                address(context, builder, signature.args[n], args[n], builder.mul(args[n + 1], width), bits),
                lanes.as_pointer(),
            )
            for n in (0, 2)
        )
        builder.store(builder.load(here, align=1), there, align=1)
        return context.get_dummy_value()

    return types.none(target, types.int64, source, types.int64), build

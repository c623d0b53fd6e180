"""Machine operations that numba lacks, as intrinsics, and elements as ordered numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import binding, ir

from weightcast.shared.base.elements import WordKind
from weightcast.shared.kernels.compiler import (
    I64,
    U64,
    array_at,
    cgutils,
    chosen_features,
    inlined,
    intrinsic,
    on_zen,
    processor,
    types,
)
from weightcast.shared.kernels.loader import XXH3

_WORD, _BYTE = ir.IntType(64), ir.IntType(8)


class Arrays:
    """The arrays among the arguments of an intrinsic, read and written as integers or vectors of them."""

    def __init__(self, context: Any, builder: Any, kinds: Any, args: Any) -> None:
        self._context, self._builder, self._kinds, self._args = context, builder, kinds, args

    def pointer(self, number: int, at: Any, form: Any) -> Any:
        """To a value of type `form` at entry `at` of argument `number`, counted in its integers."""
        bits = getattr(form, "element", form).width
        return self.at_byte(number, self._builder.mul(at, ir.Constant(_WORD, bits // 8)), form)

    def at_byte(self, number: int, offset: Any, form: Any) -> Any:
        builder, array = self._builder, self._context.make_array(self._kinds[number])
        start = builder.bitcast(array(self._context, builder, self._args[number]).data, _BYTE.as_pointer())
        return builder.bitcast(builder.gep(start, [offset]), form.as_pointer())

    def load(self, number: int, at: Any, form: Any, *, align: int = 1) -> Any:
        return self._builder.load(self.pointer(number, at, form), align=align)

    def store(self, number: int, at: Any, values: Any, *, align: int = 1) -> None:
        self._builder.store(values, self.pointer(number, at, values.type), align=align)


@intrinsic
def load64(typing, data, offset):
    """The little-endian 8 bytes at `offset` of a byte array, aligned or not. The caller keeps the bounds."""

    def build(context, builder, signature, args):
        place = Arrays(context, builder, signature.args, args).at_byte(0, args[1], _WORD)
        return builder.load(place, align=1)

    return types.uint64(data, types.int64), build


@intrinsic
def store64(typing, data, offset, value):
    def build(context, builder, signature, args):
        place = Arrays(context, builder, signature.args, args).at_byte(0, args[1], _WORD)
        builder.store(args[2], place, align=1)
        return context.get_dummy_value()

    return types.none(data, types.int64, types.uint64), build


@intrinsic
def xxh3(typing, data, offset, size):
    """xxh3-64 of so many bytes from `offset` on, by the xxhash library: the loader knows its function."""

    def build(context, builder, signature, args):
        start = Arrays(context, builder, signature.args, args).at_byte(0, args[1], _BYTE)
        form = ir.FunctionType(_WORD, [start.type, _WORD])
        return builder.call(cgutils.get_or_insert_function(builder.module, form, XXH3), [start, args[2]])

    return types.uint64(data, types.int64, types.int64), build


@intrinsic
def trailing_zeros(typing, value):
    """Of a uint64; 64 for zero."""

    def build(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), build


@intrinsic
def set_bits(typing, value):
    """How many bits of a uint64 are one."""

    def build(context, builder, signature, args):
        return builder.ctpop(args[0])

    return types.int64(types.uint64), build


@intrinsic
def word_at(typing, data, position, like):
    """Word `position` of bytes that hold words of `like`'s dtype, aligned or not."""

    def build(context, builder, signature, args):
        form = ir.IntType(signature.args[2].dtype.bitwidth)
        return Arrays(context, builder, signature.args, args).load(0, args[1], form)

    return like.dtype(data, types.int64, like), build


@intrinsic
def set_word(typing, data, position, word):
    """Writes a word into bytes that hold words of its dtype, aligned or not."""

    def build(context, builder, signature, args):
        Arrays(context, builder, signature.args, args).store(0, args[1], args[2])
        return context.get_dummy_value()

    return types.none(data, types.int64, word), build


_NEAREST, _SECOND = 3, 2
"""prefetch into this cache and all farther ones; llvm.prefetch's numbers"""
_FOR_WORDS = _SECOND if processor() == "znver4" else _NEAREST
_FOR_RUNS = _SECOND if on_zen() else _NEAREST
"""Zen 4 has few fill buffers for the nearest cache, and all other loads wait when they are taken
(docs/adr/0017, 0019)"""


@intrinsic
def prefetch(typing, data, position, like):
    """Prefetches the cache line of `word_at(data, position, like)`."""

    def build(context, builder, signature, args):
        form = ir.IntType(signature.args[2].dtype.bitwidth)
        place = Arrays(context, builder, signature.args, args).pointer(0, args[1], form)
        _asked(builder, builder.bitcast(place, _BYTE.as_pointer()), _FOR_WORDS)
        return context.get_dummy_value()

    return types.none(data, types.int64, like), build


def _asking64(cache: int) -> Any:
    def asking64(typing: Any, data: Any, first: Any, like: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            width = signature.args[2].dtype.bitwidth // 8
            offset = builder.mul(args[1], ir.Constant(_WORD, width))
            start = Arrays(context, builder, signature.args, args).at_byte(0, offset, _BYTE)
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


@intrinsic
def differing64(typing, one, other, first, like):
    """Bit j says whether word first + j differs in two byte arrays that hold words of `like`'s dtype."""

    def build(context, builder, signature, args):
        bits = signature.args[3].dtype.bitwidth
        arrays, form = Arrays(context, builder, signature.args, args), ir.VectorType(ir.IntType(bits), 64)
        left, right = (arrays.load(n, args[2], form) for n in (0, 1))
        return builder.bitcast(builder.icmp_unsigned("!=", left, right), _WORD)

    return types.uint64(one, other, types.int64, like), build


@intrinsic
def reaching64(typing, data, first, like, mask, least):
    """Bit j says whether word first + j, under `mask`, is at least `least`."""

    def build(context, builder, signature, args):
        bits = signature.args[2].dtype.bitwidth
        form = ir.VectorType(ir.IntType(bits), 64)
        words = Arrays(context, builder, signature.args, args).load(0, args[1], form)
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


@partial(intrinsic, prefer_literal=True)
def on_stack(typing, count, like):
    """An array of `count` words, a constant, of `like`'s type: uninitialised, at a multiple of 64 bytes, gone
    when the kernel returns."""
    form = types.Array(like, 1, "C")

    def build(context, builder, signature, args):
        lane, size = context.get_data_type(like), ir.Constant(_WORD, count.literal_value)
        with builder.goto_entry_block():  # numba's own way fills it, a store per word: minutes of compiling
            room = builder.alloca(ir.ArrayType(lane, count.literal_value))
        room.align = 64
        return array_at(context, builder, form, room, [size])

    return form(count, like), build


class Lanes(Arrays):
    """`count` words at a time in lanes of `bits`. Numbers of arguments: `at`, the first word; `kind`, as
    `facts`."""

    def __init__(
        self, context: Any, builder: Any, kinds: Any, args: Any, count: int, bits: int, at: int, kind: int
    ) -> None:
        super().__init__(context, builder, kinds, args)
        self._count, self._bits, self._at, self._kind = count, bits, args[at], args[kind]
        self.form = ir.VectorType(ir.IntType(bits), count)

    def each(self, value: int) -> Any:
        return ir.Constant(self.form, [value] * self._count)

    def fact(self, number: int) -> Any:
        value = self._builder.extract_value(self._kind, number)
        return repeated(self._builder, value, self._bits, self._count)

    def read(self, number: int, bits: int) -> Any:
        """Of `bits` each in memory."""
        loaded = self.load(number, self._at, ir.VectorType(ir.IntType(bits), self._count))
        return self._builder.zext(loaded, self.form) if bits < self._bits else loaded

    def write(self, number: int, values: Any, bits: int) -> None:
        narrow = ir.VectorType(ir.IntType(bits), self._count)
        self.store(number, self._at, values if bits == self._bits else self._builder.trunc(values, narrow))


SIGN, LOW, HALF, SHIFT, MASK, FLOATS = range(6)


def facts(kind: WordKind) -> tuple[int, int, int, int, int, int]:
    """Sign bit (0: integers), the bits that an ordinal keeps of its word, half of all words, shift and mask
    of the exponent, -1 for floats and 0 for integers."""
    half = 1 << (8 * kind.width - 1)
    low, floats = (half - 1, -1) if kind.sign_bit else (2 * half - 1, 0)
    return kind.sign_bit, low, half, kind.exponent_shift, kind.exponent_mask, floats


@inlined
def ordinal(word, kind):
    value = I64(word)
    return (value & kind[LOW]) ^ -I64((value & kind[SIGN]) != 0)


@inlined
def step_between(old, new, kind):
    step = ordinal(new, kind) - ordinal(old, kind)
    return step if kind[SIGN] else ((step + kind[HALF]) & kind[LOW]) - kind[HALF]


@inlined
def word_of(ordinal_, kind):
    """As int64; of integers modulo their width. Without branches, which keeps loops around it quick."""
    below = (ordinal_ >> 63) & kind[FLOATS]
    return ((ordinal_ ^ below) & kind[LOW]) | (below & kind[SIGN])


@inlined
def excess(ordinal_, length, kind):
    """Has bits from 2 * HALF on if a step of `length` (0: none) leads to no word. May be collected by or."""
    reached = (ordinal_ & kind[FLOATS]) | ((length - 1) & ~kind[FLOATS])
    return U64(reached + kind[HALF])


@inlined
def exponent(word, kind):
    return (I64(word) >> kind[SHIFT]) & kind[MASK]


_COUNT = 64
_VECTOR = 512


def machine_has(feature: str) -> bool:
    """Whether the CPU that kernels are compiled for has a feature, by LLVM's name."""
    chosen = chosen_features()
    features = binding.get_host_cpu_features().flatten() if chosen is None else chosen
    return f"+{feature}" in features.split(",")


@intrinsic
def moves_lanes(typing):
    """Whether the machine can move lanes under a mask: a constant. If not, the other operations of this kind
    do nothing."""

    def build(context, builder, signature, args):
        return ir.Constant(ir.IntType(1), machine_has("avx512f"))

    return types.boolean(), build


@intrinsic
def keep64(typing, old, new, at, mask, before, after, found):
    """Of 64 words of two byte arrays from word `at` on, those under `mask`: both words, from `found` on. Up
    to 64 are written."""

    def build(context, builder, signature, args):
        masked = _Masked(context, builder, signature.args, args, signature.args[4].dtype.bitwidth)
        if masked.works:
            for piece in masked.pieces(args[2], args[3], args[6]):
                for source, target in ((0, 4), (1, 5)):
                    words = masked.load(source, piece.word, masked.words)
                    masked.store(target, piece.found, masked.moved("compress", words, piece.mask))
        return context.get_dummy_value()

    return types.none(old, new, types.int64, types.uint64, before, after, types.int64), build


@intrinsic
def exchange64(typing, words, at, mask, before, other, after, found, like):
    """Of 64 words from word `at` on, those under `mask` become those of `after` from `found` on, if all are
    those of `before` or of `other` there. Returns the bits of words that are neither; then nothing is
    written. All are byte arrays, that hold words of `like`'s dtype; 64 are read of each."""

    def build(context, builder, signature, args):
        masked = _Masked(context, builder, signature.args, args, signature.args[7].dtype.bitwidth)
        wrong: Any = ir.Constant(_WORD, 0)
        kept = []
        for piece in masked.pieces(args[1], args[2], args[6]) if masked.works else ():
            here = masked.load(0, piece.word, masked.words)
            expected, or_this, wanted = (
                masked.moved("expand", masked.load(n, piece.found, masked.words), piece.mask)
                for n in (3, 4, 5)
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
def differing_under64(typing, words, at, mask, after, found, like):
    """Bits of those of 64 words under `mask` that are not those of `after`."""

    def build(context, builder, signature, args):
        masked = _Masked(context, builder, signature.args, args, signature.args[5].dtype.bitwidth)
        wrong: Any = ir.Constant(_WORD, 0)
        for piece in masked.pieces(args[1], args[2], args[4]) if masked.works else ():
            wanted = masked.moved("expand", masked.load(3, piece.found, masked.words), piece.mask)
            other = builder.icmp_unsigned("!=", masked.load(0, piece.word, masked.words), wanted)
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


def moved(builder: Any, operation: str, words: Any, mask: Any, lanes: Any) -> Any:
    """Inside an intrinsic, in vectors of type `lanes`, whose lanes hold a word. `compress`: chosen lanes to
    the front; `expand`: the first to the chosen lanes. Others are 0."""
    wide = words if words.type == lanes else builder.zext(words, lanes)
    form = ir.FunctionType(lanes, [lanes, lanes, mask.type])
    name = f"llvm.x86.avx512.mask.{operation}.v{lanes.count}i{lanes.element.width}"
    function = cgutils.get_or_insert_function(builder.module, form, name)
    found = builder.call(function, [wide, ir.Constant(lanes, [0] * lanes.count), mask])
    return found if words.type == lanes else builder.trunc(found, words.type)


class _Masked(Arrays):
    """Lanes are as wide as a word where the machine moves such, else of 32 bits."""

    def __init__(self, context: Any, builder: Any, kinds: Any, args: Any, bits: int) -> None:
        super().__init__(context, builder, kinds, args)
        self.works = machine_has("avx512f")
        lane = bits if machine_has("avx512vbmi2") else 32
        self._lanes = ir.VectorType(ir.IntType(lane), _VECTOR // lane)
        self.words = ir.VectorType(ir.IntType(bits), self._lanes.count)

    def pieces(self, at: Any, mask: Any, found: Any) -> Iterator[_Piece]:
        builder, count = self._builder, self._lanes.count
        for first in range(0, _COUNT, count):
            part = builder.lshr(mask, ir.Constant(_WORD, first))
            bits = part if count == _COUNT else builder.trunc(part, ir.IntType(count))
            lanes = builder.bitcast(bits, ir.VectorType(ir.IntType(1), count))
            yield _Piece(first, builder.add(at, ir.Constant(_WORD, first)), lanes, found)
            taken = builder.ctpop(bits)
            found = builder.add(found, taken if count == _COUNT else builder.zext(taken, _WORD))

    def moved(self, operation: str, words: Any, mask: Any) -> Any:
        return moved(self._builder, operation, words, mask, self._lanes)

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
def list16(typing, old, new, at, index, before, after, found):
    """Of 16 words of two byte arrays from word `at` on, those that differ: positions and both words, from
    `found` on. Returns where the next ones go; up to 16 are written."""

    def build(context, builder, signature, args):
        listing = _Listing(context, builder, signature.args, args)
        return listing.compressed() if machine_has("avx512f") else listing.one_by_one()

    return types.int64(old, new, types.int64, index, before, after, types.int64), build


class _Listing(Arrays):
    def __init__(self, context: Any, builder: Any, kinds: Any, args: Any) -> None:
        super().__init__(context, builder, kinds, args)
        self._word = ir.IntType(kinds[_BEFORE].dtype.bitwidth)
        self._words = ir.VectorType(self._word, _LISTED)

    def compressed(self) -> Any:
        builder = self._builder
        words = [self.load(n, self._args[_AT], self._words) for n in (_OLD, _NEW)]
        mask = builder.icmp_unsigned("!=", *words)
        first = repeated(builder, self._args[_AT], 32, _LISTED)
        positions = builder.add(first, ir.Constant(_LANES, list(range(_LISTED))))
        for array, each in zip((_INDEX, _BEFORE, _AFTER), (positions, *words), strict=True):
            # all lanes: storing only those that count is slow on some machines
            self.store(array, self._args[_FOUND], moved(builder, "compress", each, mask, _LANES))
        count = builder.ctpop(builder.bitcast(mask, ir.IntType(_LISTED)))
        return builder.add(self._args[_FOUND], builder.zext(count, _WORD))

    def one_by_one(self) -> Any:
        """Without branches: each is written, and written over unless it differs."""
        builder, found = self._builder, self._args[_FOUND]
        for lane in range(_LISTED):
            at = builder.add(self._args[_AT], ir.Constant(_WORD, lane))
            words = [self.load(n, at, self._word) for n in (_OLD, _NEW)]
            self.store(_INDEX, found, builder.trunc(at, _NUMBER))
            for array, word in zip((_BEFORE, _AFTER), words, strict=True):
                self.store(array, found, word)
            found = builder.add(found, builder.zext(builder.icmp_unsigned("!=", *words), _WORD))
        return found


@intrinsic
def copy16(typing, target, to, source, at):
    """16 words of `source` from `at` on into bytes that hold such words, from word `to` on."""

    def build(context, builder, signature, args):
        arrays = Arrays(context, builder, signature.args, args)
        form = ir.VectorType(ir.IntType(signature.args[2].dtype.bitwidth), _LISTED)
        arrays.store(0, args[1], arrays.load(2, args[3], form))
        return context.get_dummy_value()

    return types.none(target, types.int64, source, types.int64), build

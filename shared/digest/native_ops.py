"""Machine operations that numba has no word for, as intrinsics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from weightcast.shared.digest.native import (
    KernelPart,
    _arrays,
    _extending,
    cgutils,
    intrinsic,
    on_zen,
    processor,
    types,
)


def address(context: Any, builder: Any, array_type: Any, array: Any, offset: Any, bits: int) -> Any:
    """Inside an intrinsic: where an array's byte `offset` lies, as the place of an integer of `bits`."""
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
    offset = builder.mul(args[1], ir.Constant(ir.IntType(64), bits // 8))
    return address(context, builder, signature.args[0], args[0], offset, bits)


_NEAREST, _SECOND = 3, 2
"""caches that a line is asked into, with all farther ones; llvm.prefetch's numbers"""


_FOR_WORDS = _SECOND if processor() == "znver4" else _NEAREST


_FOR_RUNS = _SECOND if on_zen() else _NEAREST
"""Zen 4 has few places for lines that wait for the nearest cache, and all else stands behind those that find
none (docs/adr/0017, 0019)"""


@intrinsic
def prefetch(typing: Any, data: Any, position: Any, like: Any) -> Any:
    """Asks early for the cache line of `word_at(data, position, like)`."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        offset = builder.mul(args[1], ir.Constant(ir.IntType(64), signature.args[2].dtype.bitwidth // 8))
        _asked(builder, address(context, builder, signature.args[0], args[0], offset, 8), _FOR_WORDS)
        return context.get_dummy_value()

    return types.none(data, types.int64, like), build


def _asking64(cache: int) -> Any:
    def asking64(typing: Any, data: Any, first: Any, like: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            width = signature.args[2].dtype.bitwidth // 8
            offset = builder.mul(args[1], ir.Constant(ir.IntType(64), width))
            start = address(context, builder, signature.args[0], args[0], offset, 8)
            for line in range(width):
                _asked(builder, builder.gep(start, [ir.Constant(ir.IntType(64), 64 * line)]), cache)
            return context.get_dummy_value()

        return types.none(data, types.int64, like), build

    return intrinsic(asking64)


prefetch64, prefetch64_early = _asking64(_NEAREST), _asking64(_FOR_RUNS)
"""Ask for the cache lines of 64 words from `first` on; those may lie behind the array's end. What computes
more than it waits wants them in the nearest cache."""


def _asked(builder: Any, place: Any, cache: int) -> None:
    number, read, data = ir.IntType(32), 0, 1
    form = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, form, "llvm.prefetch.p0")
    builder.call(function, [place, *(ir.Constant(number, flag) for flag in (read, cache, data))])


def _lanes64(context: Any, builder: Any, array_type: Any, array: Any, first: Any, bits: int) -> Any:
    """64 words from word `first` on as a vector."""
    offset = builder.mul(first, ir.Constant(ir.IntType(64), bits // 8))
    start = address(context, builder, array_type, array, offset, 8)
    lanes = ir.VectorType(ir.IntType(bits), 64)
    return builder.load(builder.bitcast(start, lanes.as_pointer()), align=1)


@intrinsic
def differing64(typing: Any, one: Any, other: Any, first: Any, like: Any) -> Any:
    """Bit j says whether word first + j differs in two byte arrays that hold words of `like`'s dtype."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = signature.args[3].dtype.bitwidth
        left, right = (_lanes64(context, builder, signature.args[n], args[n], args[2], bits) for n in (0, 1))
        return builder.bitcast(builder.icmp_unsigned("!=", left, right), ir.IntType(64))

    return types.uint64(one, other, types.int64, like), build


@intrinsic
def reaching64(typing: Any, data: Any, first: Any, like: Any, mask: Any, least: Any) -> Any:
    """Bit j says whether word first + j, under `mask`, is at least `least`."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = signature.args[2].dtype.bitwidth
        words = _lanes64(context, builder, signature.args[0], args[0], args[1], bits)
        masked = builder.and_(words, repeated(builder, args[3], bits, 64))
        reached = builder.icmp_unsigned(">=", masked, repeated(builder, args[4], bits, 64))
        return builder.bitcast(reached, ir.IntType(64))

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
        lane, size = context.get_data_type(like), ir.Constant(ir.IntType(64), count.literal_value)
        with builder.goto_entry_block():  # numba's own way fills it, a store per word: minutes of compiling
            room = builder.alloca(ir.ArrayType(lane, count.literal_value))
        room.align = 64
        width = ir.Constant(ir.IntType(64), context.get_abi_sizeof(lane))
        array = context.make_array(form)(context, builder)
        _arrays.populate_array(
            array,
            data=builder.bitcast(room, array.data.type),
            shape=cgutils.pack_array(builder, [size]),
            strides=cgutils.pack_array(builder, [width]),
            itemsize=width,
            meminfo=None,
        )
        return array._getvalue()

    return form(count, like), build

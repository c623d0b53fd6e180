"""A byte for the step of every word."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from weightcast.shared.base.elements import ByteArray, WordKind, Words
from weightcast.shared.kernels.compiler import I64, U64, frozen, intrinsic, kernel, types, unwritable
from weightcast.shared.kernels.parallel import scratch
from weightcast.shared.kernels.vectors import (
    FLOATS,
    HALF,
    LOW,
    SIGN,
    Lanes,
    excess,
    facts,
    ordinal,
    reaching64,
    set_bits,
    step_between,
    trailing_zeros,
    word_of,
)

_COUNT = 64


@intrinsic
def step_bytes64(typing, old, new, at, kind, out):
    """Bytes of the steps of 64 words from `at` on. Bit j of the result: step j does not fit
    into a byte. `kind`: as `facts`."""

    def build(context, builder, signature, args):
        lanes = _Lanes(context, builder, signature.args, args, old.dtype.bitwidth)
        before, after = (lanes.ordinal(lanes.read(n, old.dtype.bitwidth)) for n in (0, 1))
        step = builder.sub(after, before)
        signs = builder.and_(builder.xor(after, before), builder.xor(after, step))
        unheld = builder.and_(lanes.negative(signs), lanes.fact(FLOATS))  # integers wrap
        twice = builder.xor(builder.shl(step, lanes.each(1)), lanes.negative(step))
        wide = builder.or_(twice, unheld)
        longer = builder.icmp_unsigned(">=", wide, lanes.each(_LONG))
        lanes.write(4, builder.select(longer, lanes.each(_LONG), wide), 8)
        return builder.bitcast(longer, ir.IntType(_COUNT))

    return types.uint64(old, new, types.int64, kind, out), build


@intrinsic
def add_steps64(typing, old, steps, at, kind, new):
    """The way back. Returns bits of longer steps, whose words stay, and of those that lead to no word."""

    def build(context, builder, signature, args):
        lanes = _Lanes(context, builder, signature.args, args, old.dtype.bitwidth)
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
        found = [builder.bitcast(mask, ir.IntType(_COUNT)) for mask in (longer, over)]
        return context.make_tuple(builder, signature.return_type, found)

    return types.UniTuple(types.uint64, 2)(old, steps, types.int64, kind, new), build


class _Lanes(Lanes):
    """Lanes as wide as the words."""

    def __init__(self, context: Any, builder: Any, kinds: Any, args: Any, bits: int) -> None:
        super().__init__(context, builder, kinds, args, _COUNT, bits, 2, 3)

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

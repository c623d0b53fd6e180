"""Lanes of vectors moved under a mask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llvmlite import binding, ir

from weightcast.shared.digest.native import (
    cgutils,
    chosen_features,
    intrinsic,
    types,
)
from weightcast.shared.digest.native_ops import (
    address,
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

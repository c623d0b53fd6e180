"""Steps of 16 words at a time, in vectors as wide as the machine has them."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from weightcast.shared.codec.native_ordinals import FLOATS, HALF, LOW, MASK, SHIFT, SIGN
from weightcast.shared.digest.native import address, intrinsic, repeated, types

_COUNT = 16
_OLD, _NEW, _AT, _KIND, _MAGNITUDE, _EXPONENTS = range(6)


@intrinsic
def split16(typing: Any, old: Any, new: Any, at: Any, kind: Any, magnitude: Any, exponents: Any) -> Any:
    """|step| - 1 from old[i] to new[i] and the exponent of old[i], for 16 words from `at` on. Returns their
    signs as bits, 1 for a step down. `kind`: as `native_ordinals.facts`."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        split = _Split(context, builder, signature.args, args)
        step = split.step()
        down = builder.icmp_signed("<", step, split.each(0))
        length = builder.select(down, builder.not_(step), builder.sub(step, split.each(1)))
        split.store(_MAGNITUDE, length, 32)
        split.store(_EXPONENTS, split.exponent(), 8)
        return builder.zext(builder.bitcast(down, ir.IntType(_COUNT)), ir.IntType(64))

    return types.uint64(old, new, types.int64, kind, magnitude, exponents), build


class _Split:
    """16 old and 16 new words in lanes that hold any step between them."""

    def __init__(self, context: Any, builder: Any, kinds: Any, args: Any) -> None:
        self._context, self._builder, self._kinds, self._args = context, builder, kinds, args
        self._word = kinds[_OLD].dtype.bitwidth
        self._bits = 64 if self._word == 32 else 32
        self._lanes = ir.VectorType(ir.IntType(self._bits), _COUNT)
        self._before, self._after = self._loaded(_OLD), self._loaded(_NEW)

    def each(self, value: int) -> Any:
        return ir.Constant(self._lanes, [value] * _COUNT)

    def _fact(self, number: int) -> Any:
        value = self._builder.extract_value(self._args[_KIND], number)
        return repeated(self._builder, value, self._bits, _COUNT)

    def _place(self, number: int, bits: int) -> Any:
        builder = self._builder
        offset = builder.mul(self._args[_AT], ir.Constant(ir.IntType(64), bits // 8))
        start = address(self._context, builder, self._kinds[number], self._args[number], offset, 8)
        return builder.bitcast(start, ir.VectorType(ir.IntType(bits), _COUNT).as_pointer())

    def _loaded(self, number: int) -> Any:
        return self._builder.zext(self._builder.load(self._place(number, self._word), align=1), self._lanes)

    def store(self, number: int, values: Any, bits: int) -> None:
        lanes = ir.VectorType(ir.IntType(bits), _COUNT)
        narrow = values if bits == self._bits else self._builder.trunc(values, lanes)
        self._builder.store(narrow, self._place(number, bits), align=1)

    def _ordinal(self, words: Any) -> Any:
        builder = self._builder
        signed = builder.icmp_unsigned("!=", builder.and_(words, self._fact(SIGN)), self.each(0))
        return builder.xor(builder.and_(words, self._fact(LOW)), builder.sext(signed, self._lanes))

    def step(self) -> Any:
        """Of floats as it is, of integers modulo their width."""
        builder, half = self._builder, self._fact(HALF)
        step = builder.sub(self._ordinal(self._after), self._ordinal(self._before))
        kept = builder.or_(self._fact(LOW), self._fact(FLOATS))
        return builder.sub(builder.and_(builder.add(step, half), kept), half)

    def exponent(self) -> Any:
        return self._builder.and_(self._builder.lshr(self._before, self._fact(SHIFT)), self._fact(MASK))

"""Step bytes of 64 words at a time, in lanes as wide as a word: vectors hold the more of them."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from weightcast.shared.codec.native_ordinals import FLOATS, LOW, SIGN
from weightcast.shared.digest.native import address, intrinsic, repeated, types

_COUNT = 64
_LONG = 255


@intrinsic
def step_bytes64(typing: Any, old: Any, new: Any, at: Any, kind: Any, out: Any) -> Any:
    """Bytes of the steps of 64 words from `at` on. Bit j of what is returned: step j is longer than a byte
    says. `kind`: as `native_ordinals.facts`."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = _Lanes(context, builder, signature.args, args, old.dtype.bitwidth, args[3])
        before, after = (lanes.ordinal(lanes.load(n)) for n in (0, 1))
        step = builder.sub(after, before)
        signs = builder.and_(builder.xor(after, before), builder.xor(after, step))
        unheld = builder.and_(lanes.negative(signs), lanes.fact(FLOATS))  # integers wrap
        twice = builder.xor(builder.shl(step, lanes.each(1)), lanes.negative(step))
        wide = builder.or_(twice, unheld)
        longer = builder.icmp_unsigned(">=", wide, lanes.each(_LONG))
        lanes.store(4, builder.select(longer, lanes.each(_LONG), wide), 8)
        return builder.bitcast(longer, ir.IntType(_COUNT))

    return types.uint64(old, new, types.int64, kind, out), build


@intrinsic
def add_steps64(typing: Any, old: Any, steps: Any, at: Any, kind: Any, new: Any) -> Any:
    """The way back. Returns bits of longer steps, whose words stay, and of those that lead to no word."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = _Lanes(context, builder, signature.args, args, old.dtype.bitwidth, args[3])
        twice = lanes.load(1, 8)
        longer = builder.icmp_unsigned("==", twice, lanes.each(_LONG))
        down = builder.sub(lanes.each(0), builder.and_(twice, lanes.each(1)))
        length = builder.xor(builder.lshr(twice, lanes.each(1)), down)
        step = builder.select(longer, lanes.each(0), length)
        before = lanes.ordinal(lanes.load(0))
        moved = builder.add(before, step)
        signs = builder.and_(builder.xor(moved, before), builder.xor(moved, step))
        over = builder.icmp_signed("<", builder.and_(signs, lanes.fact(FLOATS)), lanes.each(0))
        below = builder.and_(lanes.negative(moved), lanes.fact(FLOATS))
        number = builder.and_(builder.xor(moved, below), lanes.fact(LOW))
        lanes.store(4, builder.or_(number, builder.and_(below, lanes.fact(SIGN))), old.dtype.bitwidth)
        found = [builder.bitcast(mask, ir.IntType(_COUNT)) for mask in (longer, over)]
        return context.make_tuple(builder, signature.return_type, found)

    return types.UniTuple(types.uint64, 2)(old, steps, types.int64, kind, new), build


class _Lanes:
    """`bits`: of a word, and of a lane."""

    def __init__(self, context: Any, builder: Any, kinds: Any, args: Any, bits: int, kind: Any) -> None:
        self._context, self._builder, self._kinds, self._args = context, builder, kinds, args
        self._bits, self._kind = bits, kind
        self._form = ir.VectorType(ir.IntType(bits), _COUNT)

    def each(self, value: int) -> Any:
        return ir.Constant(self._form, [value] * _COUNT)

    def fact(self, number: int) -> Any:
        value = self._builder.extract_value(self._kind, number)
        return repeated(self._builder, value, self._bits, _COUNT)

    def _place(self, number: int, bits: int) -> Any:
        builder = self._builder
        offset = builder.mul(self._args[2], ir.Constant(ir.IntType(64), bits // 8))
        start = address(self._context, builder, self._kinds[number], self._args[number], offset, 8)
        return builder.bitcast(start, ir.VectorType(ir.IntType(bits), _COUNT).as_pointer())

    def load(self, number: int, bits: int = 0) -> Any:
        """Of `bits` each in memory; 0: words."""
        loaded = self._builder.load(self._place(number, bits or self._bits), align=1)
        return self._builder.zext(loaded, self._form) if 0 < bits < self._bits else loaded

    def store(self, number: int, values: Any, bits: int) -> None:
        narrow = ir.VectorType(ir.IntType(bits), _COUNT)
        kept = values if bits == self._bits else self._builder.trunc(values, narrow)
        self._builder.store(kept, self._place(number, bits), align=1)

    def negative(self, values: Any) -> Any:
        """All bits of a lane whose number is negative."""
        return self._builder.ashr(values, self.each(self._bits - 1))

    def ordinal(self, words: Any) -> Any:
        """A float's sign is its word's highest bit, so that an ordinal fits into as many bits."""
        signed = self._builder.and_(self.negative(words), self.fact(FLOATS))
        return self._builder.xor(self._builder.and_(words, self.fact(LOW)), signed)

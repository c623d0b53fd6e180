"""Changed words listed, and runs of words copied, 16 at a time: for where many change."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from weightcast.shared.codec.native_masked import machine_has
from weightcast.shared.digest.native import cgutils, intrinsic, types
from weightcast.shared.digest.native_ops import address

_COUNT = 16
_NUMBER, _WORD = ir.IntType(32), ir.IntType(64)
_LANES = ir.VectorType(_NUMBER, _COUNT)
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
        builder, lanes = self._builder, ir.VectorType(ir.IntType(self._bits), _COUNT)
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
        count = builder.ctpop(builder.bitcast(mask, ir.IntType(_COUNT)))
        return builder.add(self._args[_FOUND], builder.zext(count, _WORD))

    def _positions(self) -> Any:
        builder = self._builder
        first = builder.trunc(self._args[_AT], _NUMBER)
        single = builder.insert_element(ir.Constant(_LANES, ir.Undefined), first, ir.Constant(_NUMBER, 0))
        each = builder.shuffle_vector(single, single, ir.Constant(_LANES, [0] * _COUNT))
        return builder.add(each, ir.Constant(_LANES, list(range(_COUNT))))

    def _keep(self, array: int, words: Any, mask: Any, bits: int) -> None:
        """Stores all lanes: storing only those that count is slow on some machines."""
        builder = self._builder
        wide = words if bits == 32 else builder.zext(words, _LANES)
        form = ir.FunctionType(_LANES, [_LANES, _LANES, mask.type])
        compress = cgutils.get_or_insert_function(
            builder.module, form, "llvm.x86.avx512.mask.compress.v16i32"
        )
        moved = builder.call(compress, [wide, ir.Constant(_LANES, [0] * _COUNT), mask])
        lanes = ir.VectorType(ir.IntType(bits), _COUNT)
        narrow = moved if bits == 32 else builder.trunc(moved, lanes)
        place = self._place(array, self._args[_FOUND], bits)
        builder.store(narrow, builder.bitcast(place, lanes.as_pointer()), align=1)

    def one_by_one(self) -> Any:
        """Without branches: each is written, and written over unless it differs."""
        builder, found = self._builder, self._args[_FOUND]
        for lane in range(_COUNT):
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
        lanes, width = ir.VectorType(ir.IntType(bits), _COUNT), ir.Constant(_WORD, bits // 8)
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

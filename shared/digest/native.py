"""The one door to numba: how kernels are compiled, and the machine operations it has no word for.

Bit code is uint64 throughout: numba makes a float64 of int64 with uint64. Importing this module raises
ImportError where numba is missing. After a change here, touch the files with kernels: theirs stay cached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., Any])
Scalar = TypeVar("Scalar", bound=np.generic)

U64: Any = np.uint64
I64: Any = np.int64


def kernel(function: Function) -> Function:
    """Compiled at first call, without the GIL; kept on disk where a place for it can be written."""
    try:
        return cast(Function, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:  # numba found no directory for its cache
        return cast(Function, numba.njit(nogil=True)(function))


def inlined(function: Function) -> Function:
    """A piece of kernels: compiled into each of them."""
    return cast(Function, numba.njit(inline="always")(function))


def unwritable(data: NDArray[Scalar]) -> NDArray[Scalar]:
    """A contiguous read-only view. Every input goes through it: of one type each, kernels compile once."""
    view = np.ascontiguousarray(data).view()
    view.flags.writeable = False
    return view


def frozen(data: NDArray[Any]) -> NDArray[np.uint8]:
    """The read-only bytes of `data`, which any alignment allows."""
    return unwritable(np.ascontiguousarray(data).view(np.uint8))


def _address(context: Any, builder: Any, array_type: Any, array: Any, offset: Any, bits: int) -> Any:
    start = builder.bitcast(
        context.make_array(array_type)(context, builder, array).data, ir.IntType(8).as_pointer()
    )
    return builder.bitcast(builder.gep(start, [offset]), ir.IntType(bits).as_pointer())


@intrinsic  # type: ignore[untyped-decorator]
def load64(typing: Any, data: Any, offset: Any) -> Any:
    """The little-endian 8 bytes at `offset` of a byte array, aligned or not. The caller keeps the bounds."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _address(context, builder, signature.args[0], args[0], args[1], 64)
        return builder.load(place, align=1)

    return types.uint64(data, types.int64), build


@intrinsic  # type: ignore[untyped-decorator]
def store64(typing: Any, data: Any, offset: Any, value: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _address(context, builder, signature.args[0], args[0], args[1], 64)
        builder.store(args[2], place, align=1)
        return context.get_dummy_value()

    return types.none(data, types.int64, types.uint64), build


@intrinsic  # type: ignore[untyped-decorator]
def trailing_zeros(typing: Any, value: Any) -> Any:
    """Of a uint64; 64 for zero."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), build


@intrinsic  # type: ignore[untyped-decorator]
def differing64(typing: Any, one: Any, other: Any, first: Any) -> Any:
    """Bit j says whether word first + j differs in two contiguous arrays of the same unsigned dtype."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = signature.args[0].dtype.bitwidth
        lanes = ir.VectorType(ir.IntType(bits), 64)
        offset = builder.mul(args[2], ir.Constant(ir.IntType(64), bits // 8))

        def load(number: int) -> Any:
            start = _address(context, builder, signature.args[number], args[number], offset, 8)
            return builder.load(builder.bitcast(start, lanes.as_pointer()), align=1)

        return builder.bitcast(builder.icmp_unsigned("!=", load(0), load(1)), ir.IntType(64))

    return types.uint64(one, other, types.int64), build

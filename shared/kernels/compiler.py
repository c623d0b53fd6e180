"""Compiles kernels; the only module that imports numba, and only when something has to be compiled.

Bit code is uint64 throughout: numba turns int64 with uint64 into float64. Importing this module raises
ImportError if numba is missing and the kernel cache is not complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from hashlib import blake2b
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import binding, ir
from numpy.typing import NDArray

from weightcast.shared.kernels.loader import DESTRUCTOR, XXH3, Code, Kernel, Store, cache_directory

Function = TypeVar("Function", bound=Callable[..., Any])
Scalar = TypeVar("Scalar", bound=np.generic)

U64: Any = np.uint64
I64: Any = np.int64

SHIFTS = {1: 3, 2: 2, 4: 1}
"""by bytes of an element: position >> shift is the number of its 8-byte word"""


class _Late:
    """A module that is imported when an attribute is read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)


types: Any = _Late("numba.core.types")
cgutils: Any = _Late("numba.core.cgutils")
_numba: Any = _Late("numba")
_extending: Any = _Late("numba.extending")
_arrays: Any = _Late("numba.np.arrayobj")

_SETTINGS = (
    "NUMBA_CPU_NAME",
    "NUMBA_CPU_FEATURES",
    "NUMBA_OPT",
    "NUMBA_LOOP_VECTORIZE",
    "NUMBA_SLP_VECTORIZE",
)


def _cpu() -> str:
    settings = " ".join(f"{name}={os.environ[name]}" for name in _SETTINGS if name in os.environ)
    versions = f"{version('numba')} {version('llvmlite')} {settings}"
    return f"{versions} {binding.get_host_cpu_name()} {binding.get_host_cpu_features().flatten()}"


def processor() -> str:
    """LLVM's name of the CPU that kernels are compiled for."""
    return os.environ.get("NUMBA_CPU_NAME") or cast(str, binding.get_host_cpu_name())


def on_zen() -> bool:
    """Whether it is an AMD Zen, which prefers another prefetch pattern."""
    return processor().startswith("znver")


if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
    raise ImportError("NUMBA_DISABLE_JIT is set")
CACHE: Path | None = cache_directory(os.environ, _cpu())
"""where compiled kernels are stored; None: every process compiles them"""
STORE = Store(CACHE)
if not STORE.complete:
    import_module("numba")  # a missing compiler fails here, not in the middle of a version


def chosen_features() -> str | None:
    """CPU features that the user set, if any."""
    return cast("str | None", _numba.config.CPU_FEATURES)


class KernelPart:
    """Code that kernels call; passed to numba when one of them is compiled."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._made = make, None

    @property
    def numba(self) -> Any:
        if self._made is None:
            self._made = self._make()
        return self._made


_RULES: dict[Any, KernelPart] = {}


def kernel(function: Function, store: Store = STORE) -> Function:
    """Compiled at first call, stored in the cache, called without the GIL. Takes arrays, integers, truth
    values and tuples of integers; must not allocate arrays (`on_stack` instead)."""
    made = KernelPart(
        lambda: _numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)(_resolved(function))
    )
    return cast(Function, Kernel(function, store, made, lambda arguments: _compiled(made.numba, arguments)))


def inlined(function: Function) -> Function:
    """Compiled into each kernel that calls it."""
    return cast(Function, KernelPart(lambda: _numba.njit(inline="always")(_resolved(function))))


def rule(function: Function) -> Function:
    """A plain Python function that kernels may call too."""
    _RULES[function] = KernelPart(lambda: _numba.njit(_resolved(function)))
    return function


def intrinsic(function: Callable[..., Any], *, prefer_literal: bool = False) -> Any:
    return KernelPart(lambda: _extending.intrinsic(prefer_literal=prefer_literal)(function))


def _resolved(function: Any) -> Any:
    """The function with globals that numba knows in place of ours."""
    names = dict(function.__globals__)
    for name in function.__code__.co_names:
        value = names.get(name)
        if isinstance(value, Kernel):
            names[name] = value.source.numba
        elif isinstance(value, KernelPart):
            names[name] = value.numba
        elif isinstance(value, FunctionType) and value in _RULES:
            names[name] = _RULES[value].numba
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    return made


_LETTERS = {"none": "", "bool": "?", "int64": "q", "uint64": "Q", "int32": "i", "uint32": "I", "uint8": "B"}
_PROVIDED = frozenset((DESTRUCTOR, XXH3, "memcpy", "memmove", "memset"))
"""symbols that object code may refer to"""


def _compiled(dispatcher: Any, arguments: tuple[Any, ...]) -> Code:
    """Object code for arguments of these types. Raises ImportError for symbols that no process has."""
    entry = _numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)(
        _entry(dispatcher, tuple(_numba.typeof(value) for value in arguments))
    )
    entry.compile((types.int64,))
    (made,) = entry.overloads.values()
    declared = {function.name for function in made.library._final_module.functions if function.is_declaration}
    missing = [name for name in declared - _PROVIDED if not name.startswith("llvm.")]
    if missing:
        raise ImportError(f"kernel {dispatcher.__name__} needs {', '.join(sorted(missing))}")
    returned = made.signature.return_type
    parts = list(returned) if isinstance(returned, types.BaseTuple) else [returned]
    letters = "".join(_LETTERS[str(part)] for part in parts)
    return Code(made.fndesc.llvm_func_name, letters, made.library._get_compiled_object())


def _entry(dispatcher: Any, kinds: tuple[Any, ...]) -> Callable[[Any], Any]:
    """A function of the address of int64 words, from which it calls the kernel. As `loader` describes."""

    def called(typing: Any, words: Any) -> Any:
        kernel = types.Dispatcher(dispatcher)
        signature = kernel.get_call_type(typing, kinds, {})

        def build(context: Any, builder: Any, _: Any, args: Any) -> Any:
            place = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
            count = iter(range(1 << 10))
            values = [_argument(context, builder, kind, place, count) for kind in kinds]
            return context.get_function(kernel, signature)(builder, values)

        return signature.return_type(types.int64), build

    call = _extending.intrinsic(called)

    def entry(words: Any) -> Any:
        return call(words)

    function = dispatcher.py_func
    text = f"{function.__module__}.{function.__qualname__}{kinds}"
    # the symbol's name: object code of several processes is loaded into one
    entry.__name__ = entry.__qualname__ = f"entry_{blake2b(text.encode(), digest_size=16).hexdigest()}"
    return entry


def _argument(context: Any, builder: Any, kind: Any, place: Any, count: Iterator[int]) -> Any:
    """Inside an intrinsic: the next argument from the words at `place`."""

    def word() -> Any:
        return builder.load(builder.gep(place, [ir.Constant(ir.IntType(64), next(count))]))

    if isinstance(kind, types.BaseTuple):
        members = [_argument(context, builder, part, place, count) for part in kind]
        return context.make_tuple(builder, kind, members)
    if isinstance(kind, types.Array):
        start = builder.inttoptr(word(), ir.IntType(8).as_pointer())
        return array_at(context, builder, kind, start, [word() for _ in range(kind.ndim)])
    return context.cast(builder, word(), types.int64, kind)


def array_at(context: Any, builder: Any, kind: Any, start: Any, sides: list[Any]) -> Any:
    """Inside an intrinsic: a contiguous array of type `kind` over memory that it does not own, from
    pointer `start` on. `sides`: int64 each."""
    width = ir.Constant(ir.IntType(64), context.get_abi_sizeof(context.get_data_type(kind.dtype)))
    strides = [width]
    for side in reversed(sides[1:]):
        strides.insert(0, builder.mul(strides[0], side))
    array = context.make_array(kind)(context, builder)
    _arrays.populate_array(
        array,
        data=builder.bitcast(start, array.data.type),
        shape=cgutils.pack_array(builder, sides),
        strides=cgutils.pack_array(builder, strides),
        itemsize=width,
        meminfo=None,
    )
    return array._getvalue()


def unwritable(data: NDArray[Scalar]) -> NDArray[Scalar]:
    """A contiguous read-only view. Every input goes through it: of one type each, kernels compile once."""
    view = np.ascontiguousarray(data).view()
    view.flags.writeable = False
    return view


def frozen(data: NDArray[Any]) -> NDArray[np.uint8]:
    """The read-only bytes of `data`, which any alignment allows."""
    return unwritable(np.ascontiguousarray(data).view(np.uint8))

"""The one door to numba: how kernels are compiled, and the machine operations it has no word for.

Bit code is uint64 throughout: numba makes a float64 of int64 with uint64. Importing this module raises
ImportError where numba is missing. numba itself is imported when something is to be compiled.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import binding
from numpy.typing import NDArray

from weightcast.shared.kernels.loader import (
    Code,
    Kernel,
    Store,
    cache_directory,
    environment_of,
    undefined_symbols,
)

Function = TypeVar("Function", bound=Callable[..., Any])
Scalar = TypeVar("Scalar", bound=np.generic)

U64: Any = np.uint64
I64: Any = np.int64

SHIFTS = {1: 3, 2: 2, 4: 1}
"""by bytes of a word: position >> shift is the 8-byte word that holds it"""


class _Late:
    """A module that is imported when something of it is used."""

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
    versions = f"{version('numba')} {version('llvmlite')} {environment_of(_SETTINGS)}"
    return f"{versions} {binding.get_host_cpu_name()} {binding.get_host_cpu_features().flatten()}"


def processor() -> str:
    """That kernels are compiled for, by LLVM's name."""
    return os.environ.get("NUMBA_CPU_NAME") or cast(str, binding.get_host_cpu_name())


def on_zen() -> bool:
    """Whether that is one of AMD's, whose memory wants to be asked otherwise than others'."""
    return processor().startswith("znver")


if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
    raise ImportError("NUMBA_DISABLE_JIT is set")
CACHE: Path | None = cache_directory(os.environ, _cpu())
"""where compiled kernels are kept; None: nowhere, they are compiled by every process"""
STORE = Store(CACHE)
if not STORE.complete:
    import_module("numba")  # a compiler that is missing is found here and not in the midst of a version


def chosen_features() -> str | None:
    """Of the machine that is compiled for, where the user named them."""
    return cast("str | None", _numba.config.CPU_FEATURES)


class KernelPart:
    """Something that kernels call: known to numba only when one of them is compiled."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._made = make, None

    @property
    def numba(self) -> Any:
        if self._made is None:
            self._made = self._make()
        return self._made


_RULES: dict[Any, KernelPart] = {}


def kernel(function: Function, store: Store = STORE) -> Function:
    """Compiled at first call, called without the GIL; kept on disk where there is a place for it. It may be
    given arrays, integers, truth values and tuples of integers, and must not make arrays (`on_stack`)."""
    made = KernelPart(
        lambda: _numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)(_resolved(function))
    )
    return cast(Function, Kernel(function, store, made, lambda arguments: _compiled(made.numba, arguments)))


def inlined(function: Function) -> Function:
    """A piece of kernels: compiled into each of them."""
    return cast(Function, KernelPart(lambda: _numba.njit(inline="always")(_resolved(function))))


def rule(function: Function) -> Function:
    """A plain function that kernels may call; for others it stays as it is."""
    _RULES[function] = KernelPart(lambda: _numba.njit(_resolved(function)))
    return function


def intrinsic(function: Callable[..., Any]) -> Any:
    return KernelPart(lambda: _extending.intrinsic(function))


def _resolved(function: Any) -> Any:
    """The function with numba's things in the places of ours."""
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


def _compiled(dispatcher: Any, arguments: tuple[Any, ...]) -> Code:
    """Object code for arguments like those given."""
    kinds = tuple(_numba.typeof(value) for value in arguments)
    dispatcher.compile(kinds)
    made = dispatcher.overloads[kinds]
    code = made.library._get_compiled_object()
    returned = made.signature.return_type
    parts = list(returned) if isinstance(returned, types.BaseTuple) else [returned]
    letters = "".join(_LETTERS[str(part)] for part in parts)
    return Code(made.fndesc.llvm_func_name, letters, tuple(undefined_symbols(code)), code)


def unwritable(data: NDArray[Scalar]) -> NDArray[Scalar]:
    """A contiguous read-only view. Every input goes through it: of one type each, kernels compile once."""
    view = np.ascontiguousarray(data).view()
    view.flags.writeable = False
    return view


def frozen(data: NDArray[Any]) -> NDArray[np.uint8]:
    """The read-only bytes of `data`, which any alignment allows."""
    return unwritable(np.ascontiguousarray(data).view(np.uint8))

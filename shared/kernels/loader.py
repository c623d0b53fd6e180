"""Compiled kernels without their compiler: stored as object code, loaded by llvmlite, called through ctypes.

Importing numba takes longer than most commands (docs/adr/0020), so it is imported only to compile what the
cache lacks. A kernel is stored with its entry, int32 entry(result *, error **, int64 words *), which reads
the arguments from `words`: a number or truth value as itself, a tuple as its members, a contiguous array as
its address and sides. Kernels must not allocate; `vectors.on_stack` makes arrays.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import secrets
import stat
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.files.paths import exists

CACHE_VARIABLE = "WEIGHTCAST_CACHE"
COMPLETE = "complete"
"""an empty file in the cache: it holds everything that `warm_up` needs"""


def cache_directory(environment: Mapping[str, str], cpu: str) -> Path | None:
    """The first usable of $WEIGHTCAST_CACHE, $XDG_CACHE_HOME/weightcast, ~/.cache/weightcast and this user's
    directory in the temporary directory; created if missing. None if none is usable. The files are code that
    will run, so nobody else may have write access. A complete cache may be read-only, as in an image.
    `cpu`: name and features."""
    return private_directory(environment, f"kernels-{key(cpu)}")


def private_directory(environment: Mapping[str, str], name: str) -> Path | None:
    """As `cache_directory`, under this name."""
    for place in _places(environment):
        try:
            found = _private(place / name)
        except OSError:
            continue
        if found is not None:
            return found
    return None


def key(cpu: str) -> str:
    """Changes with the CPU and with every source file of kernels: a kernel may call any other."""
    text = hashlib.blake2b(cpu.encode(), digest_size=8)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        text.update(source.name.encode() + b"\0" + source.read_bytes())
    return text.hexdigest()


def _places(environment: Mapping[str, str]) -> Iterator[Path]:
    if environment.get(CACHE_VARIABLE):
        yield Path(environment[CACHE_VARIABLE])
    if environment.get("XDG_CACHE_HOME"):
        yield Path(environment["XDG_CACHE_HOME"]) / "weightcast"
    if environment.get("HOME"):
        yield Path(environment["HOME"]) / ".cache" / "weightcast"
    yield Path(tempfile.gettempdir()) / f"weightcast-{os.getuid()}"


def _private(directory: Path) -> Path | None:
    """Checks the parent too: who may write there can replace the directory."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for one in (directory.parent, directory):
        found = one.lstat()
        foreign = found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if foreign or not stat.S_ISDIR(found.st_mode):
            return None
    if os.access(directory, os.W_OK | os.X_OK):
        return directory
    return directory if exists(directory / COMPLETE) else None


_MAGIC = b"wckernl2"
_HEAD = struct.Struct("<8s16sI")
"""magic, BLAKE2b-128 of what follows, bytes of the facts"""


@dataclass(frozen=True)
class Code:
    """`returns`: results in the letters of `struct`."""

    symbol: str
    returns: str
    code: bytes


class Store:
    """Object code on disk, a file per kernel and argument types. Damaged files count as missing."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self.problem = ""
        """why something could not be stored"""

    def _path(self, directory: Path, name: str) -> Path:
        return directory / f"{blake2b(name.encode(), digest_size=16).hexdigest()}.kernel"

    def get(self, name: str) -> Code | None:
        if self.directory is None:
            return None
        try:
            return _unpacked(self._path(self.directory, name).read_bytes())
        except OSError:
            return None

    def put(self, name: str, code: Code) -> None:
        if self.directory is None:
            return
        path = self._path(self.directory, name)
        temporary = path.with_suffix(f".{secrets.token_hex(4)}.tmp")
        try:
            temporary.write_bytes(_packed(code))
            temporary.rename(path)
        except OSError as error:  # disk full or read-only: the next process compiles it again
            self.problem = f"{self.directory}: {error.strerror}"
            with contextlib.suppress(OSError):
                temporary.unlink()

    @property
    def complete(self) -> bool:
        """Whether everything that `warm_up` needs is stored."""
        return self.directory is not None and exists(self.directory / COMPLETE)

    def completed(self) -> None:
        if self.directory is None or self.problem or self.complete:
            return
        try:
            (self.directory / COMPLETE).touch()
        except OSError as error:
            self.problem = f"{self.directory}: {error.strerror}"


def _packed(code: Code) -> bytes:
    facts = json.dumps([code.symbol, code.returns]).encode()
    body = facts + code.code
    return _HEAD.pack(_MAGIC, blake2b(body, digest_size=16).digest(), len(facts)) + body


def _unpacked(data: bytes) -> Code | None:
    if len(data) < _HEAD.size:
        return None
    magic, digest, length = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if magic != _MAGIC or blake2b(body, digest_size=16).digest() != digest:
        return None
    symbol, returns = json.loads(body[:length])
    return Code(symbol, returns, body[length:])


_Entry = Callable[[int, int, int], int]
_ENTRY = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t)
DESTRUCTOR = "NRT_MemInfo_call_dtor"
"""frees an array that a kernel allocated: referred to, and never called"""
XXH3 = "XXH3_64bits"
"""a function of the xxhash library that kernels call: Python's calls of it take longer than short records"""


@cache
def _engine() -> Any:
    # llvmlite takes 35 ms, and help needs no kernel
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    if binding.address_of_symbol(DESTRUCTOR) is None:
        binding.add_symbol(DESTRUCTOR, ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value)
    library = ctypes.CDLL(import_module("xxhash._xxhash").__file__)
    binding.add_symbol(XXH3, ctypes.cast(library[XXH3], ctypes.c_void_p).value)
    machine = binding.Target.from_default_triple().create_target_machine()
    return binding.create_mcjit_compiler(binding.parse_assembly(""), machine)


_LOCK = threading.RLock()
"""held while kernels are compiled and loaded"""

Compile = Callable[[tuple[Any, ...]], Code]
"""Object code for arguments of these types."""


class Kernel:
    """A function that is compiled at its first call with new argument types, and called without the GIL.
    Arrays must be contiguous."""

    def __init__(self, function: Callable[..., Any], store: Store, source: Any, compiler: Compile) -> None:
        """`source`: what kernels that call this one get in its place."""
        self.source = source
        self._function, self._store, self._compiler = function, store, compiler
        self._loaded: dict[tuple[Any, ...], _Loaded] = {}
        self._known: dict[tuple[Any, ...], _Loaded] = {}
        """by `_key`; several keys may share a kind"""

    def __call__(self, *arguments: Any) -> Any:
        key = tuple(map(_key, arguments))
        loaded = self._known.get(key)
        if loaded is None:
            loaded = self._known[key] = self._load(tuple(map(_kind, arguments)), arguments)
        return loaded(arguments)

    def _load(self, kinds: tuple[Any, ...], arguments: tuple[Any, ...]) -> _Loaded:
        with _LOCK:
            if kinds not in self._loaded:
                name = f"{self._function.__module__}.{self._function.__qualname__}{kinds}"
                code = self._store.get(name)
                if code is None:
                    code = self._compiler(arguments)
                    self._store.put(name, code)
                self._loaded[kinds] = _Loaded(self._function.__name__, code, arguments)
            return self._loaded[kinds]


def _key(value: Any) -> Any:
    """As `_kind`, at a fraction of its price: every call needs it."""
    if type(value) is np.ndarray:
        return value.dtype, value.ndim, value.flags.num
    return (tuple, len(value)) if isinstance(value, tuple) else type(value)


def _kind(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        flags = value.flags
        if not flags.c_contiguous:
            raise ValueError("kernels take contiguous arrays only")
        return value.dtype.str, value.ndim, flags.writeable, flags.aligned
    return ("tuple", len(value)) if isinstance(value, tuple) else type(value).__name__


_RESULT_WORDS = 4
"""8-byte words before the arguments: the error's address, then room for what a kernel returns"""
_DONE = (0, -2)
"""success, with a value or with None"""


class _Loaded:
    """Created while `_LOCK` is held."""

    def __init__(self, name: str, code: Code, arguments: tuple[Any, ...]) -> None:
        self._name = name
        self._returns = struct.Struct(code.returns)
        if self._returns.size > 8 * (_RESULT_WORDS - 1):
            raise ImportError(f"kernel {name} returns {self._returns.size} bytes: too much")
        self._words = struct.Struct(f"{8 * _RESULT_WORDS}x{''.join(map(_letters, arguments))}")
        from llvmlite import binding

        engine = _engine()
        engine.add_object_file(binding.object_file.ObjectFileRef.from_data(code.code))
        engine.finalize_object()
        self._entry: _Entry = _ENTRY(engine.get_function_address(code.symbol))

    def __call__(self, arguments: tuple[Any, ...]) -> Any:
        flat: list[int] = []
        for value in arguments:
            if isinstance(value, np.ndarray):
                flat += (_address(value), *value.shape)
            elif isinstance(value, tuple):
                flat += value
            else:
                flat.append(int(value))
        words = ctypes.create_string_buffer(self._words.pack(*flat), self._words.size)
        at = ctypes.addressof(words)
        if self._entry(at + 8, at, at + 8 * _RESULT_WORDS) not in _DONE:
            raise RuntimeError(f"the kernel {self._name} failed")
        results = self._returns.unpack_from(words, 8)
        return results if len(results) > 1 else (results[0] if results else None)


def _letters(value: Any) -> str:
    """Letters of `struct` for what `_Loaded` passes."""
    if isinstance(value, np.ndarray):
        return "Q" + "q" * value.ndim
    if isinstance(value, tuple):
        return "q" * len(value)
    return "Q" if isinstance(value, np.unsignedinteger) else "q"


_OBJECT_BYTES = object.__basicsize__
_word_at = ctypes.c_size_t.from_address


def _first_field(array: NDArray[Any]) -> int:
    """Address of the array's data: the first field of numpy's C struct (`PyArrayObject_fields` in
    ndarraytypes.h). numpy's Python attribute for it takes ten times as long, a measurable part of a call."""
    return _word_at(id(array) + _OBJECT_BYTES).value


def _reported(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


_SAMPLES = (np.zeros(1), np.zeros((3, 2))[1:, 1], np.zeros(9, np.uint8)[5:])
_address = _first_field if all(_first_field(each) == _reported(each) for each in _SAMPLES) else _reported
"""the quick way if this interpreter and this numpy have the expected layout"""

"""Compiled kernels without their compiler: kept as object code, loaded by llvmlite, called through ctypes.

numba takes more than a second of every process to be imported and to read back what it compiled. What it
compiles is a plain function of numbers and addresses, so numba is imported only where a kernel is new.

Of a kernel with n arguments: int32 f(result *, error **, ...). An array is passed as two null pointers (its
owner, unused), its size, item size and address, then shape and strides in int64; a tuple as its members.
Kernels must not allocate: arrays of their own lie on the stack (`native.on_stack`).

ctypes takes longer for each argument than some kernels for a small chunk. It passes two addresses instead, to
a door made for the kinds of the arguments: int32 d(f, words), which loads what the kernel is called with.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import binding
from numpy.typing import NDArray

from weightcast.shared.files.paths import exists

CACHE_VARIABLE = "WEIGHTCAST_CACHE"
COMPLETE = "complete"
"""lies there when everything that warming up needs was kept"""


def cache_directory(environment: Mapping[str, str], cpu: str) -> Path | None:
    """The first place that can be used, made if need be: $WEIGHTCAST_CACHE, $XDG_CACHE_HOME/weightcast,
    ~/.cache/weightcast, a directory of this user in the temporary directory. None: there is no such place.
    The files are code that will run, so a directory counts only if nobody else may write to it.
    What lacks nothing need not be writable, as in an image that is mounted read-only. `cpu`: name and
    features."""
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
    """Changes with every source of a kernel: numba itself looks only at the file that holds the function, not
    at what that calls."""
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
    """Both the directory and the one above it: whoever may write there could put another in its place."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for one in (directory.parent, directory):
        found = one.lstat()
        foreign = found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if foreign or not stat.S_ISDIR(found.st_mode):
            return None
    if os.access(directory, os.W_OK | os.X_OK):
        return directory
    return directory if exists(directory / COMPLETE) else None


_MAGIC = b"wckernl1"
_HEAD = struct.Struct("<8s16sI")
"""magic, BLAKE2b-128 of what follows the head, bytes of the facts"""
_OF_C = frozenset(("memcpy", "memmove", "memset"))
_NEVER_CALLED = frozenset(("NRT_MemInfo_call_dtor",))
"""frees an array that a kernel allocated"""
_DONE = (0, -2)
"""what a function returns that ended well: with a value, with None"""


@dataclass(frozen=True)
class Code:
    """`returns`: results in the letters of `struct`; `needs`: symbols that the object does not define."""

    symbol: str
    returns: str
    needs: tuple[str, ...]
    code: bytes


class Store:
    """Object code on disk, a file for each kernel and kinds of arguments. What is damaged is not there."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self.problem = ""
        """why something could not be kept"""

    def _path(self, directory: Path, name: str) -> Path:
        return directory / f"{blake2b(name.encode(), digest_size=16).hexdigest()}.kernel"

    def get(self, name: str) -> Code | None:
        if self.directory is None:
            return None
        try:
            data = self._path(self.directory, name).read_bytes()
        except OSError:
            return None
        return _unpacked(data)

    def put(self, name: str, code: Code) -> None:
        if self.directory is None:
            return
        path = self._path(self.directory, name)
        temporary = path.with_suffix(f".{secrets.token_hex(4)}.tmp")
        try:
            temporary.write_bytes(_packed(code))
            temporary.rename(path)
        except OSError as error:  # a full disk, a read-only one: the next process compiles it again
            self.problem = f"{self.directory}: {error.strerror}"
            with contextlib.suppress(OSError):
                temporary.unlink()

    @property
    def complete(self) -> bool:
        """Whether everything that warming up needs was kept."""
        return self.directory is not None and exists(self.directory / COMPLETE)

    def completed(self) -> None:
        if self.directory is None or self.problem or self.complete:
            return
        try:
            (self.directory / COMPLETE).touch()
        except OSError as error:
            self.problem = f"{self.directory}: {error.strerror}"


def _packed(code: Code) -> bytes:
    facts = asdict(code)
    del facts["code"]
    text = json.dumps(facts).encode()
    body = text + code.code
    return _HEAD.pack(_MAGIC, blake2b(body, digest_size=16).digest(), len(text)) + body


def _unpacked(data: bytes) -> Code | None:
    if len(data) < _HEAD.size:
        return None
    magic, digest, length = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if magic != _MAGIC or blake2b(body, digest_size=16).digest() != digest:
        return None
    facts = json.loads(body[:length])
    return Code(facts["symbol"], facts["returns"], tuple(facts["needs"]), body[length:])


def undefined_symbols(code: bytes) -> list[str]:
    """Of an ELF-64 object, little-endian: names that others must define."""
    found: list[str] = []
    (sections,) = struct.unpack_from("<Q", code, 0x28)
    size, count = struct.unpack_from("<HH", code, 0x3A)
    heads = [struct.unpack_from("<IIQQQQII", code, sections + n * size) for n in range(count)]
    for _, kind, _, _, start, length, link, _ in heads:
        if kind == _SYMBOLS:
            names = heads[link][4]
            for at in range(start, start + length, _SYMBOL.size):
                name, _, _, section, _, _ = _SYMBOL.unpack_from(code, at)
                if name and section == 0:
                    found.append(code[names + name : code.index(b"\0", names + name)].decode())
    return found


_SYMBOLS = 2
"""type of a section of symbols"""
_SYMBOL = struct.Struct("<IBBHQQ")


class _Machine:
    """Where object code becomes functions of this process."""

    def __init__(self) -> None:
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        machine = binding.Target.from_default_triple().create_target_machine()
        self._engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
        self._library = ctypes.CDLL(None)
        self._doors: dict[_Shapes, Callable[[int, int], int]] = {}

    def load(self, code: Code) -> int:
        """The function's address. Raises ImportError for symbols that nobody has."""
        for name in code.needs:
            if name in _NEVER_CALLED and binding.address_of_symbol(name) is None:
                binding.add_symbol(name, ctypes.cast(self._library.abort, ctypes.c_void_p).value)
            elif name not in _OF_C | _NEVER_CALLED:
                raise ImportError(f"{code.symbol} needs {name}")
        self._engine.add_object_file(binding.object_file.ObjectFileRef.from_data(code.code))
        self._engine.finalize_object()
        return int(self._engine.get_function_address(code.symbol))

    def door(self, shapes: _Shapes) -> Callable[[int, int], int]:
        """d(f, words): calls the kernel at address `f` with what lies at address `words`."""
        if shapes not in self._doors:
            name = f"weightcast_door_{len(self._doors)}"
            typed = binding.llvm_version_info[0] < _FIRST_PLAIN_POINTERS
            self._engine.add_module(binding.parse_assembly(_door(name, shapes, typed=typed)))
            self._engine.finalize_object()
            address = self._engine.get_function_address(name)
            prototype = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_size_t, ctypes.c_size_t)
            self._doors[shapes] = prototype(address)
        return self._doors[shapes]


_RESULT_WORDS = 4
"""the error's address, and room for what a kernel returns"""
_FIRST_PLAIN_POINTERS = 16
"""release of LLVM in whose assembly pointers need not say to what"""


def _door(name: str, shapes: _Shapes, *, typed: bool) -> str:
    """LLVM assembly. `words`: int64s, of which the arguments follow behind the results."""
    body: list[str] = []
    passed = ["i64 %result", "i64 %words"]
    word_pointer = "i64*" if typed else "ptr"
    at = _RESULT_WORDS

    def loaded() -> str:
        nonlocal at
        body.append(f"%a{at} = add i64 %words, {8 * at}")
        body.append(f"%p{at} = inttoptr i64 %a{at} to {word_pointer}")
        body.append(f"%w{at} = load i64, {word_pointer} %p{at}")
        at += 1
        return f"%w{at - 1}"

    for shape in shapes:
        if isinstance(shape, str):
            word = loaded()
            if shape == "i8":
                body.append(f"{word}.8 = trunc i64 {word} to i8")
                word += ".8"
            passed.append(f"{shape} {word}")
            continue
        width, dimensions = shape
        size, address = loaded(), loaded()
        sides = [size] if dimensions == 1 else [loaded() for _ in range(dimensions)]
        strides = [str(width)] if dimensions == 1 else [loaded() for _ in range(dimensions)]
        passed += [f"i64 {each}" for each in (0, 0, size, width, address, *sides, *strides)]
    kinds = ", ".join(each.split()[0] for each in passed)
    lines = "\n  ".join(body)
    return f"""define i32 @{name}(i64 %kernel, i64 %words) {{
  %result = add i64 %words, 8
  {lines}
  %f = inttoptr i64 %kernel to {f"i32 ({kinds})*" if typed else "ptr"}
  %done = call i32 %f({", ".join(passed)})
  ret i32 %done
}}
"""


@cache
def _machine() -> _Machine:
    return _Machine()


_LOCK = threading.RLock()
"""held while kernels are compiled and loaded"""

Compile = Callable[[tuple[Any, ...]], Code]
"""Object code for arguments like those given."""


class Kernel:
    """A function that is compiled at its first call with new kinds of arguments, and called without the GIL.
    Arrays must be contiguous."""

    def __init__(self, function: Callable[..., Any], store: Store, source: Any, compiler: Compile) -> None:
        """`source`: what kernels that call this one are given in its place."""
        self.source = source
        self._function, self._store, self._compiler = function, store, compiler
        self._loaded: dict[tuple[Any, ...], _Loaded] = {}
        self._known: dict[tuple[Any, ...], _Loaded] = {}
        """by `_key`, of which many may be of one kind"""

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
    """As `_kind`, at a fraction of its price: asked for by every call."""
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


_Shapes = tuple[str | tuple[int, int], ...]
"""of each argument: a number's type in LLVM, or an array's item size and dimensions"""


class _Loaded:
    """Made while `_LOCK` is held."""

    def __init__(self, name: str, code: Code, like: Sequence[Any]) -> None:
        self._name = name
        self._returns = struct.Struct(code.returns)
        if self._returns.size > 8 * (_RESULT_WORDS - 1):
            raise ImportError(f"the kernel {name} returns too much")
        shapes, letters = zip(*(form for value in like for form in _forms(value)), strict=True)
        self._words = struct.Struct(f"{8 * _RESULT_WORDS}x{''.join(letters)}")
        self._kernel, self._door = _machine().load(code), _machine().door(shapes)

    def __call__(self, arguments: tuple[Any, ...]) -> Any:
        flat: list[int] = []
        for value in arguments:
            if isinstance(value, np.ndarray):
                flat += (value.size, _address(value))
                if value.ndim > 1:
                    flat += (*value.shape, *value.strides)
            elif isinstance(value, tuple):
                flat += value
            else:
                flat.append(int(value))
        words = ctypes.create_string_buffer(self._words.pack(*flat), self._words.size)
        if self._door(self._kernel, ctypes.addressof(words)) not in _DONE:
            raise RuntimeError(f"the kernel {self._name} failed")
        results = self._returns.unpack_from(words, 8)
        return results if len(results) > 1 else (results[0] if results else None)


def _forms(value: Any) -> Iterator[tuple[str | tuple[int, int], str]]:
    """Shape, and letters of `struct` for the words that `_Loaded` passes."""
    if isinstance(value, np.ndarray):
        rest = "" if value.ndim == 1 else "q" * (2 * value.ndim)
        yield (value.itemsize, value.ndim), f"qQ{rest}"
    elif isinstance(value, tuple):
        yield from (("i64", "q") for _ in value)
    elif isinstance(value, bool):
        yield "i8", "q"
    else:
        yield "i64", "Q" if isinstance(value, np.unsignedinteger) else "q"


_OBJECT_BYTES = object.__basicsize__
_word_at = ctypes.c_size_t.from_address


def _first_field(array: NDArray[Any]) -> int:
    """Where the array's data lie: numpy's C interface has that first in an array (`PyArrayObject_fields` in
    ndarraytypes.h). Asked for in Python it takes ten times as long, which a kernel's call would notice."""
    return _word_at(id(array) + _OBJECT_BYTES).value


def _told(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _address_from() -> Callable[[NDArray[Any]], int]:
    """The quick way, where this interpreter and this numpy agree with what it takes for granted."""
    samples = (np.zeros(1), np.zeros((3, 2))[1:, 1], np.zeros(9, np.uint8)[5:])
    agree = all(_first_field(sample) == _told(sample) for sample in samples)
    return _first_field if agree else _told


_address = _address_from()


def environment_of(names: Sequence[str]) -> str:
    """What the user's environment says about how code is made."""
    return " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)

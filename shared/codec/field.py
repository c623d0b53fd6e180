"""The field's payloads: a zstd frame per tensor, over its little-endian bytes. docs/FORMAT.md, The field.

    xor         new XOR old, as long as the tensor
    overwrite   u32 count, count u32 byte positions, ascending, count new bytes
    xor_sparse  u64 count, count u64 byte positions, ascending, count bytes of new XOR old; read only

Memory is bounded by the caller's steps and the frame's window, whatever a payload claims.
"""

from __future__ import annotations

import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import IO, Literal, Protocol

import numpy as np
import xxhash
from blake3 import blake3
from numpy.typing import NDArray

from weightcast.shared.codec.frame import (
    BLOCK,
    ONE_SHOT,
    FrameReader,
    FrameWriter,
    ReadAt,
    Source,
    content_size,
)
from weightcast.shared.errors import Refused, UnknownFormat
from weightcast.shared.words import ByteArray

OVERWRITE_LIMIT = 1 << 32
"""bytes of a tensor whose positions fit u32"""

_Form = np.dtype[np.unsignedinteger]


class DigestStream(Protocol):
    def update(self, data: bytes, /) -> object: ...
    def hexdigest(self) -> str: ...


class _Adler32:
    def __init__(self) -> None:
        self._sum = zlib.adler32(b"")

    def update(self, data: bytes, /) -> None:
        self._sum = zlib.adler32(data, self._sum)

    def hexdigest(self) -> str:
        return f"{self._sum:08x}"


def digest_stream(checksum_format: str) -> DigestStream:
    """Of a tensor's complete new bytes, lowercase hex as in a shard's metadata. Raises UnknownFormat."""
    if checksum_format == "xxh3-128":
        state: DigestStream = xxhash.xxh3_128()
        return state
    if checksum_format == "blake3":
        return blake3()
    if checksum_format == "adler32":
        return _Adler32()
    raise UnknownFormat(
        f"checksum format {checksum_format!r} is not known", remedy="use xxh3-128, blake3 or adler32"
    )


class PayloadReader(Protocol):
    def step(self, old: ByteArray) -> ByteArray:
        """New bytes of the tensor's next len(old) bytes, which are `old` now. Raises DamagedFile."""

    def finish(self) -> None:
        """After the tensor's last byte. Raises DamagedFile if the payload says more."""


def open_payload(
    encoding: Literal["xor", "overwrite", "xor_sparse"],
    read_at: ReadAt,
    length: int,
    nbytes: int,
    *,
    name: str = "a tensor",
) -> PayloadReader:
    """The payload of `length` bytes behind `read_at`, for a tensor of `nbytes` bytes; `name` is for messages.
    Raises DamagedFile, UnknownFormat: form and declared size of the frame are checked before any content."""
    source = Source(read_at, length, name)
    if encoding not in ("xor", *_SPARSE):
        raise UnknownFormat(f"{name} comes in encoding {encoding!r}", remedy="update weightcast on this host")
    size = content_size(source)
    if encoding != "xor":
        return _SparseReader(encoding == "overwrite", _Positions(source, size, _SPARSE[encoding], nbytes))
    if size != nbytes:
        raise source.damaged(f"holds {size} bytes for a tensor of {nbytes}")
    return _XorReader(FrameReader(source))


_SPARSE: dict[str, _Form] = {"overwrite": np.dtype("<u4"), "xor_sparse": np.dtype("<u8")}
"""how a position, and the count before them, is written"""


class _XorReader:
    def __init__(self, content: FrameReader) -> None:
        self._content = content

    def step(self, old: ByteArray) -> ByteArray:
        return old ^ np.frombuffer(self._content.take(len(old)), np.uint8)

    def finish(self) -> None:
        self._content.finish()


class _Positions:
    """Byte positions, strictly ascending and below `nbytes`, a block at a time."""

    def __init__(self, source: Source, size: int, form: _Form, nbytes: int) -> None:
        self.source, self._form, self._nbytes = source, form, nbytes
        self._unread, odd = divmod(size - form.itemsize, form.itemsize + 1)
        if odd or not 0 <= self._unread <= nbytes:
            raise source.damaged(f"holds {size} bytes, which changes in {nbytes} bytes never take")
        self._content = FrameReader(source)
        declared = int.from_bytes(self._content.take(form.itemsize), "little")
        if declared != self._unread:
            raise source.damaged(f"counts {declared} changes and has room for {self._unread}")
        self.values_at = form.itemsize * (1 + declared)
        self._block = np.zeros(0, np.uint64)
        self._least = 0

    @property
    def left(self) -> int:
        return self._unread + len(self._block)

    def below(self, stop: int) -> Iterator[NDArray[np.uint64]]:
        """What comes before `stop` and was not given yet, in pieces."""
        while self.left:
            if not len(self._block):
                self._block = self._next_block()
            cut = int(np.searchsorted(self._block, np.uint64(stop)))
            piece, self._block = self._block[:cut], self._block[cut:]
            if cut:
                yield piece
            if len(self._block):
                return

    def _next_block(self) -> NDArray[np.uint64]:
        count = min(self._unread, BLOCK // self._form.itemsize)
        read = np.frombuffer(self._content.take(count * self._form.itemsize), self._form)
        block: NDArray[np.uint64] = read.astype(np.uint64)
        if block[0] < self._least or (block[1:] <= block[:-1]).any() or block[-1] >= self._nbytes:
            raise self.source.damaged("has positions out of order or behind the tensor's end")
        self._unread -= count
        self._least = int(block[-1]) + 1
        return block


class _SparseReader:
    """Positions and values lie apart, so the payload is decompressed twice, side by side."""

    def __init__(self, overwrites: bool, positions: _Positions) -> None:
        self._overwrites, self._positions = overwrites, positions
        self._values = FrameReader(positions.source)
        self._values.skip(positions.values_at)
        self._at = 0

    def step(self, old: ByteArray) -> ByteArray:
        new = old.copy()
        for places in self._positions.below(self._at + len(old)):
            values = np.frombuffer(self._values.take(len(places)), np.uint8)
            near = places - np.uint64(self._at)
            new[near] = values if self._overwrites else old[near] ^ values
        self._at += len(old)
        return new

    def finish(self) -> None:
        if self._positions.left:
            raise self._positions.source.damaged(f"has {self._positions.left} changes too many")
        self._values.finish()


class PayloadWriter:
    """Compresses a tensor's step into `sink`, piece by piece. Close it, or leave its `with` block."""

    def __init__(
        self,
        encoding: Literal["xor", "overwrite"],
        nbytes: int,
        sink: Callable[[bytes], None],
        *,
        name: str = "a tensor",
    ) -> None:
        """`name` is for messages. Raises Refused for a tensor that `overwrite` cannot address."""
        if encoding == "overwrite" and nbytes > OVERWRITE_LIMIT:
            raise _too_long(name, nbytes)
        self._nbytes, self._at, self._name = nbytes, 0, name
        self._form = _XorForm(nbytes, sink) if encoding == "xor" else _OverwriteForm(sink, name)

    def step(self, old: ByteArray, new: ByteArray) -> None:
        """The next bytes of the tensor: uint8, of equal length."""
        self._form.step(self._at, old, new)
        self._at += len(old)

    def finish(self) -> None:
        if self._at != self._nbytes:
            raise ValueError(f"{self._name}: {self._at} of {self._nbytes} bytes were given")
        self._form.finish()
        self.close()

    def close(self) -> None:
        self._form.close()

    def __enter__(self) -> PayloadWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _too_long(name: str, changed: int) -> Refused:
    return Refused(
        f"{name}: the encoding overwrite counts to {OVERWRITE_LIMIT - 1} bytes, not to {changed}",
        remedy="publish with --encoding fast or xor",
    )


class _XorForm:
    def __init__(self, nbytes: int, sink: Callable[[bytes], None]) -> None:
        self._frame = FrameWriter(nbytes, sink)

    def step(self, at: int, old: ByteArray, new: ByteArray) -> None:
        self._frame.write((old ^ new).tobytes())

    def finish(self) -> None:
        self._frame.finish()

    def close(self) -> None:
        pass


class _OverwriteForm:
    """Positions and values wait in temporary files until their count is known."""

    def __init__(self, sink: Callable[[bytes], None], name: str) -> None:
        self._sink, self._name, self._changed = sink, name, 0
        self._files = ExitStack()
        self._positions, self._values = (self._files.enter_context(_spool()) for _ in range(2))

    def step(self, at: int, old: ByteArray, new: ByteArray) -> None:
        near = np.flatnonzero(old != new)
        self._changed += len(near)
        self._positions.write((near + at).astype("<u4").tobytes())
        self._values.write(new[near].tobytes())

    def finish(self) -> None:
        if self._changed >= OVERWRITE_LIMIT:
            raise _too_long(self._name, self._changed)
        frame = FrameWriter(4 + 5 * self._changed, self._sink)
        frame.write(struct.pack("<I", self._changed))
        for file in (self._positions, self._values):
            for block in _blocks(file):
                frame.write(block)
        frame.finish()

    def close(self) -> None:
        self._files.close()


def _spool() -> tempfile.SpooledTemporaryFile[bytes]:
    return tempfile.SpooledTemporaryFile(max_size=ONE_SHOT)


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    file.seek(0)
    while block := file.read(BLOCK):
        yield block

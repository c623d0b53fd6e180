"""The slime format: a zstd frame per tensor, over its little-endian bytes (docs/FORMAT.md).

    xor         new XOR old, as long as the tensor
    overwrite   u32 count, count u32 byte positions, ascending, count new bytes
    xor_sparse  u64 count, count u64 byte positions, ascending, count bytes of new XOR old; read only

Memory is bounded by the caller's steps and the frame's window, whatever a payload claims.
"""

from __future__ import annotations

import hashlib
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, Literal, Protocol, cast

import numpy as np
import xxhash
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from weightcast.shared.base.elements import ByteArray
from weightcast.shared.base.errors import DamagedFile, Refused, UnknownFormat

ReadAt = Callable[[int, int], bytes]
"""(offset, count) -> exactly that many bytes"""

WINDOW_LIMIT = 8 << 20
"""the window that RFC 8878 asks every decoder to support; level 1 stays below it"""
ONE_SHOT = 4 << 20
"""contents up to this size are compressed in one call, as slime's publishers do"""
LEVEL = 1
BLOCK = 1 << 18

_MAGIC = b"\x28\xb5\x2f\xfd"
_LONGEST_HEADER = 18
_REPEATED_BYTE = 1


@dataclass(frozen=True)
class Source:
    """`length` bytes behind `read_at`, called `name` in messages."""

    read_at: ReadAt
    length: int
    name: str

    def exactly(self, offset: int, count: int) -> bytes:
        data = self.read_at(offset, count) if offset + count <= self.length else b""
        if len(data) != count:
            raise self.damaged("is truncated")
        return data

    def damaged(self, what: str) -> DamagedFile:
        remedy = "fetch the file again; if the error stays, the channel's copy is damaged: publish an anchor"
        return DamagedFile(f"payload of {self.name} {what}", remedy=remedy)


def content_size(source: Source) -> int:
    """Content size of a source that must be exactly one frame (RFC 8878, 3.1.1). Reads headers only. Raises
    DamagedFile, UnknownFormat."""
    head = source.exactly(0, min(_LONGEST_HEADER, source.length))
    try:
        facts, start = zstandard.get_frame_parameters(head), zstandard.frame_header_size(head)
    except zstandard.ZstdError as error:
        raise source.damaged(f"is not a zstd frame: {error}") from error
    if head[:4] != _MAGIC or facts.dict_id or facts.content_size == zstandard.CONTENTSIZE_UNKNOWN:
        raise source.damaged("is a zstd frame without a content size, or with a dictionary")
    if facts.window_size > WINDOW_LIMIT:
        raise UnknownFormat(
            f"payload of {source.name}: {facts.window_size}-byte window, limit {WINDOW_LIMIT}",
            remedy="compress it at level 19 or lower",
        )
    stop = _end_of_blocks(source, start) + 4 * facts.has_checksum
    if stop != source.length:
        raise source.damaged(f"is not one zstd frame: {source.length} bytes, expected {stop}")
    return int(facts.content_size)


def _end_of_blocks(source: Source, at: int) -> int:
    """3 bytes before each block: 1 bit last, 2 bits type, 21 bits size (RFC 8878, 3.1.1.2)."""
    last = False
    while not last:
        header = int.from_bytes(source.exactly(at, 3), "little")
        last, repeated = bool(header & 1), header >> 1 & 3 == _REPEATED_BYTE
        at += 3 + (1 if repeated else header >> 3)
    return at


class _Compressed:
    """A source read from start to end, with the method that zstandard expects."""

    def __init__(self, source: Source) -> None:
        self._source, self._at = source, 0

    def read(self, count: int) -> bytes:
        data = self._source.exactly(self._at, min(count, self._source.length - self._at))
        self._at += len(data)
        return data


class FrameReader:
    """The content of a frame that `content_size` has accepted, from its start. Raises DamagedFile."""

    def __init__(self, source: Source) -> None:
        self._source = source
        decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_LIMIT)
        # the source must not refer to this object: the cycle collector does not see zstandard's readers
        self._stream = decompressor.stream_reader(cast(IO[bytes], _Compressed(source)), read_size=BLOCK)

    def take(self, count: int) -> bytes:
        pieces, missing = [], count
        while missing:
            piece = self._next(missing)
            if not piece:
                raise self._source.damaged("is shorter than the tensor")
            pieces.append(piece)
            missing -= len(piece)
        return b"".join(pieces)

    def skip(self, count: int) -> None:
        for start in range(0, count, BLOCK):
            self.take(min(BLOCK, count - start))

    def finish(self) -> None:
        """Raises DamagedFile unless everything was taken and the frame's own checksum, if any, matches."""
        if self._next(1):
            raise self._source.damaged("is longer than the tensor")

    def _next(self, count: int) -> bytes:
        try:
            return self._stream.read(count)
        except zstandard.ZstdError as error:
            raise self._source.damaged(f"is damaged: {error}") from error


class FrameWriter:
    """A frame with `size` bytes of content."""

    def __init__(self, size: int, sink: Callable[[bytes], None]) -> None:
        self._sink = sink
        self._pieces: list[bytes] = []
        self._compressor = zstandard.ZstdCompressor(level=LEVEL)
        self._stream = self._compressor.compressobj(size=size) if size > ONE_SHOT else None

    def write(self, data: bytes) -> None:
        if self._stream is None:
            self._pieces.append(data)
        elif packed := self._stream.compress(data):
            self._sink(packed)

    def finish(self) -> None:
        if self._stream is None:
            self._sink(self._compressor.compress(b"".join(self._pieces)))
        else:
            self._sink(self._stream.flush())


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
    """Digest of a tensor's complete new bytes, hex as in a shard's metadata. Raises UnknownFormat."""
    if checksum_format == "xxh3-128":
        state: DigestStream = xxhash.xxh3_128()
        return state
    if checksum_format == "sha256":
        return hashlib.sha256()
    if checksum_format == "blake3":
        return blake3()
    if checksum_format == "adler32":
        return _Adler32()
    raise UnknownFormat(
        f"unknown checksum format {checksum_format!r}", remedy="use xxh3-128, blake3, adler32 or sha256"
    )


class PayloadReader(Protocol):
    def step(self, old: ByteArray) -> ByteArray:
        """The tensor's next len(old) bytes after the step. Raises DamagedFile."""

    def finish(self) -> None:
        """Call after the tensor's last byte. Raises DamagedFile if the payload has more."""


def open_payload(
    encoding: Literal["xor", "overwrite", "xor_sparse"],
    read_at: ReadAt,
    length: int,
    nbytes: int,
    *,
    name: str = "a tensor",
) -> PayloadReader:
    """The payload of `length` bytes behind `read_at`, for a tensor of `nbytes` bytes; `name` is for messages.
    Raises DamagedFile, UnknownFormat: the frame's header and size are checked before any content."""
    source = Source(read_at, length, name)
    if encoding not in ("xor", *_SPARSE):
        raise UnknownFormat(f"{name}: unknown encoding {encoding!r}", remedy="update weightcast on this host")
    size = content_size(source)
    if encoding != "xor":
        return _SparseReader(encoding == "overwrite", _Positions(source, size, _SPARSE[encoding], nbytes))
    if size != nbytes:
        raise source.damaged(f"holds {size} bytes, expected {nbytes}")
    return _XorReader(FrameReader(source))


_SPARSE: dict[str, _Form] = {"overwrite": np.dtype("<u4"), "xor_sparse": np.dtype("<u8")}
"""dtype of positions and of the count before them"""


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
            raise source.damaged(f"holds {size} bytes: no number of changes in {nbytes} bytes has that size")
        self._content = FrameReader(source)
        declared = int.from_bytes(self._content.take(form.itemsize), "little")
        if declared != self._unread:
            raise source.damaged(f"declares {declared} changes, its size {self._unread}")
        self.values_at = form.itemsize * (1 + declared)
        self._block = np.zeros(0, np.uint64)
        self._least = 0

    @property
    def left(self) -> int:
        return self._unread + len(self._block)

    def below(self, stop: int) -> Iterator[NDArray[np.uint64]]:
        """Positions before `stop` that were not returned yet, in pieces."""
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
            raise self.source.damaged("has positions out of order or past the tensor's end")
        self._unread -= count
        self._least = int(block[-1]) + 1
        return block


class _SparseReader:
    """Positions come before all values, so the payload is decompressed twice in parallel streams."""

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
            raise self._positions.source.damaged(f"has {self._positions.left} changes past the tensor's end")
        self._values.finish()


class PayloadWriter:
    """Compresses a tensor's step into `sink`, piece by piece. Positions and values of `overwrite` wait in
    temporary files until their count is known. `close` drops them."""

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
        self._nbytes, self._at, self._changed, self._name = nbytes, 0, 0, name
        self._sink, self._files = sink, ExitStack()
        self._frame = FrameWriter(nbytes, sink) if encoding == "xor" else None
        if self._frame is None:
            self._positions, self._values = (self._files.enter_context(_spool()) for _ in range(2))

    def step(self, old: ByteArray, new: ByteArray) -> None:
        """The next bytes of the tensor: uint8, of equal length."""
        if self._frame is not None:
            self._frame.write((old ^ new).tobytes())
        else:
            near = np.flatnonzero(old != new)
            self._changed += len(near)
            self._positions.write((near + self._at).astype("<u4").tobytes())
            self._values.write(new[near].tobytes())
        self._at += len(old)

    def finish(self) -> None:
        if self._at != self._nbytes:
            raise ValueError(f"{self._name}: got {self._at} bytes, expected {self._nbytes}")
        (self._sparse_frame() if self._frame is None else self._frame).finish()
        self.close()

    def _sparse_frame(self) -> FrameWriter:
        if self._changed >= OVERWRITE_LIMIT:
            raise _too_long(self._name, self._changed)
        frame = FrameWriter(4 + 5 * self._changed, self._sink)
        frame.write(struct.pack("<I", self._changed))
        for file in (self._positions, self._values):
            file.seek(0)
            while block := file.read(BLOCK):
                frame.write(block)
        return frame

    def close(self) -> None:
        self._files.close()


def _too_long(name: str, changed: int) -> Refused:
    return Refused(
        f"{name}: {changed} bytes exceed the overwrite encoding's limit of {OVERWRITE_LIMIT - 1}",
        remedy="publish with --encoding fast or xor",
    )


def _spool() -> tempfile.SpooledTemporaryFile[bytes]:
    return tempfile.SpooledTemporaryFile(max_size=ONE_SHOT)

"""One zstd frame of a declared content size, read and written piece by piece.

The reader trusts nothing: the frame must be one, whole, of a size known beforehand, without a dictionary,
with a window of at most WINDOW_LIMIT. That bounds its memory, whatever the bytes claim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, cast

import zstandard

from weightcast.shared.errors import DamagedFile, UnknownFormat

ReadAt = Callable[[int, int], bytes]
"""(offset, count) -> exactly that many bytes"""

WINDOW_LIMIT = 8 << 20
"""what RFC 8878 asks every decoder to support; the field's level 1 stays below"""
ONE_SHOT = 4 << 20
"""contents up to here are compressed in one call, as the field's publishers do"""
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
            raise self.damaged("is cut short")
        return data

    def damaged(self, what: str) -> DamagedFile:
        remedy = "fetch the file again; if it stays so, the publisher's copy is damaged"
        return DamagedFile(f"the payload of {self.name} {what}", remedy=remedy)


def content_size(source: Source) -> int:
    """Of what must be exactly one frame (RFC 8878, 3.1.1). Reads headers only. Raises DamagedFile,
    UnknownFormat."""
    head = source.exactly(0, min(_LONGEST_HEADER, source.length))
    try:
        facts, start = zstandard.get_frame_parameters(head), zstandard.frame_header_size(head)
    except zstandard.ZstdError as error:
        raise source.damaged(f"is no zstd frame: {error}") from error
    if head[:4] != _MAGIC or facts.dict_id or facts.content_size == zstandard.CONTENTSIZE_UNKNOWN:
        raise source.damaged("is no zstd frame of a declared size and without a dictionary")
    if facts.window_size > WINDOW_LIMIT:
        raise UnknownFormat(
            f"the payload of {source.name} needs a window of {facts.window_size} bytes, over {WINDOW_LIMIT}",
            remedy="compress it at level 19 or lower",
        )
    stop = _end_of_blocks(source, start) + 4 * facts.has_checksum
    if stop != source.length:
        raise source.damaged(f"is not one zstd frame: it has {source.length} bytes, the frame {stop}")
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
    """A source read from its beginning to its end, as zstandard asks for it."""

    def __init__(self, source: Source) -> None:
        self._source, self._at = source, 0

    def read(self, count: int) -> bytes:
        data = self._source.exactly(self._at, min(count, self._source.length - self._at))
        self._at += len(data)
        return data


class FrameReader:
    """The content of a frame that `content_size` has accepted, from its beginning on. Raises DamagedFile."""

    def __init__(self, source: Source) -> None:
        self._source = source
        decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_LIMIT)
        # its source must not lead back here: zstandard's readers are not seen by the cycle collector
        self._stream = decompressor.stream_reader(cast(IO[bytes], _Compressed(source)), read_size=BLOCK)

    def take(self, count: int) -> bytes:
        pieces, missing = [], count
        while missing:
            piece = self._next(missing)
            if not piece:
                raise self._source.damaged("ends early")
            pieces.append(piece)
            missing -= len(piece)
        return b"".join(pieces)

    def skip(self, count: int) -> None:
        for start in range(0, count, BLOCK):
            self.take(min(BLOCK, count - start))

    def finish(self) -> None:
        """Raises DamagedFile unless all was taken and the frame's own checksum, if it has one, matches."""
        if self._next(1):
            raise self._source.damaged("holds more than the tensor")

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

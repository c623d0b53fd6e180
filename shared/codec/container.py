"""A chunk's blob: a header with a checksum, then a payload in one of several modes. docs/FORMAT.md, Chunks.

    0  u8   mode: 0 raw, 1 `fast`; 2 (`small`) and 3 (dense) are reserved
    1  u8   bytes per word
    2  u16  0
    4  u32  words of the chunk without padding
    8  u32  changed words
    12 u32  bytes of the payload
    16 u64  xxh3-64 of bytes 0..15 and the payload
    24 payload. Raw: the new words of all spans, without padding

Little-endian. The checksum finds damage early and is no authority: the index holds the file's digest and the
sums over the touched words, which the caller checks (`weightcast.shared.digest.touched`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from weightcast.shared.codec import fast
from weightcast.shared.codec.bits import bits
from weightcast.shared.codec.changes import Changes, compare
from weightcast.shared.errors import DamagedFile, UnknownFormat
from weightcast.shared.words import ByteArray, Chunk, Span, Words

_FACTS = struct.Struct("<BBHIII")
_CHECKSUM = struct.Struct("<Q")
HEADER = _FACTS.size + _CHECKSUM.size
RAW, FAST, SMALL, DENSE = range(4)
_REMEDY = "fetch the file again; if it stays so, the publisher's copy is damaged"


def encode_chunk(chunk: Chunk, old: Words, new: Words, changes: Changes) -> bytes:
    """`old`, `new`: word[chunk.words] with the zero padding; `changes` is all that differs between them. The
    blob is at most `HEADER` bytes longer than the words of the spans."""
    counted = _Counted.of(chunk)
    raw_size = counted.words * chunk.kind.width
    near = Changes(counted.without_padding(changes.index), changes.old, changes.new)
    payload = fast.encode(near, counted.words, chunk.kind)
    if len(payload) < raw_size:
        return _blob(FAST, chunk, counted.words, len(changes), payload)
    return _blob(RAW, chunk, counted.words, len(changes), counted.pick(new).tobytes())


def _blob(mode: int, chunk: Chunk, words: int, changed: int, payload: bytes) -> bytes:
    facts = _FACTS.pack(mode, chunk.kind.width, 0, words, changed, len(payload))
    return facts + _CHECKSUM.pack(_checksum(facts, payload)) + payload


def _checksum(facts: bytes | memoryview, payload: bytes | memoryview) -> int:
    state = xxhash.xxh3_64(facts)
    state.update(payload)
    return int(state.intdigest())


def decode_chunk(blob: bytes | memoryview, chunk: Chunk, old: Words) -> Changes:
    """`old`: word[chunk.words] as when it was encoded; with other words the result is wrong without an error,
    which only the sums in the index show. Raises DamagedFile, UnknownFormat."""
    if len(old) != chunk.words or old.dtype != chunk.kind.numpy:
        raise ValueError(f"{len(old)} old words of {old.dtype} for {_name(chunk)}")
    mode, changed = _checked_header(memoryview(blob), chunk)
    if mode not in _DECODERS:
        raise UnknownFormat(
            f"{_name(chunk)} is encoded in mode {mode}, which this release does not read",
            remedy="update weightcast on this host",
        )
    payload = np.frombuffer(blob, np.uint8, offset=HEADER)
    try:
        changes = _DECODERS[mode](payload, chunk, old, changed)
    except ValueError as error:
        raise DamagedFile(f"{_name(chunk)}: {error}", remedy=_REMEDY) from error
    return changes


def _name(chunk: Chunk) -> str:
    return f"chunk {chunk.number} of {chunk.dtype} in part {chunk.part}"


def _checked_header(blob: memoryview, chunk: Chunk) -> tuple[int, int]:
    """Mode, changed words."""
    if len(blob) < HEADER:
        raise DamagedFile(f"{_name(chunk)}: {len(blob)} bytes are no chunk", remedy=_REMEDY)
    facts, payload = blob[: _FACTS.size], blob[HEADER:]
    mode, width, zero, words, changed, size = _FACTS.unpack(facts)
    if size != len(payload) or _CHECKSUM.unpack_from(blob, _FACTS.size)[0] != _checksum(facts, payload):
        raise DamagedFile(f"{_name(chunk)}: the checksum does not match", remedy=_REMEDY)
    if (width, zero, words) != (chunk.kind.width, 0, _Counted.of(chunk).words) or changed > words:
        raise DamagedFile(f"{_name(chunk)}: the header is another chunk's", remedy=_REMEDY)
    return mode, changed


def _decode_fast(payload: ByteArray, chunk: Chunk, old: Words, changed: int) -> Changes:
    counted = _Counted.of(chunk)
    index = counted.with_padding(fast.positions(payload, changed, counted.words))
    before = bits().gather(old, index)
    return Changes(index, before, fast.steps(payload, before, chunk.kind))


def _decode_raw(payload: ByteArray, chunk: Chunk, old: Words, changed: int) -> Changes:
    counted = _Counted.of(chunk)
    if len(payload) != counted.words * chunk.kind.width:
        raise ValueError("raw words of another length than the chunk's")
    near = compare(counted.pick(old), payload.view(chunk.kind.numpy))
    if len(near) != changed:
        raise ValueError(f"{len(near)} words change where {changed} should")
    return Changes(counted.with_padding(near.index), near.old, near.new)


_DECODERS: Mapping[int, Callable[[ByteArray, Chunk, Words, int], Changes]] = {
    RAW: _decode_raw,
    FAST: _decode_fast,
}


@dataclass(frozen=True)
class _Counted:
    """Positions with and without padding. `starts`: of each span, padding not counted; `shifts`: how much
    padding lies before it."""

    spans: tuple[Span, ...]
    starts: NDArray[np.int64]
    shifts: NDArray[np.uint32]
    words: int

    @classmethod
    def of(cls, chunk: Chunk) -> _Counted:
        places = np.array([(span.offset, span.words) for span in chunk.spans], np.int64).reshape(-1, 2)
        ends = np.cumsum(places[:, 1])
        starts = ends - places[:, 1]
        shifts = (places[:, 0] - starts).astype(np.uint32)
        return cls(chunk.spans, starts, shifts, int(ends[-1]) if len(ends) else 0)

    def without_padding(self, index: NDArray[np.uint32]) -> NDArray[np.uint32]:
        return index - self._shifts_of(index, self.starts + self.shifts)

    def with_padding(self, index: NDArray[np.uint32]) -> NDArray[np.uint32]:
        return index + self._shifts_of(index, self.starts)

    def _shifts_of(self, index: NDArray[np.uint32], firsts: NDArray[np.int64]) -> NDArray[np.uint32]:
        borders = np.searchsorted(index, firsts.astype(np.uint32))
        return np.repeat(self.shifts, np.diff(borders, append=len(index)))

    def pick(self, words: Words) -> Words:
        """The words of the spans, one after the other."""
        return np.concatenate([words[span.offset : span.offset + span.words] for span in self.spans])

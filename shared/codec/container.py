"""A chunk's blob: a header with a checksum, then a payload in one of several modes. docs/FORMAT.md, Chunks.

    0  u8   mode: 0 raw, 1 `fast`, 2 `small`, 3 steps, 4 planes
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
from dataclasses import replace

import numpy as np
import xxhash

from weightcast.shared.base.elements import ByteArray, Chunk, Words
from weightcast.shared.base.errors import DamagedFile, UnknownFormat
from weightcast.shared.codec import choose, dense, sparse
from weightcast.shared.codec.changes import Changes, Counted, worth_masks
from weightcast.shared.codec.choose import FetchWords, StepEncoding
from weightcast.shared.codec.scan import all_of, changes_of, masked_changes
from weightcast.shared.codec.sparse import DecodedStep

_FACTS = struct.Struct("<BBHIII")
_CHECKSUM = struct.Struct("<Q")
HEADER = _FACTS.size + _CHECKSUM.size
_FEW_STAY = 4
"""words, of which at most one does not change, that are all shown: lists cost more"""
_REMEDY = "fetch the file again; if it stays so, the publisher's copy is damaged"


def encode_chunk(
    chunk: Chunk, old: Words, new: Words | FetchWords, changes: Changes, encoding: StepEncoding = "fast"
) -> bytes:
    """`old`, `new`: word[chunk.words] with the zero padding, `new` fetched where the mode needs all of it;
    `changes` is all that differs between them. The blob is at most `HEADER` bytes longer than the spans'
    words."""
    counted = Counted.of(chunk)
    fetch = new if callable(new) else lambda: new
    mode, payload = choose.encode(changes, old, fetch, counted, chunk.kind, encoding)
    return _blob(mode, chunk, counted.words, len(changes), payload)


def _blob(mode: int, chunk: Chunk, words: int, changed: int, payload: bytes | memoryview) -> bytes:
    facts = _FACTS.pack(mode, chunk.kind.width, 0, words, changed, len(payload))
    return b"".join((facts, _CHECKSUM.pack(_checksum(facts, payload)), payload))


def _checksum(facts: bytes | memoryview, payload: bytes | memoryview) -> int:
    state = xxhash.xxh3_64(facts)
    state.update(payload)
    return int(state.intdigest())


def decode_chunk(blob: bytes | memoryview, chunk: Chunk, old: Words) -> Changes:
    """The changes of `decode_step`."""
    return decode_step(blob, chunk, old)[0]


def decode_step(blob: bytes | memoryview, chunk: Chunk, old: Words) -> DecodedStep:
    """What changes, and the sums over the touched words as `weightcast.shared.digest.step_sums.span_sums` has
    them. `old`: word[chunk.words] as when it was encoded; with other words the result is wrong without an
    error, which only the sums show. Raises DamagedFile, UnknownFormat."""
    if len(old) != chunk.words or old.dtype != chunk.kind.numpy:
        raise ValueError(f"{len(old)} old words of {old.dtype} for {_name(chunk)}")
    counted = Counted.of(chunk)
    mode, changed = _checked_header(memoryview(blob), chunk, counted.words)
    payload = np.frombuffer(blob, np.uint8, offset=HEADER)
    try:
        return _step(mode, payload, chunk, old, counted, changed)
    except ValueError as error:
        raise DamagedFile(f"{_name(chunk)}: {error}", remedy=_REMEDY) from error


def _step(
    mode: int, payload: ByteArray, chunk: Chunk, old: Words, counted: Counted, changed: int
) -> DecodedStep:
    match mode:
        case choose.FAST:
            return sparse.decode_fast(payload, old, chunk, counted, changed)
        case choose.SMALL:
            return sparse.decode_small(payload, old, chunk, counted, changed)
        case choose.RAW:
            new = _raw(payload, chunk, counted)
        case choose.STEPS:
            new = dense.decode_steps(payload, counted.pick(old), chunk.kind)
        case choose.PLANES:
            new = dense.decode_planes(payload, counted.words, chunk.kind)
        case _:
            raise UnknownFormat(
                f"{_name(chunk)} is encoded in mode {mode}, which this release does not read",
                remedy="update weightcast on this host",
            )
    after = counted.spread(new, chunk.words)
    changes, sums = _shown(chunk, old, after, counted, changed)
    found = int(sums.changed.sum())
    if found != changed:
        raise ValueError(f"{found} words change where {changed} should")
    return replace(changes, whole=after), sums


def _shown(chunk: Chunk, old: Words, new: Words, counted: Counted, changed: int) -> DecodedStep:
    """Listed where masks would take more than the list."""
    if _FEW_STAY * (counted.words - changed) <= counted.words:
        return all_of(chunk, old, new, counted)
    return (masked_changes if worth_masks(changed, counted.words) else changes_of)(chunk, old, new)


def _raw(payload: ByteArray, chunk: Chunk, counted: Counted) -> Words:
    if len(payload) != counted.words * chunk.kind.width:
        raise ValueError("raw words of another length than the chunk's")
    return payload.view(chunk.kind.numpy)


def _name(chunk: Chunk) -> str:
    return f"chunk {chunk.number} of {chunk.dtype} in part {chunk.part}"


def _checked_header(blob: memoryview, chunk: Chunk, counted_words: int) -> tuple[int, int]:
    """Mode, changed words."""
    if len(blob) < HEADER:
        raise DamagedFile(f"{_name(chunk)}: {len(blob)} bytes are no chunk", remedy=_REMEDY)
    facts, payload = blob[: _FACTS.size], blob[HEADER:]
    mode, width, zero, words, changed, size = _FACTS.unpack(facts)
    if size != len(payload) or _CHECKSUM.unpack_from(blob, _FACTS.size)[0] != _checksum(facts, payload):
        raise DamagedFile(f"{_name(chunk)}: the checksum does not match", remedy=_REMEDY)
    if (width, zero, words) != (chunk.kind.width, 0, counted_words) or changed > words:
        raise DamagedFile(f"{_name(chunk)}: the header is another chunk's", remedy=_REMEDY)
    return mode, changed

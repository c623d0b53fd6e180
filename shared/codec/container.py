"""A chunk's blob: a header with a checksum, then a payload in one of several modes. docs/FORMAT.md, Chunks.

    0  u8   mode: 0 raw, 1 `fast`, 2 `small`, 3 steps, 4 planes
    1  u8   bytes per word
    2  u16  0
    4  u32  words of the chunk without padding
    8  u32  changed words
    12 u32  bytes of the payload
    16 u64  xxh3-64 of bytes 0..15 and the payload
    24 payload. Raw: the new words of all spans, without padding

The mode is chosen from counts, without encoding a chunk twice. `fast`: where a third of the words change, a
byte per word is read twice as fast as a code per change and is a quarter longer. `small` takes the mode that
is expected to be smallest. Unrelated words go as planes with both, or raw if a sample says that nothing
helps. A payload longer than the raw words is written raw.

Little-endian. The checksum finds damage early but proves nothing: the caller checks the index's digest of the
file and sums over the touched words (`weightcast.shared.digest.checksums`).
"""

from __future__ import annotations

import struct
from dataclasses import replace
from enum import IntEnum
from typing import Literal

import numpy as np
import xxhash

from weightcast.shared.base.elements import ByteArray, Chunk, WordKind, Words
from weightcast.shared.base.errors import DamagedFile, UnknownFormat
from weightcast.shared.codec import dense, sparse
from weightcast.shared.codec.changes import Changes, Counted, all_of, changes_of, masked_changes, worth_masks
from weightcast.shared.codec.sparse import DecodedStep
from weightcast.shared.kernels.constants import expected_bits

StepEncoding = Literal["fast", "small"]


class Mode(IntEnum):
    """A blob's first byte."""

    RAW = 0
    FAST = 1
    SMALL = 2
    STEPS = 3
    PLANES = 4


_WORTH_FRAMES = 4096
"""words from which a frame's tables are worth their size"""
_WORTH_CLASSES = 256
"""changes from which headers of classes are"""
_MANY = 1 / 3
"""share of changed words from which step bytes are considered"""
_SPEED = 1.3
"""factor by which the faster step bytes may be larger then"""
_FEW_LONGER = 1 / 16
"""share of changes that may be too long for a step byte"""
_CLASSES_SAVE = 0.4
"""bits per change that classes save at such shares"""
_UNRELATED = 1 / 2
"""share of the raw size from which planes are considered"""
_HOPELESS = 0.99
"""share of the raw size from which nothing is tried"""
_DENSE = 1 / 4
"""share of changed words from which payloads of all words are considered"""


def _dense(
    changes: Changes, old: Words, new: Words, counted: Counted, kind: WordKind, encoding: StepEncoding
) -> Mode | None:
    """A mode that holds every word, chosen from a sample; None if listing changes is better."""
    after = dense.sampled(counted.pick(new))
    if len(changes) >= _MANY * counted.words:
        taken = dense.sample_steps(dense.sampled(counted.pick(old)), after, kind)
        if _steps_pay(taken, len(changes), counted, encoding):
            return Mode.STEPS
    expected = expected_bits(counted.words - len(changes), len(changes))
    expected += len(changes) + _magnitude_bits(changes, kind)
    raw = 8 * counted.words * kind.width
    if expected <= _UNRELATED * raw:
        return None
    planes = dense.plane_bits(after) * counted.words
    if min(planes, expected) >= _HOPELESS * raw:
        return Mode.RAW
    return Mode.PLANES if planes < expected else None


def _steps_pay(taken: dense.StepSample, changed: int, counted: Counted, encoding: StepEncoding) -> bool:
    share = changed / counted.words  # contexts, which shorten lengths by up to an eighth, are left out
    gap_bits = expected_bits(counted.words - changed, changed) / counted.words
    expected = gap_bits + share * (1 + taken.length_bits)
    expected = expected * _SPEED if encoding == "fast" else expected - share * _CLASSES_SAVE
    return taken.longer <= _FEW_LONGER * share and taken.bits <= expected


def _magnitude_bits(changes: Changes, kind: WordKind) -> float:
    """Estimated from a sample of the changes."""
    before = dense.sampled(changes.old)
    some = Changes(changes.index[: len(before)], before, dense.sampled(changes.new))
    bits = sparse.grouped(some, kind).expected_bits
    return bits * len(changes) / len(before)


def _changewise(
    changes: Changes, old: Words, counted: Counted, kind: WordKind, encoding: StepEncoding
) -> tuple[Mode, bytes | memoryview | None]:
    """No payload where it would be longer than the raw words."""
    most = counted.words * kind.width
    if encoding == "small" and kind.exponent_mask and len(changes) >= _WORTH_CLASSES:
        grouped = sparse.grouped(changes, kind)
        for exact in (False, True):
            classes = sparse.classify(grouped, old, counted, kind, exact=exact)
            small = sparse.encode_small(changes.index, old, counted, classes, grouped, kind, most)
            if small is not None:
                return Mode.SMALL, small
            if classes.exact:
                break
    return Mode.FAST, sparse.encode_fast(changes, counted, kind, most)


_FACTS = struct.Struct("<BBHIII")
_CHECKSUM = struct.Struct("<Q")
HEADER = _FACTS.size + _CHECKSUM.size
_FEW_STAY = 4
"""if at most one word in this many stays, all are listed as changes: a list costs more"""


def encode_chunk(
    chunk: Chunk, old: Words, new: Words, changes: Changes, encoding: StepEncoding = "fast"
) -> bytes:
    """`old`, `new`: word[chunk.words] with the zero padding; `changes`: all differences between them. The
    blob is at most `HEADER` bytes longer than the spans' words."""
    counted, kind = Counted.of(chunk), chunk.kind
    mode: Mode | None = None
    payload: bytes | memoryview | None = None
    if len(changes) > _DENSE * counted.words and counted.words >= _WORTH_FRAMES:
        mode = _dense(changes, old, new, counted, kind, encoding)
    match mode:
        case None:
            mode, payload = _changewise(changes, old, counted, kind, encoding)
        case Mode.PLANES:
            payload = dense.encode_planes(counted.pick(new))
        case Mode.STEPS:
            payload = dense.encode_steps(counted.pick(old), counted.pick(new), kind)
    if payload is None or len(payload) >= counted.words * kind.width:
        mode, payload = Mode.RAW, np.ascontiguousarray(counted.pick(new)).view(np.uint8).data
    facts = _FACTS.pack(mode, kind.width, 0, counted.words, len(changes), len(payload))
    return b"".join((facts, _CHECKSUM.pack(_checksum(facts, payload)), payload))


def _checksum(facts: bytes | memoryview, payload: bytes | memoryview) -> int:
    state = xxhash.xxh3_64(facts)
    state.update(payload)
    return int(state.intdigest())


def decode_step(blob: bytes | memoryview, chunk: Chunk, old: Words) -> DecodedStep:
    """As `changes_of`. `old`: word[chunk.words] as when it was encoded; with other words the result is wrong
    without an error; only the sums reveal it. Raises DamagedFile, UnknownFormat."""
    if len(old) != chunk.words or old.dtype != chunk.kind.numpy:
        raise ValueError(f"{len(old)} old words of {old.dtype} for {_name(chunk)}")
    counted = Counted.of(chunk)
    mode, changed = _checked_header(memoryview(blob), chunk, counted.words)
    payload = np.frombuffer(blob, np.uint8, offset=HEADER)
    try:
        return _step(mode, payload, chunk, old, counted, changed)
    except ValueError as error:
        raise _damaged(chunk, str(error)) from error


def _step(
    mode: int, payload: ByteArray, chunk: Chunk, old: Words, counted: Counted, changed: int
) -> DecodedStep:
    match mode:
        case Mode.FAST:
            return sparse.decode_fast(payload, old, chunk, counted, changed)
        case Mode.SMALL:
            return sparse.decode_small(payload, old, chunk, counted, changed)
        case Mode.RAW:
            if len(payload) != counted.words * chunk.kind.width:
                raise ValueError("wrong length of raw words")
            new = payload.view(chunk.kind.numpy)
        case Mode.STEPS:
            new = dense.decode_steps(payload, counted.pick(old), chunk.kind)
        case Mode.PLANES:
            new = dense.decode_planes(payload, counted.words, chunk.kind)
        case _:
            raise UnknownFormat(
                f"{_name(chunk)}: unknown mode {mode}", remedy="update weightcast on this host"
            )
    after = counted.spread(new, chunk.words)
    # as a list or as masks, whichever is smaller
    if _FEW_STAY * (counted.words - changed) <= counted.words:
        changes, sums = all_of(chunk, old, after, counted)
    elif worth_masks(changed, counted.words):
        changes, sums = masked_changes(chunk, old, after)
    else:
        changes, sums = changes_of(chunk, old, after)
    found = int(sums.changed.sum())
    if found != changed:
        raise ValueError(f"{found} words change, expected {changed}")
    return replace(changes, whole=after), sums


def _name(chunk: Chunk) -> str:
    return f"chunk {chunk.number} of {chunk.dtype} in part {chunk.part}"


def _checked_header(blob: memoryview, chunk: Chunk, counted_words: int) -> tuple[int, int]:
    """Mode, changed words."""
    if len(blob) < HEADER:
        raise _damaged(chunk, f"truncated chunk: {len(blob)} bytes, header needs {HEADER}")
    facts, payload = blob[: _FACTS.size], blob[HEADER:]
    mode, width, zero, words, changed, size = _FACTS.unpack(facts)
    if size != len(payload) or _CHECKSUM.unpack_from(blob, _FACTS.size)[0] != _checksum(facts, payload):
        raise _damaged(chunk, "wrong size or checksum")
    if (width, zero, words) != (chunk.kind.width, 0, counted_words) or changed > words:
        raise _damaged(chunk, "header of another chunk")
    return mode, changed


def _damaged(chunk: Chunk, what: str) -> DamagedFile:
    remedy = "fetch the file again; if the error stays, the channel's copy is damaged: publish an anchor"
    return DamagedFile(f"{_name(chunk)}: {what}", remedy=remedy)

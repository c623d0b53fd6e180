"""Payloads that hold all words. docs/FORMAT.md, Chunk blob.

`steps`, where many words make small steps: a byte per word (twice the step's length, less one for a step
down; 255: longer) in a zstd frame that is little but Huffman codes, which is what makes it quick and short;
then the new words of the longer ones. `planes`, for words that have nothing to do with the old
ones: all first bytes of the new words, all second bytes and so on, in such a frame.
"""

from __future__ import annotations

import struct
import sys
import threading
from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

if sys.version_info >= (3, 14):
    from compression.zstd import CompressionParameter, Strategy, ZstdCompressor
else:
    from backports.zstd import CompressionParameter, Strategy, ZstdCompressor

from weightcast.shared.base.elements import ByteArray, WordKind, Words
from weightcast.shared.kernels.load import kernels
from weightcast.shared.kernels.parallel import scratch

_FRAME = struct.Struct("<I")
"""bytes of the zstd frame that follows"""
_CODED_LITERALS = 1002
"""zstd's ZSTD_c_literalCompressionMode, which Python has no name for; 1: always. Without it bytes are left
uncoded where matches are looked for with long strides."""
_HUFFMAN: dict[int, int] = {
    CompressionParameter.window_log: 17,
    CompressionParameter.hash_log: 6,
    CompressionParameter.chain_log: 6,
    CompressionParameter.search_log: 1,
    CompressionParameter.min_match: 7,
    CompressionParameter.strategy: Strategy.fast,
    CompressionParameter.target_length: 64,
    _CODED_LITERALS: 1,
}
"""Bytes between two places where matches are looked for: short ones cost more than the codes of their bytes
(two thirds of the time, 4% of the size where half of the words change); runs are found all the same."""
_LONG = 255
"""the byte of all longer steps"""
_SAMPLE = 1 << 16
"""words looked at to estimate the size of planes"""


class _Contexts(threading.local):
    """zstd's working memory, one set per thread."""

    def __init__(self) -> None:
        self.huffman = ZstdCompressor(options=_HUFFMAN)
        self.decompressor = zstandard.ZstdDecompressor()


_CONTEXTS = _Contexts()


@dataclass(frozen=True)
class StepSample:
    """Step bytes of some words. `shares`: of each byte among all; `longer`: of those that are 255."""

    shares: NDArray[np.float64]
    width: int

    @property
    def longer(self) -> float:
        return float(self.shares[_LONG])

    @property
    def bits(self) -> float:
        """About what a word takes: no Huffman code is shorter than one bit."""
        used = self.shares[self.shares > 0]
        coded = float((used * np.maximum(1.0, -np.log2(used))).sum())
        return coded + 8 * self.width * self.longer

    @property
    def length_bits(self) -> float:
        """Entropy of the lengths of steps of changed words."""
        lengths = self.shares[1::2] + np.append(self.shares[2::2], 0.0)
        return _entropy(lengths / max(lengths.sum(), 1e-9))


def sample_steps(old: Words, new: Words, kind: WordKind) -> StepSample:
    each, _ = _step_bytes(old, new, kind)
    return StepSample(np.bincount(each, minlength=256) / len(each), kind.width)


def _step_bytes(old: Words, new: Words, kind: WordKind) -> tuple[ByteArray, int]:
    """A byte per word, in the thread's scratch; how many are 255."""
    each = scratch().take("out", np.uint8, len(old))
    return each, kernels().step_bytes(old, new, kind, each)


def plane_bits(sample: Words) -> float:
    """About what a word takes."""
    return sum(_entropy(np.bincount(plane, minlength=256) / len(plane)) for plane in _planes(sample))


def sampled(words: Words) -> Words:
    """Blocks from all over."""
    blocks = words[: len(words) & ~63].reshape(-1, 64)
    every = max(1, len(words) // _SAMPLE)
    return words if every == 1 else blocks[::every].reshape(-1)


def _entropy(shares: NDArray[np.float64]) -> float:
    used = shares[shares > 0]
    return float(-(used * np.log2(used)).sum())


def _planes(words: Words) -> ByteArray:
    """uint8[width, words], in the thread's scratch."""
    planes = scratch().take("out", np.uint8, words.nbytes).reshape(words.itemsize, len(words))
    kernels().split_planes(words, planes)
    return planes


def encode_steps(old: Words, new: Words, kind: WordKind) -> bytes:
    each, longer = _step_bytes(old, new, kind)
    frame = _compressed(each)
    kept = new[kernels().escapes(each, longer)]
    return b"".join((_FRAME.pack(len(frame)), frame, kept.tobytes()))


def decode_steps(payload: ByteArray, old: Words, kind: WordKind) -> Words:
    """New words. Raises ValueError."""
    frame, rest = _cut(payload)
    steps = _decompressed(frame, len(old))
    if len(rest) % kind.width:
        raise ValueError("the longer steps do not fill whole words")
    new = kernels().add_steps(old, steps, np.frombuffer(rest.tobytes(), kind.numpy), kind)
    if new is None:
        raise ValueError("a step leaves the range of its word, or longer ones are missing")
    words: Words = new
    return words


def encode_planes(new: Words) -> bytes:
    planes = _planes(new)
    frame = _compressed(planes)
    return _FRAME.pack(len(frame)) + frame


def decode_planes(payload: ByteArray, count: int, kind: WordKind) -> Words:
    """New words. Raises ValueError."""
    frame, rest = _cut(payload)
    if len(rest):
        raise ValueError("something follows the planes")
    planes = _decompressed(frame, count * kind.width).reshape(kind.width, count)
    words: Words = kernels().join_planes(planes, kind)
    return words


def _cut(payload: ByteArray) -> tuple[ByteArray, ByteArray]:
    """The zstd frame, what follows it."""
    if len(payload) < _FRAME.size:
        raise ValueError("the payload is shorter than its header")
    (size,) = _FRAME.unpack_from(payload.data)
    if size > len(payload) - _FRAME.size:
        raise ValueError("the payload is shorter than its header says")
    return payload[_FRAME.size : _FRAME.size + size], payload[_FRAME.size + size :]


def _compressed(content: ByteArray) -> bytes:
    """A frame that says how long its content is."""
    return _CONTEXTS.huffman.compress(content.data, mode=ZstdCompressor.FLUSH_FRAME)


def _decompressed(frame: ByteArray, size: int) -> ByteArray:
    """Memory is taken only after the frame has declared the right size."""
    try:
        if zstandard.frame_content_size(frame.data) != size:
            raise ValueError("a frame of another size than the chunk's")
        content = _CONTEXTS.decompressor.decompress(frame.data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"a frame is damaged: {error}") from error
    if len(content) != size:
        raise ValueError("a frame of another size than the chunk's")
    return np.frombuffer(content, np.uint8)

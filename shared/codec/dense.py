"""Payloads that hold every word. docs/FORMAT.md, Chunk blob.

`steps`, where many words make small steps: a byte per word (twice the step's length, less one for a step
down; 255: longer) in a zstd frame whose parameters leave little but the Huffman coder, which is what makes
it quick; then the new words of the longer ones. `planes`, for words that have nothing to do with the old
ones: all first bytes of the new words, all second bytes and so on, in a zstd frame.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

from weightcast.shared.codec.kernels import kernels
from weightcast.shared.codec.scratch import scratch
from weightcast.shared.words import ByteArray, WordKind, Words

_FRAME = struct.Struct("<I")
"""bytes of the zstd frame that follows"""
_HUFFMAN = zstandard.ZstdCompressionParameters(
    window_log=17, hash_log=6, chain_log=6, search_log=1, min_match=7, target_length=0, strategy=1
)
_PLANES = zstandard.ZstdCompressionParameters.from_level(1)
_SAMPLE = 1 << 16
"""words looked at to estimate the size of planes"""


class _Contexts(threading.local):
    """zstd's working memory, one set per thread."""

    def __init__(self) -> None:
        self.huffman = zstandard.ZstdCompressor(compression_params=_HUFFMAN)
        self.planes = zstandard.ZstdCompressor(compression_params=_PLANES)
        self.decompressor = zstandard.ZstdDecompressor()


_CONTEXTS = _Contexts()


@dataclass(frozen=True)
class StepBytes:
    """A byte per word, in the thread's scratch. `longer`: how many are 255."""

    each: ByteArray
    longer: int
    shares: NDArray[np.float64]
    """of each byte among all, from a sample"""
    width: int

    @property
    def bits(self) -> float:
        """About what a word takes: no Huffman code is shorter than one bit."""
        used = self.shares[self.shares > 0]
        coded = float((used * np.maximum(1.0, -np.log2(used))).sum())
        return coded + 8 * self.width * self.longer / len(self.each)

    @property
    def length_bits(self) -> float:
        """Entropy of the lengths of steps of changed words."""
        lengths = self.shares[1::2] + np.append(self.shares[2::2], 0.0)
        return _entropy_of(lengths / max(lengths.sum(), 1e-9))


def step_bytes(old: Words, new: Words, kind: WordKind) -> StepBytes:
    each = scratch().take("out", np.uint8, len(old))
    longer = kernels().step_bytes(old, new, kind, each)
    sample = _sampled(each)
    return StepBytes(each, longer, np.bincount(sample, minlength=256) / len(sample), kind.width)


def expected_plane_bits(new: Words) -> float:
    return sum(_entropy(plane) for plane in _planes(_sampled(new))) * len(new)


def _sampled(words: Words) -> Words:
    """Blocks from all over."""
    blocks = words[: len(words) & ~63].reshape(-1, 64)
    every = max(1, len(words) // _SAMPLE)
    return words if every == 1 else blocks[::every].reshape(-1)


def _entropy(values: ByteArray) -> float:
    return _entropy_of(np.bincount(values, minlength=256) / max(1, len(values)))


def _entropy_of(shares: NDArray[np.float64]) -> float:
    used = shares[shares > 0]
    return float(-(used * np.log2(used)).sum())


def _planes(words: Words) -> ByteArray:
    """uint8[width, words]"""
    return np.ascontiguousarray(words.view(np.uint8).reshape(len(words), words.itemsize).T)


def encode_steps(steps: StepBytes, new: Words) -> bytes:
    frame = _CONTEXTS.huffman.compress(steps.each.data)
    kept = kernels().escaped(steps.each, new, steps.longer)
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
    frame = _CONTEXTS.planes.compress(_planes(new).data)
    return _FRAME.pack(len(frame)) + frame


def decode_planes(payload: ByteArray, count: int, kind: WordKind) -> Words:
    """New words. Raises ValueError."""
    frame, rest = _cut(payload)
    if len(rest):
        raise ValueError("something follows the planes")
    planes = _decompressed(frame, count * kind.width).reshape(kind.width, count)
    return np.ascontiguousarray(planes.T).reshape(-1).view(kind.numpy)


def _cut(payload: ByteArray) -> tuple[ByteArray, ByteArray]:
    """The zstd frame, what follows it."""
    if len(payload) < _FRAME.size:
        raise ValueError("the payload is shorter than its header")
    (size,) = _FRAME.unpack_from(payload.data)
    if size > len(payload) - _FRAME.size:
        raise ValueError("the payload is shorter than its header says")
    return payload[_FRAME.size : _FRAME.size + size], payload[_FRAME.size + size :]


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

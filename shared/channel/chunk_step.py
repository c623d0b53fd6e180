"""What writer and reader of a delta share: one chunk's step, and the name under which a shard has it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weightcast.shared.codec.changes import Changes
from weightcast.shared.digest.touched import SpanSums
from weightcast.shared.words import ByteArray, ChunkKey, Words


@dataclass(frozen=True)
class ChunkStep:
    """One chunk's step: what changes, and the sums per span that prove it."""

    changes: Changes
    sums: SpanSums


def chunk_entry_name(key: ChunkKey) -> str:
    return f"chunk.{key.part}.{key.dtype}.{key.number}"


def bytes_of(words: Words) -> ByteArray:
    return np.ascontiguousarray(words).view(np.uint8)

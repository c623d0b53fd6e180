"""Compiles every kernel, or loads it from the cache, before a version needs it."""

from __future__ import annotations

import numpy as np

from weightcast.shared.base.elements import Chunk, Span, Words
from weightcast.shared.codec import dense
from weightcast.shared.codec.changes import Changes, Counted, all_of, masked_changes, scan
from weightcast.shared.codec.container import StepEncoding, decode_step, encode_chunk
from weightcast.shared.kernels.load import kernels, mark_complete

_WORDS = 1 << 14
_PADDING = slice(100, 128)
_DTYPES = ("F8_E4M3", "BF16", "F32")
"""one of each width, all with contexts and classes"""


def warm_up() -> None:
    """Half a minute with an empty cache, milliseconds otherwise. Safe in any thread, any number of times."""
    for dtype in _DTYPES:
        chunk = Chunk(0, dtype, 0, (Span(0, 0, 100, 0), Span(1, 0, _WORDS - 128, 128)), _WORDS)
        old = np.arange(_WORDS).astype(chunk.kind.numpy)
        old[_PADDING] = 0
        new = old.copy()
        new[::5] += 1  # runs
        new[::640] += 5
        _both_ways(chunk, old, new, "fast")
        _both_ways(chunk, old, new, "small")
        new[::2] ^= 1  # step bytes
        _both_ways(chunk, old, new, "fast")
    mark_complete()


def _both_ways(chunk: Chunk, old: Words, new: Words, encoding: StepEncoding) -> None:
    new[_PADDING] = 0
    blob = encode_chunk(chunk, old, new, scan(chunk, old, new).changes, encoding)
    changes, _ = decode_step(blob, chunk, old)
    all_of(chunk, old, new, Counted.of(chunk))
    written = old.copy()
    changes.apply(written)
    Changes(changes.index[:1], changes.old[:1], changes.new[:1]).apply(written)  # few
    dense.decode_planes(np.frombuffer(dense.encode_planes(new), np.uint8), len(new), chunk.kind)
    first = int(changes.index[0])
    bounds = np.array([0, len(changes)])
    record = kernels().pack_lists(np.array([[0, first]]), changes.index, bounds, changes.old, changes.new)
    rows = kernels().read_lists(record, 1, np.array([[chunk.kind.width, chunk.words]]))
    found = kernels().unpack_lists(record, rows, np.array([[0, chunk.words]]), chunk.kind.numpy)
    kernels().exchange_at(written, found[0], changes.new, changes.old, again=False)
    masked_changes(chunk, old, new)
    masks = kernels().masks_of(changes.index, chunk.words)
    kernels().exchange_masked(written, 0, chunk.words, masks, changes.old, changes.new, again=False)

"""Records for journals."""

from __future__ import annotations

import numpy as np

from weightcast.shared.checkpoint.update.journal import Packed, Record, pack_lists


def packed(record: Record) -> Packed:
    """With its changes listed."""
    near = (record.index - record.index[0]).astype(np.uint32)
    heads = [(record.tensor, int(record.index[0]))]
    return pack_lists(heads, near, [0, len(near)], record.old, record.new)

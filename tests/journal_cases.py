"""Records for journals."""

from __future__ import annotations

import numpy as np

from weightcast.shared.checkpoint.update.journal import Packed, Record
from weightcast.shared.kernels.load import kernels


def packed(record: Record) -> Packed:
    """With its changes listed."""
    near = (record.index - record.index[0]).astype(np.uint32)
    heads = np.array([(record.tensor, record.index[0])], np.int64)
    data = kernels().pack_lists(heads, near, np.array([0, len(near)]), record.old, record.new)
    return Packed([data.data], 1, len(near))

"""All compiled kernels, as `load.kernels` returns them. tests/numpy_kernels.py has the same functions."""

# ruff: noqa: F401
from __future__ import annotations

from weightcast.shared.kernels.fast import put_fast, take_steps
from weightcast.shared.kernels.journal import (
    exchange_at,
    exchange_masked,
    masks_of,
    pack_lists,
    read_lists,
    unpack_lists,
)
from weightcast.shared.kernels.mix import hash_pieces
from weightcast.shared.kernels.rice import plan_contexts, put_magnitudes, put_values, take_gaps, take_values
from weightcast.shared.kernels.rows import read_tensors
from weightcast.shared.kernels.scan import (
    add_steps,
    escapes,
    join_planes,
    masked,
    scanned,
    scatter,
    split,
    split_planes,
    step_bytes,
    sums_of_all,
)
from weightcast.shared.kernels.small import exponents_of_all, put_classes, take_classes

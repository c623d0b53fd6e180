"""All compiled kernels, as `load.kernels` returns them. tests/numpy_kernels.py has the same functions."""

from __future__ import annotations

from weightcast.shared.kernels.dense import add_steps, escaped, join_planes, split_planes, step_bytes
from weightcast.shared.kernels.fast import put_fast, take_fast, take_steps
from weightcast.shared.kernels.journal import (
    exchange_all,
    exchange_masked,
    exchange_packed,
    masks_of,
    pack_gaps,
)
from weightcast.shared.kernels.mix import hash_pieces, touched
from weightcast.shared.kernels.rice import plan_contexts, put_magnitudes, put_values, take_values
from weightcast.shared.kernels.scan import compared, masked, scanned, scatter, split, sums_of_all
from weightcast.shared.kernels.small import exponents_of_all, put_classes, take_classes

__all__ = [
    "add_steps",
    "compared",
    "escaped",
    "exchange_all",
    "exchange_masked",
    "exchange_packed",
    "exponents_of_all",
    "hash_pieces",
    "join_planes",
    "masked",
    "masks_of",
    "pack_gaps",
    "plan_contexts",
    "put_classes",
    "put_fast",
    "put_magnitudes",
    "put_values",
    "scanned",
    "scatter",
    "split",
    "split_planes",
    "step_bytes",
    "sums_of_all",
    "take_classes",
    "take_fast",
    "take_steps",
    "take_values",
    "touched",
]

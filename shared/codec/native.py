"""The codec's compiled kernels: the same doors as `plain`, which explains them."""

from __future__ import annotations

from weightcast.shared.codec.native_classes import exponents_of_all, put_classes, take_classes
from weightcast.shared.codec.native_codes import take_values
from weightcast.shared.codec.native_dense import add_steps, escaped, join_planes, split_planes, step_bytes
from weightcast.shared.codec.native_exchange import (
    exchange_all,
    exchange_masked,
    exchange_packed,
    masks_of,
    pack_gaps,
)
from weightcast.shared.codec.native_rice import plan_contexts, put_magnitudes, put_values
from weightcast.shared.codec.native_scan import compared, masked, scanned, scatter, split, sums_of_all
from weightcast.shared.codec.native_sparse import put_fast, take_fast
from weightcast.shared.codec.native_steps import take_steps
from weightcast.shared.digest.lanes_native import hash_pieces, touched

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

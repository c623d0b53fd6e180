from __future__ import annotations

import pytest
from blake3 import blake3
from numpy_kernels import finalise

from weightcast.shared.base.elements import TensorSpec, TensorTable
from weightcast.shared.digest.checksums import Lanes, root

TABLE = TensorTable.of(
    [
        TensorSpec("model.embed.weight", "BF16", (5, 3), 30),
        TensorSpec("model.scale", "F32", (), 4),
        TensorSpec("größe", "F8_E4M3", (0, 7), 0),
    ]
)
LANES = [Lanes(1, 2), Lanes((1 << 64) - 1, 3), Lanes(0, 0)]


def reference_root(table: TensorTable, lanes: list[Lanes]) -> str:
    text = b""
    for spec, one in zip(table, lanes, strict=True):
        text += (0).to_bytes(4, "little")
        text += len(spec.name.encode()).to_bytes(4, "little") + spec.name.encode()
        text += bytes([len(spec.dtype)]) + spec.dtype.encode() + bytes([len(spec.shape)])
        for extent in spec.shape:
            text += extent.to_bytes(8, "little")
        text += finalise(one, spec.nbytes)
    return blake3(text, derive_key_context="weightcast root 1").hexdigest()


def test_golden() -> None:
    assert root(TABLE, LANES) == reference_root(TABLE, LANES)
    assert root(TABLE, LANES) == "93720ba785a0dfacfd0e693c585e3fbef16306ad688e70462200405136d56670"


def test_no_tensors() -> None:
    assert root(TensorTable.of([]), []) == reference_root(TensorTable.of([]), [])


@pytest.mark.parametrize(
    "changed", [{"name": "other"}, {"dtype": "F16"}, {"shape": (3, 5)}, {"shape": (15,)}, {"nbytes": 32}]
)
def test_every_fact_of_a_tensor_counts(changed: dict[str, object]) -> None:
    specs = [TABLE[0]._replace(**changed), *TABLE.specs[1:]]
    assert root(TensorTable(tuple(specs)), LANES) != root(TABLE, LANES)


def test_order_of_lanes_counts() -> None:
    assert root(TABLE, LANES[::-1]) != root(TABLE, LANES)


def test_a_missing_lane_is_refused() -> None:
    with pytest.raises(ValueError, match="2 lanes for 3 tensors"):
        root(TABLE, LANES[:2])

"""Full hashes: every byte of every tensor counts once, wherever it lies."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from core_cases import Model, all_changed, bytes_of, read_checkpoint, tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from local_cases import following, run_of

from weightcast.shared.base.elements import ByteArray, TensorSpec, TensorTable
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.checkpoint.verify.hashing import hash_tensors
from weightcast.shared.digest.checksums import hash_bytes
from weightcast.shared.files.hf_checkpoint import Place

MIB = 1 << 20
SIZES = {
    "one": [5, 0, 13 * MIB, 1, 40 * MIB + 3, 2, 2 * MIB, 0],
    "two": [16 * MIB, 16 * MIB + 1, 8],
    "three": [0],
    "four": [7] * 300,
}
"""by file, tensors as they lie in it; the longest have more than one run"""


class Files:
    """In memory, with gaps between tensors that are none of theirs; what was read is kept."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.places: list[Place] = []
        self.files: dict[Path, ByteArray] = {}
        for name, sizes in SIZES.items():
            at = int(rng.integers(8, 100))
            for size in sizes:
                self.places.append(Place(Path(name), at, size))
                at += size + int(rng.integers(0, 3))
            self.files[Path(name)] = rng.integers(0, 256, at, dtype=np.uint8)
        # tensors of a table are sorted by name, files are not
        rng.shuffle(self.places)
        self.longest = 0

    def bytes_at(self, place: Place) -> ByteArray:
        self.longest = max(self.longest, place.nbytes)
        return self.files[place.file][place.offset : place.offset + place.nbytes]

    @property
    def table(self) -> TensorTable:
        return TensorTable.of(
            TensorSpec(f"{n:05}", "U8", (place.nbytes,), place.nbytes) for n, place in enumerate(self.places)
        )


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("seed", [1, 2])
def test_lanes_of_tensors_anywhere_in_files(seed: int, threads: int) -> None:
    files = Files(seed)
    told: list[int] = []
    found = hash_tensors(files.table, files, threads=threads, advance=told.append)
    expected = [hash_bytes(files.bytes_at(place)) for place in files.places]
    assert found.tolist() == [list(lanes) for lanes in expected]
    nbytes = sum(place.nbytes for place in files.places)
    assert nbytes <= sum(told) <= nbytes + 3 * len(files.places), "gaps are the only bytes read for nothing"


@st.composite
def with_empty_tensors(draw: st.DrawFn) -> Model:
    """In the order in which they lie in a file, which is not that of their names."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    sizes = [0, *draw(st.lists(st.sampled_from([0, 0, 1, 3, 64, 200]), min_size=1, max_size=8)), 5]
    names = draw(st.permutations([f"t{n}" for n in range(len(sizes))]))
    dtypes = st.sampled_from(["U8", "F16", "F32", "F64"])
    shape = {0: (0, 4)}
    model = {n: tensor(rng, draw(dtypes), *shape.get(s, (s,))) for n, s in zip(names, sizes, strict=True)}
    return {name: model[name] for name in draw(st.permutations(list(model)))}


@settings(max_examples=40, deadline=None)
@given(with_empty_tensors(), st.integers(1, 2))
def test_empty_tensors_may_lie_anywhere_in_a_file(model: Model, files: int) -> None:
    """From the base to a host, by a publisher that read both."""
    with TemporaryDirectory() as root:
        run = run_of(Path(root), [model, all_changed(model, np.random.default_rng(1))], files=files)
        with following(run, run.root / "host") as updater:
            updater.update_to(Channel.open(open_store(run.channel)))
        assert read_checkpoint(run.root / "host") == bytes_of(run.latest)


def test_no_run_is_longer_than_memory_allows() -> None:
    files = Files(3)
    hash_tensors(files.table, files)
    assert files.longest <= 16 * MIB

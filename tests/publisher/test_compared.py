"""What is kept of tensors that may change again gives their words back: any piece, any stretch of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from core_cases import Model, all_changed, rot, tensor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from publisher_cases import as_numpy, make_place
from sharded_world import Array, Cut, along, grid_of

from weightcast.publisher import Shard
from weightcast.publisher.ranks.shards import ComparedWeights, RankWeights
from weightcast.publisher.weights.tensors import GivenWeights
from weightcast.shared.base.errors import NeedsReseed, RetryLater
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint


def cube(array: Array, rank: int, world: int) -> object:
    """Cut in all three dimensions: a run for each of many rows."""
    if array.ndim < 3:
        return array
    low, high = (np.array(array.shape) // 4 + 1), (np.array(array.shape) * 3 // 4 + 1)
    place = tuple(slice(a, b) for a, b in zip(low.tolist(), high.tolist(), strict=True))
    return Shard(array[place].copy(), tuple(low.tolist()), array.shape)


CUTS: dict[str, Cut] = {"rows": along(0), "columns": along(1), "mesh": grid_of(2, 2), "cube": cube}


def words_of(tensor: object) -> Array:
    array = np.asarray(tensor.tensor if isinstance(tensor, Shard) else tensor)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalCheckpoint, Model, Path]]:
    rng = np.random.default_rng(4)
    model = {
        "matrix": tensor(rng, "F16", 2100, 2003),
        "cube": tensor(rng, "F32", 9, 21, 33),
        "bytes": tensor(rng, "I8", 7, 11),
        "wide": tensor(rng, "F64", 5, 3),
        "scalar": tensor(rng, "F32"),
        "empty": tensor(rng, "F16", 0, 4),
    }
    place = make_place(tmp_path_factory.mktemp("compared"), model)
    with place.publisher() as publisher:
        publisher.recover()
        with LocalCheckpoint.open(place.root / "pub") as local:  # type: ignore[union-attr]
            yield local, model, place.root / "pub"


@pytest.fixture(scope="module")
def moves(world: tuple[LocalCheckpoint, Model, Path]) -> dict[str, Model]:
    rng, model = np.random.default_rng(5), world[1]
    other = {name: tensor(rng, one.dtype, *one.shape) for name, one in model.items()}
    return {"nothing": model, "little": all_changed(model, rng, 3), "all": other}


def kept(local: LocalCheckpoint, model: Model, cut: Cut, threads: int = 1) -> tuple[ComparedWeights, dict]:  # type: ignore[type-arg]
    tensors = {name: cut(as_numpy(one).copy(), 1, 4) for name, one in model.items()}
    weights = GivenWeights(tensors)
    numbers = {local.table.numbers[name]: name for name in tensors}
    return ComparedWeights.compared(RankWeights(1, local, weights, numbers), threads), tensors


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("changed", ["nothing", "little", "all"])
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_stretch_of_any_piece(
    world: tuple[LocalCheckpoint, Model, Path],
    moves: dict[str, Model],
    cut: str,
    changed: str,
    data: st.DataObject,
) -> None:
    local, _, _ = world
    moved = moves[changed]
    weights, tensors = kept(local, moved, CUTS[cut], data.draw(st.sampled_from([1, 2])))
    expected = {name: words_of(one).copy() for name, one in tensors.items()}
    for one in tensors.values():
        words_of(one)[...] = 0
    weights.prove(1)
    name = data.draw(st.sampled_from(sorted(expected)))
    width = local.table[local.table.numbers[name]].kind.width
    whole = len(expected[name]) // width
    start = data.draw(st.integers(0, whole))
    stop = data.draw(st.integers(start, whole))
    found = weights.words_in(name, start, stop)
    assert found.view(np.uint8).tobytes() == expected[name][start * width : stop * width].tobytes()


@pytest.mark.parametrize("cut", CUTS)
def test_no_words_at_the_edge_of_a_row(
    world: tuple[LocalCheckpoint, Model, Path], moves: dict[str, Model], cut: str
) -> None:
    weights, tensors = kept(world[0], moves["little"], CUTS[cut])
    matrix = np.asarray(one.tensor if isinstance(one := tensors["matrix"], Shard) else one)
    for row in (0, 1, len(matrix) // 2, len(matrix)):
        assert len(weights.words_in("matrix", row * matrix.shape[1], row * matrix.shape[1])) == 0


def test_it_holds_changes_not_copies(world: tuple[LocalCheckpoint, Model, Path]) -> None:
    local, model, _ = world
    weights, _ = kept(local, all_changed(model, np.random.default_rng(5), 3), along(0))
    held = [s for stretches in weights._stretches.values() for s in stretches]
    assert sum(s.new.nbytes for s in held) < 200
    dense, _ = kept(local, {**model, "matrix": tensor(np.random.default_rng(6), "F16", 2100, 2003)}, along(1))
    held = [s for stretches in dense._stretches.values() for s in stretches]
    assert 0 < sum(s.new.nbytes for s in held) <= sum(one.data.nbytes for one in model.values()) // 2


def test_another_version_is_not_read(world: tuple[LocalCheckpoint, Model, Path]) -> None:
    local, model, _ = world
    weights, _ = kept(local, model, along(0))
    weights.moved_to(local)
    for elsewhere in (None, local):
        if elsewhere is not None:
            weights.position = replace(weights.position, version=7)
        with pytest.raises(RetryLater, match="the channel left version"):
            weights.moved_to(elsewhere)


def test_words_that_change_beneath_it_are_found(tmp_path: Path) -> None:
    model = {"w": tensor(np.random.default_rng(4), "F16", 64, 32)}
    place = make_place(tmp_path, model)
    with place.publisher() as publisher:
        publisher.recover()
        with LocalCheckpoint.open(place.root / "pub") as local:  # type: ignore[union-attr]
            weights, _ = kept(local, all_changed(model, np.random.default_rng(5), 3), along(0))
            rot(place.root / "pub", "w", 1500)
            with pytest.raises(NeedsReseed, match="changed while it was compared; nothing was published"):
                weights.prove(1)

"""Ranks that hold pieces of tensors publish them without gathering: cut any way, unevenly, doubly."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_cases import Model, Tensor, all_changed, rot, snapshot, tensor
from publisher_cases import ENCODINGS, Place, as_numpy, make_place, numpy_model
from sharded_world import World, along, cut_model, grid_of, published, replicated, world_of
from waiting import wait_until

from weightcast.publisher import Publisher, PublishReport, Shard, cast_like
from weightcast.shared.base.errors import NeedsReseed, Refused
from weightcast.shared.channel.chain import verify
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.layout import Pointer
from weightcast.shared.cli.main import run as weightcast


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return make_place(tmp_path, numpy_model(np.random.default_rng(3)))


def big_model(rng: np.random.Generator) -> Model:
    """One tensor that is cut into segments, with odd rows; and what is too small for it."""
    return {
        "big": tensor(rng, "F16", 2101, 1003),
        "norm": tensor(rng, "F32", 130),
        "scalar": tensor(rng, "F32"),
    }


def segments_of(place: Place, version: int) -> list[list[tuple[int, int, int]]]:
    channel = Channel.open(open_store(place.channel))
    _, base = channel.require_ours()
    index = channel.index(Pointer(version), version, base.table)
    return [[(s.tensor, s.start, s.stop) for s in part.segments] for part in index.parts]  # type: ignore[union-attr]


@pytest.mark.parametrize("submits", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_any_dimension(place: Place, dim: int, encoding: str, submits: bool) -> None:
    """Every dtype, odd sizes, 0-dim and empty tensors, three ranks."""
    rng = np.random.default_rng(5)
    model = place.model
    with world_of(place, 3, encoding=encoding, submits=submits) as world:
        for step in (1, 2):
            model = all_changed(model, rng, 5)
            assert published(world.publish(cut_model(model, along(dim), 3), step)) == step
    place.arrives(model, 2)
    assert verify(Channel.open(open_store(place.channel))) == []


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("changes", [0, 1, 4000, 10**9])
def test_a_tensor_in_several_segments(tmp_path: Path, dim: int, changes: int) -> None:
    rng = np.random.default_rng(6)
    place = make_place(tmp_path, big_model(rng))
    moved = {**place.model, "norm": place.model["norm"].changed(rng, 1)}
    with world_of(place, 2, separate=True, submits=True) as world:
        assert published(world.publish(cut_model(moved, along(dim), 2), 1)) == 1
        if changes:
            moved["big"] = some(moved["big"], rng, changes)
        assert published(world.publish(cut_model(moved, along(dim), 2), 2)) == 2
    place.arrives(moved, 2)
    parts = segments_of(place, 1)
    cut = 1051 * 1003 if dim == 0 else 2101 * 1003 // 2
    border = -(-cut // 64) * 64
    assert sorted(one for part in parts for one in part if not one[0]) == [
        (0, 0, border),
        (0, border, 2101 * 1003),
    ]
    assert all(any(not one[0] for one in part) for part in parts)
    assert not list(place.channel.glob("*.parts"))


def some(one: Tensor, rng: np.random.Generator, count: int) -> Tensor:
    words = one.data.view("<u2").copy()
    where = rng.choice(len(words), count, replace=False) if count < len(words) else slice(None)
    words[where] ^= rng.integers(1, 1 << 16, len(words[where]), np.uint16)
    return Tensor(one.dtype, one.shape, words.view(np.uint8))


def in_bits(rng: np.random.Generator) -> Model:
    """Tensors whose elements are no whole words, or of 8 bytes, or of a length that their shape does not
    say."""
    forms = [("F4", (8, 6), 24), ("F6_E2M3", (8,), 6), ("UNKNOWN", (4,), 13), ("F64", (3, 2), 48)]
    model = {f"t{n}": Tensor(d, s, rng.integers(0, 256, b, np.uint8)) for n, (d, s, b) in enumerate(forms)}
    return {**model, "bf16": tensor(rng, "BF16", 100), "empty": tensor(rng, "BF16", 0, 4)}


@pytest.mark.parametrize("shared", [False, True], ids=["a share each", "all of it each"])
def test_ranks_publish_checkpoints_of_any_dtype(tmp_path: Path, shared: bool) -> None:
    rng = np.random.default_rng(8)
    place = make_place(tmp_path, in_bits(rng))
    with world_of(place, 2, separate=True) as world:
        for step in (1, 2):
            model = in_bits(rng)
            shares = [{n: one for n, one in model.items() if shared or (n < "t") == low} for low in (0, 1)]
            given = {rank: place.new(share) for rank, share in enumerate(shares)}
            assert published(world.publish(given, step)) == step
            place.arrives(model, step)
    assert verify(Channel.open(open_store(place.channel))) == []


@pytest.mark.parametrize("separate", [False, True])
def test_a_mesh_of_two_dimensions_and_replicas(place: Place, separate: bool) -> None:
    """Eight ranks: two copies of 2 x 2 pieces; small tensors are on all of them."""
    rng = np.random.default_rng(5)
    model = place.model
    with world_of(place, 8, separate=separate, submits=True) as world:
        for step in (1, 2):
            model = all_changed(model, rng, 5)
            given = cut_model(model, replicated(grid_of(2, 2), 2), 8)
            assert published(world.publish(given, step)) == step
    place.arrives(model, 2)


@pytest.mark.parametrize("submits", [False, True])
def test_ranks_that_train_different_experts(tmp_path: Path, submits: bool) -> None:
    """Expert parallel: what is shared is on both ranks, an expert on one, packed experts as shards."""
    rng = np.random.default_rng(5)
    model = {"router": tensor(rng, "F32", 4, 16), "packed.down": tensor(rng, "F16", 4, 8, 16)}
    model |= {f"experts.{n}.up": tensor(rng, "F16", 8, 16) for n in range(4)}
    place = make_place(tmp_path, model)

    def given(rank: int) -> dict[str, object]:
        others = {f"experts.{n}.up" for n in range(4) if n // 2 != rank}
        arrays = {name: as_numpy(one) for name, one in model.items() if name not in others}
        return {**arrays, "packed.down": along(0)(arrays["packed.down"], rank, 2)}

    with world_of(place, 2, separate=True, submits=submits) as world:
        for step in (1, 2, 3):
            model = all_changed(model, rng, 5)
            assert published(world.publish({rank: given(rank) for rank in (0, 1)}, step)) == step
            place.arrives(model, step)
    assert verify(Channel.open(open_store(place.channel))) == []


@pytest.mark.parametrize("submits", [False, True])
def test_worlds_of_other_sizes_go_on(place: Place, submits: bool) -> None:
    rng = np.random.default_rng(5)
    model, version = place.model, 0
    for size in (4, 2, 1, 3):
        with world_of(place, size, submits=submits) as world:
            for _ in range(2):
                model, version = all_changed(model, rng, 2), version + 1
                assert published(world.publish(cut_model(model, along(0), size), 7)) == version
    place.arrives(model, 8)
    assert verify(Channel.open(open_store(place.channel))) == []


def test_replicas_that_differ_are_refused(place: Place) -> None:
    before = snapshot(place.channel)
    given = cut_model(place.model, replicated(along(0), 2), 4)
    shard = given[3]["f16.matrix"]
    shard.tensor.view(np.uint16)[2, 3] ^= 1
    with world_of(place, 4) as world:
        for outcome in world.publish(given, 1):
            assert isinstance(outcome, Refused)
            assert "f16.matrix has other values on rank 1 than on rank 3" in str(outcome)
        assert snapshot(place.channel, leave_out=("publishers", ".trash", "weight_v000001.parts")) == before
        shard.tensor.view(np.uint16)[2, 3] ^= 1
        assert published(world.publish(given, 2)) == 1


def test_what_is_missing_and_what_overlaps_is_listed(place: Place) -> None:
    given = cut_model(place.model, along(0), 3)
    del given[2]["f16.matrix"]
    given[1]["i16.matrix"] = Shard(given[1]["i16.matrix"].tensor, (7, 0), (23, 17))
    for tensors in given.values():
        del tensors["scalar"]
    with world_of(place, 3) as world:
        outcomes = world.publish(given, 1)
    for outcome in outcomes:
        assert isinstance(outcome, Refused)
        assert "f16.matrix came only with 272 of 391 elements, from ranks 0, 1" in str(outcome)
        assert "i16.matrix is held in overlapping pieces by rank 0 and rank 1" in str(outcome)
        assert "scalar came from no rank" in str(outcome)


def test_a_shard_without_other_ranks_is_refused(place: Place) -> None:
    with (
        place.publisher() as publisher,
        pytest.raises(Refused, match=r"i16\.matrix is a shard .* no other ranks"),
    ):
        given = cut_model(place.model, along(0), 2)[0]
        whole = {name: as_numpy(one) for name, one in place.model.items()}
        publisher.publish({**whole, "i16.matrix": given["i16.matrix"]})


def test_a_shard_must_fit(place: Place) -> None:
    with place.publisher() as publisher, pytest.raises(Refused, match=r"i16\.matrix: a shard of"):
        publisher.publish({"i16.matrix": Shard(np.zeros((4, 17), np.int16), (20, 0), (23, 17))})


def test_a_rank_0_that_fails_early_keeps_nobody_waiting(place: Place) -> None:
    given = {**cut_model(place.model, along(0), 3), 0: {"nothing": np.zeros(3, np.float32)}}
    with world_of(place, 3) as world:
        first, second, third = world.publish(given, 1)
    assert isinstance(first, Refused) and "nothing is not part of the run" in str(first)
    assert "rank 0 gave up: the weights do not fit" in str(second) == str(third)


@pytest.mark.parametrize("submits", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_drift_under_another_ranks_piece_is_found(place: Place, rank: int, submits: bool) -> None:
    """A bit that one rank compares with and another one's local checkpoint has otherwise."""
    model = all_changed(place.model, np.random.default_rng(5), 5)
    with world_of(place, 2, separate=True, submits=submits) as world:
        given = cut_model(place.model, along(1), 2)
        published(world.publish(given, 1))
        for name in ("f16.matrix", "i16.matrix", "i8.matrix"):
            rot(place.root / f"pub-{rank}", name, 3)
            rot(place.root / f"pub-{rank}", name, 30)
        outcomes = world.publish(cut_model(model, along(1), 2), 2)
        assert any(isinstance(one, NeedsReseed) for one in outcomes)
        assert all(isinstance(one, NeedsReseed | Refused) for one in outcomes)
        assert published(world.publish(cut_model(model, along(1), 2), 3)) == 2
    place.arrives(model, 2)


def test_tied_tensors_of_two_ranks(tmp_path: Path) -> None:
    """The first stage has the embedding, the last one the head; the base stores the embedding alone."""
    rng = np.random.default_rng(8)
    model = {"embed": tensor(rng, "F16", 40, 9), "norm": tensor(rng, "F16", 9)}
    place = make_place(tmp_path, model, aliases={"head": "embed"})
    moved = all_changed(model, rng, 3)
    embed, norm = as_numpy(moved["embed"]), as_numpy(moved["norm"])
    with world_of(place, 2) as world:
        assert published(world.publish({0: {"embed": embed}, 1: {"norm": norm, "head": embed}}, 1)) == 1
        place.arrives(moved, 1)
        for outcome in world.publish({0: {"embed": embed}, 1: {"norm": norm, "head": embed + 1}}, 2):
            assert "embed has other values on rank 0 than on rank 1" in str(outcome)
        pieces = {rank: cut_model({"head": moved["embed"]}, along(0), 2)[rank] for rank in (0, 1)}
        pieces[0]["norm"] = norm  # type: ignore[index]
        assert published(world.publish(pieces, 3)) == 2
    place.arrives(moved, 2)


def test_masters_of_another_precision(tmp_path: Path) -> None:
    """Each rank casts its own piece."""
    rng = np.random.default_rng(8)
    place = make_place(tmp_path, {"w": tensor(rng, "F16", 40, 9)})
    masters = rng.standard_normal((40, 9)).astype(np.float32)
    cast = {rank: cast_like(place.base, {"w": along(1)(masters, rank, 2)}) for rank in (0, 1)}
    with world_of(place, 2) as world:
        assert published(world.publish(cast, 1)) == 1
    halves = masters.astype(np.float16)
    place.arrives({"w": Tensor("F16", (40, 9), halves.view(np.uint8).reshape(-1))}, 1)


def test_rank_0_reports_what_becomes_no_number_on_any_rank(tmp_path: Path) -> None:
    rows = 1 << 18
    base = Tensor("F32", (rows, 16), np.zeros(rows * 64, np.uint8))
    place = make_place(tmp_path, {"w": base})
    bad = np.zeros((rows, 16), np.float32)
    bad[5, 1], bad[-1, -2:] = np.nan, np.inf
    halves = {rank: {"w": along(0)(bad, rank, 2)} for rank in range(2)}
    with world_of(place, 2) as world:
        outcomes = world.publish(halves, 1)
    assert published(outcomes) == 1
    assert [one.non_finite for one in outcomes if isinstance(one, PublishReport)] == [{"w": 3}, {"w": 2}]


def test_a_rank_that_holds_a_copy_waits_for_nobody(place: Place) -> None:
    """Not for ranks that have not come, and its tensors may change."""
    model = all_changed(place.model, np.random.default_rng(9), 5)
    given = {
        rank: {name: one if isinstance(one, Shard) else one.copy() for name, one in cut.items()}
        for rank, cut in cut_model(model, along(0), 2).items()
    }
    with world_of(place, 2) as world:
        handles = []
        for rank in (0, 1):
            handles.append(world.submit(rank, given[rank], step=1, hold="copy"))
            assert handles[rank].free and not handles[0].done
            for one in given[rank].values():
                array = one.tensor if isinstance(one, Shard) else one
                array.reshape(-1).view(np.uint8)[...] ^= 1
        assert {handle.result(600).version for handle in handles} == {1}
    place.arrives(model, 1)


def own_tensors(model: Model, rank: int) -> dict[str, object]:
    """A rank's tensors in memory of their own."""
    cut = cut_model(model, along(0), 2)[rank]
    return {name: one if isinstance(one, Shard) else one.copy() for name, one in cut.items()}


def scribble(given: dict[str, object]) -> None:
    for one in given.values():
        array = np.asarray(one.tensor if isinstance(one, Shard) else one)
        array.reshape(-1).view(np.uint8)[...] ^= 1


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_from_the_second_step_on_a_rank_waits_for_nobody(place: Place, separate: bool, first: int) -> None:
    """Its tensors may change before the others have come at all."""
    rng = np.random.default_rng(9)
    model = all_changed(place.model, rng, 5)
    with world_of(place, 2, separate=separate, submits=True) as world:
        assert published(world.publish(cut_model(model, along(0), 2), 1)) == 1
        for step in (2, 3):
            model = all_changed(model, rng, 5)
            handles = []
            for rank in (first, 1 - first):
                handles.append(world.submit(rank, given := own_tensors(model, rank), step=step))
                assert handles[-1].free and not handles[0].done
                scribble(given)
            assert {handle.result(600).version for handle in handles} == {step}
    place.arrives(model, 3)
    assert verify(Channel.open(open_store(place.channel))) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_before_it_meets_the_others_tells_them(place: Place, rank: int) -> None:
    model = all_changed(place.model, np.random.default_rng(9), 5)
    good = cut_model(model, along(0), 2)
    with world_of(place, 2, submits=True) as world:
        assert published(world.publish(cut_model(place.model, along(0), 2), 1)) == 1
        before = snapshot(place.channel, leave_out=("publishers", ".trash", "weight_v000002.parts"))
        outcomes = world.publish({**good, rank: {**good[rank], "nothing": np.zeros(3, np.float32)}}, 2)
        own, other = outcomes[rank], outcomes[1 - rank]
        assert isinstance(own, Refused) and "nothing is not part of the run" in str(own)
        who = "rank 0 gave up" if rank == 0 else "rank 1 failed"
        assert isinstance(other, Refused) and f"{who}: the weights do not fit" in str(other)
        assert snapshot(place.channel, leave_out=("publishers", ".trash", "weight_v000002.parts")) == before
        assert published(world.publish(good, 3)) == 2
    place.arrives(model, 2)


def test_orders_are_carried_out_while_the_trainer_publishes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.WARNING)  # commands in this process leave another one
    place = make_place(tmp_path, {"w": Tensor("F32", (8, 4), np.zeros(128, np.uint8))})
    good, bad = np.ones((8, 4), np.float32), np.full((8, 4), np.nan, np.float32)

    def halves(array: np.ndarray[Any, Any]) -> dict[int, Any]:
        return {rank: {"w": along(0)(array, rank, 2)} for rank in range(2)}

    def verb(name: str, *arguments: object) -> int:
        return weightcast(["channel", name, *map(str, arguments), "--channel", str(place.channel)])

    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                Publisher.open(place.channel, local=place.pub, base=place.base, rank=rank, world_size=2)
            )
            for rank in range(2)
        ]
        world = World(ranks, submits=True)
        assert [published(world.publish(halves(one), step)) for step, one in ((1, good), (2, bad))] == [1, 2]
        assert (
            "version 2 of" in caplog.text and "became NaN or infinite in w; if training broke" in caplog.text
        )
        assert verb("rollback", "--to", 1) == 0
        wait_until(lambda: ranks[0].version == 3)
        assert verb("rollback", "--to", 1) == 3 and "done as version 3" in capsys.readouterr().err
        for view in (["fleet"], ["channel", "log"]):
            assert weightcast([*view, "--channel", str(place.channel)]) in (0, 1)
            assert "rolled back to version 1 (version 3 has its weights), ordered" in capsys.readouterr().out
        assert verb("anchor") == 0
        with pytest.raises(Refused, match="on hold since the rollback to version 1"):
            ranks[0].publish(halves(good)[0], step=3)
        assert verb("resume") == 0
        place.arrives({"w": Tensor("F32", (8, 4), good.view(np.uint8).reshape(-1))}, 3)
        assert published(world.publish(halves(2 * good), 3)) == 4
    place.arrives({"w": Tensor("F32", (8, 4), (2 * good).view(np.uint8).reshape(-1))}, 4)

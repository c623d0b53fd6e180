"""Several processes publish one version: real processes, real files, no collectives."""

from __future__ import annotations

import json
import logging
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_cases import Model, all_changed, ended, rot, snapshot, start
from opening import open_publisher
from publisher_cases import ENCODINGS, Place, as_numpy, make_place, numpy_model
from sharded_world import along, cut_model, published, world_of
from waiting import wait_until

from weightcast.publisher import Publisher, PublisherOptions
from weightcast.publisher.ranks import rendezvous
from weightcast.shared.base.errors import NotInTime, Refused
from weightcast.shared.channel.chain import verify
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store

CHILD = Path(__file__).with_name("rank_child.py")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return make_place(tmp_path, numpy_model(np.random.default_rng(3)))


def model_at(step: int) -> Model:
    """What all ranks' children together publish."""
    model, rng = numpy_model(np.random.default_rng(3)), np.random.default_rng(4)
    for _ in range(step):
        model = all_changed(model, rng, 3)
    return model


def start_ranks(
    place: Place,
    world: int,
    *,
    steps: int = 1,
    encoding: str = "fast",
    separate: bool = False,
    how: dict[int, str] | None = None,
    deadline: float = 60.0,
    only: int | None = None,
) -> list[subprocess.Popen[str]]:
    return [
        start(
            CHILD,
            place.channel,
            place.root / f"pub-{rank if separate else 0}",
            place.base,
            rank,
            world,
            steps,
            encoding,
            (how or {}).get(rank, "well"),
            deadline,
        )
        for rank in range(world)
        if only in (None, rank)
    ]


def outcomes(children: list[subprocess.Popen[str]]) -> list[list[Any]]:
    """What each rank printed of its last step."""
    found = []
    for child in children:
        code, text = ended(child)
        lines = text.splitlines()
        assert code == 0, text
        found.append(json.loads(lines[-1]) if lines[-1] != "ready" else [])
    return found


@pytest.mark.parametrize(
    ("world", "separate", "encoding"), [(4, False, "fast"), (4, True, "xor"), (2, True, "overwrite")]
)
def test_ranks_publish_disjoint_tensors(place: Place, world: int, separate: bool, encoding: str) -> None:
    found = outcomes(start_ranks(place, world, steps=3, separate=separate, encoding=encoding))
    assert {tuple(one) for one in found} == {tuple(found[0])}
    assert found[0][0] == 3
    shards = list((place.channel / "weight_v000003").glob("*.safetensors"))
    assert len(shards) == world
    assert not list(place.channel.glob("*.parts"))
    place.arrives(model_at(3), 3)
    assert verify(Channel.open(open_store(place.channel))) == []


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_versions_of_one_rank_and_of_several_follow_each_other(place: Place, encoding: str) -> None:
    outcomes(start_ranks(place, 2, encoding=encoding))
    model = all_changed(model_at(1), np.random.default_rng(0))
    assert place.publish(model, local=place.root / "pub-0", encoding=encoding) == 2
    place.arrives(model, 2)


def test_missing_ranks_are_named(place: Place) -> None:
    before = snapshot(place.channel)
    names = list(place.model)
    given = [{name: as_numpy(place.model[name]) for name in names[rank::4]} for rank in range(4)]
    with world_of(place, 4, deadline_seconds=5.0) as world:
        first, third = world.publish({0: given[0], 2: given[2]}, 1)
    # rank 2 may be slow
    assert isinstance(first, NotInTime) and re.search("ranks 1, (2, )?3 of 4", str(first))
    assert isinstance(third, NotInTime | Refused)
    after = snapshot(place.channel, leave_out=("publishers", ".trash", "weight_v000001.parts"))
    assert after == before


def test_a_failing_rank_is_known_to_all(place: Place) -> None:
    first, second, third = outcomes(start_ranks(place, 3, how={2: "failing"}))
    assert first[0] == "Refused" and "rank 2 failed: ValueError: the tensors are away" in first[1]
    assert second[0] == "Refused" and "rank 2 failed" in second[1]
    assert third == ["ValueError", "the tensors\nare away"]


def test_a_rank_that_comes_late_learns_what_failed(place: Place) -> None:
    how = {2: "failing"}
    early = [start_ranks(place, 3, how=how, only=rank)[0] for rank in (0, 2)]
    assert [one[0] for one in outcomes(early)] == ["Refused", "ValueError"]
    [late] = outcomes(start_ranks(place, 3, how=how, only=1, deadline=1.0))
    assert late[0] == "Refused" and "rank 2 failed" in late[1]


def test_a_tensor_of_two_ranks_is_written_once(place: Place) -> None:
    found = outcomes(start_ranks(place, 3, how={1: "greedy"}))
    assert [one[0] for one in found] == [1, 1, 1]
    place.arrives(model_at(1), 1)


def test_ranks_must_agree_on_the_encoding(place: Place) -> None:
    first, _ = outcomes(start_ranks(place, 2, how={1: "other-encoding"}))
    assert first[0] == "Refused" and "same encoding" in first[1]


def test_ranks_must_agree_on_the_step(place: Place) -> None:
    first, second = outcomes(start_ranks(place, 2, how={1: "other-step"}, deadline=600.0))
    assert first == ["Refused", "rank 0 publishes step 1, rank 1 step 8 (publish the same step on all ranks)"]
    assert second[0] == "Refused" and "rank 0 publishes step 1, this rank step 8 (publish the" in second[1]


@pytest.mark.parametrize("ahead", [0, 1])
def test_ranks_that_are_one_step_apart_meet_again(
    place: Place, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where one of them skips a step: the other fails at once, and both publish the next."""
    monkeypatch.setattr(rendezvous, "_STEP_SECONDS", 600.0)
    model = all_changed(place.model, np.random.default_rng(9), 5)
    given = cut_model(model, along(0), 2)
    with world_of(place, 2) as world:
        behind = world.submit(1 - ahead, given[1 - ahead], step=1, hold="copy")
        early = world.submit(ahead, given[ahead], step=2, hold="copy")
        with pytest.raises(Refused, match="rank 0 publishes step"):
            behind.result(600)
        late = world.submit(1 - ahead, given[1 - ahead], step=2, hold="copy")
        if ahead == 1:
            assert early.result(600).version == late.result(600).version == 1
        else:
            for handle in (early, late):
                with pytest.raises(Refused, match="rank 0 publishes step 2, rank 1 step 1"):
                    handle.result(600)
            assert published(world.publish(given, 3)) == 1


def test_a_rank_that_was_killed_is_named_at_once(place: Place) -> None:
    model = all_changed(place.model, np.random.default_rng(9), 5)
    with place.publisher(world_size=2, deadline_seconds=600.0) as publisher:
        child = start_ranks(place, 2, only=1, separate=True, steps=2)[0]
        mine = {name: as_numpy(one) for name, one in list(model_at(1).items())[::2]}
        assert publisher.publish(mine, step=1).version == 1
        child.kill()
        child.communicate()
        with pytest.raises(Refused, match=rf"rank 1 of 2 has ended \(process {child.pid} on "):
            publisher.publish(mine, step=2)
        # it may come again
        again = cut_model(model, along(0), 2)
        with open_publisher(
            place.channel, local=place.root / "pub-1", base=place.base, rank=1, world_size=2
        ) as other:
            handles = [one.submit(again[n], step=3, hold="copy") for n, one in enumerate((publisher, other))]
            assert [one.result(600).version for one in handles] == [2, 2]


def test_a_long_wait_is_logged(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)  # commands in this process leave another one
    monkeypatch.setattr(rendezvous, "_QUIET_SECONDS", 0.0)
    given = cut_model(place.model, along(0), 2)
    with world_of(place, 2, deadline_seconds=0.3) as world:
        world.publish({0: given[0]}, 1)
    assert "waiting for rank 1 of 2 (0 s of 0 s)" in caplog.messages


def test_ranks_must_give_the_step(place: Place) -> None:
    """A rank that raised before it met rank 0 would join rank 0's attempt with its next step's weights."""
    given = {name: as_numpy(one) for name, one in place.model.items()}
    before = snapshot(place.channel, leave_out=("publishers",))
    for rank in (0, 1):
        options: dict[str, Any] = {"rank": rank, "world_size": 2, "local": place.root / f"pub-{rank}"}
        with place.publisher(deadline_seconds=0.3, **options) as publisher:
            for call in (publisher.publish, publisher.submit):
                with pytest.raises(Refused, match="give the trainer's step"):
                    call(given)
            with pytest.raises(Refused, match="give the trainer's step"):
                publisher.publish_checkpoint(place.new(place.model))
    assert snapshot(place.channel, leave_out=("publishers",)) == before


def test_a_tensor_of_no_rank_is_refused(place: Place) -> None:
    """Rank 1 does not come; rank 0 alone in its world of two."""
    model = model_at(1)
    given = {name: as_numpy(one) for name, one in model.items()}
    name, array = given.popitem()
    alone = place.publisher(world_size=2, deadline_seconds=0.3)
    with alone as publisher, pytest.raises(NotInTime, match="rank 1 of 2"):
        publisher.publish(given, step=1)
    with place.publisher() as publisher:
        with pytest.raises(Refused, match=f"{name} is missing"):
            publisher.publish(given)
        assert publisher.publish({**given, name: array}).version == 1
    place.arrives(model, 1)


def test_the_world_must_have_one_size(place: Place) -> None:
    with pytest.raises(Refused, match="rank 2 with world_size 2"):
        Publisher.open(place.channel, local=place.pub, rank=2, world_size=2)


@pytest.mark.parametrize("separate", [True, False])
def test_a_drifted_rank_heals_by_the_next_publication(place: Place, separate: bool) -> None:
    outcomes(start_ranks(place, 2, steps=1, separate=separate))
    drifted = place.root / ("pub-1" if separate else "pub-0")
    # the second tensor in order is rank 1's
    rot(drifted, list(place.model)[1], 0)
    children = start_ranks(place, 2, steps=1, separate=separate)
    kinds = {outcome[0] for outcome in outcomes(children)}
    assert kinds <= {"NeedsReseed", "Refused"}
    found = outcomes(start_ranks(place, 2, steps=1, separate=separate))
    assert [one[0] for one in found] == [2, 2], found
    assert verify(Channel.open(open_store(place.channel))) == []


def test_a_rank_may_try_again_at_once(place: Place) -> None:
    """Its failure stands in the open attempt; the next try waits for the next attempt."""
    mine = {name: as_numpy(one) for name, one in list(model_at(1).items())[1::2]}
    with Publisher.open(
        place.channel,
        local=place.root / "pub-1",
        base=place.base,
        rank=1,
        world_size=2,
        options=PublisherOptions(deadline_seconds=60.0),
    ) as member:
        first = start_ranks(place, 2, only=0)[0]
        with pytest.raises(Refused, match="do not fit"):
            member.publish({"nothing": np.zeros(3, np.float32)}, step=1)
        code, text = ended(first)
        assert code == 0 and "rank 1 failed" in text
        second = start_ranks(place, 2, only=0)[0]
        assert member.publish(mine, step=1).version == 1
        ended(second)
    place.arrives(model_at(1), 1)


def test_ranks_go_on_to_the_next_attempt_where_rank_0_begins_again(place: Place) -> None:
    """Rank 0 is killed while it waits for rank 2, and rank 1 stands in its attempt."""
    killed, member = (start_ranks(place, 3, separate=True, only=n, deadline=120.0)[0] for n in (0, 1))
    wait_until(lambda: list(place.channel.glob("weight_v000001.parts/*/holds-00001.json")))
    killed.kill()
    killed.communicate()
    others = [start_ranks(place, 3, separate=True, only=rank)[0] for rank in (0, 2)]
    assert [one[0] for one in outcomes([*others, member])] == [1, 1, 1]
    place.arrives(model_at(1), 1)

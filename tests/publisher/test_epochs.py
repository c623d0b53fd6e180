"""Epochs: who wrote a version, and what a host that knows a newer publisher makes of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from core_cases import Model, all_changed, bytes_of, flip, read_checkpoint
from publisher_cases import Place, make_place, numpy_model

from weightcast.shared.base.errors import Refused
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.checkpoint.state.state import Position
from weightcast.shared.checkpoint.update.plan import Link, PlanFacts, Refuse, Seed, plan


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return make_place(tmp_path, numpy_model(np.random.default_rng(3)))


def changed(model: Model, seed: int) -> Model:
    return all_changed(model, np.random.default_rng(seed))


def test_a_reseed_does_not_forget_the_newest_publisher(place: Place) -> None:
    """A copy of the channel from before a takeover shows up again while the host must be seeded."""
    first = changed(place.model, 1)
    place.publish(first)
    old = place.root / "old-channel"
    shutil.copytree(place.channel, old)
    second = changed(first, 2)
    place.publish(second)
    place.arrives(second, 2)
    newest = place.root / "newest"
    place.channel.rename(newest)
    old.rename(place.channel)
    flip(place.host, "f32.matrix", 3)
    with pytest.raises(Refused, match=r"epoch 1.*already follows epoch 2"):
        place.arrives(first, 1)
    place.channel.rename(old)
    newest.rename(place.channel)
    place.arrives(second, 2)


def test_an_earlier_publisher_s_version_may_be_asked_for(place: Place) -> None:
    first = changed(place.model, 1)
    place.publish(first)
    second = changed(first, 2)
    place.publish(second)
    place.arrives(second, 2)
    updater = place.follow()
    try:
        channel = Channel.open(open_store(place.channel))
        pointer = channel.pointer()
        assert pointer is not None
        updater.load(channel)
        route = updater.route(channel, pointer, 1, exact=True)
        assert isinstance(route.plan, Seed)
        updater.seed(channel, route, route.plan)
        assert updater.state is not None and (updater.state.epoch, updater.epoch) == (2, 2)
        staged = updater.prepare(route, route.plan.then.legs[0])
        assert updater.local is not None
        with updater.local.patching():
            updater.patch(staged)
    finally:
        updater.close()
    assert read_checkpoint(place.host) == bytes_of(first)
    place.arrives(second, 2)


def link(version: int, epoch: int) -> Link:
    return Link(version, "delta", version - 1, f"d{version - 1}", f"d{version}", f"r{version}", epoch, "g", 1)


@pytest.mark.parametrize(
    ("here", "target", "exact", "refused"),
    [
        (Position(2, "d2", "r2", 3), 3, False, True),
        (Position(2, "d2", "r2", 3), 3, True, True),
        (Position(2, "d2", "r2", 3), 1, True, False),
        (Position(2, "d2", "r2", 1), 3, False, True),
        (Position(2, "d2", "r2", 1), 3, True, False),
        (None, 3, False, True),
        (None, 3, True, False),
    ],
)
def test_whose_versions_are_followed(here: Position | None, target: int, exact: bool, refused: bool) -> None:
    """All links are of epoch 2; epoch 3 was followed before."""
    links = {version: link(version, 2) for version in (1, 2, 3)}
    answer = plan(PlanFacts(here, target, links, base="d0", exact=exact, epoch=3))
    assert isinstance(answer, Refuse) == refused

"""A trainer's checkpoint knows its place in the channel."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_cases import all_changed
from opening import open_publisher
from publisher_cases import Place, as_numpy, make_place, numpy_model

from weightcast.publisher import init_channel
from weightcast.shared.base.errors import Forked, Refused, WrongRun


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return make_place(tmp_path, numpy_model(np.random.default_rng(3)))


def arrays(model: Any) -> dict[str, Any]:
    return {name: as_numpy(one).copy() for name, one in model.items()}


def stored(state: dict[str, object]) -> dict[str, object]:
    """As a trainer's checkpoint gives it back."""
    found: dict[str, object] = json.loads(json.dumps(state))
    return found


@pytest.mark.parametrize("machine", ["the same", "another"])
def test_a_run_goes_on(place: Place, rng: np.random.Generator, machine: str) -> None:
    models = [place.model]
    with place.publisher() as publisher:
        assert publisher.state_dict()["version"] == 0
        for step in (1, 2, 3):
            models.append(all_changed(models[-1], rng))
            publisher.submit(arrays(models[-1]), step=step)
            if step == 2:
                state = stored(publisher.state_dict())
    place.arrives(models[3], 3)
    local = place.pub if machine == "the same" else place.root / "another"
    with place.publisher(local=local) as publisher:
        resumed = publisher.load_state_dict(state)
        assert (resumed.then, resumed.now, resumed.behind) == (2, 3, 1)
        # nothing is published by resuming: hosts stay where they are
        assert publisher.version == 3
        place.arrives(models[3], 3)
        again = all_changed(models[2], rng)
        assert publisher.publish(arrays(again), step=3).version == 4
        assert publisher.load_state_dict(publisher.state_dict()).behind == 0
    place.arrives(again, 4)


def test_another_channel_is_refused(place: Place, rng: np.random.Generator) -> None:
    with place.publisher() as publisher:
        publisher.publish(arrays(all_changed(place.model, rng)))
        state = stored(publisher.state_dict())
    other = Place(place.root / "other", place.model)
    init_channel(other.channel, place.base, run_id="another-run")
    with other.publisher(base=place.base) as publisher, pytest.raises(WrongRun, match="another-run"):
        publisher.load_state_dict(state)


def test_another_history_is_refused(place: Place, rng: np.random.Generator) -> None:
    copy = place.root / "copy"
    shutil.copytree(place.channel, copy)
    with place.publisher() as publisher:
        publisher.publish(arrays(all_changed(place.model, rng)))
        state = stored(publisher.state_dict())
    other = Place(place.root, place.model)
    options = {"local": place.root / "other", "base": place.base}

    with open_publisher(copy, **options) as publisher:
        with pytest.raises(Forked, match="ends at version 0"):
            publisher.load_state_dict(state)
        publisher.publish(arrays(all_changed(other.model, rng)))
        with pytest.raises(Forked, match=r"version 1 .* other weights"):
            publisher.load_state_dict(state)


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"format": 2},
        {"version": -1},
        {"version": "1"},
        {"version": True},
        {"root": 3},
        {"run_id": None},
    ],
)
def test_what_is_no_state(place: Place, bad: dict[str, Any]) -> None:
    with place.publisher() as publisher:
        state = {**publisher.state_dict(), **bad} if bad else {}
        with pytest.raises(Refused, match="not a Publisher state_dict"):
            publisher.load_state_dict(state)

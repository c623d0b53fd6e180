"""Publications that return when the pointer has moved; the local checkpoint follows."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path

import numpy as np
import pytest
from core_cases import Model, all_changed, some_changed
from publisher_cases import Place, as_numpy, make_place, numpy_model

from weightcast.shared.base.errors import NeedsReseed, Refused
from weightcast.shared.checkpoint.local_checkpoint import LocalPaths
from weightcast.shared.checkpoint.state.locks import FileLock


@pytest.fixture
def models(place: Place) -> list[Model]:
    rng = np.random.default_rng(5)
    first = some_changed(place.model, rng)
    return [first, all_changed(first, rng)]


def local_version(place: Place) -> int:
    found: int = json.loads(LocalPaths(place.pub).state.read_text())["position"]["version"]
    return found


def replace_weights(place: Place) -> None:
    """By a file with the same bytes, of which nothing is known."""
    replaced = next(place.pub.glob("*.safetensors"))
    data = replaced.read_bytes()
    replaced.unlink()
    replaced.write_bytes(data)


def test_the_version_is_out_while_the_local_checkpoint_cannot_follow(
    place: Place, models: list[Model]
) -> None:
    with place.publisher(until="out") as publisher:
        with FileLock(LocalPaths(place.pub).patch).holding(shared=True):
            report = publisher.publish_checkpoint(place.new(models[0]))
            assert (publisher.version, local_version(place)) == (1, 0)
            assert {"diff", "stage", "commit"} <= set(report.seconds) and "patch" not in report.seconds
            place.arrives(models[0], 1)
        whole = publisher.settle()
        assert whole is not None and whole.version == 1 and whole.seconds["patch"] > 0
        assert local_version(place) == 1
        assert publisher.publish_checkpoint(place.new(models[1])).version == 2
    assert local_version(place) == 2
    place.arrives(models[1], 2)


def test_what_goes_wrong_behind_the_pointer_is_told_once_and_made_good(
    place: Place, models: list[Model]
) -> None:
    with place.publisher(until="out") as publisher:
        with FileLock(LocalPaths(place.pub).patch).holding(shared=True):
            publisher.publish_checkpoint(place.new(models[0]))
            replace_weights(place)
        with pytest.raises(NeedsReseed, match="replaced"):
            publisher.settle()
        assert publisher.version == 1
        assert publisher.publish_checkpoint(place.new(models[1])).version == 2
        publisher.settle()
        assert local_version(place) == 2
    place.arrives(models[1], 2)


def test_what_was_published_is_not_kept_in_memory(tmp_path: Path) -> None:
    model = numpy_model(np.random.default_rng(3))
    place = make_place(tmp_path, model)
    with place.publisher(until="out") as publisher:
        arrays = {name: as_numpy(one).copy() for name, one in model.items()}
        kept = [weakref.ref(array) for array in arrays.values()]
        publisher.publish(arrays)
        publisher.settle()
        del arrays
        gc.collect()
        assert not any(ref() is not None for ref in kept)


def test_closing_waits_and_tells(place: Place, models: list[Model]) -> None:
    with (
        pytest.raises(NeedsReseed, match="replaced"),
        place.publisher(until="out") as publisher,
        FileLock(LocalPaths(place.pub).patch).holding(shared=True),
    ):
        publisher.publish_checkpoint(place.new(models[0]))
        replace_weights(place)
    assert place.publish(models[1]) == 2
    place.arrives(models[1], 2)


def test_what_goes_wrong_before_the_pointer_is_raised(place: Place, models: list[Model]) -> None:
    with place.publisher(until="out") as publisher:
        with pytest.raises(Refused, match="does not exist"):
            publisher.publish_checkpoint(place.root / "nowhere")
        assert publisher.settle() is None
        assert publisher.version == 0
        assert publisher.publish_checkpoint(place.new(models[0])).version == 1

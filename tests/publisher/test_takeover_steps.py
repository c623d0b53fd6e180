"""A publisher that is suspended at any step of a publication, and wakes when another owns the channel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from core_cases import Model, all_changed
from disk_errors import watched
from emulators import S3
from memory_store import MemoryStore
from publisher_cases import StorePlace, numpy_model

from weightcast.shared.base.errors import Forked, Refused, RetryLater, WeightcastError
from weightcast.shared.channel.chain import committed
from weightcast.shared.channel.directory_store import DirectoryStore
from weightcast.shared.channel.index import INDEX_LIMIT
from weightcast.shared.channel.layout import index_key, read_pointer
from weightcast.shared.channel.object_store import open_object_store
from weightcast.shared.channel.store import Changed, Store


@pytest.fixture(params=["directory", "memory", S3])
def make_store(request: pytest.FixtureRequest) -> Callable[[Path], Store]:
    if request.param == "directory":
        return lambda root: DirectoryStore(root / "channel")
    if request.param == "memory":
        return lambda _: MemoryStore()
    bucket = request.getfixturevalue("bucket")
    return lambda root: open_object_store(f"{bucket}/{root.name}")


class Steps:
    """Counts the failpoints in a channel, and does something at one of them."""

    def __init__(self, store: Store, at: int, then: Callable[[], None]) -> None:
        self._place, self._at, self._then = str(Path(store.place())), at, then
        self.passed: list[str] = []

    def __call__(self, name: str, where: Path | None) -> None:
        if where is None or not str(where).startswith(self._place):
            return
        self.passed.append(f"{name} {where.name}")
        if len(self.passed) == self._at:
            self._then()


def indexes(store: Store) -> dict[int, bytes]:
    return {version: store.read(index_key(version), INDEX_LIMIT) for version in committed(store)}


def pointed(store: Store) -> int:
    pointer = read_pointer(store)
    return 0 if pointer is None else pointer.version


def overtaken(place: StorePlace, before: int, step: int, models: list[Model]) -> str:
    """Publishes version `before` + 1 with a suspension at `step`. What was passed there; empty: nothing."""
    store, seen = place.store, dict[int, bytes]()
    with ExitStack() as stack:
        old = stack.enter_context(place.publisher())
        for number in range(before):
            old.publish_checkpoint(place.new(models[number]))

        def take_over() -> None:
            new = stack.enter_context(place.publisher(local=place.root / "pub2", take_over=True))
            new.publish_checkpoint(place.new(models[2]))
            seen.update(indexes(store))
            assert pointed(store) == new.version == max(seen)
            publishers.append(new)

        publishers: list = []  # type: ignore[type-arg]
        steps, error = Steps(store, step, take_over), None
        with watched(steps):
            try:
                old.publish_checkpoint(place.new(models[before]))
            except WeightcastError as raised:
                error = raised
        if not publishers:
            assert error is None
            return ""
        at = steps.passed[step - 1]
        # nothing that was committed changes, and the pointer stays
        assert {version: indexes(store).get(version) for version in seen} == seen, at
        assert pointed(store) == max(seen) or store.renames, at
        if error is None:
            assert before + 1 in seen, at
            with pytest.raises(Refused, match="now belongs to"):
                old.publish_checkpoint(place.new(models[0]))
        else:
            assert isinstance(error, Refused | RetryLater | Forked | Changed) and error.remedy, (at, error)
        assert publishers[0].publish_checkpoint(place.new(models[3])).version == max(indexes(store)), at
        assert not seen.keys() & (indexes(store).keys() - seen.keys())
        place.arrives(models[3], pointed(store))
    place.check()
    return at


@pytest.mark.parametrize("before", [0, 1])
def test_an_owner_that_was_suspended_at_any_step_harms_nothing(
    make_store: Callable[[Path], Store], tmp_path: Path, before: int
) -> None:
    rng = np.random.default_rng(5)
    model = {name: one for name, one in numpy_model(rng).items() if name in ("f32.matrix", "scalar")}
    models = [all_changed(model, rng) for _ in range(4)]
    passed: list[str] = []
    for step in range(1, 200):
        root = tmp_path / f"step-{before}-{step}"
        (root / "channel").mkdir(parents=True)
        at = overtaken(StorePlace.made(root, model, make_store(root)), before, step, models)
        if not at:
            break
        passed.append(at)
    names = {each.partition(" ")[0] for each in passed}
    assert {"attempt.begun", "publish.proven", "index.allowed", "pointer.allowed", "pointer.moved"} <= names

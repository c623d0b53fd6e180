"""From `channel init` to a host's bytes through every store, with failures at each step between."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
from core_cases import Model, all_changed, some_changed, write_checkpoint
from disk_errors import watched
from faulty_store import Fault, FaultyStore
from publisher_cases import ENCODINGS, STORE_PARAMS, TWINS, StorePlace, make_store, numpy_model
from sharded_world import along, cut_model, published, world_of

from weightcast.publisher import init_channel
from weightcast.publisher.maintenance.upkeep import UpkeepOptions
from weightcast.shared.base.errors import WeightcastError
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import DirectoryStore
from weightcast.shared.channel.object_store import ObjectStore
from weightcast.shared.channel.signing import PrivateKey, write_private_key
from weightcast.shared.channel.store import Store
from weightcast.shared.files.disk_errors import DiskError


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(17)


@pytest.fixture
def model() -> Model:
    return numpy_model(np.random.default_rng(3))


@pytest.fixture(params=STORE_PARAMS)
def inner(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    (tmp_path / "channel").mkdir()
    return make_store(request, tmp_path)


@pytest.fixture
def place(inner: Store, tmp_path: Path, model: Model) -> StorePlace:
    return StorePlace.made(tmp_path, model, inner)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_versions_with_anchors_and_multi_step_deltas(
    place: StorePlace, rng: np.random.Generator, encoding: str
) -> None:
    model = place.model
    place.arrives(model, 0)
    options = {"anchor_every": 3, "upkeep": UpkeepOptions(skip_span=4)}
    with place.publisher(encoding=encoding, **options) as publisher:
        for version in range(1, 5):
            model = some_changed(model, rng)
            assert publisher.publish_checkpoint(place.new(model)).version == version
            if version == 1:
                place.arrives(model, 1)
            publisher.make_due()
    place.check()
    shown = Channel.open(place.store).shown(Channel.open(place.store).pointer() or pytest.fail("no pointer"))
    assert shown[3].anchor is not None and shown[4].skips.keys() == {2}
    place.arrives(model, 4)
    place.arrives(model, 4, place.root / "host-2")


@pytest.mark.parametrize("submits", [False, True])
def test_versions_of_several_ranks(place: StorePlace, rng: np.random.Generator, submits: bool) -> None:
    model = place.model
    with world_of(place, 3, submits=submits, separate=submits) as world:
        for step in (1, 2, 3):
            model = all_changed(model, rng)
            assert published(world.publish(cut_model(model, along(0), 3), step)) == step
    place.check()
    place.arrives(model, 3)


def test_a_rank_that_fails_ends_the_attempt_of_all(place: StorePlace, rng: np.random.Generator) -> None:
    model = all_changed(place.model, rng)
    with world_of(place, 2) as world:
        given = cut_model(model, along(0), 2)
        name = next(iter(given[1]))
        wrong = {**given, 1: {**given[1], name: np.zeros(999, np.uint8)}}
        outcomes = world.publish(wrong, 1)
        assert all(isinstance(one, WeightcastError) for one in outcomes)
        assert published(world.publish(given, 2)) == 1
    place.check()
    place.arrives(model, 1)


def test_signed_versions(place: StorePlace, rng: np.random.Generator, tmp_path: Path) -> None:
    key = PrivateKey.generate()
    write_private_key(tmp_path / "key", key)
    store = place.store.within("signed") if isinstance(place.store, ObjectStore) else None
    store = DirectoryStore(tmp_path / "signed") if store is None else store
    signed = StorePlace(tmp_path, place.model, store)
    init_channel(store, place.base, sign_key=tmp_path / "key")
    model = all_changed(place.model, rng)
    assert signed.publish(model, sign_key=tmp_path / "key", anchor_every=1) == 1
    signed.check()
    signed.arrives(model, 1)
    assert store.stat("weight_v000001/model.safetensors.index.json.sig") is not None
    assert store.stat("weight_v000001/anchor/model.safetensors.index.json.sig") is not None


FAILPOINTS = (
    "attempt.begun",
    "shard.written",
    "shard.synced",
    "publish.recovered",
    "publish.assembled",
    "version.begun",
    "version.moved",
    "publish.proven",
    "index.allowed",
    "pointer.allowed",
    "pointer.moved",
    "anchor.begun",
    "anchor.copied",
    "anchor.synced",
    "anchor.written",
    "anchor.committed",
)


@pytest.mark.parametrize("inner", TWINS, indirect=True)
@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("name", FAILPOINTS)
def test_a_failure_at_any_step_is_recovered_from(
    place: StorePlace, rng: np.random.Generator, name: str, reopened: bool
) -> None:
    if name.startswith("version.") and not place.store.renames:
        return  # nothing is moved
    model = all_changed(place.model, rng)
    assert place.publish(model) == 1
    failed: list[str] = []

    def fail(at: str, where: Path | None) -> None:
        if at == name and not failed:
            failed.append(at)
            raise OSError(errno.EIO, "the disk failed")

    model = all_changed(model, rng)
    with place.publisher(anchor_every=2) as publisher:
        with watched(fail):
            try:
                problem = publisher.publish_checkpoint(place.new(model)).anchor_problem
                assert name.startswith("anchor.") and "the disk failed" in problem
            except DiskError as error:
                assert "the disk failed" in error.message
        assert failed == [name]
        if not reopened:
            model = all_changed(model, rng)
            publisher.publish_checkpoint(place.new(model))
    if reopened:
        model = all_changed(model, rng)
        place.publish(model)
    place.check()
    place.arrives(model, Channel.open(place.store).pointed())


FAULTS: tuple[tuple[str, str, Fault], ...] = (
    *(("begin", "weight_v000001.parts", fault) for fault in ("unavailable", "lost")),
    *(("begin", "weight_v000001.parts/*", fault) for fault in ("unavailable", "lost")),
    ("write", "weight_v000001*part-00000.safetensors", "unavailable"),
    *(("move", "weight_v000001.parts/*/part-00000.safetensors", fault) for fault in ("unavailable", "lost")),
    *(("commit", "weight_v000001", fault) for fault in ("unavailable", "lost")),
    *(("replace", "latest", fault) for fault in ("unavailable", "lost", "changed")),
    *(("discard", "weight_v000001.parts/*", fault) for fault in ("unavailable", "lost")),
    *(("read_range", "weight_v000001*.safetensors", fault) for fault in ("cut", "wrong")),
    *(("pieces", "weight_v000001*.safetensors", fault) for fault in ("unavailable", "cut", "wrong")),
    ("read", "latest", "unavailable"),
    ("read", "base.json", "unavailable"),
    ("stat", "weight_v000001/*", "unavailable"),
    ("list", "", "unavailable"),
)


@pytest.mark.parametrize("inner", TWINS, indirect=True)
@pytest.mark.parametrize(("verb", "key", "fault"), FAULTS)
def test_a_fault_of_the_store_is_recovered_from(
    inner: Store, tmp_path: Path, model: Model, rng: np.random.Generator, verb: str, key: str, fault: Fault
) -> None:
    if verb in (("pieces",) if inner.renames else ("move", "read_range")):
        return  # a store that does not rename moves nothing, and its files are staged from copies
    if (verb, key) == ("replace", "latest") and not inner.renames:
        verb = "create"  # the first one
    store = FaultyStore(inner)
    place = StorePlace.made(tmp_path, model, store)
    model = all_changed(model, rng)
    with place.publisher() as publisher:
        store.fail(verb, key, fault)
        for _ in range(2):
            try:
                publisher.publish_checkpoint(place.new(model))
            except WeightcastError:
                continue
            break
    place.publish(model)
    assert not store.unused
    place.check()
    place.arrives(model, Channel.open(store).pointed())


@pytest.mark.parametrize("inner", TWINS, indirect=True)
@pytest.mark.parametrize("fault", ["unavailable", "lost"])
@pytest.mark.parametrize("key", ["base.json", "channel.json"])
def test_an_init_whose_answer_was_lost_may_be_repeated(
    inner: Store, tmp_path: Path, model: Model, rng: np.random.Generator, key: str, fault: Fault
) -> None:
    store = FaultyStore(inner)
    store.fail("create", key, fault)
    place = StorePlace(tmp_path, model, store)
    write_checkpoint(place.base, model)
    with pytest.raises(DiskError):
        init_channel(store, place.base)
    init_channel(store, place.base)
    model = all_changed(model, rng)
    assert place.publish(model) == 1
    place.arrives(model, 1)

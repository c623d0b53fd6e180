"""Adapters: published through the API, followed by a host that has no base."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from adapters import CODE, CONFIG, MATH, adapter, bytes_of, follow, save_adapter
from publisher_cases import STORE_PARAMS, StorePlace, make_place, make_store, numpy_model

from weightcast.publisher.api import Publisher
from weightcast.publisher.components import init_component, tensors_in
from weightcast.publisher.maintenance.orders import Held, order_rollback
from weightcast.shared.base.errors import Refused
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.components import open_component, read_components, retire_component
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.index import Index
from weightcast.shared.channel.signing import PrivateKey, load_private_key, write_private_key


def index_of(place: object, name: str, version: int) -> Index:
    nested = open_component(Channel.open(open_store(place.channel)), name)  # type: ignore[attr-defined]
    found = nested.own_index(version)
    assert found is not None
    return found


@pytest.fixture(params=STORE_PARAMS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> StorePlace:
    return StorePlace.made(tmp_path, numpy_model(np.random.default_rng(3)), make_store(request, tmp_path))


def test_adapters_arrive_at_a_host_without_a_base(place: StorePlace, tmp_path: Path) -> None:
    with place.publisher() as publisher:
        for version in (1, 2, 3):
            given = save_adapter(tmp_path / f"math-{version}", adapter(version), lora_alpha=version)
            assert publisher.publish(given, step=version, component=MATH).version == version
        publisher.publish(adapter(9), component=CODE, config=CONFIG)
    version, tensors, config = follow(place.channel, MATH, tmp_path / "host")
    assert (version, tensors, config["lora_alpha"]) == (3, bytes_of(adapter(3)), 3)
    assert follow(place.channel, CODE, tmp_path / "other") == (1, bytes_of(adapter(9)), CONFIG)
    run = Channel.open(place.channel)
    assert [(each.name, each.active) for each in read_components(run)] == [(CODE, True), (MATH, True)]


def test_a_version_names_the_main_version_that_it_was_trained_on(tmp_path: Path) -> None:
    place = make_place(tmp_path, numpy_model(np.random.default_rng(3)))
    with place.publisher() as publisher:
        roots = [publisher.run[1].root]
        publisher.publish(adapter(1), component=MATH, config=CONFIG)
        model = numpy_model(np.random.default_rng(4))
        roots.append(publisher.publish_checkpoint(place.new(model)).root)
        publisher.publish(adapter(2), component=MATH)
        publisher.submit(adapter(3), component=MATH, main_version=0, hold="copy").result()
        with pytest.raises(Refused, match="version 2 of main is not in"):
            publisher.publish(adapter(4), component=MATH, main_version=2)
    named = [index_of(place, MATH, version) for version in (1, 2, 3)]
    assert [(each.main_version, each.main_root) for each in named] == [
        (0, roots[0]),
        (1, roots[1]),
        (0, roots[0]),
    ]
    assert follow(place.channel, MATH, tmp_path / "host")[1] == bytes_of(adapter(3))


def test_main_is_published_next_to_adapters(tmp_path: Path) -> None:
    place = make_place(tmp_path, numpy_model(np.random.default_rng(3)))
    model = numpy_model(np.random.default_rng(4))
    with place.publisher() as publisher:
        publisher.publish(adapter(1), component=MATH, config=CONFIG)
        publisher.publish_checkpoint(place.new(model))
    place.arrives(model, 1)


def test_a_publisher_of_one_adapter_keeps_no_main(tmp_path: Path) -> None:
    place = make_place(tmp_path, numpy_model(np.random.default_rng(3)))
    run = Channel.open(open_store(place.channel))
    tensors = tensors_in(save_adapter(tmp_path / "first", adapter(1)), MATH)
    with pytest.raises(Refused, match="has no component adapter/math"):
        Publisher.open(place.channel, local=tmp_path / "own", component=MATH)
    init_component(run, MATH, lambda: tensors)
    with Publisher.open(place.channel, local=tmp_path / "own", component=MATH) as alone:
        alone.publish(adapter(2), config=CONFIG)
        alone.submit(adapter(3)).result()
        alone.publish(save_adapter(tmp_path / "last", adapter(4)))
        retire_component(run, MATH)
        with pytest.raises(Refused, match="adapter/math is retired"):
            alone.publish(adapter(5))
    assert not (tmp_path / "own" / ".weightcast" / "state.json").exists()
    assert run.base is not None and index_of(place, MATH, 3).main_root == run.base.root
    assert follow(place.channel, MATH, tmp_path / "host")[:2] == (3, bytes_of(adapter(4)))


def test_a_retired_adapter_takes_no_more_versions(tmp_path: Path) -> None:
    place = make_place(tmp_path, numpy_model(np.random.default_rng(3)))
    with place.publisher() as publisher:
        publisher.publish(adapter(1), component=MATH, config=CONFIG)
        publisher.retire(MATH)
        with pytest.raises(Refused, match="adapter/math is retired"):
            publisher.publish(adapter(2), component=MATH)
        with pytest.raises(Refused, match="no component adapter/code"):
            publisher.retire(CODE)


@pytest.mark.parametrize(
    ("given", "problem", "remedy"),
    [
        (
            adapter(2, rank=8),
            "rank 8, adapter/math has 4",
            "save it again with rank 4; or retire adapter/math",
        ),
        (
            {name.replace("q_proj", "o_proj"): one for name, one in adapter(2).items()},
            "target_modules o_proj, expected q_proj",
            "save it again with target_modules q_proj; or retire adapter/math and add it under another name",
        ),
        (adapter(2, layers=1), "is missing", "retire adapter/math and add it under another name"),
        ({"lm_head.weight": np.zeros(3)}, "is missing", "retire adapter/math"),
    ],
)
def test_other_shapes_are_another_adapter(
    tmp_path: Path, given: dict[str, np.ndarray], problem: str, remedy: str
) -> None:
    place = make_place(tmp_path, numpy_model(np.random.default_rng(3)))
    with place.publisher() as publisher:
        publisher.publish(adapter(1), component=MATH, config=CONFIG)
        with pytest.raises(Refused, match=f"do not fit adapter/math.*{problem}") as refused:
            publisher.publish(given, component=MATH)
        assert remedy in refused.value.remedy
        publisher.publish(adapter(3), component=MATH)
    assert follow(place.channel, MATH, tmp_path / "host")[0] == 2


def test_what_is_not_an_adapter_is_refused_by_name(tmp_path: Path) -> None:
    place = make_place(tmp_path, numpy_model(np.random.default_rng(3)))
    saved = save_adapter(tmp_path / "saved", adapter(1))
    without = save_adapter(tmp_path / "without", adapter(1))
    (without / "adapter_config.json").unlink()
    pickled = save_adapter(tmp_path / "pickled", adapter(1))
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    in_model = {name.replace("lora_A", "lora_A.default"): one for name, one in adapter(1).items()}
    with place.publisher() as publisher:
        with pytest.raises(Refused, match=r"has no adapter_config\.json"):
            publisher.publish(without, component=MATH)
        with pytest.raises(Refused, match=r"has adapter_model\.bin"):
            publisher.publish(pickled, component=MATH)
        with pytest.raises(Refused, match="not a name in an adapter's file"):
            publisher.publish(in_model, component=MATH, config=CONFIG)
        with pytest.raises(Refused, match="is a LoRA adapter") as refused:
            publisher.publish(saved)
        assert "--component adapter/NAME" in refused.value.remedy
        with pytest.raises(Refused, match="is a LoRA adapter"):
            publisher.publish(saved, component="draft")
        assert read_components(Channel.open(open_store(place.channel))) == ()
        with pytest.raises(Refused, match=r"has no adapter_config\.json yet"):
            publisher.publish(adapter(1), component=MATH)
        assert publisher.publish(adapter(1), component=MATH, config=CONFIG).version == 1


def test_adapters_are_signed_as_main_is(tmp_path: Path) -> None:
    key = tmp_path / "key"
    write_private_key(key, PrivateKey.generate())
    place = make_place(tmp_path, numpy_model(np.random.default_rng(3)), sign_key=key)
    with place.publisher(sign_key=key) as publisher:
        publisher.publish(adapter(1), component=MATH, config=CONFIG)
        publisher.publish(adapter(2), component=MATH)
        trust = publisher._trust
    nested = open_component(Channel.open(open_store(place.channel), trust), MATH)
    found = nested.own_index(2)
    assert found is not None and trust is not None and trust.signer(found.digest) is not None


def test_anchors_and_multi_step_deltas_of_adapters(tmp_path: Path) -> None:
    place = make_place(tmp_path, numpy_model(np.random.default_rng(3)))
    with place.publisher(anchor_every=2) as publisher:
        for version in range(1, 4):
            publisher.publish(adapter(version), component=MATH, config=CONFIG)
    anchor = place.channel / "components" / MATH / "weight_v000002" / "anchor"
    assert (anchor / "adapter_model.safetensors").exists()
    for lost in ("weight_v000001", "weight_v000002/model-00000-of-00001.safetensors"):
        path = place.channel / "components" / MATH / lost
        path.rename(path.with_name("gone"))
    assert follow(place.channel, MATH, tmp_path / "host")[1] == bytes_of(adapter(3))


def test_a_lost_local_checkpoint_is_made_again(tmp_path: Path) -> None:
    place = make_place(tmp_path, numpy_model(np.random.default_rng(3)))
    with place.publisher() as publisher:
        publisher.publish(adapter(1), component=MATH, config=CONFIG)
    own = place.pub / ".weightcast" / "components" / MATH
    (own / "adapter_model.safetensors").write_bytes(b"")
    with place.publisher() as publisher:
        publisher.publish(adapter(2), component=MATH)
    assert follow(place.channel, MATH, tmp_path / "host")[1] == bytes_of(adapter(2))


def test_a_configuration_without_a_component_is_refused(tmp_path: Path) -> None:
    place = make_place(tmp_path, numpy_model(np.random.default_rng(3)))
    with place.publisher() as publisher:
        with pytest.raises(Refused, match="config= is not for main"):
            publisher.publish(adapter(1), config=CONFIG)
        with pytest.raises(Refused, match="config= was given with a directory"):
            publisher.publish(tmp_path, component=MATH, config=CONFIG)
        with pytest.raises(Refused, match="cannot be written as JSON"):
            publisher.publish(adapter(1), component=MATH, config={"r": object()})
        assert publisher.publish(adapter(1), component=MATH, config={"r": {4, 2}}).version == 1
    assert follow(place.channel, MATH, tmp_path / "host")[2] == {"r": [2, 4]}


def test_a_rollback_of_an_adapter_names_what_it_was_trained_on(tmp_path: Path) -> None:
    place = make_place(tmp_path, numpy_model(np.random.default_rng(3)))
    with place.publisher() as publisher:
        publisher.publish(adapter(1), component=MATH, config=CONFIG)
        publisher.publish_checkpoint(place.new(numpy_model(np.random.default_rng(4))))
        publisher.publish(adapter(2), component=MATH)
        nested = publisher.component(MATH)
        order_rollback(nested.store, 1)
        nested.obey_orders()
        with pytest.raises(Held):
            publisher.publish(adapter(3), component=MATH)
    assert [index_of(place, MATH, version).main_version for version in (1, 2, 3)] == [0, 1, 0]
    assert follow(place.channel, MATH, tmp_path / "host")[:2] == (3, bytes_of(adapter(1)))


def test_full_weights_begin_a_new_chain_where_the_local_checkpoint_is_ahead(tmp_path: Path) -> None:
    place = make_place(tmp_path, numpy_model(np.random.default_rng(3)))
    with place.publisher() as publisher:
        publisher.publish(adapter(1), component=MATH, config=CONFIG)
        publisher.publish(adapter(2), component=MATH)
    nested = place.channel / "components" / MATH
    (nested / "latest").write_text("000001")
    (nested / "weight_v000002").rename(nested / "gone")
    with place.publisher() as publisher:
        assert publisher.publish(adapter(3), component=MATH).kind == "anchor"
    assert follow(place.channel, MATH, tmp_path / "host")[1] == bytes_of(adapter(3))


@pytest.mark.parametrize("encoding", ["fast", "small"])
@pytest.mark.parametrize("dtype", ["<f4", "<f2", "<u2", "u1", "<i8"])
def test_a_change_of_every_word_costs_no_more_than_the_words(
    tmp_path: Path, encoding: str, dtype: str
) -> None:
    """Of random bits, which nothing compresses: at most 64 bytes more per chunk."""
    place = make_place(tmp_path, numpy_model(np.random.default_rng(3)))
    rng = np.random.default_rng(5)

    def noise() -> dict[str, np.ndarray]:
        shapes = {"a.lora_A.weight": (8, 1024), "a.lora_B.weight": (3,), "b.lora_A.weight": (1 << 16, 3)}
        return {
            name: np.frombuffer(rng.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).reshape(
                shape
            )
            for name, shape in shapes.items()
        }

    with place.publisher(encoding=encoding) as publisher:
        for _ in range(2):
            publisher.publish(noise(), component=MATH, config=CONFIG)
    for version in (1, 2):
        index = index_of(place, MATH, version)
        nbytes = sum(one.nbytes for one in noise().values())
        assert sum(chunk.length for chunk in index.chunks) <= nbytes + 64 * len(index.chunks)


def test_a_refused_first_publication_changes_nothing(tmp_path: Path) -> None:
    place = make_place(tmp_path, numpy_model(np.random.default_rng(3)))
    in_model = {name.replace("lora_A", "lora_A.default"): one for name, one in adapter(1).items()}
    saved = save_adapter(tmp_path / "saved", adapter(1))
    refused: list[tuple[str, dict[str, object]]] = [
        (r"has no adapter_config\.json yet", {"named_tensors": adapter(1)}),
        ("version 7 of main is not in", {"named_tensors": adapter(1), "config": CONFIG, "main_version": 7}),
        ("version 7 of main is not in", {"named_tensors": saved, "main_version": 7}),
        ("is not a step number", {"named_tensors": adapter(1), "config": CONFIG, "step": -1}),
        ("is not a step number", {"named_tensors": saved, "step": -1}),
    ]
    with place.publisher() as publisher:
        for problem, given in refused:
            with pytest.raises(Refused, match=problem):
                publisher.publish(component=MATH, **given)  # type: ignore[arg-type]
            assert read_components(Channel.open(open_store(place.channel))) == ()
        publisher.publish(adapter(1), component=MATH, config=CONFIG)
        with pytest.raises(Refused, match="do not fit adapter/math") as caught:
            publisher.publish(in_model, component=MATH)
        assert caught.value.remedy == "give peft.get_peft_model_state_dict(model)"


def test_several_ranks_are_told_how_to_replace_tensors_without_versions(tmp_path: Path) -> None:
    place = make_place(tmp_path, numpy_model(np.random.default_rng(3)))
    run = Channel.open(open_store(place.channel))
    like = tensors_in(save_adapter(tmp_path / "like", adapter(1)), MATH)
    init_component(run, MATH, lambda: like)
    with place.publisher(world_size=2) as publisher, pytest.raises(Refused) as caught:
        publisher.publish(adapter(1, rank=8), step=1, component=MATH, config=CONFIG)
    assert f"weightcast channel component add {MATH} --like DIR" in caught.value.remedy


@pytest.mark.parametrize("signed", [False, True])
def test_other_tensors_replace_those_of_an_adapter_without_versions(tmp_path: Path, signed: bool) -> None:
    key = None
    if signed:
        key = tmp_path / "key"
        write_private_key(key, PrivateKey.generate())
    options = {"sign_key": key} if signed else {}
    place = make_place(tmp_path, numpy_model(np.random.default_rng(3)), **options)
    secret = None if key is None else load_private_key(key)
    wanted = save_adapter(tmp_path / "wanted", adapter(1, rank=8))
    run = Channel.open(open_store(place.channel))
    like = tensors_in(save_adapter(tmp_path / "like", adapter(1)), MATH)
    init_component(run, MATH, lambda: like, secret)
    with place.publisher(**options) as publisher:
        # opened with the first tensors, as the daemon does with all components
        publisher.component(MATH)
        assert publisher.publish(wanted, component=MATH).version == 1
    # of a kill after the replacement: the local checkpoint is of the tensors before
    init_component(run, CODE, lambda: like, secret)
    with place.publisher(**options) as publisher:
        publisher.component(CODE)
    init_component(run, CODE, lambda: tensors_in(wanted, CODE), secret)
    with place.publisher(**options) as publisher:
        assert publisher.publish(adapter(2, rank=8), component=CODE, config=CONFIG).version == 1
        with pytest.raises(Refused, match="do not fit"):
            publisher.publish(adapter(2), component=CODE)
    assert follow(place.channel, MATH, tmp_path / "host")[1] == bytes_of(adapter(1, rank=8))

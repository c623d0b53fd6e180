"""A draft model as a component of its own: published, and followed by a host that has no base of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from core_cases import read_checkpoint
from publisher_cases import STORE_PARAMS, StorePlace, make_place, make_store, numpy_model
from safetensors.numpy import save_file

from weightcast.publisher.api import Publisher
from weightcast.shared.base.errors import Refused
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.components import all_faults, open_component, read_components
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.store import Store
from weightcast.shared.checkpoint.local_updater import LocalUpdater, UpdaterOptions
from weightcast.shared.checkpoint.verify.hashing import full_hash

DRAFT = "draft"
CONFIG = {"architectures": ["Tiny"], "draft_vocab_size": 96}
Draft = dict[str, np.ndarray]


def draft(seed: int, changed: int = 0) -> Draft:
    """`changed`: so many words are others than those of the seed."""
    rng = np.random.default_rng(seed)
    found = {f"layers.{n}.weight": rng.normal(size=(96, 40)).astype(np.float32) for n in range(3)}
    found["layers.0.weight"].reshape(-1)[:changed] += 1
    return found


def save_draft(directory: Path, tensors: Draft, **config: object) -> Path:
    """In two shards."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | config))
    (directory / "tokenizer_config.json").write_text('{"its": "own"}')
    weight_map = {}
    for number in (0, 1):
        file = f"model-{number + 1:05d}-of-00002.safetensors"
        mine = dict(list(tensors.items())[number::2])
        save_file(mine, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def follow(channel: Path | Store, host: Path) -> tuple[int, dict[str, bytes]]:
    nested = open_component(Channel.open(open_store(channel)), DRAFT)
    updater = LocalUpdater(nested.store, host, None, UpdaterOptions(visible_seconds=0.2))
    try:
        updater.update_to(nested)
        assert updater.local is not None and full_hash(updater.local).intact
        return updater.local.state.position.version, read_checkpoint(host)
    finally:
        updater.close()


def bytes_of(tensors: Draft) -> dict[str, bytes]:
    return {name: tensor.tobytes() for name, tensor in tensors.items()}


@pytest.fixture(params=STORE_PARAMS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> StorePlace:
    return StorePlace.made(tmp_path, numpy_model(np.random.default_rng(3)), make_store(request, tmp_path))


def test_a_draft_arrives_as_a_complete_directory(place: StorePlace, tmp_path: Path) -> None:
    with place.publisher() as publisher:
        publisher.publish(save_draft(tmp_path / "one", draft(1)), component=DRAFT, step=1)
        full = publisher.publish(draft(1, changed=9), component=DRAFT, step=2)
        publisher.publish(save_draft(tmp_path / "three", draft(1, 17), more=3), component=DRAFT, step=3)
    run = Channel.open(place.channel)
    assert [(each.name, each.active) for each in read_components(run)] == [(DRAFT, True)]
    assert follow(place.channel, tmp_path / "host") == (3, bytes_of(draft(1, 17)))
    assert json.loads((tmp_path / "host" / "config.json").read_text()) == CONFIG | {"more": 3}
    assert (tmp_path / "host" / "tokenizer_config.json").read_text() == '{"its": "own"}'
    # the first version is dense, later ones are as sparse as what changed
    assert full.delta_bytes < sum(map(len, bytes_of(draft(1)).values())) / 20
    assert all_faults(open_store(place.channel)) == []


def test_versions_name_main_and_anchors_are_followed(tmp_path: Path) -> None:
    place = make_place(tmp_path, numpy_model(np.random.default_rng(3)))
    with place.publisher() as publisher:
        with pytest.raises(Refused, match=r"has no config\.json yet"):
            publisher.publish(draft(1), component=DRAFT)
        publisher.publish(draft(1), component=DRAFT, config=CONFIG)
        root = publisher.publish_checkpoint(place.new(numpy_model(np.random.default_rng(4)))).root
        publisher.submit(draft(2), component=DRAFT).result()
        publisher.component(DRAFT).write_anchor()
        with pytest.raises(Refused, match=r"layers\.0\.weight") as refused:
            publisher.publish({**draft(1), "layers.0.weight": np.zeros((2, 2), np.float32)}, component=DRAFT)
        assert "a new run" in refused.value.remedy
        nested = publisher.opened(DRAFT)
        named = [nested.own_index(version) for version in (1, 2)]
        assert [each and each.main_version for each in named] == [0, 1] and named[1] is not None
        assert named[1].main_root == root
    # the chain before the anchor is not needed
    (place.channel / "components" / DRAFT / "weight_v000001").rename(tmp_path / "gone")
    assert follow(place.channel, tmp_path / "host") == (2, bytes_of(draft(2)))


def test_a_publisher_of_the_draft_alone(tmp_path: Path) -> None:
    place = make_place(tmp_path, numpy_model(np.random.default_rng(3)))
    with place.publisher() as publisher:
        publisher.publish(save_draft(tmp_path / "one", draft(1)), component=DRAFT)
    with Publisher.open(place.channel, local=place.pub, component=DRAFT) as publisher:
        assert publisher.publish(draft(1, changed=3)).version == 2
    assert follow(place.channel, tmp_path / "host") == (2, bytes_of(draft(1, changed=3)))

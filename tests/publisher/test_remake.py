"""Lost files of committed versions, made again by `channel repair --local`: byte for byte, or not at all."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from core_cases import Model, all_changed, snapshot, some_changed, write_checkpoint
from publisher_cases import Place, make_place

from weightcast.publisher import PublisherOptions
from weightcast.publisher.api import Publisher
from weightcast.publisher.channel_repair import Repairs, repair_channel
from weightcast.publisher.maintenance.prune import empty_trash
from weightcast.publisher.maintenance.upkeep import UpkeepOptions
from weightcast.shared.channel.chain import faults, verify
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.signing import Trust, load_private_key
from weightcast.shared.cli.main import run as weightcast

INDEX = "model.safetensors.index.json"
KEEPS = UpkeepOptions(skip_span=4, history_share=1000.0)
OURS = ("publishers", ".trash")


def models_of(place: Place, versions: int = 3) -> list[Model]:
    rng = np.random.default_rng(2)
    models = [place.model]
    for _ in range(versions):
        models.append(some_changed(models[-1], rng))
    return models


def made(root: Path, **options: object) -> Place:
    place = make_place(root)
    with place.publisher(upkeep=KEEPS, **options) as publisher:
        for model in models_of(place)[1:]:
            publisher.publish_checkpoint(place.new(model))
    return place


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("run")).root


@pytest.fixture
def place(once: Path, tmp_path: Path) -> Place:
    shutil.copytree(once, tmp_path / "run")
    return make_place_at(tmp_path / "run")


def make_place_at(root: Path) -> Place:
    return Place(root, {})


def repaired(place: Place) -> Repairs:
    return repair_channel(open_store(place.channel), place.pub, PublisherOptions(take_over_seconds=0.0))


def no_shard(version: Path) -> None:
    next(version.glob("*.safetensors")).unlink()


def bad_shard(version: Path) -> None:
    path = next(version.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"\x99")


def short_shard(version: Path) -> None:
    path = next(version.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:100])


def no_index(version: Path) -> None:
    (version / INDEX).unlink()


def bad_index(version: Path) -> None:
    (version / INDEX).write_bytes(b"{}")


DAMAGES: list[Callable[[Path], None]] = [no_shard, bad_shard, short_shard, no_index, bad_index, shutil.rmtree]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("version", [1, 3])
def test_byte_for_byte(place: Place, damage: Callable[[Path], None], version: int) -> None:
    before = snapshot(place.channel, OURS)
    damage(place.channel / f"weight_v{version:06d}")
    done = repaired(place)
    assert done.done and done.left == [] and done.notes == []
    assert snapshot(place.channel, OURS) == before
    assert repaired(place).done == []


def test_what_was_damaged_is_kept_for_a_while(place: Place) -> None:
    version = place.channel / "weight_v000002"
    bad_shard(version)
    bad_index(version)
    wrong = {path.name: path.read_bytes() for path in version.iterdir()}
    assert repaired(place).left == []
    trash = place.channel / ".trash"
    kept = [path for grave in trash.iterdir() for path in grave.iterdir() if path.name in wrong]
    assert {path.name: path.read_bytes() for path in kept} == wrong
    empty_trash(open_store(place.channel), 0.0)
    assert list(trash.iterdir()) == []
    assert verify(Channel.open(open_store(place.channel))) == []


def test_nothing_is_restored_from_another_run(place: Place) -> None:
    state = place.pub / ".weightcast" / "state.json"
    state.write_text(re.sub(r'"run_id":"[^"]*"', '"run_id":"other"', state.read_text()))
    before = snapshot(place.channel, OURS)
    (place.channel / "latest").unlink()
    done = repaired(place)
    assert done.left == [] and any("is not a local checkpoint of run" in note for note in done.notes)
    assert snapshot(place.channel, OURS) == before


def test_a_lost_pointer_and_the_newest_version_are_restored(place: Place) -> None:
    before = snapshot(place.channel, OURS)
    shutil.rmtree(place.channel / "weight_v000003")
    (place.channel / "latest").unlink()
    assert repaired(place).left == [] and snapshot(place.channel, OURS) == before


def test_everything_at_once(place: Place) -> None:
    before = snapshot(place.channel, OURS)
    for number, damage in enumerate((shutil.rmtree, no_index, bad_shard), 1):
        damage(place.channel / f"weight_v{number:06d}")
    (place.channel / "latest").write_text("junk")
    assert repaired(place).left == [] and snapshot(place.channel, OURS) == before


@pytest.mark.parametrize("encoding", ["small", "xor", "overwrite"])
def test_in_every_encoding(tmp_path: Path, encoding: str) -> None:
    place = made(tmp_path, encoding=encoding)
    before = snapshot(place.channel, OURS)
    bad_shard(place.channel / "weight_v000002")
    assert repaired(place).left == []
    assert snapshot(place.channel, OURS) == before


def test_what_several_ranks_wrote(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    model = all_changed(place.model, np.random.default_rng(4))

    def publish(rank: int) -> None:
        names = sorted(model)[rank::2]
        mine = write_checkpoint(tmp_path / f"rank-{rank}", {name: model[name] for name in names})
        with Publisher.open(
            place.channel,
            local=place.pub,
            base=place.base,
            rank=rank,
            world_size=2,
            options=PublisherOptions(deadline_seconds=60, upkeep=KEEPS, upkeep_thread=False),
        ) as publisher:
            publisher.publish_checkpoint(mine, step=1)

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(publish, (0, 1)))
    before = snapshot(place.channel, OURS)
    shards = sorted((place.channel / "weight_v000001").glob("*.safetensors"))
    assert len(shards) == 2
    shards[1].write_bytes(b"")
    done = repaired(place)
    assert done.left == [], done
    assert snapshot(place.channel, OURS) == before


def test_signatures_stay(tmp_path: Path) -> None:
    key = tmp_path / "key"
    assert weightcast(["keygen", "--out", str(key)]) == 0
    public = str(load_private_key(key).public)
    place = make_place(tmp_path / "run", sign_key=key)
    with place.publisher(upkeep=KEEPS, sign_key=key) as publisher:
        for model in models_of(place)[1:]:
            publisher.publish_checkpoint(place.new(model))
    before = snapshot(place.channel, OURS)
    shutil.rmtree(place.channel / "weight_v000002")
    bad_shard(place.channel / "weight_v000003")
    done = repair_channel(
        open_store(place.channel), place.pub, PublisherOptions(take_over_seconds=0.0, trusted_keys=[public])
    )
    assert done.left == [] and faults(open_store(place.channel), None, Trust.load([public])) == []
    assert snapshot(place.channel, OURS) == before


def test_what_comes_out_otherwise_stays_out(place: Place) -> None:
    """An index that asks for other bytes: nothing of the version is touched, and that is said."""
    shutil.rmtree(place.pub / ".weightcast/history")
    bad_shard(place.channel / "weight_v000002")
    before = snapshot(place.channel, OURS)
    done = repaired(place)
    assert [problem.version for problem in done.left] == [2] and done.done != []
    assert all("anchor" in text for text in done.done)
    after = snapshot(place.channel, OURS)
    assert {name: after[name] for name in before} == before


def test_another_s_journals_are_not_believed(place: Place, tmp_path: Path) -> None:
    history = place.pub / ".weightcast/history"
    shutil.copy(history / "000003.journal", history / "000002.journal")
    bad_shard(place.channel / "weight_v000001")
    bad_shard(place.channel / "weight_v000003")
    done = repaired(place)
    assert any("version 1 cannot be restored" in note for note in done.notes)
    assert [problem.version for problem in done.left if problem.part == "version"] == [1]

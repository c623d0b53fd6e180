"""Killed while making what lies beside versions, or while pruning: the channel stays legal."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
from core_cases import Model, ended, some_changed, start
from publisher_cases import Place, make_place

from weightcast.publisher.maintenance.retention import Retention
from weightcast.publisher.maintenance.upkeep import UpkeepOptions
from weightcast.shared.channel.chain import verify
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store

INDEX = "model.safetensors.index.json"
CHILD = Path(__file__).with_name("upkeep_child.py")
OPTIONS = UpkeepOptions(
    skip_span=4, history_share=1000.0, retention=Retention(2, host_versions=0), grace_seconds=0.0
)
PLACES = (
    *("skip.begun", "shard.written", "skip.written", "skip.committed"),
    *("anchor.begun", "anchor.written", "anchor.committed"),
    *("prune.horizon", "prune.moved", "prune.emptying"),
)


def kill_at(name: str, place: Place, *new: Path) -> None:
    code, said = ended(start(CHILD, name, place.channel, place.pub, place.base, *new))
    assert code == -signal.SIGKILL, said


@pytest.mark.parametrize("name", ["history.linked", "history.kept"])
def test_a_journal_whose_keeping_was_killed_does_not_stay(tmp_path: Path, name: str) -> None:
    place = make_place(tmp_path)
    model, rng = place.model, np.random.default_rng(8)
    kill_at(name, place, place.new(some_changed(model, rng)))
    with place.publisher(upkeep=UpkeepOptions(skip_span=1, history_share=1000.0)) as publisher:
        for _ in range(3):
            model = some_changed(model, rng)
            publisher.publish_checkpoint(place.new(model))
    kept = {path.name.split(".")[0] for path in (place.pub / ".weightcast/history").iterdir()}
    assert kept == {"000003", "000004"}


@pytest.mark.parametrize("name", PLACES)
def test_killed_at(tmp_path: Path, name: str) -> None:
    place = make_place(tmp_path)
    models: list[Model] = [place.model]
    rng = np.random.default_rng(8)
    with place.publisher(upkeep=OPTIONS) as publisher:
        for _ in range(6):
            models.append(some_changed(models[-1], rng))
            publisher.publish_checkpoint(place.new(models[-1]))
            if len(models) == 4 and name.startswith("prune"):
                publisher.make_due()
    kill_at(name, place)
    assert verify(Channel.open(open_store(place.channel))) == []
    place.arrives(models[6], 6)
    with place.publisher(upkeep=OPTIONS) as publisher:
        publisher.make_due()
        assert publisher.make_due() == []
        models.append(some_changed(models[-1], rng))
        publisher.publish_checkpoint(place.new(models[-1]))
    made = [path for path in place.channel.glob("weight_v*/*") if path.is_dir()]
    assert made and all((path / INDEX).exists() for path in made)
    assert verify(Channel.open(open_store(place.channel))) == []
    place.arrives(models[7], 7)
    place.arrives(models[7], 7, tmp_path / "new host")

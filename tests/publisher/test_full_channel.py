"""A disk that is full at a step of a publication: nothing half done is seen, the next one goes on."""

from __future__ import annotations

import contextlib
import logging
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from core_cases import Model, all_changed, bytes_of, read_checkpoint
from publisher_cases import Place, make_place, numpy_model, trash
from waiting import wait_until

from weightcast.publisher.maintenance.retention import Retention
from weightcast.publisher.maintenance.upkeep import UpkeepOptions
from weightcast.shared.base.errors import RetryLater
from weightcast.shared.channel import pins
from weightcast.shared.channel.chain import verify
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store

POINTER_BYTES = 6
NOTE_BYTES = 4096
"""room for what pruning notes, and for no anchor"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return make_place(tmp_path, numpy_model(np.random.default_rng(3)))


@pytest.fixture
def disk() -> Iterator[Disk]:
    found = Disk()
    yield found
    found.grow()


class Disk:
    """Files that may not become longer stand for a disk that is full."""

    def __init__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def shrink(self, most: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, self._before[1]))

    def grow(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)


def changed(model: Model, seed: int) -> Model:
    return all_changed(model, np.random.default_rng(seed), 2)


def pointed(place: Place) -> int:
    with contextlib.suppress(FileNotFoundError):
        return int((place.channel / "latest").read_text())
    return 0


@pytest.mark.parametrize(("phase", "published"), [("diff", 0), ("commit", 0), ("patch", 1)])
def test_full_in_a_phase(place: Place, disk: Disk, phase: str, published: int) -> None:
    model = changed(place.model, 1)
    with place.publisher() as publisher:
        new = place.new(model)
        with pytest.raises(RetryLater):
            publisher.publish_checkpoint(new, watching=lambda now: disk.shrink(4) if now == phase else None)
        disk.grow()
        assert pointed(place) == published
        report = publisher.publish_checkpoint(new)
    assert (report.version, report.kind) == (published + 1, "delta")
    place.arrives(model, report.version)
    assert read_checkpoint(place.pub) == bytes_of(model)
    assert verify(Channel.open(open_store(place.channel))) == []
    assert not list(place.channel.glob("*.parts"))


def test_full_between_index_and_pointer(place: Place, disk: Disk) -> None:
    def hook(version: int, directory: Path, phase: str) -> None:
        if phase == "version" and version == 1 and not full:
            full.append(version)
            disk.shrink(POINTER_BYTES - 1)

    full: list[int] = []
    model = changed(place.model, 1)
    with place.publisher(post_write=hook) as publisher:
        with pytest.raises(RetryLater):
            publisher.publish_checkpoint(place.new(model))
        assert pointed(place) == 0
        disk.grow()
        publisher.recover()
        assert publisher.version == 1
        place.arrives(model, 1)
        model = changed(model, 2)
        assert publisher.publish_checkpoint(place.new(model)).version == 2
    place.arrives(model, 2)


def test_an_anchor_that_does_not_fit_is_written_beside_the_next_version(place: Place, disk: Disk) -> None:
    model, done = place.model, list[int]()
    with place.publisher(anchor_every=2) as publisher:
        for version in (1, 2, 3):
            model = changed(model, version)
            new = place.new(model)
            report = publisher.publish_checkpoint(
                new, watching=lambda now: disk.shrink(9999) if (now, len(done)) == ("anchor", 0) else None
            )
            disk.grow()
            assert report.version == version
            assert bool(report.anchor_problem) == (version == 2)
            if version == 2:
                assert not list(place.channel.glob("*/anchor"))
                done.append(version)
    assert [path.parent.name for path in place.channel.glob("*/anchor")] == ["weight_v000003"]
    place.arrives(model, 3)
    assert verify(Channel.open(open_store(place.channel))) == []


def test_an_ordered_anchor_that_does_not_fit_keeps_nobody_from_publishing(
    place: Place, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)  # commands in this process leave another one
    models, store = [changed(place.model, 1)], open_store(place.channel)
    with place.publisher() as publisher:
        publisher.publish_checkpoint(place.new(models[0]))
        models.append(changed(models[0], 2))
        new = place.new(models[1])
        pins.order(store, "anchor")
        disk.shrink(9999)
        # room is there again when the publication begins
        publisher.publish_checkpoint(new, watching=lambda now: disk.grow())
        assert f"maintenance of {place.channel} failed" in caplog.text
    place.arrives(models[1], 2)
    assert not list(place.channel.glob("weight_v*/anchor")) and pins.is_ordered(store, "anchor")
    assert place.publish(changed(models[1], 3)) == 3
    assert [path.parent.name for path in place.channel.glob("*/anchor")] == ["weight_v000002"]
    assert not pins.is_ordered(store, "anchor")


def test_an_ordered_anchor_of_damaged_weights_is_refused(place: Place) -> None:
    store, model = open_store(place.channel), changed(place.model, 1)
    with place.publisher() as publisher:
        publisher.publish_checkpoint(place.new(model))
        with (place.pub / "model.safetensors").open("r+b") as weights:
            weights.seek(-1, 2)
            last = weights.read()
            weights.seek(-1, 2)
            weights.write(bytes([last[0] ^ 1]))
        pins.order(store, "anchor")
        model = changed(model, 2)
        assert publisher.publish_checkpoint(place.new(model)).version == 2
    place.arrives(model, 2)
    refused = pins.refusal(store)
    assert refused is not None and "does not hold version 1" in str(refused)
    assert not pins.is_ordered(store, "anchor") and not list(place.channel.glob("weight_v*/anchor"))


def test_what_a_kill_left_half_deleted_is_deleted(place: Place) -> None:
    grave = place.channel / ".trash" / "weight_v000001-ab"
    grave.mkdir(parents=True)
    (grave / "model.safetensors").write_bytes(b"half")
    with place.publisher():
        assert list((place.channel / ".trash").iterdir()) == []


def anchored_and_two_more(place: Place) -> Model:
    model = place.model
    with place.publisher() as publisher:
        for version in range(1, 6):
            model = changed(model, version)
            publisher.publish_checkpoint(place.new(model))
            if version == 3:
                publisher.write_anchor()
    return model


def newest_only(grace_seconds: float) -> UpkeepOptions:
    return UpkeepOptions(anchor_every=1, retention=Retention(1), grace_seconds=grace_seconds)


def test_pruning_makes_room_where_an_anchor_does_not_fit(place: Place, disk: Disk) -> None:
    model = anchored_and_two_more(place)
    with place.publisher(upkeep=newest_only(3600.0)) as publisher:
        disk.shrink(NOTE_BYTES)
        for _ in range(2):
            with pytest.raises(OSError, match="too large"):
                publisher.make_due()
            assert [name.split("-")[0] for name in trash(place)] == ["weight_v000001", "weight_v000002"]
    with place.publisher(upkeep=newest_only(0.0)) as publisher:
        with pytest.raises(OSError, match="too large"):
            publisher.make_due()
        assert trash(place) == [], "due, and emptied before anything is made"
        disk.grow()
        assert publisher.make_due()[0] == "anchor of version 5"
    place.arrives(model, 5)
    assert verify(Channel.open(open_store(place.channel))) == []


def grave(place: Place) -> Path:
    made = place.channel / ".trash" / "weight_v000001-0-00000000.pruned"
    made.mkdir(parents=True)
    return made


def test_a_publication_that_failed_has_the_trash_emptied(place: Place, disk: Disk) -> None:
    with place.publisher(upkeep=newest_only(0.0)) as publisher:
        worker = publisher.work_in_background()
        assert worker is not None
        wait_until(lambda: not worker.busy)
        due = grave(place)
        new = place.new(changed(place.model, 1))
        with pytest.raises(RetryLater):
            publisher.publish_checkpoint(new, watching=lambda now: disk.shrink(4) if now == "diff" else None)
        disk.grow()
        wait_until(lambda: not due.exists())


def test_the_trash_is_emptied_while_nothing_is_published(place: Place) -> None:
    with place.publisher(upkeep=newest_only(0.5)) as publisher:
        worker = publisher.work_in_background()
        assert worker is not None
        wait_until(lambda: not worker.busy)
        due = grave(place)
        wait_until(lambda: not due.exists())

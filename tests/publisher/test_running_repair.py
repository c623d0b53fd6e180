"""A running publisher repairs its channel: by order, and by itself where it can write files again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from core_cases import snapshot, some_changed
from daemonkit import Daemon, Places, base_tensors, changed, rename_in
from forked import run_weightcast
from test_remake import DAMAGES, KEEPS, made, models_of
from waiting import wait_until

from weightcast.publisher.maintenance.repair import ChannelCheck
from weightcast.shared.channel import pins
from weightcast.shared.channel.chain import faults
from weightcast.shared.channel.directory_store import open_store

VERSIONS = 3


def committed(channel: Path) -> dict[str, bytes]:
    return {name: data for name, data in snapshot(channel).items() if name.startswith("weight_v")}


@pytest.fixture
def published(tmp_path: Path) -> Iterator[tuple[Places, Daemon]]:
    """A daemon that keeps journals of three versions, and does not check its channel by itself."""
    places = Places.made(tmp_path)
    daemon = Daemon.start(places, "--skip-span", "4", "--history-share", "1000", "--verify-rate", "0").ready()
    for number in range(1, VERSIONS + 1):
        rename_in(places.watch / f"step_{number}", changed(base_tensors(), number))
        daemon.wait_for_version(number)
    wait_until(lambda: not daemon.status()["upkeep"]["busy"])
    yield places, daemon
    daemon.kill()


def test_an_order_over_http_repairs_the_newest_version(published: tuple[Places, Daemon]) -> None:
    places, daemon = published
    before = committed(places.channel)
    DAMAGES[1](places.channel / "weight_v000003")
    assert faults(open_store(places.channel))
    answer = daemon.post("/v1/repair", None)
    assert (answer.status_code, answer.json()) == (202, {"ordered": True})
    result = wait_until(lambda: daemon.status()["repair"])
    assert any("weight_v000003" in line for line in result["done"]) and result["left"] == []
    assert committed(places.channel) == before and not pins.is_ordered(open_store(places.channel), "repair")
    # logged after it is shown
    wait_until(lambda: "channel repaired" in daemon.log.read_text())


def test_the_command_sends_the_order_and_waits(published: tuple[Places, Daemon]) -> None:
    places, daemon = published
    before = committed(places.channel)
    DAMAGES[0](places.channel / "weight_v000002")
    DAMAGES[4](places.channel / "weight_v000001")
    done = run_weightcast("channel", "repair", "--json", "--channel", places.channel)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert said["left"] == [] and len(said["done"]) >= 2, said
    assert places.latest() == "000003" and committed(places.channel) == before
    rename_in(places.watch / "step_9", changed(base_tensors(), 9))
    daemon.wait_for_version(4)


def test_a_cut_channel_file_is_restored_by_the_publisher_that_owns_it(
    published: tuple[Places, Daemon],
) -> None:
    places, daemon = published
    path = places.channel / "channel.json"
    before = path.read_bytes()
    path.write_bytes(before[:30])
    assert daemon.post("/v1/repair", None).status_code == 202
    result = wait_until(lambda: daemon.status()["repair"])
    assert result["done"] == [f"channel.json restored from {places.local}"] and result["left"] == []
    assert path.read_bytes() == before
    rename_in(places.watch / "step_9", changed(base_tensors(), 9))
    daemon.wait_for_version(VERSIONS + 1)


@pytest.mark.parametrize("content", [b"garbage", b"", b"0000", b"other/weight_v000001", None])
def test_a_damaged_pointer_is_put_back_by_the_publisher_that_owns_it(
    tmp_path: Path, content: bytes | None
) -> None:
    place = made(tmp_path)
    latest = place.channel / "latest"
    with place.publisher() as publisher:
        publisher.recover()
        before = latest.read_bytes()
        if content is None:
            latest.unlink()
        else:
            latest.write_bytes(content)
        publisher.obey_orders()
        assert latest.read_bytes() == before
        latest.write_bytes(b"garbage")
        version = publisher.publish_checkpoint(place.new(models_of(place)[1])).version
    assert version == int(before) + 1 and int(latest.read_bytes()) == version


def test_a_running_publisher_finds_and_repairs_damage_by_itself(tmp_path: Path) -> None:
    places = Places.made(tmp_path)
    daemon = Daemon.start(places, "--skip-span", "4", "--history-share", "1000")
    try:
        daemon.ready()
        rename_in(places.watch / "step_1", changed(base_tensors(), 1))
        daemon.wait_for_version(1)
        wait_until(
            lambda: not any(".parts" in name for name in committed(places.channel)), passing=(OSError,)
        )
        before = committed(places.channel)
        DAMAGES[1](places.channel / "weight_v000001")
        assert committed(places.channel) != before
        scans = (FileNotFoundError,)  # scratch directories come and go
        wait_until(lambda: committed(places.channel) == before, seconds=90, passing=scans)
        assert wait_until(lambda: daemon.status()["repair"])["done"]
    finally:
        daemon.kill()


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("version", [1, VERSIONS])
def test_the_check_finds_each_damage_in_process(
    tmp_path: Path, damage: Callable[[Path], None], version: int
) -> None:
    place = made(tmp_path)
    ticks = iter(range(0, 10_000, 40))
    with place.publisher(upkeep=KEEPS) as publisher:
        check = ChannelCheck(1 << 30, clock=lambda: next(ticks))
        assert publisher.check_channel(check) is None
        before = committed(place.channel)
        damage(place.channel / f"weight_v{version:06}")
        repairs = publisher.check_channel(check)
        assert repairs is not None and repairs.done and not repairs.notes
        assert committed(place.channel) == before and not faults(open_store(place.channel))
        assert publisher.check_channel(check) is None


def test_the_check_finds_a_damaged_config_file_that_a_version_carries(tmp_path: Path) -> None:
    place = made(tmp_path)
    ticks = iter(range(0, 10_000, 40))
    with place.publisher(upkeep=KEEPS, carry_config=True) as publisher:
        export = place.new(some_changed(models_of(place)[-1], np.random.default_rng(9)))
        (export / "tokenizer.json").write_text('{"new": 1}')
        version = publisher.publish_checkpoint(export).version
        before = committed(place.channel)
        carried = place.channel / f"weight_v{version:06}" / "carried" / "tokenizer.json"
        carried.write_text("{}")
        check = ChannelCheck(1 << 30, clock=lambda: next(ticks))
        repairs = publisher.check_channel(check)
        assert repairs is not None and repairs.done
        assert committed(place.channel) == before


def test_what_cannot_be_written_again_is_reported_once(tmp_path: Path) -> None:
    place = made(tmp_path)
    ticks = iter(range(0, 10_000, 40))
    for journal in (place.pub / ".weightcast" / "history").glob("000003.journal"):
        os.truncate(journal, journal.stat().st_size - 8)
    DAMAGES[1](place.channel / "weight_v000003")
    with place.publisher(upkeep=KEEPS) as publisher:
        check = ChannelCheck(1 << 30, clock=lambda: next(ticks))
        repairs = publisher.check_channel(check)
        assert repairs is not None and repairs.notes and not repairs.done
        assert publisher.check_channel(check) is None


def test_a_pruned_version_is_not_damage(tmp_path: Path) -> None:
    place = made(tmp_path)
    path = place.channel / "channel.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "horizon": 2}))
    shutil.rmtree(place.channel / "weight_v000001")
    ticks = iter(range(0, 10_000, 40))
    with place.publisher(upkeep=KEEPS) as publisher:
        assert publisher.check_channel(ChannelCheck(1 << 30, clock=lambda: next(ticks))) is None


def test_a_publisher_in_process_obeys_at_its_next_publication(tmp_path: Path) -> None:
    place = made(tmp_path)
    before = committed(place.channel)
    DAMAGES[1](place.channel / "weight_v000003")
    with place.publisher(upkeep=KEEPS) as publisher:
        pins.order(open_store(place.channel), "repair")
        model = some_changed(models_of(place)[-1], np.random.default_rng(9))
        assert publisher.publish_checkpoint(place.new(model)).version == 4
    assert not pins.is_ordered(open_store(place.channel), "repair")
    assert committed(place.channel).items() >= before.items()

"""Damaged deltas and full weights are gone around, wherever another way leads to the version; where none
does, that is told, and tried again later."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from blake3 import blake3
from core_cases import bytes_of, read_checkpoint, write_checkpoint
from local_cases import Run, catch_up, following, make_run, step_to

from weightcast.publisher.maintenance.upkeep import UpkeepOptions
from weightcast.shared.base.errors import DamagedFile, Refused, RetryLater, WeightcastError
from weightcast.shared.channel.chain import of_channel
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.checkpoint.local_updater import LocalUpdater, UpdaterOptions
from weightcast.shared.checkpoint.update.sources import DamagedSources
from weightcast.shared.checkpoint.update.stage import BadDelta
from weightcast.subscriber.sync.options import SyncOptions
from weightcast.subscriber.sync.sync import Sync

INDEX = "model.safetensors.index.json"
STEP_3, STEP_4, STEP_5 = "weight_v000003", "weight_v000004", "weight_v000005"
FROM_0, FROM_2, ANCHOR = f"{STEP_4}/from_v000000", f"{STEP_4}/from_v000002", f"{STEP_4}/anchor"
SKIPS = (FROM_0, FROM_2, "weight_v000002/from_v000000")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Versions 0 to 5; of 4 also deltas from 0 and 2, and full weights."""
    upkeep = UpkeepOptions(skip_span=4, anchor_every=4, history_share=1000.0)
    run = make_run(tmp_path_factory.mktemp("run"), 5, upkeep=upkeep)
    assert all((run.channel / name / INDEX).exists() for name in (*SKIPS, ANCHOR))
    return run


def shard(run: Run, directory: str) -> Path:
    (found,) = (run.channel / directory).glob("*.safetensors")
    return found


def flipped(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def another_s(path: Path) -> None:
    channel = next(parent for parent in path.parents if parent.name == "channel")
    (other,) = (channel / "weight_v000001").glob("*.safetensors")
    path.write_bytes(other.read_bytes())


def badly_made(path: Path) -> None:
    """The index names exactly these bytes, and they are no such delta."""
    flipped(path)
    index = path.parent / INDEX
    facts = json.loads(index.read_text())
    for record in facts["weightcast"]["files"]:
        if record[0] == path.name:
            record[2] = blake3(path.read_bytes()).hexdigest()
    index.write_text(json.dumps(facts))


DAMAGES: Sequence[Callable[[Path], None]] = (Path.unlink, flipped, cut, another_s, badly_made)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_delta_from_an_older_version(run: Run, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    damage(shard(run, FROM_0))
    with following(run, tmp_path / "host") as updater:
        step_to(updater, 0)
        catch_up(updater)
    assert read_checkpoint(tmp_path / "host") == bytes_of(run.latest)


@pytest.mark.parametrize("damage", DAMAGES[1:3])
def test_every_delta_to_a_version(run: Run, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """Every delta to version 4: its full weights are left."""
    for directory in (FROM_0, FROM_2, STEP_4):
        damage(shard(run, directory))
    with following(run, tmp_path / "host") as updater:
        step_to(updater, 0)
        catch_up(updater)
        catch_up(updater)
        assert len(updater.damaged_sources.damaged) == 0, "what was passed is forgotten"
    assert read_checkpoint(tmp_path / "host") == bytes_of(run.latest)


def test_in_a_leg_of_several_versions_only_the_bad_one_is_gone_around(run: Run, tmp_path: Path) -> None:
    for directory in SKIPS[:2]:
        shutil.rmtree(run.channel / directory)
    shutil.rmtree(run.channel / ANCHOR)
    shutil.copytree(run.channel / "weight_v000002/from_v000000", tmp_path / "kept")
    shutil.rmtree(run.channel / "weight_v000002/from_v000000")
    flipped(shard(run, "weight_v000002"))
    with following(run, tmp_path / "host") as updater:
        step_to(updater, 0)
        with pytest.raises(DamagedFile, match="weight_v000002"):
            catch_up(updater)
        shutil.copytree(tmp_path / "kept", run.channel / "weight_v000002/from_v000000")
        catch_up(updater)
    assert read_checkpoint(tmp_path / "host") == bytes_of(run.latest)


@pytest.mark.parametrize("damage", [Path.unlink, flipped, cut])
def test_a_newcomer_whose_full_weights_are_damaged(
    run: Run, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    (run.base / "model.safetensors").unlink()
    with following(run, tmp_path / "by anchor") as updater:
        catch_up(updater)
    assert read_checkpoint(tmp_path / "by anchor") == bytes_of(run.latest)
    damage(shard(run, ANCHOR))
    with following(run, tmp_path / "lost") as updater, pytest.raises((Refused, RetryLater, OSError)):
        catch_up(updater)
    assert not list((tmp_path / "lost").glob("*.safetensors"))
    write_checkpoint(run.base, run.models[0])
    with following(run, tmp_path / "by base") as updater:
        catch_up(updater)
    assert read_checkpoint(tmp_path / "by base") == bytes_of(run.latest)


def lanes_off(index: Path) -> None:
    """The lanes of one tensor are others."""
    facts = json.loads(index.read_text())
    row = next(iter(facts["weightcast"]["tensors"].values()))
    row[0] = f"{int(row[0], 16) ^ 1:032x}"
    index.write_text(json.dumps(facts))


def test_an_anchor_whose_index_contradicts_itself(run: Run, tmp_path: Path) -> None:
    """Found before anything is written, also where the bytes were changed with the lanes."""
    index = run.channel / ANCHOR / INDEX
    lanes_off(index)
    with following(run, tmp_path / "by base") as updater:
        catch_up(updater)
    assert read_checkpoint(tmp_path / "by base") == bytes_of(run.latest)
    flipped(shard(run, ANCHOR))
    no_base = LocalUpdater(
        open_store(run.channel), tmp_path / "lost", None, UpdaterOptions(visible_seconds=0.2)
    )
    for _ in range(2):
        with pytest.raises(DamagedFile) as told:
            no_base.update_to(Channel.open(open_store(run.channel)))
        assert str(index) in told.value.message and "channel repair" in told.value.remedy
    no_base.close()
    assert not (tmp_path / "lost/.weightcast/state.json").exists()
    assert any("lanes" in problem.message for problem in of_channel(Channel.open(open_store(run.channel))))


def test_an_anchor_with_other_bytes_is_not_the_operators_mistake(run: Run, tmp_path: Path) -> None:
    flipped(shard(run, ANCHOR))
    updater = LocalUpdater(
        open_store(run.channel), tmp_path / "lost", None, UpdaterOptions(visible_seconds=0.2)
    )
    with pytest.raises(DamagedFile, match="1 tensor with other bytes") as told:
        updater.update_to(Channel.open(open_store(run.channel)))
    updater.close()
    assert str(run.channel / ANCHOR) in told.value.message and "channel repair" in told.value.remedy


@pytest.mark.parametrize(("cell", "value"), [(1, 7), (2, "0" * 64)])
def test_an_anchor_whose_files_are_not_those_listed(
    run: Run, tmp_path: Path, cell: int, value: object
) -> None:
    index = run.channel / ANCHOR / INDEX
    facts = json.loads(index.read_text())
    for record in facts["weightcast"]["files"]:
        if record[0] == shard(run, ANCHOR).name:
            record[cell] = value
    index.write_text(json.dumps(facts))
    updater = LocalUpdater(
        open_store(run.channel), tmp_path / "lost", None, UpdaterOptions(visible_seconds=0.2)
    )
    with pytest.raises(DamagedFile, match="index lists") as told:
        updater.update_to(Channel.open(open_store(run.channel)))
    updater.close()
    assert str(shard(run, ANCHOR)) in told.value.message and "channel repair" in told.value.remedy


def test_a_damaged_delta_from_an_older_version_is_named_by_its_directory(run: Run, tmp_path: Path) -> None:
    badly_made(shard(run, FROM_0))
    with following(run, tmp_path / "host") as updater:
        step_to(updater, 0)
        catch_up(updater)
    sync = Sync(SyncOptions(run.channel, tmp_path / "other", run.base, visible_seconds=0.1))
    outcome = sync.sync_once()
    sync.close()
    told = next(reason for reason in outcome.degraded if "is avoided" in reason)
    assert f"{FROM_0}/{shard(run, FROM_0).name}, chunk." in told


def test_damaged_full_weights_that_would_be_fewer_bytes(run: Run, tmp_path: Path) -> None:
    flipped(shard(run, ANCHOR))
    for name in (FROM_0, FROM_2, STEP_4):
        # a sparse tail makes the deltas seem long
        (run.channel / name / "note").touch()
        with (run.channel / name / "note").open("r+b") as file:
            file.truncate(1 << 30)
    with following(run, tmp_path / "host") as updater:
        catch_up(updater)
    assert read_checkpoint(tmp_path / "host") == bytes_of(run.latest)


def test_where_nothing_leads_around_it_is_told_and_tried_again(run: Run, tmp_path: Path) -> None:
    whole = shard(run, STEP_5).read_bytes()
    flipped(shard(run, STEP_5))
    with following(run, tmp_path / "host") as updater:
        step_to(updater, 3)
        for _ in range(2):
            with pytest.raises(DamagedFile, match=STEP_5):
                catch_up(updater)
            assert read_checkpoint(tmp_path / "host") in map(bytes_of, run.models[3:5])
        shard(run, STEP_5).write_bytes(whole)
        catch_up(updater)
    assert read_checkpoint(tmp_path / "host") == bytes_of(run.latest)


def test_a_refused_hook_is_no_damage(run: Run, tmp_path: Path) -> None:
    def no(version: int, directory: Path) -> None:
        raise Refused("the hook says no")

    options = UpdaterOptions(visible_seconds=0.2, pre_read=no)
    updater = LocalUpdater(open_store(run.channel), tmp_path / "host", None, options)
    with pytest.raises(Refused, match="hook"):
        updater.update_to(Channel.open(open_store(run.channel)))
    assert updater.damaged_sources.damaged == {}
    updater.close()


def test_a_host_says_what_it_went_around(run: Run, tmp_path: Path) -> None:
    flipped(shard(run, FROM_0))
    shard(run, STEP_3).unlink()
    options = SyncOptions(run.channel, tmp_path / "host", run.base, visible_seconds=0.1)
    sync = Sync(options)
    try:
        outcome = sync.sync_once()
    finally:
        sync.close()
    assert (outcome.local_version, outcome.ready) == (5, True)
    assert any("source is avoided" in reason and "from_v000000" in reason for reason in outcome.degraded)
    assert "from_v000000" in sync.status.updates[-1].around[0]
    assert read_checkpoint(tmp_path / "host") == bytes_of(run.latest)


def test_attempts_end() -> None:
    """The same damage a second time is the outcome, whatever was met between."""
    met, damaged_sources = iter([3, 2, 3, 1]), DamagedSources()

    def attempt() -> None:
        with damaged_sources.delta(lambda version: version - 1):
            version = next(met)
            raise BadDelta(DamagedFile(f"version {version}"), version)

    told: list[str] = []
    with pytest.raises(WeightcastError, match="version 3"):
        damaged_sources.run(attempt, told.append)
    assert told == ["version 3", "version 2"] and next(met) == 1

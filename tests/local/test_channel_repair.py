"""Each kind of file of a channel, damaged in each way: `channel verify` names it and says what it means for
hosts; `channel repair` brings right what can be, and makes nothing worse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_cases import bytes_of, read_checkpoint, snapshot, some_changed, write_checkpoint
from local_cases import Run, catch_up, following, make_run

from weightcast.publisher import PublisherOptions
from weightcast.publisher.channel_repair import repair_channel
from weightcast.publisher.maintenance.upkeep import UpkeepOptions
from weightcast.publisher.run_publisher import RunPublisher
from weightcast.shared.base.errors import DamagedFile, Refused
from weightcast.shared.channel.chain import faults
from weightcast.shared.channel.claims import claim, this_process
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.reports import Report, write_report
from weightcast.shared.checkpoint.local_updater import LocalUpdater, UpdaterOptions
from weightcast.shared.cli.main import run as weightcast

INDEX = "model.safetensors.index.json"
KINDS = ["channel", "base", "latest", "index", "shard", "newest shard", "anchor index", "anchor shard"]
KINDS += ["claim", "report"]
DAMAGES = ["removed", "truncated", "flipped", "swapped", "duplicated"]

UNSEEN = {("latest", "swapped"), ("claim", "removed"), ("report", "removed"), ("anchor index", "removed")}
UNSEEN |= {(kind, "duplicated") for kind in ("index", "anchor index", "claim", "report")}
UNSEEN |= {("claim", "swapped"), ("report", "swapped"), ("channel", "swapped")}
"""what is there is a channel of its own right: an older pointer, an older claim, one report less"""
LOST = {(kind, damage) for kind in ("index", "shard", "newest shard") for damage in DAMAGES[:4]}


@dataclass(frozen=True)
class Runs:
    run: Run
    other: Run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Three versions, an anchor beside the second."""
    run = make_run(tmp_path_factory.mktemp("run"), 3, anchor_every=2)
    other = make_run(tmp_path_factory.mktemp("other"), 1, seed=8)
    write_report(
        open_store(run.channel),
        Report("h", "/l", "run", "idle", 1, None, "latest", 0, "", (), 3, "weightcast 1"),
    )
    return Runs(run, other)


@pytest.fixture
def run(runs: Runs, tmp_path: Path) -> Run:
    shutil.copytree(runs.run.root, tmp_path / "run")
    return Run(tmp_path / "run", runs.run.models)


def file_of(channel: Path, kind: str, version: int = 2) -> Path:
    directory = channel / f"weight_v{version:06d}"
    places: Mapping[str, Callable[[], Path]] = {
        "channel": lambda: channel / "channel.json",
        "base": lambda: channel / "base.json",
        "latest": lambda: channel / "latest",
        "index": lambda: directory / INDEX,
        "shard": lambda: next(directory.glob("*.safetensors")),
        "newest shard": lambda: next((channel / "weight_v000003").glob("*.safetensors")),
        "anchor index": lambda: directory / "anchor" / INDEX,
        "anchor shard": lambda: next((directory / "anchor").glob("*.safetensors")),
        "claim": lambda: max((channel / "publishers").iterdir()),
        "report": lambda: next((channel / "hosts").iterdir()),
    }
    return places[kind]()


def plant(runs: Runs, run: Run, kind: str, damage: str) -> None:
    path = file_of(run.channel, kind)
    data = path.read_bytes()
    if damage == "removed":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        at = len(data) - 1 if kind.endswith("shard") else 0
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    elif damage == "duplicated":
        path.with_name(f"{path.stem}2{path.suffix}").write_bytes(data)
    elif kind == "latest":
        path.write_text("000001")
    elif kind in ("channel", "base"):
        path.write_bytes(file_of(runs.other.channel, kind).read_bytes())
    elif kind in ("index", "shard", "newest shard"):
        path.write_bytes(file_of(run.channel, kind.removeprefix("newest "), 1).read_bytes())
    elif kind.startswith("anchor"):
        path.write_bytes(file_of(run.channel, kind.removeprefix("anchor "), 1).read_bytes())


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_fault(runs: Runs, run: Run, tmp_path: Path, kind: str, damage: str) -> None:
    plant(runs, run, kind, damage)
    before = snapshot(run.channel, ())
    found = faults(open_store(run.channel))
    assert snapshot(run.channel, ()) == before, "looking changes nothing"
    assert bool(found) is ((kind, damage) not in UNSEEN), found
    assert all(problem.meaning and problem.message for problem in found)
    done = repair_channel(open_store(run.channel), run.root / "pub", PublisherOptions(take_over_seconds=0.0))
    assert bool(done.left) is ((kind, damage) in LOST), done
    assert bool(done.done) is (bool(found) and (kind, damage) not in NOTHING_TO_DO), done
    after = snapshot(run.channel, ())
    committed = {name: digest for name, digest in before.items() if name.startswith("weight_v")}
    moved = [name for name in committed if name not in after]
    assert all("anchor" in name or "2.safetensors" in name for name in moved)
    assert all(after[name] == digest for name, digest in committed.items() if name in after)
    if kind == "channel" and damage != "swapped":
        assert file_of(run.channel, kind).read_bytes() == file_of(runs.run.channel, kind).read_bytes()
    if (kind, damage) in LOST:
        joins(run, tmp_path / "host", None)
    elif (kind, damage) != ("channel", "swapped"):
        joins(run, tmp_path / "host", run.base)


NOTHING_TO_DO = {("shard", damage) for damage in DAMAGES[:4]}
"""its anchor leads past it"""


def joins(run: Run, local: Path, base: Path | None) -> None:
    """A new host gets to the pointer."""
    updater = LocalUpdater(open_store(run.channel), local, base, UpdaterOptions(visible_seconds=0.2))
    try:
        catch_up(updater)
        assert updater.local is not None
        version = updater.local.state.position.version
    finally:
        updater.close()
    assert version == int((run.channel / "latest").read_text())
    assert read_checkpoint(local) == bytes_of(run.models[version])


def test_a_damaged_channel_file_names_one_remedy(runs: Runs, run: Run) -> None:
    plant(runs, run, "channel", "truncated")
    with pytest.raises(DamagedFile, match=r"channel\.json") as damaged:
        repair_channel(open_store(run.channel))
    assert "--local PUBLISHER_LOCAL" in damaged.value.remedy
    (run.root / "pub" / ".weightcast" / "channel.json").unlink()
    with pytest.raises(DamagedFile, match="has no copy") as damaged:
        repair_channel(open_store(run.channel), run.root / "pub")
    assert "from a backup" in damaged.value.remedy and "repair" not in damaged.value.remedy


def test_the_channel_file_of_another_run_is_not_taken(runs: Runs, run: Run) -> None:
    plant(runs, run, "channel", "truncated")
    kept = run.root / "pub" / ".weightcast" / "channel.json"
    kept.write_bytes(kept.read_bytes().replace(b'"run_id":"', b'"run_id":"other-'))
    before = file_of(run.channel, "channel").read_bytes()
    with pytest.raises(Refused, match="is of run other-"):
        repair_channel(open_store(run.channel), run.root / "pub")
    assert file_of(run.channel, "channel").read_bytes() == before


def test_a_sound_channel_is_left_alone(run: Run) -> None:
    before = snapshot(run.channel, ())
    done = repair_channel(open_store(run.channel), run.root / "pub")
    assert (done.done, done.left, done.notes) == ([], [], [])
    assert snapshot(run.channel, ()) == before


def test_a_channel_whose_publisher_lives_is_left_to_it(runs: Runs, run: Run) -> None:
    plant(runs, run, "latest", "removed")
    held = claim(open_store(run.channel), this_process(), take_over=False)
    before = snapshot(run.channel, ())
    with pytest.raises(Refused, match=r"this process has .* open already"):
        held.beat()
        repair_channel_while_beating(run, held)
    assert {n: d for n, d in snapshot(run.channel, ()).items() if "publishers" not in n} == {
        n: d for n, d in before.items() if "publishers" not in n
    }


def repair_channel_while_beating(run: Run, held: Any) -> None:
    import threading

    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.1):
            held.beat()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        repair_channel(open_store(run.channel), None, PublisherOptions(take_over_seconds=3.0))
    finally:
        stop.set()
        thread.join()


def test_publishing_goes_on_after_a_repair(runs: Runs, run: Run, tmp_path: Path) -> None:
    for kind in ("latest", "anchor shard", "index"):
        plant(runs, run, kind, "truncated")
    repair_channel(open_store(run.channel), run.root / "pub")
    model = some_changed(run.models[3], np.random.default_rng(3))
    with RunPublisher.open(run.channel, local=run.root / "pub", base=run.base) as publisher:
        report = publisher.publish_checkpoint(write_checkpoint(tmp_path / "new", model))
    assert (report.version, report.kind) == (4, "delta")
    with following(run, tmp_path / "host") as updater:
        catch_up(updater)
    assert read_checkpoint(tmp_path / "host") == bytes_of(model)


def test_a_committed_version_that_is_not_announced_is_its_publisher_s_matter(run: Run) -> None:
    (run.channel / "latest").write_text("000002")
    (run.channel / "weight_v000001 copy").mkdir()
    done = repair_channel(open_store(run.channel))
    assert (run.channel / "latest").read_text() == "000002"
    assert len(done.notes) == 1 and "version 3 is committed but not announced" in done.notes[0]


def test_what_is_moved_can_be_had_back_for_a_while(runs: Runs, run: Run) -> None:
    plant(runs, run, "anchor shard", "flipped")
    anchor, trash = file_of(run.channel, "anchor shard").parent, run.channel / ".trash"
    before = snapshot(anchor, ())
    repair_channel(open_store(run.channel))
    keeping = UpkeepOptions(anchor_every=1)
    with RunPublisher.open(
        run.channel, local=run.root / "pub", options=PublisherOptions(upkeep_thread=False, upkeep=keeping)
    ) as publisher:
        publisher.make_due()
        (kept,) = trash.glob("*/anchor")
        assert snapshot(kept, ()) == before
    at_once = replace(keeping, grace_seconds=0.0)
    with RunPublisher.open(
        run.channel, local=run.root / "pub", options=PublisherOptions(upkeep_thread=False, upkeep=at_once)
    ) as publisher:
        publisher.make_due()
    assert list(trash.iterdir()) == []


def test_as_verbs(runs: Runs, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    plant(runs, run, "anchor shard", "flipped")
    assert weightcast(["channel", "verify", "--channel", str(run.channel)]) == 3
    assert "hosts that join" in capsys.readouterr().out
    assert weightcast(["channel", "repair", "--channel", str(run.channel), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["left"] == [] and "anchor moved to .trash" in told["done"][0]
    assert weightcast(["channel", "verify", "--channel", str(run.channel)]) == 0
    plant(runs, run, "shard", "removed")
    assert weightcast(["channel", "repair", "--channel", str(run.channel)]) == 3
    assert "until it is repaired" in capsys.readouterr().out


def test_what_is_lost_is_told_until_it_is_pruned(
    runs: Runs, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(runs, run, "shard", "flipped")
    shutil.rmtree(file_of(run.channel, "anchor shard").parent)
    here = ("--channel", str(run.channel))
    assert weightcast(["channel", "repair", *here, "--local", str(run.root / "pub")]) == 3
    assert "anchor of version 3 written" in capsys.readouterr().out
    assert weightcast(["channel", "verify", *here]) == 3
    assert "leads past it" in capsys.readouterr().out
    model = some_changed(run.models[3], np.random.default_rng(3))
    with RunPublisher.open(run.channel, local=run.root / "pub") as publisher:
        publisher.publish_checkpoint(write_checkpoint(tmp_path / "new", model))
    assert weightcast(["channel", "prune", *here, "--keep-versions", "1", "--host-versions", "0"]) == 0
    assert weightcast(["channel", "verify", *here]) == 0

"""Tensors that are not the version's: found by reading, made anew from base or anchor and deltas, nothing
else touched."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from core_cases import bytes_of, read_checkpoint, rot
from hypothesis import given, settings
from hypothesis import strategies as st
from local_cases import (
    Run,
    catch_up,
    edit_state,
    following,
    in_memory,
    make_run,
    patch_keeping_undo,
    phase_of,
    state_of,
    step_to,
)

from weightcast.shared.base.elements import TensorSpec, TensorTable
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.store import Store
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.checkpoint.local_updater import LocalUpdater, UpdaterOptions
from weightcast.shared.checkpoint.state.state import EngineState, Mark, read_state, write_state
from weightcast.shared.checkpoint.update.sources import repair_sources
from weightcast.shared.checkpoint.verify.repair import (
    Repaired,
    RepairSource,
    plan_repair,
    repair,
)

ENCODINGS = ["fast", "small", "xor", "overwrite"]


@pytest.fixture(scope="module", params=ENCODINGS)
def encoded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("run"), 3, files=2, encoding=request.param)


@pytest.fixture(scope="module")
def anchored(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An anchor beside version 2 of 3."""
    return make_run(tmp_path_factory.mktemp("anchored"), 3, anchor_every=2)


def followed(run: Run, local: Path) -> Path:
    with following(run, local) as updater:
        catch_up(updater)
    return local


def repaired(run: Run, local: Path, base: Path | None, store: Store | None = None) -> Repaired | None:
    """From the run's channel, or a copy of it in `store`."""
    store = open_store(run.channel) if store is None else store
    updater = LocalUpdater(store, local, base, UpdaterOptions(visible_seconds=0.2))
    try:
        channel = Channel.open(store)
        updater.load(channel)
        updater.rehash()
        return updater.repair(channel)
    finally:
        updater.close()


def holds(run: Run, local: Path, version: int = 3) -> None:
    assert read_checkpoint(local) == bytes_of(run.models[version])
    assert (phase_of(local), state_of(local)["position"]["version"]) == ("clean", version)
    assert list((local / ".weightcast/spool").iterdir()) == []


def weight_inodes(local: Path) -> list[int]:
    return [path.stat().st_ino for path in sorted(local.glob("*.safetensors"))]


def test_the_damaged_tensors_alone_are_made_anew(encoded: Run, tmp_path: Path) -> None:
    local = followed(encoded, tmp_path / "local")
    before = weight_inodes(local)
    for name, byte in (("long", 4000), ("scalar", 1), ("f64.matrix", 40), ("odd.first", 2)):
        rot(local, name, byte)
    done = repaired(encoded, local, encoded.base)
    assert done is not None and done.source == str(encoded.base)
    assert set(done.tensors) == {"long", "scalar", "f64.matrix", "odd.first"} and done.words == 4
    holds(encoded, local)
    assert weight_inodes(local) == before


def test_nothing_is_written_where_nothing_differs(encoded: Run, tmp_path: Path) -> None:
    local = followed(encoded, tmp_path / "local")
    times = [path.stat().st_mtime_ns for path in sorted(local.glob("*.safetensors"))]
    assert repaired(encoded, local, encoded.base) is None
    edit_state(local, phase="dirty")
    done = repaired(encoded, local, encoded.base)
    assert done is not None and (done.tensors, done.words) == ((), 0)
    holds(encoded, local)
    assert [path.stat().st_mtime_ns for path in sorted(local.glob("*.safetensors"))] == times


def test_from_an_anchor_where_there_is_no_base(anchored: Run, tmp_path: Path) -> None:
    local = followed(anchored, tmp_path / "local")
    rot(local, "long", 77)
    done = repaired(anchored, local, None)
    assert done is not None and done.source.endswith("weight_v000002/anchor")
    holds(anchored, local)


def test_from_an_anchor_in_an_object_store_by_the_ranges_that_are_needed(
    anchored: Run, tmp_path: Path
) -> None:
    """Seeding would read the whole anchor, and refuse it."""
    local, store = tmp_path / "local", in_memory(anchored)
    with following(anchored, local) as updater:
        step_to(updater, 2)
    shutil.copytree(anchored.channel / "weight_v000002/anchor", tmp_path / "anchor")
    rot(tmp_path / "anchor", "odd.first", 2)
    [shard] = (tmp_path / "anchor").glob("*.safetensors")
    store.replace(f"weight_v000002/anchor/{shard.name}", shard.read_bytes())
    rot(local, "long", 77)
    done = repaired(anchored, local, None, store)
    assert done is not None and (done.tensors, done.words) == (("long",), 1)
    assert done.source == store.place("weight_v000002/anchor")
    holds(anchored, local, 2)


@pytest.mark.parametrize("damaged", ["base", "channel/weight_v000002/anchor"])
def test_a_way_that_is_damaged_is_left_for_another(anchored: Run, tmp_path: Path, damaged: str) -> None:
    """What full weights lead to is proven before it is written."""
    local = followed(anchored, tmp_path / "local")
    base = Path(shutil.copytree(anchored.base, tmp_path / "base"))
    channel = Path(shutil.copytree(anchored.channel, tmp_path / "channel"))
    rot(local, "long", 77)
    run = Run(tmp_path, anchored.models)
    assert run.channel == channel and run.base == base
    rot(tmp_path / damaged, "long", 5)
    done = repaired(run, local, base)
    assert done is not None and str(tmp_path / damaged) != done.source
    holds(anchored, local)


@pytest.mark.parametrize("damage", ["delta", "base", "config"])
def test_what_cannot_be_repaired_is_seeded_again(anchored: Run, tmp_path: Path, damage: str) -> None:
    local = followed(anchored, tmp_path / "local")
    run = Run(tmp_path, anchored.models)
    shutil.copytree(anchored.base, run.base)
    shutil.copytree(anchored.channel, run.channel)
    rot(local, "long", 77)
    before = read_checkpoint(local)
    if damage == "delta":
        shard = next((run.channel / "weight_v000003").glob("*.safetensors"))
        shard.write_bytes(bytes(shard.stat().st_size))
    elif damage == "base":
        shutil.rmtree(run.base)
        shutil.rmtree(run.channel / "weight_v000002/anchor")
    else:
        (local / "model.safetensors").unlink()
    assert repaired(run, local, run.base) is None
    assert phase_of(local) in ("dirty", "clean")
    if damage != "config":
        assert phase_of(local) == "dirty" and read_checkpoint(local) == before, "nothing was written"
    with following(anchored, local) as updater:
        catch_up(updater)
    holds(anchored, local)


def test_a_base_seeded_and_never_moved(anchored: Run, tmp_path: Path) -> None:
    local = tmp_path / "local"
    with following(anchored, local) as updater:
        channel = Channel.open(open_store(anchored.channel))
        pointer = channel.pointer()
        assert pointer is not None
        updater.load(channel)
        route = updater.route(channel, pointer, 0, exact=True)
        updater.seed(channel, route, route.plan)  # type: ignore[arg-type]
    rot(local, "i8.matrix", 3)
    done = repaired(anchored, local, anchored.base)
    assert done is not None and (done.tensors, done.words) == (("i8.matrix",), 1)
    holds(anchored, local, 0)


@pytest.mark.parametrize("boot_id", ["another boot", ""])
def test_after_a_reboot_only_lost_pages_are_written(encoded: Run, tmp_path: Path, boot_id: str) -> None:
    local = followed(encoded, tmp_path / "local")
    rot(local, "long", 4000)
    edit_state(local, boot_id=boot_id)
    before = weight_inodes(local)
    with following(encoded, local) as updater:
        channel = Channel.open(open_store(encoded.channel))
        updater.load(channel)
        assert updater.local is None and "restart of the machine" in updater.trouble
        done = updater.repair(channel)
        assert done is not None and (done.tensors, done.words) == (("long",), 1)
        assert updater.local is not None and updater.trouble == ""
    holds(encoded, local)
    assert weight_inodes(local) == before


def test_after_a_reboot_with_lost_pages_no_way_leads_back(anchored: Run, tmp_path: Path) -> None:
    """Journals are not synced: what is left of one may be anything."""
    local = tmp_path / "local"
    with following(anchored, local) as updater:
        step_to(updater, 2)
        patch_keeping_undo(updater, 3)
    for journal in (local / ".weightcast/journal").iterdir():
        journal.unlink()
    rot(local, "long", 4000)
    edit_state(local, boot_id="another boot")
    with following(anchored, local) as updater:
        channel = Channel.open(open_store(anchored.channel))
        updater.load(channel)
        assert updater.repair(channel) is not None
    holds(anchored, local)
    assert state_of(local)["undo"] == []


def test_engines_that_read_it_are_in_doubt(anchored: Run, tmp_path: Path) -> None:
    local = followed(anchored, tmp_path / "local")
    path = local / ".weightcast/state.json"
    state = read_state(path)
    assert state is not None
    engines = {
        "a": EngineState(Mark.SERVED, 3, "digest", "p"),
        "b": EngineState(Mark.PAUSING, 2, "label", None),
    }
    write_state(path, state.but(engines=engines))
    rot(local, "long", 4000)
    assert repaired(anchored, local, anchored.base) is not None
    after = read_state(path)
    assert after is not None
    assert {name: one.mark for name, one in after.engines.items()} == {"a": Mark.SUSPECT, "b": Mark.PAUSING}
    assert "damaged in 1 tensor " in after.engines["a"].reason


def test_rot_that_a_patch_meets_costs_no_new_seed(anchored: Run, tmp_path: Path) -> None:
    """The usual way in which rot is found: an old word is not what the delta expects."""
    local = tmp_path / "local"
    with following(anchored, local) as updater:
        channel = Channel.open(open_store(anchored.channel))
        pointer = channel.pointer()
        assert pointer is not None
        updater.load(channel)
        route = updater.route(channel, pointer, 0, exact=True)
        updater.seed(channel, route, route.plan)  # type: ignore[arg-type]
    rot(local, "long", 4000)
    before = weight_inodes(local), state_of(local)["generation"]
    with following(anchored, local) as updater:
        updater.load(Channel.open(open_store(anchored.channel)))
        updater.rehash()
        assert updater.repairable
        catch_up(updater)
    holds(anchored, local)
    assert weight_inodes(local) == before[0]


TABLE = TensorTable.of(
    [
        TensorSpec("a", "BF16", (3 << 20,), 6 << 20),
        TensorSpec("b", "BF16", (3 << 20,), 6 << 20),
        TensorSpec("c", "BF16", (7,), 14),
        TensorSpec("d", "F32", (1,), 4),
        TensorSpec("e", "F32", (0,), 0),
    ]
)


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, 4)))
def test_a_walk_without_deltas_reads_the_tensors_alone(tensors: set[int]) -> None:
    walk = plan_repair(TABLE, RepairSource(Path("base"), of_base=True), tensors)
    assert {run.tensor for run in walk.words} == tensors
    assert walk.nbytes == sum(TABLE[tensor].nbytes for tensor in tensors)


@pytest.mark.parametrize("turn", [1, -1])
def test_the_source_of_fewest_bytes_comes_first(anchored: Run, tmp_path: Path, turn: int) -> None:
    local = followed(anchored, tmp_path / "local")
    rot(local, "long", 77)
    opened = LocalCheckpoint.open(local)
    assert opened is not None
    with opened:
        ways = repair_sources(Channel.open(open_store(anchored.channel)), 3, opened.table, anchored.base)[
            ::turn
        ]
        plans = [plan_repair(opened.table, way, [opened.table.numbers["long"]]) for way in ways]
        assert len({plan.nbytes for plan in plans}) == len(plans) > 1
        done = repair(opened, lambda position: ways)
    least = min(plans, key=lambda plan: plan.nbytes)
    assert (done.source, done.nbytes) == (least.way.place, least.nbytes)


def test_neighbours_in_a_chunk_are_read_with_it(encoded: Run, tmp_path: Path) -> None:
    """A chunk is decoded as a whole, a payload is not."""
    local = followed(encoded, tmp_path / "local")
    channel = Channel.open(open_store(encoded.channel))
    assert channel.base is not None
    table = channel.base.table
    (way,) = repair_sources(channel, 3, table, encoded.base)
    walk = plan_repair(table, way, [table.numbers["bf16.matrix"]])
    dtypes = {table[run.tensor].dtype for run in walk.words}
    names = {table[run.tensor].name for run in walk.words}
    assert dtypes == {"BF16"} and "bf16.matrix" in names
    payloads = way.deltas[0].index.encoding in ("xor", "overwrite")
    assert ("long" in names) is not payloads
    assert local.is_dir() and np.all([len(chunks) <= 2 for chunks in walk.chunks])

"""Deltas from older versions and anchors, made after the versions: what hosts read, what a kill leaves."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from core_cases import Model, bytes_of, flip, read_checkpoint, some_changed
from disk_errors import watched
from publisher_cases import Place
from waiting import wait_until

from weightcast.publisher import Publisher
from weightcast.publisher.maintenance.multi_step_deltas import multi_step_deltas
from weightcast.publisher.maintenance.replay_log import KeptJournals, ReplayLog
from weightcast.publisher.maintenance.retention import cheapest
from weightcast.publisher.maintenance.upkeep import Chain, PatchRate, UpkeepOptions, due_anchor
from weightcast.shared.base.errors import DamagedFile, RetryLater
from weightcast.shared.channel.chain import verify
from weightcast.shared.channel.channel import Channel, Shown
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.index import Index
from weightcast.shared.channel.layout import Pointer
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, LocalPaths
from weightcast.shared.checkpoint.local_updater import LocalUpdater
from weightcast.shared.checkpoint.update.plan import Patch, Relabel, Seed
from weightcast.shared.checkpoint.update.sources import Route

INDEX = "model.safetensors.index.json"
SPANS = UpkeepOptions(skip_span=64, history_share=1000.0)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(41)


def grow(publisher: Publisher, place: Place, models: list[Model], versions: int, seed: int = 5) -> None:
    """Publishes more versions; every fourth goes back to the words of the one before, here and there."""
    rng = np.random.default_rng(seed + len(models))
    for _ in range(versions):
        models.append(some_changed(models[-1], rng))
        if len(models) % 4 == 0:
            names = sorted(models[-1])[::3]
            models[-1] |= {name: models[-3][name] for name in names}
        assert publisher.publish_checkpoint(place.new(models[-1])).version == len(models) - 1


def beside(place: Place) -> list[str]:
    return sorted(str(path.parent.relative_to(place.channel)) for path in place.channel.glob(f"*/*/{INDEX}"))


@contextlib.contextmanager
def host_at(place: Place, version: int) -> Iterator[LocalUpdater]:
    updater = place.follow(place.root / f"host-{version}")
    try:
        move(updater, version)
        yield updater
    finally:
        updater.close()


def move(updater: LocalUpdater, version: int) -> Route:
    channel = Channel.open(updater.store)
    updater.load(channel)
    pointer = channel.pointer() or Pointer(0)
    route = updater.route(channel, pointer, version, exact=True)
    updater._carry_out(channel, route, route.plan, None)
    return route


def holds(updater: LocalUpdater, model: Model) -> None:
    assert read_checkpoint(updater.paths.directory) == bytes_of(model)


def hops(route: Route) -> Sequence[int]:
    plan = route.plan.then if isinstance(route.plan, Seed | Relabel) else route.plan
    assert isinstance(plan, Patch)
    return [version for leg in plan.legs for version in leg]


def test_which_are_due() -> None:
    assert multi_step_deltas(8, 0, 8) == [
        *((8, 0), (8, 4), (4, 0)),
        *((8, 6), (6, 4), (4, 2), (2, 0)),
    ]
    assert multi_step_deltas(8, 3, 64) == [(8, 4), (8, 6), (6, 4)]
    assert multi_step_deltas(8, 8, 64) == multi_step_deltas(9, 0, 0) == []


def test_which_anchor_is_due() -> None:
    every, share = UpkeepOptions(anchor_every=10), UpkeepOptions(anchor_share=0.5)
    assert due_anchor(9, Chain(9, 0, 9999), 100, every, range(99)) is None
    assert due_anchor(12, Chain(12, 0, 0), 100, every, range(99)) == 10
    assert due_anchor(12, Chain(12, 0, 0), 100, every, {11, 12}) == 12
    assert due_anchor(12, Chain(12, 10, 9999), 100, every, range(99)) is None
    assert due_anchor(12, Chain(12, 10, 49), 100, share, range(99)) is None
    assert due_anchor(12, Chain(12, 10, 50), 100, share, range(99)) == 12
    assert due_anchor(12, Chain(12, 12, 0), 100, UpkeepOptions(), range(99)) is None
    slow = UpkeepOptions(anchor_seconds=60.0)
    assert due_anchor(12, Chain(12, 10, 50, 59.0), 100, slow, range(99)) is None
    assert due_anchor(12, Chain(12, 10, 49, 60.0), 100, slow, range(99)) is None
    assert due_anchor(12, Chain(12, 10, 50, 60.0), 100, slow, range(99)) == 12
    assert due_anchor(12, Chain(12, 12, 0, 60.0), 100, slow, range(99)) is None


def test_how_long_catching_up_takes() -> None:
    pace = PatchRate()
    pace.measured(10, 1000.0)
    assert pace.seconds_for(100) == 0.0, "the first one compiles"
    for _ in range(3):
        pace.measured(1000, 2.0)
    assert pace.seconds_for(50_000) == pytest.approx(100.0)
    shown = {v: Shown(10, {v - 4: 15} if v % 4 == 0 else {}) for v in range(1, 12)}
    way = cheapest(shown, 11, {0: 0})
    assert way is not None and way.nbytes == 15 + 15 + 30
    way = cheapest(shown, 4, {1: 0})
    assert way is not None and way.nbytes == 30
    assert cheapest({v: one for v, one in shown.items() if v != 9}, 11, {0: 0}) is None


def test_an_anchor_where_catching_up_takes_long(place: Place) -> None:
    models = [place.model]
    options = UpkeepOptions(anchor_seconds=1e-9, history_share=1000.0)
    with place.publisher(upkeep=options) as publisher:
        while not (made := publisher.make_due()):
            grow(publisher, place, models, 4)
            assert len(models) < 200
    assert [one.split()[0] for one in made] == ["anchor"]
    assert sum(path.stat().st_size for path in place.channel.glob("weight_v*/*")) * 2 >= 65024


@pytest.mark.parametrize("encoding", ["fast", "small", "overwrite"])
def test_a_host_far_behind_reads_one_delta(place: Place, encoding: str) -> None:
    models = [place.model]
    with place.publisher(encoding=encoding, upkeep=SPANS) as publisher:
        with host_at(place, 0) as host:
            grow(publisher, place, models, 9)
            assert len(publisher.make_due()) == 4 + 2 + 1
            assert publisher.make_due() == []
            assert verify(Channel.open(open_store(place.channel))) == []
            assert hops(move(host, 8)) == [8]
            holds(host, models[8])
            # it goes on from there with a single step
            assert hops(move(host, 9)) == [9]
            holds(host, models[9])
        assert "weight_v000008/from_v000000" in beside(place) and len(beside(place)) == 7
    place.arrives(models[9], 9)


def test_every_start_arrives_at_the_same_bytes(place: Place) -> None:
    models = [place.model]
    with place.publisher(upkeep=SPANS) as publisher, contextlib.ExitStack() as hosts:
        grow(publisher, place, models, 7)
        followers = [hosts.enter_context(host_at(place, version)) for version in range(8)]
        grow(publisher, place, models, 5)
        publisher.make_due()
        for version, updater in enumerate(followers):
            taken = hops(move(updater, 12))
            assert len(taken) <= 4, (version, taken)
            holds(updater, models[12])
    place.arrives(models[12], 12, place.root / "new host")


def test_versions_that_come_while_one_is_made(place: Place) -> None:
    """Kept journals are undone that were not there when it began."""
    models = [place.model]
    with place.publisher(upkeep=SPANS) as publisher:
        grow(publisher, place, models, 4)
        worker = publisher.work_in_background()
        assert worker is not None
        grow(publisher, place, models, 12)
        wait_until(lambda: worker.problem or len(beside(place)) == 8 + 4 + 2 + 1, what="all are made")
        assert worker.problem == ""
    assert verify(Channel.open(open_store(place.channel))) == []
    place.arrives(models[16], 16)


def test_an_anchor_of_a_version_that_has_passed(place: Place) -> None:
    models = [place.model]
    options = UpkeepOptions(anchor_every=3, history_share=1000.0)
    with place.publisher(upkeep=options) as publisher:
        grow(publisher, place, models, 4)
        assert publisher.make_due() == ["anchor of version 3"]
        assert publisher.make_due() == []
        grow(publisher, place, models, 2)
        assert publisher.make_due() == ["anchor of version 6"]
    assert read_checkpoint(place.channel / "weight_v000003" / "anchor") == bytes_of(models[3])
    joiner = place.follow(place.root / "joiner", base=place.root / "no such base")
    joiner.base_dir = None
    try:
        joiner.update_to(Channel.open(open_store(place.channel)))
        holds(joiner, models[6])
    finally:
        joiner.close()


def test_an_anchor_by_the_bytes_of_the_chain(place: Place) -> None:
    full = sum(len(one.data) for one in place.model.values())
    models = [place.model]
    with place.publisher(upkeep=UpkeepOptions(anchor_share=1.0)) as publisher:
        while not publisher.make_due():
            grow(publisher, place, models, 1)
        sizes = [
            sum(path.stat().st_size for path in version.iterdir() if path.is_file())
            for version in sorted(place.channel.glob("weight_v*"))
        ]
    assert sum(sizes[:-1]) < full <= sum(sizes)
    assert beside(place) == [f"weight_v{len(sizes):06d}/anchor"]


def test_nothing_changed_between(place: Place) -> None:
    models = [place.model]
    with place.publisher(upkeep=SPANS) as publisher:
        for _ in range(2):
            publisher.publish_checkpoint(place.new(models[0]))
        publisher.make_due()
        assert beside(place) == ["weight_v000002/from_v000000"]
        assert [path.name for path in (place.channel / beside(place)[0]).iterdir()] == [INDEX]
    assert verify(Channel.open(open_store(place.channel))) == []


def test_there_and_back_again(place: Place, rng: np.random.Generator) -> None:
    other = some_changed(place.model, rng)
    with place.publisher(upkeep=SPANS) as publisher:
        publisher.publish_checkpoint(place.new(other))
        publisher.publish_checkpoint(place.new(place.model))
        publisher.make_due()
    channel = Channel.open(open_store(place.channel))
    assert channel.base is not None
    found = channel.skip(2, 0, channel.base.table)
    assert isinstance(found, Index) and found.root == found.base_root and not found.chunks


def test_without_options_nothing_is_kept_or_made(place: Place) -> None:
    models = [place.model]
    with place.publisher() as publisher:
        grow(publisher, place, models, 2)
        assert publisher.make_due() == [] and beside(place) == []
    assert not (place.pub / ".weightcast" / "history").exists()


def test_a_restarted_publisher_goes_on(place: Place) -> None:
    models = [place.model]
    with place.publisher(upkeep=SPANS) as publisher:
        grow(publisher, place, models, 3)
    with place.publisher(upkeep=SPANS) as publisher:
        grow(publisher, place, models, 1)
        publisher.make_due()
    assert "weight_v000004/from_v000000" in beside(place)


def test_kept_journals_are_bounded(place: Place) -> None:
    models = [place.model]
    history = place.pub / ".weightcast" / "history"
    with place.publisher(upkeep=UpkeepOptions(skip_span=2, history_share=1000.0)) as publisher:
        grow(publisher, place, models, 7)
        assert sorted(path.name for path in history.glob("*.journal")) == [
            f"{version:06d}.journal" for version in range(4, 8)
        ]
    with place.publisher(upkeep=UpkeepOptions(skip_span=8, history_share=0.0)) as publisher:
        grow(publisher, place, models, 1)
        assert list(history.iterdir()) == []


def test_journals_are_written_over_those_that_are_kept_no_more(place: Place) -> None:
    models = [place.model]
    room = place.pub / ".weightcast"
    journal = room / "history" / "000001.journal"
    with place.publisher(upkeep=UpkeepOptions(skip_span=2, history_share=1000.0)) as publisher:
        grow(publisher, place, models, 4)
        oldest = journal.stat().st_ino
        grow(publisher, place, models, 1)
        assert not journal.exists() and (room / "spare").stat().st_ino == oldest
        grow(publisher, place, models, 1)
        assert (room / "history" / "000006.journal").stat().st_ino == oldest
        publisher.make_due()
    assert not list(room.glob("spare*"))
    place.arrives(models[-1], 6)


def test_the_first_journals_find_a_spare_too(place: Place) -> None:
    models = [place.model]
    room = place.pub / ".weightcast"
    with place.publisher(upkeep=UpkeepOptions(skip_span=2, history_share=1000.0)) as publisher:
        grow(publisher, place, models, 1)
        assert not (room / "spare").exists()
        publisher.make_due()
        made = (room / "spare").stat()
        assert made.st_size == (room / "history" / "000001.journal").stat().st_size
        grow(publisher, place, models, 1)
        assert (room / "history" / "000002.journal").stat().st_ino == made.st_ino


def test_a_journal_that_is_dropped_while_a_delta_is_made_costs_no_other(place: Place) -> None:
    models = [place.model]
    history = KeptJournals(LocalPaths(place.pub))
    with place.publisher(upkeep=SPANS) as publisher:
        grow(publisher, place, models, 4)
        with ReplayLog(place.pub) as past:
            history.drop(1)
            with pytest.raises(RetryLater, match="version 1 is no longer kept"):
                past.words_at(0)(0, 0, 1)
            assert past.words_at(1)(0, 0, 1) is not None
        assert publisher.make_due() == ["delta of version 4 from version 2"]


def test_nobody_reads_a_new_version_before_its_journal_is_kept(place: Place) -> None:
    """Between the two, no older version could be read."""
    models, seen = [place.model], []

    def look(name: str, where: Path | None) -> None:
        if name in ("patch.recorded", "history.linked", "history.kept"):
            local = LocalCheckpoint.open(place.pub)
            assert local is not None
            with contextlib.closing(local), pytest.raises(RetryLater), local.reading(seconds=0.0):
                pass
            seen.append(name)

    with place.publisher(upkeep=SPANS) as publisher:
        grow(publisher, place, models, 1)
        with watched(look):
            grow(publisher, place, models, 1)
        with ReplayLog(place.pub) as past:
            assert set(past.positions()) == {0, 1, 2}
    assert seen == ["patch.recorded", "history.linked", "history.kept"]


@pytest.mark.parametrize("damage", ["journal", "step", "gone"])
def test_damaged_journals_cost_a_delta_and_nothing_else(place: Place, damage: str) -> None:
    models = [place.model]
    history = place.pub / ".weightcast" / "history"
    with place.publisher(upkeep=SPANS) as publisher:
        grow(publisher, place, models, 2)
        if damage == "journal":
            path = history / "000002.journal"
            path.write_bytes(path.read_bytes()[:-200] + b"x" * 100 + path.read_bytes()[-100:])
            with pytest.raises(DamagedFile):
                publisher.make_due()
        elif damage == "step":
            (history / "000002.json").write_text('{"journal": "../../x"}')
        else:
            (history / "000002.journal").unlink()
        assert publisher.make_due() == [] and beside(place) == []
        assert not list(place.channel.glob("*/from_*"))
        grow(publisher, place, models, 2)
        publisher.make_due()
        assert beside(place) == ["weight_v000004/from_v000002"]
    place.arrives(models[4], 4)


def test_drifted_words_are_not_published(place: Place) -> None:
    models = [place.model]
    with place.publisher(upkeep=SPANS) as publisher:
        grow(publisher, place, models, 2)
        for name, one in models[2].items():
            if one is not place.model[name] and len(one.data):
                for byte in range(len(one.data)):
                    flip(place.pub, name, byte)
        with pytest.raises(DamagedFile):
            publisher.make_due()
    assert not list(place.channel.glob("*/from_*"))


def test_a_stopping_publisher_leaves_nothing_half_made(place: Place) -> None:
    models = [place.model]
    with place.publisher(upkeep=SPANS) as publisher:
        grow(publisher, place, models, 4)
        publisher.work_in_background()
    made = list(place.channel.glob("*/from_*"))
    assert all((directory / INDEX).exists() for directory in made)
    assert not [thread for thread in threading.enumerate() if thread.name == "upkeep"]


@pytest.mark.parametrize("member", ["main", "root", "parent", "base_root"])
def test_a_delta_of_another_chain_is_found_by_verify_and_not_taken(place: Place, member: str) -> None:
    models = [place.model]
    with place.publisher(upkeep=SPANS) as publisher:
        grow(publisher, place, models, 4)
        publisher.make_due()
    path = place.channel / "weight_v000004" / "from_v000000" / INDEX
    index = json.loads(path.read_text())
    index["weightcast"][member] = "0" * 64
    path.write_text(json.dumps(index))
    problems = verify(Channel.open(open_store(place.channel)))
    assert [problem.version for problem in problems] == [4]
    with host_at(place, 0) as host:
        if member == "base_root":
            # the parent's digest is what names a version; staging finds out
            return
        assert hops(move(host, 4)) == [2, 4]
        holds(host, models[4])


def test_a_shard_that_is_damaged_is_not_applied(place: Place) -> None:
    models = [place.model]
    with place.publisher(upkeep=SPANS) as publisher:
        grow(publisher, place, models, 2)
        publisher.make_due()
    (shard,) = (place.channel / "weight_v000002" / "from_v000000").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with host_at(place, 0) as host:
        with pytest.raises(DamagedFile, match=shard.name):
            move(host, 2)
        holds(host, models[0])
        assert hops(move(host, 2)) == [1, 2]
        holds(host, models[2])

"""Upkeep, pruning, repair, orders and signatures over every kind of store, and over stores that fail."""

from __future__ import annotations

import errno
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_cases import Model, bytes_of, every_dtype, read_checkpoint, some_changed, write_checkpoint
from disk_errors import watched
from faulty_store import Fault, FaultyStore
from opening import open_publisher
from publisher_cases import STORE_PARAMS, TWINS, make_store

from weightcast.publisher import init_channel
from weightcast.publisher.api import Publisher, PublisherOptions
from weightcast.publisher.channel_repair import repair_channel, sign_channel
from weightcast.publisher.fleet.report_intake import ReportIntake
from weightcast.publisher.fleet.versions import VersionHistory
from weightcast.publisher.maintenance.orders import order_rollback
from weightcast.publisher.maintenance.prune import ActiveHosts, empty_trash, is_due, prune, what_to_prune
from weightcast.publisher.maintenance.repair import ChannelCheck, Repairs
from weightcast.publisher.maintenance.replay_log import ReplayLog
from weightcast.publisher.maintenance.retention import Retention
from weightcast.publisher.maintenance.upkeep import UpkeepOptions
from weightcast.shared.base.errors import DamagedFile, Refused, Untrusted, WeightcastError
from weightcast.shared.channel import chain, pins
from weightcast.shared.channel.chain import faults, verify
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.claims import claim, this_process
from weightcast.shared.channel.layout import Pointer, report_key
from weightcast.shared.channel.reports import Report, pack_report, read_reports, write_report
from weightcast.shared.channel.run_files import ChannelFile, parse_channel_file
from weightcast.shared.channel.signing import PrivateKey, Trust, write_private_key
from weightcast.shared.channel.store import Store, Unavailable
from weightcast.shared.checkpoint.local_updater import LocalUpdater, UpdaterOptions

INDEX = "model.safetensors.index.json"
AT_ONCE = PublisherOptions(take_over_seconds=0.0)
SPANS = UpkeepOptions(skip_span=4, history_share=1000.0)
LIMIT = 1 << 24


def objects(store: Store, prefix: str = "") -> dict[str, bytes]:
    """All of them by key, without claims and trash."""
    found: dict[str, bytes] = {}
    for entry in list(store.list(prefix)):
        key = f"{prefix}/{entry.name}" if prefix else entry.name
        if entry.kind == "file":
            found[key] = store.read(key, LIMIT)
        elif entry.name not in ("publishers", ".trash"):
            found |= objects(store, key)
    return found


@dataclass
class World:
    """A run whose channel is in `store`."""

    root: Path
    store: FaultyStore
    models: list[Model] = field(default_factory=lambda: [every_dtype(np.random.default_rng(3))])

    @property
    def pub(self) -> Path:
        return self.root / "pub"

    @contextmanager
    def publisher(self, upkeep: UpkeepOptions | None = SPANS, **options: Any) -> Iterator[Publisher]:
        places = {"local": self.pub, "base": self.root / "base"}
        with open_publisher(self.store, upkeep=upkeep, **places, **options) as publisher:
            yield publisher

    def grow(self, publisher: Publisher, versions: int) -> None:
        rng = np.random.default_rng(len(self.models))
        for _ in range(versions):
            self.models.append(some_changed(self.models[-1], rng))
            new = write_checkpoint(self.root / f"new-{len(self.models)}", self.models[-1])
            assert publisher.publish_checkpoint(new).version == len(self.models) - 1

    def run(self, versions: int = 3, **options: Any) -> None:
        with self.publisher(**options) as publisher:
            self.grow(publisher, versions)

    def versions(self) -> list[int]:
        return sorted(int(key[8:14]) for key in objects(self.store) if key[14:] == f"/{INDEX}")

    def trash(self) -> list[str]:
        return sorted(self.store.names(".trash"))

    def file(self) -> ChannelFile:
        return Channel.open(self.store).require_ours()[0]

    @contextmanager
    def host(self, version: int, trust: Trust | None = None, base: bool = True) -> Iterator[LocalUpdater]:
        local = self.root / f"host-{version}-{base}"
        options = UpdaterOptions(visible_seconds=0.2)
        with closing(LocalUpdater(self.store, local, self.root / "base" if base else None, options)) as host:
            host.update_to(Channel.open(self.store, trust), version)
            assert read_checkpoint(local) == bytes_of(self.models[version])
            yield host

    def arrives(self, host: LocalUpdater, model: int) -> None:
        host.update_to(Channel.open(self.store))
        assert read_checkpoint(host.paths.directory) == bytes_of(self.models[model])

    def damage(self, key: str, change: Callable[[bytes], bytes] | None) -> None:
        data = self.store.read(key, LIMIT)
        self.store.delete(key)
        if change is not None:
            self.store.create(key, change(data))

    def shard(self, version: int) -> str:
        names = self.store.names(f"weight_v{version:06d}")
        return f"weight_v{version:06d}/{next(name for name in names if name.endswith('.safetensors'))}"

    def repair(self, **options: Any) -> Repairs:
        return repair_channel(self.store, self.pub, replace(AT_ONCE, **options))


@pytest.fixture(params=STORE_PARAMS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    inner = make_store(request, tmp_path)
    world = World(tmp_path, FaultyStore(inner))
    init_channel(inner, write_checkpoint(tmp_path / "base", world.models[0]), run_id="run")
    return world


def report(host: str, version: int) -> Report:
    return Report(host, "/local", "run", "ready", version, version, "latest", 0, "", (), 1, "test")


# multi-step deltas, anchors, the replay log


def test_wide_deltas_and_anchors_are_made_and_used(world: World) -> None:
    with world.publisher(replace(SPANS, anchor_every=4)) as publisher:
        world.grow(publisher, 2)
        with world.host(1) as host:
            world.grow(publisher, 4)
            made = publisher.make_due()
            assert "delta of version 4 from version 0" in made and "anchor of version 4" in made
            assert publisher.make_due() == [] and verify(Channel.open(world.store)) == []
            world.arrives(host, 6)
    with world.host(6, base=False):
        pass


@pytest.mark.parametrize("world", TWINS, indirect=True)
@pytest.mark.parametrize("fault", ["unavailable", "lost"])
@pytest.mark.parametrize("name", ["weight_v000002/from_v000000", "weight_v000002/anchor"])
def test_what_fails_is_made_at_the_next_step(world: World, name: str, fault: Fault) -> None:
    with world.publisher(replace(SPANS, anchor_every=2)) as publisher:
        world.grow(publisher, 2)
        world.store.fail("commit", name, fault)
        with pytest.raises(Unavailable):
            publisher.make_due()
        publisher.make_due()
        assert world.store.stat(f"{name}/{INDEX}") is not None and not world.store.unused
    assert verify(Channel.open(world.store)) == []
    drafts = re.compile(r"/[a-z_0-9]+\.\d+-[0-9a-f]{8}/")
    assert not [key for key in objects(world.store) if drafts.search(key)]


def test_what_a_kill_left_is_swept_away(world: World) -> None:
    world.run(2)
    for draft in ("from_v000000.1-0badcafe", "anchor.1-0badcafe"):
        world.store.begin(f"weight_v000002/{draft}").create("shard", b"half")
    if not world.store.renames:
        world.store.create("weight_v000002/1-0badcafe.part-00000.safetensors", b"half")
    with world.publisher() as publisher:
        publisher.make_due()
    assert not [key for key in objects(world.store) if "0badcafe" in key]
    assert verify(Channel.open(world.store)) == []


def test_a_journal_whose_index_cannot_be_read_is_not_kept(world: World) -> None:
    with world.publisher() as publisher:
        world.grow(publisher, 1)
        world.store.fail("read", f"weight_v000002/{INDEX}.sig", "unavailable")
        world.grow(publisher, 1)
        with ReplayLog(world.pub) as log:
            assert set(log.positions()) == {2}
        world.grow(publisher, 1)
        with ReplayLog(world.pub) as log:
            assert set(log.positions()) == {2, 3}


# retention and pruning


KEEP = replace(SPANS, retention=Retention(2))


def test_versions_are_pruned_and_the_trash_is_emptied(world: World) -> None:
    write_report(world.store, report("behind", 6))
    with world.publisher(KEEP) as publisher:
        world.grow(publisher, 5)
        publisher.make_due()
        pins.keep(world.store, 1)
        world.grow(publisher, 4)
        made = publisher.make_due()
        assert any("pruned" in line for line in made)
        horizon = world.file().horizon
        assert 4 <= horizon <= 7 and world.versions() == [1, *range(horizon, 10)]
        assert verify(Channel.open(world.store)) == [] and publisher.make_due() == []
        with world.host(6) as host, world.host(1):
            world.arrives(host, 9)
    graves = world.trash()
    assert bool(graves) is world.store.renames and all(name.endswith(".pruned") for name in graves)
    assert empty_trash(world.store, 3600.0) == 0 and not is_due(world.store)
    assert is_due(world.store, 0.0) is world.store.renames and empty_trash(world.store, 0.0) == len(graves)
    assert world.trash() == []


@pytest.mark.parametrize("world", TWINS, indirect=True)
@pytest.mark.parametrize(
    ("verb", "key", "fault"),
    [
        ("replace", "channel.json", "unavailable"),
        ("replace", "channel.json", "lost"),
        ("move", "weight_v000002", "unavailable"),
        ("move", "weight_v000002", "lost"),
        ("move", "weight_v000002", "late"),
        ("names", "tags", "unavailable"),
        ("list", "hosts", "unavailable"),
    ],
)
def test_pruning_that_failed_is_finished_by_the_next(world: World, verb: str, key: str, fault: Fault) -> None:
    if verb == "move" and not world.store.renames:
        if fault == "late":
            return  # what is deleted need not be seen
        verb = "discard"
    with world.publisher(KEEP) as publisher:
        world.grow(publisher, 4)
        publisher.write_anchor()
        world.grow(publisher, 2)
        world.store.fail(verb, key, fault)
        for _ in range(2):
            try:
                publisher.make_due()
            except Unavailable:
                assert world.file().horizon in (0, 4)
        publisher.make_due()
        assert not world.store.unused and world.versions() == [4, 5, 6]
        assert verify(Channel.open(world.store)) == []
    with world.host(6, base=False):
        pass


@pytest.mark.parametrize("restarted", [False, True])
def test_what_a_killed_pruning_left_of_a_version_is_deleted(world: World, restarted: bool) -> None:
    left: list[str] = []

    def kill(at: str, where: Path | None) -> None:
        if at == "index.deleted" and where is not None and where.name.startswith("weight_v") and not left:
            left.append(where.name)
            raise OSError(errno.EIO, "the disk failed")

    with world.publisher(KEEP) as publisher:
        world.grow(publisher, 4)
        publisher.write_anchor()
        world.grow(publisher, 2)
        pins.keep(world.store, 1)
        with watched(kill), suppress(OSError):
            publisher.make_due()
        assert bool(left) is not world.store.renames and "weight_v000001" not in left
        assert bool([key for key in objects(world.store) if left and key.startswith(left[0])]) is bool(left)
        assert verify(Channel.open(world.store)) == []
        if not restarted:
            publisher.make_due()
    with world.publisher(KEEP) as publisher:
        publisher.make_due()
    there = {key[:14] for key in objects(world.store) if key.startswith("weight_v")}
    assert there == {f"weight_v{version:06d}" for version in (1, 4, 5, 6)}
    assert verify(Channel.open(world.store)) == []


def test_a_listing_without_its_newest_half_costs_no_tagged_version(world: World) -> None:
    with world.publisher() as publisher:
        world.grow(publisher, 2)
        publisher.write_anchor()
        world.grow(publisher, 2)
        publisher.write_anchor()
        world.grow(publisher, 2)
    pins.set_tag(world.store, "best", 3)
    held = claim(world.store, this_process(), take_over=True)
    channel = Channel.open(world.store)
    # what leads from version 2 to 3 is hidden with the anchor
    world.store.fail("list", "weight_v000002", "torn")
    verdict = what_to_prune(channel, Pointer(6), ActiveHosts(), Retention(1))
    assert verdict.removals == ()
    verdict = what_to_prune(channel, Pointer(6), ActiveHosts(), Retention(1))
    prune(verdict, held)
    assert world.versions() == [2, 3, 4, 5, 6]
    with world.host(3, base=False):
        pass


def test_a_damaged_tag_stops_pruning(world: World) -> None:
    with world.publisher(KEEP) as publisher:
        world.grow(publisher, 3)
        publisher.write_anchor()
        world.grow(publisher, 2)
        world.store.replace("tags/best", b"two")
        with pytest.raises(DamagedFile, match="best"):
            publisher.make_due()
        assert world.versions() == [1, 2, 3, 4, 5]


def test_reports_of_hosts_that_are_no_more_are_deleted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from weightcast.publisher.maintenance import prune as module

    for host in ("gone", "alive"):
        write_report(world.store, report(host, 0))
    world.run(1)
    held = claim(world.store, this_process(), take_over=True)
    gone = next(f"hosts/{name}" for name in world.store.names("hosts") if name.startswith("gone"))
    monkeypatch.setattr(module, "forgotten", lambda store, now: [gone])
    world.store.fail("delete", gone, "unavailable")
    module.forget_hosts(held, time.time())
    assert len(read_reports(world.store)) == 2
    module.forget_hosts(held, time.time())
    assert [each.host for each in read_reports(world.store)] == ["alive"]


# a lost pointer


@pytest.mark.parametrize("says", ["listing", "publisher", "host"])
def test_a_newest_version_that_shows_late_is_pointed_to(world: World, says: str) -> None:
    world.run(6)
    for kept in (world.pub / ".weightcast" / "history").iterdir():
        kept.unlink()
    if says == "host":
        run_id = world.file().run_id
        write_report(world.store, replace(report("h", 0), run_id=run_id, local_version=6))
    world.damage("latest", None)
    world.store.fail("list", "", *["torn"] * 100)
    if says != "listing":
        world.store.fail("stat", f"weight_v000006/{INDEX}", "late", "late", "late")
    repair_channel(world.store, world.pub if says == "publisher" else None, AT_ONCE)
    assert world.store.read("latest", LIMIT).strip() == b"000006"


def test_a_newest_version_that_shows_after_the_repair_is_announced(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody kept its journal, and it stays invisible for as long as repair looks for it."""
    monkeypatch.setattr(chain, "_VISIBLE_SECONDS", 0.0)
    world.run(6)
    for kept in (world.pub / ".weightcast" / "history").iterdir():
        kept.unlink()
    before = objects(world.store)
    world.damage("latest", None)
    hidden = FaultyStore(world.store)
    hidden.fail("stat", f"weight_v000006/{INDEX}", *["late"] * 100)
    hidden.fail("read", f"weight_v000006/{INDEX}", *["late"] * 100)
    repair_channel(hidden, None, AT_ONCE)
    assert world.store.read("latest", LIMIT).strip() == b"000005"
    with world.publisher() as publisher:
        publisher.recover()
        assert publisher.version == 6 and objects(world.store) == before
        world.grow(publisher, 1)
    with world.host(7):
        pass


# the publisher's copy of channel.json


def test_a_restored_horizon_is_not_below_what_was_pruned_elsewhere(world: World) -> None:
    with world.publisher() as publisher:
        world.grow(publisher, 3)
        publisher.write_anchor()
        world.grow(publisher, 3)
    channel, held = Channel.open(world.store), claim(world.store, this_process(), take_over=True)
    prune(what_to_prune(channel, Pointer(6), ActiveHosts(), Retention(2)), held)
    held.release()
    before = world.store.read("channel.json", LIMIT)
    assert parse_channel_file(before).horizon == 3 and world.versions() == [3, 4, 5, 6]
    world.damage("channel.json", lambda data: data[:20])
    done = world.repair()
    assert done.left == [] and done.done == [f"channel.json restored from {world.pub}"]
    assert world.store.read("channel.json", LIMIT) == before and world.versions() == [3, 4, 5, 6]


def test_a_lost_version_raises_no_restored_horizon(world: World) -> None:
    world.run(4)
    before = objects(world.store)
    world.store.discard("weight_v000002")
    world.damage("channel.json", None)
    assert world.repair().left == [] and objects(world.store) == before


def test_pruning_keeps_the_copy_in_step(world: World) -> None:
    with world.publisher(KEEP) as publisher:
        world.grow(publisher, 3)
        publisher.write_anchor()
        world.grow(publisher, 2)
        publisher.make_due()
    assert world.file().horizon == 3
    kept = world.pub / ".weightcast" / "channel.json"
    assert kept.read_bytes() == world.store.read("channel.json", LIMIT)


# verify and repair


def no_index_bytes(data: bytes) -> bytes:
    return b"{}"


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


DAMAGES: dict[str, Callable[[World], None]] = {
    "shard gone": lambda world: world.damage(world.shard(2), None),
    "shard flipped": lambda world: world.damage(world.shard(2), flipped),
    "newest shard cut": lambda world: world.damage(world.shard(3), half),
    "index gone": lambda world: world.damage(f"weight_v000002/{INDEX}", None),
    "index of nothing": lambda world: world.damage(f"weight_v000001/{INDEX}", no_index_bytes),
    "version gone": lambda world: world.store.discard("weight_v000002"),
    "newest version gone": lambda world: world.store.discard("weight_v000003"),
    "pointer gone": lambda world: world.damage("latest", None),
    "pointer of nothing": lambda world: world.damage("latest", lambda _: b"garbage"),
    "channel.json gone": lambda world: world.damage("channel.json", None),
    "channel.json cut": lambda world: world.damage("channel.json", half),
    "base.json flipped": lambda world: world.damage("base.json", flipped),
}


@pytest.mark.parametrize("world", TWINS, indirect=True)
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_found_and_restored_byte_for_byte(world: World, damage: str) -> None:
    world.run(3, carry_config=True)
    before = objects(world.store)
    DAMAGES[damage](world)
    problems = faults(world.store)
    assert problems and all(problem.meaning for problem in problems)
    done = world.repair()
    assert done.done and done.left == [] and done.notes == [], done
    assert objects(world.store) == before and world.repair() == Repairs()
    with world.host(3):
        pass


@pytest.mark.parametrize("world", TWINS, indirect=True)
@pytest.mark.parametrize(
    ("verb", "key", "fault"),
    [
        ("replace", "channel.json", "unavailable"),
        ("replace", "latest", "unavailable"),
        ("replace", "latest", "lost"),
        ("begin", "weight_v000002.parts", "unavailable"),
        ("copy", "SHARD", "unavailable"),
        ("copy", "SHARD", "lost"),
        ("replace", f"weight_v000002/{INDEX}", "unavailable"),
        ("replace", f"weight_v000002/{INDEX}", "lost"),
        ("pieces", "SHARD", "unavailable"),
        ("names", "weight_v000002", "torn"),
        ("list", "", "torn"),
    ],
)
def test_a_repair_that_failed_makes_nothing_worse(world: World, verb: str, key: str, fault: Fault) -> None:
    world.run(3)
    before, shard = objects(world.store), world.shard(2)
    world.damage(shard, flipped)
    world.damage(f"weight_v000002/{INDEX}", None)
    world.damage("latest", None)
    world.damage("channel.json", half)
    if (verb, key) == ("replace", "latest") and not world.store.renames:
        verb = "create"  # it is gone
    world.store.fail(verb, shard if key == "SHARD" else key, fault)
    for _ in range(3):
        try:
            if world.repair() == Repairs():
                break
        except (WeightcastError, OSError):
            continue
    assert not world.store.unused and faults(world.store) == [] and objects(world.store) == before


def test_what_was_damaged_rests_in_the_trash(world: World) -> None:
    world.run(2)
    shard = world.shard(1)
    world.damage(shard, half)
    wrong = world.store.read(shard, LIMIT)
    world.store.begin("weight_v000001 copy").create("file", b"stray")
    done = world.repair()
    assert done.left == [] and "weight_v000001 copy moved to .trash" in done.done
    kept = {
        entry: world.store.read(f".trash/{grave}/{entry}", LIMIT)
        for grave in world.trash()
        for entry in world.store.names(f".trash/{grave}")
        if entry.endswith(".safetensors")
    }
    assert list(kept.values()) == [wrong]
    assert empty_trash(world.store, 0.0) == 2 and world.trash() == []


def test_a_running_publisher_finds_damage_and_obeys_orders(world: World) -> None:
    world.run(3)
    before = objects(world.store)
    ticks = iter(range(0, 10_000, 40))
    with world.publisher() as publisher:
        check = ChannelCheck(1 << 30, clock=lambda: next(ticks))
        assert publisher.check_channel(check) is None
        world.damage(world.shard(2), flipped)
        found = publisher.check_channel(check)
        assert found is not None and found.done and objects(world.store) == before
        assert publisher.check_channel(check) is None
        world.damage(world.shard(3), None)
        pins.order(world.store, "repair")
        repairs = publisher.obey_repair()
        assert repairs is not None and repairs.left == []
    assert objects(world.store) == before


def test_an_anchor_leads_over_what_is_lost(world: World) -> None:
    world.run(2, upkeep=None)
    world.damage(world.shard(2), flipped)
    done = world.repair()
    assert done.done == [f"anchor of version 2 written from {world.pub}"]
    assert [problem.version for problem in done.left] == [2]
    with world.host(2, base=False):
        pass


# orders, tags, signatures


@pytest.mark.parametrize("upkeep", [SPANS, None], ids=["kept journals", "a copy"])
def test_a_rollback_is_a_new_version_and_holds_publishing(world: World, upkeep: UpkeepOptions | None) -> None:
    with world.publisher(upkeep) as publisher:
        world.grow(publisher, 3)
        with world.host(2) as host:
            order_rollback(world.store, 1)
            with pytest.raises(Refused, match="already"):
                order_rollback(world.store, 2)
            assert publisher.obey_orders() is not None and publisher.version == 4
            world.arrives(host, 1)
        with pytest.raises(Refused, match="on hold since the rollback to version 1"):
            publisher.publish_checkpoint(world.root / "new-2")
        assert pins.resume(world.store)
        world.models.append(world.models[1])
        world.grow(publisher, 1)
    assert verify(Channel.open(world.store)) == []


def test_an_order_of_another_run_is_refused(world: World) -> None:
    with world.publisher() as publisher:
        world.grow(publisher, 2)
        order_rollback(world.store, 1)
        order = json.loads(world.store.read("orders/rollback.json", LIMIT))
        world.store.replace("orders/rollback.json", json.dumps(order | {"run_id": "other"}).encode())
        with pytest.raises(Refused, match="is for run other"):
            publisher.obey_orders()
        assert publisher.version == 2


@pytest.mark.parametrize("world", TWINS, indirect=True)
@pytest.mark.parametrize("fault", [None, "unavailable", "lost"])
def test_a_channel_is_signed_anew(world: World, fault: Fault | None) -> None:
    with world.publisher(replace(SPANS, anchor_every=2)) as publisher:
        world.grow(publisher, 2)
        publisher.make_due()
    key = PrivateKey.generate()
    trust = Trust.of([key.public])
    if fault is not None:
        world.store.fail("replace", f"weight_v000002/{INDEX}.sig", fault)
        with pytest.raises(Unavailable):
            sign_channel(world.store, key)
    assert sign_channel(world.store, key) == 2
    assert faults(world.store, None, trust) == []
    with world.host(2, trust, base=False):
        pass
    world.damage(world.shard(1), flipped)
    with pytest.raises(DamagedFile, match="is not signed"):
        sign_channel(world.store, PrivateKey.generate())


@pytest.mark.parametrize("world", TWINS, indirect=True)
@pytest.mark.parametrize("damage", ["gone", "cut", "of another key", "of another version"])
def test_a_damaged_signature_is_found_and_restored(world: World, damage: str, tmp_path: Path) -> None:
    key, signature = PrivateKey.generate(), f"weight_v000002/{INDEX}.sig"
    write_private_key(tmp_path / "key", key)
    sign_channel(world.store, key)
    world.run(3, sign_key=tmp_path / "key")
    before, trust = objects(world.store), Trust.of([key.public])
    if damage == "of another key":
        sign_channel(world.store, PrivateKey.generate())
        for name, data in before.items():
            if name.endswith(".sig") and name != signature:
                world.store.replace(name, data)
    elif damage == "of another version":
        world.store.replace(signature, before[f"weight_v000001/{INDEX}.sig"])
    else:
        world.damage(signature, None if damage == "gone" else half)
    damaged = objects(world.store)
    assert "weight_v000002" in str(faults(world.store, None, trust)) and faults(world.store) == []
    with pytest.raises(Untrusted), world.host(3, trust):
        pass
    # whoever trusts no key looks at no signature
    assert world.repair() == Repairs() and objects(world.store) == damaged
    assert repair_channel(world.store, None, replace(AT_ONCE, trusted_keys=[str(key.public)])).left
    assert objects(world.store) == damaged
    done = world.repair(trusted_keys=[str(key.public)])
    assert done.done == [f"{signature} restored byte for byte"] and done.left == []
    assert objects(world.store) == before
    with world.host(3, trust):
        pass


@pytest.mark.parametrize("left", ["signature", "config", "both"])
def test_an_anchor_is_made_where_an_attempt_ended(world: World, left: str, tmp_path: Path) -> None:
    """Between its signature and its index, or after a config file with other bytes."""
    key = PrivateKey.generate()
    write_private_key(tmp_path / "key", key)
    sign_channel(world.store, key)
    with world.publisher(sign_key=tmp_path / "key") as publisher:
        world.grow(publisher, 1)
        if left != "config":
            world.store.fail("commit", "weight_v000001/anchor", "unavailable")
            with pytest.raises(Unavailable):
                publisher.write_anchor()
        if left != "signature" and not world.store.renames:
            world.store.replace("weight_v000001/anchor/config.json", b"of another attempt")
        assert publisher.write_anchor()
        assert not publisher.write_anchor()
    trust = Trust.of([key.public])
    assert faults(world.store, None, trust) == []
    with world.host(1, trust, base=False):
        pass


def test_hooks_get_paths_of_directories_and_urls_of_other_stores(world: World) -> None:
    told: list[Path | str] = []
    with world.publisher(post_write=lambda version, directory, phase: told.append(directory)) as publisher:
        world.grow(publisher, 1)
    kind = Path if world.store.renames else str
    assert len(told) == 2 and told[0] == kind(world.store.place("weight_v000001"))


def test_tags_and_pins(world: World) -> None:
    pins.set_tag(world.store, "best", 2)
    pins.set_tag(world.store, "best", 1)
    pins.keep(world.store, 3)
    assert (pins.tags(world.store), pins.kept(world.store)) == ({"best": 1}, [3])
    assert pins.delete_tag(world.store, "best") and not pins.delete_tag(world.store, "best")
    assert pins.unkeep(world.store, 3) and not pins.unkeep(world.store, 3)
    world.store.fail("delete", "tags/best", "lost")
    pins.set_tag(world.store, "best", 1)
    with pytest.raises(Unavailable):
        pins.delete_tag(world.store, "best")
    assert pins.tags(world.store) == {}


# what people look at


def test_the_history_and_the_intake_of_reports(world: World) -> None:
    with world.publisher() as publisher:
        world.grow(publisher, 3)
        publisher.write_anchor()
    pins.set_tag(world.store, "best", 2)
    page = VersionHistory(world.store).read(look_around=True)
    assert page.pointer == 3 and set(page.facts) == {1, 2, 3} and page.tags == {"best": 2}
    assert page.versions is not None and page.versions[3].full is not None
    intake = ReportIntake(world.store)
    intake.take(pack_report(report("a", 3)), "run")
    name = report_key("a", "/local")
    world.store.fail("replace", name, "unavailable")
    intake.write()
    assert intake.problem.startswith("a: ") and read_reports(world.store) == []
    intake.write()
    assert intake.problem == ""
    assert [each.host for each in read_reports(world.store)] == ["a"]

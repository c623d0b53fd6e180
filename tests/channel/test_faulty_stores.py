"""Readers and writers of a channel over stores that misbehave: one test per fault."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from faulty_store import Fault, FaultyStore
from memory_store import MemoryStore

from weightcast.shared.base.elements import TensorTable
from weightcast.shared.base.errors import DamagedFile, Refused, RetryLater
from weightcast.shared.channel.chain import check_files
from weightcast.shared.channel.channel import Channel, NoChannel, require_named
from weightcast.shared.channel.claims import Claimant, claim, current_epoch
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.index import INDEX_NAME, FileRecord
from weightcast.shared.channel.layout import Pointer, read_pointer, write_pointer
from weightcast.shared.channel.reports import Report, read_reports, write_report
from weightcast.shared.channel.run_files import Base, ChannelFile, write_base, write_channel_file
from weightcast.shared.channel.store import AlreadyExists, Changed, Store, Unavailable
from weightcast.shared.digest.checksums import root

OWNER, OTHER = Claimant("trainer-0", 10), Claimant("trainer-1", 11)
KEY = f"weight_v000001/{INDEX_NAME}"


def _faulty() -> FaultyStore:
    return FaultyStore(MemoryStore())


def _channel(store: Store) -> Channel:
    table = TensorTable(())
    lanes = np.zeros((0, 2), np.uint64)
    store.create("base.json", write_base(Base("run", table, lanes, root(table, lanes), ())))
    store.create("channel.json", write_channel_file(ChannelFile("run", 1.0)))
    return Channel.open(store)


def _take(store: Store, claimant: Claimant) -> object:
    return claim(store, claimant, take_over=True)


def _report(host: str) -> Report:
    return Report(host, "/local", "run", "ready", 1, 1, "latest", 0, "", (), 1, "test")


def test_late_visibility_of_an_index_is_not_damage() -> None:
    store = _faulty()
    channel = _channel(store)
    store.create(KEY, b"{}")
    store.fail("read", KEY, "late")
    assert channel.index(Pointer(1), 1, TensorTable(())) is None
    with pytest.raises(DamagedFile):
        channel.index(Pointer(1), 1, TensorTable(()))
    assert not store.unused


def test_a_channel_that_is_made_just_now_is_not_something_else() -> None:
    store = _faulty()
    with pytest.raises(NoChannel):
        require_named(store)
    _channel(store)
    for key in ("channel.json", "base.json"):
        store.fail("stat", key, "late")
    require_named(store)
    assert not store.unused


def test_late_visibility_of_a_channel_is_waited_for() -> None:
    store = _faulty()
    _channel(store)
    write_pointer(store, 1)
    foreign_at_first = FaultyStore(MemoryStore())
    assert Channel.open(open_store(foreign_at_first)).pointer() is None
    store.fail("read", "channel.json", "late")
    opened = Channel.open(store)
    with pytest.raises(NoChannel):
        opened.pointer()


def test_a_stale_pointer_names_an_older_version() -> None:
    store = _faulty()
    write_pointer(store, 1)
    write_pointer(store, 2)
    store.fail("read", "latest", "stale")
    assert [read_pointer(store), read_pointer(store)] == [Pointer(1), Pointer(2)]


def test_a_torn_listing_hides_no_newer_owner() -> None:
    store = _faulty()
    first = claim(store, OWNER, take_over=True)
    _take(store, OTHER)
    store.fail("names", "publishers", "torn", "torn")
    assert current_epoch(store) == 1
    with pytest.raises(Refused, match="now belongs to process 11 on trainer-1"):
        first.check()
    assert not store.unused


def test_a_torn_listing_of_claims_lets_nobody_in_unseen() -> None:
    store = _faulty()
    _take(store, OWNER)
    _take(store, OTHER)
    store.fail("names", "publishers", "torn")
    with pytest.raises(Refused, match="at the same moment"):
        _take(store, OWNER)


def test_a_failed_precondition_leaves_the_pointer() -> None:
    store = _faulty()
    write_pointer(store, 1)
    store.fail("replace", "latest", "changed")
    with pytest.raises(Changed, match="another writer"):
        write_pointer(store, 2)
    assert read_pointer(store) == Pointer(1)


@pytest.mark.parametrize(
    "use", [read_pointer, current_epoch, Channel.open, lambda store: _take(store, OWNER)]
)
def test_an_unavailable_store_is_tried_again_later(use: Callable[[Store], object]) -> None:
    store = _faulty()
    _channel(store)
    for verb in ("read", "names", "present"):
        for key in ("latest", "channel.json", "publishers", ""):
            store.fail(verb, key, "unavailable")
    with pytest.raises(Unavailable, match="503") as raised:
        use(store)
    assert isinstance(raised.value, RetryLater) and raised.value.exit_code == 75


def test_a_slow_store_delays_and_changes_nothing() -> None:
    slept: list[float] = []
    store = FaultyStore(MemoryStore(), seconds=30.0, sleep=slept.append)
    write_pointer(store, 1)
    store.fail("read", "latest", "slow")
    assert read_pointer(store) == Pointer(1) and slept == [30.0]


def test_a_cut_pointer_and_a_cut_index_are_read_again() -> None:
    store = _faulty()
    channel = _channel(store)
    write_pointer(store, 1)
    store.create(KEY, b'{"metadata": {}}')
    store.fail("read", "latest", "cut")
    with pytest.raises(RetryLater, match="half written"):
        channel.pointer()
    store.fail("read", KEY, "cut")
    assert channel.index(Pointer(1), 1, TensorTable(())) is None


@pytest.mark.parametrize("fault", ["cut", "wrong"])
def test_other_bytes_of_a_shard_are_found(fault: Fault) -> None:
    from blake3 import blake3

    store, data = _faulty(), b"shard" * 100
    store.create("shard", data)
    record = FileRecord("shard", len(data), blake3(data).hexdigest())
    store.fail("pieces", "shard", fault)
    [flaw] = check_files(store, [record])
    assert "shard: " in flaw.message and not flaw.unread
    assert list(check_files(store, [record])) == []


def test_a_claim_whose_answer_was_lost_is_its_own_when_it_is_repeated() -> None:
    class Repeating(MemoryStore):
        """As a client that repeats a request whose answer it did not get."""

        def create(self, key: str, data: bytes) -> None:
            super().create(key, data)
            super().create(key, data)

    store = Repeating()
    with pytest.raises(AlreadyExists):
        store.create("x", b"")
    assert claim(store, OWNER, take_over=False).epoch == 1
    assert current_epoch(store) == 1


def test_a_pointer_whose_answer_was_lost_may_be_written_again() -> None:
    store = _faulty()
    for version, verb in ((1, "create"), (2, "replace")):
        store.fail(verb, "latest", "lost")
        with pytest.raises(Unavailable):
            write_pointer(store, version)
        write_pointer(store, version)
        assert read_pointer(store) == Pointer(version)


def test_a_first_pointer_moves_no_other_back() -> None:
    store = _faulty()
    with pytest.raises(Changed):
        write_pointer(store, 1, lambda: write_pointer(store, 2))
    assert read_pointer(store) == Pointer(2)


def test_a_commit_whose_answer_was_lost_may_be_repeated() -> None:
    store = _faulty()
    store.fail("commit", "weight_v000001", "lost")
    for _ in range(2):
        try:
            store.commit("weight_v000001", "weight_v000001", INDEX_NAME, b"{}")
        except Unavailable:
            continue
    assert store.read(f"weight_v000001/{INDEX_NAME}", 10) == b"{}"


def test_one_bad_report_hides_no_other() -> None:
    store = _faulty()
    for host in ("a", "b"):
        write_report(store, _report(host))
    names = sorted(store.names("hosts"))
    for fault in ("late", "unavailable", "cut", "wrong"):
        store.fail("read", f"hosts/{names[0]}", fault)
        assert [report.host for report in read_reports(store)] == ["b"]
    assert [report.host for report in read_reports(store)] == ["a", "b"]


def test_an_address_may_be_a_path(tmp_path: Path) -> None:
    write_pointer(open_store(tmp_path), 3)
    assert read_pointer(open_store(str(tmp_path))) == Pointer(3)

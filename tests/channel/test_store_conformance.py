"""What every store promises. A new store is one more entry of `STORES`."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from emulators import AZURE, MOTO, S3
from memory_store import MemoryStore

from weightcast.shared.base.errors import DamagedFile, Refused, RetryLater
from weightcast.shared.channel.directory_store import DirectoryStore
from weightcast.shared.channel.hf_store import HfStore
from weightcast.shared.channel.object_store import open_object_store
from weightcast.shared.channel.store import AlreadyExists, Changed, NotFound, Store, StoreError


def _directory(path: Path) -> Store:
    (path / "channel").mkdir()
    return DirectoryStore(path / "channel")


def _hub() -> Store:
    return HfStore(pytest.importorskip("hf_double").Hub(), "owner/bucket", "runs/seven")


STORES: dict[str, Callable[[Path], Store]] = {
    "directory": _directory,
    "memory": lambda _: MemoryStore(),
    "hf": lambda _: _hub(),
}
INDEX = "index.json"


@pytest.fixture(params=[*STORES, S3, AZURE, MOTO])
def store(request: pytest.FixtureRequest, tmp_path: Path, make_bucket: Callable[[str], str]) -> Store:
    if request.param in STORES:
        return STORES[request.param](tmp_path)
    return open_object_store(f"{make_bucket(request.param)}/runs/seven")


def _written(store: Store, key: str, data: bytes) -> None:
    writer = store.write(key)
    writer.write(data)
    writer.finish()


def _draft(store: Store, draft: str, **files: bytes) -> None:
    made = store.begin(draft)
    for name, data in files.items():
        _written(made, name, data)


def _attempt(store: Store, name: str, attempt: str, **files: bytes) -> tuple[str, dict[str, str]]:
    """An attempt at what will be `name`, as publishers make it: the key of its draft, and the keys that its
    files will have."""
    if store.renames:
        draft, prefix = f"{name}.{attempt}", ""
        store.begin(draft)
    else:
        draft, prefix = name, f"{attempt}."
    for file, data in files.items():
        _written(store, f"{draft}/{prefix}{file}", data)
    return draft, {file: f"{name}/{prefix}{file}" for file in files}


def _race(*calls: Callable[[], object]) -> list[object]:
    """The result of each call, or the error that it raised; all start together."""
    results: list[object] = [None] * len(calls)
    start = threading.Barrier(len(calls))

    def run(number: int, call: Callable[[], object]) -> None:
        start.wait()
        try:
            results[number] = call()
        except StoreError as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _require_conditional(store: Store) -> None:
    if isinstance(store, HfStore):
        pytest.skip("no write is conditional there")


def test_reads_what_was_created(store: Store) -> None:
    store.create("latest", b"000001")
    assert store.read("latest", 100) == b"000001"
    assert store.read_range("latest", 2, 3) == b"000"[:3]
    assert store.read_range("latest", 4, 100) == b"01"
    assert b"".join(store.pieces("latest")) == b"000001"
    found = store.stat("latest")
    assert found is not None and found.size == 6 and abs(found.written - store.now()) < 60


def test_a_small_object_may_be_the_first_below_a_prefix(store: Store) -> None:
    store.create("tags/best", b"000001")
    store.replace("hosts/a.json", b"{}", sync=False)
    assert sorted(store.names()) == ["hosts", "tags"]
    assert store.names("tags") == ["best"]


@pytest.mark.parametrize(
    "read",
    [
        lambda store, key: store.read(key, 10),
        lambda store, key: store.read_range(key, 0, 1),
        lambda store, key: next(store.pieces(key)),
    ],
)
@pytest.mark.parametrize("key", ["latest", "weight_v000001/index.json"])
def test_a_missing_object_is_named(store: Store, read: Callable[[Store, str], object], key: str) -> None:
    with pytest.raises(NotFound) as raised:
        read(store, key)
    assert store.place(key) in raised.value.message and raised.value.remedy
    assert isinstance(raised.value, RetryLater) and isinstance(raised.value, FileNotFoundError)
    assert store.stat(key) is None
    assert store.names(key) == [] and list(store.list(key)) == []


def test_an_object_above_the_limit_is_refused(store: Store) -> None:
    store.create("latest", b"0" * 11)
    assert len(store.read("latest", 11)) == 11
    with pytest.raises(DamagedFile, match="10") as raised:
        store.read("latest", 10)
    assert store.place("latest") in raised.value.message


@pytest.mark.parametrize(
    "key", ["../x", "a/../../x", "/etc/passwd", "a//b", ".", "a/", "a\nb", "a\0b", "x" * 300]
)
def test_names_that_escape_are_refused(store: Store, key: str) -> None:
    for use in (
        lambda: store.read(key, 10),
        lambda: store.stat(key),
        lambda: next(store.pieces(key)),
        lambda: store.create(key, b""),
        lambda: store.replace(key, b""),
        lambda: store.write(key),
        lambda: store.delete(key),
        lambda: store.discard(key),
        lambda: store.begin(key),
        lambda: store.within(key),
    ):
        with pytest.raises(DamagedFile):
            use()


def test_create_leaves_what_is_there(store: Store) -> None:
    store.create("channel.json", b"first")
    with pytest.raises(AlreadyExists) as raised:
        store.create("channel.json", b"second")
    assert store.place("channel.json") in raised.value.message
    assert isinstance(raised.value, FileExistsError)
    assert store.read("channel.json", 10) == b"first"


def test_one_of_several_creators_wins(store: Store) -> None:
    _require_conditional(store)
    for turn in range(20):
        key = f"publishers/{turn + 1}.json"
        results = _race(*(partial(store.create, key, b"%d" % number) for number in range(4)))
        won = [number for number, result in enumerate(results) if result is None]
        assert len(won) == 1 and all(isinstance(r, AlreadyExists) for r in results if r is not None)
        assert store.read(key, 10) == b"%d" % won[0]


def test_replace_makes_and_replaces(store: Store) -> None:
    store.replace("latest", b"000001")
    before = store.stat("latest")
    store.replace("latest", b"000002")
    after = store.stat("latest")
    assert store.read("latest", 10) == b"000002"
    assert before is not None and after is not None and before.tag != after.tag


def test_replace_compares_what_it_expects(store: Store) -> None:
    store.replace("latest", b"000001")
    store.replace("latest", b"000002", expected=b"000001")
    with pytest.raises(Changed) as raised:
        store.replace("latest", b"000009", expected=b"000001")
    assert store.place("latest") in raised.value.message
    with pytest.raises(Changed):
        store.replace("other", b"000009", expected=b"000001")
    assert store.read("latest", 10) == b"000002" and store.stat("other") is None


def test_one_of_several_replacers_wins(store: Store) -> None:
    _require_conditional(store)
    store.create("latest", b"start")
    for turn in range(20):
        before = store.read("latest", 20)
        after = [b"%d by %d" % (turn, number) for number in range(4)]
        results = _race(*(partial(store.replace, "latest", data, expected=before) for data in after))
        won = [number for number, result in enumerate(results) if result is None]
        assert len(won) == 1 and all(isinstance(r, Changed) for r in results if r is not None)
        assert store.read("latest", 20) == after[won[0]]


def test_readers_see_the_old_bytes_or_the_new(store: Store) -> None:
    values = [b"%06d" % number * 1000 for number in range(1, 60)]
    store.create("latest", values[0])
    seen: set[bytes] = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.add(store.read("latest", 10_000))

    reader = threading.Thread(target=read)
    reader.start()
    for value in values:
        store.replace("latest", value)
    done.set()
    reader.join()
    assert seen and seen <= set(values)


def test_a_forbidden_replace_changes_nothing(store: Store) -> None:
    def forbid() -> None:
        raise Refused("not the owner")

    store.replace("latest", b"000001")
    with pytest.raises(Refused, match="not the owner"):
        store.replace("latest", b"000002", allowed=forbid)
    assert store.read("latest", 10) == b"000001" and store.names() == ["latest"]


def test_a_large_object_has_its_head_written_last(store: Store) -> None:
    writer = store.write("shard", reserve=8)
    writer.write(b"tensor " * 1000)
    writer.write(memoryview(b"end"))
    writer.write_head(b"header: ")
    writer.finish()
    assert b"".join(store.pieces("shard")) == b"header: " + b"tensor " * 1000 + b"end"
    with pytest.raises(AlreadyExists):
        store.write("shard")


def test_a_head_fills_its_room(store: Store) -> None:
    writer = store.write("shard", reserve=8)
    with pytest.raises(DamagedFile, match="8 are reserved"):
        writer.write_head(b"header:  ")
    writer.discard()


def test_a_discarded_object_leaves_nothing(store: Store) -> None:
    writer = store.write("shard")
    writer.write(b"some")
    writer.discard()
    assert store.stat("shard") is None and store.names() == []


def test_a_version_is_visible_when_it_is_committed(store: Store) -> None:
    draft, keys = _attempt(store, "weight_v000001", "1-ab", whole=b"bytes", other=b"more")
    seen_before: list[object] = []
    store.commit(
        draft,
        "weight_v000001",
        INDEX,
        b"{}",
        lambda: seen_before.append(store.stat(f"weight_v000001/{INDEX}")),
    )
    assert seen_before == [None]
    assert store.read(f"weight_v000001/{INDEX}", 10) == b"{}"
    assert len(store.names("weight_v000001")) == 3
    assert store.read(keys["whole"], 10) == b"bytes" and store.read(keys["other"], 10) == b"more"
    assert store.names() == ["weight_v000001"]


def test_a_commit_may_be_repeated_when_its_answer_was_lost(store: Store) -> None:
    draft, keys = _attempt(store, "weight_v000001", "1-ab", shard=b"bytes")
    store.commit(draft, "weight_v000001", INDEX, b"{}")
    store.commit(draft, "weight_v000001", INDEX, b"{}")
    assert store.read(keys["shard"], 10) == b"bytes"
    assert len(store.names("weight_v000001")) == 2


def test_a_name_is_committed_once(store: Store) -> None:
    one, keys = _attempt(store, "weight_v000001", "1-ab", shard=b"one")
    two, _ = _attempt(store, "weight_v000001", "2-cd", shard=b"two")
    store.commit(one, "weight_v000001", INDEX, b"1")
    with pytest.raises(AlreadyExists) as raised:
        store.commit(two, "weight_v000001", INDEX, b"2")
    assert store.place("weight_v000001") in raised.value.message
    assert store.read(keys["shard"], 10) == b"one"


def test_one_of_several_committers_wins(store: Store) -> None:
    _require_conditional(store)
    for turn in range(10):
        name = f"version-{turn}"
        drafts = [_attempt(store, name, f"{number}-ab", shard=b"%d" % number) for number in range(3)]
        results = _race(
            *(
                partial(store.commit, draft, name, INDEX, b"%d" % number)
                for number, (draft, _) in enumerate(drafts)
            )
        )
        won = [number for number, result in enumerate(results) if result is None]
        assert len(won) == 1 and all(isinstance(r, AlreadyExists) for r in results if r is not None)
        for key in (f"{name}/{INDEX}", drafts[won[0]][1]["shard"]):
            assert store.read(key, 10) == b"%d" % won[0]


def test_readers_see_all_of_a_version_or_nothing(store: Store) -> None:
    torn: list[str] = []
    done = threading.Event()
    keys: dict[int, list[str]] = {}

    def read() -> None:
        while not done.is_set():
            for version in range(20):
                if store.stat(f"version-{version}/{INDEX}") is not None:
                    torn.extend(key for key in keys[version] if store.stat(key) is None)

    reader = threading.Thread(target=read)
    reader.start()
    for version in range(20):
        draft, made = _attempt(store, f"version-{version}", "1-ab", first=b"1", second=b"2")
        keys[version] = [*made.values()]
        store.commit(draft, f"version-{version}", INDEX, b"{}")
    done.set()
    reader.join()
    assert torn == []


def test_a_forbidden_commit_shows_nothing(store: Store) -> None:
    def forbid() -> None:
        raise Refused("not the owner")

    draft, _ = _attempt(store, "weight_v000001", "1-ab", shard=b"1")
    with pytest.raises(Refused, match="not the owner"):
        store.commit(draft, "weight_v000001", INDEX, b"{}", forbid)
    assert store.stat(f"weight_v000001/{INDEX}") is None
    store.discard(draft)
    assert store.names(draft) == []


def test_a_commit_takes_a_name_without_an_index(store: Store) -> None:
    _written(store, "weight_v000001/stray", b"copied by hand")
    draft, keys = _attempt(store, "weight_v000001", "1-ab", shard=b"1")
    store.commit(draft, "weight_v000001", INDEX, b"{}")
    assert store.read(keys["shard"], 10) == b"1" and store.read(f"weight_v000001/{INDEX}", 10) == b"{}"


def test_a_draft_has_a_name_of_its_own(store: Store) -> None:
    _draft(store, "draft", shard=b"1")
    with pytest.raises(AlreadyExists):
        store.begin("draft")


def test_files_of_a_draft_move_into_subdirectories(store: Store) -> None:
    draft = store.begin("parts")
    _written(draft, "part-0", b"1")
    draft.begin("whole")
    draft.move("part-0", "whole/carried/tokenizer.json")
    assert store.read("parts/whole/carried/tokenizer.json", 10) == b"1"
    assert store.stat("parts/part-0") is None
    with pytest.raises(NotFound):
        draft.move("part-0", "whole/x")


@pytest.mark.parametrize("sync", [False, True])
def test_everything_below_a_prefix_moves(store: Store, sync: bool) -> None:
    _draft(store, "weight_v000001", shard=b"1")
    store.create("weight_v000001/anchor/shard", b"2")
    store.move("weight_v000001", ".trash/weight_v000001.pruned", sync=sync)
    assert store.names("weight_v000001") == [] and store.stat("weight_v000001/anchor/shard") is None
    assert store.read(".trash/weight_v000001.pruned/anchor/shard", 10) == b"2"
    with pytest.raises(NotFound, match="weight_v000001"):
        store.move("weight_v000001", ".trash/other", sync=sync)
    assert store.names(".trash/other") == []


def test_a_moved_object_takes_the_place_of_another(store: Store) -> None:
    _draft(store, "draft", shard=b"right")
    store.create("weight_v000001/shard", b"damaged")
    store.move("draft/shard", "weight_v000001/shard")
    assert store.read("weight_v000001/shard", 10) == b"right" and store.names("draft") == []


def test_a_copy_stays_when_the_object_is_replaced(store: Store) -> None:
    store.create("weight_v000001/shard", b"damaged")
    store.copy("weight_v000001/shard", ".trash/shard.put-away/shard")
    store.replace("weight_v000001/shard", b"right")
    assert store.read(".trash/shard.put-away/shard", 10) == b"damaged"
    with pytest.raises(AlreadyExists):
        store.copy("weight_v000001/shard", ".trash/shard.put-away/shard")
    with pytest.raises(NotFound):
        store.copy("weight_v000001/other", ".trash/other")
    assert sorted(store.names(".trash")) == ["shard.put-away"]


def test_what_is_in_the_trash_is_deleted_there(store: Store) -> None:
    _draft(store, "weight_v000001", shard=b"1")
    store.move("weight_v000001", ".trash/weight_v000001.pruned")
    store.discard(".trash/weight_v000001.pruned")
    assert store.names(".trash") == []


def test_lists_one_level_with_sizes(store: Store) -> None:
    _draft(store, "weight_v000001", shard=b"12345")
    store.create("latest", b"000001")
    found = {entry.name: entry for entry in store.list()}
    assert found.keys() == {"weight_v000001", "latest"}
    assert found["weight_v000001"].kind == "directory" and found["weight_v000001"].stat is None
    assert found["latest"].kind == "file" and found["latest"].stat == store.stat("latest")
    assert [(e.name, e.stat.size) for e in store.list("weight_v000001") if e.stat] == [("shard", 5)]


def test_a_store_within_sees_the_same_objects(store: Store) -> None:
    inner = store.within("weight_v000001").within("anchor")
    store.begin("weight_v000001").begin("anchor")
    inner.create("config.json", b"{}")
    assert store.read("weight_v000001/anchor/config.json", 10) == b"{}"
    assert inner.place("config.json") == store.place("weight_v000001/anchor/config.json")
    assert store.within("").names() == store.names() == ["weight_v000001"]


def test_delete_says_whether_there_was_something(store: Store) -> None:
    store.create("tags/best", b"000001")
    assert store.delete("tags/best") and not store.delete("tags/best")
    assert store.stat("tags/best") is None and store.names("tags") == []


def test_discard_takes_all_below_a_prefix(store: Store) -> None:
    _draft(store, "weight_v000001", shard=b"1", other=b"2")
    store.create("latest", b"000001")
    store.discard("weight_v000001")
    store.discard("weight_v000001")
    assert [name for name in store.names() if not name.startswith(".")] == ["latest"]


def test_a_stream_that_is_open_is_read_to_its_end(store: Store) -> None:
    store.replace("report", b"old" * 10)
    pieces = store.pieces("report")
    first = next(pieces)
    store.replace("report", b"new")
    assert b"".join([first, *pieces]) == b"old" * 10

"""A channel copied into another one: bytes, gaps, refusals, damage."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from adapters import CODE, CONFIG, MATH, adapter, follow
from adapters import bytes_of as adapter_bytes
from core_cases import ended, start, write_checkpoint
from emulators import S3
from memory_store import MemoryStore
from mirrors import LIMIT, Run, objects, require_equal

from weightcast.publisher import init_channel
from weightcast.publisher.maintenance.orders import order_rollback
from weightcast.publisher.maintenance.retention import Retention
from weightcast.publisher.maintenance.upkeep import UpkeepOptions
from weightcast.shared.base.errors import DamagedFile, Forked, Refused, Untrusted, WrongRun
from weightcast.shared.base.failpoints import watch
from weightcast.shared.channel import pins
from weightcast.shared.channel.chain import verify
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.components import all_faults
from weightcast.shared.channel.directory_store import DirectoryStore, open_store
from weightcast.shared.channel.layout import Pointer, read_pointer
from weightcast.shared.channel.object_store import open_object_store
from weightcast.shared.channel.signing import PrivateKey, Trust, write_private_key
from weightcast.shared.channel.store import NotFound, Store

INDEX = "model.safetensors.index.json"
BESIDE = UpkeepOptions(skip_span=4, history_share=1000.0)
PAIRS = [
    ("directory", "directory"),
    ("directory", "memory"),
    ("memory", "directory"),
    pytest.param(("directory", "s3"), marks=pytest.mark.s3),
    pytest.param(("s3", "directory"), marks=pytest.mark.s3),
    pytest.param(("s3", "s3"), marks=pytest.mark.s3),
    pytest.param(("azure", "azure"), marks=pytest.mark.stores),
]
MakeStore = Callable[[str, str], Store]


@pytest.fixture
def make_store(make_bucket: Callable[[str], str], tmp_path: Path) -> MakeStore:
    """Of a kind, under a name."""
    bucket = cache(make_bucket)

    def make(kind: str, name: str) -> Store:
        if kind == "directory":
            return DirectoryStore(tmp_path / name)
        return MemoryStore().within(name) if kind == "memory" else open_object_store(f"{bucket(kind)}/{name}")

    return make


@pytest.mark.parametrize("kinds", PAIRS)
def test_every_object_is_copied(tmp_path: Path, make_store: MakeStore, kinds: tuple[str, str]) -> None:
    source, first, second = (
        make_store(kind, name) for kind, name in zip((*kinds, kinds[1]), ("a", "b", "c"), strict=True)
    )
    run = Run.begin(tmp_path, source)
    run.copy(first)
    require_equal(source, first)
    run.grow(5, anchor_every=3, upkeep=BESIDE)
    pins.set_tag(source, "best", 2)
    run.copy(first)
    require_equal(source, first)
    run.copy(second, of=first)
    require_equal(source, second)
    run.arrives(first, "with-base")
    run.arrives(second, "new", base=False)
    run.arrives(second, "tagged", pins.tagged(second, "best"))
    run.grow(2, anchor_every=3, upkeep=BESIDE)
    pins.delete_tag(source, "best")
    done = run.copy(first)
    assert done.status.versions == 2
    require_equal(source, first)
    # hosts change between the two, and back
    run.arrives(source, "new")
    run.grow(1)
    run.copy(first)
    run.arrives(first, "new")
    assert run.copy(first).status.bytes == 0
    assert not [key for key in objects(first) if ".parts" in key]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.begin(tmp_path, DirectoryStore(tmp_path / "a"))


@pytest.fixture(params=["directory", "memory", S3])
def to(request: pytest.FixtureRequest, make_store: MakeStore) -> Store:
    return make_store(request.param, "b")


def versions(store: Store) -> list[int]:
    return sorted(int(key[8:14]) for key in objects(store) if key[14:] == f"/{INDEX}")


def damage(store: Store, key: str, data: bytes | None) -> None:
    """None: it is gone."""
    store.delete(key)
    if data is not None:
        store.create(key, data)


def shard(store: Store, version: int) -> str:
    names = store.names(f"weight_v{version:06d}")
    return f"weight_v{version:06d}/{next(name for name in names if name.endswith('.safetensors'))}"


def test_readers_see_whole_versions_of_the_source_at_every_moment(run: Run, to: Store) -> None:
    run.grow(4, anchor_every=3, upkeep=BESIDE)
    digests = {version: run.store.read(f"weight_v{version:06d}/{INDEX}", LIMIT) for version in range(1, 5)}
    seen = set[int]()

    def look(name: str, where: Path | None) -> None:
        pointer = read_pointer(to)
        if pointer is None or name.startswith(("file", "directory")):
            return
        watch(None)
        assert verify(Channel.open(to)) == []
        assert to.read(f"weight_v{pointer.version:06d}/{INDEX}", LIMIT) == digests[pointer.version]
        seen.add(pointer.version)
        watch(look)

    watch(look)
    try:
        run.copy(to)
    finally:
        watch(None)
    assert seen == {1, 2, 3, 4}
    require_equal(run.store, to)


def test_it_begins_at_the_last_anchor_before_its_window_and_prunes(run: Run, to: Store) -> None:
    run.grow(7, anchor_every=3)
    few = Retention(2, host_versions=0)
    run.copy(to, retention=few)
    assert versions(to) == [6, 7] and verify(Channel.open(to)) == []
    run.arrives(to, "new", base=False)
    run.grow(4, anchor_every=3)
    with run.mirror(to, retention=few) as mirror:
        mirror.step()
        mirror.step()
    assert versions(to) == [9, 10, 11] and verify(Channel.open(to)) == []
    run.arrives(to, "new", base=False)
    # what is tagged there has to be reached here
    pins.set_tag(run.store, "first", 4)
    run.copy(to, retention=few)
    run.arrives(to, "tagged", pins.tagged(to, "first"))
    run.copy(to, retention=few)
    assert versions(to) == [3, 4, 9, 10, 11]
    assert verify(Channel.open(to)) == []


def test_it_keeps_within_its_bytes_and_says_what_does_not_fit(run: Run, to: Store, tmp_path: Path) -> None:
    run.grow(2, anchor_every=2)
    shown = Channel.open(run.store).shown(Pointer(2))
    most = 2 * (shown[2].stored + shown[1].stored)
    options = {"keep_bytes": most, "retention": Retention(1, host_versions=0)}
    with run.mirror(to, **options) as mirror:
        for _ in range(4):
            mirror.step()
            held = Channel.open(to).shown(Pointer(len(run.models) - 1))
            assert sum(version.stored for version in held.values()) <= most
            assert not [entry for entry in to.list() if entry.name == ".trash"] or not to.names(".trash")
            run.grow(2, anchor_every=2)
    assert 1 not in versions(to) and verify(Channel.open(to)) == []
    small = {**options, "keep_bytes": shown[2].stored // 2}
    too_small = pytest.raises(Refused, match=f"--keep-bytes {small['keep_bytes']}")
    with run.mirror(open_store(tmp_path / "small"), **small) as mirror, too_small:
        mirror.step()


def test_versions_that_the_source_pruned_stay_and_gaps_are_passed(run: Run, to: Store) -> None:
    run.grow(2)
    run.copy(to)
    run.grow(
        6, anchor_every=3, upkeep=UpkeepOptions(retention=Retention(1, host_versions=0), grace_seconds=0.0)
    )
    assert 3 not in versions(run.store)
    run.copy(to)
    assert versions(to)[:2] == [1, 2] and set(versions(to)) >= set(versions(run.store))
    assert verify(Channel.open(to)) == []
    run.arrives(to, "new", base=False)


def test_forks_rewinds_and_other_runs_are_refused(run: Run, to: Store, tmp_path: Path) -> None:
    run.grow(2)
    copied = tmp_path / "copied"
    shutil.copytree(tmp_path / "a", copied / "a")
    shutil.copytree(tmp_path / "pub", copied / "pub")
    run.grow(2)
    run.copy(to)
    before = objects(to)
    old = Run(copied, DirectoryStore(copied / "a"), run.models[:3])
    write_checkpoint(old.base, run.models[0])
    for again, problem in ((0, "was rewound: latest names version 2"), (2, "not that of the source")):
        if again:
            old.models[-1] = run.models[1]  # another past
            old.grow(again)
        with pytest.raises(Forked, match=problem):
            old.copy(to)
        assert objects(to) == before
    old.grow(1)
    with pytest.raises(Forked, match=r"not that of the source|continues another version"):
        old.copy(to)
    other = Run(tmp_path / "other", DirectoryStore(tmp_path / "other/a"))
    init_channel(other.store, write_checkpoint(other.base, run.models[0]), run_id="other")
    with pytest.raises(WrongRun, match=r"is of run run, the source of run other"):
        other.copy(to)
    with pytest.raises(Refused, match="is the source too"):
        run.copy(run.store)
    assert objects(to) == before
    run.grow(1)
    run.copy(to)
    require_equal(run.store, to)


def test_a_rollback_is_followed(run: Run, to: Store) -> None:
    run.grow(2)
    run.copy(to)
    order_rollback(run.store, 1)
    with run.publisher() as publisher:
        publisher.obey_orders()
    run.models.append(run.models[1])
    run.copy(to)
    require_equal(run.store, DirectoryStore(run.root / "a"))
    run.arrives(to, "host")


@pytest.mark.parametrize("lost", [True, False])
def test_a_damaged_version_of_the_source_waits_until_it_heals(run: Run, to: Store, lost: bool) -> None:
    run.grow(3)
    key = shard(run.store, 2)
    whole = run.store.read(key, LIMIT)
    damage(run.store, key, None if lost else whole[:-1] + b"?")
    with pytest.raises((DamagedFile, NotFound), match=key):
        run.copy(to)
    assert versions(to) == [1] and verify(Channel.open(to)) == []
    run.arrives(to, "host", 1)
    damage(run.store, key, whole)
    run.copy(to)
    require_equal(run.store, to)


def test_a_version_behind_an_anchor_needs_no_damaged_one(run: Run, to: Store) -> None:
    run.grow(4, anchor_every=4)
    damage(run.store, shard(run.store, 2), b"?")
    with pytest.raises(DamagedFile, match="weight_v000002"):
        run.copy(to)
    assert versions(to) == [1, 4] and verify(Channel.open(to)) == []
    run.arrives(to, "host")


@pytest.mark.parametrize("ordered", [True, False])
def test_what_is_damaged_in_the_destination_is_repaired(run: Run, to: Store, ordered: bool) -> None:
    run.grow(3, anchor_every=3, upkeep=BESIDE, carry_config=True)
    run.copy(to)
    first, second = shard(to, 1), shard(to, 2)
    damage(to, first, to.read(first, LIMIT)[:-1])
    damage(to, f"weight_v000003/anchor/{INDEX}", None)
    damage(to, f"weight_v000002/{INDEX}", b"{")
    damage(to, "latest", b"?")
    done = run.copy(to)
    assert done.status.mended == 1
    require_equal(run.store, to)
    # of the same size: only who reads it knows
    damage(to, second, to.read(second, LIMIT)[:-1] + b"?")
    run.copy(to)
    assert verify(Channel.open(to)) != []
    if ordered:
        pins.order(to, "repair")
    run.copy(to, verify=not ordered)
    require_equal(run.store, to)
    assert not pins.is_ordered(to, "repair")


def test_signatures_are_copied_and_checked(tmp_path: Path, to: Store) -> None:
    key, other = PrivateKey.generate(), PrivateKey.generate()
    write_private_key(tmp_path / "key", key)
    run = Run.begin(tmp_path, DirectoryStore(tmp_path / "a"), sign_key=tmp_path / "key")
    run.grow(2, sign_key=tmp_path / "key")
    with pytest.raises(Untrusted, match="not trusted here"):
        run.copy(to, trust=Trust.of([other.public]))
    run.copy(to, trust=Trust.of([key.public]))
    require_equal(run.store, to)
    run.store.delete(f"weight_v000002/{INDEX}.sig")
    run.copy(to)
    with pytest.raises(Untrusted, match=r"weight_v000002.* is not signed"):
        run.copy(to, trust=Trust.of([key.public]))


def test_two_mirrors_of_one_destination_are_kept_apart(run: Run, to: Store) -> None:
    run.grow(1)
    with run.mirror(to) as first:
        first.step()
        run.grow(1)
        # the same process: nothing says that the first one ended
        with run.mirror(to, take_over=True) as second:
            with pytest.raises(Refused, match=r"now belongs to .*epoch 3"):
                first.step()
            second.step()
    require_equal(run.store, to)


OF_ANY = (
    "attempt.begun",
    "mirror.copied",
    "mirror.committed",
    "index.allowed",
    "pointer.allowed",
    "pointer.moved",
)
POINTS = {
    "directory": (
        *OF_ANY,
        *("file.begun", "file.written", "file.synced", "file.linked", "file.renamed", "directory.synced"),
        *("trash.moved", "trash.deleted", "prune.moved", "prune.emptying", "prune.deleted"),
    ),
    "s3": (*OF_ANY, "object.begun", "object.written", "index.deleted"),
}
"""of a mirror, by the kind of its destination"""
KINDS = ["directory", S3]
CHILD = Path(__file__).with_name("mirror_child.py")
PassBy = Callable[[str, int, str], tuple[int, str]]


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """With 8 versions in `a`, and how it was at 4 in `early`."""
    root = tmp_path_factory.mktemp("grown")
    run = Run.begin(root, DirectoryStore(root / "a"))
    run.grow(4, anchor_every=2, upkeep=BESIDE)
    shutil.copytree(root / "a", root / "early")
    run.grow(4, anchor_every=2, upkeep=BESIDE)
    return run


@pytest.fixture
def pass_by(grown: Run, to: Store) -> PassBy:
    """Mirrors `a` or `early` in a process that is killed at a failpoint, at which it arrives so often."""

    def mirror(point: str, number: int, name: str) -> tuple[int, str]:
        source = DirectoryStore(grown.root).within(name).place()
        return ended(start(CHILD, point, number, source, to.place(), 2))

    return mirror


@pytest.mark.parametrize("to", KINDS, indirect=True)
def test_the_failpoints_of_a_mirror(pass_by: PassBy, to: Store) -> None:
    assert pass_by("", 0, "early")[0] == 0
    to.delete(f"weight_v000004/{INDEX}")
    code, said = pass_by("", 0, "a")
    passed = {word.partition("=")[0] for word in said.splitlines()[-1].split()}
    assert code == 0 and passed == {*POINTS["directory" if isinstance(to, DirectoryStore) else "s3"]}, said


@pytest.mark.parametrize(
    ("to", "point"),
    [
        pytest.param(kind, point, marks=[pytest.mark.s3] if kind == "s3" else [])
        for kind, points in POINTS.items()
        for point in points
    ],
    indirect=["to"],
)
def test_killed_at(grown: Run, pass_by: PassBy, make_store: MakeStore, to: Store, point: str) -> None:
    kind = "directory" if isinstance(to, DirectoryStore) else "s3"
    whole = make_store(kind, "whole")
    times = 7 if point.startswith("object") else 1
    for number, source in ((1, "early"), (2, "a"), (3, "a")):
        code, said = pass_by(point, number * times, source)
        assert code in (-signal.SIGKILL, 0), said
        if to.stat("channel.json") is not None:
            assert verify(Channel.open(to)) == []
    for place in (to, whole):
        grown.copy(place, verify=True, retention=Retention(2, host_versions=0), grace_seconds=0.0)
    assert verify(Channel.open(to)) == []
    there = objects(to)
    assert not objects(whole).keys() - there.keys()
    assert objects(whole)["latest"] == there["latest"]
    assert {key.split("/")[0] for key in there if key.startswith("weight_v")} == {
        f"weight_v{version:06d}" for version in versions(to)
    }
    if isinstance(to, DirectoryStore):
        left = [path for path in to.directory.rglob("*") if path.is_dir()]
        assert not [path for path in left if ".parts" in path.name or re.search(r"\.\d+-", path.name)]
    grown.arrives(to, f"new-{kind}-{point}", base=False)


@pytest.mark.parametrize("pair", [("directory", "directory"), ("directory", "memory")])
def test_adapters_are_mirrored_after_main(
    pair: tuple[str, str], make_store: MakeStore, tmp_path: Path
) -> None:
    source, to = make_store(pair[0], "source"), make_store(pair[1], "to")
    run = Run.begin(tmp_path, source)
    run.grow(1)
    with run.publisher() as publisher:
        for seed in (1, 2):
            publisher.publish(adapter(seed), component=MATH, config=CONFIG)
        publisher.publish(adapter(9), component=CODE, config=CONFIG)
    with run.mirror(to) as mirror:
        mirror.step()
        assert mirror.status.versions == 4
        with run.publisher() as publisher:
            publisher.publish(adapter(3), component=MATH)
            publisher.retire(CODE)
        mirror.step()
    require_equal(source, to)
    assert follow(to, MATH, tmp_path / "host")[:2] == (3, adapter_bytes(adapter(3)))
    assert all_faults(to) == []


def test_damage_of_an_adapter_keeps_main_and_others_mirrored(make_store: MakeStore, tmp_path: Path) -> None:
    source, to = make_store("directory", "source"), make_store("directory", "to")
    run = Run.begin(tmp_path, source)
    run.grow(1)
    with run.publisher() as publisher:
        for name in (CODE, MATH):
            publisher.publish(adapter(1), component=name, config=CONFIG)
    shard = tmp_path / "source" / "components" / CODE / "weight_v000001" / "model-00000-of-00001.safetensors"
    shard.unlink()
    with pytest.raises((DamagedFile, NotFound)):
        run.copy(to)
    assert follow(to, MATH, tmp_path / "host")[0] == 1
    assert read_pointer(to) is not None

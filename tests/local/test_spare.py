"""The file of a dropped journal is written over by the next one: nothing of the old one shows."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from core_cases import bytes_of, read_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_cases import packed
from local_cases import catch_up, following, make_run, patch_keeping_undo, phase_of, staged, step_to

from weightcast.shared.base.elements import TensorSpec, TensorTable
from weightcast.shared.base.errors import DamagedFile, RetryLater
from weightcast.shared.checkpoint.local_checkpoint import LocalPaths
from weightcast.shared.checkpoint.update.buffer_reuse import (
    begin,
    keep_journal,
    keep_shards,
    make_ready,
    spare_bytes,
)
from weightcast.shared.checkpoint.update.journal import JournalHeader, JournalReader, JournalWriter, Record

HEADER = JournalHeader("run-1", "abc", 3, "r3", 7, 4, "r4", "d4")
TABLE = TensorTable.of([TensorSpec("a", "BF16", (5000,), 10_000)])


def record(count: int, seed: int) -> Record:
    rng = np.random.default_rng(seed)
    index = np.sort(rng.choice(5000, count, replace=False)).astype(np.uint64)
    return Record(
        0, index, rng.integers(0, 9, count, dtype=np.uint16), rng.integers(0, 9, count, dtype=np.uint16)
    )


def begun(room: Path, *records: Record) -> JournalWriter:
    """A journal over the spare in `room`, not ended."""
    (room / "x.journal").unlink(missing_ok=True)
    writer = JournalWriter(room / "x.journal", HEADER, room / "spare")
    for one in records:
        writer.write(packed(one))
    return writer


def write(room: Path, *records: Record) -> Path:
    begun(room, *records).close()
    return room / "x.journal"


def read(path: Path) -> list[tuple[list[int], list[int], list[int]]]:
    with JournalReader(path, TABLE) as journal:
        return shown(*journal.records())


def shown(*records: Record) -> list[tuple[list[int], list[int], list[int]]]:
    return [tuple(part.tolist() for part in (r.index, r.old, r.new)) for r in records]  # type: ignore[misc]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 300), max_size=4), min_size=2, max_size=5))
def test_each_journal_is_whole_whatever_lay_there(
    tmp_path_factory: pytest.TempPathFactory, journals: list[list[int]]
) -> None:
    room = tmp_path_factory.mktemp("room")
    fresh = tmp_path_factory.mktemp("fresh")
    for number, sizes in enumerate(journals):
        records = [record(size, 10 * number + n) for n, size in enumerate(sizes)]
        path = write(room, *records)
        assert read(path) == shown(*records)
        assert path.read_bytes() == write(fresh, *records).read_bytes()
        path.rename(room / "spare")


def test_the_same_file_is_used_again(tmp_path: Path) -> None:
    first = write(tmp_path, record(9, 1))
    inode = first.stat().st_ino
    first.rename(tmp_path / "spare")
    second = write(tmp_path, record(5, 2))
    assert second.stat().st_ino == inode and not (tmp_path / "spare").exists()


@pytest.mark.parametrize("sizes", [(200, 200), (200, 100), (100, 200)])
def test_a_journal_that_did_not_end_is_none(tmp_path: Path, sizes: tuple[int, int]) -> None:
    """Neither before its first record nor behind its last does the old one's end count."""
    before, after = sizes
    for written in (0, 1, 2):
        write(tmp_path, record(before, 1), record(before, 2)).rename(tmp_path / "spare")
        records = [record(after, 3 + n) for n in range(written)]
        writer = begun(tmp_path, *records)
        with pytest.raises(DamagedFile, match=r"incomplete"):
            read(tmp_path / "x.journal")
        writer.abandon()
        assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over_that_is_not_a_file_of_one_name(tmp_path: Path) -> None:
    other, spare = tmp_path / "other", tmp_path / "spare"
    other.write_bytes(b"somebody else's" * 9)
    for plant in (spare.symlink_to, spare.hardlink_to):
        plant(other)
        assert read(write(tmp_path, record(5, 1))) == shown(record(5, 1))
        assert other.read_bytes() == b"somebody else's" * 9 and not spare.exists()
    os.mkfifo(spare)
    assert read(write(tmp_path, record(5, 1))) == shown(record(5, 1))
    spare.unlink(missing_ok=True)
    spare.mkdir()
    assert read(write(tmp_path, record(5, 1))) == shown(record(5, 1))


def test_a_journal_that_is_read_is_not_written_over(tmp_path: Path) -> None:
    first = write(tmp_path, record(300, 1))
    with JournalReader(first, TABLE) as journal:
        first.rename(tmp_path / "spare")
        assert read(write(tmp_path, record(300, 2))) == shown(record(300, 2))
        assert shown(*journal.records()) == shown(record(300, 1))


def test_nobody_begins_to_read_what_is_about_to_be_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, flock = write(tmp_path, record(300, 1)), fcntl.flock

    def late(fd: int, kind: int) -> None:
        monkeypatch.undo()
        journal.rename(tmp_path / "spare")
        begun(tmp_path).abandon()
        flock(fd, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(DamagedFile, match=r"gone"):
        read(journal)


def test_what_is_not_in_memory_is_no_spare(tmp_path: Path) -> None:
    paths = LocalPaths(tmp_path)
    paths.room.mkdir()
    journal = write(tmp_path, *(record(3000, n) for n in range(9)))
    with journal.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    keep_journal(paths, journal)
    assert not journal.exists() and not paths.spare.exists()


def test_one_is_made_where_there_is_none(tmp_path: Path) -> None:
    paths, size, pieces = LocalPaths(tmp_path), (5 << 20) + 1, []
    paths.room.mkdir()
    make_ready(paths, size, lambda: pieces.append(paths.spare.exists()))
    assert paths.spare.stat().st_size == size and spare_bytes(paths) >= size
    assert pieces == [False] * 6, "there is none before it is whole"
    inode = paths.spare.stat().st_ino
    make_ready(paths, 2 * size, lambda: pieces.append(True))
    assert paths.spare.stat().st_ino == inode and not any(pieces)
    assert read(write(paths.room, record(9, 1))) == shown(record(9, 1))
    assert (paths.room / "x.journal").stat().st_ino == inode


def test_none_is_made_for_nothing_or_without_room(tmp_path: Path) -> None:
    paths, there = LocalPaths(tmp_path), os.statvfs(tmp_path)
    paths.room.mkdir()
    for size in (0, there.f_bavail * there.f_frsize):
        make_ready(paths, size, lambda: pytest.fail("begun"))
    with TemporaryDirectory(dir="/dev/shm") as memory:
        (Path(memory) / ".weightcast").mkdir()
        make_ready(LocalPaths(Path(memory)), 1 << 20, lambda: pytest.fail("begun"))


def test_nothing_is_left_of_one_that_was_given_up(tmp_path: Path) -> None:
    paths, pieces = LocalPaths(tmp_path), []
    paths.room.mkdir()

    def give_up() -> None:
        pieces.append(paths.unready_spare.exists())
        if len(pieces) == 3:
            raise RetryLater("the publisher stops")

    with pytest.raises(RetryLater):
        make_ready(paths, 9 << 20, give_up)
    assert pieces == [True] * 3 and list(paths.room.iterdir()) == []


def test_a_taken_name_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path, record(5, 1))
    (tmp_path / "spare").write_bytes(b"spare")
    with pytest.raises(FileExistsError):
        JournalWriter(tmp_path / "x.journal", HEADER, tmp_path / "spare")
    assert read(tmp_path / "x.journal") == shown(record(5, 1))


def test_a_host_keeps_one_from_step_to_step(tmp_path: Path) -> None:
    run = make_run(tmp_path, versions=3)
    with following(run, tmp_path / "local") as updater:
        step_to(updater, 1)
        spare = updater.paths.spare
        inode = spare.stat().st_ino
        journal = updater.paths.journal(staged(updater, 2).step.journal)
        assert journal.stat().st_ino == inode and not spare.exists()
        catch_up(updater)
        assert phase_of(updater.paths.directory) == "clean" and spare.exists()
        assert updater.paths.spare_shard(0).exists()
    assert spare_bytes(updater.paths) == 0, "the next owner's are its own"


def test_fetched_shards_are_written_over_the_ones_before(tmp_path: Path) -> None:
    """Longer ones and shorter ones, and one that was fetched in part before."""
    run = make_run(tmp_path, versions=3)
    with following(run, tmp_path / "local") as updater:
        step_to(updater, 1)
        spare = updater.paths.spare_shard(0)
        for version, size in ((2, 1 << 20), (3, 1)):
            spare.write_bytes(b"old" * size)
            inode = spare.stat().st_ino
            step_to(updater, version)
            assert spare.stat().st_ino == inode and spare.stat().st_size != 3 * size
        assert read_checkpoint(updater.paths.directory) == bytes_of(run.latest)


def test_spares_of_other_shards_go(tmp_path: Path) -> None:
    paths = LocalPaths(tmp_path)
    for name, count in (("many", 3), ("few", 1), ("none", 0)):
        directory = paths.spool / name
        directory.mkdir(parents=True)
        for number in range(count):
            (directory / f"{number}").write_bytes(name.encode())
        keep_shards(paths, directory)
        left = sorted(path.name for path in paths.room.glob("spare*"))
        assert left == [f"spare.{number}" for number in range(count)]
    begin(tmp_path / "new", paths.spare_shard(0)).close()
    assert (tmp_path / "new").read_bytes() == b""


def test_a_journal_that_is_still_the_way_back_is_no_spare(tmp_path: Path) -> None:
    run = make_run(tmp_path, versions=1)
    with following(run, tmp_path / "local") as updater:
        step_to(updater, 0)
        patch_keeping_undo(updater, 1)
        assert not updater.paths.spare.exists()
        with updater.local.patching():  # type: ignore[union-attr]
            updater.undo()
        assert updater.paths.spare.exists()


def test_a_journal_with_another_name_is_no_spare(tmp_path: Path) -> None:
    run = make_run(tmp_path, versions=1)
    with following(run, tmp_path / "local") as updater:
        step_to(updater, 0)
        step = staged(updater, 1)
        kept = tmp_path / "kept"
        journal = updater.paths.journal(step.step.journal)
        kept.hardlink_to(journal)
        before = kept.read_bytes()
        with updater.local.patching():  # type: ignore[union-attr]
            updater.patch(step, undoable=False)
        updater.drop_journal(step)
        assert not updater.paths.spare.exists() and not journal.exists() and kept.read_bytes() == before


def test_the_leftover_of_a_kill_is_dropped(tmp_path: Path) -> None:
    run = make_run(tmp_path, versions=1)
    with following(run, tmp_path / "local") as updater:
        catch_up(updater)
    left = updater.paths.spare, updater.paths.unready_spare
    for path in left:
        path.write_bytes(b"old")
    with following(run, tmp_path / "local") as updater:
        catch_up(updater)
        assert not any(path.exists() for path in left)


def test_memory_is_given_back_at_once(tmp_path: Path) -> None:
    run = make_run(tmp_path, versions=1)
    with TemporaryDirectory(dir="/dev/shm") as local, following(run, Path(local)) as updater:
        catch_up(updater)
        assert spare_bytes(updater.paths) == 0

"""Many short records of a journal, exchanged at once: as if one by one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_cases import packed

from weightcast.shared.base.elements import TensorSpec, TensorTable, Words
from weightcast.shared.base.errors import DamagedFile
from weightcast.shared.checkpoint.update.journal import (
    Direction,
    JournalHeader,
    JournalReader,
    JournalWriter,
    Lists,
    PackedRecord,
    Record,
)

HEADER = JournalHeader("run-1", "abc", 3, "r3", 7, 4, "r4", "d4")
DTYPES = {1: "F8_E4M3", 2: "BF16", 4: "F32"}


@dataclass
class Case:
    """Tensors that lie in one file in another order than in the table, with bytes between them, and a journal
    of changes of some of them. `places`: of the journal's records."""

    path: Path
    table: TensorTable
    words: Words
    target: Words
    records: list[PackedRecord]
    places: list[tuple[int, int]]

    def exchange(self, words: Words, way: Direction = Direction.FORWARD, *, again: bool = False) -> object:
        data = np.fromfile(self.path, np.uint8)
        rows = [(r.tensor, r.first, r.changes, r.escapes, r.offset, r.size) for r in self.records]
        lists, homes = Lists(data, np.array(rows), 0), np.array(self.places)
        with JournalReader(self.path, self.table) as journal:
            failed = journal.compare_and_swap_many(lists, homes, words, way, again=again)
        return failed if failed is None else ([row[0] for row in rows].index(failed[0]), failed[1])

    def one_by_one(self, words: Words, way: Direction = Direction.FORWARD) -> None:
        with JournalReader(self.path, self.table) as journal:
            for record, (start, size) in zip(self.records, self.places, strict=True):
                assert journal.compare_and_swap(record, words[start : start + size], way, again=False) is None


def case(room: Path, seed: int, width: int, shift: int) -> Case:
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 900, 12).tolist()
    specs = [TensorSpec(f"t{n:02}", DTYPES[width], (size,), width * size) for n, size in enumerate(sizes)]
    table = TensorTable.of(specs)
    starts, end = {}, 3
    for tensor in random.permutation(len(sizes)).tolist():
        starts[tensor], end = end, end + sizes[tensor] + int(random.integers(0, 3))
    data = bytearray(random.bytes(width * end + shift))
    words = np.frombuffer(data, f"<u{width}", end, shift)
    target = words.copy()
    writer = JournalWriter(room / "x.journal", HEADER)
    for tensor in sorted(random.choice(len(sizes), 8, replace=False).tolist()):
        start, size = starts[tensor], sizes[tensor]
        index = np.flatnonzero(random.random(size) < random.choice([0.002, 0.1, 1.0]))
        index = np.union1d(index, [size - 1])
        old = words[start + index].copy()
        target[start + index] = old ^ np.array(1, old.dtype)
        writer.write(packed(Record(tensor, index.astype(np.uint64), old, target[start + index])))
    writer.close()
    path = room / "x.journal"
    with JournalReader(path, table) as journal:
        records = list(journal.packed())
    places = [(starts[one.tensor], sizes[one.tensor]) for one in records]
    return Case(path, table, words, target, records, places)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 20), st.sampled_from([1, 2, 4]), st.integers(0, 3))
def test_as_if_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, seed: int, width: int, shift: int
) -> None:
    made = case(tmp_path_factory.mktemp("journal"), seed, width, shift)
    before, single = made.words.copy(), made.words.copy()
    made.one_by_one(single)
    assert made.exchange(made.words) is None and np.array_equal(made.words, single)
    assert np.array_equal(single, made.target)
    assert made.exchange(made.words) is not None and np.array_equal(made.words, single)
    assert made.exchange(made.words, Direction.BACK) is None and np.array_equal(made.words, before)
    # killed half way
    half = np.where(np.arange(len(before)) % 3 == 0, made.target, before)
    there = half.copy()
    assert made.exchange(there, again=True) is None and np.array_equal(there, made.target)
    assert made.exchange(half, Direction.BACK, again=True) is None and np.array_equal(half, before)


@pytest.mark.parametrize("again", [False, True])
def test_a_foreign_word_is_named_and_nothing_written(tmp_path: Path, again: bool) -> None:
    made = case(tmp_path, 5, 2, 0)
    for number, (start, size) in enumerate(made.places):
        words = made.words.copy()
        words[start + size - 1] ^= 0x8000
        left = words.copy()
        assert made.exchange(words, again=again) == (number, size - 1)
        assert np.array_equal(words, left)


def test_a_record_past_its_tensor_is_refused(tmp_path: Path) -> None:
    made = case(tmp_path, 6, 2, 0)
    start, size = made.places[4]
    made.places[4] = (start, size - 1)
    left = made.words.copy()
    with pytest.raises(DamagedFile, match="past the end"):
        made.exchange(made.words)
    assert np.array_equal(made.words, left)


def test_damage_to_one_record_is_refused(tmp_path: Path) -> None:
    made = case(tmp_path, 7, 4, 0)
    record = made.records[5]
    data = bytearray(made.path.read_bytes())
    data[record.offset + record.size - 1] ^= 1
    made.path.write_bytes(data)
    left = made.words.copy()
    with pytest.raises(DamagedFile, match="wrong checksum"):
        made.exchange(made.words)
    assert np.array_equal(made.words, left)

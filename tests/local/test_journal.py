from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_cases import packed

from weightcast.shared.base.elements import Chunk, Span, TensorSpec, TensorTable, Words, grid
from weightcast.shared.base.errors import DamagedFile
from weightcast.shared.checkpoint.update.journal import (
    Direction,
    JournalHeader,
    JournalReader,
    JournalWriter,
    Record,
    pack_changes,
    pack_whole,
)
from weightcast.shared.codec.changes import Changes, compare, masked_changes

HEADER = JournalHeader("run-1", "abc", 3, "r3", 7, 4, "r4", "d4")
TABLE = TensorTable.of(
    [
        TensorSpec("a", "BF16", (50_000,), 100_000),
        TensorSpec("b", "F32", (3000,), 12_000),
        TensorSpec("c", "I64", (100,), 800),
        TensorSpec("d", "BF16", (0,), 0),
    ]
)


def record(tensor: int, index: list[int], seed: int = 0) -> Record:
    kind = TABLE[tensor].kind
    old, new = np.random.default_rng(seed).integers(0, 1 << 8 * kind.width, (2, len(index)), dtype=np.uint64)
    return Record(tensor, np.array(index, np.uint64), old.astype(kind.numpy), new.astype(kind.numpy))


def write(path: Path, *records: Record) -> Path:
    writer = JournalWriter(path, HEADER)
    for one in records:
        writer.write(packed(one))
    writer.close()
    return path


def read(path: Path) -> list[Record]:
    with JournalReader(path, TABLE) as journal:
        assert journal.header == HEADER
        return list(journal.records())


def same(one: Record, other: Record) -> bool:
    return one.tensor == other.tensor and all(
        np.array_equal(a, b)
        for a, b in zip((one.index, one.old, one.new), (other.index, other.old, other.new), strict=True)
    )


def resign(data: bytearray, offset: int, size: int) -> None:
    """Gives the record whose payload lies at `offset` its checksum."""
    pieces = data[offset : offset + size], data[offset - 32 : offset - 8]
    one, other = (xxhash.xxh3_64_intdigest(bytes(piece)) for piece in pieces)
    data[offset - 8 : offset] = (one ^ other).to_bytes(8, "little")


RECORDS = st.lists(
    st.integers(0, 2).flatmap(
        lambda tensor: st.tuples(
            st.just(tensor), st.sets(st.integers(0, TABLE[tensor].words - 1), min_size=1, max_size=60)
        )
    ),
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(RECORDS)
def test_records_come_back(
    tmp_path_factory: pytest.TempPathFactory, wanted: list[tuple[int, set[int]]]
) -> None:
    records = [record(tensor, sorted(index), n) for n, (tensor, index) in enumerate(wanted)]
    found = read(write(tmp_path_factory.mktemp("journal") / "x.journal", *records))
    assert len(found) == len(records) and all(map(same, records, found))


def test_a_chunk_becomes_a_record_for_each_span_with_changes(tmp_path: Path) -> None:
    spans = (Span(0, 128, 200, 0), Span(1, 0, 5, 128), Span(2, 64, 70, 192), Span(0, 0, 64, 256))
    chunk = Chunk(0, "BF16", 0, spans, 320)
    index = np.array([0, 71, 130, 256, 319], np.uint32)
    old, new = np.arange(10, dtype="<u2").reshape(2, 5)
    table = TensorTable.of([TensorSpec(name, "BF16", (300,), 600) for name in "abc"])
    writer = JournalWriter(tmp_path / "x.journal", HEADER)
    writer.write(pack_changes(chunk, Changes(index, old, new)))
    writer.write(pack_changes(chunk, Changes(index[:0], old[:0], new[:0])))
    writer.close()
    with JournalReader(tmp_path / "x.journal", table) as journal:
        found = [(r.tensor, r.index.tolist(), r.old.tolist(), r.new.tolist()) for r in journal.records()]
    assert found == [(0, [128, 199], [0, 1], [5, 6]), (1, [2], [2], [7]), (0, [0, 63], [3, 4], [8, 9])]


def test_many_short_records(tmp_path: Path) -> None:
    table = TensorTable.of([TensorSpec(f"t{n:03}", "F8_E4M3", (64,), 64) for n in range(500)])
    (chunk,) = grid(table, table.whole)
    words = np.arange(chunk.words, dtype=np.uint32)[::7]
    changes = Changes(words, words.astype(np.uint8), (words + 1).astype(np.uint8))
    writer = JournalWriter(tmp_path / "x.journal", HEADER)
    writer.write(pack_changes(chunk, changes))
    writer.close()
    with JournalReader(tmp_path / "x.journal", table) as journal:
        places = [64 * r.tensor + int(word) for r in journal.records() for word in r.index]
    assert places == words.tolist()


SPANS = (Span(0, 128, 200, 0), Span(1, 0, 5, 128), Span(2, 64, 70, 192), Span(0, 0, 64, 256))
WHOLE_TABLE = TensorTable.of([TensorSpec(name, "BF16", (300,), 600) for name in "abc"])


def whole(path: Path, old: Words, new: Words) -> Path:
    """A journal with all words of four spans, of which some have no changes."""
    writer = JournalWriter(path, HEADER)
    packed = pack_whole(Chunk(0, "BF16", 0, SPANS, 320), old, new)
    writer.write(packed)
    writer.close()
    assert packed.changes == writer.changes
    return path


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 20), st.floats(0.0, 1.0))
def test_whole_spans_say_what_lists_say(
    tmp_path_factory: pytest.TempPathFactory, seed: int, density: float
) -> None:
    room, random = tmp_path_factory.mktemp("journal"), np.random.default_rng(seed)
    inside = np.concatenate([np.arange(span.offset, span.offset + span.words) for span in SPANS])
    old, new = np.zeros((2, 320), np.uint16)
    old[inside] = random.integers(0, 1 << 16, len(inside), np.uint16)
    new[inside] = old[inside] + (random.random(len(inside)) < density).astype(np.uint16)
    index = np.flatnonzero(old != new).astype(np.uint32)
    writer = JournalWriter(room / "list.journal", HEADER)
    writer.write(pack_changes(Chunk(0, "BF16", 0, SPANS, 320), Changes(index, old[index], new[index])))
    writer.close()
    found = []
    for path in (whole(room / "whole.journal", old, new), room / "list.journal"):
        with JournalReader(path, WHOLE_TABLE) as journal:
            found.append((list(journal.records()), [record.changes for record in journal.packed()]))
    assert found[0][1] == found[1][1] and all(map(same, found[0][0], found[1][0]))
    counts = [int((index >= s.offset).sum() - (index >= s.offset + s.words).sum()) for s in SPANS]
    chunk = Chunk(0, "BF16", 0, SPANS, 320)
    assert pack_whole(chunk, old, new, counts) == pack_whole(chunk, old, new)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 20), st.sampled_from([0.3, 0.5, 0.9]), st.booleans())
def test_masks_say_what_lists_say(
    tmp_path_factory: pytest.TempPathFactory, seed: int, density: float, listed: bool
) -> None:
    """Of several tensors in one chunk, one of them without changes, one not a multiple of 64 words."""
    path, random = tmp_path_factory.mktemp("journal") / "x.journal", np.random.default_rng(seed)
    table = TensorTable.of([TensorSpec(name, "BF16", (5_000,), 10_000) for name in "abc"])
    (chunk,) = grid(table, table.whole)
    old = random.integers(0, 1 << 16, chunk.words).astype(np.uint16)
    changing = random.random(chunk.words) < density
    for span, still in zip(chunk.spans, (False, True, False), strict=True):
        changing[span.offset : span.offset + span.words] &= not still
        changing[span.offset + span.words : span.offset + -(-span.words // 64) * 64] = False
        old[span.offset + span.words : span.offset + -(-span.words // 64) * 64] = 0
    new = old + changing.astype(np.uint16)
    index = np.flatnonzero(changing).astype(np.uint32)
    changes = masked_changes(chunk, old, new)[0]
    writer = JournalWriter(path, HEADER)
    writer.write(pack_changes(chunk, Changes(index, old[index], new[index]) if listed else changes))
    writer.close()
    words = {span.tensor: old[span.offset : span.offset + span.words].copy() for span in chunk.spans}
    with JournalReader(path, table) as journal:
        packed = list(journal.packed())
        assert [(one.tensor, one.masked) for one in packed if one.masked] == [(0, 5_000), (2, 5_000)]
        for span in (chunk.spans[0], chunk.spans[2]):
            (record,) = (one for one in journal.records() if one.tensor == span.tensor)
            mine = index[(index >= span.offset) & (index < span.offset + span.words)]
            assert np.array_equal(record.index, mine - span.offset)
            assert np.array_equal(record.old, old[mine]) and np.array_equal(record.new, new[mine])
        for way, target in ((Direction.FORWARD, new), (Direction.BACK, old)):
            for one in packed:
                assert journal.compare_and_swap(one, words[one.tensor], way, again=False) is None
            for span in chunk.spans:
                assert np.array_equal(words[span.tensor], target[span.offset :][: span.words])
        for way, target in ((Direction.FORWARD, new), (Direction.BACK, old)):  # killed halfway
            for one in packed:
                span = chunk.spans[one.tensor]
                half = words[one.tensor].copy()
                half[: span.words // 2] = target[span.offset :][: span.words // 2]
                assert journal.compare_and_swap(one, half.copy(), way, again=False) is not None
                assert journal.compare_and_swap(one, half, way, again=True) is None
                assert np.array_equal(half, target[span.offset :][: span.words])
            words = {span.tensor: target[span.offset :][: span.words].copy() for span in chunk.spans}


def test_a_mask_of_another_number_of_words_is_damage(tmp_path: Path) -> None:
    path, count = tmp_path / "x.journal", 5_000
    table = TensorTable.of([TensorSpec("a", "BF16", (count,), 2 * count)])
    (chunk,) = grid(table, table.whole)
    old, new = np.zeros(chunk.words, np.uint16), np.zeros(chunk.words, np.uint16)
    new[:count:2] = 7
    writer = JournalWriter(path, HEADER)
    writer.write(pack_changes(chunk, masked_changes(chunk, old, new)[0]))
    writer.close()
    data = bytearray(path.read_bytes())
    with JournalReader(path, table) as journal:
        (record,) = journal.packed()
    data[record.offset] ^= 2  # a bit more
    resign(data, record.offset, record.size)
    path.write_bytes(data)
    words = old[:count].copy()
    with JournalReader(path, table) as journal:
        (record,) = journal.packed()
        for entry in (
            lambda: journal.compare_and_swap(record, words, Direction.FORWARD, again=False),
            lambda: list(journal.records()),
        ):
            with pytest.raises(DamagedFile, match="out of order"):
                entry()
    assert not words.any()


def test_whole_spans_there_and_back(tmp_path: Path) -> None:
    old, new = np.arange(320, dtype=np.uint16), np.arange(0x1000, 0x1140, dtype=np.uint16)
    words = np.zeros(300, np.uint16)
    words[128:200], target = old[:72], np.zeros(300, np.uint16)
    target[128:200] = new[:72]
    before = words.copy()
    begun: list[tuple[int, int]] = []

    def begin(stretch: Words, changes: int) -> None:
        begun.append((len(stretch), changes))

    with JournalReader(whole(tmp_path / "x.journal", old, new), WHOLE_TABLE) as journal:
        first = next(journal.packed())
        assert (first.first, first.whole, first.changes) == (128, 72, 72)
        assert journal.compare_and_swap(first, words, Direction.FORWARD, again=False, begin=begin) is None
        assert begun == [(72, 72)] and (words == target).all()
        assert journal.compare_and_swap(first, words, Direction.FORWARD, again=False) == 128
        assert (
            journal.compare_and_swap(first, words, Direction.BACK, again=False) is None
            and (words == before).all()
        )
        # killed within a copy, even within a word
        words.view(np.uint8)[2 * 128 : 2 * 150 + 1] = target.view(np.uint8)[2 * 128 : 2 * 150 + 1]
        half = words.copy()
        assert (
            journal.compare_and_swap(first, words, Direction.BACK, again=True) is None
            and (words == before).all()
        )
        assert (
            journal.compare_and_swap(first, half, Direction.FORWARD, again=True) is None
            and (half == target).all()
        )
        # somebody else's word
        for again in (False, True):
            words[:] = before
            words[171] = 0xFFFF
            assert journal.compare_and_swap(first, words, Direction.FORWARD, again=again) == 171


def test_long_spans_are_compared_to_their_end(tmp_path: Path) -> None:
    count = 300_001
    table = TensorTable.of([TensorSpec("a", "BF16", (count,), 2 * count)])
    (chunk,) = grid(table, table.whole)
    old, new = np.zeros(chunk.words, np.uint16), np.zeros(chunk.words, np.uint16)
    new[:count] = 7
    writer = JournalWriter(tmp_path / "x.journal", HEADER)
    writer.write(pack_whole(chunk, old, new))
    writer.close()
    with JournalReader(tmp_path / "x.journal", table) as journal:
        (record,) = journal.packed()
        for place in (0, 131_071, 131_072, count - 1):
            words = np.zeros(count, np.uint16)
            words[place] = 1
            assert journal.compare_and_swap(record, words, Direction.FORWARD, again=False) == place
            assert journal.compare_and_swap(record, words[:], Direction.FORWARD, again=True) == place
        words[:] = 0
        assert (
            journal.compare_and_swap(record, words, Direction.FORWARD, again=False) is None
            and (words == 7).all()
        )


def test_damage_to_whole_spans_is_refused(tmp_path: Path) -> None:
    old, new = np.arange(320, dtype=np.uint16), np.arange(1, 321, dtype=np.uint16)
    path = whole(tmp_path / "x.journal", old, new)
    data = path.read_bytes()
    begin = 12 + int.from_bytes(data[8:12], "little")
    damaged = tmp_path / "damaged.journal"
    with JournalReader(path, WHOLE_TABLE) as journal:
        size = next(journal.packed()).size

    def refused(bad: bytes | bytearray, why: str) -> None:
        damaged.write_bytes(bad)
        with pytest.raises(DamagedFile, match=why), JournalReader(damaged, WHOLE_TABLE) as journal:
            list(journal.records())

    for at, value, why in (
        (16, 73, "longer than its tensor"),  # more changes than words
        (16, 71, "72 changes where 71"),
        (16, 0, "no tensor"),
        (8, 229, "past the end"),
    ):
        bad = bytearray(data[: begin + at] + value.to_bytes(4, "little") + data[begin + at + 4 :])
        resign(bad, begin + 32, size)
        refused(bad, why)
    for length, why in (
        (0, "longer than its tensor"),
        (173, "past the end"),
        (71, "longer"),
        (74, "damaged"),
    ):
        more = ((1 << 31) + length).to_bytes(4, "little")
        refused(data[: begin + 20] + more + data[begin + 24 :], why)
    for cut in range(begin, len(data), 7):
        refused(data[:cut], r"damaged\.journal")
    flipped = bytearray(data)
    flipped[begin + 40] ^= 1
    refused(flipped, "damaged")


def test_exchanges_there_and_back(tmp_path: Path) -> None:
    words = np.zeros(TABLE[0].words, np.uint16)
    index = np.arange(3, 50_000, 300)
    old, new = np.zeros(len(index), np.uint16), np.arange(1, len(index) + 1, dtype=np.uint16)
    path = write(tmp_path / "x.journal", Record(0, index.astype(np.uint64), old, new))
    with JournalReader(path, TABLE) as journal:
        (packed,) = journal.packed()
        assert journal.compare_and_swap(packed, words, Direction.FORWARD, again=False) is None
        assert np.flatnonzero(words).tolist() == index.tolist() and words[index].tolist() == new.tolist()
        assert journal.compare_and_swap(packed, words, Direction.FORWARD, again=False) == 3
        assert journal.compare_and_swap(packed, words, Direction.FORWARD, again=True) is None
        assert journal.compare_and_swap(packed, words, Direction.BACK, again=False) is None
        assert not words.any()


def test_a_damaged_record_writes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "x.journal", record(0, [1, 700, 701]))
    data = bytearray(path.read_bytes())
    data[-48] ^= 1
    path.write_bytes(data)
    words = np.zeros(TABLE[0].words, np.uint16)
    with JournalReader(path, TABLE) as journal:
        (packed,) = journal.packed()
        with pytest.raises(DamagedFile, match="damaged"):
            journal.compare_and_swap(packed, words, Direction.FORWARD, again=False)
    path = write(tmp_path / "y.journal", record(0, [700, 700]))
    with JournalReader(path, TABLE) as journal:
        (packed,) = journal.packed()
        with pytest.raises(DamagedFile, match="out of order"):
            journal.compare_and_swap(packed, words, Direction.FORWARD, again=False)
    assert not words.any()


def test_gaps_around_the_escape(tmp_path: Path) -> None:
    index = np.cumsum([0, 1, 253, 254, 255, 256, 257, 40_000]).tolist()
    (found,) = read(write(tmp_path / "x.journal", record(0, index)))
    assert found.index.tolist() == index


def test_the_writer_counts_changes(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "x.journal", HEADER)
    writer.write(packed(record(0, [1, 2, 3])))
    writer.write(packed(record(1, [9])))
    assert writer.changes == 4
    writer.close()


def test_an_abandoned_journal_leaves_nothing(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "x.journal", HEADER)
    writer.write(packed(record(0, [1])))
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_a_journal_is_never_written_over(tmp_path: Path) -> None:
    write(tmp_path / "x.journal")
    with pytest.raises(FileExistsError):
        JournalWriter(tmp_path / "x.journal", HEADER)


def test_every_cut_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "x.journal", record(0, [1, 700, 701]), record(2, [5])).read_bytes()
    short = tmp_path / "short.journal"
    for length in range(len(whole)):
        short.write_bytes(whole[:length])
        with pytest.raises(DamagedFile, match=r"short\.journal"):
            read(short)


def test_every_flipped_byte_of_a_record_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "x.journal", record(0, [1, 700, 701]), record(2, [5])).read_bytes()
    begin = 12 + int.from_bytes(whole[8:12], "little")
    damaged = tmp_path / "damaged.journal"
    for place in range(begin, len(whole)):
        for bit in (0, 7):
            data = bytearray(whole)
            data[place] ^= 1 << bit
            damaged.write_bytes(data)
            try:
                found = read(damaged)
            except DamagedFile:
                continue
            assert place >= len(whole) - 40, "only members of the footer that say nothing may be others"
            assert all(map(same, found, [record(0, [1, 700, 701]), record(2, [5])]))


def test_every_flipped_bit_of_a_head_is_refused_where_any_words_fit(tmp_path: Path) -> None:
    """Tensors of equal words: the record of one fits at each place of all others."""
    count, room = 5_000, 5_056
    table = TensorTable.of([TensorSpec(f"t{n}", "BF16", (2 * count,), 4 * count) for n in range(8)])
    chunk = Chunk(0, "BF16", 0, (Span(2, 0, count, 0),), room)
    old = np.zeros(room, np.uint16)
    many, few = old.copy(), old.copy()
    many[1:count:3] = few[5:10] = 9
    writer = JournalWriter(tmp_path / "x.journal", HEADER)
    for each in (
        pack_changes(chunk, compare(old, few)),
        pack_changes(chunk, masked_changes(chunk, old, many)[0]),
        pack_whole(chunk, old, many),
    ):
        writer.write(each)
    writer.close()
    data = (tmp_path / "x.journal").read_bytes()
    with JournalReader(tmp_path / "x.journal", table) as journal:
        starts = [one.offset - 32 for one in journal.packed()]
        assert [(one.masked, one.whole) for one in journal.packed()] == [(0, 0), (count, 0), (0, count)]
    for number, start in enumerate(starts):
        for bit in range(8 * 32):
            bad = bytearray(data)
            bad[start + bit // 8] ^= 1 << bit % 8
            (tmp_path / "bad.journal").write_bytes(bad)
            words = np.zeros(2 * count, np.uint16)
            with (
                JournalReader(tmp_path / "bad.journal", table) as journal,
                pytest.raises(DamagedFile, match=r"bad\.journal: "),
            ):
                one = list(islice(journal.packed(), number + 1))[number]
                journal.compare_and_swap(one, words, Direction.FORWARD, again=False)
            assert not words.any()


@pytest.mark.parametrize(
    "bad",
    [
        record(0, [49_999, 50_000]),
        record(0, [1 << 40]),
        Record(1, np.array([1], np.uint64), np.zeros(1, "<u2"), np.ones(1, "<u2")),
        Record(3, np.array([0], np.uint64), np.zeros(1, "<u2"), np.ones(1, "<u2")),
        Record(77, np.array([0], np.uint64), np.zeros(1, "<u2"), np.ones(1, "<u2")),
        Record(2, np.array([4, 4], np.uint64), np.zeros(2, "u1"), np.ones(2, "u1")),
    ],
    ids=["past the end", "far past the end", "other width", "empty tensor", "no tensor", "twice"],
)
def test_records_that_fit_no_tensor_are_refused(tmp_path: Path, bad: Record) -> None:
    with pytest.raises(DamagedFile):
        read(write(tmp_path / "x.journal", bad))


def test_lengths_are_checked_before_anything_is_allocated(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    path.write_bytes(b"wcjrnl1\n" + b"\xff\xff\xff\xff" + b"{}")
    with pytest.raises(DamagedFile, match="header too long"):
        read(path)


@pytest.mark.parametrize("header", [b"[]", b"{}", b"{", b'{"run_id": "a", "run_id": "b"}', b'{"run_id": 3}'])
def test_bad_headers_are_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "x.journal"
    path.write_bytes(b"wcjrnl1\n" + len(header).to_bytes(4, "little") + header + bytes(60))
    with pytest.raises(DamagedFile):
        read(path)


def test_a_missing_journal_and_a_link_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DamagedFile, match="gone"):
        read(tmp_path / "x.journal")
    write(tmp_path / "real.journal")
    (tmp_path / "link.journal").symlink_to("real.journal")
    with pytest.raises(DamagedFile):
        read(tmp_path / "link.journal")

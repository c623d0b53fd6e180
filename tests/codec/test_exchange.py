"""Words are exchanged only where they are what they should be."""

from __future__ import annotations

import mmap
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy_kernels as oracle
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.shared.base.elements import ByteArray, Words
from weightcast.shared.kernels.constants import Counts
from weightcast.shared.kernels.load import kernels

KERNELS = [oracle, kernels()]
WIDTHS = ["<u1", "<u2", "<u4"]


class Case:
    """Words at any alignment, 5000 changes of them: some neighbours, some far apart."""

    def __init__(self, width: str, shift: int = 0) -> None:
        draw = np.random.default_rng(7)
        size = 80_000
        data = bytearray(draw.bytes(4 * size + shift))
        self.words = np.frombuffer(data, width, offset=shift, count=size)
        distances = draw.choice(
            [1, 2, 5, 254, 255, 256, 700], 5_000, p=[0.4, 0.3, 0.26, 0.01, 0.01, 0.01, 0.01]
        )
        self.index = (np.cumsum(distances) + 3).astype(np.int64)
        self.before = self.words[self.index].copy()
        self.after = self.before ^ np.array(1, width)

    def exchange(self, room: ModuleType, *, again: bool = False, back: bool = False) -> int | None:
        pair = (self.after, self.before) if back else (self.before, self.after)
        failed: int | None = room.exchange_at(self.words, self.index, *pair, again=again)
        return failed if failed is None else int(self.index[failed])


@pytest.mark.parametrize("room", KERNELS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_writes_there_and_back(room: ModuleType, width: str, shift: int) -> None:
    case = Case(width, shift)
    original, expected = case.words.copy(), case.words.copy()
    expected[case.index] = case.after
    assert case.exchange(room) is None
    assert np.array_equal(case.words, expected)
    assert case.exchange(room, back=True) is None
    assert np.array_equal(case.words, original)


@pytest.mark.parametrize("room", KERNELS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("place", [0, 511, 512, 1023, 4_999])
def test_an_unexpected_word_is_named(room: ModuleType, width: str, place: int) -> None:
    case = Case(width)
    word = case.index[place]
    case.words[word] ^= 2
    odd = case.words[word]
    assert case.exchange(room) == word
    assert case.exchange(room, again=True) == word
    assert case.words[word] == odd


@pytest.mark.parametrize("room", KERNELS)
def test_again_takes_what_is_written_already(room: ModuleType) -> None:
    case = Case("<u2")
    case.words[case.index[:3_000]] = case.after[:3_000]
    assert case.exchange(room) == case.index[0]
    assert case.exchange(room, again=True) is None
    assert np.array_equal(case.words[case.index], case.after)


def _last_word_gone(record: ByteArray, home: Counts) -> None:
    home[0, 1] -= 1


def _stands_still(record: ByteArray, home: Counts) -> None:
    record[39] = 0


def _does_not_start_at_its_first(record: ByteArray, home: Counts) -> None:
    record[32] = 1


def _an_escape_more_than_said(record: ByteArray, home: Counts) -> None:
    record[40] = 255


def _an_escape_less_than_said(record: ByteArray, home: Counts) -> None:
    record[int(np.flatnonzero(record[32:] == 255)[0]) + 32] = 3


def _escape_without_need(record: ByteArray, home: Counts) -> None:
    record[32 + 5_000 : 32 + 5_004] = 254, 0, 0, 0


@pytest.mark.parametrize(
    "damage",
    [
        _last_word_gone,
        _stands_still,
        _does_not_start_at_its_first,
        _an_escape_more_than_said,
        _an_escape_less_than_said,
        _escape_without_need,
    ],
)
def test_damaged_places_are_refused(damage: Callable[[ByteArray, Counts], None]) -> None:
    """Also under a good checksum."""
    case = Case("<u2")
    heads, bounds = np.array([[0, case.index[0]]]), np.array([0, 5_000])
    record = kernels().pack_lists(heads, case.index.astype(np.uint32), bounds, case.before, case.after)
    home = np.array([[0, case.index[-1] + 1]])
    rows = kernels().read_lists(record, 1, home * 0 + [[2, 80_000_000]])
    assert np.array_equal(kernels().unpack_lists(record, rows, home, case.words.dtype)[0], case.index)
    damage(record, home)
    sums = (xxhash.xxh3_64_intdigest(each) for each in (record[32:].tobytes(), record[:24].tobytes()))
    record[24:32] = np.frombuffer((next(sums) ^ next(sums)).to_bytes(8, "little"), np.uint8)
    with pytest.raises(ValueError, match="out of order"):
        kernels().unpack_lists(record, rows, home, case.words.dtype)


class Masked:
    """Under masks: from nothing to all of 64 neighbours, and less than 64 at the end."""

    def __init__(self, width: str, shift: int = 0, size: int = 7_003) -> None:
        draw = np.random.default_rng(11)
        data = bytearray(draw.bytes(4 * (size + 99) + shift))
        self.words = np.frombuffer(data, width, offset=shift, count=size + 99)
        self.first, self.length = 21, size
        density = np.repeat(draw.choice([0.0, 0.1, 0.6, 1.0], size // 64 + 1), 64)[:size]
        self.index = np.flatnonzero(draw.random(size) < density).astype(np.uint32)
        self.masks = oracle.masks_of(self.index, (size + 63) // 64 * 64)
        self.places = self.index.astype(np.int64) + self.first
        self.before = self.words[self.places].copy()
        self.after = self.before ^ np.array(1, width)

    def exchange(self, room: ModuleType, *, again: bool = False, back: bool = False) -> int | None:
        pair = (self.after, self.before) if back else (self.before, self.after)
        failed: int | None = room.exchange_masked(
            self.words, self.first, self.length, self.masks, *pair, again=again
        )
        return failed


@pytest.mark.parametrize("room", KERNELS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("shift", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 64, 70, 6_976, 7_003])
def test_masked_there_and_back(room: ModuleType, width: str, shift: int, size: int) -> None:
    case = Masked(width, shift, size)
    original, expected = case.words.copy(), case.words.copy()
    expected[case.places] = case.after
    assert case.exchange(room) is None
    assert np.array_equal(case.words, expected)
    assert case.exchange(room, back=True) is None
    assert np.array_equal(case.words, original)


@pytest.mark.parametrize("room", KERNELS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("place", [0, 63, 64, 700, -1])
def test_an_unexpected_word_under_a_mask_is_named(room: ModuleType, width: str, place: int) -> None:
    case = Masked(width)
    word = case.places[place]
    case.words[word] ^= 2
    odd, behind = case.words[word], case.words[word + 1 :].copy()
    assert case.exchange(room) == word
    assert case.exchange(room, again=True) == word
    assert case.words[word] == odd and np.array_equal(case.words[word + 1 :], behind)


@pytest.mark.parametrize("room", KERNELS)
def test_again_takes_what_is_written_already_under_a_mask(room: ModuleType) -> None:
    case = Masked("<u2")
    case.words[case.places[:1_500]] = case.after[:1_500]
    assert case.exchange(room) == case.places[0]
    assert case.exchange(room, again=True) is None
    assert np.array_equal(case.words[case.places], case.after)


@pytest.mark.parametrize("room", KERNELS)
def test_a_stretch_under_a_mask_is_made_ready_before_it_is_written(room: ModuleType) -> None:
    case, begun = Masked("<u2"), []
    original = case.words.copy()

    def begin(stretch: Words, changes: int) -> None:
        assert np.array_equal(case.words, original)
        begun.append((stretch.ctypes.data - case.words.ctypes.data, len(stretch), changes))

    pair = case.before, case.after
    room.exchange_masked(case.words, case.first, case.length, case.masks, *pair, again=False, begin=begin)
    assert begun == [(2 * case.first, case.length, len(case.after))]


@pytest.mark.parametrize("room", KERNELS)
def test_pages_without_changes_are_not_written(room: ModuleType, tmp_path: Path) -> None:
    case = Masked("<u2")
    path = tmp_path / "words"
    path.write_bytes(bytes(64 * mmap.PAGESIZE))
    with path.open("rb") as file:
        case.words = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), "<u2")
    case.first, case.length = 0, len(case.words)
    case.masks = np.zeros(case.length // 64, np.uint64)
    case.masks[[0, -2, -1]] = ~np.uint64(0)
    case.before, case.after = np.zeros(192, "<u2"), np.ones(192, "<u2")
    assert case.exchange(room) is None
    assert np.flatnonzero(case.words).tolist() == [*range(64), *range(case.length - 128, case.length)]
    assert written_bytes(path) == 2 * mmap.PAGESIZE


def test_nothing_behind_an_end_is_touched() -> None:
    child = Path(__file__).with_name("guarded_child.py")
    done = subprocess.run([sys.executable, child], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def written_bytes(path: Path) -> int:
    """Of this process's private mapping of a file."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.endswith(str(path)):
            (held,) = (int(rest.split()[1]) for rest in islice(lines, 20) if rest.startswith("Anonymous:"))
            return 1024 * held
    raise AssertionError("no such mapping")


@pytest.mark.parametrize("room", KERNELS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("entry", ["listed", "masked"])
@pytest.mark.parametrize("size", [40, 3_000])
def test_what_does_not_stay_written_is_told(room: ModuleType, width: str, entry: str, size: int) -> None:
    """The words to be written lie in the same memory, one further: they are others once all are written."""
    memory = (np.arange(size + 1) % 250).astype(width)
    words, after, before = memory[:size], memory[1:], memory[:size].copy()
    if entry == "masked":
        masks = oracle.masks_of(np.arange(size, dtype=np.uint32), -(-size // 64) * 64)
        failed = room.exchange_masked(words, 0, size, masks, before, after, again=False)
    else:
        failed = room.exchange_at(words, np.arange(size), before, after, again=False)
    assert failed == 0


def _more_bits(case: Masked) -> None:
    case.masks[3] ^= np.uint64(1 << 9)


def _bits_behind_the_end(case: Masked) -> None:
    case.masks[-1] |= np.uint64(1 << 63)
    case.masks[0] = 0
    case.before = case.before[: int(np.bitwise_count(case.masks).sum())]
    case.after = case.after[: len(case.before)]


def _a_mask_too_few(case: Masked) -> None:
    case.masks = case.masks[:-1]


@pytest.mark.parametrize("room", KERNELS)
@pytest.mark.parametrize("damage", [_more_bits, _bits_behind_the_end, _a_mask_too_few])
def test_damaged_masks_are_refused_before_a_word_is_written(
    room: ModuleType, damage: Callable[[Masked], None]
) -> None:
    case = Masked("<u2")
    damage(case)
    original = case.words.copy()
    with pytest.raises(ValueError, match="out of order"):
        case.exchange(room)
    assert np.array_equal(case.words, original)


@settings(deadline=None)
@given(st.sets(st.integers(0, 639), min_size=1))
def test_masks_say_what_lists_say(places: set[int]) -> None:
    index = np.array(sorted(places), np.uint32)
    found = [room.masks_of(index, 640) for room in KERNELS]
    assert np.array_equal(found[0], found[1])
    assert oracle.places_under(found[0]).tolist() == index.tolist()


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 600), min_size=1, max_size=40), min_size=1, max_size=5))
def test_kernels_pack_the_same(records: list[list[int]]) -> None:
    index = np.cumsum([gap for record in records for gap in record]).astype(np.uint32)
    bounds = np.cumsum([0, *map(len, records)])
    heads = np.array([(n, int(index[start])) for n, start in enumerate(bounds[:-1])], np.int64)
    old, new = np.random.default_rng(3).integers(0, 1 << 16, (2, len(index)), np.uint16)
    packed = [room.pack_lists(heads, index, bounds, old, new) for room in KERNELS]
    assert packed[0].tobytes() == packed[1].tobytes()
    forms = np.array([[2, 1 << 30]] * len(records))
    rows = kernels().read_lists(packed[0], len(records) + 1, forms)
    assert rows[:, :2].tolist() == heads.tolist() and rows[:, 2].tolist() == np.diff(bounds).tolist()
    homes = np.stack([np.zeros(len(rows), np.int64), forms[:, 1]], 1)
    found = kernels().unpack_lists(packed[0], rows, homes, old.dtype)
    for one, other in zip(found, (index, old, new), strict=True):
        assert np.array_equal(one, other)

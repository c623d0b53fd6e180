"""Shares of changed words at which forms change: from a delta's blob through a journal, there and back."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from weightcast.shared.base.elements import Chunk, TensorSpec, TensorTable, Words, grid, kind_of
from weightcast.shared.checkpoint.update.journal import (
    Direction,
    JournalHeader,
    JournalReader,
    JournalWriter,
    Packed,
    pack_changes,
    pack_whole,
)
from weightcast.shared.codec.changes import changes_of, compare
from weightcast.shared.codec.container import StepEncoding, decode_step, encode_chunk

HEADER = JournalHeader("run-1", "abc", 3, "r3", 7, 4, "r4", "d4")
SHARES = [Fraction(*pair) for pair in ((1, 8), (1, 4), (1, 3), (1, 2), (3, 4), (7, 8), (9, 10), (1, 1))]
SIZES = ([4096], [4099], [8128, 70], [12_300, 1, 63])


def changed_at(chunk: Chunk, count: int, rng: np.random.Generator) -> tuple[Words, Words]:
    """By steps of one, but for a few that reach far, cross the signs or wrap around."""
    inside = np.concatenate([np.arange(span.offset, span.offset + span.words) for span in chunk.spans])
    old, kind = np.zeros(chunk.words, chunk.kind.numpy), chunk.kind
    old[inside] = rng.integers(0, 1 << 8 * kind.width, len(inside), np.uint64).astype(kind.numpy)
    half = 1 << (8 * kind.width - 1)
    ends = np.array([0, 1, half - 1, half, half + 1, 2 * half - 1], np.uint64).astype(kind.numpy)
    old[rng.choice(inside, 200)] = rng.choice(ends, 200)
    new, places = old.copy(), rng.choice(inside, count, replace=False)
    new[places] += rng.choice([1, 2 * half - 1], count).astype(kind.numpy)
    far = places[:: max(1, count // 40)]
    new[far] = rng.choice(ends, len(far))
    new[far] ^= (new[far] == old[far]).astype(kind.numpy)
    return old, new


def packed_step(chunk: Chunk, old: Words, new: Words, encoding: StepEncoding) -> Packed:
    """What a host makes of the chunk's blob."""
    blob = encode_chunk(chunk, old, new, compare(old, new), encoding)
    changes, sums = decode_step(blob, chunk, old)
    assert sums.total() == changes_of(chunk, old, new)[1].total()
    after = old.copy()
    changes.apply(after)
    assert np.array_equal(after, new)
    if changes.all_shown:
        assert changes.whole is not None
        counts = sums.changed.tolist() if len(sums) == len(chunk.spans) else None
        return pack_whole(chunk, old, changes.whole, counts)
    return pack_changes(chunk, changes)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "BF16", "F16", "I16", "F32", "U8"])
@pytest.mark.parametrize("share", SHARES)
def test_at_a_border_and_beside_it(tmp_path: Path, dtype: str, share: Fraction) -> None:
    rng, forms = np.random.default_rng(share.denominator), set()
    for sizes in SIZES:
        width = kind_of(dtype).width
        specs = [TensorSpec(f"t{n}", dtype, (size,), size * width) for n, size in enumerate(sizes)]
        table = TensorTable.of(specs)
        (chunk,) = grid(table, table.whole)
        for count in {min(sum(sizes), int(share * sum(sizes)) + more) for more in (-1, 0, 1)}:
            old, new = changed_at(chunk, count, rng)
            for encoding in ("fast", "small"):
                path = tmp_path / f"{len(forms)}.journal"
                path.unlink(missing_ok=True)
                writer = JournalWriter(path, HEADER)
                writer.write(packed_step(chunk, old, new, encoding))
                writer.close()
                forms |= there_and_back(path, table, chunk, old, new)
    assert forms <= {"listed", "masked", "whole"} and (share < Fraction(1, 3) or forms != {"listed"})


def there_and_back(path: Path, table: TensorTable, chunk: Chunk, old: Words, new: Words) -> set[str]:
    """Also from the midst, and as records tell it. Returns which forms the records have."""
    before, after = (
        {span.tensor: words[span.offset : span.offset + span.words].copy() for span in chunk.spans}
        for words in (old, new)
    )
    words = {tensor: its.copy() for tensor, its in before.items()}
    with JournalReader(path, table) as journal:
        packed = list(journal.packed())
        for way, target, source in ((Direction.FORWARD, after, before), (Direction.BACK, before, after)):
            for one in packed:
                assert journal.compare_and_swap(one, words[one.tensor], way, again=False) is None
            assert all(np.array_equal(words[tensor], target[tensor]) for tensor in words)
            for one in packed:
                midst = len(source[one.tensor]) // 3
                half = np.concatenate([target[one.tensor][:midst], source[one.tensor][midst:]])
                assert journal.compare_and_swap(one, half, way, again=True) is None
                assert np.array_equal(half, target[one.tensor])
        for record in journal.records():
            index = np.flatnonzero(before[record.tensor] != after[record.tensor])
            assert np.array_equal(record.index, index)
            assert np.array_equal(record.old, before[record.tensor][index])
            assert np.array_equal(record.new, after[record.tensor][index])
    return {"whole" if one.whole else "masked" if one.masked else "listed" for one in packed}

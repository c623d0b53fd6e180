"""A journal's words into the mapped files of a local checkpoint, and back: batches of records in threads.

Records of much are exchanged one by one, in compiled code. Short lists that follow each other are exchanged
many at once, with numpy: a model may have several 100,000 small tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from weightcast.shared.codec.parallel import SMALL_RESULTS, ordered
from weightcast.shared.failpoints import failpoint
from weightcast.shared.local.journal import Direction, JournalReader
from weightcast.shared.local.local_checkpoint import LocalCheckpoint
from weightcast.shared.local.records import PackedRecord

_BATCH = 256 << 10
"""bytes of records that a thread takes at once"""
_MANY = 32
"""lists from which they are exchanged at once"""


class UnexpectedWordError(Exception):
    """A word that is none of those that the journal expects."""

    def __init__(self, tensor: int, word: int) -> None:
        self.tensor, self.word = tensor, word


def exchange(
    local: LocalCheckpoint, journal: JournalReader, way: Direction, *, again: bool, threads: int = 1
) -> None:
    """Every record, as `JournalReader.exchange`. Raises UnexpectedWordError once no thread writes any more;
    some words are written then."""

    def work(batch: Sequence[PackedRecord]) -> None:
        for alike in _alike(local, batch):
            if len(alike) < _MANY or not alike[0].listed:
                _one_by_one(local, journal, alike, way, again)
            else:
                _at_once(local, journal, alike, way, again)

    for _ in ordered(work, _batches(journal.packed()), threads, each=SMALL_RESULTS):
        pass


def _batches(records: Iterable[PackedRecord]) -> Iterator[Sequence[PackedRecord]]:
    """Thousands of records may hold a few changes each: a thread takes some at once."""
    batch: list[PackedRecord] = []
    size = 0
    for record in records:
        batch.append(record)
        size += record.size
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _alike(local: LocalCheckpoint, batch: Sequence[PackedRecord]) -> Sequence[Sequence[PackedRecord]]:
    """Records that may be exchanged at once: lists of words of one file and dtype."""
    if len(batch) < _MANY:
        return [batch]
    found: dict[tuple[bool, int], list[PackedRecord]] = {}
    for record in batch:
        found.setdefault((record.listed, id(local.home(record.tensor)[0])), []).append(record)
    return list(found.values())


def _one_by_one(
    local: LocalCheckpoint,
    journal: JournalReader,
    records: Sequence[PackedRecord],
    way: Direction,
    again: bool,
) -> None:
    for record in records:
        words = local.words(record.tensor)
        failed = journal.exchange(record, words, way, again=again, begin=local.begin_writing)
        if failed is not None:
            raise UnexpectedWordError(record.tensor, failed)
        failpoint("patch.record", local.directory)


def _at_once(
    local: LocalCheckpoint, journal: JournalReader, lists: Sequence[PackedRecord], way: Direction, again: bool
) -> None:
    words, _ = local.home(lists[0].tensor)
    places = [(local.home(one.tensor)[1], local.table.forms[one.tensor][1]) for one in lists]
    failed = journal.exchange_many(lists, words, places, way, again=again, begin=local.begin_writing)
    if failed is not None:
        raise UnexpectedWordError(failed[0].tensor, failed[1])
    failpoint("patch.record", local.directory)

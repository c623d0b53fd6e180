"""The publisher's local checkpoint as it was at an older version: its words, with kept journals undone.

The publisher goes on meanwhile: it waits for one copy of a piece at most, and what it changed since is undone
with the rest.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from weightcast.publisher.care.history import History, Kept
from weightcast.shared.channel.base import Base
from weightcast.shared.errors import DamagedFile, RetryLater
from weightcast.shared.files.entries import exists
from weightcast.shared.local.journal import JournalReader
from weightcast.shared.local.local_checkpoint import LocalCheckpoint, LocalPaths, WordsIn
from weightcast.shared.local.records import PackedRecord, Record
from weightcast.shared.local.state import Phase, Position, read_state
from weightcast.shared.words import Chunk, TensorTable, Words


class Past:
    """Words at any version that kept journals lead back to. For one thread, beside the owner's."""

    def __init__(self, directory: Path, check: Callable[[], None] = lambda: None) -> None:
        """`check` is called between pieces and may raise to give up. Raises RetryLater when nothing lies in
        `directory` now that could be read."""
        self._check = check
        self._history = History(LocalPaths(directory))
        found = LocalCheckpoint.open(directory)
        if found is None:
            raise RetryLater(f"{directory} is not seeded", remedy="it is tried again after a publication")
        self._local = found
        self._seen: tuple[int, int] | None = None
        self._kept: Mapping[int, Kept] = {}
        self._undos: dict[int, _Undo] = {}
        try:
            with self._local.standing_still():
                self._refresh()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for undo in self._undos.values():
            undo.close()
        self._undos.clear()
        self._local.close()

    def __enter__(self) -> Past:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def table(self) -> TensorTable:
        return self._local.table

    @property
    def base(self) -> Base:
        return self._local.base

    @property
    def run_id(self) -> str:
        return self._local.state.run_id

    @property
    def files_beside(self) -> Mapping[str, Path]:
        return self._local.files_beside

    @property
    def here(self) -> Position:
        """Where the local checkpoint stood when it was last looked at."""
        return self._local.state.position

    def positions(self) -> dict[int, Position]:
        """Every version whose words can be given."""
        steps = [kept.step for kept in self._kept.values()]
        return {p.version: p for p in (self.here, *(step.base for step in steps))}

    def _refresh(self) -> None:
        """Called while the checkpoint stands still."""
        found = self._local.paths.state.stat()
        seen = found.st_ino, found.st_mtime_ns
        if seen == self._seen:
            return
        known = read_state(self._local.paths.state)
        if known is None or known.phase is not Phase.CLEAN:
            raise RetryLater(f"{self._local.directory} is not settled", remedy="it is tried again")
        self._local.check_files()
        self._local.state = known
        self._kept = self._history.back_from(known.position)
        self._seen = seen

    def words_at(self, version: int) -> WordsIn:
        """Copies of words as they were at `version`."""

        def words_in(tensor: int, start: int, stop: int) -> Words:
            self._check()
            with self._local.standing_still():
                self._refresh()
                words, at = self._local.words_in(tensor, start, stop).copy(), self.here.version
            self._undo(tensor, start, words, at, version)
            return words

        return words_in

    def chunk_at(self, chunk: Chunk, version: int) -> Words:
        """A copy of the chunk's words as they were at `version`, with its zero padding."""
        self._check()
        with self._local.standing_still():
            self._refresh()
            words, at = self._local.chunk_words(chunk).copy(), self.here.version
        self.undo_chunk(chunk, words, at, version)
        return words

    def undo_chunk(self, chunk: Chunk, words: Words, version: int, older: int) -> None:
        """Takes the chunk's words from `version` back to an older one, in place."""
        for span in chunk.spans:
            piece = words[span.offset : span.offset + span.words]
            self._undo(span.tensor, span.start, piece, version, older)

    def touches(self, chunk: Chunk, version: int, older: int) -> bool:
        """False only when no word of the chunk changed between the two."""
        undos = [self._opened(number) for number in range(older + 1, version + 1)]
        return any(undo.touches(s.tensor, s.start, s.stop) for undo in undos for s in chunk.spans)

    def _undo(self, tensor: int, start: int, words: Words, version: int, older: int) -> None:
        for number in range(version, older, -1):
            self._opened(number).undo(tensor, start, words)

    def _opened(self, number: int) -> _Undo:
        if number not in self._undos:
            kept = self._kept.get(number)
            if kept is None:
                raise _dropped(number)
            try:
                self._undos[number] = _Undo(kept, self.table)
            except DamagedFile as error:
                if exists(kept.path):
                    raise
                raise _dropped(number) from error
        return self._undos[number]


def _dropped(number: int) -> RetryLater:
    return RetryLater(f"the journal of version {number} is no longer kept")


class _Undo:
    """One kept journal; its records are found by tensor and word."""

    def __init__(self, kept: Kept, table: TensorTable) -> None:
        self._journal = JournalReader(kept.path, table)
        try:
            header, step = self._journal.header, kept.step
            if (header.journal, header.target_root) != (step.journal, step.target.root):
                raise DamagedFile(f"{kept.path}: the journal of another step")
            self._places: dict[int, list[PackedRecord]] = {}
            for place in self._journal.packed():
                self._places.setdefault(place.tensor, []).append(place)
            for places in self._places.values():
                places.sort(key=lambda place: place.first)
        except BaseException:
            self.close()
            raise
        self._last: tuple[PackedRecord, Record] | None = None

    def close(self) -> None:
        self._journal.close()

    def _between(self, tensor: int, start: int, stop: int) -> Iterator[PackedRecord]:
        """Places of records that may have words in [start, stop): each ends before the next begins."""
        places = self._places.get(tensor, [])
        first = max(0, bisect.bisect_right(places, start, key=lambda place: place.first) - 1)
        for place in places[first:]:
            if place.first >= stop:
                return
            yield place

    def touches(self, tensor: int, start: int, stop: int) -> bool:
        return any(True for _ in self._between(tensor, start, stop))

    def undo(self, tensor: int, start: int, words: Words) -> None:
        for place in self._between(tensor, start, start + len(words)):
            record = self._record(place)
            low, high = np.searchsorted(record.index, [start, start + len(words)]).tolist()
            index = record.index[low:high] - np.uint64(start)
            if not np.array_equal(words[index], record.new[low:high]):
                raise DamagedFile(f"{self._journal.path}: not the words that lie here")
            words[index] = record.old[low:high]

    def _record(self, place: PackedRecord) -> Record:
        if self._last is None or self._last[0] != place:
            self._last = place, self._journal.at(place)
        return self._last[1]

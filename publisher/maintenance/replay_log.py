"""Journals of the last steps, kept in the publisher's local checkpoint: with them its bytes can be read as
they were some versions ago.

`.weightcast/history/<version>.journal` and `<version>.json`, the step it belongs to; `<version>.index` and
`.sig`, copies of what was committed. They are a cache: what is damaged or does not continue what lies here is
dropped, and nothing depends on them but the work they save.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from blake3 import blake3

from weightcast.shared.base.elements import Chunk, TensorTable, Words
from weightcast.shared.base.errors import DamagedFile, RetryLater, WeightcastError, on_error
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.channel.index import INDEX_LIMIT
from weightcast.shared.channel.layout import digits, index_key
from weightcast.shared.channel.signing import SIGNATURE_LIMIT, signature_key
from weightcast.shared.channel.store import Store, read_if_there
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, LocalPaths, WordsIn
from weightcast.shared.checkpoint.state.state import Phase, Position, Step, parse_step, read_state, step_json
from weightcast.shared.checkpoint.update.buffer_reuse import keep_journal
from weightcast.shared.checkpoint.update.journal import JournalReader, PackedRecord, Record
from weightcast.shared.files.durable import read_file
from weightcast.shared.files.paths import exists, matching
from weightcast.shared.files.strict_json import parse_object

_STEP_LIMIT = 256 << 20


_ENDINGS = ("json", "journal", "index", "sig")
"""of a version's files; the first one goes first: without its step nothing of it counts"""


class KeptJournals:
    def __init__(self, paths: LocalPaths) -> None:
        self.paths = paths
        self._directory = paths.room / "history"

    def keep(self, step: Step, channel: Store) -> None:
        """Gives the step's journal a second name, and copies its index. Where that cannot be done nothing is
        kept."""
        number = step.target.version
        with contextlib.suppress(WeightcastError, OSError):
            self._directory.mkdir(exist_ok=True)
            self.drop(number)
            with on_error(partial(self.drop, number)):
                self._keep(number, step, channel)

    def _keep(self, number: int, step: Step, channel: Store) -> None:
        os.link(self.paths.journal(step.journal), self.journal(number))
        failpoint("history.linked", self._directory)
        self._file(number, "json").write_text(json.dumps(step_json(step)))
        signature = read_if_there(channel, signature_key(index_key(number)), SIGNATURE_LIMIT)
        if signature is not None:
            self._file(number, "sig").write_bytes(signature)
        self._file(number, "index").write_bytes(channel.read(index_key(number), INDEX_LIMIT))
        failpoint("history.kept", self._directory)

    def index(self, position: Position) -> bytes | None:
        """The exact bytes of a version's index, if they are kept."""
        with contextlib.suppress(WeightcastError, OSError):
            data = read_file(self._file(position.version, "index"), INDEX_LIMIT)
            return data if blake3(data).hexdigest() == position.digest else None
        return None

    def signature(self, version: int) -> bytes | None:
        with contextlib.suppress(WeightcastError, OSError):
            return read_file(self._file(version, "sig"), SIGNATURE_LIMIT)
        return None

    def journal(self, version: int) -> Path:
        return self._file(version, "journal")

    def _file(self, version: int, ending: str) -> Path:
        return self._directory / f"{digits(version)}.{ending}"

    def drop(self, version: int) -> None:
        for ending in _ENDINGS:
            self._file(version, ending).unlink(missing_ok=True)

    def clear(self) -> None:
        for version in self._versions("*"):
            self.drop(version)

    def trim(self, most_steps: int, most_bytes: int) -> None:
        """Drops the oldest beyond either bound, and what a kill left without its step. The journal of one of
        them is written over by the next."""
        complete, left = self._versions("*.json"), most_bytes
        for version in self._versions("*") - complete:
            self.drop(version)
        for count, version in enumerate(sorted(complete, reverse=True)):
            with contextlib.suppress(FileNotFoundError):
                left -= self.journal(version).stat().st_size
                left -= self._file(version, "index").stat().st_size
            if count >= most_steps or left < 0:
                self._file(version, "json").unlink(missing_ok=True)
                keep_journal(self.paths, self.journal(version))
                self.drop(version)

    def drop_oldest(self, most: int | None) -> bool:
        """The oldest step, if it led to no later version than `most`. False when none is dropped."""
        oldest = min(self._versions("*"), default=None)
        if oldest is None or (most is not None and oldest > most):
            return False
        self.drop(oldest)
        return True

    def _versions(self, pattern: str) -> set[int]:
        return {int(path.stem) for path in matching(self._directory, pattern) if path.stem.isdecimal()}

    def back_from(self, position: Position) -> Mapping[int, Step]:
        """The steps that led to `position`, by the version that each led to, without a gap."""
        found: dict[int, Step] = {}
        at = position
        while (step := self._read(at.version)) is not None and _same(step.target, at):
            found[at.version] = step
            at = step.base
        return found

    def _read(self, version: int) -> Step | None:
        path = self.journal(version)
        try:
            data = parse_object(read_file(self._file(version, "json"), _STEP_LIMIT), str(path))
            return parse_step(data) if exists(path) else None
        except (WeightcastError, OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


def _same(one: Position, other: Position) -> bool:
    return (one.version, one.digest, one.root) == (other.version, other.digest, other.root)


class ReplayLog:
    """Words at any version that kept journals lead back to. For one thread, beside the owner's."""

    def __init__(self, directory: Path, check: Callable[[], None] = lambda: None) -> None:
        """`check` is called between pieces and may raise to give up. Raises RetryLater when nothing lies in
        `directory` now that could be read."""
        self._check = check
        self.journals = KeptJournals(LocalPaths(directory))
        found = LocalCheckpoint.open(directory)
        if found is None:
            raise RetryLater(
                f"{directory} is not seeded", remedy="nothing to do: tried again after the next publication"
            )
        self.local = found
        self.table: TensorTable = found.table
        self._seen: tuple[int, int] | None = None
        self._kept: Mapping[int, Step] = {}
        self._undos: dict[int, _Undo] = {}
        with on_error(self.close), self.local.reading():
            self._refresh()

    def close(self) -> None:
        for undo in self._undos.values():
            undo.close()
        self._undos.clear()
        self.local.close()

    def __enter__(self) -> ReplayLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def positions(self) -> dict[int, Position]:
        """Every version whose words can be given, as the local checkpoint was when it was last looked at."""
        bases = (step.base for step in self._kept.values())
        return {position.version: position for position in (self.local.state.position, *bases)}

    def _refresh(self) -> None:
        """Called while the checkpoint stands still."""
        found = self.local.paths.state.stat()
        seen = found.st_ino, found.st_mtime_ns
        if seen == self._seen:
            return
        known = read_state(self.local.paths.state)
        if known is None or known.phase is not Phase.CLEAN:
            raise RetryLater(
                f"{self.local.directory} is being updated", remedy="nothing to do: tried again soon"
            )
        self.local.check_files()
        self.local.state = known
        self._kept = self.journals.back_from(known.position)
        self._seen = seen

    def words_at(self, version: int) -> WordsIn:
        """Copies of words as they were at `version`."""

        def words_in(tensor: int, start: int, stop: int) -> Words:
            words, at = self._now(lambda: self.local.words_in(tensor, start, stop))
            self._undo(tensor, start, words, at, version)
            return words

        return words_in

    def step(self, chunk: Chunk, version: int, older: int) -> tuple[Words, Words]:
        """Copies of the chunk's words as they were at the older version and at `version`, with its zero
        padding."""
        new, at = self._now(lambda: self.local.chunk_words(chunk))
        self._undo_chunk(chunk, new, at, version)
        old = new.copy()
        self._undo_chunk(chunk, old, version, older)
        return old, new

    def _now(self, read: Callable[[], Words]) -> tuple[Words, int]:
        """A copy of the words, and at which version they are."""
        self._check()
        with self.local.reading():
            self._refresh()
            return read().copy(), self.local.state.position.version

    def _undo_chunk(self, chunk: Chunk, words: Words, version: int, older: int) -> None:
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
            step, path = self._kept.get(number), self.journals.journal(number)
            if step is None:
                raise _dropped(number)
            try:
                self._undos[number] = _Undo(path, step, self.table)
            except DamagedFile as error:
                if exists(path):
                    raise
                raise _dropped(number) from error
        return self._undos[number]


def _dropped(number: int) -> RetryLater:
    return RetryLater(f"the journal of version {number} is no longer kept")


class _Undo:
    """The kept journal of a step; its records are found by tensor and word."""

    def __init__(self, path: Path, step: Step, table: TensorTable) -> None:
        self._journal = JournalReader(path, table)
        with on_error(self.close):
            header = self._journal.header
            if (header.journal, header.target_root) != (step.journal, step.target.root):
                raise DamagedFile(f"{path}: the journal of another step")
            self._places: dict[int, list[PackedRecord]] = {}
            for place in self._journal.packed():
                self._places.setdefault(place.tensor, []).append(place)
            for places in self._places.values():
                places.sort(key=lambda place: place.first)
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
                raise DamagedFile(f"{self._journal.path}: does not match the local checkpoint")
            words[index] = record.old[low:high]

    def _record(self, place: PackedRecord) -> Record:
        if self._last is None or self._last[0] != place:
            self._last = place, self._journal.at(place)
        return self._last[1]

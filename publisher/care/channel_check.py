"""Background check of the channel's files that the publisher can write again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

from weightcast.publisher.care.history import History
from weightcast.shared.channel.chain import check_files
from weightcast.shared.channel.channel_file import read_channel_file
from weightcast.shared.channel.index import INDEX_LIMIT, INDEX_NAME, FileRecord, parse_index
from weightcast.shared.channel.layout import Layout
from weightcast.shared.errors import WeightcastError
from weightcast.shared.files import durable
from weightcast.shared.files.entries import is_directory
from weightcast.shared.local.local_checkpoint import LocalCheckpoint
from weightcast.shared.local.state import Position

_MOST_SECONDS = 10.0
"""of reading at the rate in one turn"""
_ROUND_SECONDS = 30.0
"""from the beginning of one round to the next"""


class ChannelCheck:
    """Compares files of versions with their indexes, newest version first, round after round. Used by the
    publishing thread. `rate`: bytes per second, at most; 0 reads nothing."""

    def __init__(self, rate: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = rate, clock
        self._credit, self._turned = 0.0, clock()
        self._due: deque[tuple[int, FileRecord | None]] = deque()
        """version and file; None: the index itself"""
        self._next_round = 0.0
        self._given_up: set[int] = set()

    def turn(self, layout: Layout, local: LocalCheckpoint) -> int | None:
        """Reads what the rate allows since the last turn. Returns a version with a damaged or lost file."""
        now = self._clock()
        self._credit = min(self._credit + (now - self._turned) * self._rate, _MOST_SECONDS * self._rate)
        self._turned = now
        history = History(local.paths)
        if self._rate and not self._due and now >= self._next_round:
            self._next_round = now + _ROUND_SECONDS
            self._due.extend(self._round(history, local))
        while self._credit > 0 and self._due:
            version, record = self._due.popleft()
            if self._is_damaged(layout, history, local.state.position, version, record):
                self._due.clear()
                return version
        return None

    def give_up(self, version: int) -> None:
        """Its files could not be written again: they are not read again either."""
        self._given_up.add(version)

    def _round(self, history: History, local: LocalCheckpoint) -> Iterator[tuple[int, FileRecord | None]]:
        for version, kept in history.back_from(local.state.position).items():
            data = None if version in self._given_up else history.index(kept.step.target)
            with suppress(WeightcastError):
                if data is not None:
                    yield version, None
                    yield from ((version, record) for record in parse_index(data, local.table).files)

    def _is_damaged(
        self, layout: Layout, history: History, here: Position, version: int, record: FileRecord | None
    ) -> bool:
        """False for what cannot be read now, and for a version that was pruned or is no longer kept."""
        directory = layout.version_dir(version)
        if record is not None and is_directory(directory):
            self._credit -= record.size
            return any(not flaw.unread for flaw in check_files(directory, [record]))
        if record is not None:
            return False  # told of the index already
        try:
            data = durable.read_file(directory / INDEX_NAME, INDEX_LIMIT)
        except FileNotFoundError:
            return version >= _horizon(layout)
        except (WeightcastError, OSError):
            return False
        kept = history.back_from(here).get(version)
        self._credit -= len(data)
        return kept is not None and data != history.index(kept.step.target)


def _horizon(layout: Layout) -> int:
    """The oldest version that was not pruned."""
    return read_channel_file(layout.channel_json).horizon

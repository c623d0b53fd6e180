"""Background check of the channel's files that the publisher can write again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from weightcast.publisher.care.history import History
from weightcast.shared.channel.chain import check_files
from weightcast.shared.channel.channel_file import read_channel_file
from weightcast.shared.channel.index import INDEX_LIMIT, INDEX_NAME, parse_index
from weightcast.shared.channel.layout import Layout
from weightcast.shared.errors import WeightcastError
from weightcast.shared.files import durable
from weightcast.shared.files.entries import is_directory
from weightcast.shared.local.local_checkpoint import LocalCheckpoint
from weightcast.shared.local.scrub import Credit
from weightcast.shared.service.due import Due

_ROUND_SECONDS = 30.0
"""from the beginning of one round to the next, at least"""


class ChannelCheck:
    """Compares files of versions with their indexes, newest version first, round after round. Used by the
    publishing thread. `rate`: bytes per second, at most; 0 reads nothing."""

    def __init__(self, rate: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._credit, self._round_due = Credit(rate, clock), Due(_ROUND_SECONDS, clock)
        self._round: Iterator[int | None] | None = None
        self._given_up: set[int] = set()

    def turn(self, layout: Layout, local: LocalCheckpoint) -> int | None:
        """Reads what the rate allows since the last turn. Returns a version with a damaged or lost file."""
        self._credit.earn()
        if self._round is None and self._credit.left > 0 and self._round_due.take():
            self._round = self._files(layout, local)
        while self._round is not None and self._credit.left > 0:
            try:
                damaged = next(self._round)
            except StopIteration:
                damaged, self._round = None, None
            if damaged is not None:
                self._round = None
                return damaged
        return None

    def give_up(self, version: int) -> None:
        """Its files could not be written again: they are not read again either."""
        self._given_up.add(version)

    def _files(self, layout: Layout, local: LocalCheckpoint) -> Iterator[int | None]:
        """After each file that was read: its version where the file is damaged or lost, else None."""
        history = History(local.paths)
        for version, kept in history.back_from(local.state.position).items():
            data = None if version in self._given_up else history.index(kept.step.target)
            if data is None:
                continue
            directory = layout.version_dir(version)
            yield version if self._has_other_index(layout, version, data) else None
            with suppress(WeightcastError):
                for record in parse_index(data, local.table).all_files:
                    if not is_directory(directory):
                        break  # pruned meanwhile
                    self._credit.left -= record.size
                    flaws = check_files(directory, [record])
                    yield version if any(not flaw.unread for flaw in flaws) else None

    def _has_other_index(self, layout: Layout, version: int, expected: bytes) -> bool:
        """False for an index that cannot be read now, and for a version that was pruned."""
        self._credit.left -= len(expected)
        try:
            return durable.read_file(layout.version_dir(version) / INDEX_NAME, INDEX_LIMIT) != expected
        except FileNotFoundError:
            return version >= read_channel_file(layout.channel_json).horizon
        except (WeightcastError, OSError):
            return False

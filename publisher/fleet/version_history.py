"""What the versions of a channel are, for people who look: every index is read once, newest first, at a pace
that leaves the cores to publishing. For one thread."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from weightcast.publisher.maintenance.prune import held_versions
from weightcast.publisher.maintenance.retention import HeldVersion
from weightcast.shared.base.errors import WeightcastError
from weightcast.shared.channel import pins
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.index import Index, VersionTotals
from weightcast.shared.channel.layout import Pointer
from weightcast.shared.channel.store import Store

ROWS_LIMIT = 1000
"""versions whose indexes are read"""
_SHARE, _AT_ONCE_SECONDS = 10, 0.2
"""after reading for so long, as many times as long without"""
_LOOK_SECONDS = 10.0
_LOOK_SHARE = 20
_NEWEST = 16
"""versions that are looked at again also while nobody watches: anchors are added to them later"""
_MORE = 64
"""versions beyond twice those that lay there, with which all directories are looked at: nobody may watch for
months, and what was pruned is to be forgotten"""


@dataclass(frozen=True)
class VersionFacts:
    """What a version's index says; `created`: unix time on the publisher's clock."""

    step: int | None
    created: float
    totals: VersionTotals


@dataclass(frozen=True)
class History:
    """`versions`: all that lie there; `facts`: of those whose indexes were read; `complete`: no more of them
    will be."""

    pointer: int = 0
    versions: Mapping[int, HeldVersion] = field(default_factory=dict)
    facts: Mapping[int, VersionFacts] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()
    tags: Mapping[str, int] = field(default_factory=dict)
    complete: bool = False


class VersionHistory:
    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._channel: Channel | None = None
        self._held: dict[int, HeldVersion] = {}
        self._facts: dict[int, VersionFacts] = {}
        self._pointer = self._lay_there = 0
        self._looked_until = self._newest_until = self._read_until = -1.0
        """when the next look at all directories, that at the newest, and the reading of indexes may begin"""

    def read(self, *, look_around: bool) -> History:
        """`look_around`: at all versions that were there before, not only at the newest, for what was added
        to them, and pruned. Raises WeightcastError and OSError where the channel cannot be read now."""
        if self._channel is None or self._channel.foreign:
            self._channel = Channel.open(self._store)
        pointer = self._channel.pointer()
        if pointer is None or self._channel.foreign:
            return History(complete=True)
        self._look(self._channel, pointer, look_around)
        self._read_indexes(self._channel, pointer)
        wanted = sorted(self._held, reverse=True)[:ROWS_LIMIT]
        return History(
            pointer.version,
            dict(self._held),
            dict(self._facts),
            frozenset(pins.kept(self._store)),
            pins.tags(self._store),
            all(version in self._facts for version in wanted),
        )

    def _look(self, channel: Channel, pointer: Pointer, look_around: bool) -> None:
        began = self._clock()
        many = len(self._held) > 2 * self._lay_there + _MORE
        asked = look_around and began >= self._looked_until
        all_of_them = many or asked or pointer.version < self._pointer
        again = _NEWEST if began >= self._newest_until else 0
        above = 0 if all_of_them else max(0, self._pointer - again)
        if above == pointer.version:
            return
        found = held_versions(channel, pointer, above)
        if above:
            self._held = {version: held for version, held in self._held.items() if version <= above} | found
        else:
            self._held, self._lay_there = found, len(found)
        self._facts = {version: facts for version, facts in self._facts.items() if version in self._held}
        self._pointer = pointer.version
        now = self._clock()
        due = now + max(_LOOK_SECONDS, _LOOK_SHARE * (now - began))
        if all_of_them:
            self._looked_until = due
        if all_of_them or again:
            self._newest_until = due

    def _read_indexes(self, channel: Channel, pointer: Pointer) -> None:
        for version in sorted(self._held, reverse=True)[:ROWS_LIMIT]:
            began = self._clock()
            if version in self._facts:
                continue
            if self._read_until - began > _SHARE * _AT_ONCE_SECONDS and version != pointer.version:
                return
            index = None
            # what cannot be read or was removed is found out by the next scan of all directories
            with contextlib.suppress(WeightcastError, OSError):
                index = channel.index(pointer, version, channel.require_ours()[1].table)
            if not isinstance(index, Index):
                continue
            self._facts[version] = VersionFacts(index.step, index.created, index.totals)
            now = self._clock()
            self._read_until = max(self._read_until, began) + _SHARE * (now - began)

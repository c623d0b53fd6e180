"""The publisher of a process that serves a run for long, or by commands: the daemon and `weightcast
publish`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import SupportsIndex

from weightcast.publisher.api import Publisher
from weightcast.publisher.maintenance.orders import root_of
from weightcast.publisher.maintenance.repair import ChannelCheck, Repairs, remake
from weightcast.publisher.publish.commit import is_carried
from weightcast.publisher.publish.publish_job import (
    Phases,
    PublishJob,
    Watching,
    WeightSource,
    has_root,
    matched_input,
)
from weightcast.publisher.publish.report import PublishReport
from weightcast.publisher.ranks.rendezvous import Rank
from weightcast.publisher.weights.tensors import NewWeights
from weightcast.shared.base.errors import DamagedFile, NeedsReseed, Untrusted, WeightcastError
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.index import Index
from weightcast.shared.channel.pins import Rollback
from weightcast.shared.checkpoint.verify.hashing import Scrub


class ServicePublisher(Publisher):
    """A Publisher whose upkeep, orders and recovery its owner drives."""

    _upkeep_in_background = False

    def check_owner(self) -> None:
        """Raises Refused, naming the newer owner, when another publisher has the channel now."""
        if self._claim is not None:
            self._claim.check()

    def obey_orders(self) -> Rollback | None:
        """Carries out a rollback that was ordered. Returns the order that holds publishing, if one does. The
        pointer is put where this publisher last had it, should another one have put it back."""
        self._drained()
        return self._obey_orders()

    def obey_repair(self) -> Repairs | None:
        """Repairs the channel if an operator ordered it (`weightcast channel repair`, `POST /v1/repair`)."""
        self._drained()
        return self._obey_repair()

    def verify_some(self, scrub: Scrub) -> None:
        """Reads a little of the local checkpoint; what is wrong there is repaired at once."""
        self._drained()
        local = self._updater.local
        if self._owner is None or local is None:
            return
        try:
            scrub.turn(local)
        except NeedsReseed as error:
            self._updater.mark_damaged(error)
            self.recover()
        except OSError:
            # which of two states lies on disk is not known
            self._updater.release()
            raise

    def check_channel(self, check: ChannelCheck) -> Repairs | None:
        """Reads some of the channel's files; those of a damaged version are written again at once."""
        self._drained()
        local = self._updater.local
        version = None if self._claim is None or local is None else check.turn(self.store, local)
        if version is None or self._claim is None:
            return None
        there = range(version, version + 1)
        found = remake(self._claim, self._updater.paths.directory, there, only=version)
        if not found.done:
            check.give_up(version)
        return found

    def make_due(self) -> list[str]:
        """Makes what is due beside the versions, here and now; what was made, in words."""
        self._check_open()
        made = []
        while self._upkeep is not None and (one := self._upkeep.step()):
            made.append(one)
        return made

    def publish_weights(
        self,
        read: Callable[[], NewWeights],
        *,
        step: SupportsIndex | None = None,
        advance: Advance | None = None,
        watching: Watching | None = None,
        request: str = "",
    ) -> PublishReport:
        """Publishes what `read` opens; it may be called twice, after what it gave was closed. `request`: 16
        hex digits, by which `made_for` finds the version."""
        return self._publish_now(
            PublishJob(WeightSource(read), self._whole(step), Phases(watching), advance, request=request)
        )

    def made_for(self, request: str, above: int) -> Index | None:
        """The version that was published for `request`, if it is one after `above`. That there are newer ones
        says nothing: another publisher, an operator or a rollback may have made them."""
        channel = Channel.open(self.store, self._trust)
        pointer, table = channel.pointer(), self.run[1].table
        for version in range(0 if pointer is None else pointer.version, above, -1):
            with contextlib.suppress(DamagedFile, Untrusted):
                index = channel.index(pointer, version, table) if pointer is not None else None
                if isinstance(index, Index) and index.request == request:
                    return index
        return None

    def has_content(
        self, read: Callable[[], NewWeights], version: int, root: str, advance: Advance | None = None
    ) -> bool:
        """Whether what `read` opens has the content of `version`, which had this root, and would carry the
        same config files. Publishes nothing. Raises Refused for weights that do not fit the run."""
        self._drained()
        file, base = self.run
        local = self._updater.local
        position = None if local is None else local.state.position
        with contextlib.closing(read()) as weights:
            channel = Channel.open(self.store, self._trust)
            if self._options.carry_config and not is_carried(channel, weights.facts, version):
                return False
            given = matched_input(weights, file, base.table, Rank(0, 1))
            return has_root(given, base, root, position, self._updater.options.threads, advance)

    def root_of(self, version: int) -> str:
        """Of a version up to the newest; empty where the channel no longer says."""
        channel = Channel.open(self.store, self._trust)
        pointer = channel.pointer()
        with contextlib.suppress(WeightcastError):
            return "" if pointer is None else root_of(channel, pointer, version)
        return ""

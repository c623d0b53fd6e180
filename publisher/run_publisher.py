"""A publisher as daemon and commands use it: what a trainer's code does not need."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from weightcast.publisher.api import Publisher
from weightcast.publisher.maintenance.repair import ChannelCheck, Repairs, remake
from weightcast.publisher.publish.commit import is_carried
from weightcast.publisher.publish.publish_job import has_root, matched_input
from weightcast.publisher.ranks.rendezvous import Rank
from weightcast.publisher.weights.tensors import NewWeights
from weightcast.shared.base.elements import MAIN
from weightcast.shared.base.errors import DamagedFile, NeedsReseed, Untrusted
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.channel import Channel, NoChannel
from weightcast.shared.channel.components import open_component
from weightcast.shared.channel.index import Index
from weightcast.shared.checkpoint.verify.hashing import Scrub


class RunPublisher(Publisher):
    """Opened as `Publisher` is."""

    recover = Publisher._recover
    obey_orders = Publisher._obey_orders
    obey_repair = Publisher._obey_repair
    work_in_background = Publisher._work_in_background
    open_checkpoint = Publisher._open_checkpoint
    adapted = Publisher._adapted
    publish_weights = Publisher._publish_weights

    def check_owner(self) -> None:
        """Raises Refused, naming the newer owner, when another publisher has the channel now."""
        if self._claim is not None:
            self._claim.check()

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
            self._recover()
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

    def opened(self, component: str = MAIN) -> Channel:
        """The channel of a component, as it is now."""
        run = Channel.open(self.store, self._trust)
        return run if component == MAIN else open_component(run, component)

    def made_for(self, request: str, above: int, component: str = MAIN) -> Index | None:
        """The version that was published for `request`, if it is one after `above`. That there are newer ones
        says nothing: another publisher, an operator or a rollback may have made them."""
        try:
            channel = self.opened(component)
        except NoChannel:
            return None
        for version in range(channel.pointed(), above, -1):
            with contextlib.suppress(DamagedFile, Untrusted):
                index = channel.own_index(version)
                if index is not None and index.request == request:
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

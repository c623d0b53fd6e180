"""The start of a subscriber: which errors are wrong settings, that no later step mends.

A channel that is not there yet, an engine that does not answer and a damaged file are waited for. What this
machine's user gave wrongly ends the daemon, as it ends a publisher: before anything was reported.
"""

from __future__ import annotations

import socket
from contextlib import suppress

from weightcast.shared.channel.layout import Layout
from weightcast.shared.channel.store import NoChannel, require_named
from weightcast.shared.errors import Refused, RetryLater, UnknownFormat, Untrusted, WeightcastError, WrongRun
from weightcast.shared.files.apart import require_directory
from weightcast.shared.files.disk_errors import DiskError
from weightcast.shared.files.entries import exists
from weightcast.shared.local.follow import open_base
from weightcast.shared.local.local_checkpoint import HasWriter
from weightcast.shared.local.state import Phase
from weightcast.subscriber.status import HostStatus
from weightcast.subscriber.step.host import known
from weightcast.subscriber.step.mover import MissingBase
from weightcast.subscriber.step.sync import Sync

_EARLY = ("starting", "loading", "planning", "waiting", "stopped")
"""states in which a wrong setting may yet show"""
_WRONG = (MissingBase, UnknownFormat, Untrusted)
"""settings, as long as nothing is seeded; damage of the channel may yet be repaired"""


class Start:
    """Used by the work thread; `is_known` by any."""

    def __init__(self, sync: Sync) -> None:
        self._sync = sync
        self._ended_well = False

    @property
    def _is_seeded(self) -> bool:
        state = self._sync.host.state
        return state is not None and state.phase is not Phase.SEEDING

    def check_places(self) -> None:
        """Before the first step. Raises Refused for a local directory or a base that will not do, HasWriter,
        and DiskError for an error that lasts; what may pass is left to the first step."""
        base, channel = self._sync.options.base, self._sync.options.channel
        try:
            require_directory("--channel", channel)
            with suppress(NoChannel):
                require_named(channel)
            if base is not None and not exists(self._sync.follower.paths.state):
                open_base(base)
            self._sync.take_local()
        except (OSError, RetryLater) as error:
            told = known(error)
            if isinstance(told, HasWriter) or told.exit_code == Refused.exit_code:
                raise told from error

    def is_final(self, error: WeightcastError) -> bool:
        """Whether no later step can end better, as long as none has ended well."""
        if self._ended_well or self._is_seeded or isinstance(error, WrongRun):
            return isinstance(error, WrongRun) and not self._ended_well
        lasts = isinstance(error, DiskError) and error.exit_code == Refused.exit_code
        return isinstance(error, _WRONG) or (lasts and not isinstance(error.__cause__, FileNotFoundError))

    def withdraw(self) -> None:
        """Deletes the report of a host that was refused when it had begun to seed."""
        options = self._sync.options
        if not self._is_seeded:
            with suppress(OSError):
                Layout(options.channel).report(socket.gethostname(), str(options.local)).unlink()

    def ended_well(self) -> None:
        self._ended_well = True

    def is_known(self, status: HostStatus) -> bool:
        """Whether others may hear of this host: its settings have led somewhere."""
        return status.loop.steps > 0 or status.state not in _EARLY

"""Opens channel and local checkpoint, and mends what was found damaged here."""

from __future__ import annotations

from weightcast.shared.channel.store import Channel
from weightcast.shared.errors import WeightcastError
from weightcast.shared.local.access import let_read
from weightcast.shared.local.state import read_state
from weightcast.subscriber.engines.aligned import unaligned
from weightcast.subscriber.step.host import StepHost


class Opener:
    """Before a step: the local checkpoint is open, recovered and right afterwards, or `host.usable` is
    False."""

    def __init__(self, host: StepHost) -> None:
        self._host = host
        self._follower, self._engines, self._view = host.follower, host.engines, host.view
        self.reads_all = False
        """the next load re-hashes every byte"""

    def adopt(self) -> None:
        """A state that cannot be read is told by every other step."""
        channel = Channel.open(self._host.options.channel, self._host.options.trust)
        self._host.enter("hashing")
        if self._follower.adopt(channel, self._host.advance):
            self._host.degrade("the local state could not be read; all weights were read instead")

    def resume_noted(self) -> None:
        state = read_state(self._follower.paths.state)
        if state is not None:
            self._engines.resume_noted(state)

    def open_and_load(self) -> Channel:
        """The local checkpoint is opened also when the channel cannot be."""
        if self._follower.local is None:
            self._host.enter("loading")
        try:
            channel = Channel.open(self._host.options.channel, self._host.options.trust)
            self._follower.require_mounted(channel)
        except (WeightcastError, OSError):
            self.load(None)
            raise
        self.load(channel)
        self._repair(channel)
        return channel

    def load(self, channel: Channel | None) -> None:
        before, self._host.usable = self._host.usable, False
        try:
            self._follower.load(channel, self._host.advance)
        except OSError:
            # a disk that fails says nothing of what lies on it, nor of what engines took from it
            self._host.usable = before
            raise
        if self.reads_all:
            self._host.enter("hashing")
            self._follower.rehash(self._host.advance)
            self.reads_all = False
        self._host.usable = self._follower.local is not None
        self.let_read()

    def let_read(self) -> None:
        if self._follower.local is not None and self._host.options.readable_by is not None:
            let_read(self._follower.local, self._host.options.readable_by)

    def _repair(self, channel: Channel) -> None:
        """Seeding is left for what cannot be repaired."""
        if not self._follower.repairable:
            return
        before = self._host.state
        self.stand_back()
        self._view.not_ready = (f"repairing: {self._follower.trouble}",)
        self._host.enter("repairing")
        with self._host.watch.timed("repair"):
            repaired = self._follower.repair(channel, self._host.advance)
        if repaired is None:
            return
        self._host.usable = True
        self._host.watch.changes += repaired.words
        self._host.count_read("repair", repaired.nbytes)
        self._host.moved("repair", None if before is None else before.position.version, 0)

    def stand_back(self) -> None:
        """Other bytes will lie here: nothing that engines confirmed holds any longer."""
        self._follower.release()
        state = self._follower.state
        if state is not None:
            self._follower.state = state.but(engines=unaligned(state.engines))
            self._engines.pause_mapping(self._host.note_doubt)

"""Opens channel and local checkpoint, and mends what was found damaged here."""

from __future__ import annotations

from weightcast.shared.base.errors import WeightcastError
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.channel import Channel
from weightcast.shared.checkpoint.local_checkpoint import grant_read
from weightcast.shared.checkpoint.state.state import read_state
from weightcast.shared.checkpoint.update.patch import prove
from weightcast.shared.checkpoint.verify.hashing import Damaged
from weightcast.subscriber.engines.rules import without_served
from weightcast.subscriber.status import ReloadProof
from weightcast.subscriber.sync.host import StepHost
from weightcast.subscriber.sync.step_log import Changed, NotReady, Proven, ReadFor, Usable


class Loader:
    """Before a step: the local checkpoint is open, recovered and right afterwards, or the
    log says that it is not usable."""

    def __init__(self, host: StepHost) -> None:
        self._host = host
        self._updater, self._engines, self._log = host.updater, host.engines, host.log
        self.reads_all = False
        """the next load re-hashes every byte"""

    def adopt(self) -> None:
        """A state that cannot be read is an error of every other step."""
        channel = Channel.open(self._updater.store, self._host.options.trust)
        self._host.enter("hashing")
        if self._updater.recover_state(channel, self._host.advance):
            self._host.degrade("the local state could not be read; all weights were read instead")

    def resume_noted(self) -> None:
        state = read_state(self._updater.paths.state)
        if state is not None:
            self._engines.resume_noted(state)

    def open_and_load(self) -> Channel:
        """The local checkpoint is opened also when the channel cannot be."""
        if self._updater.local is None:
            self._host.enter("loading")
        try:
            channel = Channel.open(self._updater.store, self._host.options.trust)
            self._updater.require_mounted(channel)
        except (WeightcastError, OSError):
            self.load(None)
            raise
        self.load(channel)
        self._repair(channel)
        return channel

    def load(self, channel: Channel | None) -> None:
        before = self._log.view.usable
        self._log.append(Usable(False))
        try:
            self._updater.load(channel, self._host.advance)
        except OSError:
            # a disk that fails says nothing of what lies on it, nor of what engines took from it
            self._log.append(Usable(before))
            raise
        if self.reads_all:
            self._host.enter("hashing")
            self._updater.rehash(self._host.advance)
            self.reads_all = False
        self._log.append(Usable(self._updater.local is not None))
        self.grant_read()

    def grant_read(self) -> None:
        if self._updater.local is not None and self._host.options.readable_by is not None:
            grant_read(self._updater.local, self._host.options.readable_by)

    def _repair(self, channel: Channel) -> None:
        """Seeding is left for what cannot be repaired."""
        if not self._updater.repairable:
            return
        before = self._host.state
        self.stand_back()
        self._log.append(NotReady((f"repairing: {self._updater.trouble}",)))
        self._host.enter("repairing")
        with self._log.timed("repair"):
            repaired = self._updater.repair(channel, self._host.advance)
        if repaired is None:
            return
        self._log.append(Usable(True))
        self._log.append(Changed(repaired.words))
        self._log.append(ReadFor("repair", repaired.nbytes))
        self._host.moved("repair", None if before is None else before.position.version, 0)

    def stand_back(self) -> None:
        """Other bytes will lie here: nothing that engines confirmed holds any longer."""
        self._updater.release()
        state = self._updater.state
        if state is not None:
            self._updater.state = state.but(engines=without_served(state.engines))
            self._engines.pause_mapping(self._host.note_doubt)


ALWAYS_BYTES = 1 << 30
"""a local checkpoint up to this size is hashed in full before every reload; that takes about 0.1 s"""


class Prover:
    """Raises Damaged: the caller repairs before an engine is reloaded."""

    def __init__(self, host: StepHost) -> None:
        self._host = host

    @property
    def _bound(self) -> float:
        is_small = self._host.local().table.nbytes <= ALWAYS_BYTES
        return 0.0 if is_small else self._host.options.verified_within

    def ahead(self) -> None:
        """While engines serve and nothing is locked. At half the bound, so that the reload that follows finds
        little or nothing to hash."""
        if self._bound:
            self._host.enter("hashing")
            self._prove(self._bound / 2, self._host.advance)

    def now(self) -> None:
        """Under the patch lock, right before a reload. A stop is not obeyed: engines may be paused."""
        self._prove(self._bound, None)
        age = round(self._host.local().proofs.age, 3)
        self._host.log.append(
            Proven(self._known.but(bound_seconds=self._bound, age_seconds=age, at=self._host.now()))
        )

    @property
    def _known(self) -> ReloadProof:
        return self._host.view.proof or ReloadProof(bound_seconds=self._bound)

    def _prove(self, seconds: float, advance: Advance | None) -> None:
        try:
            with self._host.log.timed("verify"):
                prove(self._host.local(), seconds, advance=advance)
        except Damaged as found:
            proof = self._known.but(
                faults=self._known.faults + len(found.tensors),
                last_fault=found.message,
                last_fault_at=self._host.now(),
            )
            self._host.log.append(Proven(proof))
            raise

"""What is made beside the versions, after them: deltas from older versions, anchors, ordered ones too.

`Upkeep.step` makes at most one thing; who calls it, and when, is decided elsewhere. Everything is found out
anew from the channel and the kept journals: a kill costs the work of one step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from weightcast.publisher.maintenance.multi_step_deltas import multi_step_deltas, write_multi_step
from weightcast.publisher.maintenance.orders import standing
from weightcast.publisher.maintenance.prune import (
    ActiveHosts,
    empty_trash,
    forget_hosts,
    held_versions,
    prune,
    what_to_prune,
)
from weightcast.publisher.maintenance.replay_log import KeptJournals, ReplayLog
from weightcast.publisher.maintenance.retention import GRACE_SECONDS, Retention, cheapest
from weightcast.publisher.publish.anchors import Full, write_anchor
from weightcast.publisher.publish.commit import Signer, drop_strays, drop_unfinished
from weightcast.shared.base.errors import DamagedFile, Refused, RetryLater, WeightcastError, counted
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.base.options import check_options
from weightcast.shared.channel import pins
from weightcast.shared.channel.chain import is_half_pruned, versions_in
from weightcast.shared.channel.channel import Channel, look
from weightcast.shared.channel.claims import Claim
from weightcast.shared.channel.index import INDEX_NAME
from weightcast.shared.channel.layout import (
    ANCHOR,
    Pointer,
    anchor_key,
    base_of,
    multi_step_key,
    version_name,
)
from weightcast.shared.checkpoint.local_checkpoint import LocalPaths
from weightcast.shared.checkpoint.state.state import Step
from weightcast.shared.checkpoint.update.buffer_reuse import drop as drop_spares
from weightcast.shared.checkpoint.update.buffer_reuse import make_ready, spare_bytes
from weightcast.shared.codec.container import StepEncoding
from weightcast.shared.daemon.timing import Backoff, Due
from weightcast.shared.files.disk_errors import disk_error
from weightcast.shared.files.paths import exists

_REST = 9
"""times as long as a piece of work took"""
_MOST_SECONDS = 1.0
"""of rest after a piece: what is due gets done under a trainer that never waits, too"""


class Throttle:
    """`publishing` is for the thread that publishes, `begin` and `rest` for the one that gives way. `most`:
    seconds of rest after a piece of work."""

    def __init__(self, most: float = _MOST_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._free = threading.Event()
        self._free.set()
        self._most, self._clock = most, clock
        self._worked_since = clock()

    @contextlib.contextmanager
    def publishing(self) -> Iterator[None]:
        self._free.clear()
        try:
            yield
        finally:
            self._free.set()

    def begin(self) -> None:
        """Work begins after a time in which nothing was to do."""
        self._worked_since = self._clock()

    def rest(self) -> None:
        """Called between pieces of work, with no lock held. Returns at once where nothing is published."""
        worked = self._clock() - self._worked_since
        self._free.wait(min(_REST * worked, self._most))
        self._worked_since = self._clock()


_FADING = 0.9
"""of what was measured, per version"""


class PatchRate:
    """Seconds per byte of delta, over the last ten versions or so."""

    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0
        self._first = True

    def measured(self, nbytes: int, seconds: float) -> None:
        if self._first:
            # kernels may have been compiled meanwhile
            self._first = False
            return
        self._bytes = _FADING * self._bytes + nbytes
        self._seconds = _FADING * self._seconds + seconds

    def seconds_for(self, nbytes: int) -> float:
        """0 until something was measured."""
        return nbytes * self._seconds / self._bytes if self._bytes else 0.0


_ESTIMATE_EVERY = 16
"""versions"""
_HOSTS_EVERY = 3600.0
"""seconds"""
_SHORTEST_REST = 1.0
"""seconds"""
_PAUSES = Backoff(5.0, 300.0)
"""after failures, before an order alone is reason to try again"""
_log = logging.getLogger("weightcast.upkeep")


@dataclass(frozen=True)
class UpkeepOptions:
    """`skip_span`: versions that the widest delta from an older version spans, 0 makes none.

    `anchor_every`: versions from one anchor to the next; `anchor_share`: bytes of deltas since the last one,
    as a share of the full weights, that make the next one due; `anchor_seconds`: estimated time of a host for
    these deltas that does, once they have half the bytes of the full weights; 0: not by this rule.
    `history_share`: bytes of kept journals, as a share of the full weights."""

    skip_span: int = 0
    anchor_every: int = 0
    anchor_share: float = 0.0
    anchor_seconds: float = 0.0
    history_share: float = 1.0
    encoding: StepEncoding = "fast"
    retention: Retention = field(default_factory=Retention)
    """with a number of versions, that many without full weights make an anchor due too"""
    grace_seconds: float = GRACE_SECONDS
    """from a version's leaving the channel to its deletion"""

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def idle(self) -> bool:
        anchors = self.anchor_every or self.anchor_share or self.anchor_seconds
        return not (self.skip_span or anchors or self.retention.bounded)


@dataclass(frozen=True)
class Chain:
    """The deltas since the last full weights: `anchor` is their version, 0 where there are none but the
    base's; `seconds`: what a host takes for them, estimated."""

    up_to: int = 0
    anchor: int = 0
    nbytes: int = 0
    seconds: float = 0.0


def due_anchor(
    at: int, chain: Chain, full_bytes: int, options: UpkeepOptions, readable: Collection[int]
) -> int | None:
    """The version whose full weights are to be written, one of `readable`."""
    every = options.anchor_every
    newest = at // every * every if every else 0
    if newest > chain.anchor:
        return newest if newest in readable else at
    if options.anchor_share and at > chain.anchor and chain.nbytes >= options.anchor_share * full_bytes:
        return at
    slow = 0 < options.anchor_seconds <= chain.seconds
    if slow and at > chain.anchor and 2 * chain.nbytes >= full_bytes:
        return at
    few = options.retention.keep_versions
    return at if few is not None and at - chain.anchor >= few else None


def sweep(channel: Channel, claim: Claim) -> None:
    """Deletes what a kill left unfinished beside versions, and in an object store of versions that were
    pruned."""
    for version in versions_in(channel.store):
        files = channel.store.within(version_name(version))
        if is_half_pruned(channel, version):
            drop_unfinished(claim, version_name(version))
            continue
        entries = list(files.list())
        drop_strays(claim, version_name(version), (entry.name for entry in entries))
        for entry in entries:
            name, _, epoch = entry.name.partition(".")
            beside = entry.kind == "directory" and (name == ANCHOR or base_of(name) is not None)
            ours = epoch.startswith(f"{claim.epoch}-")
            if beside and not ours and (epoch or files.stat(f"{name}/{INDEX_NAME}") is None):
                drop_unfinished(claim, f"{version_name(version)}/{entry.name}")


class Upkeep:
    """`step` is for one thread: the caller's, or after `start` one of its own, which gives way to
    publishing."""

    def __init__(self, claim: Claim, local: Path, options: UpkeepOptions, signer: Signer) -> None:
        self._claim, self._store, self._local, self._options = claim, claim.store, local, options
        self._signer = signer
        self._paths = LocalPaths(local)
        self._journals = KeptJournals(self._paths)
        self._unspared = 0
        """bytes of the last journal, where none is left that the next one is written over"""
        self._stop = threading.Event()
        self.throttle = Throttle()
        self._active, self._hosts_due = ActiveHosts(), Due(_HOSTS_EVERY)
        self._swept = False
        self._chain = Chain()
        self._pace, self._estimated = PatchRate(), 0
        self.written = {"skip": 0, "anchor": 0}
        """bytes since the start, by what they were for; other threads may read them"""
        self._thread: threading.Thread | None = None
        self._wanted = threading.Event()
        self._working = False
        self.problem = ""
        """why the last step in the thread made nothing; empty when all is well"""
        self._failures, self._again = 0, 0.0
        """since the last success; not before this time of the monotonic clock for an order"""
        self.made = ""
        """what was made there last"""

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)
            self._thread.start()
        self.wake()

    def wake(self) -> None:
        self._wanted.set()

    def obey(self) -> None:
        """Makes what is due if an operator ordered an anchor: in the thread, or here where none runs. What
        fails is tried again, and keeps nobody from publishing. Called by the publishing thread."""
        if time.monotonic() < self._again or not pins.is_ordered(self._store, "anchor"):
            return
        if self._thread is None:
            self._work()
        else:
            self.wake()

    @property
    def busy(self) -> bool:
        """False: nothing is due, or the last step failed."""
        return self._working or self._wanted.is_set()

    def stop(self) -> None:
        """Ends a running step at its next piece, and the thread."""
        self._stop.set()
        self._wanted.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        # Linux gives each thread a priority of its own
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while not self._stop.is_set():
            # what was pruned comes due by itself, while nothing is published too
            bounded = self._options.retention.bounded
            self._wanted.wait(max(_SHORTEST_REST, self._options.grace_seconds) if bounded else None)
            self._working = True
            self._wanted.clear()
            self._work()
            self._working = False

    def _work(self) -> None:
        self.throttle.begin()
        try:
            while not self._stop.is_set():
                made = self.step()
                self.problem, self._failures, self._again = "", 0, 0.0
                if not made:
                    break
                self.made = made
            failpoint("upkeep.idle")
        except Exception as error:
            # what went wrong beside the versions is no reason to publish none
            known = disk_error(error, "a file") if isinstance(error, OSError) else error
            problem, self._failures = f"{type(known).__name__}: {known}", self._failures + 1
            self._again = time.monotonic() + _PAUSES.pause(self._failures)
            if problem != self.problem and not self._stop.is_set():
                _log.warning("maintenance of %s failed: %s", self._store.place(), problem)
            self.problem = problem

    def keep(self, step: Step, seconds: float) -> None:
        """Keeps the journal of a step that was just staged and patched, in so many seconds. Called by the
        publishing thread."""
        shown = look(self._store.within(version_name(step.target.version)))
        if shown is not None:
            self._pace.measured(shown.nbytes, seconds)
        span = max(self._options.skip_span, self._options.anchor_every, 1)
        self._journals.keep(step, self._store)
        full = Channel.open(self._store).require_ours()[1].table.nbytes
        self._journals.trim(2 * span, int(self._options.history_share * full))

        # kept, it is not there to be written over by the next one
        kept = self._paths.journal(step.journal).stat().st_size
        self._unspared = 0 if exists(self._paths.spare) else kept

    def give_up(self) -> bool:
        """Where the local disk is short: drops spares, then the oldest kept step that no standing rollback
        goes back over. False when there is none. Called by the publishing thread."""
        if spare_bytes(self._paths):
            drop_spares(self._paths)
            return True
        try:
            order = standing(Channel.open(self._store))
        except (WeightcastError, OSError):
            return False
        return self._journals.drop_oldest(None if order is None else order.to)

    def _make_spare(self) -> None:
        nbytes, self._unspared = self._unspared, 0
        with contextlib.suppress(OSError):  # nothing depends on it
            make_ready(self._paths, nbytes, self._check)

    def _check(self) -> None:
        self.throttle.rest()
        if self._stop.is_set():
            raise RetryLater("the publisher stops", remedy="nothing to do: the next publisher continues")

    def step(self) -> str:
        """What was made, in words; empty when nothing is due. Raises Refused when the channel has another
        owner, RetryLater and OSError for what may pass."""
        self._make_spare()
        self._claim.check()
        try:
            # first: on a full disk nothing can be made before
            empty_trash(self._store, self._options.grace_seconds)
            if self._hosts_due.take():
                forget_hosts(self._claim, time.time())
        finally:
            idle = self._options.idle and not pins.is_ordered(self._store, "anchor")
            made = "" if idle else self._make_or_prune()
        return made

    def _make_or_prune(self) -> str:
        channel = Channel.open(self._store, self._signer.trust)
        pointer = channel.pointer()
        if pointer is None:
            return ""
        if not self._swept:
            sweep(channel, self._claim)
            self._swept = True
        try:
            made = self._make(channel, pointer)
        except OSError:
            # what does not fit may, once this is gone
            self._prune(channel, pointer)
            raise
        return made or self._prune(channel, pointer)

    def _make(self, channel: Channel, pointer: Pointer) -> str:
        with ReplayLog(self._local, self._check) as log:
            if log.local.state.position.version != pointer.version:
                return ""
            return self._make_skip(channel, pointer, log) or self._make_anchor(channel, pointer, log)

    def _prune(self, channel: Channel, pointer: Pointer) -> str:
        if not self._options.retention.bounded:
            return ""
        verdict = what_to_prune(channel, pointer, self._active, self._options.retention)
        # what fails half way is swept up by the next step
        self._swept = not verdict.removals
        prune(verdict, self._claim, self._local)
        self._swept = True
        return f"{counted(len(verdict.removals), 'version')} pruned" if verdict.removals else ""

    def _make_skip(self, channel: Channel, pointer: Pointer, log: ReplayLog) -> str:
        positions = log.positions()
        for version, base_version in multi_step_deltas(
            pointer.version, min(positions), self._options.skip_span
        ):
            key = multi_step_key(version, base_version)
            if self._store.stat(f"{key}/{INDEX_NAME}") is not None:
                continue
            main, base = channel.own_index(version), positions.get(base_version)
            if main is None or base is None or main.digest != positions[version].digest:
                continue
            try:
                write_multi_step(log, main, base, self._claim, self._options.encoding, self._signer.key)
            except DamagedFile:
                # one of the journals is wrong, and which one is not worth finding out
                self._journals.clear()
                raise
            self._wrote("skip", key)
            return f"delta of version {version} from version {base_version}"
        return ""

    def _make_anchor(self, channel: Channel, pointer: Pointer, log: ReplayLog) -> str:
        self._follow_chain(channel, pointer, log.table.nbytes)
        positions = log.positions()
        version = due_anchor(pointer.version, self._chain, log.table.nbytes, self._options, positions.keys())
        if version is None and not pins.is_ordered(self._store, "anchor"):
            return ""
        at = pointer.version if version is None else version
        full = Full(positions[at], log.local.base, log.words_at(at), log.local.side_files)
        try:
            write_anchor(full, self._claim, self._signer.key)
        except Refused as error:
            self._claim.check()  # the order may be another owner's now
            if pins.is_ordered(self._store, "anchor"):
                pins.refuse_order(self._store, "anchor", error)
            raise
        if version is None:
            pins.end_order(self._store, "anchor")
        self._chain = Chain()
        self._wrote("anchor", anchor_key(at))
        return f"anchor of version {at}"

    def _wrote(self, cause: str, key: str) -> None:
        shown = look(self._store.within(key))
        self.written[cause] += 0 if shown is None else shown.nbytes

    def _follow_chain(self, channel: Channel, pointer: Pointer, full_bytes: int) -> None:
        chain = self._chain
        for version, shown in sorted(channel.shown(pointer, above=chain.up_to).items()):
            whole = shown.anchor is not None or shown.nbytes >= full_bytes
            anchor, nbytes = (version, 0) if whole else (chain.anchor, chain.nbytes + shown.nbytes)
            seconds = 0.0 if whole else chain.seconds
            chain = Chain(version, anchor, nbytes, seconds)
        self._chain = self._estimate(channel, pointer, chain)

    def _estimate(self, channel: Channel, pointer: Pointer, chain: Chain) -> Chain:
        """Every version is looked at for it: only where it may matter, and only now and then."""
        limit, at = self._options.anchor_seconds, pointer.version
        soon = 0 <= at - self._estimated < _ESTIMATE_EVERY
        if not limit or soon or self._pace.seconds_for(chain.nbytes) < limit:
            return chain
        self._estimated = at
        way = cheapest(held_versions(channel, pointer, chain.anchor), at, {chain.anchor: 0})
        return replace(chain, seconds=self._pace.seconds_for(chain.nbytes if way is None else way.nbytes))

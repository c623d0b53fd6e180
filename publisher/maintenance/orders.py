"""An operator's orders, which the channel's owner carries out: a rollback and what holds publishing after it.

The order's file is the state: while it lies there nothing else is published. It is carried out when the
newest version has the bytes that it asks for.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

from weightcast.publisher.maintenance.replay_log import ReplayLog
from weightcast.publisher.publish.publish import OwnerRank
from weightcast.publisher.publish.publish_job import PublishJob, PublishReport, WeightSource
from weightcast.publisher.weights.tensors import CheckpointWeights, NewWeights
from weightcast.shared.base.elements import TensorTable, Words
from weightcast.shared.base.errors import Refused, RetryLater, WeightcastError
from weightcast.shared.channel import pins
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.pins import Rollback
from weightcast.shared.channel.run_files import is_adapter
from weightcast.shared.channel.store import Store
from weightcast.shared.checkpoint.local_updater import LocalUpdater, UpdaterOptions

_LOOK_SECONDS = 10.0
_log = logging.getLogger("weightcast.orders")


class Held(Refused):
    @classmethod
    def by(cls, order: Rollback) -> Held:
        return cls(
            f"publishing is on hold since the rollback to version {order.to}",
            remedy="resume with `weightcast channel resume`",
        )


def order_rollback(store: Store, to: int) -> Rollback:
    """Leaves the order for the owner. Raises Refused for a version that the channel cannot say the bytes of,
    or that is the newest one."""
    opened = Channel.open(store)
    file, _ = opened.require_ours()
    newest, earlier = opened.pointed(), pins.rollback_state(opened)
    if earlier is not None:
        state = "ordered already" if earlier.done_as is None else f"done as version {earlier.done_as}"
        raise Refused(f"the rollback to version {earlier.to} is {state}", remedy=pins.END_HOLD)
    if not 0 <= to < newest:
        raise Refused(
            f"there is no version {to} before the newest, {newest}",
            remedy="list versions with `weightcast channel log`",
        )
    order = Rollback(file.run_id, to, root_of(opened, to), time.time())
    pins.order_rollback(store, order)
    return order


def root_of(channel: Channel, version: int) -> str:
    """Of a version up to the newest. Raises Refused for one that was pruned."""
    if version == 0:
        return channel.require_ours()[1].root
    index = channel.own_index(version)
    if index is None:
        raise Refused(
            f"version {version} is no longer in the channel",
            remedy="choose a version that `weightcast channel log` lists",
        )
    return index.root


def standing(channel: Channel) -> Rollback | None:
    """The order that holds publishing. Raises Refused for one of another run."""
    order, (file, _) = pins.read_rollback(channel.store), channel.require_ours()
    if order is not None and order.run_id != file.run_id:
        raise Refused(
            f"the rollback order in {channel.place} is for run {order.run_id}, not {file.run_id}",
            remedy="withdraw it with `weightcast channel resume`",
        )
    return order


def is_carried_out(channel: Channel) -> bool:
    state = pins.rollback_state(channel)
    return state is None or state.done_as is not None


def carry_out(owner: OwnerRank, updater: LocalUpdater, channel: Channel, order: Rollback) -> PublishReport:
    """Publishes the bytes of the order's version as the next one. `owner` publishes alone."""
    with _weights(updater, channel, order) as read:
        return owner.publish(PublishJob(WeightSource(read), None, root=order.root, carried_of=order.to))


class OrderWatch:
    """Has orders carried out in a thread, also while a trainer publishes nothing. `obey` is called in `turn`
    and returns the rollback that is then in effect."""

    def __init__(self, store: Store, turn: threading.RLock, obey: Callable[[], Rollback | None]) -> None:
        self._store, self._turn, self._obey = store, turn, obey
        self._done: Rollback | None = None
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name="weightcast-orders", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self._stop.set()
        self.thread.join()

    def _run(self) -> None:
        logged = ""
        while not self._stop.wait(_LOOK_SECONDS):
            problem = ""
            try:
                new = pins.read_rollback(self._store) not in (None, self._done)
                if new or any(pins.is_ordered(self._store, work) for work in get_args(pins.Work)):
                    with self._turn:
                        self._done = self._obey()
            except Exception as error:
                # it is tried again, here and at the next publication
                problem = f"{type(error).__name__}: {error}"
            if problem and problem != logged:
                _log.warning("order in %s not carried out yet: %s", self._store.place(), problem)
            logged = problem


@contextlib.contextmanager
def _weights(updater: LocalUpdater, channel: Channel, order: Rollback) -> Iterator[Callable[[], NewWeights]]:
    """What opens them, each time anew: from kept journals, or else from a copy that follows the channel to
    that version as a host would."""
    log = _replay_log(updater.paths.directory, order)
    if log is not None:
        with log:
            yield lambda: ReplayedWeights(log, order.to)
        return
    scratch = updater.paths.room / "rollback"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        _bring(channel, scratch, updater.base_dir, order)
        yield lambda: CheckpointWeights(scratch, adapter=is_adapter(channel.store.component))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _replay_log(local: Path, order: Rollback) -> ReplayLog | None:
    try:
        log = ReplayLog(local)
    except (WeightcastError, OSError):
        return None
    position = log.positions().get(order.to)
    if position is None or position.root != order.root:
        log.close()
        return None
    return log


def _bring(channel: Channel, scratch: Path, base: Path | None, order: Rollback) -> None:
    updater = LocalUpdater(channel.store, scratch, base, UpdaterOptions(visible_seconds=10.0, carries=False))
    try:
        updater.update_to(channel, order.to)
        if updater.local is None or updater.local.state.position.root != order.root:
            raise RetryLater(
                f"version {order.to} could not be restored", remedy="nothing to do: the publisher tries again"
            )
    finally:
        updater.close()


class ReplayedWeights(NewWeights):
    """An older version as new weights. What is read is checked against the journals; who opened `log` closes
    it."""

    def __init__(self, log: ReplayLog, version: int) -> None:
        self.table: TensorTable = log.table
        self._words_in = log.words_at(version)

    def words_in(self, name: str, start: int, stop: int) -> Words:
        return self._words_in(self.table.numbers[name], start, stop)

    def equal(self, name: str, other: str) -> bool:
        # a base may store both of two tied tensors: then the run's table has both
        return name == other or super().equal(name, other)

"""A follower of an engine group: its local checkpoint moves, and is held, when its leader says so.

`Post` takes orders from HTTP threads; `GroupFollower` carries them out in the work thread.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from weightcast.shared.base.errors import Refused
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.checkpoint.state.locks import FileLock
from weightcast.shared.checkpoint.state.state import Phase, Position
from weightcast.subscriber.groups.messages import Hold
from weightcast.subscriber.groups.order import REASON_LIMIT, HoldState, Order
from weightcast.subscriber.sync.host import Outcome
from weightcast.subscriber.sync.sync import Sync

_LOCK_SECONDS = 5.0


@dataclass(frozen=True)
class Wanted:
    """An order, and which it is: the same order, taken again after its lease ended, is another."""

    order: Order
    number: int


@dataclass
class _Task:
    wanted: Wanted
    expires: float
    state: HoldState = "working"
    reason: str = ""
    grant: str = ""

    @property
    def order(self) -> Order:
        return self.wanted.order


class Post:
    """The order that a follower has now. Thread-safe. `wake` is called when there is something to do."""

    def __init__(self, wake: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._wake, self._clock = wake, clock
        self._lock = threading.Lock()
        self._task: _Task | None = None
        self._leader, self._term = "", 0
        self._number = 0
        self._served: str | None = None
        self._here: Position | None = None
        self._heard: float | None = None
        self._closed = False

    def take(self, order: Order, seconds: float) -> Hold:
        """A new order, or the renewal of the lease of the present one."""
        with self._lock:
            task, now = self._live(), self._clock()
            self._heard = now
            if self._closed or self._is_stale(order, task):
                return self._hold()
            self._leader, self._term = order.leader, order.term
            if task is None or task.order != order:
                self._number += 1
                self._task = _Task(Wanted(order, self._number), now + seconds)
                self._served = None
                self._wake()
            else:
                task.expires = now + seconds
            return self._hold()

    def _is_stale(self, order: Order, task: _Task | None) -> bool:
        """Whether it comes late, or of another leader while one is served."""
        if order.leader != self._leader:
            return task is not None
        if order.term != self._term or task is None:
            return order.term < self._term
        return (task.order.phase, order.phase) == ("hold", "prepare")

    def release(self, leader: str, term: int, served: bool) -> Hold:
        """Ends the leader's order of this term; one of another is left alone."""
        with self._lock:
            task = self._live()
            if task is not None and (task.order.leader, task.order.term) == (leader, term):
                self._served = task.order.digest if served and task.state == "held" else None
                self._task = None
                # a renewal that comes late is of a term that is over
                self._term = term + 1
                self._wake()
            return self._hold()

    def look(self) -> Hold:
        with self._lock:
            self._heard = self._clock()
            return self._hold()

    def hold(self) -> Hold:
        """As `look`, for the host's own status."""
        with self._lock:
            return self._hold()

    def heard_seconds(self) -> float | None:
        """Since anybody last asked; None: never."""
        with self._lock:
            return None if self._heard is None else self._clock() - self._heard

    def wanted(self) -> Wanted | None:
        with self._lock:
            task = self._live()
            return None if task is None else task.wanted

    def answer(self, wanted: Wanted, state: HoldState, reason: str = "") -> None:
        """What the work on it came to; ignored when something else is wanted by now."""
        with self._lock:
            task = self._live()
            if task is not None and task.wanted == wanted:
                task.state, task.reason = state, reason[:REASON_LIMIT]
                task.grant = secrets.token_hex(16) if state == "held" else ""

    def is_at(self, position: Position | None) -> None:
        """Where the local checkpoint is; None: nowhere."""
        with self._lock:
            self._here = position

    def take_served(self) -> str | None:
        """The digest of a version that engines took, once."""
        with self._lock:
            served, self._served = self._served, None
            return served

    def close(self) -> None:
        """From here on nothing is held: grants end, and no order is taken."""
        with self._lock:
            self._closed, self._task = True, None

    def _live(self) -> _Task | None:
        if self._task is not None and self._clock() >= self._task.expires:
            self._task = None
        return self._task

    def _hold(self) -> Hold:
        task, here = self._live(), self._here
        shown: dict[str, object] = {"leader": self._leader, "term": self._term}
        if here is not None:
            shown |= {
                "local_version": here.version,
                "local_digest": here.digest,
                "local_root": here.root,
            }
        if task is not None:
            shown |= {
                "state": task.state,
                "phase": task.order.phase,
                "version": task.order.version,
                "reason": task.reason,
                "grant": task.grant,
                "seconds_left": task.expires - self._clock(),
            }
        return Hold.model_validate(shown)


class GroupFollower:
    """Used by the work thread alone."""

    def __init__(self, sync: Sync, post: Post) -> None:
        self._sync, self._post = sync, post
        self._kept: Wanted | None = None
        self._lock: FileLock | None = None

    @property
    def is_still(self) -> bool:
        """Nothing may be written: the local checkpoint is held."""
        return self._lock is not None

    def close(self) -> None:
        # before others may write here: the HTTP side answers for a while yet
        self._post.close()
        self._let_go()

    def step(self) -> Outcome:
        """Towards what is wanted now. Raises what `sync_once` raises."""
        wanted = self._post.wanted()
        if wanted is not None and wanted == self._kept:
            return replace(self._sync.outcome(), moved=False)
        self._let_go()
        self._forget_undo()
        self._sync.order = None if wanted is None else wanted.order
        try:
            outcome = self._sync.sync_once()
            if wanted is not None:
                self._keep(wanted, outcome)
        except Exception as error:
            # whatever it is: the leader and the other hosts wait for an answer
            if wanted is not None:
                self._post.answer(wanted, _failure(error), str(error) or type(error).__name__)
            raise
        finally:
            self._show()
        return outcome

    def _keep(self, wanted: Wanted, outcome: Outcome) -> None:
        """Answers, and remembers what is to be left as it is."""
        done = self._stand_still(wanted.order) if wanted.order.phase == "hold" else self._sync.is_prepared
        if not done:
            reason = "; ".join(outcome.degraded) or f"version {wanted.order.version} is not reached"
            self._post.answer(wanted, "refused", reason)
            return
        self._kept = wanted
        self._post.answer(wanted, "held" if wanted.order.phase == "hold" else "prepared")

    def _stand_still(self, order: Order) -> bool:
        """Takes the shared lock; False when the local version is not the wanted one."""
        local = self._sync.updater.local
        if local is None or local.state.phase is not Phase.CLEAN or not order.is_at(local.state.position):
            return False
        lock = FileLock(local.paths.patch)
        lock.acquire(shared=True, seconds=_LOCK_SECONDS)
        self._lock = lock
        self._show()
        failpoint("group.still", local.directory)
        return True

    def _let_go(self) -> None:
        self._kept = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _forget_undo(self) -> None:
        served, local = self._post.take_served(), self._sync.updater.local
        if served is not None and local is not None and local.state.position.digest == served:
            self._sync.updater.forget_undo()

    def _show(self) -> None:
        self._post.is_at(self._sync.position)


def _failure(error: Exception) -> HoldState:
    return "refused" if isinstance(error, Refused) else "failed"

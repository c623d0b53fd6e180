"""A follower of an engine group: its local checkpoint moves, and is held, when its leader says so.

`Post` takes orders from HTTP threads; `GroupFollower` carries them out in the work thread.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from weightcast.shared.base.errors import Refused
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.checkpoint.state.locks import FileLock
from weightcast.shared.checkpoint.state.state import Position
from weightcast.subscriber.groups.messages import REASON_LIMIT, Hold, HoldState, Order, Release
from weightcast.subscriber.status import GroupStatus, HostStatus
from weightcast.subscriber.sync.sync import Sync

_LOCK_SECONDS = 5.0


class Post:
    """The order that a follower has now. Thread-safe. `wake` is called when there is something to do. Equal
    orders differ by identity: the same order, taken again after its lease ended, is another."""

    def __init__(self, wake: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._wake, self._clock = wake, clock
        self._lock = threading.Lock()
        self._order: Order | None = None
        self._expires = 0.0
        self._state: HoldState = "working"
        self._reason = self._grant = ""
        self._leader, self._term = "", 0
        self._served: str | None = None
        self._here: Position | None = None
        self._heard: float | None = None
        self._closed = False

    def take(self, order: Order) -> Hold:
        """Come to a version and stand still there, or only prepare for it, until the lease ends. Repeated by
        the leader, which renews the lease and tells how far it is."""
        with self._lock:
            present, now = self._live(), self._clock()
            self._heard = now
            if self._closed or self._is_stale(order, present):
                return self._hold()
            self._leader, self._term = order.leader, order.term
            self._expires = now + order.seconds
            if present != order:
                self._order = replace(order)
                self._state, self._reason, self._grant = "working", "", ""
                self._served = None
                self._wake()
            return self._hold()

    def _is_stale(self, order: Order, present: Order | None) -> bool:
        """Whether it comes late, or of another leader while one is served."""
        if order.leader != self._leader:
            return present is not None
        if order.term != self._term or present is None:
            return order.term < self._term
        return (present.phase, order.phase) == ("hold", "prepare")

    def release(self, release: Release) -> Hold:
        """The leader's order of this term ends before its lease does; one of another is left alone."""
        with self._lock:
            order = self._live()
            if order is not None and (order.leader, order.term) == (release.leader, release.term):
                self._served = order.digest if release.served and self._state == "held" else None
                self._order = None
                # a renewal that comes late is of a term that is over
                self._term = release.term + 1
                self._wake()
            return self._hold()

    def look(self) -> Hold:
        """The order that is here and where the local checkpoint is."""
        with self._lock:
            self._heard = self._clock()
            return self._hold()

    def hold(self) -> Hold:
        """As `look`, for the host's own status."""
        with self._lock:
            return self._hold()

    def status(self) -> GroupStatus:
        hold, heard = self.hold(), self._heard
        return GroupStatus(
            role="follower",
            leader=hold.leader,
            state=hold.state,
            ordered_version=hold.version,
            reason=hold.reason,
            lease_seconds_left=hold.seconds_left,
            heard_seconds_ago=None if heard is None else self._clock() - heard,
        )

    def wanted(self) -> Order | None:
        with self._lock:
            return self._live()

    def answer(self, wanted: Order, state: HoldState, reason: str = "") -> None:
        """What the work on it came to; ignored when something else is wanted by now."""
        with self._lock:
            if self._live() is wanted:
                self._state, self._reason = state, reason[:REASON_LIMIT]
                self._grant = secrets.token_hex(16) if state == "held" else ""

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
            self._closed, self._order = True, None

    def _live(self) -> Order | None:
        if self._clock() >= self._expires:
            self._order = None
        return self._order

    def _hold(self) -> Hold:
        order, here = self._live(), self._here
        hold = Hold(leader=self._leader, term=self._term)
        if here is not None:
            hold = replace(hold, local_version=here.version, local_digest=here.digest, local_root=here.root)
        if order is None:
            return hold
        return replace(
            hold,
            state=self._state,
            phase=order.phase,
            version=order.version,
            reason=self._reason,
            grant=self._grant,
            seconds_left=self._expires - self._clock(),
        )


class GroupFollower:
    """Carries out the orders that `post` takes. Used by the work thread alone."""

    def __init__(self, sync: Sync, post: Post) -> None:
        self._sync, self.post = sync, post
        self._kept: Order | None = None
        self._lock: FileLock | None = None

    @property
    def is_still(self) -> bool:
        """Nothing may be written: the local checkpoint is held."""
        return self._lock is not None

    def close(self) -> None:
        # before others may write here: the HTTP side answers for a while yet
        self.post.close()
        self._let_go()

    def step(self) -> HostStatus:
        """Towards what is wanted now. Raises what `sync_once` raises."""
        wanted = self.post.wanted()
        if wanted is not None and wanted is self._kept:
            return self._sync.status
        self._let_go()
        served, local = self.post.take_served(), self._sync.updater.local
        if served is not None and local is not None and local.state.position.digest == served:
            self._sync.updater.forget_undo()
        try:
            status = self._sync.sync_once(wanted)
            if wanted is not None:
                self._keep(wanted, status)
        except Exception as error:
            # whatever it is: the leader and the other hosts wait for an answer
            if wanted is not None:
                state: HoldState = "refused" if isinstance(error, Refused) else "failed"
                self.post.answer(wanted, state, str(error) or type(error).__name__)
            raise
        finally:
            self._show()
        return status

    def _keep(self, wanted: Order, status: HostStatus) -> None:
        """Answers, and remembers what is to be left as it is."""
        done = self._stand_still(wanted) if wanted.phase == "hold" else self._sync.is_prepared
        if not done:
            reason = "; ".join(status.degraded) or f"version {wanted.version} is not reached"
            self.post.answer(wanted, "refused", reason)
            return
        self._kept = wanted
        self.post.answer(wanted, "held" if wanted.phase == "hold" else "prepared")

    def _stand_still(self, order: Order) -> bool:
        """Takes the shared lock; False when the local version is not the wanted one."""
        local, position = self._sync.updater.local, self._sync.host.position
        if local is None or position is None or not order.is_at(position):
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

    def _show(self) -> None:
        self.post.is_at(self._sync.host.position)

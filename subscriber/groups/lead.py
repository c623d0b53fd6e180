"""The leader's side of an engine group: every other host prepared, held, asked again, released.

A thread per member repeats the order until it ends, which keeps the leases; the work thread and
the engines' threads only wait for what the answers say.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from weightcast.shared.base.errors import EngineFailed, Refused, RetryLater
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.checkpoint.state.state import LocalState, Position
from weightcast.subscriber.groups.messages import AdaptersUsed, Hold, Order, Release
from weightcast.subscriber.status import GroupStatus, MemberStatus

if TYPE_CHECKING:
    # an HTTP client takes long to import
    from weightcast.subscriber.groups.client import MemberClient

ASK_FIRST, ASK_LONGEST = 0.02, 1.0
_LOOK_EVERY = 0.1
PATIENCE = 10.0
"""seconds for a member that does not answer"""
TERM_ROOM = 1 << 42
"""above the first term, which is a time in milliseconds: a hundred years that the clock may have been set
back since an earlier process of this leader. Far below what an order can carry; the next process's bound is
higher."""
Grants = Mapping[str, str]
"""by the member's URL"""


@dataclass(frozen=True)
class GroupPace:
    """Seconds. `lease`: that followers keep still without word of the leader. `deadline`: that they may take
    to come to a version. `patience`: for a member that does not answer."""

    lease: float = 30.0
    deadline: float = 600.0
    patience: float = PATIENCE


@dataclass(frozen=True)
class Seen:
    """`astray`: a member is reached and is not at the leader's version; `differs`: in its bytes, perhaps."""

    astray: bool = False
    differs: bool = False
    troubles: tuple[str, ...] = ()


class _Line:
    """What is known of a member. Used under its leader's lock."""

    def __init__(self, member: MemberClient) -> None:
        self.member = member
        self.expect(0.0)

    def expect(self, now: float) -> None:
        """What it answered before counts no more."""
        self.hold: Hold | None = None
        self.failure = "not asked yet"
        self.asked = 0
        """how many times the order had been changed or put again when the last answer's question was sent"""
        self.answered = now
        self.next_pause = ASK_FIRST

    def learn(self, answer: Hold | EngineFailed, asks: int, now: float) -> None:
        self.asked = asks
        if isinstance(answer, EngineFailed):
            self.failure = answer.message
        else:
            self.hold, self.failure, self.answered = answer, "", now

    def pause(self, order: Order) -> float:
        """Until it is asked again."""
        most = order.seconds / 3
        if self.is_in(order):
            return most
        self.next_pause = min(self.next_pause * 1.5, ASK_LONGEST)
        return min(self.next_pause, most)

    def is_in(self, order: Order) -> bool:
        """Whether the last answer says that the order is carried out."""
        hold = self.hold
        if self.failure or hold is None or not hold.answers(order):
            return False
        if order.phase == "prepare":
            return hold.state == "prepared"
        return hold.state == "held" and bool(hold.grant) and hold.is_at(order)

    def trouble(self, order: Order) -> str:
        """Why it is not, for people."""
        hold, name = self.hold, f"group member {self.member.url}"
        if self.failure or hold is None:
            return f"{name}: {self.failure}"
        if hold.leader not in ("", order.leader):
            return f"{name} is held by another leader, {hold.leader}"
        return f"{name} is not at version {order.version}: {hold.reason or f'it is {hold.state}'}"

    def status(self) -> MemberStatus:
        hold = self.hold
        return MemberStatus(
            url=self.member.url,
            state="unknown" if hold is None else hold.state,
            version=None if hold is None else hold.local_version,
            reason=self.failure or ("" if hold is None else hold.reason),
            seconds_left=None if hold is None else hold.seconds_left,
        )


class Lead:
    """Of no members: every wait ends at once. `gathering`, `await_prepared`, `hold` and `look` are called by
    the work thread, `standing` and `stood` by threads of engines. `wait(seconds)` may raise to give up."""

    def __init__(
        self,
        members: Sequence[MemberClient] = (),
        *,
        name: str = "leader",
        pace: GroupPace | None = None,
        wait: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        first_term: int = 0,
    ) -> None:
        self.members = tuple(members)
        self.hindered = False
        """a reload of the present gathering did not count, or was not begun, for a member's sake"""
        self.wait = wait
        self._name, self._clock = name, clock
        self._pace = GroupPace() if pace is None else pace
        self._term = first_term
        self._most_term = first_term + TERM_ROOM
        self._served = False
        self._changed = threading.Condition()
        self._lines = tuple(map(_Line, self.members))
        self._order: Order | None = None
        self._asks = 0

    def close(self) -> None:
        for member in self.members:
            member.close()

    def status(self) -> GroupStatus | None:
        """As last heard. Called by any thread."""
        with self._changed:
            members = tuple(line.status() for line in self._lines)
        return GroupStatus(role="leader", members=members) if members else None

    @contextmanager
    def gathering(self, version: int, state: LocalState) -> Iterator[None]:
        """While in it, members work towards `version` and are then held; after it they are free."""
        if not self.members:
            yield
            return
        self.hindered = self._served = False
        self._begin(version, "" if state.foreign else state.run_id)
        threads = [
            threading.Thread(target=self._keep_asking, args=(line,), name="group", daemon=True)
            for line in self._lines
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            with self._changed:
                order, self._order = self._order, None
                self._changed.notify_all()
            for thread in threads:
                thread.join()
            if order is not None:
                release = Release(order.leader, order.term, self._served)
                self._ask_all(lambda member: member.release(release))
                failpoint("group.released")

    def _begin(self, version: int, run_id: str) -> None:
        began = self._clock()
        with self._changed:
            for line in self._lines:
                line.expect(began)
            self._put(
                Order(self._name, self._next_term(), "prepare", version, run_id, seconds=self._pace.lease)
            )

    def await_prepared(self) -> None:
        """Raises Refused when a member does not take the version, RetryLater when one does not answer or is
        not ready in time."""
        if self.members:
            self._await()
            failpoint("group.prepared")

    def hold(self, position: Position) -> None:
        """Returns when every member is at `position` and holds it. Raises as `await_prepared`."""
        with self._changed:
            order = self._order
            if order is None:
                return
            term = order.term if order.version == position.version else self._next_term()
            held = replace(order, term=term, phase="hold", version=position.version)
            self._put(replace(held, digest=position.digest, root=position.root))
        self._await()
        failpoint("group.held")

    def serves(self) -> None:
        """An engine took the version that is held: members may drop the way back."""
        self._served = True

    def standing(self) -> Grants:
        """All members' grants, before a reload. Raises EngineFailed when not all stand still."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._held()) == len(self.members), self._pace.patience)
            held = self._held()
            if len(held) < len(self.members):
                raise self._hindrance("not every host of the group holds the version")
            return held

    def stood(self, grants: Grants) -> None:
        """After a reload: raises EngineFailed unless every member held its version since it gave its
        grant."""
        with self._changed:
            self._asks += 1
            asks = self._asks
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._have_answered(asks), self._pace.lease)
            if not self._have_answered(asks) or self._held() != grants:
                raise self._hindrance("a host of the group did not hold the version during the reload")
        failpoint("group.stood")

    def _have_answered(self, asks: int) -> bool:
        return all(line.asked >= asks and not line.failure for line in self._lines)

    def _held(self) -> dict[str, str]:
        order = self._order
        if order is None or order.phase != "hold":
            return {}
        lines = [line for line in self._lines if line.is_in(order)]
        return {line.member.url: line.hold.grant for line in lines if line.hold is not None}

    def _hindrance(self, what: str) -> EngineFailed:
        self.hindered = True
        order = self._order
        reasons = [line.trouble(order) for line in self._lines if order and not line.is_in(order)]
        return EngineFailed("; ".join([what, *reasons]), remedy="the reload is repeated under a new hold")

    def look(self, position: Position) -> Seen:
        """Asks every member once where it is."""
        if not self.members:
            return Seen()
        self._ask_all(lambda member: member.look())
        holds = [line.hold for line in self._lines if line.hold is not None and not line.failure]
        return Seen(
            astray=any(not hold.is_at(position) for hold in holds),
            differs=any(not position.root or hold.local_root != position.root for hold in holds),
            troubles=tuple(
                f"group member {line.member.url}: {line.failure}" for line in self._lines if line.failure
            ),
        )

    def share_adapters(self, labels: Iterable[str]) -> Mapping[str, Mapping[str, object]]:
        """Tells every member which exported adapters the engines use. Returns what each has exported: digests
        by label, by the member's URL. Raises EngineFailed."""
        used = AdaptersUsed(tuple(sorted(labels)))
        return {member.url: member.adapters(used) for member in self.members}

    def _next_term(self) -> int:
        self._term += 1
        return self._term

    def _put(self, order: Order) -> None:
        """Members hear of it at once. The lock is held."""
        self._order = order
        self._asks += 1
        for line in self._lines:
            line.next_pause = ASK_FIRST
        self._changed.notify_all()

    def _ask_all(self, ask: Callable[[MemberClient], Hold]) -> None:
        """Side by side: a hanging member costs its own time only."""
        with ThreadPoolExecutor(len(self.members), thread_name_prefix="group") as pool:
            answers = list(pool.map(lambda member: _answer(lambda: ask(member)), self.members))
        with self._changed:
            for line, answer in zip(self._lines, answers, strict=True):
                self._learn(line, answer, 0)

    def _keep_asking(self, line: _Line) -> None:
        while self._ask(line):
            pass

    def _ask(self, line: _Line) -> bool:
        """Once, and waits until the member is to be asked again; False when the order has ended."""
        with self._changed:
            order, asks = self._order, self._asks
        if order is None:
            return False
        answer = _answer(lambda: line.member.order(order))
        with self._changed:
            self._learn(line, answer, asks)
            self._outdo(line)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._order is None or self._asks != asks, line.pause(order))
        return True

    def _learn(self, line: _Line, answer: Hold | EngineFailed, asks: int) -> None:
        if isinstance(answer, Hold) and answer.leader == self._name and answer.term > self._most_term:
            answer = EngineFailed(f"it answers with term {answer.term}, which this leader never came to")
        line.learn(answer, asks, self._clock())

    def _outdo(self, line: _Line) -> None:
        """A member that knows a higher term of ours has it from before this process."""
        order, hold = self._order, line.hold
        if order is None or hold is None or line.failure or hold.leader != order.leader:
            return
        if hold.term > order.term:
            self._term = max(self._term, hold.term)
            self._put(replace(order, term=self._next_term()))

    def _await(self) -> None:
        deadline = self._clock() + self._pace.deadline
        while True:
            self.wait(0.0)
            with self._changed:
                order = self._order
                if order is None or all(line.is_in(order) for line in self._lines):
                    return
                self._judge(order, deadline)
                self._changed.wait(_LOOK_EVERY)

    def _judge(self, order: Order, deadline: float) -> None:
        """Raises when waiting on is of no use."""
        now = self._clock()
        for line in self._lines:
            if line.is_in(order):
                continue
            hold = line.hold
            if hold is not None and not line.failure and hold.answers(order) and hold.state == "refused":
                raise Refused(line.trouble(order), remedy="nothing was changed here; see that host's log")
            silent = bool(line.failure) and now - line.answered >= self._pace.patience
            if now >= deadline or silent:
                raise RetryLater(line.trouble(order), remedy="see that host's subscriber; it is asked again")


def _answer(ask: Callable[[], Hold]) -> Hold | EngineFailed:
    try:
        return ask()
    except EngineFailed as failure:
        return failure

"""Tells an engine that restarted from several processes behind one address.

A process that was replaced never comes back. Where an identity that was seen before answers again, two or
more processes share the address, and an order reaches one of them. Every question has a connection of its
own (`wire`), so that a load balancer may answer each from another process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

from weightcast.subscriber.engines.base import Misconfigured

ASKED = 8
"""times at the first look, and after a change: a balancer that picks one of two at random shows only one of
them in 1 of 128 cases"""
STEADY = 24
"""equal answers in a row after which one process is believed in again"""
_REMEMBERED = 64
T = TypeVar("T")


class SeveralProcesses(Misconfigured):
    unfit = True

    def __init__(self, url: str) -> None:
        super().__init__(
            f"two or more processes answer at {url} (a load balancer?)",
            remedy="give each replica its own --engine with its own address",
        )


class Identities:
    """Of one address. `lasting`: an identity is never used twice, so that all earlier ones are remembered;
    labels of weights may come back between two looks, but not within one."""

    def __init__(self, url: str, *, lasting: bool = True, times: int = 2) -> None:
        """`times`: that it is asked at a usual look."""
        self._url = url
        self._lasting = lasting
        self._times = times
        self._seen = deque[str](maxlen=_REMEMBERED)
        self._now: str | None = None
        self._several = False
        self._equal = 0

    def read(self, ask: Callable[[], T], identity: Callable[[T], str | None]) -> T:
        """The last answer; where it has no identity there is nothing to compare. Raises SeveralProcesses, and
        what `ask` raises."""
        before = self._now
        if not self._lasting:
            self._forget_all_but(before)
        for number in range(1, ASKED + 1):
            answer = ask()
            found = identity(answer)
            self._note(found)
            if found is None or (number >= self._times and self._now == before) or self._returned:
                break
        if self._several:
            raise SeveralProcesses(self._url)
        return answer

    @property
    def _returned(self) -> bool:
        return self._several and self._equal == 0

    def _note(self, found: str | None) -> None:
        if found is None:
            return
        if found == self._now:
            self._equal += 1
        else:
            self._several |= found in self._seen
            self._equal = 0
            self._now = found
            if found not in self._seen:
                self._seen.append(found)
        if self._several and self._equal >= STEADY:
            self._several = False
            self._forget_all_but(found)

    def _forget_all_but(self, one: str | None) -> None:
        self._seen = deque([] if one is None else [one], _REMEMBERED)

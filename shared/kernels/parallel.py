"""Ordered, bounded parallel work: results in input order."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Item = TypeVar("Item")
Result = TypeVar("Result")

SMALL_RESULTS = 8
"""items of a thread where their results take no memory to speak of"""


def ordered(
    work: Callable[[Item], Result], items: Iterable[Item], threads: int, *, each: int = 2
) -> Iterator[Result]:
    """`work(item)` for each item, in order. `threads` <= 1 runs in the caller. The first error stops the
    rest. Memory: at most `each * threads + 1` results exist at once. `each`: items of a thread that are begun
    or wait for it, so that it has one while the result of a slow one, or who takes results, is waited for.

    The caller is one of the threads, and works instead of waiting: to be woken for each result takes from the
    processors, above all virtual ones, and from those who hold the GIL."""
    if threads <= 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(threads - 1, thread_name_prefix="chunk") as pool:
        running: deque[_Job[Item, Result]] = deque()
        try:
            for item in items:
                running.append(_Job(work, item, pool))
                if len(running) > each * threads:
                    yield _taken(running)
            while running:
                yield _taken(running)
        finally:
            for job in running:
                job.future.cancel()


class _Job(Generic[Item, Result]):
    def __init__(self, work: Callable[[Item], Result], item: Item, pool: ThreadPoolExecutor) -> None:
        self._work, self._item = work, item
        self.future: Future[Result] = pool.submit(work, item)

    def done_here(self) -> bool:
        """Whether it had not been begun."""
        if not self.future.cancel():
            return False
        self.future = Future()
        try:
            self.future.set_result(self._work(self._item))
        except Exception as error:
            self.future.set_exception(error)
        return True


def _taken(running: deque[_Job[Item, Result]]) -> Result:
    """The first one's result."""
    first = running.popleft()
    if not first.done_here():
        for job in running:
            if first.future.done():
                break
            job.done_here()
    return first.future.result()


Scalar = TypeVar("Scalar", bound=np.generic)


class _Room:
    """Lent through a window: an array that views of it refer to, and that lives as long as one of them. numpy
    would let them refer to another array behind it, but what is there is none."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = np.empty(size, np.uint8).data
        self._window: weakref.ref[NDArray[np.uint8]] | None = None

    @property
    def is_free(self) -> bool:
        return self._window is None or self._window() is None

    def window(self) -> NDArray[np.uint8]:
        window: NDArray[np.uint8] = np.asarray(self._memory)
        self._window = weakref.ref(window)
        return window


class Scratch(threading.local):
    def __init__(self) -> None:
        self._bytes: dict[str, NDArray[np.uint8]] = {}
        self._lent: dict[str, list[_Room]] = {}

    def take(self, name: str, dtype: type[Scalar] | np.dtype[Scalar], count: int) -> NDArray[Scalar]:
        """Uninitialised; overwritten by the thread's next `take` of the same name."""
        size = count * np.dtype(dtype).itemsize
        room = self._bytes.get(name)
        if room is None or len(room) < size:
            room = self._bytes[name] = np.empty(size, np.uint8)
        return room[:size].view(dtype)

    def lend(self, name: str, dtype: type[Scalar] | np.dtype[Scalar], count: int) -> NDArray[Scalar]:
        """As `take`, but other memory as long as anyone still holds a view of what was lent."""
        size = count * np.dtype(dtype).itemsize
        return self._free_room(self._lent.setdefault(name, []), size).window()[:size].view(dtype)

    def _free_room(self, rooms: list[_Room], size: int) -> _Room:
        for number, room in enumerate(rooms):
            if room.is_free:
                if room.size < size:
                    rooms[number] = _Room(size)
                return rooms[number]
        rooms.append(_Room(size))
        del rooms[:-_MOST_ROOMS]  # who holds those that go keeps them
        return rooms[-1]


_MOST_ROOMS = 3
"""of one name that are kept to be lent again"""
_SCRATCH = Scratch()


def scratch() -> Scratch:
    """This thread's."""
    return _SCRATCH

"""Parallel work on chunks: results in input order, bounded memory, buffers that each thread reuses."""

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
"""items per thread if their results are small"""


def ordered(
    work: Callable[[Item], Result], items: Iterable[Item], threads: int, *, each: int = 2
) -> Iterator[Result]:
    """`work(item)` for each item, in order. `threads` <= 1 runs in the caller. The first error stops the
    rest. Memory: at most `each * threads + 1` results exist at once. `each`: items per
    thread that run or wait, so that no thread idles behind a slow item or a slow consumer.

    The caller is one of the threads and works instead of waiting: a wake-up per result costs time on virtual
    CPUs and contends for the GIL."""
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
        """Runs it in the caller unless a thread has started it; whether it did."""
        if not self.future.cancel():
            return False
        self.future = Future()
        try:
            self.future.set_result(self._work(self._item))
        except Exception as error:
            self.future.set_exception(error)
        return True


def _taken(running: deque[_Job[Item, Result]]) -> Result:
    """The result of the first job."""
    first = running.popleft()
    if not first.done_here():
        for job in running:
            if first.future.done():
                break
            job.done_here()
    return first.future.result()


Scalar = TypeVar("Scalar", bound=np.generic)


class _Buffer:
    """A buffer lent through a window: an array that lives as long as any view of it. The memory behind it is
    a memoryview, so numpy makes the window, not a deeper array, the base of those views."""

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
        self._lent: dict[str, list[_Buffer]] = {}

    def take(self, name: str, dtype: type[Scalar] | np.dtype[Scalar], count: int) -> NDArray[Scalar]:
        """Uninitialised; the thread's next `take` of the same name overwrites it."""
        size = count * np.dtype(dtype).itemsize
        buffer = self._bytes.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._bytes[name] = np.empty(size, np.uint8)
        return buffer[:size].view(dtype)

    def lend(self, name: str, dtype: type[Scalar] | np.dtype[Scalar], count: int) -> NDArray[Scalar]:
        """As `take`, but never memory that a view still refers to."""
        size = count * np.dtype(dtype).itemsize
        return self._free_buffer(self._lent.setdefault(name, []), size).window()[:size].view(dtype)

    def _free_buffer(self, buffers: list[_Buffer], size: int) -> _Buffer:
        for number, buffer in enumerate(buffers):
            if buffer.is_free:
                if buffer.size < size:
                    buffers[number] = _Buffer(size)
                return buffers[number]
        buffers.append(_Buffer(size))
        del buffers[:-_MOST_BUFFERS]  # views of dropped buffers keep them alive
        return buffers[-1]


_MOST_BUFFERS = 3
"""buffers kept per name"""
_SCRATCH = Scratch()


def scratch() -> Scratch:
    """This thread's."""
    return _SCRATCH

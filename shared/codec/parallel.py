"""Ordered, bounded parallel work: results in input order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

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

"""Ordered, bounded parallel work: results in input order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

SMALL_RESULTS = 8
"""items of a thread where their results take no memory to speak of"""


def ordered(
    work: Callable[[Item], Result], items: Iterable[Item], threads: int, *, each: int = 2
) -> Iterator[Result]:
    """`work(item)` for each item, in order. `threads` <= 1 runs in the caller. The first error stops the
    rest. Memory: at most `each * threads + 1` results exist at once. `each`: items of a thread that are begun
    or wait for it, so that it has one while the result of a slow one, or who takes results, is waited for."""
    if threads <= 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="chunk") as pool:
        running: deque[Future[Result]] = deque()
        try:
            for item in items:
                running.append(pool.submit(work, item))
                if len(running) > each * threads:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()

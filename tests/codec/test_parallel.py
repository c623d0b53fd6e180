"""Work in threads, of which the caller is one: results in order, bounded, the first error first."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from waiting import SECONDS

from weightcast.shared.kernels.parallel import ordered

THREADS = (1, 2, 3, 5)


class Gate:
    """Lets what waits for it go on; a wait that nobody ends fails."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def open(self) -> None:
        self._event.set()

    def wait(self) -> None:
        assert self._event.wait(SECONDS)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("count", [0, 1, 2, 7, 100])
def test_results_come_in_order(threads: int, count: int) -> None:
    assert list(ordered(lambda n: n * n, range(count), threads)) == [n * n for n in range(count)]


def test_the_caller_works_while_another_thread_is_slow() -> None:
    """Two threads: one of them stands in the first item until the other one has done the second."""
    second, threads = Gate(), dict[int, int]()

    def work(n: int) -> int:
        threads[n] = threading.get_ident()
        (second.wait if n == 0 else second.open)()
        return n

    assert list(ordered(work, range(2), 2)) == [0, 1]
    assert threads[0] != threads[1] and threading.get_ident() in threads.values()


@pytest.mark.parametrize("threads", [2, 4])
def test_no_more_threads_work_than_are_allowed(threads: int) -> None:
    at_work, most, lock = 0, 0, threading.Lock()
    full = threading.Barrier(threads)

    def work(n: int) -> int:
        nonlocal at_work, most
        with lock:
            at_work += 1
            most = max(most, at_work)
        full.wait(SECONDS)  # all of them are at work at once
        with lock:
            at_work -= 1
        return n

    assert list(ordered(work, range(6 * threads), threads)) == list(range(6 * threads))
    assert most == threads


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("each", [1, 2, 8])
def test_results_that_nobody_takes_are_bounded(threads: int, each: int) -> None:
    drawn = 0

    def items() -> Iterator[int]:
        nonlocal drawn
        for n in range(60):
            drawn = n
            yield n

    for n in ordered(lambda n: n, items(), threads, each=each):
        assert drawn <= n + each * threads
    assert drawn == 59


@pytest.mark.parametrize("threads", THREADS)
def test_the_first_error_in_order_is_raised_after_the_results_before_it(threads: int) -> None:
    """Also where a later item failed before it."""
    later = Gate()

    def work(n: int) -> int:
        if n == 3 and threads > 1:
            later.wait()
        if n > 3:
            later.open()
        if n >= 3:
            raise ValueError(n)
        return n

    found: list[int] = []
    with pytest.raises(ValueError, match=r"^3$"):
        list(record(found, ordered(work, range(20), threads, each=8)))
    assert found == [0, 1, 2]


def record(found: list[int], results: Iterator[int]) -> Iterator[int]:
    for n in results:
        found.append(n)
        yield n


def test_an_error_of_the_caller_waits_for_its_turn() -> None:
    """The other thread stands in an item before it, which fails later and is the one that is told."""
    begun, failed = Gate(), Gate()

    def items() -> Iterator[int]:
        yield 0
        begun.wait()
        yield 1

    def work(n: int) -> int:
        if n == 0:
            begun.open()
            failed.wait()
        failed.open()
        raise ValueError(n)

    with pytest.raises(ValueError, match=r"^0$"):
        list(ordered(work, items(), 2))


def test_an_interrupt_of_the_caller_is_not_put_off() -> None:
    """It does not wait for its item's turn."""
    interrupted, me = Gate(), threading.get_ident()

    def work(n: int) -> int:
        if threading.get_ident() == me:
            interrupted.open()
            raise KeyboardInterrupt
        interrupted.wait()
        return n

    found: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        list(record(found, ordered(work, range(8), 2)))
    assert found == []


def test_whoever_takes_no_more_results_ends_the_rest() -> None:
    begun: list[int] = []
    results = ordered(begun.append, range(1000), 3)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert len(begun) <= 1 + 2 * 3

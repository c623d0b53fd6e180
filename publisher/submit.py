"""Publications beside a trainer's step: one in flight, at most one that waits for its turn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Literal

from weightcast.publisher.publish.publish_job import PublishJob, PublishReport
from weightcast.shared.base.errors import NotInTime, Refused, RetryLater, WeightcastError
from weightcast.shared.base.options import require_option

WhenBusy = Literal["block", "newest"]
"""`block`: every submission is published, in order. `newest`: one not yet begun gives way to the next."""

Hold = Literal["tensors", "copy"]
"""What is compared: the trainer's tensors while they stand still, or a copy in host memory."""

Publish = Callable[[PublishJob], PublishReport]


class Handle:
    """One submission. Any thread may ask."""

    def __init__(self, job: PublishJob) -> None:
        self._job = job
        self._begun = False
        self._seen = False
        self._lock = threading.Lock()
        self._end: Future[PublishReport] = Future()

    def __repr__(self) -> str:
        state = "done" if self.done else "free" if self.free else "begun" if self._begun else "waiting"
        return f"<submission of step {self.step}: {state}>"

    @property
    def step(self) -> int | None:
        return self._job.step

    @property
    def free(self) -> bool:
        """Whether the tensors may be changed: they were compared, or will never be."""
        return self._job.source.free.is_set()

    @property
    def done(self) -> bool:
        return self._end.done()

    def release(self, timeout: float | None = None) -> bool:
        """Call it before the tensors change. Waits for a comparison under way, and withdraws a submission
        that has not begun. A submission that holds a copy continues.

        Returns:
            False for a withdrawn submission: its weights are not published.

        Raises:
            NotInTime: The tensors are still being compared.
        """
        if self._job.source.copied:
            return True
        if self._withdraw(f"step {self.step} was not published: its tensors changed before its turn"):
            return False
        if not self._job.source.free.wait(timeout):
            raise NotInTime(
                f"the tensors of step {self.step} are still being compared",
                remedy="wait longer; do not change them yet",
            )
        return self._begun

    def result(self, timeout: float | None = None) -> PublishReport:
        """Waits until the version is out.

        Raises:
            WeightcastError: What the publication raised.
            Refused: The submission was withdrawn, or replaced by a newer one.
            NotInTime: The publication continues.
        """
        if not wait([self._end], timeout).done:
            raise NotInTime(
                f"step {self.step} is not published yet", remedy="ask again: the publication continues"
            )
        self._seen = True
        return self._end.result()

    def _withdraw(self, reason: str) -> bool:
        return self._give_up(Refused(reason, remedy='submit with when_busy="block" to publish every step'))

    def _give_up(self, error: WeightcastError) -> bool:
        """Ends a submission that has not begun with `error`, which whoever holds it may ask for."""
        with self._lock:
            if self._begun or self.done:
                return False
            self._seen = True
            self._job.source.release_tensors()
            self._end.set_exception(error)
            return True

    def _begin(self) -> bool:
        with self._lock:
            self._begun = not self.done
            return self._begun

    def _run(self, publish: Publish) -> None:
        try:
            found = publish(self._job)
        except BaseException as error:
            self._drop()
            self._end.set_exception(error)
        else:
            self._drop()
            self._end.set_result(found)

    def _drop(self) -> None:
        """The tensors are the trainer's again, and nothing here keeps them in memory."""
        self._job.source.release_tensors()
        self._job.source.drop()


class Submissions:
    """`submit`, `drain` and `raise_unseen` belong to one thread."""

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._changed = threading.Condition()
        self._waiting: Handle | None = None
        self._running: Handle | None = None
        self._last: Handle | None = None
        self._thread: threading.Thread | None = None

    def submit(self, job: PublishJob, when_busy: WhenBusy) -> Handle:
        """Raises what the last submission raised and nobody has seen, and RetryLater where no thread can be
        started; `job` is not taken then."""
        self.make_way(when_busy)
        handle = Handle(job)
        self._take(handle)
        if when_busy == "block":
            job.source.free.wait()
        return handle

    def make_way(self, when_busy: WhenBusy) -> None:
        """Waits for what `submit` would wait for before it takes anything, and raises what it would."""
        require_option("when_busy", when_busy, WhenBusy)
        if when_busy == "block":
            self.drain()
        self.raise_unseen()

    def until_out(self, job: PublishJob) -> PublishReport:
        """Publishes and returns when the pointer names the version. What is left to do goes on in a thread of
        its own; `settle` tells what becomes of it. Only after `drain`."""
        out: Future[PublishReport] = Future()
        handle = Handle(replace(job, on_pointer_moved=out.set_result))
        self._take(handle)
        wait([out, handle._end], return_when=FIRST_COMPLETED)
        return out.result() if out.done() else handle.result()

    def settle(self) -> PublishReport | None:
        """Waits as `drain`; the last report, with all of its seconds. Raises as `raise_unseen`."""
        self.drain()
        self.raise_unseen()
        last = self._last
        return None if last is None or last._end.exception() is not None else last._end.result()

    def _take(self, handle: Handle) -> None:
        with self._changed:
            before, self._waiting = self._waiting, handle
            if before is not None:
                before._withdraw(f"step {before.step} was not published: step {handle.step} is newer")
            if self._running is None:
                self._start()

    def _start(self) -> None:
        """With the condition held. Raises RetryLater; nothing is in flight then, and nothing waits."""
        self._take_next()
        self._thread = threading.Thread(target=self._run, name="weightcast-publish", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            handle, self._running = self._running, None
            trouble = RetryLater(
                f"cannot start a thread: {error}",
                remedy="submit again; raise this process's limit of threads (nothing was published)",
            )
            if handle is not None:
                handle._give_up(trouble)
            raise trouble from error

    def _take_next(self) -> None:
        """With the condition held."""
        self._running, self._waiting = self._waiting, None
        self._changed.notify_all()

    def _run(self) -> None:
        while (handle := self._running) is not None:
            if handle._begin():
                handle._run(self._publish)
                self._last = handle
            with self._changed:
                self._take_next()

    def drain(self) -> None:
        """Waits until nothing is in flight and nothing waits; in the thread that publishes for nothing."""
        if threading.current_thread() is self._thread:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._running is None)

    def raise_unseen(self) -> None:
        """The error of the last publication that ended, if neither `result` nor this told it."""
        last = self._last
        if last is not None and not last._seen and (error := last._end.exception()) is not None:
            last._seen = True
            raise error

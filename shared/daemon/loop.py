"""A daemon: HTTP in the main thread, one work thread that steps, waits and steps again.

The loop knows nothing of the step. After any error the next step starts from the state on disk.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from weightcast.shared.base.errors import (
    EngineFailed,
    NotInTime,
    Refused,
    RetryLater,
    Stopped,
    WeightcastError,
)
from weightcast.shared.channel.channel import NoChannel
from weightcast.shared.daemon.backoff import Backoff, jittered
from weightcast.shared.daemon.hooks import end_hooks
from weightcast.shared.daemon.http import HEADER_LIMIT, Connection, backlog, drop_unread, most_connections
from weightcast.shared.daemon.logs import get_log
from weightcast.shared.daemon.metrics import error_kind
from weightcast.shared.daemon.settings import ServiceSettings
from weightcast.shared.daemon.status import Failure, LoopStatus, Snapshot
from weightcast.shared.files import durable
from weightcast.shared.files.disk_errors import disk_error

MIN_PAUSE_SECONDS = 0.05
"""no storm of events makes the loop spin faster"""
HOOK_SECONDS = 5.0
"""that a hook has at most to end with the daemon by SIGTERM"""
_ASK_SECONDS = 0.1
"""between two questions whether a step still has more time"""
CLOSE_SECONDS = 3
"""for answers on their way when the process ends"""

log = get_log("daemon")


class Stop:
    """Asked by long steps at places where they may end early."""

    def __init__(self) -> None:
        self._event = threading.Event()

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    def request(self) -> None:
        self._event.set()

    def wait(self, seconds: float | None) -> bool:
        """Waits, for ever when None; True as soon as the stop is requested."""
        return self._event.wait(seconds)


class Wakeup:
    """Cuts the pause between two steps short. What is set during a step counts for the pause after it."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def wait(self, seconds: float) -> bool:
        """Waits for a wakeup and takes it; False when `seconds` passed without one."""
        woken = self._event.wait(seconds)
        self._event.clear()
        return woken


LoopStep = Callable[[Stop], None]


def backoff_for(error: Exception) -> Backoff:
    if isinstance(error, RetryLater | NotInTime | EngineFailed):
        return Backoff(0.5, 15.0)
    if isinstance(error, WeightcastError):
        return Backoff(5.0, 120.0)
    return Backoff(1.0, 60.0)


def next_status(before: LoopStatus, error: Exception | None, poll_seconds: float) -> LoopStatus:
    """The loop's status after a step that ended with `error`, and how long to pause (without jitter)."""
    if error is None:
        return before.but(
            steps=before.steps + 1,
            failures_in_a_row=0,
            last_failure=None,
            step_began=None,
            pause_seconds=poll_seconds,
        )
    expected = isinstance(error, WeightcastError)
    in_a_row = before.failures_in_a_row + 1
    kind = error_kind(error)
    return LoopStatus(
        steps=before.steps + 1,
        failures=before.failures + expected,
        crashes=before.crashes + (not expected),
        failures_in_a_row=in_a_row,
        retries=before.retries,
        errors={**before.errors, kind: before.errors.get(kind, 0) + 1},
        last_failure=failure_of(error),
        pause_seconds=backoff_for(error).pause(in_a_row),
    )


def begun(before: LoopStatus, now: float) -> LoopStatus:
    """The loop's status when a step begins at the unix time `now`."""
    retries = before.retries + (before.failures_in_a_row > 0)
    return before.but(step_began=now, retries=retries)


def failure_of(error: BaseException) -> Failure:
    if isinstance(error, OSError):
        error = disk_error(error, "a file")
    if isinstance(error, WeightcastError):
        return Failure(error=type(error).__name__, message=error.message, remedy=error.remedy)
    return Failure(error=type(error).__name__, message=str(error), remedy="see the log for the traceback")


class Loop:
    """Runs `step` again and again in one thread until the stop is requested."""

    def __init__(
        self, step: LoopStep, wakeup: Wakeup, stop: Stop, poll_seconds: float, status: Snapshot[LoopStatus]
    ) -> None:
        self._step = step
        self._wakeup = wakeup
        self._stop = stop
        self._poll_seconds = poll_seconds
        self._status = status

    def run(self) -> None:
        while not self._stop.requested:
            self.run_once()
            self._pause(self._status.get().pause_seconds)

    def run_once(self) -> None:
        error: Exception | None = None
        self._status.set(begun(self._status.get(), time.time()))
        try:
            self._step(self._stop)
        except WeightcastError as expected:
            error = expected
            self._log_expected(expected)
        except OSError as trouble:
            error = disk_error(trouble, "a file")
            log.warning("step failed", **failure_of(error).by_name())
        except Exception as unexpected:
            error = unexpected
            log.exception("step crashed")
        self._status.set(next_status(self._status.get(), error, self._poll_seconds))

    def _log_expected(self, error: WeightcastError) -> None:
        failure, status = failure_of(error), self._status.get()
        if isinstance(error, Stopped):
            log.info("step failed", **failure.by_name())
        elif not isinstance(error, NoChannel) or status.steps > status.failures:
            log.warning("step failed", **failure.by_name())
        elif status.last_failure != failure:
            # the usual order of a first start: the publisher makes the channel
            log.info("waiting for the channel", **failure.by_name())

    def _pause(self, seconds: float) -> None:
        if not self._stop.wait(MIN_PAUSE_SECONDS):
            self._wakeup.wait(jittered(seconds))


class _Server(uvicorn.Server):
    """Calls back once it listens, and when a signal asks for the end, without ending by that signal."""

    def __init__(
        self, config: uvicorn.Config, on_started: Callable[[], None], on_signal: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._on_signal = on_signal
        self._signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals == 1:
            # Only once: a second signal may interrupt the first one's call, and events are not reentrant.
            self._on_signal()
        elif sig == signal.SIGINT:
            self.should_exit = self.force_exit = True


class _Work:
    """The work thread: on_start, loop, on_stop, all in the same thread, since locks belong to threads."""

    def __init__(
        self, loop: Loop, stop: Stop, on_start: Callable[[], None], on_stop: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._stop = stop
        self._on_start = on_start
        self._on_stop = on_stop
        self.error: Exception | None = None
        """of on_start or on_stop: ends the daemon"""
        self.death = ""
        """why the loop ended, while the HTTP side keeps reporting it"""
        self.ended = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="work", daemon=True).start()

    def give_up(self, error: Exception) -> None:
        """Instead of `start`."""
        self.error = error
        self.ended.set()
        self._stop.request()

    def _run(self) -> None:
        try:
            self._start_loop_stop()
        except Exception as error:
            self.error = error
        except BaseException as error:
            self.death = f"the work thread died: {type(error).__name__}: {error}"
            log.critical("work thread died", exc_info=True)
        finally:
            self.ended.set()
        if not self.death:
            self._stop.request()

    def _start_loop_stop(self) -> None:
        self._on_start()
        try:
            self._loop.run()
        finally:
            self._on_stop()


def run_daemon(
    app: FastAPI,
    step: LoopStep,
    wakeup: Wakeup,
    settings: ServiceSettings,
    on_start: Callable[[], None] = lambda: None,
    on_stop: Callable[[], None] = lambda: None,
    loop: Snapshot[LoopStatus] | None = None,
    stop: Stop | None = None,
    stop_time: Callable[[], float] = lambda: 0.0,
) -> None:
    """Serves `app` (from `make_app`) and runs the loop until SIGTERM, SIGINT or `stop`; returns when the
    running step has ended. `on_start` runs before the first step and `on_stop` after the last, both in the
    work thread. `loop` receives what the loop did. `stop_time`: the seconds that the running step has as long
    as this says so, where they are more than `stop_seconds`.

    Raises what `on_start` or `on_stop` raises; Refused if the address cannot be bound; NotInTime if the step
    outlives its time; WeightcastError if the work thread had died."""
    stop = Stop() if stop is None else stop
    status = Snapshot(LoopStatus()) if loop is None else loop
    work = _Work(Loop(step, wakeup, stop, settings.poll_seconds, status), stop, on_start, on_stop)
    app.state.dead = lambda: work.death
    app.state.stopping = lambda: stop.requested
    _forget_port(settings.port_file)
    with listen(settings.host, settings.port) as listener:

        def started() -> None:
            try:
                _publish_port(settings.port_file, listener)
            except OSError as error:
                work.give_up(disk_error(error, "port_file"))
            else:
                work.start()
            ender = threading.Thread(
                target=_end, args=(server, work, stop, wakeup, settings.stop_seconds, stop_time), daemon=True
            )
            ender.start()

        server = _Server(_config(app), started, stop.request)
        try:
            server.run(sockets=[listener])
        finally:
            stop.request()
            # of background threads
            end_hooks(_hook_seconds(settings.stop_seconds))
            _forget_port(settings.port_file)
    _judge(work, settings.stop_seconds)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises Refused."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, address = found[0][0], found[0][4]
        listener = socket.create_server((str(address[0]), int(address[1])), family=family, backlog=backlog())
    except OSError as error:
        raise Refused(
            f"cannot listen on {host} port {port}: {error.strerror or error}",
            remedy="choose another host or port, or stop the process that uses it",
        ) from error
    drop_unread(listener)
    return listener


def _publish_port(path: Path | None, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    if path is not None:
        durable.replace(path, f"{port}\n".encode())
    log.info("listening", host=host, port=port)


def _forget_port(path: Path | None) -> None:
    """Nobody must read the port of an earlier run."""
    if path is not None:
        path.unlink(missing_ok=True)


def _config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="asyncio",
        http=Connection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        # uvicorn refuses from this number on
        limit_concurrency=most_connections() + 1,
        backlog=backlog(),
        h11_max_incomplete_event_size=HEADER_LIMIT,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )


def _end(
    server: _Server,
    work: _Work,
    stop: Stop,
    wakeup: Wakeup,
    stop_seconds: float,
    stop_time: Callable[[], float],
) -> None:
    """HTTP goes on answering until the last step has ended or its time is up."""
    stop.wait(None)
    wakeup.set()
    began = time.monotonic()
    last = _hook_seconds(stop_seconds)
    if not work.ended.wait(stop_seconds - 2 * last):
        end_hooks(last)
        work.ended.wait(last)
    while not work.ended.is_set() and time.monotonic() - began < stop_time():
        work.ended.wait(_ASK_SECONDS)
    server.should_exit = True


def _hook_seconds(stop_seconds: float) -> float:
    """Of the time for a stop: what a hook has to end, and its step after it."""
    return min(HOOK_SECONDS, stop_seconds / 4)


def _judge(work: _Work, stop_seconds: float) -> None:
    if work.error is not None:
        raise work.error
    if work.death:
        raise WeightcastError(work.death, remedy="see the log for the traceback")
    if not work.ended.is_set():
        raise NotInTime(
            f"the running step did not end within its grace period of {stop_seconds:g} s",
            remedy="the next start finishes or undoes what it left; raise stop_seconds if this repeats",
        )
    log.info("stopped")

"""A daemon: HTTP in the main thread, one work thread that steps, waits and steps again.

The loop knows nothing of the step. After any error the next step starts from the state on disk. File events
are a hint: they shorten a pause and decide nothing (inotify sees nothing of other hosts).
"""

from __future__ import annotations

import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp
from watchdog import events
from watchdog.observers import Observer

from weightcast.shared.base.errors import (
    EngineFailed,
    NotInTime,
    Refused,
    RetryLater,
    Stopped,
    WeightcastError,
    WrongRun,
)
from weightcast.shared.channel.channel import NoChannel
from weightcast.shared.checkpoint.state.locks import EngineLoads
from weightcast.shared.daemon.hooks import end_hooks
from weightcast.shared.daemon.http import (
    CLOSE_SECONDS,
    HEADER_LIMIT,
    Connection,
    backlog,
    most_connections,
    prepare,
)
from weightcast.shared.daemon.logs import get_log
from weightcast.shared.daemon.metrics import error_kind
from weightcast.shared.daemon.settings import DaemonSettings
from weightcast.shared.daemon.status import Failure, LoopStatus, Snapshot
from weightcast.shared.daemon.timing import Backoff, jittered
from weightcast.shared.daemon.tls import read_certificate
from weightcast.shared.files import durable
from weightcast.shared.files.disk_errors import disk_error, disk_text
from weightcast.shared.files.paths import is_directory

MIN_PAUSE_SECONDS = 0.05
"""no storm of events makes the loop spin faster"""
HOOK_SECONDS = 5.0
"""that a hook has at most to end with the daemon by SIGTERM"""
_ASK_SECONDS = 0.1
"""between two questions whether a step still has more time"""

log = get_log("daemon")


Stop = threading.Event
"""Asked by long steps at places where they may end early."""


class Wakeup(threading.Event):
    """Cuts the pause between two steps short. What is set during a step counts for the pause after it."""

    def take(self, seconds: float) -> bool:
        """Waits for a wakeup and clears it; False when `seconds` passed without one."""
        woken = self.wait(seconds)
        self.clear()
        return woken


LoopStep = Callable[[Stop], None]


def backoff_for(error: Exception) -> Backoff:
    # WrongRun: what is mounted there may change
    if isinstance(error, RetryLater | NotInTime | EngineFailed | WrongRun):
        return Backoff(0.5, 15.0)
    if isinstance(error, WeightcastError):
        return Backoff(5.0, 120.0)
    return Backoff(1.0, 60.0)


def next_status(before: LoopStatus, error: Exception | None, poll_seconds: float) -> LoopStatus:
    """The loop's status after a step that ended with `error`, and how long to pause (without jitter)."""
    if error is None or isinstance(error, EngineLoads):
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
    """The work thread: on_start, then `step` again and again until the stop is requested, then on_stop; all
    in one thread, since locks belong to threads."""

    def __init__(
        self,
        step: LoopStep,
        wakeup: Wakeup,
        stop: Stop,
        poll_seconds: float,
        status: Snapshot[LoopStatus],
        on_start: Callable[[], None] = lambda: None,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._step, self._wakeup, self._stop = step, wakeup, stop
        self._poll_seconds, self._status = poll_seconds, status
        self._on_start, self._on_stop = on_start, on_stop
        self.error: Exception | None = None
        """of on_start or on_stop: ends the daemon"""
        self.death = ""
        """why the loop ended, while the HTTP side keeps reporting it"""
        self.ended = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._work, name="work", daemon=True).start()

    def give_up(self, error: Exception) -> None:
        """Instead of `start`."""
        self.error = error
        self.ended.set()
        self._stop.set()

    def _work(self) -> None:
        try:
            self._on_start()
            try:
                self.run()
            finally:
                self._on_stop()
        except Exception as error:
            self.error = error
        except BaseException as error:
            self.death = f"the work thread died: {type(error).__name__}: {error}"
            log.critical("work thread died", exc_info=True)
        finally:
            self.ended.set()
        if not self.death:
            self._stop.set()

    def run(self) -> None:
        while not self._stop.is_set():
            self.run_once()
            if not self._stop.wait(MIN_PAUSE_SECONDS):
                self._wakeup.take(jittered(self._status.get().pause_seconds))

    def run_once(self) -> None:
        error: Exception | None = None
        self._status.set(begun(self._status.get(), time.time()))
        try:
            self._step(self._stop)
        except (WeightcastError, OSError) as expected:
            error = expected if isinstance(expected, WeightcastError) else disk_error(expected, "a file")
            self._log_expected(error)
        except Exception as unexpected:
            error = unexpected
            log.exception("step crashed")
        self._status.set(next_status(self._status.get(), error, self._poll_seconds))

    def _log_expected(self, error: WeightcastError) -> None:
        failure, status = failure_of(error), self._status.get()
        if isinstance(error, Stopped | EngineLoads):
            loads = isinstance(error, EngineLoads)
            log.info("waiting for an engine" if loads else "step failed", **failure.by_name())
        elif not isinstance(error, NoChannel) or status.steps > status.failures:
            log.warning("step failed", **failure.by_name())
        elif status.last_failure != failure:
            # the usual order of a first start: the publisher makes the channel
            log.info("waiting for the channel", **failure.by_name())


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


def run_daemon(
    app: FastAPI,
    step: LoopStep,
    wakeup: Wakeup,
    settings: DaemonSettings,
    on_start: Callable[[], None] = lambda: None,
    on_stop: Callable[[], None] = lambda: None,
    loop: Snapshot[LoopStatus] | None = None,
    stop: Stop | None = None,
    stop_time: Callable[[], float] = lambda: 0.0,
    most: int | None = None,
) -> None:
    """Serves `app` (from `make_app`) and runs the loop until SIGTERM, SIGINT or `stop`; returns when the
    running step has ended. `on_start` runs before the first step and `on_stop` after the last, both in the
    work thread. `loop` receives what the loop did. `stop_time`: the seconds that the running step has as long
    as this says so, where they are more than `stop_seconds`. `most`: as of `server_config`.

    Raises what `on_start` or `on_stop` raises; Refused if the address cannot be bound; NotInTime if the step
    outlives its time; WeightcastError if the work thread had died."""
    stop = Stop() if stop is None else stop
    status = Snapshot(LoopStatus()) if loop is None else loop
    work = Loop(step, wakeup, stop, settings.poll_seconds, status, on_start, on_stop)
    # of the time for a stop: what a hook has to end, and its step after it
    hook_seconds = min(HOOK_SECONDS, settings.stop_seconds / 4)
    app.state.dead = lambda: work.death
    app.state.stopping = stop.is_set
    _forget_port(settings.port_file)
    tls = settings.server_tls()
    reason = "" if settings.tls_cert is None else read_certificate(settings.tls_cert).invalid_now
    if reason:
        log.warning("certificate not valid: callers refuse it", file=str(settings.tls_cert), reason=reason)
    with listen(settings.host, settings.port) as listener:

        def started() -> None:
            try:
                host, port = listener.getsockname()[:2]
                if settings.port_file is not None:
                    durable.replace(settings.port_file, f"{port}\n".encode())
                log.info("listening", host=host, port=port)
            except OSError as error:
                work.give_up(disk_error(error, "port_file"))
            else:
                work.start()
            threading.Thread(target=end, daemon=True).start()

        def end() -> None:
            """HTTP goes on answering until the last step has ended or its time is up."""
            stop.wait(None)
            wakeup.set()
            began = time.monotonic()
            if not work.ended.wait(settings.stop_seconds - 2 * hook_seconds):
                end_hooks(hook_seconds)
                work.ended.wait(hook_seconds)
            while not work.ended.is_set() and time.monotonic() - began < stop_time():
                work.ended.wait(_ASK_SECONDS)
            server.should_exit = True

        server = _Server(server_config(app, most, tls), started, stop.set)
        try:
            server.run(sockets=[listener])
        finally:
            stop.set()
            # of background threads
            end_hooks(hook_seconds)
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
    prepare(listener)
    return listener


def _forget_port(path: Path | None) -> None:
    """Nobody must read the port of an earlier run."""
    if path is not None:
        path.unlink(missing_ok=True)


def server_config(app: ASGIApp, most: int | None = None, tls: ssl.SSLContext | None = None) -> uvicorn.Config:
    """`most`: connections; None: as many as a daemon's HTTP side has."""
    return uvicorn.Config(
        app,
        loop="asyncio",
        http=partial(Connection, tls=tls),  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        # uvicorn refuses from this number on
        limit_concurrency=(most_connections() if most is None else most) + 1,
        backlog=backlog(),
        h11_max_incomplete_event_size=HEADER_LIMIT,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )


def _judge(work: Loop, stop_seconds: float) -> None:
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


# Without the events of reading: a daemon that polls would wake itself.
_WRITES: list[type[events.FileSystemEvent]] = [
    events.FileCreatedEvent,
    events.FileModifiedEvent,
    events.FileMovedEvent,
    events.FileDeletedEvent,
    events.FileClosedEvent,
    events.DirCreatedEvent,
    events.DirMovedEvent,
]
_JOIN_SECONDS = 2.0
_START_SECONDS = 1.0
"""A mount that hangs is watched once it answers."""


class Watcher(events.FileSystemEventHandler):
    """Context manager: sets `wakeup` when something is written in the directory `path` (not below it).
    `on_renamed` is called first, in a thread of its own, with the new name of what is renamed in it.
    A directory that does not exist yet is watched once it does. Where watching is not possible it says so in
    the log, once, and the poll goes on."""

    def __init__(
        self, path: Path, wakeup: Wakeup, on_renamed: Callable[[str], None] = lambda name: None
    ) -> None:
        self._path, self._wakeup, self._on_renamed = path, wakeup, on_renamed
        self._observer = Observer()
        self._ended = threading.Event()
        self._starting = threading.Thread(target=self._start, name="watch", daemon=True)

    def __enter__(self) -> Watcher:
        self._starting.start()
        self._starting.join(_START_SECONDS)
        return self

    def _start(self) -> None:
        try:
            while not is_directory(self._path):
                if self._ended.wait(_START_SECONDS):
                    return
            self._observer.schedule(self, str(self._path), event_filter=_WRITES)
            self._observer.start()
        except OSError as error:
            get_log("watch").warning(
                "directory cannot be watched: changes are seen at the next poll",
                path=str(self._path),
                reason=disk_text(error, self._path),
            )

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._observer.is_alive():
            self._observer.stop()
            self._observer.join(_JOIN_SECONDS)

    def on_any_event(self, event: events.FileSystemEvent) -> None:
        if isinstance(event, events.FileMovedEvent | events.DirMovedEvent) and event.dest_path:
            self._on_renamed(Path(os.fsdecode(event.dest_path)).name)
        self._wakeup.set()

"""Starts an engine while no version is patched in, and represents it towards a supervisor.

The shared patch lock is held until the engine has read its weights, so that no version is patched in under
it; a thread of its own asks for that, so that neither the deadline nor a signal waits for an answer. Signals
go on to the engine, its exit code comes back. An error here ends the engine: nobody else would know of it.
Orphans are reaped, since this may be process 1 of a container.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from weightcast.shared.base.errors import NeedsReseed, Refused, RetryLater
from weightcast.shared.checkpoint.local_checkpoint import LocalPaths, refuse_foreign
from weightcast.shared.checkpoint.state.locks import FileLock, owner_text
from weightcast.shared.checkpoint.state.state import LocalState
from weightcast.shared.checkpoint.verify.inspect import require_loadable
from weightcast.shared.daemon.environment import without_secrets
from weightcast.shared.files.paths import is_directory

PROBE_SECONDS = 1.0
_TRY_SECONDS = 0.5
_NOTED_SECONDS = 1.0
"""until a signal is seen at the latest that another thread got"""
_FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
    signal.SIGWINCH,
)
_TAKEN = (*_FORWARDED, signal.SIGCHLD)
KILLED = 128
"""plus the signal's number: the exit code of an engine that a signal ended, as shells say it"""


def run_engine(
    local: Path,
    command: Sequence[str],
    loaded: Callable[[], bool],
    load_seconds: float,
    wait_seconds: float = 0.0,
    tell: Callable[[str], None] = lambda text: None,
) -> int:
    """The exit code of the engine. `loaded`: whether it has read its weights; `load_seconds`: the lock is
    given up after; `wait_seconds`: how long the checkpoint may be unfinished before the start. Raises
    RetryLater or NeedsReseed when the checkpoint is not to be loaded, and Refused when the command cannot be
    started."""
    lock = FileLock(LocalPaths(local).patch)
    state = hold_still(local, lock, wait_seconds)
    try:
        tell(f"version {state.position.version} is locked while the engine loads")
        with _signals_taken() as noted:
            engine = _Child(_spawn(command), noted)
            try:
                if _loads(engine, loaded, load_seconds):
                    lock.release()
                    tell("the engine has loaded: versions may come")
                elif engine.code is None:
                    lock.release()
                    tell(f"the engine has not loaded within {load_seconds:g} s: versions come all the same")
                return engine.wait()
            except BaseException:
                lock.release()
                engine.end()
                raise
    finally:
        lock.release()


def hold_still(local: Path, lock: FileLock, seconds: float) -> LocalState:
    """Takes the lock, shared, over a checkpoint that may be loaded; waits up to `seconds` for one. Raises
    Refused for a directory that will never hold one."""
    refuse_foreign(LocalPaths(local))
    deadline = time.monotonic() + seconds
    while True:
        try:
            if not is_directory(lock.path.parent):
                raise RetryLater(
                    f"{local} is not seeded yet", remedy="run `weightcast sync`, or start the subscriber"
                )
            lock.acquire(shared=True, text=f"run-engine, {owner_text()}")
            return require_loadable(local)
        except BaseException as error:
            lock.release()
            if not isinstance(error, RetryLater | NeedsReseed) or time.monotonic() >= deadline:
                raise
        time.sleep(_TRY_SECONDS)


def _spawn(command: Sequence[str]) -> int:
    """The process id of the engine; it shares standard streams and process group."""
    try:
        return os.posix_spawnp(
            command[0], list(command), without_secrets(os.environ), setsigmask=(), setsigdef=_TAKEN
        )
    except OSError as error:
        raise Refused(
            f"{command[0]} cannot be started: {error.strerror or error}", remedy="check its path and mode"
        ) from error


@contextmanager
def _signals_taken() -> Iterator[deque[int]]:
    """Signals are blocked and taken one by one: nothing that arrives between two lines is lost. Threads that
    numpy has started do not block them: what one of these gets is noted, where it would end this process, and
    process 1 would never hear of it."""
    noted: deque[int] = deque()
    handlers = {one: signal.signal(one, lambda number, frame: noted.append(number)) for one in _TAKEN}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TAKEN)
    try:
        yield noted
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for one, handler in handlers.items():
            signal.signal(one, handler)


class _Child:
    """The engine's process. `noted`: signals that other threads got."""

    def __init__(self, pid: int, noted: deque[int]) -> None:
        self.pid = pid
        self.code: int | None = None
        """the exit code once it has ended"""
        self._noted = noted

    def attend(self, seconds: float) -> None:
        """Takes a signal, if one comes in time, and looks whether the engine has ended."""
        info = signal.sigtimedwait(_TAKEN, min(seconds, _NOTED_SECONDS))
        # A terminal's signals (positive codes: by the kernel) have reached the whole process group already.
        if info is not None and info.si_code <= 0:
            self._noted.append(info.si_signo)
        while self._noted:
            number = self._noted.popleft()
            if number != signal.SIGCHLD:
                os.kill(self.pid, number)
        self._reap()

    def wait(self) -> int:
        while self.code is None:
            self.attend(_NOTED_SECONDS)
        return self.code

    def end(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGTERM)
            self.wait()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                ended = os.waitstatus_to_exitcode(status)
                self.code = KILLED - ended if ended < 0 else ended


def _loads(engine: _Child, has_loaded: Callable[[], bool], seconds: float) -> bool:
    """Whether the engine has loaded before its time for that is up, or it has ended."""
    deadline = time.monotonic() + seconds
    loaded, ended = threading.Event(), threading.Event()

    def ask() -> None:
        while not loaded.is_set() and not ended.wait(PROBE_SECONDS):
            if has_loaded():
                loaded.set()

    threading.Thread(target=ask, name="asking", daemon=True).start()
    try:
        while engine.code is None and not loaded.is_set() and time.monotonic() < deadline:
            engine.attend(PROBE_SECONDS)
    finally:
        ended.set()
    return engine.code is None and loaded.is_set()

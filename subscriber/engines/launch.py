"""Starts an engine while the local checkpoint stands still, and stands in for it towards a supervisor.

The shared patch lock is held until the engine has read its weights, so that no version is patched in under
it. Signals go on to the engine, its exit code comes back. They are blocked and taken one by one: nothing that
arrives between two lines is lost. Orphans are reaped, since this may be process 1 of a container.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from weightcast.shared.errors import NeedsReseed, Refused, RetryLater
from weightcast.shared.files.entries import is_directory
from weightcast.shared.local.loadable import require_loadable
from weightcast.shared.local.local_checkpoint import LocalPaths
from weightcast.shared.local.locks import FileLock, owner_text
from weightcast.shared.local.state import LocalState
from weightcast.shared.service.secrets import without_secrets

PROBE_SECONDS = 1.0
_TRY_SECONDS = 0.5
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


@dataclass(frozen=True)
class Launch:
    """`loaded` says whether the engine has read its weights; `load_seconds`: the lock is given up after;
    `wait_seconds`: how long the checkpoint may be unfinished before the start."""

    local: Path
    command: Sequence[str]
    loaded: Callable[[], bool]
    load_seconds: float
    wait_seconds: float = 0.0
    tell: Callable[[str], None] = lambda text: None


def run_engine(launch: Launch) -> int:
    """The engine's exit code. Raises RetryLater or NeedsReseed when the checkpoint is not to be loaded, and
    Refused when the command cannot be started."""
    lock = FileLock(LocalPaths(launch.local).patch)
    state = hold_still(launch.local, lock, launch.wait_seconds)
    try:
        launch.tell(f"version {state.position.version} stands still while the engine loads")
        with _signals_taken():
            return _attend(_spawn(launch.command), lock, launch)
    finally:
        lock.release()


def hold_still(local: Path, lock: FileLock, seconds: float) -> LocalState:
    """Takes the lock, shared, over a checkpoint that may be loaded; waits up to `seconds` for one."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return _hold(local, lock)
        except (RetryLater, NeedsReseed):
            if time.monotonic() >= deadline:
                raise
        time.sleep(_TRY_SECONDS)


def _hold(local: Path, lock: FileLock) -> LocalState:
    if not is_directory(lock.path.parent):
        raise RetryLater(
            f"{local} is not seeded yet", remedy="run `weightcast sync`, or start the subscriber"
        )
    lock.acquire(shared=True, text=f"run-engine, {owner_text()}")
    try:
        return require_loadable(local)
    except BaseException:
        lock.release()
        raise


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
def _signals_taken() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TAKEN)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _attend(child: int, lock: FileLock, launch: Launch) -> int:
    deadline = time.monotonic() + launch.load_seconds
    while True:
        info = signal.sigtimedwait(_TAKEN, PROBE_SECONDS) if lock.held else signal.sigwaitinfo(_TAKEN)
        if info is not None and info.si_signo != signal.SIGCHLD:
            _forward(child, info)
        code = _reap(child)
        if code is not None:
            return code
        if lock.held:
            _release_when_loaded(lock, launch, deadline)


def _forward(child: int, info: signal.struct_siginfo) -> None:
    # A terminal's signals (positive codes: by the kernel) have reached the whole process group already.
    if info.si_code <= 0:
        os.kill(child, info.si_signo)


def _reap(child: int) -> int | None:
    """The child's exit code once it has ended."""
    code: int | None = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == child:
            ended = os.waitstatus_to_exitcode(status)
            code = KILLED - ended if ended < 0 else ended


def _release_when_loaded(lock: FileLock, launch: Launch, deadline: float) -> None:
    if launch.loaded():
        lock.release()
        launch.tell("the engine has loaded: versions may come")
    elif time.monotonic() > deadline:
        lock.release()
        launch.tell(f"the engine has not loaded within {launch.load_seconds:g} s: versions come all the same")

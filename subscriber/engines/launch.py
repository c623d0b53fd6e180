"""Starts an engine while no version is patched in.

The engine takes this process's place: signals, exit code and standard streams are its own. A process that is
left behind holds the shared patch lock until the engine has read its weights, has ended, or its time is up.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from weightcast.shared.base.errors import NeedsReseed, Refused, RetryLater
from weightcast.shared.checkpoint.local_checkpoint import LocalPaths, refuse_foreign
from weightcast.shared.checkpoint.state.locks import ENGINE_STARTER, FileLock, owner_text
from weightcast.shared.checkpoint.state.state import LocalState
from weightcast.shared.checkpoint.verify.inspect import require_loadable
from weightcast.shared.daemon.environment import without_secrets
from weightcast.shared.files.paths import is_directory

PROBE_SECONDS = 1.0
_TRY_SECONDS = 0.5


def run_engine(
    local: Path,
    command: Sequence[str],
    loaded: Callable[[], bool],
    load_seconds: float,
    wait_seconds: float = 0.0,
    tell: Callable[[str], None] = lambda text: None,
) -> NoReturn:
    """Becomes the engine. `loaded`: whether it has read its weights; `load_seconds`: the lock is given up
    after; `wait_seconds`: how long the checkpoint may be unfinished before the start. Raises RetryLater or
    NeedsReseed when the checkpoint is not to be loaded, and Refused when the command cannot be started."""
    if shutil.which(command[0]) is None:
        raise Refused(f"{command[0]} cannot be started: no such command", remedy="check its path and mode")
    lock = FileLock(LocalPaths(local).patch)
    state = hold_still(local, lock, wait_seconds)
    tell(f"version {state.position.version} is locked while the engine loads")
    held, engine = lock.duplicate(), os.pidfd_open(os.getpid())
    _leave_behind(lambda: _keep(held, engine, loaded, load_seconds, tell))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(command[0], list(command), without_secrets(os.environ))


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
            lock.acquire(shared=True, text=f"{ENGINE_STARTER}, {owner_text()}")
            return require_loadable(local)
        except BaseException as error:
            lock.release()
            if not isinstance(error, RetryLater | NeedsReseed) or time.monotonic() >= deadline:
                raise
        time.sleep(_TRY_SECONDS)


def _leave_behind(work: Callable[[], None]) -> None:
    """Does it in a process that is nobody's child."""
    with warnings.catch_warnings():
        # Python 3.12 warns of threads, numpy's: no process uses them from here on
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
        if child == 0:
            try:
                if os.fork() == 0:
                    work()
            finally:
                os._exit(0)
    os.waitpid(child, 0)


def _keep(
    held: int, engine: int, loaded: Callable[[], bool], seconds: float, tell: Callable[[str], None]
) -> None:
    """`held`: the lock, which ends with this process; `engine`: a descriptor of its process."""

    def end(text: str = "") -> NoReturn:
        with contextlib.suppress(OSError):  # the next holder is another one
            os.ftruncate(held, 0)
        os.close(held)
        if text:
            tell(text)
        os._exit(0)

    late = f"the engine has not loaded within {seconds:g} s: versions come all the same"
    signal.signal(signal.SIGALRM, lambda *_: end(late))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    while not select.select([engine], (), (), PROBE_SECONDS)[0]:
        with contextlib.suppress(Exception):  # asked again until its time is up
            if loaded():
                end("the engine has loaded: versions may come")
    end()

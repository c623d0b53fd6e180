"""Hooks: an operator's commands around channel traffic (mount refresh, upload, notification)."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from weightcast.shared.base.errors import NotInTime, Refused, RetryLater
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.daemon.environment import without_secrets
from weightcast.shared.files.disk_errors import error_text

RETRY = 75
"""EX_TEMPFAIL of sysexits.h"""
_TAIL_BYTES = 2048
_DRAIN_SECONDS = 1.0
_running: dict[subprocess.Popen[bytes], bool] = {}
"""hooks of this process that somebody waits for, and whether they were asked to end"""
_changed = threading.Condition()


def run_hook(
    command: str,
    *,
    version: int,
    directory: Path | str,
    phase: str,
    deadline_seconds: float,
    more: Mapping[str, str] | None = None,
) -> None:
    """Runs `command` (split as a shell would, but without a shell) and waits for it.

    It sees WEIGHTCAST_VERSION, WEIGHTCAST_DIR, WEIGHTCAST_PHASE and WEIGHTCAST_DEADLINE, the seconds it may
    take, and the variables `more`; standard input is empty. Exit 0 is success. Raises RetryLater for exit 75,
    NotInTime if it had to be killed (with all processes of its group), Refused for the rest, with the end of
    its output. RetryLater also where `end_hooks` ended it."""
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise Refused(f"hook {command!r} cannot be read: {error}", remedy="check its quotes") from error
    if not arguments:
        raise Refused("a hook is an empty command", remedy="leave the setting out")
    name = f"{phase} hook {arguments[0]}"
    variables = {
        "WEIGHTCAST_VERSION": str(version),
        "WEIGHTCAST_DIR": str(directory),
        "WEIGHTCAST_PHASE": phase,
        "WEIGHTCAST_DEADLINE": f"{deadline_seconds:g}",
    }
    process = _start(arguments, without_secrets(os.environ) | variables | dict(more or {}))
    tail = _Tail(process)
    failpoint("hook.begun", directory)
    code, was_told_to_end = _wait(process, deadline_seconds)
    failpoint("hook.ended", directory)
    if was_told_to_end:
        raise RetryLater(f"{name} was ended: this process ends", remedy="the next start goes on")
    if code is None:
        raise NotInTime(
            f"{name} did not end within {deadline_seconds:g} s{tail.text()}",
            remedy="make it faster or raise hook_seconds",
        )
    if code == RETRY:
        raise RetryLater(f"{name} asks for a later try{tail.text()}", remedy="exit code 75 means: retry")
    if code != 0:
        how = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
        remedy = "run it by hand with the same WEIGHTCAST_ variables"
        raise Refused(f"{name} {how}{tail.text()}", remedy=remedy)


def end_hooks(seconds: float) -> None:
    """Ends the hooks that this process runs, in whichever thread: a daemon's next start would run its own
    at the same time. Each has up to `seconds` to end by SIGTERM; what is left of its group then is killed."""
    ends = time.monotonic() + seconds
    with _changed:
        for process in _running:
            _running[process] = True
            _signal_group(process, signal.SIGTERM)
        _changed.wait_for(lambda: not _running, max(0.0, ends - time.monotonic()))
        for process in _running:
            _signal_group(process, signal.SIGKILL)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _wait(process: subprocess.Popen[bytes], deadline_seconds: float) -> tuple[int | None, bool]:
    """The exit code, or None if the deadline ended the process and its group; and whether it was asked to
    end."""
    code: int | None = None
    with _changed:
        _running[process] = False
    try:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(deadline_seconds)
    finally:
        with _changed:
            was_told_to_end = _running.pop(process)
            if process.poll() is None or was_told_to_end:
                _signal_group(process, signal.SIGKILL)
            _changed.notify_all()
        process.wait()
    return code, was_told_to_end


def _start(arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            arguments,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise Refused(
            f"hook {arguments[0]} cannot be started: {error_text(error)}", remedy="check its path and mode"
        ) from error


class _Tail:
    """Reads a process's output to its end in a thread and keeps the last bytes. A child that a hook leaves
    behind may hold the pipe open: nobody waits for it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._kept = b""
        self._thread = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        self._thread.start()

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            while piece := os.read(pipe.fileno(), 65536):
                self._kept = (self._kept + piece)[-_TAIL_BYTES:]

    def text(self) -> str:
        self._thread.join(_DRAIN_SECONDS)
        text = self._kept.decode(errors="replace").strip()
        return f": {text}" if text else ""

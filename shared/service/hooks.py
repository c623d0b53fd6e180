"""Hooks: an operator's commands around channel traffic (mount refresh, upload, notification)."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from weightcast.shared.errors import NotInTime, Refused, RetryLater
from weightcast.shared.failpoints import failpoint
from weightcast.shared.service.secrets import without_secrets

RETRY = 75
"""EX_TEMPFAIL of sysexits.h"""
_TAIL_BYTES = 2048
_DRAIN_SECONDS = 1.0


def run_hook(
    command: str,
    *,
    version: int,
    directory: Path,
    phase: str,
    deadline_seconds: float,
    more: Mapping[str, str] | None = None,
) -> None:
    """Runs `command` (split as a shell would, but without a shell) and waits for it.

    It sees WEIGHTCAST_VERSION, WEIGHTCAST_DIR, WEIGHTCAST_PHASE and WEIGHTCAST_DEADLINE, the seconds it may
    take, and the variables `more`; standard input is empty. Exit 0 is success. Raises RetryLater for exit 75,
    NotInTime if it had to be killed (with all processes of its group), Refused for the rest, with the end of
    its output."""
    arguments = _split(command)
    name = f"{phase} hook {arguments[0]}"
    environment = _environment(version, directory, phase, deadline_seconds) | dict(more or {})
    process = _start(arguments, environment)
    tail = _Tail(process)
    failpoint("hook.begun", directory)
    code = _wait(process, deadline_seconds)
    failpoint("hook.ended", directory)
    if code is None:
        raise NotInTime(
            f"{name} did not end within {deadline_seconds:g} s{tail.text()}",
            remedy="make it faster or raise hook_seconds",
        )
    if code != 0:
        _raise_for(code, name, tail.text())


def _wait(process: subprocess.Popen[bytes], deadline_seconds: float) -> int | None:
    """The exit code, or None if the deadline ended the process and its group."""
    try:
        return process.wait(deadline_seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _split(command: str) -> list[str]:
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise Refused(f"hook {command!r} cannot be read: {error}", remedy="check its quotes") from error
    if not arguments:
        raise Refused("a hook is an empty command", remedy="leave the setting out")
    return arguments


def _environment(version: int, directory: Path, phase: str, deadline_seconds: float) -> dict[str, str]:
    return without_secrets(os.environ) | {
        "WEIGHTCAST_VERSION": str(version),
        "WEIGHTCAST_DIR": str(directory),
        "WEIGHTCAST_PHASE": phase,
        "WEIGHTCAST_DEADLINE": f"{deadline_seconds:g}",
    }


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
            f"hook {arguments[0]} cannot be started: {error}", remedy="check its path and mode"
        ) from error


def _raise_for(code: int, name: str, tail: str) -> None:
    if code == RETRY:
        raise RetryLater(f"{name} asks for a later try{tail}", remedy="exit code 75 means: retry")
    how = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
    raise Refused(f"{name} {how}{tail}", remedy="run it by hand with the same WEIGHTCAST_ variables")


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

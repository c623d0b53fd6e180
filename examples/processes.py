"""The demo's processes: started in groups of their own, logged to files, never left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

GRACE_SECONDS = 10.0


class ProcessDied(RuntimeError):
    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(f"ended unexpectedly: {', '.join(names)}")


@dataclass
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def signal_group(self, number: signal.Signals) -> None:
        """The whole group: a child may have children, and they may outlive it."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return

    def kill(self) -> None:
        self.signal_group(signal.SIGKILL)
        self.process.wait()

    def tail(self, lines: int = 20) -> str:
        text = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join([f"--- {self.log} (exit {self.process.poll()})", *text[-lines:]])


class Children:
    def __init__(self, logs: Path, directory: Path) -> None:
        self._logs = logs
        self._directory = directory
        self._children: dict[str, Child] = {}
        # A SIGKILL leaves the demo no time to clean up; the end of this pipe tells a process that does.
        self._undertaker = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, start_new_session=True, text=True
        )

    def start(self, name: str, command: Sequence[str | Path]) -> Child:
        """Runs `command` in the directory; starting a name again appends to its log."""
        log = self._logs / f"{name}.log"
        with log.open("ab") as stream:
            process = subprocess.Popen(
                [str(word) for word in command],
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._children[name] = Child(name, process, log)
        print(process.pid, file=self._undertaker.stdin, flush=True)
        return self._children[name]

    def __getitem__(self, name: str) -> Child:
        return self._children[name]

    def check(self, may_end: Sequence[str] = ()) -> None:
        """Raises ProcessDied for every child that ended, unless it is one of `may_end` and ended with 0."""
        codes = {name: child.process.poll() for name, child in self._children.items()}
        dead = [
            name for name, code in codes.items() if code is not None and (code != 0 or name not in may_end)
        ]
        if dead:
            raise ProcessDied(dead)

    def states(self) -> dict[str, str]:
        codes = {name: child.process.poll() for name, child in self._children.items()}
        return {name: "runs" if code is None else f"exit {code}" for name, code in codes.items()}

    def stop(self) -> None:
        """SIGTERM for all at once, SIGKILL for what is left of a group after the grace period."""
        children = list(self._children.values())
        for child in children:
            child.signal_group(signal.SIGTERM)
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(GRACE_SECONDS)
            child.kill()
        self._undertaker.kill()
        self._undertaker.communicate()

    def tails(self) -> str:
        return "\n".join(child.tail() for child in self._children.values())


def bury(groups: Iterable[str]) -> None:
    """Reads process group ids until the end of input, then kills them all."""
    for group in list(groups):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(group), signal.SIGKILL)


if __name__ == "__main__":
    bury(sys.stdin)

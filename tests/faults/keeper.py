"""Runs in user and mount namespaces of its own, and starts daemons there when it is told to by line.

    unshare --user --map-root-user --mount python keeper.py

Daemons are forked from this process, which has imported everything and has no threads.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "faults"), str(TESTS / "crash"), str(TESTS)]

from crash_processes import Child, Order, fork  # noqa: E402
from faulty_fs import serve  # noqa: E402
from forked import import_weightcast  # noqa: E402

from weightcast.shared.cli.main import main as main_command  # noqa: E402

Answer = dict[str, Any]
CLONE_NEWUTS = 0x04000000


class Keeper:
    def __init__(self) -> None:
        self._children: dict[int, Child] = {}

    def obey(self, do: str, **arguments: Any) -> Answer:
        answer: Answer = getattr(self, do)(**arguments)
        return answer

    def sh(self, command: list[str]) -> Answer:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        return {"code": done.returncode, "text": done.stdout + done.stderr}

    def fuse(self, source: str, mount: str, rules: str, log: str) -> Answer:
        here, there = os.pipe()
        child = fork(
            lambda: serve(Path(source), Path(mount), Path(rules), lambda: bool(os.write(there, b"1"))),
            Path(log),
        )
        os.close(there)
        ready = os.read(here, 1)
        os.close(here)
        return self._kept(child) if ready else {"problem": child.words()}

    def command(
        self, log: str, arguments: list[str], order: Answer | None = None, machine: str = ""
    ) -> Answer:
        """`weightcast` with these arguments, to the end of its interpreter; on a machine of that name."""

        def role() -> None:
            if machine:
                name_machine(machine)
            try:
                main_command(arguments)
            finally:
                # what an interpreter does before it ends: it waits for threads
                threading._shutdown()  # type: ignore[attr-defined]

        return self._kept(fork(role, Path(log), None if order is None else Order(**order)))

    def _kept(self, child: Child) -> Answer:
        self._children[child.pid] = child
        return {"pid": child.pid}

    def ended(self, pid: int) -> Answer:
        """Of a child: exit status; the signal that killed it as a negative number; null while it lives."""
        child = self._children[pid]
        if not child.ended or child.status is None:
            return {"status": None}
        return {"status": os.waitstatus_to_exitcode(child.status)}

    def rows(self, pid: int) -> Answer:
        """Failpoints that a child passed, and how often."""
        return self._children[pid].wire.counts

    def order(self, pid: int, **order: Any) -> Answer:
        self._children[pid].wire.order(Order(**order))
        return {}


def name_machine(name: str) -> None:
    """For this process alone (unshare(2))."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUTS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(name)


def main() -> None:
    import_weightcast()
    keeper = Keeper()
    print(json.dumps({"pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        try:
            answer = keeper.obey(**json.loads(line))
        except Exception as error:
            answer = {"problem": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

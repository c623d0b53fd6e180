"""A step in a process of its own that kills itself at a chosen place."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

from hosts import Host

from weightcast.shared.base.failpoints import watch


def killed(step: Callable[[], object], event: str, number: int, part: str = "") -> bool:
    """Runs `step` in a fork that dies by SIGKILL right before the `number`-th (from 1) audit event `event`
    whose first argument ends with `part`. False when the step ended before it came to that."""
    return _killed(step, lambda: _die_at(event, number, part))


def killed_at(step: Callable[[], object], failpoint: str, number: int = 1) -> bool:
    """As `killed`, at the `number`-th passage of a failpoint."""
    passed = count(1)

    def watcher(name: str, where: Path | None) -> None:
        if name == failpoint and next(passed) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return _killed(step, lambda: watch(watcher))


def _killed(step: Callable[[], object], arm: Callable[[], None]) -> bool:
    child = os.fork()
    if child == 0:
        arm()
        try:
            step()
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the step failed"
    return False


def started(host: Host) -> None:
    """The step of a new process."""
    host.start()
    host.step()


def _die_at(event: str, number: int, part: str) -> None:
    seen = 0

    def watch(name: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if name != event or not any(str(one).endswith(part) for one in arguments[:2]):
            return
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)

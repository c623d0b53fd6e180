"""Python processes forked from a process that has imported weightcast, or an engine: a start takes 20 ms
instead of a second, or of eight.

Each is a process of its own, with a pid, streams, signals and an exit code. What is read from the environment
at import (weightcast's directory of kernels) is that of the process that forks. Where the start itself is
tested, use `subprocess`. Run as a script, this file is the process that forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_SET_CHILD_SUBREAPER = 36
_OF_DAEMONS = (
    *("weightcast.publisher.daemon.daemon", "weightcast.subscriber.daemon.daemon"),
    # what they import late: half the processor time of a start
    *("weightcast.shared.cli.settings_options", "pydantic.v1", "structlog", "uvicorn.lifespan.on"),
    *("uvicorn.loops.asyncio", "fastapi.telemetry._runtime", "encodings.idna"),
)
_MESSAGE_LIMIT = 1 << 18
_ASKING = threading.Lock()


class Forked(subprocess.Popen[Any]):
    """`python SCRIPT ...` or `python -m MODULE ...`, with Popen's options for streams, `env`, `cwd` and
    `start_new_session`. `origin`: the process that forks; None: a process that has imported weightcast."""

    def __init__(
        self, arguments: Sequence[object], origin: socket.socket | None = None, **options: Any
    ) -> None:
        self._origin = origin or _weightcast()
        super().__init__([sys.executable, *map(str, arguments)], **options)

    def _execute_child(self, args: Any, *rest: Any) -> None:
        cwd, env, pipes = rest[4], rest[5], rest[9:15]
        streams = [own if given == -1 else given for own, given in enumerate((pipes[0], pipes[3], pipes[5]))]
        order: dict[str, Any] = {"arguments": args[1:]}
        order["environment"] = dict(os.environ if env is None else env)
        order |= {"directory": os.fspath(cwd or Path.cwd()), "session": rest[20]}
        with _ASKING:
            socket.send_fds(self._origin, [json.dumps(order).encode()], streams)
            answer = self._origin.recv(64)
        assert answer, "the process that forks has ended, see stderr"
        self.pid = int(answer)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def weightcast(*words: object, **options: Any) -> Forked:
    return Forked(["-m", "weightcast.shared.cli.main", *words], **options)


def run_weightcast(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command to its end, with what it wrote."""
    with weightcast(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as child:
        try:
            out, err = child.communicate(timeout=120)
        finally:
            child.kill()
    return subprocess.CompletedProcess(child.args, child.returncode, out, err)


@functools.cache
def _weightcast() -> socket.socket:
    return origin(sys.executable, [], os.environ)


def origin(python: str | Path, modules: Sequence[str], environment: Mapping[str, str]) -> socket.socket:
    """To a process that forks, once it has imported the modules, or weightcast. It ends with this one. What
    it forks becomes a child of this process."""
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (mine, its):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_LIMIT)
    its.set_inheritable(True)
    quiet = "ignore:This process:DeprecationWarning"  # numpy has threads, which the forks do without
    command = [str(python), "-W", quiet, __file__, str(its.fileno()), *modules]
    os.posix_spawn(command[0], command, dict(environment))
    its.close()
    return mine


def _serve(orders: socket.socket) -> list[str]:
    """Forks for every order, and returns in the forks alone: the arguments."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        message, streams, *_ = socket.recv_fds(orders, _MESSAGE_LIMIT, 3)
        if not message:
            os._exit(0)
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0 and os.fork() == 0:
            order = json.loads(message)
            if order["session"]:
                os.setsid()
            os.write(writer, str(os.getpid()).encode())
            os.close(reader), os.close(writer), orders.close()
            return _become(order, streams)
        if between == 0:
            os._exit(0)
        os.waitpid(between, 0)
        orders.send(os.read(reader, 64))
        for fd in (reader, writer, *streams):
            os.close(fd)


def _become(order: Mapping[str, Any], streams: Sequence[int]) -> list[str]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["directory"])
    arguments: list[str] = order["arguments"]
    first = order["directory"] if arguments[0] == "-m" else os.path.dirname(arguments[0])
    sys.path[:] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *sys.path[1:]]
    sys.argv = arguments
    return arguments


def import_weightcast() -> None:
    """And compiles its kernels: all that its processes need."""
    from weightcast.shared.cli import main
    from weightcast.shared.codec.warm_up import warm_up

    with contextlib.redirect_stdout(None):
        main.run(["fleet", "--help"])
    for module in _OF_DAEMONS:
        importlib.import_module(module)
    warm_up()


if __name__ == "__main__":
    for module in sys.argv[2:]:
        importlib.import_module(module)
    if not sys.argv[2:]:
        import_weightcast()
    gc.freeze()
    given = _serve(socket.socket(fileno=int(sys.argv[1])))
    if given[0] == "-m":
        sys.argv = given[1:]
        sys.modules.pop(given[1], None)
        runpy.run_module(given[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(given[0], run_name="__main__")

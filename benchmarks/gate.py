"""What gate and gateway add to an answer's latency: `python -m benchmarks.gate` prints a table, in three
minutes on two idle cores. Everything runs on this machine: a client, an engine that answers at once, and one
process for each proxy."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import click
import httpx

from weightcast.shared.cli.balancers import shown
from weightcast.shared.daemon.environment import usable_cores
from weightcast.shared.daemon.logs import setup_logs
from weightcast.subscriber.gate.gate import Gate, Upstream
from weightcast.subscriber.gate.traffic import Traffic

HERE = Path(__file__).resolve()
EVENTS = 20
"""of a stream in a closed loop"""
RATE, TOKENS_PER_SECOND = 50.0, 20.0
"""of the open loop: requests per second, events of each per second"""
PATIENCE = 30.0
_STAMP = re.compile(rb'"at": (\d+)')
_ASKED = re.compile(rb'"events": (\d+), "every": ([\d.]+), "size": (\d+)')
_LENGTH = re.compile(rb"\ncontent-length: *(\d+)", re.IGNORECASE)
_TICKS = os.sysconf("SC_CLK_TCK")


class EngineDouble(asyncio.Protocol):
    """Answers at once: an object, or events, each with the moment when it was written. Writes no more than
    its peer reads."""

    _is_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._buffer, self._left = cast(asyncio.Transport, transport), b"", 0

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        size = int(length[1]) if length else 0
        if not end or len(rest) < size:
            return
        self._buffer = rest[size:]
        asked = _ASKED.search(rest[:size])
        self._left, self._every = (int(asked[1]), float(asked[2])) if asked else (0, 0.0)
        if asked is None or not self._left:
            body = b'{"choices": [{"text": "token"}], "at": %d}' % time.monotonic_ns()
            start = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            self._transport.write(start % len(body) + body)
            return
        self._token = b"x" * int(asked[3])
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        self._stream()

    def _stream(self) -> None:
        while self._left and not self._is_paused:
            event = b'data: {"at": %d, "choices": [{"text": "%s"}]}\n\n' % (time.monotonic_ns(), self._token)
            self._transport.write(b"%x\r\n%s\r\n" % (len(event), event))
            self._left -= 1
            if not self._left:
                self._transport.write(b"0\r\n\r\n")
            elif self._every:
                asyncio.get_running_loop().call_later(self._every, self._stream)
                return

    def pause_writing(self) -> None:
        self._is_paused = not self._every

    def resume_writing(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._stream()

    def connection_lost(self, exc: Exception | None) -> None:
        self._left = 0


@dataclass
class Seen:
    """Seconds. `firsts`: from a request to its first piece; `lags`: from an event's writing to its
    reading."""

    firsts: list[float] = field(default_factory=list)
    wholes: list[float] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    failures: int = 0


class Caller(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, seen: Seen) -> None:
        self._seen, self._buffer, self._done = seen, b"", asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(failed=True)

    async def ask(self, request: bytes) -> None:
        self._buffer, self._began, self._is_first = b"", time.monotonic(), True
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        await asyncio.wait_for(self._done, PATIENCE)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        self._buffer += data
        stamps = _STAMP.findall(self._buffer[: self._buffer.rfind(b"}") + 1])
        if stamps and self._is_first:
            self._is_first = False
            self._seen.firsts.append(now / 1e9 - self._began)
        self._seen.lags += ((now - int(stamp)) / 1e9 for stamp in stamps)
        head, end, body = self._buffer.partition(b"\r\n\r\n")
        if end and not self._buffer.startswith(b"HTTP/1.1 200") and self._buffer.startswith(b"HTTP/"):
            self._finish(failed=True)
        elif length := _LENGTH.search(head):
            if len(body) >= int(length[1]):
                self._finish()
        elif self._buffer.endswith(b"\r\n0\r\n\r\n"):
            self._finish()
        elif stamps:
            self._buffer = self._buffer[self._buffer.rfind(b"}") + 1 :]

    def _finish(self, *, failed: bool = False) -> None:
        if not self._done.done():
            self._seen.failures += failed
            self._seen.wholes.append(time.monotonic() - self._began)
            self._done.set_result(None)


def request_of(port: int, events: int, every: float = 0.0, size: int = 5) -> bytes:
    """For so many events, each with a token of `size` bytes, `every` so many seconds."""
    prompt = "Why is the sky blue? " * 8
    asked = {"model": "policy", "prompt": prompt, "max_tokens": 64, "events": events, "every": every}
    asked["size"] = size
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


async def connect(port: int, seen: Seen) -> Caller:
    _, caller = await asyncio.get_running_loop().create_connection(lambda: Caller(seen), "127.0.0.1", port)
    return caller


async def closed_loop(port: int, connections: int, seconds: float, events: int) -> Seen:
    """Each connection sends its next request when it has an answer."""
    seen, request = Seen(), request_of(port, events)
    callers = [await connect(port, seen) for _ in range(connections)]
    end = time.monotonic() + seconds

    async def run(caller: Caller) -> None:
        while time.monotonic() < end:
            await caller.ask(request)

    await asyncio.gather(*map(run, callers))
    for caller in callers:
        caller.transport.close()
    return seen


async def open_loop(port: int, connections: int, seconds: float) -> Seen:
    """RATE requests a second, however long their answers take: as many are under way as `connections`."""
    seen, lasts = Seen(), connections / RATE
    events = 1 + round(lasts * TOKENS_PER_SECOND)
    request = request_of(port, events, lasts / events)
    began, idle, running = time.monotonic(), list[Caller](), list[asyncio.Task[None]]()

    async def run() -> None:
        caller = idle.pop() if idle else await connect(port, seen)
        await caller.ask(request)
        idle.append(caller)

    for number in range(round((lasts + seconds) * RATE)):
        await asyncio.sleep(max(0.0, began + number / RATE - time.monotonic()))
        running.append(asyncio.create_task(run()))
    await asyncio.gather(*running)
    for caller in idle:
        caller.transport.close()
    return seen


@dataclass(frozen=True)
class Route:
    """Where the client sends its requests; `processes`: of proxies on the way."""

    name: str
    port: int
    processes: tuple[int, ...] = ()

    def cpu_seconds(self) -> float:
        found = (Path(f"/proc/{process}/stat").read_text().rpartition(")")[2] for process in self.processes)
        return sum(int(ticks) for stat in found for ticks in stat.split()[11:13]) / _TICKS


Load = Callable[[int], Coroutine[Any, Any, Seen]]
"""at a port"""


@dataclass(frozen=True)
class Row:
    load: str
    connections: int
    route: str
    p50: float
    p99: float
    per_second: float
    cpu: float
    """seconds of the proxies per request"""
    failures: int


LOADS: Mapping[str, tuple[Callable[..., Coroutine[Any, Any, Seen]], Mapping[str, str]]] = {
    "closed loop, JSON": (partial(closed_loop, events=0), {"whole": "wholes"}),
    "closed loop, stream": (partial(closed_loop, events=EVENTS), {"whole": "wholes"}),
    "open loop": (open_loop, {"first event": "firsts", "each event": "lags"}),
}
"""with what is timed, and its name in Seen"""


def measure(routes: Sequence[Route], connections: Sequence[int], seconds: float) -> Iterator[Row]:
    for count, (load, (run, timed)), route in product(connections, LOADS.items(), routes):
        before, began = route.cpu_seconds(), time.monotonic()
        seen = asyncio.run(run(route.port, count, seconds))
        took, cpu, answers = time.monotonic() - began, route.cpu_seconds() - before, len(seen.wholes)
        for name, times in timed.items():
            found = sorted(getattr(seen, times))
            at = (found[len(found) // 2], found[len(found) * 99 // 100])
            about = (f"{load}, {name}", count, route.name)
            yield Row(*about, *at, answers / took, cpu / answers, seen.failures)


def table(rows: Sequence[Row]) -> Iterator[str]:
    names = (
        "load",
        "streams",
        "through",
        "p50 ms",
        "p99 ms",
        "added p50",
        "added p99",
        "requests/s",
        "CPU ms",
    )
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"
    direct = {(row.load, row.connections): row for row in rows if row.route == "direct"}
    for row in rows:
        base = direct[row.load, row.connections]
        added = ("", "") if row is base else (ms(row.p50 - base.p50), ms(row.p99 - base.p99))
        cpu = "" if row is base else f"{row.cpu * 1000:.2f}"
        cells = (row.load, row.connections, row.route, ms(row.p50), ms(row.p99), *added)
        yield f"| {' | '.join(map(str, cells))} | {row.per_second:,.0f} | {cpu} |"


def ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f}"


@contextmanager
def child(*arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """A process; a command of this module says its port on a line of its output."""
    command = [str(each) for each in arguments]
    if command[0] in ("engine", "gate"):
        command = [sys.executable, "-m", "benchmarks.gate", *command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=HERE.parents[1]) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)


def port_of(process: subprocess.Popen[bytes]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


async def _serve_engine() -> None:
    server = await asyncio.get_running_loop().create_server(EngineDouble, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def _serve_gate(engine: int) -> None:
    """Without a subscriber: its one engine serves version 1 from the start."""
    setup_logs("console", "warning")
    traffic = Traffic(["e"], policy="pass", drain_seconds=1, hold_seconds=60, most=4096)
    traffic.name_adapters({})
    upstream = Upstream("vllm", f"http://127.0.0.1:{engine}", "", ssl.create_default_context())

    def look() -> None:
        traffic.open("e", 1, "process", time.monotonic())

    gate = Gate({"e": upstream}, traffic, token=None, run_id=lambda: "run", wake=look)
    gate.start("127.0.0.1", 0)
    print(gate.port, flush=True)
    signal.sigwait([signal.SIGTERM])


def wait_for(port: int, path: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False).status_code == 200:
                return
        time.sleep(0.05)
    raise TimeoutError(f"port {port} does not answer {path}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def open_routes(names: str = "") -> Iterator[list[Route]]:
    """The direct one first. `names`: text that has those of all others."""
    with ExitStack() as stack:
        engine = port_of(stack.enter_context(child("engine")))
        gate = stack.enter_context(child("gate", engine))
        gate_port = port_of(gate)
        wait_for(gate_port, "/readyz")
        routes = [Route("direct", engine), Route("gate", gate_port, (gate.pid,))]
        for name, start in (("gateway", start_gateway), ("HAProxy", start_haproxy)):
            if name in (names or name) and (name != "HAProxy" or shutil.which("haproxy")):
                port = free_port()
                proxy = start(stack, gate_port, port)
                wait_for(port, "/readyz")
                routes.append(Route(f"{name} + gate", port, (proxy.pid, gate.pid)))
        yield routes


def start_gateway(stack: ExitStack, gate_port: int, port: int) -> subprocess.Popen[bytes]:
    program, gate = Path(sys.executable).with_name("weightcast"), f"http://127.0.0.1:{gate_port}"
    options = ("--gates", gate, "--port", port, "--log-level", "warning")
    return stack.enter_context(child(program, "gateway", "run", *options))


def start_haproxy(stack: ExitStack, gate_port: int, port: int) -> subprocess.Popen[bytes]:
    root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    main = (HERE.parents[1] / "deploy/haproxy/haproxy.cfg").read_text()
    (root / "haproxy.cfg").write_text(main.replace("bind :8300", f"bind 127.0.0.1:{port}"))
    (root / "gates.cfg").write_text(shown([("host", "http", f"127.0.0.1:{gate_port}")], "haproxy"))
    return stack.enter_context(child("haproxy", "-db", "-f", root / "haproxy.cfg", "-f", root / "gates.cfg"))


@click.group(invoke_without_command=True)
@click.option("--seconds", default=3.0, help="Of each measurement.")
@click.option("--streams", default="1,50,200", help="Connections, separated by commas.")
@click.option("--through", default="", help="Routes whose name has this text, and that of the gate alone.")
@click.pass_context
def main(context: click.Context, seconds: float, streams: str, through: str) -> None:
    if context.invoked_subcommand is None:
        load, counts = os.getloadavg()[0], [int(count) for count in streams.split(",")]
        with open_routes(through) as routes:
            rows = sorted(measure(routes, counts, seconds), key=lambda row: (row.connections, row.load))
        print(f"Python {platform.python_version()}, {usable_cores()} cores, load before {load:.1f}.\n")
        print("\n".join(table(rows)))
        sys.exit(any(row.failures for row in rows))


@main.command("engine", hidden=True)
def engine() -> None:
    asyncio.run(_serve_engine())


@main.command("gate", hidden=True)
@click.argument("engine", type=int)
def gate(engine: int) -> None:
    _serve_gate(engine)


if __name__ == "__main__":
    main()

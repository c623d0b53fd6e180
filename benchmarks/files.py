"""End to end on real files: contenders publish and sync in turns, as daemons and as commands.

weightcast's are `publisher run` (asked over HTTP), `subscriber run` (woken over HTTP), `publish` and `sync`;
`field`, slime's format, is `benchmarks/field_path.py serve|publish|sync`. Daemons report the seconds of a
round themselves; a command counts from its start to its end, interpreter and imports included.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import IO, Any, Literal

import httpx
import numpy as np
import xxhash

from weightcast.shared.base.errors import WeightcastError

from .chunks import Masters, Words
from .results import FileRow, Machine, ReadRow, Spread, Work

INDEX = "model.safetensors.index.json"
_PERIOD = 64 << 20
"""words; tensors are cut from one ring of weights of this length, far beyond any coder's window"""
_STRIDE = 12_582_917
"""words between where two tensors begin in the ring"""
_SHARD_BYTES = 1 << 30
_WIDTHS = ((512 << 20, 4096), (64 << 20, 1024), (0, 512))
"""bytes from which a model has layers of a width"""
_NARROW = 64
"""width of experts"""


@dataclass(frozen=True)
class _Tensor:
    name: str
    shape: tuple[int, int]
    begin: int
    """place in the ring"""

    @property
    def words(self) -> int:
        """Of the ring, of two bytes."""
        return self.shape[0] * self.shape[1]


_Shapes = dict[str, tuple[int, int]]
"""by name, counted in words of two bytes"""
_SCALES = "_scale_inv"
"""ends names of tensors in F32"""


def form(name: str, shape: tuple[int, int]) -> tuple[str, tuple[int, int]]:
    """Dtype and shape as they are stored."""
    return ("F32", (shape[0], shape[1] // 2)) if name.endswith(_SCALES) else ("BF16", shape)


def _place(name: str) -> tuple[bool, str]:
    """Files have their tensors in this order, as the safetensors library writes them."""
    return not name.endswith(_SCALES), name


def _of_layers(nbytes: int) -> _Shapes:
    width = next(width for least, width in _WIDTHS if nbytes >= least)
    layers = max(1, nbytes * 15 // 16 // (2 * width * width))
    rows = max(1, nbytes // 16 // (2 * width))
    square = {f"model.layers.{n}.mlp.weight": (width, width) for n in range(layers)}
    return {"model.embed_tokens.weight": (rows, width), **square}


def _of_experts(nbytes: int, count: int, scales: bool) -> _Shapes:
    """`scales`: half of them, four bytes for 128 by 128 bytes of weights."""
    weights = count // 2 if scales else count
    rows = max(1, nbytes // weights // (2 * _NARROW))
    names = [f"model.layers.{n // 1000}.experts.{n % 1000}.weight" for n in range(weights)]
    small = dict.fromkeys((f"{name}{_SCALES}" for name in names if scales), (1, max(2, rows // 128 * 2)))
    return dict.fromkeys(names, (rows, _NARROW)) | small


class Model:
    """About `nbytes` of weights: one embedding of a sixteenth, square layers, norms that never change; or
    `experts` of equal size, or with `scales` that much smaller tensors between them."""

    def __init__(self, nbytes: int, seed: int, experts: int = 0, scales: bool = False) -> None:
        shapes = _of_experts(nbytes, experts, scales) if experts else _of_layers(nbytes)
        layers = 0 if experts else len(shapes) - 1
        width = next(iter(shapes.values()))[1]
        period = min(_PERIOD, nbytes // 2)
        self.tensors = [
            _Tensor(name, shape, n * _STRIDE % period) for n, (name, shape) in enumerate(shapes.items())
        ]
        self._norms = {f"model.layers.{n}.norm.weight": (1, width) for n in range(layers)}
        self._ring = Masters(period, seed)
        self.elements = sum(tensor.words for tensor in self.tensors) + layers * width
        self.nbytes = 2 * self.elements

    def step(self, density: float) -> None:
        self._ring.step(density)

    def digests(self) -> dict[str, str]:
        """xxh3-128 of each tensor's bytes."""
        found = {}
        for name, pieces in self._all():
            digest = xxhash.xxh3_128()
            for piece in pieces:
                digest.update(piece.data)
            found[name] = digest.hexdigest()
        return found

    def write(self, directory: Path) -> Path:
        """A checkpoint directory that appears whole. Shards of at most a GiB, or one larger tensor."""
        unfinished = directory.with_name(f".{directory.name}.unfinished")
        unfinished.mkdir()
        shards: list[list[tuple[str, tuple[int, int]]]] = [[]]
        room = _SHARD_BYTES
        for name, shape in self._shapes().items():
            size = 2 * shape[0] * shape[1]
            if shards[-1] and size > room:
                shards.append([])
                room = _SHARD_BYTES
            shards[-1].append((name, shape))
            room -= size
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            self._write_shard(unfinished / file, dict(shard))
            weight_map |= {name: file for name, _ in shard}
        (unfinished / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        (unfinished / "config.json").write_text("{}")
        unfinished.rename(directory)
        return directory

    def _write_shard(self, path: Path, shapes: dict[str, tuple[int, int]]) -> None:
        """By name, as the safetensors library does."""
        header, end = {}, 0
        for name in sorted(shapes, key=_place):
            size = 2 * shapes[name][0] * shapes[name][1]
            dtype, shape = form(name, shapes[name])
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name, pieces in sorted(self._all(), key=lambda one: _place(one[0])):
                for piece in pieces if name in shapes else ():
                    file.write(piece.data)

    def _shapes(self) -> dict[str, tuple[int, int]]:
        return {tensor.name: tensor.shape for tensor in self.tensors} | self._norms

    def _all(self) -> Iterator[tuple[str, Iterator[Words]]]:
        for tensor in self.tensors:
            yield tensor.name, self.pieces(tensor)
        for name, (_, width) in self._norms.items():
            yield name, iter([np.full(width, 0x3F80, np.uint16)])

    def pieces(self, tensor: _Tensor) -> Iterator[Words]:
        at, left = tensor.begin, tensor.words
        while left:
            piece = self._ring.words[at : at + left]
            yield piece
            at, left = 0, left - len(piece)


def digests_in(directory: Path) -> dict[str, str]:
    """As `Model.digests`, of a checkpoint directory."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        whole = np.memmap(path, np.uint8, "r")
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                found[name] = xxhash.xxh3_128_hexdigest(whole[begin:end].data)
    return found


_START_SECONDS = 600.0
_ROUND_SECONDS = 600.0
_POLL_SECONDS = (0.02, 0.5)
"""first and longest: daemons tell the seconds of a round themselves, and each question takes from the
processors that they are measured on"""
_WEIGHTCAST = (sys.executable, "-m", "weightcast.shared.cli.main")
_FIELD = (sys.executable, Path(__file__).with_name("field_path.py"))


class ContenderFailed(WeightcastError):
    """A process of a contender ended, refused or did not answer; the message has the end of its log."""


@dataclass(frozen=True)
class Done:
    """One publication or sync. `cpu`, `anon_bytes` and `pointer`: see `results.Work`; `changed`: elements, 0
    where the contender does not count them."""

    seconds: float
    phases: Mapping[str, float]
    cpu: float
    anon_bytes: int
    changed: int = 0
    pointer: float | None = None
    moves: int = 0
    """of a host, since its start"""
    disk_bytes: int = 0
    """that a host's process read from disks since its start: what the page cache lacked"""


@dataclass(frozen=True)
class Places:
    """Directories of one contender, and where its processes log."""

    root: Path
    base: Path

    @property
    def channel(self) -> Path:
        return self.root / "channel"

    @property
    def publisher(self) -> Path:
        return self.root / "publisher"

    @property
    def host(self) -> Path:
        return self.root / "host"

    @property
    def log(self) -> Path:
        return self.root / "log"

    def version(self, number: int) -> Path:
        return self.channel / f"weight_v{number:06d}"

    def version_bytes(self, number: int) -> int:
        """What a host one version behind reads: deltas from older versions are in subdirectories."""
        return sum(path.stat().st_size for path in self.version(number).iterdir() if path.is_file())

    def point(self, version: int) -> None:
        """Shows hosts this version as the newest; 0: none is published yet."""
        pointer = self.channel / "latest"
        if version == 0:
            pointer.unlink(missing_ok=True)
            return
        unfinished = self.channel / "latest.tmp"
        unfinished.write_text(f"{version:06d}")
        unfinished.rename(pointer)


class Contender(ABC):
    """One way to bring a version to a host. `publish` and `sync` need the daemon of their side started."""

    def __init__(self, name: str, places: Places, threads: int) -> None:
        self.name, self.places, self.threads = name, places, threads
        places.root.mkdir()

    @abstractmethod
    def start_publisher(self) -> None: ...

    @abstractmethod
    def publish(self, checkpoint: Path) -> Done: ...

    @abstractmethod
    def start_host(self) -> None: ...

    @abstractmethod
    def settle(self) -> None:
        """Returns when no background work on versions is left."""

    @abstractmethod
    def sync(self, version: int) -> Done:
        """To `version`, which the pointer names."""

    @abstractmethod
    def stop(self) -> None:
        """Ends the daemons that run."""

    @abstractmethod
    def publish_command(self, checkpoint: Path) -> Sequence[str]: ...

    @abstractmethod
    def sync_command(self) -> Sequence[str]: ...

    def publish_once(self, checkpoint: Path) -> Done:
        return self._command(self.publish_command(checkpoint))

    def sync_once(self) -> Done:
        return self._command(self.sync_command())

    def _command(self, words: Sequence[str]) -> Done:
        cpu, began = ended_children_cpu(), time.perf_counter()
        process = spawn(words, self.places.log, stdout=subprocess.PIPE)
        with highest_anon(process.pid) as highest:
            text = process.communicate()[0]
        seconds = time.perf_counter() - began
        if process.returncode:
            raise ContenderFailed(f"{self.name}: {' '.join(words)}\n{tail(self.places.log)}")
        told = json.loads(text.splitlines()[-1])
        cpu = ended_children_cpu() - cpu
        return Done(seconds, {}, cpu, highest.nbytes, told.get("changed_elements", 0))


def contender(name: str, root: Path, base: Path, threads: int) -> Contender:
    """`name`: fast, small or field. Makes its directory below `root`."""
    kind = Field if name == "field" else Weightcast
    return kind(name, Places(root / name, base), threads)


class Weightcast(Contender):
    def __init__(
        self, name: str, places: Places, threads: int, channel: str = "", flags: Sequence[object] = ()
    ) -> None:
        """`channel`: its URL, if it is not in `places`; `flags`: more, of its daemon."""
        super().__init__(name, places, threads)
        self._daemon: _Daemon | None = None
        self._channel, self._flags = channel or places.channel, flags

    def start_publisher(self) -> None:
        sides = ("--base", self.places.base, "--local", self.places.publisher)
        self._start("publisher", *sides, "--encoding", self.name, *self._flags)

    def start_host(self) -> None:
        self._start("subscriber", "--base", self.places.base, "--local", self.places.host, *self._flags)

    def _start(self, side: str, *flags: object) -> None:
        port_file = self.places.root / f"{side}.port"
        port_file.unlink(missing_ok=True)
        words = [*_WEIGHTCAST, side, "run", "--channel", self._channel, *flags]
        words += ["--threads", self.threads, "--port", 0, "--port-file", port_file]
        process = spawn(words, self.places.log)
        self._daemon = _Daemon(self.name, process, self.places.log)
        self._daemon.wait(port_file.exists, _START_SECONDS)
        self._daemon.connect(int(port_file.read_text()))

    @property
    def _running(self) -> _Daemon:
        if self._daemon is None:
            raise ContenderFailed(f"{self.name}: no daemon runs")
        return self._daemon

    def publish(self, checkpoint: Path) -> Done:
        daemon = self._running
        with _Watched(daemon.process.pid) as watched:
            job = daemon.post("/v1/publish", {"checkpoint": str(checkpoint)})
            ended = daemon.wait(lambda: self._ended(job["id"]), _ROUND_SECONDS)
            if ended["state"] != "done":
                raise ContenderFailed(f"{self.name}: {ended['error']}")
            report = ended["report"]
            phases = daemon.wait(lambda: self._followed(report["version"]), _ROUND_SECONDS)
        pointer = sum(report["seconds"].values())
        total = sum(phases.values())
        return Done(total, phases, watched.cpu, watched.anon_bytes, report["changed_elements"], pointer)

    def settle(self) -> None:
        if self._daemon is not None:
            daemon = self._daemon
            daemon.wait(lambda: not self._makes_more(daemon), _ROUND_SECONDS)

    def _makes_more(self, daemon: _Daemon) -> bool:
        return bool(daemon.get("/v1/status").get("upkeep", {}).get("busy"))

    def _followed(self, version: int) -> Any:
        """Seconds by phase, once the publisher's local checkpoint is at the version too."""
        last = self._running.get("/v1/status")["publications"][:1]
        there = last and last[0]["version"] == version and "patch" in last[0]["seconds"]
        return last[0]["seconds"] if there else None

    def _ended(self, job: str) -> Any:
        told = self._running.get(f"/v1/publications/{job}")
        return told if told["state"] in ("done", "failed") else None

    def sync(self, version: int) -> Done:
        daemon = self._running
        with _Watched(daemon.process.pid) as watched:
            daemon.post("/v1/wake", None)
            status = daemon.wait(lambda: self._at(version), _ROUND_SECONDS)
        phases, moves = dict(status["updates"][-1]["seconds"]), len(status["updates"])
        read, total = disk_bytes(daemon.process.pid), phases.pop("total")
        return Done(total, phases, watched.cpu, watched.anon_bytes, moves=moves, disk_bytes=read)

    def ended(self, version: int) -> float:
        """Unix time at which the host, which follows, had the version."""
        status = self._running.wait(lambda: self._at(version), _ROUND_SECONDS)
        return float(status["updates"][-1]["at"])

    def _at(self, version: int) -> Any:
        status = self._running.get("/v1/status")
        there = status["updates"] and status["updates"][-1]["version"] == version
        return status if there and status["local_version"] == version and status["ready"] else None

    def stop(self) -> None:
        if self._daemon is not None:
            self._daemon.stop()
            self._daemon = None

    def publish_command(self, checkpoint: Path) -> Sequence[str]:
        places = self.places
        words: list[object] = [
            *_WEIGHTCAST,
            "publish",
            checkpoint,
            "--channel",
            self._channel,
            "--base",
            places.base,
        ]
        words += ["--local", places.publisher, "--encoding", self.name, "--threads", self.threads, "--json"]
        return [str(word) for word in words]

    def sync_command(self) -> Sequence[str]:
        places = self.places
        words: list[object] = [*_WEIGHTCAST, "sync", "--channel", self._channel, "--base", places.base]
        words += ["--local", places.host, "--threads", self.threads, "--json"]
        return [str(word) for word in words]


class Field(Contender):
    def __init__(self, name: str, places: Places, threads: int) -> None:
        super().__init__(name, places, threads)
        self._process: subprocess.Popen[str] | None = None

    def start_publisher(self) -> None:
        self._start("publisher", self.places.publisher)

    def start_host(self) -> None:
        self._start("host", self.places.host)

    def _start(self, side: str, local: Path) -> None:
        words = [*_FIELD, "serve", side, *self._flags(local)]
        self._process = spawn(words, self.places.log, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._answer()

    def publish(self, checkpoint: Path) -> Done:
        return self._ask(str(checkpoint))

    def sync(self, version: int) -> Done:
        return self._ask("sync")

    def settle(self) -> None:
        pass

    def _ask(self, line: str) -> Done:
        process = self._running
        with _Watched(process.pid) as watched:
            print(line, file=_pipe(process.stdin), flush=True)
            told = self._answer()
        pointer = told["pointed"] or None
        return Done(told["seconds"], told["profile"], watched.cpu, watched.anon_bytes, pointer=pointer)

    def _answer(self) -> Any:
        line = _pipe(self._running.stdout).readline()
        if not line:
            raise ContenderFailed(f"{self.name}: its process ended\n{tail(self.places.log)}")
        return json.loads(line)

    @property
    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise ContenderFailed(f"{self.name}: no daemon runs")
        return self._process

    def stop(self) -> None:
        if self._process is not None:
            self._process.communicate(timeout=60)
            self._process = None

    def publish_command(self, checkpoint: Path) -> Sequence[str]:
        return [*map(str, _FIELD), "publish", str(checkpoint), *self._flags(self.places.publisher)]

    def sync_command(self) -> Sequence[str]:
        return [*map(str, _FIELD), "sync", *self._flags(self.places.host)]

    def _flags(self, local: Path) -> list[str]:
        words = ["--channel", self.places.channel, "--local", local, "--base", self.places.base]
        return [str(word) for word in [*words, "--threads", self.threads]]


class _Watched:
    """CPU time and growth of a running process over a `with` block."""

    def __init__(self, process: int) -> None:
        self._process, self._highest = process, highest_anon(process)
        self.cpu, self.anon_bytes = 0.0, 0

    def __enter__(self) -> _Watched:
        self._cpu, self._idle = cpu_seconds(self._process), anon_bytes(self._process)
        self._seen = self._highest.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._highest.__exit__(None, None, None)
        with contextlib.suppress(FileNotFoundError):
            self.cpu = cpu_seconds(self._process) - self._cpu
        self.anon_bytes = max(0, self._seen.nbytes - self._idle)


class _Daemon:
    """A daemon of weightcast's and its HTTP side."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name, self.process, self._log = name, process, log
        self._client = httpx.Client(trust_env=False, timeout=60)

    def connect(self, port: int) -> None:
        self._client.base_url = httpx.URL(f"http://127.0.0.1:{port}")
        self.wait(lambda: self._client.get("/readyz").status_code == 200, _START_SECONDS)

    def get(self, path: str) -> Any:
        return self._told(self._client.get(path))

    def post(self, path: str, body: object) -> Any:
        return self._told(self._client.post(path, json=body))

    def _told(self, answer: httpx.Response) -> Any:
        if answer.is_error:
            raise ContenderFailed(f"{self.name}: {answer.request.url} said {answer.text}")
        return answer.json() if answer.content else None

    def wait(self, condition: Callable[[], Any], seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        pause, longest = _POLL_SECONDS
        while not (found := condition()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise ContenderFailed(f"{self.name}: ended or too slow\n{tail(self._log)}")
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return found

    def stop(self) -> None:
        self._client.close()
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def spawn(words: Sequence[object], log: Path, **pipes: int) -> subprocess.Popen[str]:
    """A process whose messages go to `log`, without settings of the caller's environment. Its modules are
    compiled once, as where it is installed, not by every command."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("WEIGHTCAST_")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with log.open("ab") as stream:
        return subprocess.Popen(
            [str(word) for word in words],
            stdin=pipes.get("stdin", subprocess.DEVNULL),
            stdout=pipes.get("stdout", stream.fileno()),
            stderr=stream,
            text=True,
            env=environment,
        )


def tail(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _pipe(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise ContenderFailed("a process without pipes")
    return stream


Doors = Literal["daemons", "commands"]
Cache = Literal["warm", "cold"]
Say = Callable[[str], None]
DEFAULT = 0.014


@dataclass(frozen=True)
class Block:
    """Rounds that belong to one row of each contender."""

    rounds: int
    density: float = DEFAULT
    doors: Doors = "daemons"
    cache: Cache = "warm"
    counts: bool = True
    """false: they only warm up"""


WARM_UP = Block(1, counts=False)


@dataclass(frozen=True)
class Scenario:
    nbytes: int
    threads: int
    blocks: tuple[Block, ...]
    """daemons first"""
    contenders: tuple[str, ...] = ("fast", "small", "field")
    experts: int = 0
    """so many tensors of one size are the model; 0: few large ones"""
    scales: bool = False
    """half of them are scales"""

    def in_order(self) -> tuple[Block, ...]:
        return (WARM_UP, *self.blocks)


@dataclass
class _Measured:
    """Rounds of one contender in one block."""

    published: list[Done] = field(default_factory=list)
    synced: list[Done] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)


class _Run:
    def __init__(self, scenario: Scenario, root: Path, seed: int, say: Say) -> None:
        self.scenario, self.root, self.say = scenario, root, say
        self.model = Model(scenario.nbytes, seed, scenario.experts, scenario.scales)
        self.base = self.model.write(root / "base")
        self.contenders = [contender(name, root, self.base, scenario.threads) for name in scenario.contenders]
        self.measured: dict[tuple[int, str], _Measured] = {}
        self.version = 0

    def publications(self) -> None:
        with self._daemons(lambda one: one.start_publisher()) as daemons:
            forget_pages(self.base)
            for number, block, checkpoint in self._published_rounds():
                if block.doors == "commands":
                    daemons.close()
                for one in self._turns():
                    self._settle(block, checkpoint, one.places.publisher)
                    publish = one.publish if block.doors == "daemons" else one.publish_once
                    done = publish(checkpoint)
                    slot = self._slot(number, one)
                    slot.published.append(done)
                    slot.nbytes.append(one.places.version_bytes(self.version))
                    self._told("publish", one, block, done)
        for one in self.contenders:
            shutil.rmtree(one.places.publisher)

    def syncs(self) -> None:
        for one in self.contenders:
            one.places.point(0)
        self.version = 0
        with self._daemons(lambda one: one.start_host()) as daemons:
            forget_pages(self.base)
            for number, block in self._rounds():
                if block.doors == "commands":
                    daemons.close()
                for one in self._turns():
                    version = one.places.version(self.version)
                    self._settle(block, version, one.places.host)
                    if block.cache == "warm":
                        read_all(files_below(version), self.scenario.threads)
                    one.places.point(self.version)
                    done = one.sync(self.version) if block.doors == "daemons" else one.sync_once()
                    self._slot(number, one).synced.append(done)
                    self._told("sync", one, block, done)

    def check(self) -> None:
        """Raises ContenderFailed when a host does not hold the last checkpoint bit for bit."""
        wanted = self.model.digests()
        for one in self.contenders:
            if digests_in(one.places.host) != wanted:
                raise ContenderFailed(f"{one.name}: the host does not hold what was published")

    def reads(self) -> Iterator[ReadRow]:
        paths = sorted(self.base.glob("*.safetensors"))
        for cache in ("cold", "warm"):
            seconds = []
            for _ in range(1 if cache == "cold" else 3):
                if cache == "cold":
                    forget_pages(self.base)
                began = time.perf_counter()
                read_all(paths, self.scenario.threads)
                seconds.append(time.perf_counter() - began)
            yield ReadRow(
                model_bytes=self.model.nbytes,
                cache=cache,
                threads=self.scenario.threads,
                seconds=Spread.of(seconds),
            )

    def rows(self) -> Iterator[FileRow]:
        for number, block in enumerate(self.scenario.in_order()):
            changed = [done.changed for name in self.scenario.contenders for done in self._of(number, name)]
            for name in self.scenario.contenders if block.counts else ():
                slot = self.measured[number, name]
                yield FileRow(
                    doors=block.doors,
                    cache=block.cache,
                    model_bytes=self.model.nbytes,
                    experts=self.scenario.experts,
                    asked_density=block.density,
                    threads=self.scenario.threads,
                    encoding=name,
                    rounds=len(slot.published),
                    elements=self.model.elements,
                    changed=round(median([count for count in changed if count] or [0])),
                    version_bytes=round(median(slot.nbytes)),
                    publish=_work(slot.published),
                    sync=_work(slot.synced),
                )

    def _of(self, number: int, name: str) -> Sequence[Done]:
        return self.measured[number, name].published

    def _rounds(self) -> Iterator[tuple[int, Block]]:
        for number, block in enumerate(self.scenario.in_order()):
            for _ in range(block.rounds):
                self.version += 1
                yield number, block

    def _published_rounds(self) -> Iterator[tuple[int, Block, Path]]:
        for number, block in self._rounds():
            self.model.step(block.density)
            checkpoint = self.model.write(self.root / f"new{self.version}")
            yield number, block, checkpoint
            shutil.rmtree(checkpoint)

    def _turns(self) -> list[Contender]:
        """Each contender once, starting with another one each version."""
        first = self.version % len(self.contenders)
        return self.contenders[first:] + self.contenders[:first]

    def _settle(self, block: Block, *needed: Path) -> None:
        for one in self.contenders:
            one.settle()
        os.sync()
        if block.cache == "cold":
            forget_pages(*needed)

    def _slot(self, number: int, one: Contender) -> _Measured:
        return self.measured.setdefault((number, one.name), _Measured())

    def _daemons(self, start: Callable[[Contender], None]) -> ExitStack:
        with ExitStack() as stack:
            for one in self.contenders:
                stack.callback(one.stop)
                start(one)
            return stack.pop_all()

    def _told(self, verb: str, one: Contender, block: Block, done: Done) -> None:
        self.say(
            f"{self.model.nbytes / 1e9:.2f} GB {block.density:.1%} {block.doors} {block.cache} "
            f"{self.scenario.threads} threads: {verb} {one.name} {done.seconds:.2f} s"
        )


def _work(rounds: Sequence[Done]) -> Work:
    names = sorted({name for done in rounds for name in done.phases})
    phases: Mapping[str, float] = {
        name: median(done.phases.get(name, 0.0) for done in rounds) for name in names
    }
    pointers = [done.pointer for done in rounds if done.pointer is not None]
    return Work(
        seconds=Spread.of(done.seconds for done in rounds),
        pointer=Spread.of(pointers) if pointers else None,
        cpu=Spread.of(done.cpu for done in rounds),
        anon_bytes=max(done.anon_bytes for done in rounds),
        phases=dict(phases),
    )


@dataclass(frozen=True)
class FileResults:
    rows: tuple[FileRow, ...]
    reads: tuple[ReadRow, ...]


def measure_files(scenario: Scenario, root: Path, seed: int, say: Say) -> FileResults:
    """`root`: an empty directory with space for ten times the model; emptied again. Raises
    ContenderFailed."""
    run = _Run(scenario, root, seed, say)
    try:
        run.publications()
        run.syncs()
        run.check()
        return FileResults(tuple(run.rows()), tuple(run.reads()))
    finally:
        for path in root.iterdir():
            shutil.rmtree(path)


# -- the machine

_PACKAGES = ("weightcast", "numpy", "numba", "zstandard", "xxhash", "blake3", "torch")
_SAMPLE_SECONDS = 0.02
_BLOCK = 8 << 20


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def machine(directory: Path) -> Machine:
    """`directory`: where the files of the benchmark lie."""
    return Machine(
        cpu=_processor(),
        cores=cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        file_system=_file_system(directory),
        versions={name: found for name in _PACKAGES if (found := _version(name))},
    )


def _processor() -> str:
    """By its maker's name, which generations share, and by LLVM's where kernels are compiled."""
    name = _field("/proc/cpuinfo", "model name")
    try:
        from weightcast.shared.kernels.compiler import processor
    except ImportError:
        return name
    return f"{name} ({processor()})"


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return "unknown"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _file_system(directory: Path) -> str:
    """Type of the innermost mount that contains `directory`."""
    best, kind = Path("/"), "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        where, form = line.split()[1:3]
        if directory.resolve().is_relative_to(where) and Path(where).is_relative_to(best):
            best, kind = Path(where), form
    return kind


def cpu_seconds(process: int) -> float:
    """User and system time of a running process."""
    text = Path(f"/proc/{process}/stat").read_text()
    user, system = text.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def ended_children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def disk_bytes(process: int) -> int:
    lines = Path(f"/proc/{process}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def anon_bytes(process: int) -> int:
    """RssAnon; 0 once the process is gone. Pages of mapped files belong to the page cache."""
    try:
        text = Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = [line.split()[1] for line in text.splitlines() if line.startswith("RssAnon:")]
    return int(found[0]) << 10 if found else 0


class Highest:
    """The most RssAnon of a process that was seen."""

    def __init__(self) -> None:
        self.nbytes = 0


@contextmanager
def highest_anon(process: int) -> Iterator[Highest]:
    seen, over = Highest(), threading.Event()

    def watch() -> None:
        while not over.wait(_SAMPLE_SECONDS):
            seen.nbytes = max(seen.nbytes, anon_bytes(process))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def files_below(*directories: Path) -> list[Path]:
    return [path for each in directories for path in sorted(each.rglob("*")) if path.is_file()]


def forget_pages(*directories: Path) -> None:
    """Drops the files below from the page cache. Files that a process has mapped stay."""
    for path in files_below(*directories):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def read_all(paths: Sequence[Path], threads: int) -> int:
    """Reads the files block by block into buffers that are kept; bytes read."""
    blocks = [(path, at) for path in paths for at in range(0, path.stat().st_size, _BLOCK)]
    room = threading.local()

    def read(block: tuple[Path, int]) -> int:
        if not hasattr(room, "buffer"):
            room.buffer = bytearray(_BLOCK)
        path, at = block
        with path.open("rb", buffering=0) as file:
            return os.preadv(file.fileno(), [room.buffer], at)

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(read, blocks))

"""Thousands of versions of a tiny model under faults: nothing is lost, memory and descriptors stay flat.

    python tests/faults/soak_run.py --versions 3000

One publisher and two hosts run to the end; engines, hooks, checkpoints and the channel misbehave. After every
version the host holds exactly its bytes, and so does its engine; so does the other host, which follows the
same weights through a channel in the field's format. `--seed` fixes the faults, not the timing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "faults"), str(TESTS / "crash"), str(TESTS / "subscriber"), str(TESTS)]

import httpx  # noqa: E402
import numpy as np  # noqa: E402
from core_cases import Model, bytes_of, place_of, read_checkpoint, rot, tensor, write_checkpoint  # noqa: E402
from crash_engines import Copying  # noqa: E402
from crash_model import ChannelSeen, channel_violations  # noqa: E402
from crash_observe import digest_of, see_channel, see_pointer  # noqa: E402
from crash_processes import Child, fork  # noqa: E402
from doubles import Answer, Call, Drop, serve  # noqa: E402
from field_channel import Encoding, FieldChannel  # noqa: E402
from forked import import_weightcast  # noqa: E402
from hosts import Weights  # noqa: E402
from http_faults import Fault, http_faults  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from s3_copy import BucketCopy  # noqa: E402
from s3_gateway import bucket_at  # noqa: E402

from weightcast.shared.cli.main import run as run_command  # noqa: E402

SETTLE_SECONDS = 60.0
WARM_UP = 0.3
"""share of the samples that is not fitted: caches and pools fill"""
SLACK_BYTES, SLACK_FDS = 8 << 20, 4
"""what the fitted lines may rise over the whole run"""
HOOK = """import os, signal, sys
try:
    how = open(sys.argv[1]).read()
except FileNotFoundError:
    how = ""
if how:
    os.unlink(sys.argv[1])
if how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit({"later": 75, "fail": 1}.get(how, 0))
"""


FEWEST = 60
"""versions, however slow the machine is: the first pruning, of version 17, belongs to the warm-up"""
FIELD_ENCODINGS: tuple[Encoding, ...] = ("xor", "overwrite", "xor_sparse")
FIELD_CHECKSUMS = ("xxh3-128", "blake3", "adler32")
FIELD_KEPT = 16
"""versions that the field's channel holds"""


class LostError(Exception):
    """A version did not arrive, or not as it was published."""


class Engine(Copying):
    """Fails now and then while it `misbehaves`."""

    misbehaves = False
    _random = random.Random(7)

    def respond(self, call: Call) -> Answer | Drop:
        del self.calls[:-100], self.served[:-10]
        if self.misbehaves and call.method == "POST" and self._random.random() < 0.3:
            return self._random.choice((Answer(500), Answer(503), Drop(), Drop(after=True)))
        return super().respond(call)


def run_engine(wire: Connection) -> None:
    """Sends the engine's URL, then answers `see`, `restart`, `misbehave`, `behave` and `end`."""
    engine = Engine()
    with serve(engine) as url:
        wire.send(url)
        while (order := wire.recv()) != "end":
            if order == "restart":
                engine.restart()
            elif order != "see":
                engine.misbehaves = order == "misbehave"
            wire.send((engine.held, engine.paused))


def run_proxy(upstream: str, wire: Connection) -> None:
    """Sends the proxy's address, then takes lists of faults, each instead of the last, and answers with how
    many of the last were hit."""
    with http_faults(upstream) as proxy:
        wire.send(proxy.endpoint)
        while (faults := wire.recv()) is not None:
            wire.send(sum(fault.hits for fault in proxy.faults))
            proxy.faults = faults


@dataclass
class Bucket:
    """A channel in an object store. Daemons reach it through a proxy that injects faults, this process
    without it."""

    address: str
    copy: BucketCopy
    proxy: Child
    wire: Connection
    seen: ChannelSeen | None = None
    hits: int = 0

    @classmethod
    def behind_proxy(cls, address: str, root: Path) -> Bucket:
        copy = BucketCopy.of(address, root / "channel")
        wire, theirs = multiprocessing.Pipe()
        proxy = fork(lambda: run_proxy(copy.gateway.endpoint, theirs), root / "proxy.log")
        theirs.close()
        os.environ["AWS_ENDPOINT_URL"] = wire.recv()
        return cls(address, copy, proxy, wire)

    def inject(self, faults: list[Fault]) -> None:
        self.wire.send(faults)
        self.hits += self.wire.recv()

    def latest(self) -> int:
        return self.copy.read_number("latest")

    def look(self) -> None:
        """Raises LostError for what a reader could see and must not."""
        before, self.seen = self.seen, see_channel(self.copy.refresh())
        if found := channel_violations(self.seen, before):
            raise LostError(f"in the channel: {found}")

    def close(self) -> None:
        self.copy.close()
        self.proxy.kill()
        self.proxy.wire.close()
        self.wire.close()


@dataclass(frozen=True)
class Sample:
    version: int
    anonymous: int
    """bytes"""
    descriptors: int
    threads: int


def sample(pid: int, version: int) -> Sample:
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
    )
    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Sample(version, int(status["RssAnon"].split()[0]) << 10, descriptors, int(status["Threads"]))


@dataclass
class Daemon:
    child: Child
    port: Path
    samples: list[Sample] = field(default_factory=list)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self._call("GET", "/v1/status").json()
        return found

    def wake(self) -> None:
        self._call("POST", "/v1/wake")

    def _call(self, method: str, path: str) -> httpx.Response:
        if self.child.ended:
            raise LostError(f"a daemon ended ({self.child.status}): {self.child.words()}")
        url = f"http://127.0.0.1:{int(self.port.read_text())}{path}"
        return httpx.request(method, url, trust_env=False, timeout=20)


class Soak:
    patience = 1.0
    """what every wait is multiplied by"""

    def __init__(self, root: Path, seed: int, channel: str = "") -> None:
        """`channel`: URL of a bucket; empty: a directory."""
        self.root, self.random = root, random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.model: Model = {
            "embed": tensor(self.numbers, "BF16", 31, 9),
            "scale": tensor(self.numbers, "F32"),
            "quantised": tensor(self.numbers, "F8_E4M3", 17, 3),
            "empty": tensor(self.numbers, "BF16", 0, 4),
            "up": tensor(self.numbers, "BF16", 64, 16),
        }
        self.version, self.seconds = 0, defaultdict[str, list[float]](list)
        """`version` counts what was handed over; `seconds` of each version, by its fault"""
        root.mkdir(parents=True, exist_ok=True)
        write_checkpoint(self.base, self.model)
        self.inbox.mkdir()
        (root / "hook.py").write_text(HOOK)
        self.bucket = Bucket.behind_proxy(f"{channel}/{root.parent.name}/channel", root) if channel else None
        self.field = FieldChannel(root / "field", self._weights())
        self._wire, theirs = multiprocessing.Pipe()
        self._engine = fork(lambda: run_engine(theirs), root / "engine.log")
        theirs.close()
        self.publisher = self._publisher()
        self.host = self._host(self._wire.recv())
        self.follower = self._follower()

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def channel(self) -> Path:
        return self.root / "channel"

    @property
    def address(self) -> str:
        return str(self.channel) if self.bucket is None else self.bucket.address

    @property
    def inbox(self) -> Path:
        return self.root / "inbox"

    @property
    def local(self) -> Path:
        return self.root / "host"

    @property
    def followed(self) -> Path:
        """What the host of the field's channel keeps."""
        return self.root / "follower"

    def _weights(self) -> Weights:
        return Weights({name: (one.dtype, one.shape, one.data.tobytes()) for name, one in self.model.items()})

    def _publisher(self) -> Daemon:
        return self._daemon(
            "publisher",
            *("publisher", "run", "--channel", self.address, "--base", self.base, "--local"),
            *(self.root / "publisher", "--watch", self.inbox, "--marker", "complete", "--every"),
            *("--existing", "--consume", "--keep-versions", "16", "--anchor-every", "25"),
            *("--post-write", self._hook("post")),
        )

    def _host(self, url: str) -> Daemon:
        return self._daemon(
            "host",
            *("subscriber", "run", "--channel", self.address, "--base", self.base, "--local", self.local),
            *("--engine", f"sglang={url}", "--visible-deadline", "2"),
            # needs a directory
            *(("--pre-read", self._hook("pre")) if self.bucket is None else ()),
        )

    def _follower(self) -> Daemon:
        where = ("--channel", self.field.root, "--base", self.base, "--local", self.followed)
        return self._daemon("follower", "subscriber", "run", *where, "--visible-deadline", "2")

    def _hook(self, name: str) -> str:
        return f"{sys.executable} -IS {self.root / 'hook.py'} {self.root / name}"

    def _daemon(self, name: str, *arguments: object) -> Daemon:
        port = self.root / f"{name}.port"
        common = ("--port", "0", "--port-file", port, "--poll-seconds", "0.05", "--threads", "1")
        words = [str(each) for each in (*arguments, *common)]
        return Daemon(fork(lambda: sys.exit(run_command(words)), self.root / f"{name}.log"), port)

    @property
    def daemons(self) -> Mapping[str, Daemon]:
        return {"publisher": self.publisher, "host": self.host, "host of the field's": self.follower}

    def close(self) -> None:
        for child in (*(each.child for each in self.daemons.values()), self._engine):
            child.signal(signal.SIGCONT)
            child.kill()
            child.wire.close()
        self._wire.close()
        if self.bucket is not None:
            self.bucket.close()

    # one version

    def step(self) -> None:
        """The next version, with or without faults. Raises LostError."""
        known = FAULTS if self.bucket is None else FAULTS_OF_A_BUCKET
        share = 0.6 if self.bucket is None else 0.3
        fault = self.random.choice(list(known)) if self.random.random() < share else ""
        if self.bucket is not None and self.random.random() < 0.5:
            fault = "requests fail"
        began = time.monotonic()
        with known[fault](self) if fault else contextlib.nullcontext():
            self._hand_over()
            # the fault meets what is under way
            time.sleep(self.random.uniform(0.0, 0.1))
        self._settle(fault)
        self.seconds[fault or "none"].append(time.monotonic() - began)
        if self.bucket is not None:
            self.bucket.look()

    def _hand_over(self) -> None:
        self.version += 1
        names = [name for name, one in self.model.items() if len(one.data)]
        moved = set(self.random.sample(names, self.random.randint(1, len(names))))
        self.model = {
            name: one.changed(self.numbers, 3) if name in moved else one for name, one in self.model.items()
        }
        unfinished = self.root / "unfinished"
        write_checkpoint(unfinished, self.model)
        (unfinished / "complete").touch()
        unfinished.rename(self.inbox / f"step_{self.version}")
        self._hand_over_to_the_field()

    def _hand_over_to_the_field(self) -> None:
        encoding, form = self.random.choice(FIELD_ENCODINGS), self.random.choice(FIELD_CHECKSUMS)
        number = self.field.publish(self._weights(), encoding, form, ranks=self.random.randint(1, 3))
        shutil.rmtree(self.field.directory(number - FIELD_KEPT), ignore_errors=True)

    def _settle(self, fault: str) -> None:
        wanted = digest_of(bytes_of(self.model))
        deadline = time.monotonic() + SETTLE_SECONDS * self.patience
        while not self._arrived(wanted):
            if time.monotonic() > deadline:
                raise LostError(f"step {self.version} after {fault or 'no fault'}:\n{self._words()}")
            # each wake costs requests, which the daemons wait for too
            time.sleep(0.005 if self.bucket is None else 0.1)
            with contextlib.suppress(OSError, ValueError, httpx.HTTPError):
                for daemon in self.daemons.values():
                    daemon.wake()

    def _words(self) -> str:
        return "\n".join(f"{each.status()}\n{each.child.words()}" for each in self.daemons.values())

    def _arrived(self, wanted: str) -> bool:
        """Judged by bytes: a number may be skipped where a version could not be finished."""
        try:
            latest = self.latest()
            status = self.host.status()
        except (OSError, ValueError, httpx.HTTPError):
            return False
        if (status["served_version"], status["ready"]) != (latest, True):
            return False
        held, paused = self.tell("see")
        if paused or not held == wanted == digest_of(read_checkpoint(self.local)):
            return False
        return self._followed(wanted)

    def _followed(self, wanted: str) -> bool:
        newest = len(self.field.weights) - 1
        if not newest:
            return True
        try:
            status = self.follower.status()
        except (OSError, ValueError, httpx.HTTPError):
            return False
        if (status["local_version"], status["ready"]) != (newest, True):
            return False
        return wanted == digest_of(read_checkpoint(self.followed))

    def latest(self) -> int:
        return see_pointer(self.channel) if self.bucket is None else self.bucket.latest()

    def tell(self, order: str) -> tuple[str, bool]:
        self._wire.send(order)
        answer: tuple[str, bool] = self._wire.recv()
        return answer

    def newest(self) -> Path:
        return self.channel / f"weight_v{self.latest():06d}"

    def sample(self) -> None:
        for daemon in self.daemons.values():
            daemon.samples.append(sample(daemon.child.pid, self.version))


# what goes wrong while a version is made and followed


@contextlib.contextmanager
def _hooks(soak: Soak) -> Iterator[None]:
    how = soak.random.choice(("kill", "later", "fail"))
    (soak.root / soak.random.choice(("pre", "post"))).write_text(how)
    yield


@contextlib.contextmanager
def _engine_errors(soak: Soak) -> Iterator[None]:
    soak.tell("misbehave")
    yield
    soak.tell("behave")


@contextlib.contextmanager
def _engine_restart(soak: Soak) -> Iterator[None]:
    yield
    soak.tell("restart")


@contextlib.contextmanager
def _suspended(soak: Soak) -> Iterator[None]:
    child = soak.random.choice(list(soak.daemons.values())).child
    child.signal(signal.SIGSTOP)
    yield
    child.signal(signal.SIGCONT)


@contextlib.contextmanager
def _bad_checkpoint(soak: Soak) -> Iterator[None]:
    """The trainer leaves half a file, and says that it is complete."""
    bad = write_checkpoint(soak.root / "bad", soak.model)
    file = bad / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    (bad / "complete").touch()
    target = soak.inbox / f"bad_{soak.version}"
    bad.rename(target)
    yield
    shutil.rmtree(target)


@contextlib.contextmanager
def _late(soak: Soak) -> Iterator[None]:
    """The newest version is not there for a moment."""
    directory = soak.newest() if soak.version else None
    if directory is not None:
        directory.rename(soak.root / "late")
    yield
    if directory is not None:
        (soak.root / "late").rename(directory)


@contextlib.contextmanager
def _torn_pointer(soak: Soak) -> Iterator[None]:
    """As a network file system may show it; the host is suspended while it is made whole again."""
    pointer = soak.channel / "latest"
    soak.publisher.child.signal(signal.SIGSTOP)
    text = pointer.read_text() if pointer.exists() else ""
    if text:
        pointer.write_text(text[:3])
    yield
    if text:
        pointer.write_text(text)
    soak.publisher.child.signal(signal.SIGCONT)


@contextlib.contextmanager
def _damaged_shard(soak: Soak) -> Iterator[None]:
    """Of the version that comes: for a moment its last byte is another one."""
    yield
    for shard in soak.newest().glob("*.safetensors"):
        with contextlib.suppress(FileNotFoundError), shard.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            for byte in (bytes([last[0] ^ 1]), last):
                file.seek(-1, os.SEEK_END)
                file.write(byte)
                file.flush()
                time.sleep(0.02)


@contextlib.contextmanager
def _rot(soak: Soak) -> Iterator[None]:
    """A byte of the host's goes bad in a tensor, without a trace in the file's times."""
    if soak.version and place_of(soak.local, "up"):
        rot(soak.local, "up", soak.random.randrange(64))
    yield


@contextlib.contextmanager
def _stray(soak: Soak) -> Iterator[None]:
    (soak.local / ".weightcast" / "journal" / f"{soak.version:032x}.journal").write_bytes(b"stray")
    yield


FAULTS: Mapping[str, Callable[[Soak], contextlib.AbstractContextManager[None]]] = {
    "a hook fails": _hooks,
    "engine errors": _engine_errors,
    "engine restarts": _engine_restart,
    "suspended": _suspended,
    "bad checkpoint": _bad_checkpoint,
    "late version": _late,
    "torn pointer": _torn_pointer,
    "damaged shard": _damaged_shard,
    "rot on the host": _rot,
}


@contextlib.contextmanager
def _requests(soak: Soak) -> Iterator[None]:
    """Some of the requests that follow fail, each kind in its way."""
    assert soak.bucket is not None
    soak.bucket.inject([_drawn(soak.random) for _ in range(soak.random.randint(1, 4))])
    yield


def _drawn(rng: random.Random) -> Fault:
    times, skip = rng.randint(1, 3), rng.choice((0, 0, 1, 3, 8))
    place = rng.choice((".*", "latest", "index.json", "safetensors", "publishers/", "hosts/", "base.json"))
    kind = rng.choice(("delay", "cut", "repeat", "lose", "refuse", "stale", "412", "429", "500", "503"))
    if kind == "stale":
        return Fault("stale", "GET", "latest", times, skip)
    if kind == "412":
        return Fault("status", "PUT", place, times, skip, 412)
    if kind.isdigit():
        return Fault("status", ".*", place, times, skip, int(kind))
    return Fault(kind, ".*", place, times, skip, seconds=rng.uniform(0.05, 1.0))  # type: ignore[arg-type]


OF_A_DIRECTORY = ("late version", "torn pointer", "damaged shard")
FAULTS_OF_A_BUCKET = {
    **{name: fault for name, fault in FAULTS.items() if name not in OF_A_DIRECTORY},
    "requests fail": _requests,
}


# the figures


@dataclass(frozen=True)
class Trend:
    """A fitted line over the samples after the warm-up: where it begins, and its rise to the end."""

    start: float
    rise: float


def trend(samples: list[Sample], of: Callable[[Sample], int]) -> Trend:
    used = samples[int(len(samples) * WARM_UP) :]
    at = np.array([each.version for each in used], dtype=float)
    slope, start = np.polyfit(at - at[0], [of(each) for each in used], 1)
    return Trend(float(start), float(slope * (at[-1] - at[0])))


def judge(soak: Soak, console: Console) -> bool:
    """Prints the table; whether all is flat."""
    table = Table("process", "samples", "anonymous MiB", "rise MiB", "descriptors", "rise", "threads")
    flat = True
    for name, daemon in soak.daemons.items():
        memory = trend(daemon.samples, lambda each: each.anonymous)
        descriptors = trend(daemon.samples, lambda each: each.descriptors)
        flat &= memory.rise <= SLACK_BYTES and descriptors.rise <= SLACK_FDS
        table.add_row(
            name,
            str(len(daemon.samples)),
            f"{memory.start / 2**20:.1f}",
            f"{memory.rise / 2**20:+.2f}",
            f"{descriptors.start:.1f}",
            f"{descriptors.rise:+.2f}",
            str(daemon.samples[-1].threads),
        )
    console.print(table)
    console.print(
        ", ".join(f"{len(each)} {what} ({median(each):.1f} s)" for what, each in sorted(soak.seconds.items()))
    )
    if soak.bucket is not None:
        console.print(f"{soak.bucket.hits} requests disturbed")
    return flat


def soak(
    root: Path,
    versions: int,
    seconds: float,
    seed: int,
    console: Console,
    channel: str = "",
    samples: Path | None = None,
) -> bool:
    made = Soak(root, seed, channel)

    def stays_flat() -> bool:
        """Over so many versions more."""
        first, deadline = made.version, time.monotonic() + seconds
        for daemon in made.daemons.values():
            daemon.samples.clear()
        while (count := made.version - first) < versions and (time.monotonic() < deadline or count < FEWEST):
            made.step()
            if made.version % max(1, versions // 200) == 0:
                made.sample()
                if samples is not None:
                    taken = {
                        name: [asdict(each) for each in one.samples] for name, one in made.daemons.items()
                    }
                    samples.write_text(json.dumps(taken))
        console.print(f"seed {seed}: {made.version} versions arrived")
        return judge(made, console)

    try:
        made._settle("")
        # growth goes on; a pool that fills late does not
        return stays_flat() or stays_flat()
    except LostError as error:
        console.print(f"seed {seed}: {error}", markup=False)
        return False
    finally:
        made.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--versions", type=int, default=3000)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--patience", type=float, default=1.0, help="multiplies every wait")
    parser.add_argument("--json", type=Path, default=None, help="write the samples to this file")
    parser.add_argument(
        "--channel", default="", help="s3, or s3://BUCKET of the environment's server; else a directory"
    )
    options = parser.parse_args()
    Soak.patience = options.patience
    import_weightcast()
    root = Path(tempfile.mkdtemp(prefix="weightcast-soak-"))
    try:
        with bucket_at(options.channel, root / "s3") as channel:
            limits = (options.versions, options.seconds, options.seed)
            flat = soak(root / "run", *limits, Console(width=110), channel, options.json)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    sys.exit(not flat)


if __name__ == "__main__":
    main()

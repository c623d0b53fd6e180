"""A real vLLM, a real subscriber beside it, and fresh loads of every version to judge what the engine says.

The engine's control routes are called by the subscriber alone; what this module asks the engine are the
questions of its users (`/v1`), and whether it is paused.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from forked import Forked, origin, run_weightcast, weightcast
from safetensors.torch import load_file, save_file

from weightcast.publisher.api import Publisher
from weightcast.publisher.channel_init import init_channel

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
VENV = Path(os.environ.get("WEIGHTCAST_ENGINE_VENV", REPOSITORY / ".venv-vllm"))
NO_KEEP_ALIVE = httpx.Limits(max_keepalive_connections=0)
"""an idle connection may be dropped by the server just when it is used again"""
START_SECONDS = 1500.0
COMMAND = Path(sys.executable).with_name("weightcast")
FULL = bool(os.environ.get("WEIGHTCAST_ENGINES_FULL"))
ENGINE_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # its threads would all be bound to the first core, with every other vLLM on the machine
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}
ENGINE_MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "transformers.models.auto.modeling_auto",
)
STEP_SECONDS = 420.0
"""a hundred times what an idle machine takes: nothing here may fail because a machine is busy"""
IN_FLIGHT_TOKENS = 240
"""long enough to be met by an update"""
LOGS: list[Path] = []
"""of all processes that a test may have to do with, the newest last; shown when one fails"""
TOLERANCE = 2e-4
"""nats: float32 sums in another order (fused layers, chunked prefill) differ by a tenth of it as a rule,
a stale layer or KV block by thousands of times as much for nearly all"""
OUTLIERS, FAR = 60, 5e-3
"""One token, and another for every 60, may be off by up to FAR nats: float32 against float64 on the same
weights gives 3e-6 in the middle and up to 1e-3 for single tokens of 240. With one stale tensor of 37 several
of 12 are off by more than TOLERANCE; but for the last layer's key bias, after one of two prompts."""


def wait_until(condition: Callable[[], object], what: str, seconds: float = STEP_SECONDS) -> None:
    pause, deadline = threading.Event(), time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"{what}: not within {seconds:.0f} s")
        pause.wait(0.02)


def tail_of(log: Path, lines: int = 40) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def living_groups() -> set[str]:
    """Of processes, without those that have ended and were not waited for."""
    found = set[str]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, group, *_ = stat.read_text().rpartition(")")[2].split()
            if state not in "ZX":
                found.add(group)
    return found


def reserved_port() -> socket.socket:
    """A port that nobody else is given while the socket is open. It does not listen: a server that sets
    SO_REUSEADDR too, as vLLM does, can, now and after a restart."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def engine_python() -> Path:
    python = VENV / "bin" / "python"
    if not python.exists():
        pytest.fail(f"{VENV} is not there: run these tests with `make test-engines`")
    return python


@functools.cache
def _imported() -> Any:
    """A process that has imported vLLM, which is half of a start."""
    return origin(engine_python(), ENGINE_MODULES, {**os.environ, **ENGINE_ENVIRONMENT})


def child_of(command: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
    """Forked from a process with what it imports, where there is one."""
    program, *words = command
    if program == COMMAND:
        return weightcast(*words, **options)
    if program == engine_python() and not FULL:
        return Forked(words, _imported(), **options)
    return subprocess.Popen([str(word) for word in command], **options)


def make_models(script: str, directory: Path) -> Path:
    """By a script of this folder, with the engines' libraries."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with child_of([engine_python(), HERE / script, directory], **options) as child:
        said, _ = child.communicate(timeout=START_SECONDS)
    assert child.returncode == 0, said
    return directory


@dataclass
class Process:
    """A child in a group of its own, with a log."""

    log: Path
    child: subprocess.Popen[bytes]

    @classmethod
    def start(cls, log: Path, command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> Process:
        if log not in LOGS:
            LOGS.append(log)
        with log.open("ab") as stream:
            child = child_of(
                command,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(log, child)

    @property
    def running(self) -> bool:
        return self.child.poll() is None

    def tail(self) -> str:
        return tail_of(self.log)

    def stop(self, grace: float = 20.0) -> None:
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(grace)
        self._signal(signal.SIGKILL)
        self.child.wait()
        # a worker that was forked has the server's port open until it is gone
        wait_until(lambda: str(self.child.pid) not in living_groups(), "the end of all its processes")

    @contextmanager
    def suspended(self) -> Iterator[None]:
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.child.pid, number)


class FreshLoad:
    """The judge: transformers, in the engines' environment."""

    def __init__(self, log: Path) -> None:
        with log.open("ab") as stream:
            self._child = child_of(
                [engine_python(), HERE / "fresh_load.py"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                start_new_session=True,
            )
        self._log = log
        self._one_at_a_time = threading.Lock()
        self._known = defaultdict[tuple[Path, Path | None], dict[str, Judged]](dict)

    def judge(
        self, directory: Path, sequences: Sequence[tuple[list[int], list[int]]], adapter: Path | None = None
    ) -> list[Judged]:
        """Once per sequence: a version's directory never changes."""
        assert self._child.stdin is not None and self._child.stdout is not None
        with self._one_at_a_time:
            known = self._known[directory, adapter]
            new = [both for both in sequences if str(both) not in known]
            if new:
                asked = {"directory": str(directory), "adapter": adapter and str(adapter), "sequences": new}
                print(json.dumps(asked), file=self._child.stdin, flush=True)
                line = self._child.stdout.readline()
                assert line, self._log.read_text(errors="replace")
                judged = (Judged(**found) for found in json.loads(line))
                known |= dict(zip(map(str, new), judged, strict=True))
            return [known[str(both)] for both in sequences]

    def __enter__(self) -> FreshLoad:
        return self

    def __exit__(self, *error: object) -> None:
        self._child.kill()
        self._child.communicate()


@dataclass(frozen=True)
class Judged:
    """Per token of an answer, in nats."""

    logprobs: list[float]
    best: list[float]
    greedy: list[int]


@dataclass(frozen=True)
class Answer:
    status: int
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    finish: str
    began: float
    ended: float
    text: str = ""
    label: Mapping[str, Any] = field(default_factory=dict)
    """of the gate"""

    def fits(self, judged: Judged, start: int = 0, stop: int | None = None) -> bool:
        """Whether tokens [start, stop) are what greedy decoding says under the judge's weights."""
        return self.errors(judged, start, stop) == []

    def errors(self, judged: Judged, start: int = 0, stop: int | None = None) -> list[str]:
        found, far = list[str](), False
        said = range(len(self.tokens))[start:stop]
        for at in said:
            off = abs(self.logprobs[at] - judged.logprobs[at])
            short = judged.best[at] - judged.logprobs[at]
            if max(off, short) > TOLERANCE:
                far = far or max(off, short) > FAR
                found.append(f"token {at}: {self.tokens[at]}, greedy {judged.greedy[at]}, off by {off:.2g}")
        return found if far or len(found) > 1 + len(said) // OUTLIERS else []


class Server:
    """vLLM's OpenAI server on a port of its own."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        arguments: Sequence[str] = (),
        api_key: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._more = environment or {}
        self._reserved = reserved_port()
        self.port = self._reserved.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._model, self._log, self._arguments = model, log, list(arguments)
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._arguments += [] if api_key is None else ["--api-key", api_key]
        self._client = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=STEP_SECONDS,
            trust_env=False,
            limits=NO_KEEP_ALIVE,
        )
        self.api_key = api_key
        self._pool = ThreadPoolExecutor(16)
        self.process = self._start()

    def _environment(self) -> dict[str, str]:
        return {"VLLM_SERVER_DEV_MODE": "1", **ENGINE_ENVIRONMENT, **self._more}

    def _start(self) -> Process:
        command = [engine_python(), HERE / "vllm_server.py", *self._words()]
        return Process.start(self._log, command, self._environment())

    def _words(self) -> list[str | Path]:
        return [
            *("--model", self._model, "--served-model-name", "tiny", "--host", "127.0.0.1"),
            *("--port", str(self.port), "--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"),
            *("--enable-prompt-tokens-details", "--enable-prefix-caching", *self._arguments),
        ]

    def restart(self) -> None:
        """As a supervisor would."""
        self.process.stop()
        self.process = self._start()
        self.wait_ready()

    def wait_ready(self) -> None:
        def ready() -> bool:
            if not self.process.running:
                pytest.fail(f"vLLM ended:\n{self.process.tail()}")
            return self.status("/health") == 200

        wait_until(ready, "vLLM's start", START_SECONDS)

    def status(self, path: str) -> int:
        try:
            return self._client.get(path, timeout=60).status_code
        except httpx.HTTPError:
            return 0

    @property
    def paused(self) -> bool:
        return bool(self._client.get("/is_paused").json()["is_paused"])

    def status_without_key(self, path: str) -> int:
        return httpx.get(self.url + path, timeout=STEP_SECONDS, trust_env=False).status_code

    def fetch(self, path: str) -> Any:
        return self._client.get(path).raise_for_status().json()

    def through(self, url: str) -> Server:
        """The same server, behind another address."""
        other = copy.copy(self)
        other._client = httpx.Client(
            base_url=url, timeout=STEP_SECONDS, trust_env=False, limits=NO_KEEP_ALIVE
        )
        return other

    def ask(
        self,
        prompt: list[int],
        tokens: int = 12,
        *,
        first: threading.Event | None = None,
        headers: Mapping[str, str] | None = None,
        model: str = "tiny",
    ) -> Answer:
        """A greedy completion. `first` is set when its first token came. Raises for no failure: the status
        tells; 0 is a broken connection."""
        request = {
            "model": model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "stream": True,
        }
        began = time.monotonic()
        found, logprobs, finish = list[int](), list[float](), ""
        label = dict[str, Any]()
        try:
            with self._client.stream("POST", "/v1/completions", json=request, headers=headers) as reply:
                if reply.status_code != 200:
                    text = reply.read().decode(errors="replace")
                    return Answer(reply.status_code, prompt, [], [], "", began, time.monotonic(), text)
                for choice in _choices(reply.iter_lines(), label):
                    found += choice["token_ids"] or []
                    logprobs += (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
                    finish = choice["finish_reason"] or finish
                    if first is not None and found:
                        first.set()
        except (httpx.HTTPError, KeyError, ValueError) as error:
            return Answer(0, prompt, found, logprobs, finish, began, time.monotonic(), repr(error))
        return Answer(200, prompt, found, logprobs, finish, began, time.monotonic(), label=label)

    def begin(
        self, prompt: list[int], tokens: int, headers: Mapping[str, str] | None = None
    ) -> Future[Answer]:
        """A completion in flight: its first token came when this returns."""
        first = threading.Event()
        future = self._pool.submit(self.ask, prompt, tokens, first=first, headers=headers)
        wait_until(lambda: first.is_set() or future.done(), "the first token of a request")
        return future

    def send(self, prompt: list[int], tokens: int) -> Future[Answer]:
        return self._pool.submit(self.ask, prompt, tokens)

    def __enter__(self) -> Server:
        try:
            self.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.process.stop()
        self._pool.shutdown()
        self._client.close()
        self._reserved.close()


def one_shot(*words: str | Path, code: int = 0) -> str:
    """A `weightcast` command; its output."""
    done = run_weightcast(*words)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def _choices(lines: Iterator[str], label: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith(": weightcast "):
            label |= json.loads(line.removeprefix(": weightcast "))
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ValueError(line)
            yield from event.get("choices", ())


@dataclass
class Host:
    """`weightcast subscriber run` beside one engine."""

    root: Path
    channel: Path
    base: Path
    local: Path
    engine: str
    """the option's text; empty: without an engine"""
    process: Process | None = None
    starts: int = 0
    extra: Sequence[str] = field(default_factory=tuple)
    program: Sequence[str | Path] = (COMMAND,)

    def start(self) -> None:
        self.starts += 1
        port_file = self.root / f"host-{self.starts}.port"
        command = [
            *(*self.program, "subscriber", "run", "--channel", self.channel, "--base", self.base),
            *("--local", self.local, "--poll-seconds", "0.1", "--threads", "1"),
            *(("--engine", self.engine) if self.engine else ()),
            *("--port", "0", "--port-file", port_file, *self.extra),
        ]
        self.process = Process.start(self.root / "subscriber.log", command)
        wait_until(port_file.exists, "the subscriber's start")
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{port_file.read_text().strip()}",
            timeout=STEP_SECONDS,
            trust_env=False,
            limits=NO_KEEP_ALIVE,
        )

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()
            self.process = None
            self.client.close()

    def supervise(self) -> None:
        """As systemd would: a truncated file under a mapping ends a process without a word."""
        if self.process is not None and not self.process.running:
            self.stop()
            self.start()

    def with_engine(self, engine: str) -> None:
        """Another option: the daemon starts anew."""
        self.stop()
        self.engine = engine
        self.start()

    @property
    def status(self) -> Any:
        return self.client.get("/v1/status").raise_for_status().json()

    @property
    def ready(self) -> bool:
        return self.client.get("/readyz").status_code == 200

    @property
    def mark(self) -> str:
        [engine] = self.status["engines"]
        return str(engine["mark"])

    @property
    def served(self) -> int | None:
        status = self.status
        aligned = all(engine["aligned"] for engine in status["engines"])
        return status["served_version"] if aligned and status["ready"] else None

    def wait_served(self, version: int, seconds: float = STEP_SECONDS) -> None:
        assert self.process is not None
        process = self.process

        def there() -> bool:
            if not process.running:
                pytest.fail(f"the subscriber ended:\n{process.tail()}")
            return self.served == version

        try:
            wait_until(there, f"version {version} served", seconds)
        except BaseException:
            print(json.dumps(self.status, indent=1))
            print(process.tail())
            raise


class Run:
    """A channel, its publisher and the complete checkpoint of every version."""

    def __init__(self, root: Path, base: Path) -> None:
        self.root, self.base, self.channel = root, base, root / "channel"
        self.versions = [base]
        init_channel(self.channel, base)
        self.publisher = Publisher.open(self.channel, local=root / "publisher", base=base)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.publisher.close()

    @property
    def newest(self) -> int:
        return len(self.versions) - 1

    def write_next(self) -> Path:
        """The next version's checkpoint: a twentieth of all elements is another."""
        number = len(self.versions)
        directory = self.root / f"given{number:03}"
        copy_checkpoint(self.versions[-1], directory, lambda tensors: changed(tensors, number))
        return directory

    def publish(self) -> int:
        directory = self.write_next()
        report = self.publisher.publish_checkpoint(directory, step=len(self.versions))
        self.versions.append(directory)
        assert report.version == self.newest
        return self.newest


@contextmanager
def running(host: Host) -> Iterator[Host]:
    host.start()
    try:
        yield host
    finally:
        host.stop()


Tensors = dict[str, torch.Tensor]


def copy_checkpoint(source: Path, target: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """The same files with other tensors."""
    target.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        if path.suffix == ".safetensors":
            save_file(change(load_file(path)), target / path.name, {"format": "pt"})
        elif path.is_file():
            (target / path.name).write_bytes(path.read_bytes())
    return target


def changed(tensors: Tensors, seed: int, share: float = 0.05) -> Tensors:
    random = torch.Generator().manual_seed(seed)
    return {name: _changed(tensor, share, random) for name, tensor in tensors.items()}


def _changed(tensor: torch.Tensor, share: float, random: torch.Generator) -> torch.Tensor:
    """Values stay as large as they are over any number of versions: with larger ones sums differ more."""
    chosen = torch.rand(tensor.shape, generator=random) < share
    values = tensor.float()
    middle, spread = values.mean(), values.std().clamp(min=0.05)
    noise = torch.randn(tensor.shape, generator=random) * spread
    return torch.where(chosen, (middle + (values - middle + noise) / 2**0.5).to(tensor.dtype), tensor)


TIMES: list[tuple[str, str, float, float]] = []
"""engine, policy, and the seconds of a pause and of the reload in it; shown at the end of a run"""


def some_prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(2, 256), k=length)


SHORT, LONG = some_prompt(1, 5), some_prompt(2, 330)
"""The long one fills more than two KV blocks, which a prefix cache keeps."""


@dataclass
class World:
    root: Path
    run: Run
    server: Server
    host: Host
    judge: FreshLoad

    def judged(self, answer: Answer, version: int) -> bool:
        return self.misfits(answer, version) == []

    def misfits(self, answer: Answer, version: int) -> list[str]:
        """What a fresh load of the version does not say."""
        [judged] = self.judge.judge(self.run.versions[version], [(answer.prompt, answer.tokens)])
        return answer.errors(judged)

    def option(self, added: str = "") -> str:
        """`--engine` for this server."""
        key = "" if self.server.api_key is None else f",api_key_env={KEY_VARIABLE}"
        return f"vllm={self.server.url}{key}{added}"

    def start_host(self, *extra: str, path: Path | None = None) -> None:
        """The daemon anew unless it runs with these options; the newest version is served then."""
        option = self.option("" if path is None else f",path={path}")
        self.host.supervise()
        if self.host.process is None or (self.host.engine, tuple(self.host.extra)) != (option, extra):
            self.host.extra = extra
            self.host.with_engine(option)
        self.host.wait_served(self.run.newest)

    def require(self, version: int) -> None:
        """The engine says what a fresh load of the version says, and names the version."""
        for prompt in (SHORT, LONG, LONG):
            answer = self.server.ask(prompt)
            [judged] = self.judge.judge(self.run.versions[version], [(prompt, answer.tokens)])
            assert (answer.status, answer.finish, len(answer.tokens)) == (200, "length", 12), answer.text
            assert answer.errors(judged) == []
        if version > 0:
            assert not self.judged(answer, version - 1), "the judge cannot tell versions apart"
        self.require_named(version)

    def note_times(self, policy: str) -> None:
        last = self.host.status["updates"][-1]
        release = self.server.fetch("/version")["version"]
        TIMES.append((f"vLLM {release}", policy, last["pause_seconds"], last["seconds"].get("reload", 0.0)))

    def require_named(self, version: int) -> None:
        [engine] = self.host.status["engines"]
        pointer = self.run.channel / "latest"
        assert not pointer.exists() or int(pointer.read_text()) == version
        assert engine["version"] == version
        if engine["confirmed_by"] == "label":
            assert self.server.fetch("/weight_info")["weight_version"] == str(version)

    def require_honest_until(self, condition: Callable[[], bool], what: str) -> None:
        """Until then the engine lives, and says nothing wrong while the host says ready."""

        def honest() -> bool:
            assert self.server.process.running, self.server.process.tail()
            before = self.host.served
            if before is not None:
                answer = self.server.send(LONG, 4).result(STEP_SECONDS)
                assert answer.status == 200, answer.text
                if self.host.served == before:
                    assert self.judged(answer, before), f"not what version {before} says, and ready"
            return condition()

        def reached() -> bool:
            self.host.supervise()
            try:
                return honest()
            except httpx.TransportError:
                # the daemon ended just now
                return False

        wait_until(reached, what)

    def switch(self, answer: Answer, old: int) -> int | None:
        """How many tokens the old weights said before the next version's said the rest; None: others did."""
        sequences = [(answer.prompt, answer.tokens)]
        [before] = self.judge.judge(self.run.versions[old], sequences)
        [after] = self.judge.judge(self.run.versions[old + 1], sequences)
        whole = range(len(answer.tokens), -1, -1)
        return next(
            (at for at in whole if answer.fits(before, 0, at) and answer.fits(after, at)),
            None,
        )


def was_caught(world: World, policy: str, answer: Answer, old: int) -> bool:
    """Whether a request for IN_FLIGHT_TOKENS was in flight at the update, and ended as the policy says."""
    assert answer.status == 200, answer.text
    if policy == "abort" and answer.finish == "abort":
        assert world.misfits(answer, old) == []
        return True
    assert (answer.finish, len(answer.tokens)) == ("length", IN_FLIGHT_TOKENS)
    at = world.switch(answer, old)
    both = [world.misfits(answer, version) for version in (old, old + 1)] if at is None else []
    assert at is not None, f"neither weights said this, nor one after the other: {both}"
    if policy == "recompute":
        return 0 < at < len(answer.tokens)
    assert at == len(answer.tokens), f"{policy}: begun on old weights, ended on new ones"
    return policy == "wait"


KEYED = "qwen2-untied-sharded-bf16"
"""its server is started with an API key"""
KEY_VARIABLE, KEY = "WEIGHTCAST_TEST_ENGINE_KEY", "key-of-an-engine-under-test"


class Starts:
    """One engine at a time: another variant ends the one before."""

    def __init__(self, models: Path, judge: FreshLoad, root: Path) -> None:
        self._models, self._judge, self._root = models, judge, root
        self._variant, self._count = "", 0
        self._stack = ExitStack()

    def __enter__(self) -> Starts:
        os.environ[KEY_VARIABLE] = KEY
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        del os.environ[KEY_VARIABLE]

    def world(self, variant: str) -> World:
        if variant != self._variant:
            self._variant = ""
            self._stack.close()
            self._count += 1
            self._world = self._start(variant, self._root / f"{variant}-{self._count}")
            self._variant = variant
        return self._world

    def _start(self, variant: str, root: Path) -> World:
        root.mkdir()
        run = self._stack.enter_context(Run(root, self._models / variant))
        local = root / "local"
        one_shot("sync", "--channel", run.channel, "--base", run.base, "--local", local)
        api_key = KEY if variant == KEYED else None
        server = self._stack.enter_context(Server(local, root / "vllm.log", api_key=api_key))
        return self._world_of(root, run, server, local)

    def _world_of(self, root: Path, run: Run, server: Server, local: Path) -> World:
        world = World(root, run, server, Host(root, run.channel, run.base, local, ""), self._judge)
        world.host.engine = world.option()
        self._stack.callback(world.host.stop)
        return world

    def other_world(self, variant: str) -> World:
        """Another run of the same model, other files and dtype, whose host finds the engine in use."""
        root = self._root / f"{variant}-after"
        root.mkdir()
        base = self._models / "-".join(OTHER.get(word, word) for word in variant.split("-"))
        run = self._stack.enter_context(Run(root, base))
        return self._world_of(root, run, self._world.server, root / "local")


OTHER = {"single": "sharded", "sharded": "single", "bf16": "fp32", "fp32": "bf16"}


def answers_name_their_versions(world: World, gate: Server, updates: str) -> None:
    """Four versions, more until an update meets an answer, while requests go through the gate, or a gateway;
    the first of them ask for one version alone. Tokens of an answer that names one version are those of a
    fresh load of it."""
    met = 0
    for number in range(30):
        if number >= 4 and met:
            return
        version = world.run.newest
        world.host.wait_served(version)
        pinned = {"Weightcast-Exact-Version": str(version)} if number == 0 else {}
        answers = list[Answer]()
        with ThreadPoolExecutor(1) as pool:
            publishing = pool.submit(world.run.publish)
            while world.host.served != version + 1:
                answers.append(gate.ask(LONG, IN_FLIGHT_TOKENS, headers=pinned))
            publishing.result()
        answers.append(gate.ask(LONG, headers={"Weightcast-Min-Version": str(version + 1)}))
        assert answers[-1].label["version"] == version + 1
        for answer in answers:
            if answer.status == 409 and pinned:
                continue
            assert answer.status == 200, answer.text
            low, high, partial = (
                answer.label["version"],
                answer.label["last_version"],
                "partial" in answer.label,
            )
            assert version <= low <= high <= version + 1
            met += partial or low < high
            assert low < high or world.judged(answer, low), answer.label
            assert partial == (answer.finish != "length")
            assert low == high or (updates == "pass" and not pinned)
            assert not partial or (updates == "partial" and low == version)
    raise AssertionError("no answer was under way at an update")

"""A real vLLM and a real subscriber follow versions of tensors on this GPU; a part of benchmarks.gpu_proof.

The engine computes with CUDA graphs, and a stream of requests is in flight. For `via=live`, for `via=reload`,
and where checkpoint-engine is installed for `via=ipc`: versions with 1% of all elements changed, and greedy
tokens compared with those after the engine's next start. Its memory is read back after the live patches.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file

from weightcast.publisher import Publisher, init_channel

from .live_patch import EAGER, Engine, make_model, shape_for

HEAD = ("seconds of", "via=live, p50", "max", "via=reload, p50", "max", "via=ipc, p50", "max")
_COMMAND = (sys.executable, "-c", "from weightcast.shared.cli.main import main; main()")
_IPC = ("--worker-extension-cls", "checkpoint_engine.worker.VllmColocateWorkerExtension")
_SECONDS = 300.0
_SHARE = 0.01
_PROMPTS = ([5, 6, 7], [900, 3, 77, 12], list(range(40, 72)))
_GRAPHS = (
    "--dtype",
    "bfloat16",
    "--max-model-len",
    "2048",
    "--max-num-seqs",
    "16",
    "--gpu-memory-utilization",
    "0.5",
)


@dataclass(frozen=True)
class Plan:
    python: Path
    plugin: Path
    millions: int
    versions: int
    device: str
    options: Sequence[str]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine-python", type=Path, help="of an environment with vLLM")
    parser.add_argument("--plugin", type=Path, help="directory with the installed weightcast-engine")
    parser.add_argument(
        "--params", type=int, default=1600, help="millions, of the model that vLLM serves (1600)"
    )
    parser.add_argument("--versions", type=int, default=10)
    parser.add_argument("--engine-options", help="of vLLM, instead of those that let it capture CUDA graphs")


def plan_of(asked: argparse.Namespace) -> Plan | None:
    if asked.engine_python is None:
        return None
    if asked.plugin is None:
        raise SystemExit(
            "--engine-python needs --plugin: pip install --no-deps --target SITE ./subscriber/engine_plugin"
        )
    gpu = torch.cuda.is_available()
    options = asked.engine_options.split() if asked.engine_options else _GRAPHS if gpu else EAGER
    python, plugin = asked.engine_python.absolute(), asked.plugin.absolute()
    return Plan(python, plugin, asked.params, asked.versions, "cuda" if gpu else "cpu", options)


@dataclass
class Found:
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checks: dict[str, bool] = field(default_factory=dict)


class _Run:
    """A trainer's tensors, their channel, and the host's local checkpoint."""

    def __init__(self, plan: Plan, room: Path) -> None:
        base, self.channel, self.local, self.room = room / "base", room / "channel", room / "local", room
        room.mkdir(parents=True)
        self.base = base
        make_model(plan.python, base, *shape_for(plan.millions))
        init_channel(self.channel, base)
        self.publisher = Publisher.open(self.channel, local=room / "publisher", base=base)
        self.tensors = load_file(base / "model.safetensors", device=plan.device)
        self._random = torch.Generator(plan.device).manual_seed(7)
        _weightcast("sync", *self.options)

    @property
    def options(self) -> Sequence[str | Path]:
        return ("--channel", self.channel, "--base", self.base, "--local", self.local)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def publish(self) -> int:
        """A version in which one element in a hundred is another, so that the model says something else."""
        for tensor in self.tensors.values():
            if tensor.dim() < 2:
                continue
            noise = torch.randn(tensor.shape, generator=self._random, device=tensor.device)
            chosen = torch.rand(tensor.shape, generator=self._random, device=tensor.device) < _SHARE
            tensor.copy_(torch.where(chosen, noise.mul_(tensor.float().std()).to(tensor.dtype), tensor))
        return self.publisher.publish(self.tensors).version


def _weightcast(*words: str | Path, check: bool = True) -> int:
    done = subprocess.run([*_COMMAND, *map(str, words)], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise SystemExit(f"weightcast {words[0]}: {done.stderr[-2000:]}")
    return done.returncode


class _Host:
    """`weightcast subscriber run` with one engine."""

    def __init__(self, run: _Run, option: str) -> None:
        self._run, self.log = run, run.room / "subscriber.log"
        port = run.room / "host.port"
        port.unlink(missing_ok=True)
        words = ("subscriber", "run", *run.options, "--poll-seconds", "0.05", "--engine", option)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*_COMMAND, *map(str, words), "--port", "0", "--port-file", str(port)], stdout=log, stderr=log
            )
        _wait(lambda: port.exists() or self._ended(), "the subscriber's start")
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port.read_text().strip()}", trust_env=False)

    def _ended(self) -> bool:
        if self._process.poll() is not None:
            raise SystemExit(f"the subscriber ended: {self.log.read_text()[-2000:]}")
        return False

    @property
    def status(self) -> Any:
        return self._client.get("/v1/status").raise_for_status().json()

    def serves(self, version: int) -> bool:
        status = self.status
        return bool(status["ready"]) and status["served_version"] in (version, version or None)

    def noted(self, version: int) -> bool:
        return bool(self.status["updates"][-1]["version"] == version)

    def close(self) -> None:
        self._client.close()
        self._process.terminate()
        self._process.wait(60)


def _wait(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + _SECONDS
    while not holds():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not within {_SECONDS:.0f} s")
        time.sleep(0.01)


def measure(plan: Plan, room: Path) -> Found:
    found, figures = Found(), dict[str, Mapping[str, Sequence[float]]]()
    with ExitStack() as stack:
        run = _Run(plan, room)
        stack.callback(run.publisher.close)
        said, before = list[list[int]](), ""
        for via in ("live", "reload", *(("ipc",) if _has_ipc(plan) else ()), ""):
            began = time.monotonic()
            with _engine(plan, run, _IPC if via == "ipc" else ()) as engine:
                started = time.monotonic() - began
                if before:
                    same = said == _said(engine)
                    found.checks[f"via={before}: tokens are those of a fresh load"] = same
                if via:
                    figures[via] = _followed(plan, run, engine, via, found)
                    step, said = engine.step(), _said(engine)
                before = via
                release = httpx.get(f"{engine.url}/version", trust_env=False).json().get("version")
            so_far = {"started": started, "checks": found.checks, "seconds": figures.get(via)}
            print(json.dumps({"via": via, **so_far}), file=sys.stderr, flush=True)
    for name in figures["live"]:
        cells = [_cells(figures.get(via, {}).get(name, ())) for via in ("live", "reload", "ipc")]
        found.rows.append((name, *itertools.chain(*cells)))
    found.notes.append(
        f"vLLM {release} with {' '.join(plan.options)}; a Llama of {run.nbytes / 1e9:.2f} GB of bf16, "
        f"{plan.versions} versions with {_SHARE:.0%} changed, one stream of requests, {1e3 * step:.1f} ms "
        "between tokens; published from tensors on this device, followed by `weightcast subscriber run`."
    )
    return found


def _has_ipc(plan: Plan) -> bool:
    asked = [str(plan.python), "-c", "import checkpoint_engine.worker"]
    return (
        find_spec("zmq") is not None
        and subprocess.run(asked, capture_output=True, check=False).returncode == 0
    )


@contextlib.contextmanager
def _engine(plan: Plan, run: _Run, more: Sequence[str]) -> Iterator[Engine]:
    engine = Engine(plan.python, plan.plugin, run.room, run.local, (*plan.options, *more))
    try:
        yield engine
    finally:
        engine.close()


def _followed(plan: Plan, run: _Run, engine: Engine, via: str, found: Found) -> Mapping[str, Sequence[float]]:
    """Per version: what it took, by what was measured."""
    host = _Host(run, f"vllm={engine.url},via={via}")
    times: dict[str, list[float]] = {}
    said = [_said(engine)]
    try:
        version = run.publisher.version
        _wait(partial(host.serves, version), "the subscriber's first look at the engine")
        for _ in range(plan.versions):
            began = time.monotonic()
            version = run.publish()
            published = time.monotonic()
            _wait(partial(host.serves, version), f"version {version}")
            ended = time.monotonic()
            _wait(partial(host.noted, version), f"version {version} in the status")
            update = host.status["updates"][-1]
            gap = _longest(engine, published)
            for name, seconds in (
                ("the engine's pause", update["pause_seconds"]),
                ("the longest gap between two tokens", gap),
                ("the update on the host, fetch to served", update["seconds"]["total"]),
                ("pointer to served", ended - published),
                ("publish, with new weights made", published - began),
            ):
                if seconds is not None:
                    times.setdefault(name, []).append(float(seconds))
            said.append(_said(engine))
        status = host.status["engines"][0]
        ways = status.get("live") or {}
        if via == "live":
            found.checks[f"via=live: {ways.get('patches')} of {plan.versions} versions were patched"] = (
                ways.get("patches") == plan.versions
            )
            if ways.get("patches") != plan.versions:
                found.notes.append(f"live: {ways}")
        changed = all(one != other for one, other in itertools.pairwise(said))
        found.checks[f"via={via}: tokens change with each version"] = changed
        if via == "live":
            asked = ("--local", run.local, "--engine", f"vllm={engine.url},via=live")
            intact = _weightcast("local", "verify", *asked, check=False) == 0
            found.checks["via=live: `local verify --engine` exits 0"] = intact
    finally:
        host.close()
    return times


def _longest(engine: Engine, since: float) -> float:
    pairs = itertools.pairwise(list(engine.arrivals))
    return max((after - before for before, after in pairs if after > since), default=0.0)


def _said(engine: Engine) -> list[list[int]]:
    """Greedy."""
    found = []
    for prompt in _PROMPTS:
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        told = engine.post("/v1/completions", {**asked, "logprobs": 0, "return_tokens_as_token_ids": True})
        [choice] = told["choices"]
        found.append([int(token.rpartition(":")[2]) for token in choice["logprobs"]["tokens"]])
    return found


def _cells(times: Sequence[float]) -> tuple[str, str]:
    return (f"{statistics.median(times):.3f}", f"{max(times):.3f}") if times else ("", "")

"""Pause to resume of a real vLLM: patched by the plugin, by vLLM's own sparse patches, loaded from disk.

    python -m benchmarks.live_patch --engine-python .venv-vllm/bin/python --plugin SITE --params 50

`SITE` holds the installed plugin. Every round takes the four ways one after the other, in another order than
the round before, each with a version of its own. A stream of equal requests is in flight all the time, and
all pauses of a round begin at the same token of such a request and the same moment of a step: the engine ends
the step that it is in before it stands still, and computes prompt and answer anew after it. Medians are told
per share of changed elements, and the most memory of all rounds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from weightcast.shared.digest.checksums import hash_bytes
from weightcast.shared.files.safetensors import read_header_of

MAKE_MODEL = """
import sys, torch
from pathlib import Path
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
directory, layers, hidden = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(1024)}, unk_token="w1"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w0", eos_token="w1").save_pretrained(directory)
torch.set_default_dtype(torch.bfloat16)
torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
LlamaForCausalLM(LlamaConfig(
    vocab_size=1024, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
    num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, max_position_embeddings=2048,
    bos_token_id=0, eos_token_id=1,
)).save_pretrained(directory, max_shard_size="100GB")
"""
OWN_PATCHES = """
import torch
def register():
    from vllm.v1.worker.worker_base import WorkerBase
    WorkerBase.bench_own_patches = own_patches
def own_patches(worker, directory, name):
    from pathlib import Path
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch, load_checkpoint_weight_patches)
    from weightcast_engine.update.patch_file import read_patch
    from weightcast_engine.update.elements import DTYPES
    patches = [
        CheckpointWeightPatch(c.name, c.form.shape, DTYPES[c.form.dtype], c.words.view(DTYPES[c.form.dtype]),
                              torch.from_numpy(c.index.astype("int64")))
        for c in read_patch(Path(directory), name).changes]
    with set_current_vllm_config(worker.vllm_config):
        load_checkpoint_weight_patches(worker.model_runner.get_model(), patches)
"""
SHARES = (0.003, 0.01, 0.05)
SECONDS = 900.0
WAYS = ("live", "apart", "own", "reload")
"""`live`: pause, patch and resume as one order; `apart`: as three"""
EAGER = ("--dtype", "bfloat16", "--max-model-len", "2048", "--enforce-eager")
TOKENS = 48
"""of a request; a pause comes at one of those before the last third"""
LAST_TOKEN = 32


class Weights:
    """A checkpoint of one bf16 file, changed in place. `bit`: flipped in each changed element."""

    def __init__(self, directory: Path, bit: int = 0) -> None:
        self.file = directory / "model.safetensors"
        header = read_header_of(self.file)
        self._map = np.memmap(self.file, np.uint8, "r+", offset=header.data_start)
        self.tensors = {
            name: (entry.shape, self._map[entry.begin : entry.end].view("<u2"))
            for name, entry in header.entries.items()
        }
        self._random, self._flipped = np.random.default_rng(7), np.uint16(1 << bit)

    @property
    def nbytes(self) -> int:
        return len(self._map)

    def change(self, share: float) -> Iterator[tuple[dict[str, object], bytes]]:
        """Changes that share of every tensor; per tensor a row and a piece of a patch."""
        for name, (shape, words) in self.tensors.items():
            old = hash_bytes(words.view(np.uint8))
            index = self._chosen(len(words), share)
            words[index] ^= self._flipped
            row = {
                "name": name,
                "dtype": "BF16",
                "shape": list(shape),
                "changes": len(index),
                "index_width": 4,
            }
            lanes = {"lanes_old": old.hex(), "lanes_new": hash_bytes(words.view(np.uint8)).hex()}
            yield (
                {**row, **lanes},
                _padded(index.astype("<u4").tobytes(), 8) + _padded(words[index].tobytes(), 8),
            )

    def _chosen(self, count: int, share: float) -> NDArray[np.int64]:
        gaps = self._random.geometric(share, int(count * share * 1.2) + 8)
        index = np.cumsum(gaps) - 1
        return index[index < count] if index[0] < count else np.array([0])


def _padded(data: bytes, unit: int) -> bytes:
    return data + bytes(-len(data) % unit)


def root(version: int) -> str:
    return f"{version:064x}"


def write_patch(directory: Path, weights: Weights, version: int, share: float) -> str:
    """The name of the patch from version - 1; the weights are those of `version` then."""
    rows, payload = list[dict[str, object]](), bytearray()
    for row, piece in weights.change(share):
        rows.append({**row, "offset": len(payload)})
        payload += piece
    base, target = ({"version": number, "root": root(number)} for number in (version - 1, version))
    header = {
        "format": 1,
        "run_id": "bench",
        "base": base,
        "target": {**target, "digest": ""},
        "tensors": rows,
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    body = _padded(b"wcpatch1" + len(text).to_bytes(8, "little") + text, 64) + payload
    name = f"{version}-{version:08x}.patch"
    (directory / name).write_bytes(body + hashlib.sha256(body).digest())
    return name


@dataclass
class Figures:
    pause: list[float] = field(default_factory=list)
    """seconds from the pause's call to the resume's answer; of one order from its call to its answer"""
    stopping: list[float] = field(default_factory=list)
    """seconds of it until the engine had stopped: it ends the step that it is in"""
    still: list[float] = field(default_factory=list)
    """seconds of it from then on: no step is computed"""
    writing: list[float] = field(default_factory=list)
    """seconds of it that all ranks took to change their weights, where the door tells them"""
    gap: list[float] = field(default_factory=list)
    """seconds, the longest between two tokens of the stream of which the later came in or after the pause"""
    memory: list[int] = field(default_factory=list)
    """bytes that the worker's peak rose above what it held before, with the check of a patch"""


@dataclass(frozen=True)
class Moment:
    """When a pause begins: so much of a step after a token of a request. Not near its end, where chance
    says which step is to be ended."""

    token: int
    share: float

    @classmethod
    def drawn(cls, source: random.Random) -> Moment:
        return cls(source.randint(LAST_TOKEN // 2, LAST_TOKEN), source.uniform(0.1, 0.7))


class Engine:
    def __init__(
        self, python: Path, plugin: Path, room: Path, model: Path, options: Sequence[str] = EAGER
    ) -> None:
        self.patches, self._ended = model / ".weightcast" / "engine", threading.Event()
        self.arrivals, self._numbers = list[float](), list[int]()
        self.patches.mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        if not (room / "own").exists():
            _install_own_patches(room / "own")
        environment = {
            "PYTHONPATH": f"{plugin}:{room / 'own'}", "VLLM_PLUGINS": "weightcast,bench_own_patches",
            "WEIGHTCAST_PATCH_DIR": str(self.patches), "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1",
        }  # fmt: skip
        where = f"--model {model} --served-model-name tiny --host 127.0.0.1 --port {port}"
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", *where.split(), *options]
        self.url = f"http://127.0.0.1:{port}"
        self._log = (room / "vllm.log").open("ab")
        self.process = subprocess.Popen(
            command, env={**os.environ, **environment}, cwd=room, stdout=self._log, stderr=self._log,
            start_new_session=True,
        )  # fmt: skip
        self._client = httpx.Client(base_url=self.url, timeout=SECONDS, trust_env=False)
        self._wait_ready()
        self._reader = threading.Thread(target=self._stream, daemon=True)
        self._reader.start()

    def _wait_ready(self) -> None:
        deadline, pause = time.monotonic() + SECONDS, threading.Event()
        while time.monotonic() < deadline and self.process.poll() is None:
            with suppress(httpx.HTTPError):
                if self._client.get("/health", timeout=2).status_code == 200:
                    return
            pause.wait(0.5)
        raise SystemExit(f"vLLM did not start: {self._log.name}")

    def _stream(self) -> None:
        """One greedy request after the other; the times of their tokens, and which of its request each is."""
        request = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": TOKENS, "stream": True}
        request |= {"temperature": 0, "ignore_eos": True}
        while not self._ended.is_set():
            with (
                suppress(httpx.HTTPError),
                self._client.stream("POST", "/v1/completions", json=request) as reply,
            ):
                number = 0
                for line in reply.iter_lines():
                    if line.startswith("data: "):
                        number += 1
                        self._numbers.append(number)
                        self.arrivals.append(time.monotonic())
                    if self._ended.is_set():
                        break

    def post(self, path: str, body: object) -> Any:
        reply = self._client.post(path, json=body)
        if reply.status_code != 200:
            raise SystemExit(f"{path}: {reply.status_code} {reply.text[:500]}")
        return reply.json()

    def measured(self, figures: Figures, moment: Moment, act: Callable[[], object]) -> None:
        self._await(moment)
        began = time.monotonic()
        self.post("/v1/weightcast/pause", {"policy": "recompute"})
        stopped = time.monotonic()
        told = act()
        self.post("/v1/weightcast/resume", {})
        ended = time.monotonic()
        self._note(figures, began, ended, ended - stopped, told)

    def updated(self, figures: Figures, moment: Moment, order: Mapping[str, object]) -> None:
        """As `measured`; how long the engine stood still is what it says itself."""
        self._await(moment)
        began = time.monotonic()
        told = self.post("/v1/weightcast/update", {**order, "policy": "recompute"})
        self._note(figures, began, time.monotonic(), told["seconds"]["still"], told)

    def _note(self, figures: Figures, began: float, ended: float, still: float, told: object) -> None:
        figures.pause.append(ended - began)
        figures.writing += _writing(told)
        figures.stopping.append(ended - began - still)
        figures.still.append(still)
        figures.gap.append(self._gap(began, ended))

    def _await(self, moment: Moment) -> None:
        seen, deadline, pause = len(self.arrivals), time.monotonic() + SECONDS, threading.Event()
        while time.monotonic() < deadline:
            came = len(self.arrivals)
            if moment.token in self._numbers[seen:came]:
                pause.wait(moment.share * self.step())
                return
            seen = came
            pause.wait(0.001)
        raise SystemExit("the stream of tokens has ended")

    def _gap(self, began: float, ended: float) -> float:
        deadline, pause = time.monotonic() + SECONDS, threading.Event()
        while (not self.arrivals or self.arrivals[-1] < ended) and time.monotonic() < deadline:
            pause.wait(0.01)
        pairs = list(pairwise(list(self.arrivals)))
        return max(
            (after - before for before, after in pairs if after > began and before < ended), default=0.0
        )

    def step(self) -> float:
        """Seconds, the median between two of the last tokens."""
        return statistics.median(after - before for before, after in pairwise(self.arrivals[-2 * TOKENS :]))

    @contextmanager
    def peak(self, figures: Figures) -> Iterator[None]:
        workers = self._processes()
        for pid in workers:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        before = {pid: _kilobytes(pid, "VmRSS") for pid in workers}
        yield
        figures.memory.append(max(1024 * (_kilobytes(pid, "VmHWM") - held) for pid, held in before.items()))

    def _processes(self) -> list[int]:
        """The engine's, but the API server."""
        found, seen = [self.process.pid], 0
        while seen < len(found):
            pid = found[seen]
            children = Path(f"/proc/{pid}/task/{pid}/children")
            found += [int(child) for child in children.read_text().split()]
            seen += 1
        return found[1:]

    def close(self) -> None:
        self._ended.set()
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.process.kill()
        self._client.close()
        self._log.close()


def _writing(told: object) -> list[float]:
    seconds = told.get("seconds") if isinstance(told, dict) else None
    found = seconds.get("write") if isinstance(seconds, dict) else seconds
    return [found] if isinstance(found, float) else []


def _kilobytes(pid: int, key: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1])
    return 0


def _install_own_patches(site: Path) -> None:
    found = site / "bench_own_patches-1.dist-info"
    found.mkdir(parents=True)
    (site / "bench_own_patches.py").write_text(OWN_PATCHES)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: bench-own-patches\nVersion: 1\n")
    (found / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nbench_own_patches = bench_own_patches:register\n"
    )


class Round:
    """One way after the other, each to a version of its own."""

    def __init__(self, engine: Engine, weights: Weights) -> None:
        self.engine, self.weights, self.version = engine, weights, 0
        self._random, self._first = random.Random(7), 0
        self._hold()

    def _hold(self) -> None:
        stand = {"version": self.version, "root": root(self.version), "label": str(self.version)}
        self.engine.post("/v1/weightcast/holds", stand)

    def run(self, share: float, figures: dict[str, Figures]) -> None:
        moment = Moment.drawn(self._random)
        self._first += 1
        for at in range(len(WAYS)):
            way = WAYS[(self._first + at) % len(WAYS)]
            self.version += 1
            name = write_patch(self.engine.patches, self.weights, self.version, share)
            with self.engine.peak(figures[way]):
                getattr(self, f"_{way}")(name, figures[way], moment)
            (self.engine.patches / name).unlink()

    def _live(self, name: str, figures: Figures, moment: Moment) -> None:
        self.engine.post("/v1/weightcast/check", {"file": name})
        self.engine.updated(figures, moment, {"file": name, "label": str(self.version)})

    def _apart(self, name: str, figures: Figures, moment: Moment) -> None:
        self.engine.post("/v1/weightcast/check", {"file": name})
        order = {"file": name, "label": str(self.version)}
        self.engine.measured(figures, moment, lambda: self.engine.post("/v1/weightcast/apply", order))

    def _own(self, name: str, figures: Figures, moment: Moment) -> None:
        order = {"method": "bench_own_patches", "args": [str(self.engine.patches), name]}
        self.engine.measured(figures, moment, lambda: self.engine.post("/collective_rpc", order))
        self._hold()

    def _reload(self, name: str, figures: Figures, moment: Moment) -> None:
        order = {"label": str(self.version)}
        self.engine.measured(figures, moment, lambda: self.engine.post("/v1/weightcast/reload", order))
        self._hold()


def measure(engine: Engine, weights: Weights, shares: Sequence[float], rounds: int) -> dict[str, Any]:
    rows, one = {}, Round(engine, weights)
    for share in shares:
        figures = {way: Figures() for way in WAYS}
        first = {way: Figures() for way in WAYS}
        one.run(share, first)
        for number in range(rounds):
            one.run(share, figures)
            last = {
                way: [round(1000 * s) for s in (f.pause[-1], f.stopping[-1])] for way, f in figures.items()
            }
            print(
                f"{share:.1%} changed, round {number + 1}: pause, stop {last} ms", file=sys.stderr, flush=True
            )
        for way, found in figures.items():
            found.memory += first[way].memory
        rows[str(share)] = {way: _told(found) for way, found in figures.items()} | _ratios(figures)
        print(json.dumps({"share": share, **rows[str(share)]}), flush=True)
    step = round(1000 * engine.step(), 1)
    return {"bytes": weights.nbytes, "rounds": rounds, "step_ms": step, "shares": rows}


def _ratios(figures: dict[str, Figures]) -> dict[str, dict[str, float]]:
    """Of patched to loaded from disk, the median of the rounds."""
    live, disk = figures["live"], figures["reload"]
    return {
        "live_per_reload": {
            part: round(
                statistics.median(
                    one / other for one, other in zip(getattr(live, part), getattr(disk, part), strict=True)
                ),
                3,
            )
            for part in ("pause", "still")
        }
    }


def _told(figures: Figures) -> dict[str, float]:
    return {
        "pause_ms": round(1000 * statistics.median(figures.pause), 1),
        "pause_max_ms": round(1000 * max(figures.pause), 1),
        "stopping_ms": round(1000 * statistics.median(figures.stopping), 1),
        "still_ms": round(1000 * statistics.median(figures.still), 1),
        "still_max_ms": round(1000 * max(figures.still), 1),
        "writing_ms": round(1000 * statistics.median(figures.writing or [0.0]), 1),
        "gap_ms": round(1000 * statistics.median(figures.gap), 1),
        "gap_max_ms": round(1000 * max(figures.gap), 1),
        "memory_mb": round(max(figures.memory) / 1e6, 1),
    }


def make_model(python: Path, directory: Path, layers: int, hidden: int) -> None:
    command: list[str | Path] = [python, "-c", MAKE_MODEL, directory, str(layers), str(hidden)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": ""})


def shape_for(millions: int) -> tuple[int, int]:
    """Layers and hidden size of a Llama of about so many million parameters: 16 h^2 a layer."""
    hidden = 512 if millions < 150 else 1024 if millions < 1000 else 2048 if millions < 4000 else 4096
    return max(1, round(millions * 1e6 / (16 * hidden * hidden))), hidden


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine-python", type=Path, required=True)
    parser.add_argument("--plugin", type=Path, required=True)
    parser.add_argument("--params", type=int, default=50, help="millions")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        room = Path(name)
        model = room / "model"
        layers, hidden = shape_for(asked.params)
        make_model(asked.engine_python, model, layers, hidden)
        weights = Weights(model)
        engine = Engine(asked.engine_python.absolute(), asked.plugin.absolute(), room, model)
        stack.callback(engine.close)
        print(json.dumps(measure(engine, weights, asked.shares, asked.rounds), indent=1))


if __name__ == "__main__":
    main()

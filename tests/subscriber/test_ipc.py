"""`via=ipc`: engines fed from memory, against the released checkpoint-engine in processes of its own."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crashes import killed_at, started
from doubles import Answer, Call, Double, serve
from hosts import VLLM, Host, Run, SGLang, Site, Weights
from waiting import wait_until

from weightcast.subscriber.engines.base import Timeouts, parse_engine
from weightcast.subscriber.engines.ipc import SHARED_MEMORY
from weightcast.subscriber.engines.kinds import open_engine

ROOT = Path(__file__).parents[2]
DEVICES = ("GPU-0aa00000-0000-4000-8000-000000000000", "GPU-1aa00000-0000-4000-8000-000000000000")
OTHER = "GPU-2aa00000-0000-4000-8000-000000000000"
PATIENT = Timeouts(connect=60, probe=60, control=60, drain=60, reload=120)
KINDS = ("sglang", "vllm")
DIED = "the rank has died"


class Rank:
    def __init__(self, kind: str, device: str) -> None:
        self.command = [sys.executable, str(ROOT / "tests/subscriber/ipc_rank.py"), kind, device]
        self.held: dict[str, str] = {}
        self.wish: dict[str, Any] = {}
        self.start()

    def start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "subscriber/engine_plugin")}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(self.command, env=environment, text=True, **pipes)
        self.ready = False

    def load(self, handles: dict[str, str]) -> str:
        """Its error; empty where it has loaded everything."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if not self.ready:
            assert self.process.stdout.readline() == "ready\n"
            self.ready = True
        print(json.dumps({"handles": handles, **self.wish}), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            return DIED
        answer = json.loads(line)
        self.held = answer["held"]
        return str(answer["error"])

    def kill(self) -> None:
        with self.process:
            self.process.kill()


class Fed(Double):
    """An engine with a rank on each of two devices."""

    ranks: tuple[Rank, ...]
    model: dict[str, Any]

    def feed(self, handles: dict[str, str]) -> str:
        """An engine does not outlive a rank: then nobody waits for the others."""
        pool = ThreadPoolExecutor(len(self.ranks))
        loads = [pool.submit(rank.load, handles) for rank in self.ranks]
        pool.shutdown(wait=False)
        errors = [""]
        for load in as_completed(loads):
            errors.append(load.result())
            if errors[-1] == DIED:
                break
        return max(errors)

    def holds(self, weights: Weights) -> bool:
        wanted = {name: hashlib.sha256(data).hexdigest() for name, data in weights.data.items()}
        return all(rank.held == wanted for rank in self.ranks)


class FedSGLang(Fed, SGLang):
    def __init__(self, ranks: tuple[Rank, ...]) -> None:
        super().__init__()
        self.ranks, self.limits = ranks, {"tp_size": len(ranks), "pp_size": 1, "dp_size": 1}

    def behave(self, call: Call) -> Answer:
        if call.path != "/update_weights_from_ipc":
            return super().behave(call)
        assert set(call.body) == {"zmq_handles", "flush_cache", "weight_version"}
        error = self.feed(call.body["zmq_handles"])
        if error:
            return Answer(400, {"success": False, "message": error})
        self.label = call.body["weight_version"]
        return Answer(200, {"success": True, "message": "IPC weight update completed successfully"})


class FedVLLM(Fed, VLLM):
    def __init__(self, ranks: tuple[Rank, ...]) -> None:
        super().__init__()
        self.ranks, self.more = (
            ranks,
            {"parallel_config": {"world_size": len(ranks), "data_parallel_size": 1}},
        )

    def behave(self, call: Call) -> Answer:
        if call.path == "/server_info":
            told = super().behave(call).body
            return Answer(200, {"vllm_config": {**told["vllm_config"], **self.more}})  # type: ignore[index]
        if call.path != "/collective_rpc":
            return super().behave(call)
        assert call.body["method"] == "update_weights_from_ipc"
        error = self.feed(*call.body["args"])
        if error:
            return Answer(500, {"error": {"message": error}})
        return Answer(200, {"results": [None] * len(self.ranks)})


FED = {"sglang": FedSGLang, "vllm": FedVLLM}


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[str, tuple[Rank, ...]]]:
    """Processes that import torch slowly: they serve all tests."""
    made = {kind: tuple(Rank(kind, device) for device in DEVICES) for kind in KINDS}
    yield made
    for each in made.values():
        for rank in each:
            rank.kill()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(tmp_path, stack)


def engine_of(ranks: dict[str, tuple[Rank, ...]], kind: str) -> Any:
    for rank in ranks[kind]:
        rank.held, rank.wish = {}, {}
        if rank.process.poll() is not None:
            rank.kill()
            rank.start()
    return FED[kind](ranks[kind])


def weights() -> Weights:
    """Of five modules: two need more than one half of the smallest buffer each."""
    random = np.random.default_rng(7)
    parts = {
        "lm_head.weight": ("BF16", (300, 1024)),
        "model.embed_tokens.weight": ("BF16", (300, 1000)),
        "model.layers.0.mlp.gate_proj.weight": ("F32", (50, 999)),
        "model.layers.0.mlp.up_proj.weight": ("F8_E4M3", (50, 999)),
        "model.layers.0.self_attn.kv_a_proj.weight": ("F16", (7, 31)),
        "model.layers.0.self_attn.q_a_proj.weight": ("I64", (9, 33)),
        "model.layers.1.mlp.up_proj.weight": ("BF16", (211, 1001)),
        "model.layers.2.mlp.up_proj.weight": ("BF16", (209, 1003)),
        "model.none": ("BF16", (0, 4)),
        "model.scale": ("F32", ()),
    }
    sizes = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F16": 2, "I64": 8}
    return Weights(
        {
            name: (dtype, shape, random.bytes(int(np.prod(shape)) * sizes[dtype]))
            for name, (dtype, shape) in parts.items()
        }
    )


def run_of(site: Site) -> Run:
    return Run(site.root / "run", site.stack, base=weights())


def host_of(site: Site, run: Run, engine: Fed, options: str = "", **more: Any) -> Host:
    devices = "" if "devices=" in options else f",devices={','.join((OTHER, *DEVICES))}"
    text = f"{site.option(engine)},name=engine,via=ipc,buffer=1MiB{devices}{options}"
    return site.host(run, text, timeouts=PATIENT, **more)


def shared_memory() -> set[Path]:
    return set(SHARED_MEMORY.glob(f"weightcast-ipc-{os.geteuid()}-*/*"))


@pytest.fixture
def left_over() -> Callable[[], set[Path]]:
    """What this test has left in shared memory."""
    before = shared_memory()
    return lambda: shared_memory() - before


@pytest.mark.parametrize("kind", KINDS)
def test_versions_reach_all_ranks(site: Site, ranks: Any, left_over: Any, kind: str) -> None:
    run, engine = run_of(site), engine_of(ranks, kind)
    host = host_of(site, run, engine)
    for version in range(1, 4):
        run.publish()
        assert host.step().ready
        [shown] = host.status.engines
        assert (shown.state, shown.version, shown.confirmed_by) == ("serving", version, "label")
        assert engine.holds(run.versions[version])
        assert not engine.paused
    before = len(engine.calls)
    run.publish(run.versions[-1])
    assert host.step().ready
    assert "/update_weight_version" in engine.paths()[-1:]
    assert not [call for call in engine.calls[before:] if call.path.endswith(("_ipc", "rpc"))]
    assert left_over() == set()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"refuse": "model.layers.1.mlp.up_proj.weight"}, "model.layers.1.mlp.up_proj.weight"),
        ({"refuse": "lm_head.weight"}, "lm_head.weight"),
        ({"bare": True}, "install weightcast-engine"),
    ],
    ids=["late", "first", "no-plugin"],
)
def test_a_failure_of_one_rank_is_no_version(
    site: Site, ranks: Any, left_over: Any, kind: str, wish: dict[str, Any], said: str
) -> None:
    run, engine = run_of(site), engine_of(ranks, kind)
    host = host_of(site, run, engine)
    run.publish()
    engine.ranks[1].wish = wish
    assert not host.step().ready
    [shown] = host.status.engines
    assert shown.version is None
    assert said in shown.reason
    # until a message was sent the engine has its old weights
    assert engine.paused == ("bare" not in wish)
    assert left_over() == set()
    for rank in engine.ranks:
        rank.wish = {}
    assert host.retry().ready
    assert engine.holds(run.versions[1])


def test_a_kill_in_the_middle_is_made_up_for(site: Site, ranks: Any, left_over: Any) -> None:
    """The ranks wait for a message that never comes: the next start ends them, and loads everything."""
    run, engine = run_of(site), engine_of(ranks, "vllm")
    host = host_of(site, run, engine)
    host.step()
    run.publish()
    host.sync.close()
    assert killed_at(lambda: started(host), "engine.sent", 2)
    assert left_over() != set()
    host.start()
    wait_until(lambda: host.retry().ready)
    assert engine.holds(run.versions[1])
    assert not engine.paused
    assert left_over() == set()


UNFIT = {
    "ranks": ({"tp_size": 3}, "has 3 ranks, 2 devices are known"),
    "unknown": ({"tp_size": None}, "how many ranks"),
    "hosts": ({"nnodes": 2}, "on other hosts"),
    "replicas": ({"dp_size": 2}, "replicas"),
    "quantised": ({"quantization": "fp8"}, "quantised weights twice"),
    "drafter": ({"speculative_algorithm": "EAGLE"}, "draft model (EAGLE)"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_an_engine_that_cannot_be_fed_is_not_paused(site: Site, case: str) -> None:
    run, engine = run_of(site), FedSGLang(())
    settings, said = UNFIT[case]
    engine.limits = {"tp_size": 1, **settings}
    host = host_of(site, run, engine, f",devices={','.join(DEVICES)},drafter=keep")
    run.publish()
    assert not host.step().ready
    [shown] = host.status.engines
    assert shown.state == "failed"
    assert said in shown.reason
    assert engine.paths() == []


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quantization_config": {}}, ""),
        ({"quantization_config": {"bits": 8}}, "quantised"),
        ({"num_experts": 8}, "experts"),
    ],
)
def test_a_checkpoint_that_vllm_would_process_twice(tmp_path: Path, config: Any, said: str) -> None:
    weights().write(tmp_path / "local")
    (tmp_path / "local/config.json").write_text(json.dumps(config))
    engine = FedVLLM((None,))  # type: ignore[arg-type]
    with serve(engine) as url:
        option = parse_engine(f"vllm={url},via=ipc,devices={DEVICES[0]}", tmp_path / "local")
        with closing(open_engine(option)) as adapter:
            facts = adapter.probe()
    assert (facts.reachable, said in facts.hindrance) == (not said, True)


def test_a_module_beyond_the_buffer_is_named_before_anything_is_sent(site: Site, ranks: Any) -> None:
    run = Run(
        site.root / "run", site.stack, base=Weights({"a.b.weight": ("F32", (1 << 19,), bytes(2 << 20))})
    )
    engine = engine_of(ranks, "sglang")
    host = host_of(site, run, engine)
    assert not host.step().ready
    [shown] = host.status.engines
    assert (
        "a needs 2097152 bytes in one message, buffer= allows 1048576 (give buffer=2097152)" in shown.reason
    )
    assert not engine.paused


def test_devices_are_those_that_nvidia_smi_lists(
    site: Site, ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "".join(f"GPU {at}: NVIDIA H100 (UUID: {device})\n" for at, device in enumerate(DEVICES))
    (site.root / "bin").mkdir()
    tool = site.root / "bin/nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}END\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    run, engine = run_of(site), engine_of(ranks, "sglang")
    host = site.host(run, f"{site.option(engine)},via=ipc", timeouts=PATIENT)
    assert host.step().ready
    assert engine.holds(run.versions[0])


def test_a_room_of_another_mode_is_not_used(site: Site, ranks: Any) -> None:
    run, engine = run_of(site), engine_of(ranks, "sglang")
    host = host_of(site, run, engine)
    [adapter] = [each.adapter for each in host.sync.engines.engines]
    adapter._room.mkdir(0o755)
    try:
        assert not host.step().ready
        [shown] = host.status.engines
        assert "is open to other users" in shown.reason
        assert engine.calls
    finally:
        adapter._room.rmdir()


def test_an_engine_that_dies_ends_the_load(site: Site, ranks: Any, left_over: Any) -> None:
    """The last of these tests: it costs a rank."""
    run, engine = run_of(site), engine_of(ranks, "sglang")
    host = host_of(site, run, engine, pace={"attempts": 1})
    engine.ranks[1].wish = {"die": "model.layers.1.mlp.up_proj.weight"}
    assert not host.step().ready
    [shown] = host.status.engines
    assert (shown.state, shown.version) == ("suspect", None)
    assert "ended before all tensors" in shown.reason
    assert engine.paused
    assert left_over() == set()

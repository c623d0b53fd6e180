"""A released SGLang on a CPU, its CUDA packages hollow (`sglang_cpu.py`), that hears of new weights from the
subscriber alone, from disk and patched in memory, judged by fresh loads."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoint_engine
import httpx
import kept_beside
import pytest
import torch
from live_world import lanes, make_live_models
from ports import free_port
from safetensors.torch import load_file
from test_real_vllm import has_wrong_shape
from vllm_world import (
    FULL,
    HERE,
    IN_FLIGHT_TOKENS,
    LONG,
    REPOSITORY,
    SHORT,
    START_SECONDS,
    STEP_SECONDS,
    TIMES,
    Answer,
    FreshLoad,
    Host,
    Process,
    Run,
    Server,
    World,
    copy_checkpoint,
    one_shot,
    running,
    wait_until,
    was_caught,
)

from weightcast.shared.base.errors import WeightcastError
from weightcast.shared.digest.checksums import Lanes, root
from weightcast.shared.files.hf_checkpoint import open_checkpoint
from weightcast.subscriber.engines.sglang import ACTION, LOADER

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not FULL, reason="an environment that takes long to set up: make test-engines-full"),
]

VENV = Path(os.environ.get("WEIGHTCAST_SGLANG_SERVER_VENV", REPOSITORY / ".venv-sglang-server"))
PLAIN, CONVERTED = "llama-tied-sharded-fp32", "qwen2-untied-single-bf16"
"""The server computes in float32: it copies the one, and converts the other while it loads."""
TWO_RANKS = f"{PLAIN} on two ranks"
EXPERTS, LATENT = "experts-fp32", "latent-fp32"
"""of `make_live_models.py`: Qwen3's mixture, DeepSeek's attention"""
EXPERT_RANKS = f"{EXPERTS} on two ranks"
POLICIES = ("recompute", "wait", "abort")
VERSIONS = 4
"""under each policy, or a few more until a request met an update"""
MORE_VERSIONS = 20
LIVE_VERSIONS = 10


class SGLangServer(Server):
    """`sglang.launch_server` with the plugin installed beside it and its loader allowed."""

    def __init__(self, local: Path, room: Path, site: Path, spread: str, *words: str) -> None:
        """`spread`: over `two ranks`, `two ranks of experts` that have different ones, or empty. `words`:
        more of its command."""
        self._ranks, self._more_words = 2 if spread else 1, words
        self._expert_ranks = 2 if spread.endswith("experts") else 1
        self._plugin = {
            "PYTHONPATH": str(site),
            "WEIGHTCAST_PATCH_DIR": str(local / ".weightcast" / "engine"),
        }
        super().__init__(local, room / "sglang.log")

    def _environment(self) -> dict[str, str]:
        return {
            "SGLANG_USE_CPU_ENGINE": "1",
            # nothing compiles without a C++ compiler and minutes of time
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            # of each rank the cores: it refuses more ranks than NUMA nodes unless they are named
            **({"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * self._ranks)} if self._ranks > 1 else {}),
            **self._plugin,
        }

    def _start(self) -> Process:
        python = VENV / "bin" / "python"
        if not python.exists():
            pytest.fail(f"{VENV} is not there: run these tests with `make test-engines-full`")
        command = [
            *(python, HERE / "sglang_cpu.py", "--model-path", self._model, "--host", "127.0.0.1"),
            *("--port", str(self.port), "--device", "cpu", "--dtype", "float32", "--context-length", "1024"),
            *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
            *("--grammar-backend", "none", "--max-total-tokens", "8192", "--mem-fraction-static", "0.1"),
            *("--enable-metrics", "--log-level", "warning"),
            *("--custom-weight-loader", LOADER),
            # it warms up with English words, which the models' vocabulary does not have
            *("--skip-server-warmup", "--tp", str(self._ranks)),
            *("--ep-size", str(self._expert_ranks), *self._more_words),
        ]
        return Process.start(self._log, command, self._environment())

    def kill(self) -> None:
        """All of its processes at once."""
        os.killpg(self.process.child.pid, signal.SIGKILL)
        self.process.child.wait()

    def ask(
        self,
        prompt: list[int],
        tokens: int = 12,
        *,
        first: threading.Event | None = None,
        headers: Mapping[str, str] | None = None,
        model: str | None = None,
    ) -> Answer:
        """`model`: an adapter; None: none."""
        request = {
            "lora_path": model,
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
            "stream": True,
        }
        began, events, label = time.monotonic(), list[dict[str, Any]](), dict[str, Any]()
        try:
            with self._client.stream("POST", "/generate", json=request, headers=headers) as reply:
                if reply.status_code != 200:
                    text = reply.read().decode(errors="replace")
                    return Answer(reply.status_code, prompt, [], [], "", began, time.monotonic(), text)
                for event in _events(_labelled(reply.iter_lines(), label)):
                    events.append(event)
                    if first is not None:
                        first.set()
            return replace(_answer(prompt, events[-1], began), label=label)
        except (httpx.HTTPError, ValueError, LookupError) as error:
            return Answer(0, prompt, [], [], "", began, time.monotonic(), repr(error))

    def order(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """What the hook answers while the server serves, and the daemon may ask it something too."""
        action = ACTION + json.dumps({"door": route, "body": body})
        told: dict[str, Any] = {"status": 202}
        while told["status"] in (202, 503):
            told = json.loads(self._question(action))
        return told

    def kept_beside(self, file: Path) -> list[dict[str, torch.Tensor]]:
        """Of each rank, as `kept_beside.py` says."""
        self._question(f"{kept_beside.KEPT}{file}")
        return [load_file(f"{file}.{rank}") for rank in range(self._ranks)]

    def flip_a_bit(self) -> None:
        self._question(kept_beside.FLIP)

    def _question(self, action: str) -> str:
        reply = self._client.post("/weights_checker", json={"action": action})
        message: str = reply.json()["message"]
        return message

    def _must(self, path: str, body: dict[str, Any]) -> Any:
        reply = self._client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()


def _labelled(lines: Iterator[str], label: dict[str, Any]) -> Iterator[str]:
    """Fills in the label of a gate."""
    for line in lines:
        if line.startswith(": weightcast "):
            label |= json.loads(line.removeprefix(": weightcast "))
        yield line


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ValueError(line)
            yield event


def _answer(prompt: list[int], told: dict[str, Any], began: float) -> Answer:
    """Every event has all tokens from the first one on."""
    about = told["meta_info"]
    logprobs = [logprob for logprob, *_ in about["output_token_logprobs"]]
    finish = (about["finish_reason"] or {"type": "none"})["type"]
    named = str(about["weight_version"])
    return Answer(200, prompt, told["output_ids"], logprobs, finish, began, time.monotonic(), named)


class SGLangWorld(World):
    server: SGLangServer

    def option(self, added: str = "") -> str:
        return f"sglang={self.server.url}{added}"

    def require_named(self, version: int) -> None:
        [engine] = self.host.status["engines"]
        # memory that is read in the background proves more
        assert engine["version"] == version and engine["confirmed_by"] in ("label", "digest"), engine
        assert self.server.fetch("/model_info")["weight_version"] == str(version)

    def note_times(self, policy: str) -> None:
        last = self.host.status["updates"][-1]
        release = self.server.fetch("/server_info")["version"]
        TIMES.append((f"SGLang {release}", policy, last["pause_seconds"], last["seconds"].get("reload", 0.0)))

    @property
    def engines(self) -> Any:
        """None before the daemon has looked."""
        return self.host.status["engines"]

    @property
    def live(self) -> Any:
        [engine] = self.engines
        return engine["live"]


@contextmanager
def served(
    room: Path,
    base: Path,
    site: Path,
    judge: FreshLoad,
    spread: str,
    kind: type[SGLangServer] = SGLangServer,
    option: str = "",
) -> Iterator[SGLangWorld]:
    local = room / "local"
    with Run(room, base) as run:
        one_shot("sync", "--channel", run.channel, "--base", run.base, "--local", local)
        with kind(local, room, site, spread) as server:
            host = Host(room, run.channel, run.base, local, f"sglang={server.url}{option}")
            with running(host):
                host.wait_served(0)
                yield SGLangWorld(room, run, server, host, judge)


@pytest.fixture(scope="module")
def sglang(
    request: pytest.FixtureRequest,
    models: Path,
    judge: FreshLoad,
    site: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SGLangWorld]:
    variant, _, spread = request.param.partition(" on ")
    room = tmp_path_factory.mktemp("sglang")
    if variant in (EXPERTS, LATENT):
        models = make_live_models(room / "models")
    with served(room, models / variant, site, judge, spread) as world:
        yield world


def of(*variants: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("sglang", variants, indirect=True)


@of(PLAIN, CONVERTED)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_version_is_a_fresh_load_and_no_request_fails(sglang: SGLangWorld, policy: str) -> None:
    sglang.host.with_engine(sglang.option(f",policy={policy}"))
    sglang.host.wait_served(sglang.run.newest)
    sglang.require(sglang.run.newest)
    met = 0
    for number in range(VERSIONS + MORE_VERSIONS):
        if number >= VERSIONS and met:
            break
        met += one_version(sglang, policy)
    assert met, "no request was in flight at any update"


@of(PLAIN)
@pytest.mark.parametrize("updates", ["pass", "partial"])
def test_the_gate_names_the_versions_of_every_answer(sglang: SGLangWorld, updates: str) -> None:
    """The long prompt is in the prefix cache of each version that answered before."""
    port, met = free_port(), 0
    sglang.start_host("--gate", str(port), "--gate-updates", updates)
    gate = sglang.server.through(f"http://127.0.0.1:{port}")
    for _ in range(3):
        version = sglang.run.newest
        sglang.host.wait_served(version)
        answers = list[Answer]()
        with ThreadPoolExecutor(1) as pool:
            publishing = pool.submit(sglang.run.publish)
            while sglang.host.served != version + 1:
                answers.append(gate.ask(LONG, 600))
            publishing.result()
        answers.append(gate.ask(LONG, headers={"Weightcast-Min-Version": str(version + 1)}))
        assert answers[-1].label["version"] == version + 1
        for answer in answers:
            assert answer.status == 200, answer.text
            low, high = answer.label["version"], answer.label["last_version"]
            partial = answer.label.get("partial", False)
            assert version <= low <= int(answer.text) <= high <= version + 1
            assert low < high or sglang.judged(answer, low), answer.label
            assert partial == (answer.finish == "abort")
            assert updates == "pass" or low == high
            assert not partial or len(answer.tokens) == answer.label["tokens"]
            met += partial or low < high
    assert met, "no answer was under way at an update"


def one_version(world: SGLangWorld, policy: str) -> int:
    """How many requests were in flight at the update. One more is sent into it: its answer may be of either
    version, or begun under the one and ended under the other."""
    old = world.run.newest
    running = [world.server.begin(prompt, IN_FLIGHT_TOKENS) for prompt in (SHORT, LONG)]
    version = world.run.publish()
    sent = world.server.send(LONG, 8)
    world.host.wait_served(version)
    caught = sum(was_caught(world, policy, future.result(STEP_SECONDS), old) for future in running)
    answer = sent.result(STEP_SECONDS)
    assert answer.status == 200 and world.switch(answer, old) is not None, answer.text
    world.require(version)
    world.note_times(policy)
    return caught


@of(PLAIN)
def test_a_wrong_shape_becomes_no_version_and_heals_on_disk(sglang: SGLangWorld) -> None:
    sglang.start_host()
    export = copy_checkpoint(sglang.run.versions[-1], sglang.root / "bad-export", dict)
    has_wrong_shape(export)
    with pytest.raises(WeightcastError):
        sglang.run.publisher.publish_checkpoint(export, step=99)
    assert sglang.host.process is not None
    with sglang.host.process.suspended():
        version = sglang.run.publish()
        has_wrong_shape(sglang.host.local)
    sglang.require_honest_until(lambda: sglang.host.served == version, "the host healed")
    sglang.require(version)


@of(PLAIN)
def test_a_wrong_shape_in_its_own_mount_ends_the_engine_and_is_never_served(sglang: SGLangWorld) -> None:
    """The engine's own view of the files is wrong, which the host cannot see."""
    view = sglang.root / "view"
    shutil.copytree(sglang.host.local, view)
    sglang.start_host(path=view)
    has_wrong_shape(view)
    version = sglang.run.publish()
    wait_until(lambda: not sglang.server.process.running, "the engine's end")
    wait_until(lambda: not sglang.host.ready, "the failure noticed")
    shutil.rmtree(view)
    shutil.copytree(sglang.host.local, view)
    sglang.server.restart()
    sglang.require_honest_until(lambda: sglang.host.served == version, "the engine reloaded")
    sglang.require(version)


@of(PLAIN)
def test_a_killed_server_comes_back_current(sglang: SGLangWorld) -> None:
    sglang.start_host()
    sglang.server.kill()
    version = sglang.run.publish()
    wait_until(lambda: not sglang.host.ready, "the end noticed")
    sglang.server.restart()
    sglang.host.wait_served(version)
    sglang.require(version)


@of(PLAIN, TWO_RANKS, EXPERTS, EXPERT_RANKS)
def test_versions_are_patched_in_memory_under_traffic(sglang: SGLangWorld) -> None:
    """All that is resident is the version, from the trainer to the engine's memory by one number."""
    start_patching(sglang)
    before, caught = sglang.live, 0
    for _ in range(LIVE_VERSIONS):
        caught += one_version(sglang, "recompute")
        require_resident(sglang)
    after = sglang.live
    assert (after["way"], after["patches"] - before["patches"]) == ("live", LIVE_VERSIONS), after
    assert after["reloads"] == before["reloads"], after
    assert caught, "no request was in flight at any patch"


@contextmanager
def serving(server: SGLangServer) -> Iterator[list[Answer]]:
    """One request after the other."""
    answers, ended = list[Answer](), threading.Event()

    def ask() -> None:
        while not ended.is_set():
            answers.append(server.ask(SHORT, 20))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield answers
    finally:
        ended.set()
        thread.join()


@of(PLAIN, TWO_RANKS)
def test_memory_is_verified_while_it_serves_and_a_flipped_bit_is_found(sglang: SGLangWorld) -> None:
    start_patching(sglang)
    sglang.host.wait_served(sglang.run.publish())
    # with nobody beside it who reads memory too
    sglang.host.stop()
    option = sglang.option(",via=live")
    command = ("local", "verify", "--json", "--local", sglang.host.local, "--engine", option)
    with serving(sglang.server) as answers:
        [engine] = json.loads(one_shot(*command))["engines"]
    assert len(answers) > 1 and {answer.status for answer in answers} == {200}
    assert (engine["version"], engine["differing"]) == (sglang.run.newest, []), engine
    assert engine["root"] == root_of(sglang.run.versions[-1])
    sglang.server.flip_a_bit()
    [engine] = json.loads(one_shot(*command, code=3))["engines"]
    assert engine["differing"] == ["model.layers.1.mlp.down_proj.weight"], engine
    sglang.host.start()
    wait_until(lambda: [one["live"]["reloads"] for one in sglang.engines] == [1], "the daemon found it")
    sglang.host.wait_served(sglang.run.newest)
    require_resident(sglang)


@of(PLAIN, TWO_RANKS)
def test_a_daemon_that_starts_anew_goes_on_patching(sglang: SGLangWorld) -> None:
    start_patching(sglang)
    sglang.host.wait_served(sglang.run.publish())
    sglang.host.stop()
    version = sglang.run.publish()
    sglang.host.start()
    sglang.host.wait_served(version)
    assert (sglang.live["way"], sglang.live["reloads"]) == ("live", 0), sglang.live
    sglang.require(version)
    require_resident(sglang)


def start_patching(world: SGLangWorld) -> None:
    """What a server that was not patched before holds is known after one version from disk."""
    world.host.with_engine(world.option(",via=live"))
    world.host.wait_served(world.run.newest)
    world.host.wait_served(world.run.publish())


def require_resident(world: SGLangWorld) -> None:
    told = world.server.order("digest", {"tensors": None, "from": 0, "count": 10_000})
    newest = world.run.versions[-1]
    tensors = tensors_of(newest)
    assert told["refused"] == {} and told["lanes"] == {name: lanes(tensors[name]) for name in tensors}
    assert (told["version"], root_of(newest)) == (world.run.newest, world.host.status["local_root"])


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {n: tensor for file in checkpoint.glob("*.safetensors") for n, tensor in load_file(file).items()}


def root_of(checkpoint: Path) -> str:
    given = tensors_of(checkpoint)
    table = open_checkpoint(checkpoint, follow_links=False).table
    return root(table, [Lanes.from_hex(lanes(given[spec.name])) for spec in table])


@of(PLAIN, TWO_RANKS)
def test_a_server_killed_after_patches_is_loaded_once_and_patched_again(sglang: SGLangWorld) -> None:
    start_patching(sglang)
    sglang.host.wait_served(sglang.run.publish())
    before = sglang.live
    assert before["way"] == "live", before
    sglang.server.kill()
    sglang.server.restart()
    sglang.host.wait_served(sglang.run.newest)
    assert sglang.live["reloads"] == before["reloads"] + 1
    sglang.host.wait_served(sglang.run.publish())
    assert sglang.live["way"] == "live", sglang.live
    sglang.require(sglang.run.newest)
    require_resident(sglang)


@of(CONVERTED)
def test_what_it_converts_is_refused_by_name_and_loaded_from_disk(sglang: SGLangWorld) -> None:
    start_patching(sglang)
    for refused in (1, 2):
        one_version(sglang, "recompute")
        live = sglang.live
        assert (live["way"], live["patches"], live["because"].get("refused")) == ("reload", 0, refused), live
        assert "converted" in live["reason"], live


class NeverAsked(SGLangServer):
    """Its health is told by a generation, which ends a server whose attention a CPU cannot compute."""

    def wait_ready(self) -> None:
        wait_until(lambda: self.status("/model_info") == 200, "SGLang's start", START_SECONDS)


@pytest.mark.parametrize("spread", ["", "two ranks"])
def test_latent_attention_is_patched_with_its_copies(
    site: Path, tmp_path: Path, judge: FreshLoad, spread: str
) -> None:
    """SGLang computes with the parts of `kv_b_proj`, which it copies after each load."""
    model = make_live_models(tmp_path / "models") / LATENT
    sizes = json.loads((model / "config.json").read_text())
    with served(tmp_path, model, site, judge, spread, NeverAsked) as world:
        start_patching(world)
        for _ in range(LIVE_VERSIONS):
            before = require_copies(world, sizes)
            world.host.wait_served(world.run.publish())
            assert world.live["way"] == "live", world.live
            after = require_copies(world, sizes)
            assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
            require_resident(world)


def test_ranks_with_different_experts_are_patched(site: Path, tmp_path: Path, judge: FreshLoad) -> None:
    """Expert parallel, which SGLang computes on a GPU alone: memory is all that is looked at."""
    model = make_live_models(tmp_path / "models") / EXPERTS
    with served(tmp_path, model, site, judge, "two ranks of experts", NeverAsked) as world:
        start_patching(world)
        for _ in range(3):
            world.host.wait_served(world.run.publish())
            assert world.live["way"] == "live", world.live
            require_resident(world)


class Unfed(SGLangServer):
    """Ready when it has got weights for the first time."""

    def __init__(self, local: Path, room: Path, site: Path, spread: str) -> None:
        words = ("--load-format", "dummy", "--checkpoint-engine-wait-weights-before-ready")
        super().__init__(local, room, site, spread, *words)

    def __enter__(self) -> Unfed:
        return self


def test_a_server_without_weights_is_fed_from_memory(
    models: Path, judge: FreshLoad, site: Path, tmp_path: Path
) -> None:
    """The released server and checkpoint-engine; only what the latter asks a device is a stand-in."""
    added = tmp_path / "site"
    shutil.copytree(site, added)
    shutil.copytree(Path(checkpoint_engine.__file__).parent, added / "checkpoint_engine")
    option = f",via=ipc,buffer=1MiB,devices=GPU-{platform.machine()}"
    with served(tmp_path, models / PLAIN, added, judge, "", Unfed, option) as world:
        world.server.wait_ready()
        for version in range(3):
            world.host.wait_served(version)
            world.require(version)
            told = world.server.order("digest", {"tensors": None, "from": 0, "count": 10_000})
            tensors = tensors_of(world.run.versions[version])
            assert told["lanes"] == {name: lanes(tensor) for name, tensor in tensors.items()}
            world.run.publish()


def require_copies(world: SGLangWorld, sizes: dict[str, Any]) -> list[torch.Tensor]:
    """They are those of the newest version's weights; they are given back."""
    given = tensors_of(world.run.versions[-1])
    ranks = world.server.kept_beside(world.root / "kept")
    found: list[torch.Tensor] = []
    for layer in range(sizes["num_hidden_layers"]):
        whole = given[f"model.layers.{layer}.self_attn.kv_b_proj.weight"]
        heads = whole.unflatten(0, (-1, sizes["qk_nope_head_dim"] + sizes["v_head_dim"]))
        keys, values = heads.split([sizes["qk_nope_head_dim"], sizes["v_head_dim"]], dim=1)
        found += (torch.cat([rank[f"{layer}.{name}"] for rank in ranks]) for name in ("w_kc", "w_vc"))
        assert torch.equal(found[-2], keys) and torch.equal(found[-1], values.transpose(1, 2))
    return found

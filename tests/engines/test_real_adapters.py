"""LoRA adapters on an unmodified vLLM: what it says under each name, judged by fresh loads of model and
adapter."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import pytest
import torch
from ports import free_port
from safetensors.torch import load_file, save_file
from test_real_sglang import SGLangServer
from vllm_world import (
    FULL,
    LONG,
    SHORT,
    Answer,
    FreshLoad,
    Host,
    Run,
    Server,
    Tensors,
    one_shot,
    running,
    wait_until,
)

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]

VARIANT = "llama-untied-single-fp32"
VERSIONS = 22 if FULL else 5
"""more than the engine keeps"""
RANK, MOST_RANK = 4, 8
TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
ALLOWED = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


def adapter_of(base: Path, seed: int, rank: int = RANK) -> Tensors:
    """As large as the weights that it is added to."""
    torch.manual_seed(seed)
    made: Tensors = {}
    for file in sorted(base.glob("*.safetensors")):
        for name, weights in load_file(file).items():
            module = name.removesuffix(".weight")
            if module.rpartition(".")[2] in TARGETS:
                rows, columns = weights.shape
                made[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, columns) / columns**0.5
                made[f"base_model.model.{module}.lora_B.weight"] = torch.randn(rows, rank) / 2
    return made


@dataclass
class Lora:
    run: Run
    server: Server
    host: Host
    judge: FreshLoad
    gate: Server
    adapters: dict[str, Path] = field(default_factory=dict)

    def publish(self, name: str = "math", rank: int = RANK) -> str:
        number = 1 + sum(label.startswith(f"{name}@") for label in self.adapters)
        label = f"{name}@{number}"
        directory = self.run.root / label
        directory.mkdir()
        save_file(
            adapter_of(self.run.base, number, rank), directory / "adapter_model.safetensors", {"format": "pt"}
        )
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank}
        config |= {"target_modules": TARGETS, "bias": "none", "base_model_name_or_path": "tiny"}
        (directory / "adapter_config.json").write_text(json.dumps(config))
        self.adapters[label] = directory
        self.run.publisher.publish(directory, step=number, component=f"adapter/{name}")
        return label

    def loaded(self, name: str = "math") -> list[int]:
        return next((one["loaded"] for one in self.host.status["adapters"] if one["name"] == name), [])

    def wait_loaded(self, label: str) -> None:
        name, _, version = label.partition("@")
        wait_until(lambda: self.loaded(name)[:1] == [int(version)], f"{label} loaded")
        if "--adapters-plain-names" in self.host.extra:
            path = f"/{name}-v{int(version):06d}"
            wait_until(lambda: self.names().get(name, "").endswith(path), f"{label} under its plain name")

    def names(self) -> dict[str, str]:
        """Directories by name."""
        return {card["id"]: card["root"] for card in self.server.fetch("/v1/models")["data"]}

    def misfits(self, answer: Answer, label: str, main: int) -> list[str]:
        """What a fresh load of the model with the adapter does not say."""
        assert answer.status == 200, answer.text
        sequences = [(answer.prompt, answer.tokens)]
        [judged] = self.judge.judge(self.run.versions[main], sequences, self.adapters.get(label))
        return answer.errors(judged)

    def require(self, label: str, main: int) -> None:
        """The engine itself says so, also of prompts that are in its cache; and not what another says."""
        for name in (label, *({label.partition("@")[0]} & self.names().keys())):
            for prompt in (SHORT, LONG, LONG):
                answer = self.server.ask(prompt, model=name)
                assert self.misfits(answer, label, main) == [], name
        assert self.misfits(answer, "", main), "the judge cannot tell an adapter from the model"


def served(host: Host) -> int | None:
    """By its engine, whether or not the adapters are there."""
    version: int | None = host.status["served_version"]
    return version


@pytest.fixture(scope="module")
def lora(models: Path, judge: FreshLoad, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lora]:
    root = tmp_path_factory.mktemp("lora")
    local, port = root / "local", free_port()
    arguments = [
        "--enable-lora",
        "--max-lora-rank",
        str(MOST_RANK),
        "--max-loras",
        "2",
        "--max-cpu-loras",
        "4",
    ]
    with Run(root, models / VARIANT) as run:
        one_shot("sync", "--channel", run.channel, "--base", run.base, "--local", local)
        with Server(local, root / "vllm.log", arguments=arguments, environment=ALLOWED) as server:
            host = Host(root, run.channel, run.base, local, f"vllm={server.url}")
            host.extra = ("--gate", str(port), "--adapters-plain-names")
            with running(host):
                host.wait_served(0)
                yield Lora(run, server, host, judge, server.through(f"http://127.0.0.1:{port}"))


def test_every_version_under_traffic_is_a_fresh_load(lora: Lora) -> None:
    lora.wait_loaded(lora.publish())
    stop, answers, plain = threading.Event(), list[Answer](), list[tuple[int, Answer]]()

    def traffic(prompt: list[int]) -> None:
        while not stop.is_set():
            answers.append(lora.gate.ask(prompt, 24, model="math"))

    def traffic_past_the_gate() -> None:
        while not stop.is_set():
            plain.append((len(lora.adapters), lora.server.ask(LONG, 24, model="math")))

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(traffic, prompt) for prompt in (SHORT, LONG)]
        asking.append(pool.submit(traffic_past_the_gate))
        try:
            for _ in range(VERSIONS):
                label = lora.publish()
                lora.wait_loaded(label)
                lora.require(label, 0)
        finally:
            stop.set()
        for each in asking:
            each.result()
    for answer in answers:
        assert answer.status == 200, answer.text
        assert lora.misfits(answer, answer.label["adapter"], 0) == [], answer.label
    for newest, answer in plain:
        near = reversed(list(lora.adapters)[max(0, newest - 3) : newest + 1])
        moved = answer.status == 404
        assert moved or any(lora.misfits(answer, label, 0) == [] for label in near), newest
    moves = [
        [each for _, each in group]
        for gone, group in groupby(plain, lambda one: one[1].status == 404)
        if gone
    ]
    longest = max((each[-1].ended - each[0].began for each in moves), default=0.0)
    print(f"{len(plain)} requests past the gate, {len(moves)} moves seen, at most {1000 * longest:.0f} ms")
    seen = {answer.label["adapter"] for answer in answers}
    assert len(seen) > VERSIONS / 2, "traffic has met few versions"
    print(f"{len(answers)} answers under traffic, by {len(seen)} versions")
    wait_until(lambda: len(lora.loaded()) == 2, "older versions unloaded")
    wait_until(lambda: len(lora.names()) == 4, "older versions gone from the engine")
    assert lora.names().keys() == {"tiny", "math", f"math@{VERSIONS}", f"math@{VERSIONS + 1}"}


def test_main_weights_move_with_lora_enabled(lora: Lora) -> None:
    """`reload_weights` reaches the layers under an adapter; the adapter is back only for the new main."""
    for _ in range(3):
        main = lora.run.publish()
        wait_until(lambda: served(lora.host) == lora.run.newest, f"main version {main} served")
        wait_until(lambda: lora.loaded() == [] and not lora.host.ready, "the adapters of the old main gone")
        assert lora.names().keys() == {"tiny"}
        assert lora.misfits(lora.gate.ask(LONG), "", main) == []
        label = lora.publish()
        lora.wait_loaded(label)
        lora.require(label, main)
        answer = lora.gate.ask(LONG, model="math")
        assert (answer.label["adapter"], answer.label["version"]) == (label, main)
        assert lora.misfits(answer, label, main) == []


def test_an_engine_that_restarted_has_its_adapters_again(lora: Lora) -> None:
    [*_, label] = lora.adapters
    lora.server.restart()
    lora.wait_loaded(label)
    lora.require(label, lora.run.newest)


def test_an_adapter_above_the_engines_rank_is_named(lora: Lora) -> None:
    """Before it is loaded. The other adapter is served on."""
    lora.publish("wide", rank=2 * MOST_RANK)
    refusal = f"rank {2 * MOST_RANK}, the engine was started with --max-lora-rank {MOST_RANK}"
    wait_until(lambda: refusal in json.dumps(lora.host.status["degraded"]), "the refusal")
    assert lora.host.ready and lora.loaded("wide") == [] and lora.loaded("math")
    lora.run.publisher.retire("adapter/wide")
    wait_until(lambda: not lora.host.status["degraded"], "all is well without it")


def test_a_server_without_lora_is_named(tmp_path: Path, lora: Lora) -> None:
    local = tmp_path / "local"
    one_shot("sync", "--channel", lora.run.channel, "--base", lora.run.base, "--local", local)
    with (
        Server(local, tmp_path / "vllm.log", environment=ALLOWED) as server,
        running(Host(tmp_path, lora.run.channel, lora.run.base, local, f"vllm={server.url}")) as host,
    ):
        wait_until(lambda: "--enable-lora" in json.dumps(host.status["adapters"]), "the refusal")
        assert not host.ready and served(host) == lora.run.newest


@pytest.mark.skipif(not FULL, reason="an environment that takes long to set up: make test-engines-full")
def test_a_released_sglang_serves_versions_of_an_adapter(
    models: Path, judge: FreshLoad, site: Path, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    words = ("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", str(MOST_RANK))
    words += ("--lora-target-modules", *TARGETS, "--max-loras-per-batch", "2", "--max-loaded-loras", "2")
    with Run(tmp_path, models / VARIANT) as run:
        one_shot("sync", "--channel", run.channel, "--base", run.base, "--local", local)
        with SGLangServer(local, tmp_path, site, "", *words) as server:
            host = Host(tmp_path, run.channel, run.base, local, f"sglang={server.url}")
            port = free_port()
            host.extra = ("--gate", str(port))
            with running(host):
                host.wait_served(0)
                lora = Lora(run, server, host, judge, server.through(f"http://127.0.0.1:{port}"))
                for _ in range(5):
                    label = lora.publish()
                    lora.wait_loaded(label)
                    lora.require(label, 0)
                    answer = lora.gate.ask(LONG, model="math")
                    assert answer.label["adapter"] == label and lora.misfits(answer, label, 0) == []
                assert lora.names().keys() >= set(list(lora.adapters)[-2:])
                lora.publish("wide", rank=2 * MOST_RANK)
                refusal = f"the engine was started with --max-lora-rank {MOST_RANK}"
                wait_until(lambda: refusal in json.dumps(host.status["adapters"]), "the refusal")
                run.publisher.retire("adapter/wide")
                main = run.publish()
                wait_until(lambda: served(host) == main, "the main weights moved")
                assert not any(name.startswith("math@") for name in lora.names())
                label = lora.publish()
                lora.wait_loaded(label)
                lora.require(label, main)

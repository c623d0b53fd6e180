"""The example engine, model, trainer and summary on their own: no daemon of weightcast takes part."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from safetensors import safe_open
from safetensors.torch import save_file
from waiting import is_running, wait_until

from examples import checkpoint, observe, processes, summary, trainer
from examples.checkpoint import Config
from examples.demo import RefusedDirectory, claim_directory
from examples.engine import Engine, EventLog, create_app
from examples.model import CausalLM
from examples.processes import Children, ProcessDied
from examples.summary import EngineEvent, Facts, TrainerStep, Version

TINY = Config(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
PROMPT = "314159>"
REPOSITORY = Path(__file__).resolve().parents[2]


def tiny_model(seed: int) -> CausalLM:
    torch.manual_seed(seed)
    return CausalLM(TINY)


def save_model(directory: Path, seed: int, shards: int = 2) -> CausalLM:
    model = tiny_model(seed)
    checkpoint.save(directory, TINY, model.state_dict(), shards)
    return model


def save_adapter(directory: Path, base: Path, seed: int) -> tuple[Path, CausalLM]:
    """As peft saves it, of two layers; and the model with it merged."""
    random = torch.Generator().manual_seed(seed)
    model = CausalLM(checkpoint.load_config(base))
    model.load_state_dict(checkpoint.load(base))
    tensors = {}
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        weight = model.get_submodule(name).weight.data
        low, high = (
            torch.randn(shape, generator=random) for shape in ((2, len(weight[0])), (len(weight), 2))
        )
        tensors |= {
            f"base_model.model.{name}.lora_A.weight": low,
            f"base_model.model.{name}.lora_B.weight": high,
        }
        weight += 2 * (high @ low)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 4}))
    return directory, model


def loaded_names(client: httpx.Client) -> list[str]:
    return [model["id"] for model in client.get("/v1/models").json()["data"] if model["parent"]]


@contextmanager
def serving(engine: Engine) -> Iterator[httpx.Client]:
    """Its answers are labelled as a gate does it."""
    app = create_app(engine)

    @app.middleware("http")
    async def _label(request: Any, answer: Any) -> Any:
        response = await answer(request)
        version = engine.label.replace("default", "0")
        response.headers.update({"weightcast-version": version, "weightcast-last-version": version})
        return response

    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started)
            with httpx.Client(base_url=url, timeout=20.0, trust_env=False) as client:
                yield client
        finally:
            engine.resume()
            server.should_exit = True
            thread.join()


@pytest.fixture
def local(tmp_path: Path) -> Path:
    save_model(tmp_path / "local", seed=1)
    return tmp_path / "local"


@pytest.fixture
def engine(local: Path) -> Engine:
    return Engine(local)


@pytest.fixture
def client(engine: Engine) -> Iterator[httpx.Client]:
    with serving(engine) as opened:
        yield opened


def greedy(client: httpx.Client, text: Any = PROMPT, tokens: int = 6, **extra: Any) -> Any:
    sampling = {"max_new_tokens": tokens, "temperature": 0}
    reply = client.post("/generate", json={"text": text, "sampling_params": sampling, **extra})
    return reply.raise_for_status().json()


def expected_answer(
    model: CausalLM, text: str = PROMPT, tokens: int = 6, dtype: torch.dtype = torch.bfloat16
) -> str:
    """Greedy, recomputed from the start for every token, from weights rounded to `dtype`."""
    rounded = CausalLM(TINY)
    rounded.load_state_dict({name: t.to(dtype) for name, t in model.state_dict().items()})
    ids = checkpoint.encode(text)
    with torch.no_grad():
        for _ in range(tokens):
            ids.append(int(rounded(torch.tensor([ids])).logits[0, -1].argmax()))
    return checkpoint.decode(ids[-tokens:])


class TestCheckpoint:
    @pytest.mark.parametrize("shards", [1, 2, 3])
    def test_round_trip_keeps_every_bit(self, tmp_path: Path, shards: int) -> None:
        model = save_model(tmp_path / "saved", seed=3, shards=shards)
        wanted = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
        loaded = checkpoint.load(tmp_path / "saved")
        assert loaded.keys() == wanted.keys()
        assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)
        assert checkpoint.load_config(tmp_path / "saved") == TINY
        assert checkpoint.changed_share(loaded, wanted) == 0

    def test_names_are_those_of_a_llama_checkpoint(self, local: Path) -> None:
        names = set(checkpoint.load(local))
        assert {
            "model.embed_tokens.weight",
            "model.layers.0.self_attn.q_proj.weight",
            "model.layers.1.self_attn.o_proj.weight",
            "model.layers.1.mlp.down_proj.weight",
            "model.layers.0.input_layernorm.weight",
            "model.layers.0.post_attention_layernorm.weight",
            "model.norm.weight",
            "lm_head.weight",
        } <= names

    def test_other_readers_find_the_same_tensors(self, local: Path) -> None:
        weight_map = json.loads((local / checkpoint.INDEX).read_text())["weight_map"]
        for name, file in weight_map.items():
            with safe_open(local / file, "pt") as shard:
                assert torch.equal(shard.get_tensor(name), checkpoint.load(local)[name])

    def test_checksums_of_files_and_memory_agree(self, local: Path) -> None:
        assert checkpoint.file_checksums(local) == checkpoint.memory_checksums(tiny_model(1).state_dict())
        assert checkpoint.file_checksums(local) != checkpoint.memory_checksums(tiny_model(2).state_dict())

    def test_incomplete_until_every_shard_is_whole(self, local: Path) -> None:
        assert checkpoint.is_complete(local)
        shard = checkpoint.weight_files(local)[1]
        content = shard.read_bytes()
        shard.write_bytes(content[:-1])
        assert not checkpoint.is_complete(local)
        shard.unlink()
        assert not checkpoint.is_complete(local)
        shard.write_bytes(content)
        assert checkpoint.is_complete(local)

    def test_nothing_is_no_checkpoint(self, tmp_path: Path) -> None:
        assert not checkpoint.is_complete(tmp_path / "nothing")


class TestModel:
    def test_cached_decoding_equals_a_full_pass(self) -> None:
        model = tiny_model(5).eval()
        tokens = torch.randint(0, TINY.vocab_size, (3, 9))
        with torch.no_grad():
            whole = model(tokens).logits
            output = model(tokens[:, :4])
            for at in range(4, 9):
                output = model(tokens[:, at : at + 1], output.cache)
                assert torch.allclose(output.logits[:, 0], whole[:, at], atol=1e-4)

    def test_a_token_sees_nothing_after_it(self) -> None:
        model = tiny_model(5)
        tokens = torch.randint(0, TINY.vocab_size, (1, 8))
        changed = tokens.clone()
        changed[0, 6] = (changed[0, 6] + 1) % TINY.vocab_size
        with torch.no_grad():
            before, after = model(tokens).logits, model(changed).logits
        assert torch.equal(before[:, :6], after[:, :6])
        assert not torch.equal(before[:, 6], after[:, 6])


class TestWeightsAreCopies:
    def test_patching_the_files_does_not_move_the_live_weights(
        self, client: httpx.Client, local: Path
    ) -> None:
        before, answer = observe_checksums(client), greedy(client)["text"]
        other = save_model(local.parent / "other", seed=2)
        for file in checkpoint.weight_files(local):
            with file.open("r+b") as stream:
                stream.write((local.parent / "other" / file.name).read_bytes())
        assert observe_checksums(client) == before
        assert greedy(client)["text"] == answer == expected_answer(tiny_model(1))

        reply = client.post(
            "/update_weights_from_disk", json={"model_path": str(local), "weight_version": "1"}
        )
        assert reply.status_code == 200
        assert observe_checksums(client) == checkpoint.file_checksums(local)
        assert greedy(client)["text"] == expected_answer(other)


def observe_checksums(client: httpx.Client) -> dict[str, str]:
    reply = client.post("/weights_checker", json={"action": "checksum"}).raise_for_status().json()
    assert reply["success"] is True
    return dict(reply["ranks"][0]["checksums"])


class TestDialect:
    def test_starts_with_the_label_default(self, client: httpx.Client, local: Path) -> None:
        info = client.get("/model_info").json()
        assert (info["weight_version"], info["model_path"]) == ("default", str(local))
        assert client.get("/get_model_info").json() == info
        assert client.get("/health").status_code == client.get("/ready").status_code == 200

    def test_pause_needs_a_json_body(self, client: httpx.Client) -> None:
        assert client.post("/pause_generation").status_code >= 400
        assert client.post("/pause_generation", json={"mode": "sleep"}).status_code >= 400
        assert greedy(client)["meta_info"]["finish_reason"]["type"] == "length"

    def test_missing_directory_keeps_weights_and_label(self, client: httpx.Client, local: Path) -> None:
        before = observe_checksums(client)
        request = {"model_path": str(local / "missing"), "weight_version": "7"}
        reply = client.post("/update_weights_from_disk", json=request)
        assert (reply.status_code, reply.json()["success"]) == (400, False)
        assert client.get("/model_info").json()["weight_version"] == "default"
        assert observe_checksums(client) == before

    def test_a_truncated_checkpoint_keeps_weights(self, client: httpx.Client, local: Path) -> None:
        before = observe_checksums(client)
        broken = save_and_cut(local.parent / "broken")
        assert client.post("/update_weights_from_disk", json={"model_path": str(broken)}).status_code == 400
        assert observe_checksums(client) == before

    def test_another_architecture_is_refused(self, client: httpx.Client, local: Path) -> None:
        before = observe_checksums(client)
        wider = replace(TINY, intermediate_size=64)
        checkpoint.save(local.parent / "wider", wider, CausalLM(wider).state_dict())
        reply = client.post("/update_weights_from_disk", json={"model_path": str(local.parent / "wider")})
        assert reply.status_code == 400
        assert observe_checksums(client) == before

    def test_the_label_moves_only_with_weight_version(self, client: httpx.Client, local: Path) -> None:
        save_model(local.parent / "other", seed=2)
        request: dict[str, Any] = {"model_path": str(local.parent / "other")}
        reply = client.post("/update_weights_from_disk", json=request).raise_for_status().json()
        assert reply == {"success": True, "message": "weights updated", "num_paused_requests": 0}
        assert greedy(client)["meta_info"]["weight_version"] == "default"
        client.post("/update_weights_from_disk", json={**request, "weight_version": "4"}).raise_for_status()
        assert greedy(client)["meta_info"]["weight_version"] == "4"

    def test_relabelling_leaves_the_weights(self, client: httpx.Client) -> None:
        before = observe_checksums(client)
        request = {"new_version": "9", "abort_all_requests": False}
        client.post("/update_weight_version", json=request).raise_for_status()
        assert client.get("/model_info").json()["weight_version"] == "9"
        assert observe_checksums(client) == before

    def test_batches_keep_their_order_whatever_the_lengths(self, client: httpx.Client) -> None:
        prompts = ["12>", PROMPT, "9>", "34>"]
        replies = greedy(client, prompts)
        assert [reply["text"] for reply in replies] == [
            expected_answer(tiny_model(1), text) for text in prompts
        ]
        assert [reply["meta_info"]["prompt_tokens"] for reply in replies] == [3, 7, 2, 3]
        assert len({reply["meta_info"]["id"] for reply in replies}) == len(prompts)

    def test_token_ids_serve_as_prompts(self, client: httpx.Client) -> None:
        sampling = {"max_new_tokens": 3, "temperature": 0}
        ids = checkpoint.encode(PROMPT)
        single = client.post("/generate", json={"input_ids": ids, "sampling_params": sampling}).json()
        many = client.post("/generate", json={"input_ids": [ids, ids], "sampling_params": sampling}).json()
        assert single["output_ids"] == many[0]["output_ids"] == many[1]["output_ids"]

    def test_several_samples_per_prompt_lie_together(self, client: httpx.Client) -> None:
        sampling = {"max_new_tokens": 2, "temperature": 1.0, "n": 3}
        request = {"text": ["1>", "22>"], "sampling_params": sampling, "return_logprob": True}
        replies = client.post("/generate", json=request).json()
        assert [reply["meta_info"]["prompt_tokens"] for reply in replies] == [2, 2, 2, 3, 3, 3]
        for reply in replies:
            logprobs = reply["meta_info"]["output_token_logprobs"]
            assert [token for _, token, _ in logprobs] == reply["output_ids"]
            assert all(logprob <= 0 for logprob, _, _ in logprobs)

    @pytest.mark.parametrize(
        "request_body",
        [
            {},
            {"text": "1>", "input_ids": [1]},
            {"text": []},
            {"text": ""},
            {"text": "letters"},
            {"input_ids": [99]},
            {"input_ids": [-1]},
            {"text": "1" * 24},
            {"text": "1>", "sampling_params": {"max_new_tokens": 0}},
            {"text": "1>", "sampling_params": {"n": 0}},
            {"text": "1>", "sampling_params": {"temperature": -1}},
        ],
    )
    def test_bad_requests_are_refused(self, client: httpx.Client, request_body: dict[str, Any]) -> None:
        assert client.post("/generate", json=request_body).status_code == 400
        assert greedy(client)["meta_info"]["finish_reason"]["type"] == "length"

    def test_adapters_answer_side_by_side_with_the_model(
        self, client: httpx.Client, local: Path, tmp_path: Path
    ) -> None:
        """As the model with their product added to its weights; what is unloaded answers nothing."""
        assert loaded_names(client) == []
        expected = {}
        for number in (1, 2):
            saved, merged = save_adapter(tmp_path / f"adapter{number}", local, seed=number)
            expected[f"math@{number}"] = expected_answer(merged, dtype=torch.float32)
            body = {"lora_name": f"math@{number}", "lora_path": str(saved)}
            assert client.post("/load_lora_adapter", json=body).json()["success"]
            assert client.post("/load_lora_adapter", json=body).status_code == 400
            asked = {"action": "checksum", "lora_name": f"math@{number}"}
            rank = client.post("/weights_checker", json=asked).json()["ranks"][0]
            assert rank["checksums"] == checkpoint.file_checksums(saved)
        own = expected_answer(save_model(tmp_path / "again", seed=1))
        assert len({own, *expected.values()}) == 3
        assert loaded_names(client) == ["math@1", "math@2"]
        for name, answer in expected.items():
            assert greedy(client, lora_path=name)["text"] == answer
        assert greedy(client)["text"] == own
        assert client.post("/unload_lora_adapter", json={"lora_name": "math@1"}).json()["success"]
        assert client.post("/unload_lora_adapter", json={"lora_name": "math@1"}).status_code == 400
        refused = client.post("/generate", json={"text": PROMPT, "lora_path": "math@1"})
        assert refused.status_code == 400
        assert greedy(client, lora_path="math@2")["text"] == expected["math@2"]

    def test_an_adapter_for_another_model_is_refused(self, client: httpx.Client, tmp_path: Path) -> None:
        checkpoint.save(tmp_path / "large", Config(), CausalLM(Config()).state_dict())
        saved, _ = save_adapter(tmp_path / "adapter", tmp_path / "large", seed=1)
        body = {"lora_name": "math@1", "lora_path": str(saved)}
        refusal = client.post("/load_lora_adapter", json=body)
        assert refusal.status_code == 400 and "another model" in refusal.json()["error_message"]
        assert loaded_names(client) == []

    def test_unknown_check_is_refused(self, client: httpx.Client) -> None:
        assert client.post("/weights_checker", json={"action": "guess"}).status_code == 400


def save_and_cut(directory: Path) -> Path:
    save_model(directory, seed=4)
    shard = checkpoint.weight_files(directory)[0]
    shard.write_bytes(shard.read_bytes()[:-10])
    return directory


class Gate:
    """Lets an engine decode one step whenever the test allows it."""

    def __init__(self) -> None:
        self._allowed = threading.Semaphore(0)
        self.asked = 0

    def pass_one(self) -> None:
        self.asked += 1
        self._allowed.acquire()

    def allow(self, steps: int) -> None:
        """Returns when they are taken and the next one is asked for."""
        wanted = self.asked + steps if self.asked else steps + 1
        self.open(steps)
        wait_until(lambda: self.asked >= wanted)

    def open(self, steps: int = 100) -> None:
        for _ in range(steps):
            self._allowed.release()


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def slow_client(local: Path, gate: Gate) -> Iterator[httpx.Client]:
    with serving(Engine(local, pace=gate.pass_one)) as opened:
        yield opened
        gate.open()


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


class TestPause:
    def test_new_requests_wait_until_generation_continues(
        self, client: httpx.Client, background: ThreadPoolExecutor, local: Path
    ) -> None:
        client.post("/pause_generation", json={"mode": "retract"}).raise_for_status()
        waiting: Future[Any] = background.submit(greedy, client)
        other = save_model(local.parent / "other", seed=2)
        request = {"model_path": str(local.parent / "other"), "weight_version": "1"}
        client.post("/update_weights_from_disk", json=request).raise_for_status()
        assert not waiting.done()
        client.post("/continue_generation", json={}).raise_for_status()
        reply = waiting.result(20)
        assert reply["text"] == expected_answer(other)
        assert reply["meta_info"]["weight_version"] == "1"

    def test_retracted_requests_go_on_with_the_new_weights_alone(
        self, gate: Gate, slow_client: httpx.Client, background: ThreadPoolExecutor, local: Path
    ) -> None:
        running = background.submit(greedy, slow_client, return_logprob=True)
        gate.allow(2)
        slow_client.post("/pause_generation", json={"mode": "retract"}).raise_for_status()
        other = save_model(local.parent / "other", seed=2)
        request = {"model_path": str(local.parent / "other"), "weight_version": "1"}
        reply = slow_client.post("/update_weights_from_disk", json=request)
        assert (reply.status_code, reply.json()["num_paused_requests"]) == (200, 1)
        slow_client.post("/continue_generation", json={}).raise_for_status()
        gate.open()
        answer = running.result(20)
        assert answer["meta_info"]["weight_version"] == "1"
        begun = PROMPT + answer["text"][:2]
        assert answer["text"][2:] == expected_answer(other, begun, tokens=4)

    def test_aborted_requests_end_early(
        self, gate: Gate, slow_client: httpx.Client, background: ThreadPoolExecutor
    ) -> None:
        running = background.submit(greedy, slow_client)
        gate.allow(2)
        slow_client.post("/pause_generation", json={"mode": "abort"}).raise_for_status()
        gate.open()
        answer = running.result(20)
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(answer["output_ids"]) < 6

    def test_kept_caches_make_the_update_report_failure(
        self, gate: Gate, slow_client: httpx.Client, background: ThreadPoolExecutor, local: Path
    ) -> None:
        running = background.submit(greedy, slow_client)
        gate.allow(2)
        slow_client.post("/pause_generation", json={"mode": "in_place"}).raise_for_status()
        save_model(local.parent / "other", seed=2)
        request = {"model_path": str(local.parent / "other"), "weight_version": "1"}
        reply = slow_client.post("/update_weights_from_disk", json=request)
        assert (reply.status_code, reply.json()["success"]) == (400, False)
        assert observe_checksums(slow_client) == checkpoint.file_checksums(local.parent / "other")
        slow_client.post("/continue_generation", json={}).raise_for_status()
        gate.open()
        assert running.result(20)["meta_info"]["finish_reason"]["type"] == "length"

    def test_an_update_without_a_pause_waits_for_running_requests(
        self, gate: Gate, slow_client: httpx.Client, background: ThreadPoolExecutor, local: Path
    ) -> None:
        running = background.submit(greedy, slow_client)
        gate.allow(1)
        save_model(local.parent / "other", seed=2)
        request = {"model_path": str(local.parent / "other"), "weight_version": "1"}
        update = background.submit(slow_client.post, "/update_weights_from_disk", json=request)
        assert slow_client.get("/flush_cache").status_code == 400
        assert not update.done()
        gate.open()
        assert running.result(20)["meta_info"]["weight_version"] == "default"
        assert update.result(20).status_code == 200
        assert slow_client.post("/flush_cache").status_code == 200


class TestEngineProcess:
    def test_refuses_connections_until_its_checkpoint_is_there(self, tmp_path: Path) -> None:
        port_file, events = tmp_path / "port", tmp_path / "events"
        arguments = ["--model", tmp_path / "local", "--port-file", port_file, "--events", events]
        process = start_engine(arguments)
        try:
            wait_until(port_file.exists, 60)
            url = f"http://127.0.0.1:{port_file.read_text()}"
            with httpx.Client(base_url=url, trust_env=False) as client:
                with pytest.raises(httpx.ConnectError):
                    client.get("/ready")
                save_model(tmp_path / "local", seed=1)
                wait_until(lambda: answers(client))
                assert greedy(client)["text"] == expected_answer(tiny_model(1))
                client.post("/pause_generation", json={"mode": "retract"}).raise_for_status()
                client.post("/continue_generation", json={}).raise_for_status()
            assert [event.event for event in observe.read_events(events)] == ["paused", "resumed"]
        finally:
            process.terminate()
            process.communicate()

    def test_gives_up_after_the_deadline(self, tmp_path: Path) -> None:
        process = start_engine(["--model", tmp_path / "missing", "--deadline", "0.1"])
        output, _ = process.communicate(timeout=60)
        assert process.returncode != 0
        assert str(tmp_path / "missing") in output


def start_engine(arguments: list[Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "examples.engine", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx.ConnectError:
        return False


def some_rollouts(model: CausalLM, questions: int = 8, group: int = 8) -> trainer.Rollouts:
    random = torch.Generator().manual_seed(3)
    asked = trainer.random_questions(questions, random).repeat_interleave(group, dim=0)
    answers_given = trainer.random_questions(questions * group, random)
    with torch.no_grad():
        logprobs = trainer.answer_logprobs(model, asked, answers_given)
    return trainer.Rollouts(asked, answers_given, logprobs, [(0, 0)] * len(asked), group)


def trained(
    client: httpx.Client, outbox: Path | None, metrics: Path, max_lag: int, seconds: float = 20.0
) -> dict[str, torch.Tensor]:
    """The last export of three steps."""
    fleet = trainer.Fleet(str(client.base_url), requests=2, seconds=seconds)
    plan = trainer.Plan(steps=3, seed=0, questions=4, group=2, rate=1e-3, max_lag=max_lag)
    return trainer.train(plan, trainer.Trainer(tiny_model(1), 1e-3), fleet, outbox, metrics)


class TestTrainer:
    def test_rewards_count_the_digits_in_their_place(self) -> None:
        questions = torch.tensor([[5, 3, 1, 2, 0, 9], [5, 3, 1, 2, 0, 9]])
        answers_given = torch.tensor([[0, 1, 2, 3, 5, 9], [0, 1, 2, 9, 9, 8]])
        rollouts = trainer.Rollouts(questions, answers_given, torch.zeros(2, 6), [(0, 0)] * 2, group=2)
        assert torch.allclose(rollouts.rewards, torch.tensor([[1.0, 0.5]]))

    def test_a_step_makes_better_answers_likelier(self) -> None:
        model = tiny_model(1)
        learner, rollouts = trainer.Trainer(model, rate=1e-3), some_rollouts(tiny_model(1))
        before = learner.export()
        for _ in range(5):
            learner.step(rollouts)
        with torch.no_grad():
            gained = trainer.answer_logprobs(model, rollouts.questions, rollouts.answers) - rollouts.logprobs
        gained_by_group = gained.mean(1).view(-1, rollouts.group)
        rewards = rollouts.rewards - rollouts.rewards.mean(1, keepdim=True)
        assert (gained_by_group * rewards).sum() > 0
        assert 0 < checkpoint.changed_share(before, learner.export()) <= 1

    def test_equal_rewards_teach_nothing(self) -> None:
        model = tiny_model(1)
        rollouts = some_rollouts(model)
        same = replace(rollouts, answers=trainer.solutions(rollouts.questions))
        learner = trainer.Trainer(model, rate=1e-3)
        before = learner.export()
        learner.step(same)
        assert checkpoint.changed_share(before, learner.export()) == 0

    def test_trains_on_what_the_engines_say_and_exports_every_step(
        self, client: httpx.Client, tmp_path: Path
    ) -> None:
        last = trained(client, tmp_path / "watch", tmp_path / "metrics", max_lag=4)
        assert sorted(path.name for path in (tmp_path / "watch").iterdir()) == [
            "step_000001",
            "step_000002",
            "step_000003",
        ]
        newest = checkpoint.file_checksums(tmp_path / "watch" / "step_000003")
        assert newest == checkpoint.memory_checksums(last)
        steps = observe.read_steps(tmp_path / "metrics")
        assert [len(step.rewards) for step in steps] == [4, 4, 4]
        assert [step.lags for step in steps] == [{0: 8}, {1: 8}, {2: 8}]
        assert [step.versions_per_answer for step in steps] == [{1: 8}] * 3

    def test_does_not_run_ahead_of_the_engines(self, client: httpx.Client, tmp_path: Path) -> None:
        with pytest.raises(TimeoutError, match="all hosts at version 1"):
            trained(client, tmp_path / "watch", tmp_path / "metrics", max_lag=1, seconds=0.1)
        assert len(list((tmp_path / "watch").iterdir())) == 2

    def test_goes_on_when_the_engines_follow(
        self, client: httpx.Client, tmp_path: Path, background: ThreadPoolExecutor
    ) -> None:
        training = background.submit(
            trained, client, tmp_path / "watch", tmp_path / "metrics", max_lag=0, seconds=60.0
        )
        for step in (1, 2):
            wait_until((tmp_path / "watch" / f"step_{step:06}").exists)
            request = {"new_version": str(step), "abort_all_requests": False}
            client.post("/update_weight_version", json=request).raise_for_status()
        training.result(20)
        assert [step.lags for step in observe.read_steps(tmp_path / "metrics")] == [{0: 8}] * 3

    def test_frozen_exports_nothing(self, client: httpx.Client, tmp_path: Path) -> None:
        trained(client, None, tmp_path / "metrics", max_lag=0)
        assert [step.lags for step in observe.read_steps(tmp_path / "metrics")] == [{0: 8}] * 3
        assert [path.name for path in tmp_path.iterdir() if path.name != "local"] == ["metrics"]

    def test_prepare_writes_base_and_masters(self, tmp_path: Path) -> None:
        trainer.prepare(tmp_path, seed=0, steps=2, config=TINY)
        base = checkpoint.load(tmp_path / "base")
        masters = trainer.load_file(tmp_path / trainer.MASTERS)
        assert all(torch.equal(base[name], masters[name].to(torch.bfloat16)) for name in base)


def facts_of(rewards: list[float], versions: int = 24, found: str = "same") -> Facts:
    events = [
        EngineEvent(10.0 * number + after, event, label)
        for number in range(1, versions + 1)
        for after, event, label in (
            (2.0, "paused", ""),
            (2.1, "reloaded", str(number)),
            (2.25, "resumed", str(number)),
        )
    ]
    return Facts(
        versions=[Version(number, 10.0 * number, 50, 1000, 25) for number in range(1, versions + 1)],
        engines={"a": events, "b": events},
        steps=[TrainerStep(at, (reward, reward + 0.1), {1: 3, 2: 1}) for at, reward in enumerate(rewards)],
        full_bytes=2000,
        kills=1,
        max_lag=2,
        seconds=60.0,
        wanted={"weight": "same"},
        found={"engine a": {"weight": found}},
    )


class TestSummary:
    def test_a_good_run_has_no_failures(self) -> None:
        good = summary.summarise(facts_of([0.1, 0.1, 0.3, 0.3, 0.5, 0.5, 0.9, 0.9]))
        assert good.failures == {}
        assert (good.versions_published, good.versions_served) == (24, {"a": 24, "b": 24})
        assert good.density == 0.05
        assert good.bits_per_change == 4.0
        assert good.latency_seconds_p50 == pytest.approx(2.25)
        assert good.pause_ms_max == pytest.approx(250)
        assert (good.lags, good.lag_mean, good.lag_max) == ({1: 0.75, 2: 0.25}, 1.25, 2)

    def test_one_rollout_that_is_too_old_fails(self) -> None:
        facts = replace(facts_of([0.1, 0.1, 0.9, 0.9]), max_lag=1)
        assert set(summary.summarise(facts).failures) == {"lag"}
        assert summary.compare([summary.summarise(facts)]).row_count == 1

    def test_a_flat_reward_fails(self) -> None:
        assert set(summary.summarise(facts_of([0.5, 0.51] * 8)).failures) == {"reward"}

    def test_too_few_versions_fail(self) -> None:
        assert "versions" in summary.summarise(facts_of([0.1] * 4 + [0.9] * 4, versions=19)).failures

    def test_one_different_bit_fails(self) -> None:
        different = summary.summarise(facts_of([0.1, 0.1, 0.9, 0.9], found="other"))
        assert different.failures.keys() >= {"bits"}
        assert different.bit_exact == {"engine a": False}

    def test_nothing_at_all_fails_everything(self) -> None:
        nothing = summary.summarise(Facts([], {}, [], 0, 0, 0, 0.0, {}, {}))
        assert set(nothing.failures) == {"versions", "reward", "bits"}
        assert summary.render({"": nothing}).row_count > 0
        table = summary.render({"one": nothing, "two": nothing})
        assert [column.header for column in table.columns] == ["", "one", "two"]

    def test_skipped_versions_are_not_served_but_have_a_latency(self) -> None:
        facts = facts_of([0.1, 0.1, 0.9, 0.9], versions=3)
        skipping = replace(facts, engines={"a": [EngineEvent(40.0, "resumed", "3")]})
        result = summary.summarise(skipping)
        assert result.versions_served == {"a": 1}
        assert result.latency_seconds_max == pytest.approx(30.0)


class TestProcesses:
    def test_a_dead_child_is_reported(self, tmp_path: Path) -> None:
        children = Children(tmp_path, tmp_path)
        try:
            child = children.start(
                "short", [sys.executable, "-c", "print('last words'); raise SystemExit(3)"]
            )
            child.process.wait(20)
            with pytest.raises(ProcessDied, match="short"):
                children.check(may_end=("short",))
            assert "last words" in children.tails()
        finally:
            children.stop()

    def test_only_named_children_may_end(self, tmp_path: Path) -> None:
        children = Children(tmp_path, tmp_path)
        try:
            children.start("short", [sys.executable, "-c", "pass"]).process.wait(20)
            children.check(may_end=("short",))
            with pytest.raises(ProcessDied):
                children.check()
        finally:
            children.stop()

    def test_stop_ends_grandchildren_too(self, tmp_path: Path) -> None:
        children = Children(tmp_path, tmp_path)
        children.start("parent", [sys.executable, "-c", GRANDPARENT])
        pid_file = tmp_path / "pid"
        wait_until(lambda: pid_file.exists() and pid_file.read_text().isdigit())
        children.stop()
        wait_until(lambda: not is_running(int(pid_file.read_text())))

    def test_groups_are_killed_when_the_pipe_ends(self) -> None:
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
        )
        processes.bury([str(child.pid)])
        assert child.wait(20) == -signal.SIGKILL


GRANDPARENT = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path("pid").write_text(str(child.pid))
time.sleep(60)
"""


class TestRunDirectory:
    def test_a_foreign_directory_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.txt").write_text("precious")
        with pytest.raises(RefusedDirectory):
            claim_directory(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]

    def test_an_earlier_run_is_wiped(self, tmp_path: Path) -> None:
        paths = claim_directory(tmp_path / "run")
        (paths.watch / "step_000001").mkdir()
        claim_directory(tmp_path / "run")
        assert list(paths.watch.iterdir()) == []


def test_event_log_is_off_without_a_path(local: Path) -> None:
    engine = Engine(local, log=EventLog(None))
    engine.pause("retract")
    engine.resume()
    assert engine.running == 0

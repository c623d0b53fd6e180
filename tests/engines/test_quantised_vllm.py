"""An unmodified vLLM on the CPU with quantised models. A reload of int8 layers answers with success and
computes NaN: the host refuses it, and goes back to the version that the engine has. fp8 is reloaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from vllm_world import LONG, SHORT, FreshLoad, Host, Server, changed, copy_checkpoint, running, wait_until

from weightcast.publisher import Publisher, Quantiser, init_channel, quantise_checkpoint

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("scheme", ["fp8-channel", "int8-channel"])
def test_versions_arrive_or_are_refused(tmp_path: Path, models: Path, judge: FreshLoad, scheme: str) -> None:
    source, base = models / "llama-untied-single-bf16", tmp_path / "base"
    quantiser = Quantiser(scheme)
    quantise_checkpoint(source, base, quantiser)
    init_channel(tmp_path / "channel", base)
    given = copy_checkpoint(source, tmp_path / "given", lambda tensors: changed(tensors, 1, 0.3))

    def mean_error(server: Server, prompt: list[int], directory: Path) -> float:
        answer = server.ask(prompt)
        assert answer.status == 200, answer.text
        [judged] = judge.judge(directory, [(prompt, answer.tokens)])
        pairs = zip(answer.logprobs, judged.logprobs, strict=True)
        return sum(abs(one - other) for one, other in pairs) / len(answer.tokens)

    def require(server: Server, wanted: Path, other: Path) -> None:
        """It says what the weights say before they are quantised, but for rounding."""
        for prompt in (SHORT, LONG):
            assert mean_error(server, prompt, wanted) < mean_error(server, prompt, other) / 2

    host = Host(tmp_path, tmp_path / "channel", base, tmp_path / "local", "")
    with running(host):
        host.wait_served(0)
        with Server(host.local, tmp_path / "vllm.log") as server:
            host.with_engine(f"vllm={server.url}")
            with Publisher.open(tmp_path / "channel", local=tmp_path / "publisher", base=base) as publisher:
                publisher.publish(quantiser(load_file(given / "model.safetensors")))
            if scheme == "int8-channel":
                wait_until(lambda: "refused" in json.dumps(host.status["degraded"]), "the refusal")
                wait_until(lambda: host.status["local_version"] == 0, "the old version")
                assert "int8 layers" in json.dumps(host.status)
                require(server, source, given)
            else:
                host.wait_served(1)
                require(server, given, source)

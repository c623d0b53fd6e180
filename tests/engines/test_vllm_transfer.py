"""A real vLLM whose weight transfer is weightcast's backend, driven by vLLM's own routes, as a training
framework does."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_world import KEY, LiveServer, install, lanes
from safetensors.torch import load_file
from vllm_world import (
    KEY_VARIABLE,
    LONG,
    SHORT,
    STEP_SECONDS,
    FreshLoad,
    Host,
    Run,
    one_shot,
    running,
    wait_until,
)

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]
MODEL = "llama-tied-single-fp32"
CONFIG = ("--weight-transfer-config", '{"backend": "weightcast"}')


class Framework:
    """What a trainer sends."""

    def __init__(self, server: LiveServer) -> None:
        self.server = server

    def post(self, route: str, **body: Any) -> httpx.Response:
        return self.server.routes.post(f"{self.server.url}/{route}", json=body)

    def must(self, route: str, **body: Any) -> None:
        reply = self.post(route, **body)
        assert reply.status_code == 200, reply.text

    def update(self, **info: Any) -> httpx.Response:
        self.must("pause?mode=keep")
        self.must("start_weight_update")
        reply = self.post("update_weights", update_info=info)
        finished = self.post("finish_weight_update")
        # after a request that says nothing there is nothing to take back
        assert finished.status_code == (200 if reply.status_code == 400 else reply.status_code)
        self.must("resume")
        return reply


def test_a_framework_loads_versions_from_the_local_checkpoint(
    models: Path, judge: FreshLoad, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    local = tmp_path / "local"
    with ExitStack() as stack:
        run = stack.enter_context(Run(tmp_path, models / MODEL))
        one_shot("sync", "--channel", run.channel, "--base", run.base, "--local", local)
        site = install(tmp_path / "plugin")
        server = stack.enter_context(LiveServer(local, tmp_path, site, *CONFIG, dev_mode=True))
        host = stack.enter_context(running(Host(tmp_path, run.channel, run.base, local, "")))
        framework = Framework(server)

        def require(version: int) -> None:
            """Memory and answers are those of a fresh load, and so are the names."""
            told = server.must("digest", tensors=None, **{"from": 0, "count": 10_000})
            tensors = load_file(run.versions[version] / "model.safetensors")
            assert told["lanes"] == {name: lanes(tensor) for name, tensor in tensors.items()}
            assert (told["version"], told["refused"]) == (version, {})
            for prompt in (SHORT, LONG, LONG):
                answer = server.ask(prompt)
                [judged] = judge.judge(run.versions[version], [(prompt, answer.tokens)])
                assert answer.errors(judged) == []
            assert server.fetch("/weight_info")["weight_version"] == str(version)
            state = server.state()
            assert (state["version"], state["root"], state["in_doubt"]) == (
                version,
                host.status["local_root"],
                False,
            )

        reply = framework.post("init_weight_transfer_engine", init_info={"checkpoint": str(run.base)})
        assert reply.status_code == 500 and "model directory" in reply.text
        framework.must("init_weight_transfer_engine", init_info={"checkpoint": str(local)})
        for _ in range(3):
            version = run.publish()
            host.wait_served(version)
            assert framework.update(version=version, root=host.status["local_root"]).status_code == 200
            require(version)

        # what the checkpoint does not hold is refused, and the engine goes on with what it held
        for status, info, words in (
            (500, {"version": version + 1}, f"expected version {version + 1}"),
            (500, {"version": version, "root": "0" * 64}, "with root 0000"),
            (400, {"version": "1"}, "version: not an integer"),
        ):
            reply = framework.update(**info)
            assert reply.status_code == status and words in reply.text, reply.text
            require(version)

        # a subscriber that drives the same engine leaves it alone, and says why
        for via in ("live", "reload"):
            host.with_engine(f"vllm={server.url},api_key_env={KEY_VARIABLE},via={via}")

            def refused() -> bool:
                said = [engine["reason"] for engine in host.status["engines"]]
                return "weight transfer" in "".join(said) and not host.ready

            wait_until(refused, f"the refusal of via={via}")
            require(version)
        version = run.publish()
        wait_until(lambda: host.status["local_version"] == version, "the version on disk", STEP_SECONDS)
        assert framework.update(version=version).status_code == 200
        require(version)

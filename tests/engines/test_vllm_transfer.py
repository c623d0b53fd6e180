"""A real vLLM whose weight transfer is weightcast's backend, driven by vLLM's own routes, as a training
framework does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_world import KEY, LiveServer, install, lanes, make_live_models
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


@dataclass
class World:
    """Starts of the server load version 0, which its ranks do not know by name."""

    run: Run
    server: LiveServer
    host: Host
    framework: Framework
    judge: FreshLoad

    def publish(self) -> int:
        version = self.run.publish()
        self.host.wait_served(version)
        return version

    def require(self, version: int, *, newest: bool = True) -> None:
        """Memory and answers are those of a fresh load, and so are the names. `newest`: the host has this
        version; else memory alone is looked at."""
        told = self.server.must("digest", tensors=None, **{"from": 0, "count": 10_000})
        tensors = load_file(self.run.versions[version] / "model.safetensors")
        assert told["lanes"] == {name: lanes(tensor) for name, tensor in tensors.items()}
        assert (told["version"], told["refused"]) == (version, {})
        for prompt in (SHORT, LONG, LONG) if newest else ():
            answer = self.server.ask(prompt)
            [found] = self.judge.judge(self.run.versions[version], [(prompt, answer.tokens)])
            assert answer.errors(found) == []
        assert self.server.fetch("/weight_info")["weight_version"] == str(version)
        state = self.server.state()
        assert (state["version"], state["in_doubt"]) == (version, False)
        assert not newest or state["root"] == self.host.status["local_root"]

    def refused(self, holds: int, status: int, words: str, **info: Any) -> None:
        reply = self.framework.update(**info)
        assert reply.status_code == status and words in reply.text, reply.text
        self.require(holds, newest=False)


@contextmanager
def served(room: Path, model: Path, judge: FreshLoad, *arguments: str) -> Iterator[World]:
    with ExitStack() as stack:
        run = stack.enter_context(Run(room, model))
        local = room / "local"
        one_shot("sync", "--channel", run.channel, "--base", run.base, "--local", local)
        site = install(room / "plugin")
        server = stack.enter_context(LiveServer(local, room, site, *CONFIG, *arguments, dev_mode=True))
        host = Host(room, run.channel, run.base, local, "", extra=("--transfer-patch",))
        yield World(run, server, stack.enter_context(running(host)), Framework(server), judge)


def test_a_framework_loads_versions_and_patches_from_the_local_checkpoint(
    models: Path, judge: FreshLoad, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with served(tmp_path, models / MODEL, judge) as world:
        host, framework = world.host, world.framework
        reply = framework.post("init_weight_transfer_engine", init_info={"checkpoint": str(world.run.base)})
        assert reply.status_code == 500 and "model directory" in reply.text
        framework.must("init_weight_transfer_engine", init_info={"checkpoint": str(host.local)})
        for _ in range(2):
            version = world.publish()
            root = host.status["local_root"]
            assert framework.update(version=version, root=root).status_code == 200
            world.require(version)
        for named in (False, True):
            version = world.publish()
            tensors = load_file(world.run.versions[version] / "model.safetensors")
            given: dict[str, Any] = {
                "names": list(tensors),
                "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
                "shapes": [list(tensor.shape) for tensor in tensors.values()],
            }
            info = {"version": version, "base": version - 1, **(given if named else {})}
            reply = framework.update(**info)
            assert reply.status_code == 200, reply.text
            world.require(version)

        # what is not there, or does not fit, is refused, and the engine goes on with what it held
        world.refused(version, 500, f"expected version {version + 1}", version=version + 1)
        world.refused(version, 500, "with root 0000", version=version, root="0" * 64)
        world.refused(version, 400, "version: not an integer", version="1")
        newest = world.publish()
        world.refused(version, 500, f"holds version {version}, expected base 1", version=newest, base=1)
        last = max(tensors)
        of = {"version": newest, "base": version}
        world.refused(
            version, 500, f"changes {last} too, expected in names", **of, names=sorted(tensors)[:-1]
        )
        world.refused(
            version,
            500,
            "update_info names it bfloat16",
            **of,
            **{**given, "dtype_names": ["bfloat16"] * len(tensors)},
        )
        assert framework.update(**of, names=[*tensors]).status_code == 200
        world.require(newest)

        # a subscriber that drives the same engine leaves it alone, and says why
        host.extra = ()
        for via in ("live", "reload"):
            host.with_engine(f"vllm={world.server.url},api_key_env={KEY_VARIABLE},via={via}")

            def refused() -> bool:
                said = [engine["reason"] for engine in host.status["engines"]]
                return "weight transfer" in "".join(said) and not host.ready

            wait_until(refused, f"the refusal of via={via}")
            world.require(newest)
        version = world.run.publish()
        wait_until(lambda: host.status["local_version"] == version, "the version on disk", STEP_SECONDS)
        world.refused(newest, 500, f"patches of version {version}, expected 1", version=version, base=newest)
        assert framework.update(version=version).status_code == 200
        world.require(version)


def test_packed_experts_take_versions_and_patches_on_two_ranks(judge: FreshLoad, tmp_path: Path) -> None:
    """vLLM packs them for a CPU's kernels: by the model's loader, in place word by word, and patched they
    are what a start makes of them."""
    model = make_live_models(tmp_path / "models") / "experts-fp32"
    with served(tmp_path, model, judge, "--tensor-parallel-size", "2") as world:
        for patched in (False, False, True, True, False):
            version = world.publish()
            base = {"base": version - 1} if patched else {}
            reply = world.framework.update(version=version, **base)
            assert reply.status_code == 200, reply.text
            world.require(version)
        before = world.server.ask(LONG)
        world.server.restart()
        after = world.server.ask(LONG)
        assert (before.tokens, before.logprobs) == (after.tokens, after.logprobs)

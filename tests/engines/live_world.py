"""A real vLLM with the plugin, its routes called directly, and what lies in its memory
compared with fresh loads.

`tests/subscriber` has the routes' caller; here is what they do to a real engine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file
from vllm_world import (
    HERE,
    NO_KEEP_ALIVE,
    REPOSITORY,
    STEP_SECONDS,
    Answer,
    FreshLoad,
    Server,
    make_models,
    wait_until,
)

sys.path.insert(0, str(HERE.parent / "engine_plugin"))

from patch_writer import lanes, root, some_changed, write_patch

PLUGIN = REPOSITORY / "subscriber" / "engine_plugin"
KEY = "a-key-of-this-test"
Tensors = dict[str, torch.Tensor]


def install(target: Path) -> Path:
    """The plugin as pip installs it, beside an environment that stays as it is."""
    copy = target / "source"
    # what an earlier build left beside the sources may be older than they are
    shutil.copytree(PLUGIN, copy, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    site = target / "site"
    # the project's own pip and setuptools: engines' environments may have none
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", site, copy], check=True, capture_output=True, timeout=STEP_SECONDS)
    return site


class LiveServer(Server):
    """vLLM with the plugin and an API key, without dev mode unless it is asked for."""

    def __init__(self, model: Path, room: Path, site: Path, *arguments: str, dev_mode: bool = False) -> None:
        self.model, self.patches = model, model / ".weightcast" / "engine"
        self._added = {
            "PYTHONPATH": str(site),
            "VLLM_PLUGINS": "weightcast",
            "WEIGHTCAST_PATCH_DIR": str(self.patches),
            "VLLM_SERVER_DEV_MODE": str(int(dev_mode)),
        }
        super().__init__(model, room / "vllm.log", arguments=arguments, api_key=KEY)
        self.routes = httpx.Client(
            base_url=f"{self.url}/v1/weightcast",
            headers={"Authorization": f"Bearer {KEY}"},
            timeout=STEP_SECONDS,
            trust_env=False,
            limits=NO_KEEP_ALIVE,
        )

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), **self._added}

    def state(self) -> Any:
        return self.routes.get(f"{self.url}/v1/weightcast").raise_for_status().json()

    def post(self, route: str, **body: Any) -> tuple[int, Any]:
        """An order that came while another, or a look by the subscriber, was carried out is sent again."""
        found = list[httpx.Response]()

        def taken() -> bool:
            found[:] = [self.routes.post(f"/{route}", json=body)]
            return found[0].status_code != 503

        wait_until(taken, f"{route} is taken")
        return found[0].status_code, found[0].json()

    def must(self, route: str, **body: Any) -> Any:
        status, told = self.post(route, **body)
        assert status == 200, (route, status, told, self.process.tail())
        return told

    @property
    def paused(self) -> bool:
        return bool(self.state()["paused"])

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.routes.close()


class LiveWorld:
    """One engine and the tensors of the version that it holds."""

    def __init__(self, server: LiveServer, judge: FreshLoad, room: Path) -> None:
        self.server, self.judge, self.room = server, judge, room
        self.tensors: Tensors = load_file(server.model / "model.safetensors")
        self.version = 0
        server.must("holds", version=0, root=root(0), label="0")

    def next_tensors(self, share: float = 0.05, *, but: Sequence[str] = ()) -> Tensors:
        found = strongly_changed(self.tensors, self.version + 1, share)
        return found | {name: self.tensors[name] for name in but}

    def write(self, target: Tensors) -> str:
        return write_patch(self.server.patches, self.tensors, target, self.version + 1)

    def update(self, target: Tensors, policy: str = "recompute") -> Any:
        """All of it, as a subscriber would."""
        file, label = self.write(target), str(self.version + 1)
        self.server.must("check", file=file)
        done = self.server.must("update", file=file, label=label, policy=policy)
        assert done["resumed"] and 0 < done["seconds"]["write"] < done["seconds"]["still"]
        self.moved_to(target)
        return done

    def moved_to(self, target: Tensors) -> None:
        self.tensors, self.version = target, self.version + 1

    def checkpoint(self) -> Path:
        """What a fresh load of the present version reads."""
        from vllm_world import copy_checkpoint

        directory = self.room / f"fresh{self.version:03}"
        if not directory.exists():
            copy_checkpoint(self.server.model, directory, lambda _: self.tensors)
        return directory

    def require_resident(self, *, refused: Sequence[str] = ()) -> None:
        """Every byte in the engine's memory is the version's, by its lanes."""
        told = self.server.must("digest", tensors=None, **{"from": 0, "count": 10_000})
        assert set(told["refused"]) == set(refused) and not told["changed"]
        assert told["version"] == self.version
        assert told["lanes"] == {name: lanes(t) for name, t in self.tensors.items() if name not in refused}

    def errors(self, answer: Answer, start: int = 0, stop: int | None = None) -> list[str]:
        assert answer.status == 200, answer.text
        [judged] = self.judge.judge(self.checkpoint(), [(answer.prompt, answer.tokens)])
        return answer.errors(judged, start, stop)


def strongly_changed(tensors: Tensors, seed: int, share: float) -> Tensors:
    """So that the model says something else."""
    random = torch.Generator().manual_seed(seed)

    def one(tensor: torch.Tensor) -> torch.Tensor:
        chosen = torch.rand(tensor.shape, generator=random) < share
        noise = torch.randn(tensor.shape, generator=random) * tensor.float().std().clamp(min=0.05)
        return torch.where(chosen, (tensor.float() + noise).to(tensor.dtype), tensor)

    return {name: one(tensor) if tensor.dim() > 1 else tensor for name, tensor in tensors.items()}


def make_live_models(directory: Path) -> Path:
    return make_models("make_live_models.py", directory)


__all__ = [
    "LiveServer",
    "LiveWorld",
    "install",
    "lanes",
    "make_live_models",
    "root",
    "some_changed",
    "write_patch",
]

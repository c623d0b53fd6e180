"""A draft model of its own in an unmodified vLLM with weightcast-engine: how many of its drafts are accepted,
and that they change no token."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from live_world import KEY, LiveServer
from safetensors.torch import load_file, save_file
from vllm_world import LONG, SHORT, FreshLoad, Host, Run, World, one_shot, running, wait_until

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]

VARIANT = "llama-untied-single-fp32"
SPECULATED = 3
TOKENS = 96
FULL, POOR = 1 + 0.95 * SPECULATED, 1 + 0.5 * SPECULATED
"""tokens per step of the main model: with a draft model equal to it, with one that is old"""


@dataclass
class Drafting(World):
    draft: Path

    def publish_draft(self) -> int:
        """The newest main weights: nothing is better at guessing what they say."""
        return self.run.publisher.publish(self.run.versions[-1], component="draft").version

    def wait_drafted(self, version: int) -> None:
        wait_until(lambda: self.host.status["draft"]["loaded"] == [version], f"draft {version} loaded")

    def acceptance(self) -> float:
        """Tokens per step of the main model, as the engine counts them. What it says is a fresh load's."""
        before = self._counts()
        for prompt in (SHORT, LONG):
            answer = self.server.ask(prompt, TOKENS)
            assert (answer.status, len(answer.tokens)) == (200, TOKENS), answer.text
            assert self.misfits(answer, self.run.newest) == []
        drafts, accepted = (now - old for now, old in zip(self._counts(), before, strict=True))
        assert drafts > 0
        return 1 + accepted / drafts

    def _counts(self) -> tuple[float, float]:
        text = self.server._client.get("/metrics").text
        found = [
            re.search(rf"^vllm:spec_decode_num_{name}_total{{.*}} (\S+)$", text, re.MULTILINE)
            for name in ("drafts", "accepted_tokens")
        ]
        drafts, accepted = (0.0 if one is None else float(one[1]) for one in found)
        return drafts, accepted


@contextmanager
def drafting(
    root: Path, base: Path, judge: FreshLoad, site: Path, method: str, first: Callable[[Path], Path] | None
) -> Iterator[Drafting]:
    """`first`: makes the draft model's first version of the base; None: it is in the main checkpoint."""
    local = root / "local"
    draft = local if first is None else root / "drafter"
    followed = () if first is None else ("--draft", str(draft))
    speculative = {"model": str(draft), "method": method, "num_speculative_tokens": SPECULATED}
    with pytest.MonkeyPatch.context() as patched, Run(root, base) as run:
        patched.setenv("LIVE_KEY", KEY)
        if first is not None:
            run.publisher.publish(first(run.base), component="draft")
        where = ("--channel", run.channel, "--base", run.base, "--local", local, *followed)
        one_shot("sync", *where)
        with LiveServer(local, root, site, "--speculative-config", json.dumps(speculative)) as server:
            option = f"vllm={server.url},via=live,name=live,api_key_env=LIVE_KEY"
            host = Host(root, run.channel, run.base, local, option, extra=followed)
            with running(host):
                host.wait_served(0)
                yield Drafting(root, run, server, host, judge, draft)


@pytest.fixture(scope="module")
def world(
    models: Path, judge: FreshLoad, site: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Drafting]:
    root = tmp_path_factory.mktemp("draft")
    with drafting(root, models / VARIANT, judge, site, "draft_model", lambda base: base) as world:
        yield world


def test_acceptance_falls_with_an_old_draft_and_recovers(world: Drafting) -> None:
    world.wait_drafted(1)
    lengths = [world.acceptance()]
    for _ in range(3):
        world.host.wait_served(world.run.publish())
    lengths.append(world.acceptance())
    version = world.publish_draft()
    world.wait_drafted(version)
    lengths.append(world.acceptance())
    assert lengths[1] < POOR < FULL < min(lengths[0], lengths[2]), lengths
    # both at once: one pause
    world.host.stop()
    main, version = world.run.publish(), world.publish_draft()
    world.host.start()
    world.host.wait_served(main)
    assert world.host.status["draft"]["loaded"] == [version]
    lengths.append(world.acceptance())
    assert lengths[3] > FULL
    print("acceptance length with", "equal, old, recovered, moved together:", [f"{n:.2f}" for n in lengths])
    assert not world.server.paused


def test_an_engine_that_restarted_drafts_as_before(world: Drafting) -> None:
    main, version = world.run.publish(), world.publish_draft()
    world.host.wait_served(main)
    world.wait_drafted(version)
    world.server.restart()
    world.host.wait_served(main)
    world.wait_drafted(version)
    assert world.acceptance() > FULL


def test_a_draft_in_the_main_checkpoint_moves_with_it(
    models: Path, judge: FreshLoad, site: Path, tmp_path: Path
) -> None:
    with drafting(tmp_path, models / VARIANT, judge, site, "draft_model", None) as world:
        for _ in range(2):
            world.host.wait_served(world.run.publish())
            assert world.acceptance() > FULL


def test_a_head_that_shares_embeddings_leaves_the_main_models_alone(
    models: Path, judge: FreshLoad, site: Path, tmp_path: Path
) -> None:
    """vLLM gives an EAGLE head the main model's embeddings where its own are equal at the start. Then its
    later versions must not be loaded into them."""

    def head(base: Path, seed: int = 1) -> Path:
        torch.manual_seed(seed)
        own = {
            name.removeprefix("model."): tensor
            for name, tensor in load_file(base / "model.safetensors").items()
            if name.startswith(("model.layers.0.", "model.embed_tokens")) and "input_layernorm" not in name
        }
        width = own["embed_tokens.weight"].shape[1]
        directory = tmp_path / f"head{seed}"
        directory.mkdir()
        save_file(
            {**own, "fc.weight": torch.randn(width, 2 * width) / width},
            directory / "model.safetensors",
            {"format": "pt"},
        )
        config = json.loads((base / "config.json").read_text()) | {"num_hidden_layers": 1}
        (directory / "config.json").write_text(json.dumps(config))
        return directory

    with drafting(tmp_path, models / VARIANT, judge, site, "eagle", head) as world:
        world.wait_drafted(1)
        world.host.wait_served(world.run.publish())
        world.run.publisher.publish(head(world.run.base, seed=2), component="draft")
        world.wait_drafted(2)
        world.acceptance()

"""Channels with a few versions and hosts that follow them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from core_cases import Model, every_dtype, some_changed, write_checkpoint

from weightcast.publisher import Publisher, init_channel
from weightcast.shared.channel.store import Channel
from weightcast.shared.checkpoint.follower import Follower, FollowOptions
from weightcast.shared.checkpoint.update.plan import Patch, Seed, Stay
from weightcast.shared.checkpoint.update.sources import Route
from weightcast.shared.checkpoint.update.stage import Staged


@dataclass(frozen=True)
class Run:
    """A channel whose versions 0.. are `models`."""

    root: Path
    models: list[Model]

    @property
    def channel(self) -> Path:
        return self.root / "channel"

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def latest(self) -> Model:
        return self.models[-1]


def publish(run: Run, *, encoding: str = "fast", anchor_every: int = 0) -> None:
    """All models but the base."""
    with Publisher.open(
        run.channel,
        local=run.root / "pub",
        base=run.base,
        encoding=encoding,  # type: ignore[arg-type]
        anchor_every=anchor_every,
    ) as publisher:
        for version, model in enumerate(run.models[1:], 1):
            new = write_checkpoint(run.root / f"new-{version}", model)
            assert publisher.publish_checkpoint(new, step=version).version == version


def make_run(root: Path, versions: int = 3, *, files: int = 1, seed: int = 7, **options: object) -> Run:
    rng = np.random.default_rng(seed)
    models = [every_dtype(rng)]
    for _ in range(versions):
        models.append(some_changed(models[-1], rng))
    run = Run(root, models)
    write_checkpoint(run.base, models[0], files=files)
    init_channel(run.channel, run.base, run_id="run-under-test")
    publish(run, **options)  # type: ignore[arg-type]
    return run


@contextlib.contextmanager
def following(
    run: Run, local: Path, base: Path | None = None, *, visible_seconds: float = 0.2
) -> Iterator[Follower]:
    follower = Follower(
        run.channel, local, run.base if base is None else base, FollowOptions(visible_seconds=visible_seconds)
    )
    try:
        yield follower
    finally:
        follower.close()


def step_to(follower: Follower, version: int) -> None:
    """One attempt to bring the local checkpoint to a version of its channel."""
    channel = Channel.open(follower.channel_dir)
    follower.load(channel)
    pointer = channel.pointer()
    assert pointer is not None
    route = follower.route(channel, pointer, version, exact=True)
    plan = route.plan
    if isinstance(plan, Seed):
        follower.seed(channel, route, plan)
        plan = plan.then
    assert isinstance(plan, Patch | Stay)
    apply(follower, channel, route, plan.legs if isinstance(plan, Patch) else ())
    follower.forget_undo()


def apply(follower: Follower, channel: Channel, route: Route, legs: tuple[tuple[int, ...], ...]) -> None:
    for leg in legs:
        staged = follower.prepare(route, leg)
        assert follower.local is not None
        with follower.local.patching():
            follower.patch(staged)


def staged(follower: Follower, version: int) -> Staged:
    """The first leg from where it lies to `version`. Nothing of it is written."""
    channel = Channel.open(follower.channel_dir)
    pointer = channel.pointer()
    assert pointer is not None
    route = follower.route(channel, pointer, version, exact=True)
    assert isinstance(route.plan, Patch)
    return follower.prepare(route, route.plan.legs[0])


def catch_up(follower: Follower) -> None:
    follower.catch_up(Channel.open(follower.channel_dir))


def patch_keeping_undo(follower: Follower, version: int) -> None:
    channel = Channel.open(follower.channel_dir)
    follower.load(channel)
    pointer = channel.pointer()
    assert pointer is not None and follower.local is not None
    route = follower.route(channel, pointer, version, exact=False)
    assert isinstance(route.plan, Patch)
    apply(follower, channel, route, route.plan.legs)


def state_of(local: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((local / ".weightcast/state.json").read_bytes())
    return found


def phase_of(local: Path) -> str:
    with contextlib.suppress(FileNotFoundError, ValueError):
        return str(state_of(local)["phase"])
    return ""


def edit_state(local: Path, **changes: object) -> None:
    (local / ".weightcast/state.json").write_text(json.dumps({**state_of(local), **changes}))

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
from memory_store import MemoryStore
from opening import open_publisher

from weightcast.publisher import init_channel
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.checkpoint.local_updater import LocalUpdater, UpdaterOptions
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


def publish(run: Run, *, encoding: str = "fast", **options: Any) -> None:
    """All models but the base, and what is due beside them. `options`: the publisher's."""
    options = {"local": run.root / "pub", "base": run.base, "encoding": encoding, **options}
    with open_publisher(run.channel, **options) as publisher:
        for version, model in enumerate(run.models[1:], 1):
            new = write_checkpoint(run.root / f"new-{version}", model)
            assert publisher.publish_checkpoint(new, step=version).version == version
        publisher.make_due()


def run_of(root: Path, models: list[Model], *, files: int = 1, **options: Any) -> Run:
    """A new channel with these versions. `options`: the publisher's."""
    run = Run(root, models)
    write_checkpoint(run.base, models[0], files=files)
    init_channel(run.channel, run.base, run_id="run-under-test")
    publish(run, **options)
    return run


def make_run(root: Path, versions: int = 3, *, files: int = 1, seed: int = 7, **options: Any) -> Run:
    rng = np.random.default_rng(seed)
    models = [every_dtype(rng)]
    for _ in range(versions):
        models.append(some_changed(models[-1], rng))
    return run_of(root, models, files=files, **options)


def in_memory(run: Run) -> MemoryStore:
    """A copy of the channel in an object store."""
    store = MemoryStore()
    for path in run.channel.rglob("*"):
        if path.is_file():
            store.create(path.relative_to(run.channel).as_posix(), path.read_bytes())
    return store


@contextlib.contextmanager
def following(
    run: Run, local: Path, base: Path | None = None, *, visible_seconds: float = 0.2
) -> Iterator[LocalUpdater]:
    updater = LocalUpdater(
        open_store(run.channel),
        local,
        run.base if base is None else base,
        UpdaterOptions(visible_seconds=visible_seconds),
    )
    try:
        yield updater
    finally:
        updater.close()


def step_to(updater: LocalUpdater, version: int) -> None:
    """One attempt to bring the local checkpoint to a version of its channel."""
    channel = Channel.open(updater.store)
    updater.load(channel)
    pointer = channel.pointer()
    assert pointer is not None
    route = updater.route(channel, pointer, version, exact=True)
    plan = route.plan
    if isinstance(plan, Seed):
        updater.seed(channel, route, plan)
        plan = plan.then
    assert isinstance(plan, Patch | Stay)
    apply(updater, channel, route, plan.legs if isinstance(plan, Patch) else ())
    updater.forget_undo()


def apply(updater: LocalUpdater, channel: Channel, route: Route, legs: tuple[tuple[int, ...], ...]) -> None:
    for leg in legs:
        staged = updater.prepare(route, leg)
        assert updater.local is not None
        with updater.local.patching():
            updater.patch(staged)


def staged(updater: LocalUpdater, version: int) -> Staged:
    """The first leg from where it lies to `version`. Nothing of it is written."""
    channel = Channel.open(updater.store)
    pointer = channel.pointer()
    assert pointer is not None
    route = updater.route(channel, pointer, version, exact=True)
    assert isinstance(route.plan, Patch)
    return updater.prepare(route, route.plan.legs[0])


def catch_up(updater: LocalUpdater) -> None:
    updater.update_to(Channel.open(updater.store))


def patch_keeping_undo(updater: LocalUpdater, version: int) -> None:
    channel = Channel.open(updater.store)
    updater.load(channel)
    pointer = channel.pointer()
    assert pointer is not None and updater.local is not None
    route = updater.route(channel, pointer, version, exact=False)
    assert isinstance(route.plan, Patch)
    apply(updater, channel, route, route.plan.legs)


def state_of(local: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((local / ".weightcast/state.json").read_bytes())
    return found


def phase_of(local: Path) -> str:
    with contextlib.suppress(FileNotFoundError, ValueError):
        return str(state_of(local)["phase"])
    return ""


def edit_state(local: Path, **changes: object) -> None:
    (local / ".weightcast/state.json").write_text(json.dumps({**state_of(local), **changes}))

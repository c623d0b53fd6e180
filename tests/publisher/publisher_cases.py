"""Channels to publish to, and hosts that prove what was published."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_cases import Model, Tensor, bytes_of, every_dtype, read_checkpoint, write_checkpoint
from emulators import AZURE, S3
from memory_store import MemoryStore
from opening import open_publisher

from weightcast.publisher import init_channel
from weightcast.publisher.run_publisher import RunPublisher
from weightcast.shared.channel.chain import verify
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import DirectoryStore, open_store
from weightcast.shared.channel.object_store import open_object_store
from weightcast.shared.channel.store import Store
from weightcast.shared.checkpoint.local_updater import LocalUpdater, UpdaterOptions
from weightcast.shared.checkpoint.verify.hashing import full_hash

NUMPY_TYPES = {
    "BOOL": "?",
    "U8": "<u1",
    "I8": "<i1",
    "I16": "<i2",
    "F16": "<f2",
    "I32": "<i4",
    "F32": "<f4",
    "I64": "<i8",
    "F64": "<f8",
}
ENCODINGS = ("fast", "small", "xor", "overwrite")


@dataclass(frozen=True)
class Place:
    """A run's directories."""

    root: Path
    model: Model

    @property
    def channel(self) -> Path:
        return self.root / "channel"

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def pub(self) -> Path:
        return self.root / "pub"

    @property
    def host(self) -> Path:
        return self.root / "host"

    @contextlib.contextmanager
    def publisher(self, **options: Any) -> Iterator[RunPublisher]:
        options = {"local": self.pub, "base": self.base, **options}
        with open_publisher(self.channel, **options) as publisher:
            yield publisher

    def publish(self, model: Model, **options: Any) -> int:
        with self.publisher(**options) as publisher:
            return publisher.publish_checkpoint(self.new(model)).version

    def new(self, model: Model) -> Path:
        """A complete checkpoint of the trainer's, under a name of its own."""
        number = sum(1 for _ in self.root.glob("new-*"))
        return write_checkpoint(self.root / f"new-{number}", model)

    def follow(self, host: Path | None = None, base: Path | None = None) -> LocalUpdater:
        options = UpdaterOptions(visible_seconds=0.2)
        return LocalUpdater(
            open_store(self.channel), host or self.host, self.base if base is None else base, options
        )

    def arrives(self, model: Model, version: int, host: Path | None = None) -> None:
        """A host follows the pointer, and holds exactly these bytes afterwards."""
        host = self.host if host is None else host
        updater = self.follow(host)
        try:
            updater.update_to(Channel.open(open_store(self.channel)))
            assert updater.local is not None and full_hash(updater.local).intact
            assert updater.local.state.position.version == version
        finally:
            updater.close()
        assert read_checkpoint(host) == bytes_of(model)


def make_place(root: Path, model: Model | None = None, *, config: str = "{}", **options: Any) -> Place:
    place = Place(root, every_dtype(np.random.default_rng(3)) if model is None else model)
    write_checkpoint(place.base, place.model, config=config)
    init_channel(place.channel, place.base, run_id="run-under-test", **options)
    return place


TWINS = ["directory", "memory"]
"""for faults that this process brings about: a server takes no part in them"""
STORE_PARAMS = [*TWINS, S3, AZURE]


def make_store(request: pytest.FixtureRequest, root: Path) -> Store:
    """The one that a fixture's parameter names, as of STORE_PARAMS."""
    if request.param == "directory":
        return DirectoryStore(root / "channel")
    if request.param == "memory":
        return MemoryStore()
    return open_object_store(request.getfixturevalue("make_bucket")(request.param))


@dataclass(frozen=True)
class StorePlace(Place):
    store: Store

    @classmethod
    def made(cls, root: Path, model: Model, store: Store) -> StorePlace:
        place = cls(root, model, store)
        write_checkpoint(place.base, model)
        init_channel(store, place.base, run_id="run-under-test")
        return place

    @property
    def channel(self) -> Store:  # type: ignore[override]
        return self.store

    def check(self) -> None:
        """Everything in the channel is whole, and nothing else is there."""
        assert verify(Channel.open(self.store)) == []
        left = [name for name in self.store.names() if name.endswith(".parts")]
        assert left == [] and self.store.names(".trash") == []


def as_numpy(one: Tensor) -> np.ndarray[Any, Any]:
    return one.data.view(NUMPY_TYPES[one.dtype]).reshape(one.shape)


def numpy_model(rng: np.random.Generator) -> Model:
    return {name: one for name, one in every_dtype(rng).items() if one.dtype in NUMPY_TYPES}


def trash(place: Place) -> list[str]:
    return sorted(path.name for path in (place.channel / ".trash").iterdir())

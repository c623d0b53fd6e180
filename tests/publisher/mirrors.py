"""A run in a store, mirrors of it, and hosts that follow either."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from core_cases import Model, bytes_of, every_dtype, read_checkpoint, some_changed, write_checkpoint
from opening import open_publisher

from weightcast.publisher import init_channel
from weightcast.publisher.maintenance.upkeep import UpkeepOptions
from weightcast.publisher.mirror.mirror import Mirror, MirrorOptions
from weightcast.publisher.run_publisher import RunPublisher
from weightcast.shared.channel.chain import verify
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.store import Store
from weightcast.shared.checkpoint.local_updater import LocalUpdater, UpdaterOptions

LIMIT = 1 << 24
OWN = ("publishers", ".trash", "hosts", "keep")
"""what a channel has for itself"""


def objects(store: Store, prefix: str = "") -> dict[str, bytes]:
    """By key, without what is a channel's own."""
    found: dict[str, bytes] = {}
    for entry in list(store.list(prefix)):
        key = f"{prefix}/{entry.name}" if prefix else entry.name
        if entry.kind == "file":
            found[key] = store.read(key, LIMIT)
        elif entry.name not in OWN:
            found |= objects(store, key)
    return found


@dataclass
class Run:
    """`models`: of each version, the base first."""

    root: Path
    store: Store
    models: list[Model] = field(default_factory=lambda: [every_dtype(np.random.default_rng(3))])

    @classmethod
    def begin(cls, root: Path, store: Store, **options: Any) -> Run:
        run = cls(root, store)
        init_channel(store, write_checkpoint(run.base, run.models[0]), run_id="run", **options)
        return run

    @property
    def base(self) -> Path:
        return self.root / "base"

    @contextmanager
    def publisher(self, upkeep: UpkeepOptions | None = None, **options: Any) -> Iterator[RunPublisher]:
        places = {"local": self.root / "pub", "base": self.base}
        with open_publisher(self.store, upkeep=upkeep, **places, **options) as publisher:
            yield publisher

    def grow(self, versions: int, *, due: bool = True, **options: Any) -> None:
        """`due`: what is due beside the versions is made after each."""
        rng = np.random.default_rng(len(self.models))
        with self.publisher(**options) as publisher:
            for _ in range(versions):
                self.models.append(some_changed(self.models[-1], rng))
                new = write_checkpoint(self.root / f"new-{len(self.models)}", self.models[-1])
                assert publisher.publish_checkpoint(new).version == len(self.models) - 1
                if due:
                    publisher.make_due()

    @contextmanager
    def mirror(self, to: Store, of: Store | None = None, **options: Any) -> Iterator[Mirror]:
        made = Mirror(self.store if of is None else of, to, MirrorOptions(look_seconds=0.0, **options))
        with closing(made):
            yield made

    def copy(self, to: Store, of: Store | None = None, *, verify: bool = False, **options: Any) -> Mirror:
        """In one pass."""
        with self.mirror(to, of, **options) as mirror:
            mirror.step(verify=verify)
        return mirror

    def arrives(self, store: Store, host: str, version: int = -1, base: bool = True) -> None:
        """A host that follows `store` has the bytes of a version, of the newest one unless given."""
        local = self.root / host
        updater = LocalUpdater(store, local, self.base if base else None, UpdaterOptions(visible_seconds=0.2))
        with closing(updater):
            updater.update_to(Channel.open(store), None if version < 0 else version)
        assert read_checkpoint(local) == bytes_of(self.models[version])


def require_equal(source: Store, to: Store) -> None:
    """Every object of the source is in `to`, byte for byte, and nothing else; all is whole."""
    ours, theirs = objects(source), objects(to)
    assert ours == theirs
    assert verify(Channel.open(to)) == []

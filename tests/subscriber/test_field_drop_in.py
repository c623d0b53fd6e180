"""A trainer of slime or miles publishes in its own format; the hook points; our hosts follow.

`Trainer` does what those trainers do to the directory, in their order. What their own receivers get wrong is
a test each.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from field_channel import Encoding, FieldChannel
from hosts import Host, SGLang, Site, Weights, on_disk

from weightcast.publisher.field_hook import point
from weightcast.shared.base.errors import DamagedFile, Refused, RetryLater, WeightcastError
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.layout import read_pointer
from weightcast.subscriber.sync.options import SyncOptions, parse_target


class Trainer(FieldChannel):
    """A new one on the same directory is a trainer that was started again: it empties the directory, calls
    the hook for it, counts from 1, and its first delta is against the base."""

    def __init__(self, root: Path, base: Weights, encoding: Encoding = "xor") -> None:
        shutil.rmtree(root, ignore_errors=True)
        super().__init__(root, base)
        self.encoding: Encoding = encoding
        point(None, str(root), [])

    def point(self, version: int) -> None:
        pass  # they write no pointer

    def step(self, seed: int, *, ranks: int = 2) -> Weights:
        new = self.weights[-1].changed(seed)
        version = self.publish(new, self.encoding, ranks=ranks)
        point(None, str(self.directory(version)), [])
        return new


@pytest.fixture
def base(site: Site) -> Weights:
    weights = Weights.make()
    weights.write(site.root / "base")
    return weights


def host_of(site: Site, *engines: SGLang, local: str = "host") -> Host:
    options = SyncOptions(
        site.root / "channel",
        site.root / local,
        site.root / "base",
        parse_target("latest"),
        visible_seconds=0.2,
    )
    return Host(options, tuple(site.option(engine) for engine in engines), site.stack)


def serves(host: Host, engine: SGLang, weights: Weights, version: int) -> bool:
    assert host.state.position.version == version
    assert on_disk(host.local) == engine.held == weights.digest()
    return True


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_host_follows(site: Site, base: Weights, encoding: Encoding) -> None:
    trainer, engine = Trainer(site.root / "channel", base, encoding), SGLang()
    assert read_pointer(open_store(trainer.root)) is None
    host = host_of(site, engine)
    for version in (1, 2, 3):
        new = trainer.step(version, ranks=version)
        assert (trainer.root / "latest").read_bytes() == f"{version:06d}".encode()
        assert host.step().ready and serves(host, engine, new, version)
    late = host_of(site, engine, local="late")
    assert late.step().ready and serves(late, engine, new, 3)


@pytest.mark.parametrize("again", [1, 3, 5])
@pytest.mark.parametrize("seen_empty", [True, False])
def test_a_trainer_that_starts_again(site: Site, base: Weights, again: int, seen_empty: bool) -> None:
    """However far the new run is when a host looks: behind, at the host's number, or ahead of it."""
    trainer, engine = Trainer(site.root / "channel", base), SGLang()
    host = host_of(site, engine)
    for seed in (1, 2, 3):
        old = trainer.step(seed)
    assert host.step().ready and serves(host, engine, old, 3)
    trainer = Trainer(site.root / "channel", base)
    if seen_empty:
        with pytest.raises(RetryLater):
            host.step()
        # no rollout runs on the base's weights meanwhile
        assert engine.held == old.digest()
    for seed in range(again):
        new = trainer.step(100 + seed)
    assert host.step().ready and serves(host, engine, new, again)
    new = trainer.step(200)
    assert host.step().ready and serves(host, engine, new, again + 1)


def test_another_run_s_host_directory(site: Site, base: Weights) -> None:
    """Left at version 3 by another run; the new one is at version 1."""
    trainer, engine = Trainer(site.root / "channel", base), SGLang()
    for seed in (1, 2, 3):
        trainer.step(seed)
    host = host_of(site, engine)
    host.step()
    site.stack.close()
    new = Trainer(site.root / "channel", base).step(50)
    host = host_of(site, engine)
    assert host.step().ready and serves(host, engine, new, 1)


def test_a_shard_that_is_missing_or_late(site: Site, base: Weights) -> None:
    trainer, engine = Trainer(site.root / "channel", base), SGLang()
    host = host_of(site, engine)
    old = trainer.step(1)
    host.step()
    new = trainer.step(2)
    shard = sorted(trainer.directory(2).glob("model-*.safetensors"))[0]
    shard.rename(site.root / "kept")
    with pytest.raises(RetryLater, match="weight_v000002"):
        host.step()
    assert serves(host, engine, old, 1)
    (site.root / "kept").rename(shard)
    assert host.step().ready and serves(host, engine, new, 2)


def test_shards_without_an_index_are_not_pointed_to(site: Site, base: Weights) -> None:
    trainer, engine = Trainer(site.root / "channel", base), SGLang()
    host = host_of(site, engine)
    old = trainer.step(1)
    host.step()
    trainer.publish(old.changed(2))
    (trainer.directory(2) / "model.safetensors.index.json").unlink()
    with pytest.raises(Refused, match=r"weight_v000002 has no model\.safetensors\.index\.json"):
        point(None, trainer.directory(2), [])
    assert host.step().ready and serves(host, engine, old, 1)


def test_an_index_of_another_version_is_not_pointed_to(site: Site, base: Weights) -> None:
    trainer = Trainer(site.root / "channel", base)
    trainer.step(1)
    shutil.copytree(trainer.directory(1), trainer.directory(2))
    with pytest.raises(DamagedFile, match="its index is of version 1"):
        point(None, trainer.directory(2), [])
    assert (trainer.root / "latest").read_bytes() == b"000001"


def test_a_delta_from_other_weights(site: Site, base: Weights) -> None:
    """A publisher whose copy had drifted: found where a tensor was touched, and nothing changes here."""
    trainer, engine = Trainer(site.root / "channel", base), SGLang()
    host = host_of(site, engine)
    old = trainer.step(1)
    host.step()
    trainer.weights[-1] = old.changed(77)
    trainer.step(2)
    for _ in range(3):
        with pytest.raises(DamagedFile):
            host.step()
        assert serves(host, engine, old, 1)


def test_the_same_tensor_in_two_shards(site: Site, base: Weights) -> None:
    trainer, engine = Trainer(site.root / "channel", base), SGLang()
    host = host_of(site, engine)
    old = trainer.step(1)
    host.step()
    trainer.step(2)
    first, second = sorted(trainer.directory(2).glob("model-*.safetensors"))
    second.write_bytes(first.read_bytes())
    with pytest.raises(WeightcastError):
        host.step()
    assert serves(host, engine, old, 1)


def test_full_weights_are_pointed_to(site: Site, base: Weights) -> None:
    trainer, engine = Trainer(site.root / "channel", base), SGLang()
    host = host_of(site, engine)
    trainer.step(1)
    host.step()
    new = Weights.make(7)
    point(None, trainer.directory(trainer.publish_full(new)), [])
    assert host.step().ready and serves(host, engine, new, 2)
    new = trainer.step(3)
    assert host.step().ready and serves(host, engine, new, 3)

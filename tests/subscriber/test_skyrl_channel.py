"""A trainer of SkyRL publishes its delta files; our hosts follow the directory. `FieldChannel` writes them as
the format is described, in the order of SkyRL's publisher."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest
from field_channel import FieldChannel
from hosts import SGLang, Site, Weights, on_disk
from test_field_drop_in import host_of, serves

from weightcast.publisher import init_channel
from weightcast.shared.base.errors import DamagedFile, Refused, RetryLater, UnknownFormat, WeightcastError
from weightcast.shared.channel.chain import entries, verify
from weightcast.shared.channel.channel import Channel, require_named
from weightcast.shared.channel.directory_store import open_store


@pytest.fixture
def base(site: Site) -> Weights:
    weights = Weights.make()
    weights.write(site.root / "base")
    return weights


@pytest.fixture
def trainer(site: Site, base: Weights) -> FieldChannel:
    return FieldChannel(site.root / "channel", base, "skyrl")


def step(trainer: FieldChannel, seed: int, **how: Any) -> Weights:
    trainer.publish(trainer.weights[-1].changed(seed), **how)
    return trainer.weights[-1]


def rewrite(trainer: FieldChannel, version: int, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Changes a manifest; its bytes before."""
    path = trainer.directory(version) / "manifest.json"
    before = path.read_bytes()
    manifest = json.loads(before)
    change(manifest)
    path.write_text(json.dumps(manifest))
    return before


def restarted(trainer: FieldChannel, base: Weights) -> FieldChannel:
    """Another process on the same directory, an hour later: it counts from 1 and empties nothing."""
    for path in trainer.root.rglob("*"):
        os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 3600 * 10**9))
    again = FieldChannel.__new__(FieldChannel)
    again.__dict__ |= trainer.__dict__ | {"weights": [base]}
    return again


def test_versions_are_followed(site: Site, trainer: FieldChannel) -> None:
    engine = SGLang()
    host = host_of(site, engine)
    with pytest.raises(RetryLater, match="nor a pointer"):
        host.step()
    for version, checksum in ((1, "xxh3-128"), (2, "sha256"), (3, "xxh3-128")):
        new = step(trainer, version, form=checksum, ranks=version)
        assert host.step().ready and serves(host, engine, new, version)
    trainer.publish(new)  # nothing changed
    assert host.step().ready and serves(host, engine, new, 4)
    late = host_of(site, SGLang(), local="late")
    assert late.step().ready and on_disk(late.local) == new.digest()
    assert host.state.foreign and host.status.assurance == "changed-tensors"
    channel = Channel.open(open_store(trainer.root))
    require_named(channel.store)
    assert [entry.version for entry in entries(channel, channel.pointer())] == [1, 2, 3, 4]
    assert verify(channel) == []


def test_files_without_a_manifest_are_no_version(site: Site, trainer: FieldChannel) -> None:
    engine = SGLang()
    host = host_of(site, engine)
    old = step(trainer, 1)
    new = step(trainer, 2)
    manifest = trainer.directory(2) / "manifest.json"
    data = manifest.read_bytes()
    manifest.unlink()
    assert host.step().ready and serves(host, engine, old, 1)
    manifest.write_bytes(data)
    assert host.step().ready and serves(host, engine, new, 2)


@pytest.mark.parametrize("part", ["", "manifest.json", "delta-rank00000-file000001.safetensors"])
def test_what_is_missing_is_named_and_awaited(site: Site, trainer: FieldChannel, part: str) -> None:
    """A gap in the chain, or a payload file."""
    engine = SGLang()
    host = host_of(site, engine)
    old = step(trainer, 1)
    host.step()
    for seed in (2, 3):
        new = step(trainer, seed, ranks=2)
    gone = trainer.directory(2) / part
    gone.rename(site.root / "kept")
    for _ in range(2):
        with pytest.raises(WeightcastError, match=r"version 2|delta-00000002"):
            host.step()
        assert serves(host, engine, old, 1)
    (site.root / "kept").rename(gone)
    assert host.step().ready and serves(host, engine, new, 3)


def first(manifest: dict[str, Any]) -> dict[str, Any]:
    tensor: dict[str, Any] = manifest["tensors"][0]
    return tensor


WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], type[WeightcastError], str]] = {
    "checksum": (
        lambda manifest: first(manifest).update(checksum="0" * 32),
        DamagedFile,
        r"delta-00000002.*model\.embed\.weight: the new bytes do not have the digest",
    ),
    "algorithm": (
        lambda manifest: first(manifest).update(checksum_algorithm="crc32"),
        UnknownFormat,
        r"delta-00000002/manifest\.json: unknown checksum 'crc32'",
    ),
    "tensor": (
        lambda manifest: first(manifest).update(name="model.other"),
        DamagedFile,
        r"delta-00000002: unknown tensors model\.other",
    ),
    "shape": (
        lambda manifest: first(manifest).update(shape=[33, 67]),
        DamagedFile,
        r"model\.embed\.weight: 4422 bytes of shape \[33, 67\], expected 4422 of shape \[67, 33\]",
    ),
    "key": (
        lambda manifest: first(manifest).update(payload_key="other"),
        DamagedFile,
        r"delta-00000002.*model\.embed\.weight: no payload",
    ),
    "path": (
        lambda manifest: first(manifest).update(payload_file="../x"),
        DamagedFile,
        r"delta-00000002/manifest\.json: '\.\./x' is not a plain file name",
    ),
    "version": (
        lambda manifest: manifest.update(version=3, base_version=2),
        DamagedFile,
        r"delta-00000002/manifest\.json is of version 3",
    ),
    "base version": (
        lambda manifest: manifest.update(base_version=0),
        DamagedFile,
        r"delta-00000002/manifest\.json: 'base_version' must be an integer from 1 to 1",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_manifest_changes_nothing_and_heals(site: Site, trainer: FieldChannel, what: str) -> None:
    engine, (change, error, message) = SGLang(), WRONG[what]
    host = host_of(site, engine)
    old = step(trainer, 1)
    host.step()
    new = step(trainer, 2)
    good = rewrite(trainer, 2, change)
    for _ in range(2):
        with pytest.raises(error, match=message):
            host.step()
        assert serves(host, engine, old, 1)
    (trainer.directory(2) / "manifest.json").write_bytes(good)
    assert host.step().ready and serves(host, engine, new, 2)


@pytest.mark.parametrize("again", [1, 3, 5])
def test_a_restarted_trainer(site: Site, base: Weights, trainer: FieldChannel, again: int) -> None:
    """Its predecessor's files remain: the new run is behind, at the host's number, or ahead of it."""
    engine = SGLang()
    host = host_of(site, engine)
    for seed in (1, 2, 3):
        old = step(trainer, seed)
    assert host.step().ready and serves(host, engine, old, 3)
    trainer = restarted(trainer, base)
    for seed in range(again):
        new = step(trainer, 100 + seed)
    assert host.step().ready and serves(host, engine, new, again)
    late = host_of(site, SGLang(), local="late")
    assert late.step().ready and on_disk(late.local) == new.digest()
    new = step(trainer, 200)
    assert host.step().ready and serves(host, engine, new, again + 1)


def test_a_host_far_behind_needs_only_what_follows(site: Site, trainer: FieldChannel) -> None:
    """An operator removed the oldest files; a new host cannot begin."""
    engine = SGLang()
    host = host_of(site, engine)
    for seed in (1, 2, 3):
        step(trainer, seed)
    assert host.step().ready
    for version in (1, 2):
        shutil.rmtree(trainer.directory(version))
    new = step(trainer, 4)
    assert host.step().ready and serves(host, engine, new, 4)
    with pytest.raises(Refused, match="version 2 is no longer in the channel"):
        host_of(site, SGLang(), local="late").step()


def test_no_channel_is_made_among_its_files(site: Site, trainer: FieldChannel) -> None:
    step(trainer, 1)
    with pytest.raises(Refused):
        init_channel(trainer.root, site.root / "base")

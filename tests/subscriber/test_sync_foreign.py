"""Channels in the field's plain format, written by an independent writer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from field_channel import Dialect, Encoding, FieldChannel
from field_writer import payload
from hosts import Host, SGLang, Site, Weights, on_disk

from weightcast.shared.base.errors import DamagedFile, Refused, RetryLater, WeightcastError
from weightcast.subscriber.sync.options import SyncOptions, parse_target


class Foreign(FieldChannel):
    """With the name that a host of `Site` looks for."""

    @property
    def channel(self) -> Path:
        return self.root


def channel_of(site: Site, dialect: Dialect = "plain") -> Foreign:
    base = Weights.make()
    base.write(site.root / "base")
    return Foreign(site.root / "channel", base, dialect)


def host_of(site: Site, channel: FieldChannel, *engines: SGLang, base: bool = True) -> Host:
    options = SyncOptions(
        channel.root,
        site.root / "host",
        site.root / "base" if base else None,
        parse_target("latest"),
        visible_seconds=0.2,
    )
    return Host(options, tuple(site.option(engine) for engine in engines), site.stack)


def at(host: Host, channel: FieldChannel, version: int) -> bool:
    assert host.state.position.version == version
    assert on_disk(host.local) == channel.digest(version)
    return True


@pytest.mark.parametrize("dialect", ["plain", "stitch"])
@pytest.mark.parametrize("encoding", ["xor", "overwrite", "xor_sparse"])
def test_three_versions_are_followed(site: Site, dialect: Dialect, encoding: Encoding) -> None:
    channel, engine = channel_of(site, dialect), SGLang()
    host = host_of(site, channel, engine)
    for version, form in ((1, "xxh3-128"), (2, "blake3"), (3, "adler32")):
        channel.publish(channel.weights[-1].changed(version), encoding, form, ranks=version)
        assert host.step().ready
        assert at(host, channel, version) and engine.held == channel.digest(version)
        assert engine.label == str(version)
    assert host.status.assurance == "changed-tensors"
    assert host.state.foreign


@pytest.mark.parametrize("dialect", ["plain", "stitch"])
def test_versions_are_folded(site: Site, dialect: Dialect) -> None:
    channel, engine = channel_of(site, dialect), SGLang()
    for version in (1, 2, 3):
        channel.publish(channel.weights[-1].changed(version), "overwrite" if version == 2 else "xor")
    host = host_of(site, channel, engine)
    assert host.step().ready
    assert at(host, channel, 3) and engine.held == channel.digest(3)
    assert len(engine.of("/update_weights_from_disk")) == 1


def test_the_golden_vector() -> None:
    a = bytes.fromhex("".join(f"{n:02x}00" for n in range(16)))
    new_a = a[:2] + bytes.fromhex("3412") + a[4:]
    assert payload("xor", a, new_a).hex() == "00003512" + "00" * 28
    assert payload("overwrite", a, new_a).hex() == "02000000" + "0200000003000000" + "3412"


def test_nothing_changed(site: Site) -> None:
    channel, engine = channel_of(site), SGLang()
    host = host_of(site, channel, engine)
    channel.publish(channel.weights[-1])
    assert host.step().ready and at(host, channel, 1)
    channel.publish(channel.weights[-1].changed(5))
    assert host.step().ready and at(host, channel, 2)


def test_an_empty_directory_is_no_channel_yet(site: Site) -> None:
    channel = channel_of(site)
    host = host_of(site, channel)
    with pytest.raises(RetryLater, match=r"neither channel\.json nor a pointer"):
        host.step()
    assert list(host.local.glob("*.safetensors")) == []


def test_a_shard_that_the_index_names_is_missing(site: Site) -> None:
    channel, engine = channel_of(site), SGLang()
    host = host_of(site, channel, engine)
    channel.publish(channel.weights[-1].changed(1))
    host.step()
    channel.publish(channel.weights[-1].changed(2))
    for shard in channel.directory(2).glob("model-*"):
        shard.unlink()
    with pytest.raises(WeightcastError):
        host.step()
    assert at(host, channel, 1) and engine.held == channel.digest(1)


def test_shards_without_an_index_are_no_version(site: Site) -> None:
    channel, engine = channel_of(site), SGLang()
    host = host_of(site, channel, engine)
    channel.publish(channel.weights[-1].changed(1))
    host.step()
    channel.publish(channel.weights[-1].changed(2))
    (channel.directory(2) / "model.safetensors.index.json").unlink()
    with pytest.raises(RetryLater):
        host.step()
    assert at(host, channel, 1) and engine.held == channel.digest(1)


def test_a_checksum_that_does_not_fit_changes_nothing_and_heals(site: Site) -> None:
    channel, engine = channel_of(site), SGLang()
    host = host_of(site, channel, engine)
    channel.publish(channel.weights[-1].changed(1))
    host.step()
    good = channel.weights[-1].changed(2)
    channel.publish(good)
    kept = site.root / "kept"
    shutil.copytree(channel.directory(2), kept)
    for shard in channel.directory(2).glob("model-*.safetensors"):
        data = shard.read_bytes()
        at_digit = data.index(b'"__metadata__"') + data[data.index(b'"__metadata__"') :].index(b'": "') + 4
        digit = b"0" if data[at_digit : at_digit + 1] != b"0" else b"1"
        shard.write_bytes(data[:at_digit] + digit + data[at_digit + 1 :])
    for _ in range(2):
        with pytest.raises(DamagedFile):
            host.step()
        assert at(host, channel, 1) and engine.held == channel.digest(1)
    shutil.rmtree(channel.directory(2))
    shutil.copytree(kept, channel.directory(2))
    assert host.step().ready and at(host, channel, 2)


def test_a_full_version_replaces_what_lies_here(site: Site) -> None:
    channel, engine = channel_of(site), SGLang()
    host = host_of(site, channel, engine)
    channel.publish(channel.weights[-1].changed(1))
    host.step()
    channel.publish_full(Weights.make(7))
    assert host.step().ready
    assert at(host, channel, 2) and engine.held == channel.digest(2)
    channel.publish(channel.weights[-1].changed(3))
    assert host.step().ready and at(host, channel, 3)


def test_a_full_version_needs_no_base(site: Site) -> None:
    channel = channel_of(site)
    channel.publish_full(Weights.make(7))
    host = host_of(site, channel, base=False)
    assert host.step().ready and at(host, channel, 1)


def test_without_base_and_full_version_there_is_no_start(site: Site) -> None:
    channel = channel_of(site)
    channel.publish(channel.weights[-1].changed(1))
    host = host_of(site, channel, base=False)
    with pytest.raises(Refused):
        host.step()
    assert list(host.local.glob("*.safetensors")) == []


def test_a_rewound_and_rewritten_channel_is_seeded_anew(site: Site) -> None:
    channel, engine = channel_of(site), SGLang()
    host = host_of(site, channel, engine)
    for version in (1, 2, 3):
        channel.publish(channel.weights[-1].changed(version))
    host.step()
    channel.publish(channel.weights[1].changed(99), version=2)
    assert host.step().ready
    assert at(host, channel, 2) and engine.held == channel.digest(2)


def test_another_run_in_the_same_directory_is_seeded_anew(site: Site) -> None:
    """The receiver at v1 of an old run must not take v1 of a new one for its own."""
    channel, engine = channel_of(site, "stitch"), SGLang()
    host = host_of(site, channel, engine)
    channel.publish(channel.weights[-1].changed(1))
    host.step()
    channel.run = "run-b"
    channel.publish(channel.weights[0].changed(50), version=1)
    assert host.step().ready
    assert at(host, channel, 1) and engine.held == channel.digest(1)
    assert host.state.run_id == "run-b"


def test_the_same_tensor_in_two_shards_is_refused(site: Site) -> None:
    channel = channel_of(site)
    host = host_of(site, channel)
    channel.publish(channel.weights[-1].changed(1), ranks=2)
    first, second = sorted(channel.directory(1).glob("model-*.safetensors"))
    second.write_bytes(first.read_bytes())
    with pytest.raises(WeightcastError):
        host.step()
    assert on_disk(host.local) == channel.digest(0)

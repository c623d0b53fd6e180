"""Foreign channels in directories and in a real S3 server: complete runs, and runs that were resumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from doubles import serve_files
from field_channel import Dialect, Encoding, FieldChannel
from hosts import Host, SGLang, Site, Weights, on_disk

from weightcast.shared.base.errors import DamagedFile, Refused, RetryLater, WrongRun
from weightcast.shared.channel.chain import verify
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.subscriber.sync.options import SyncOptions, parse_target

Place = Callable[[str], str]


@pytest.fixture(params=["directory", pytest.param("s3", marks=pytest.mark.s3)])
def place(request: pytest.FixtureRequest) -> Place:
    """The URL of a channel with this name; empty: it is in its directory."""
    if request.param == "directory":
        return lambda name: ""
    bucket: str = request.getfixturevalue("bucket")
    return lambda name: f"{bucket}/runs/{name}"


def channel_of(site: Site, place: Place, dialect: Dialect, boot: int = 0, seed: int = 0) -> FieldChannel:
    base = Weights.make(seed)
    base.write(site.root / f"base-{boot}")
    return FieldChannel(site.root / "channel", base, dialect, url=place("channel"), boot=boot)


def host_of(
    site: Site, channel: FieldChannel, *engines: SGLang, name: str = "host", base: Path | None = None
) -> Host:
    options = SyncOptions(
        channel.address,
        site.root / name,
        site.root / f"base-{channel.boot}" if base is None else base,
        parse_target("latest"),
        visible_seconds=0.2,
        base_version=channel.boot,
    )
    return Host(options, tuple(site.option(engine) for engine in engines), site.stack)


def serves(host: Host, engine: SGLang, channel: FieldChannel, version: int) -> bool:
    assert host.step().ready
    assert host.state.position.version == version
    assert on_disk(host.local) == engine.held == channel.digest(version)
    return True


@pytest.mark.parametrize("dialect", ["plain", "stitch"])
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_versions_are_followed(site: Site, place: Place, dialect: Dialect, encoding: Encoding) -> None:
    channel, engine = channel_of(site, place, dialect), SGLang()
    host = host_of(site, channel, engine)
    for version, checksum in ((1, "xxh3-128"), (2, "blake3")):
        channel.publish(channel.weights[-1].changed(version), encoding, checksum, ranks=version)
        assert serves(host, engine, channel, version)
    channel.publish_full(Weights.make(7))
    assert serves(host, engine, channel, 3)
    channel.publish(channel.weights[-1])
    channel.publish(channel.weights[-1].changed(5), encoding)
    assert serves(host, engine, channel, 5)
    late = SGLang()
    assert serves(host_of(site, channel, late, name="late"), late, channel, 5)


def test_skyrl_s_versions_are_followed(site: Site, place: Place) -> None:
    channel, engine = channel_of(site, place, "skyrl"), SGLang()
    host = host_of(site, channel, engine)
    for version in (1, 2):
        channel.publish(channel.weights[-1].changed(version), ranks=version)
        assert serves(host, engine, channel, version)
    channel.publish(channel.weights[-1].changed(3))
    late = SGLang()
    assert serves(host_of(site, channel, late, name="late"), late, channel, 3)
    assert verify(Channel.open(open_store(channel.address))) == []


def test_a_rewritten_run_is_seeded_anew(site: Site, place: Place) -> None:
    channel, engine = channel_of(site, place, "plain"), SGLang()
    host = host_of(site, channel, engine)
    for seed in (1, 2, 3):
        channel.publish(channel.weights[-1].changed(seed))
    assert serves(host, engine, channel, 3)
    channel.publish(channel.weights[1].changed(99), version=2)
    assert serves(host, engine, channel, 2)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_resumed_run_is_followed(site: Site, place: Place, encoding: Encoding) -> None:
    """No directory of the version at which it begins."""
    channel, engine = channel_of(site, place, "stitch", boot=4), SGLang()
    channel.point(4)
    host = host_of(site, channel, engine)
    assert serves(host, engine, channel, 4) and host.state.run_id == "run-a"
    assert serves(host, engine, channel, 4)
    for version in (5, 6):
        channel.publish(channel.weights[-1].changed(version), encoding)
        assert serves(host, engine, channel, version)
        host.restart()
    late = SGLang()
    assert serves(host_of(site, channel, late, name="late"), late, channel, 6)
    assert verify(Channel.open(open_store(channel.address))) == []


def test_a_host_at_the_base_needs_the_setting_no_more(site: Site, place: Place) -> None:
    channel, engine = channel_of(site, place, "stitch", boot=4), SGLang()
    channel.point(4)
    host = host_of(site, channel, engine)
    host.step()
    host.options = replace(host.options, base=None, base_version=0)
    host.restart()
    channel.publish(channel.weights[-1].changed(5))
    assert serves(host, engine, channel, 5)


def test_a_resumed_run_without_the_setting(site: Site, place: Place) -> None:
    channel = channel_of(site, place, "stitch", boot=4)
    channel.point(4)
    host = host_of(site, channel)
    host.options = replace(host.options, base_version=0)
    host.restart()
    with pytest.raises(RetryLater) as waits:
        host.step()
    assert "--base-version 4" in waits.value.remedy
    channel.publish(channel.weights[-1].changed(5))
    with pytest.raises(Refused) as refused:
        host.step()
    assert "--base-version" in refused.value.remedy
    assert list(host.local.glob("*.safetensors")) == []


@pytest.mark.parametrize("boot", [0, 4, 8])
def test_a_run_that_is_claimed_anew(site: Site, place: Place, boot: int) -> None:
    """At another version its base is another checkpoint: the host says so, and keeps what it has."""
    channel, engine = channel_of(site, place, "stitch", boot=4), SGLang()
    channel.publish(channel.weights[-1].changed(5))
    host = host_of(site, channel, engine)
    assert serves(host, engine, channel, 5)
    before = channel.digest(5)
    again = FieldChannel(site.root / "again", Weights.make(9), "stitch", "run-b", url=channel.url, boot=boot)
    again.weights[0].write(site.root / f"base-{boot}")
    if not channel.url:
        again.root = channel.root
    again.point(boot)
    if boot != 4:
        with pytest.raises(RetryLater if boot else Refused, match=f"version {boot}|names {boot}"):
            host.step()
        assert on_disk(host.local) == engine.held == before
    host.options = replace(host.options, base=site.root / f"base-{boot}", base_version=boot)
    host.restart()
    assert serves(host, engine, again, boot) and host.state.run_id == "run-b"
    again.publish(again.weights[-1].changed(boot + 1))
    assert serves(host, engine, again, boot + 1)


def test_another_run_at_the_same_version_over_http(site: Site) -> None:
    """Where each look is a request, a pass that finds the pointer unchanged reads nothing else."""
    first = channel_of(site, lambda name: "", "stitch", boot=4)
    second = FieldChannel(site.root / "second", first.weights[0], "stitch", "run-b", boot=4)
    second.root = first.root
    with serve_files(first.root) as url:
        engine = SGLang()
        host = host_of(site, first, engine)
        host.options = replace(host.options, channel=url)
        host.restart()
        for seed, run in enumerate((first, second)):
            run.publish(run.weights[0].changed(seed))
            for _ in range(2):
                assert serves(host, engine, run, 5) and host.state.run_id == run.run


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_another_base_is_never_taken_for_a_version(site: Site, place: Place, encoding: Encoding) -> None:
    channel = channel_of(site, place, "stitch", boot=4)
    channel.point(4)
    wrong = channel.weights[0].changed(77)
    host = host_of(site, channel, base=wrong.write(site.root / "wrong"))
    host.step()
    channel.publish(channel.weights[-1].changed(5), encoding)
    for _ in range(2):
        with pytest.raises(DamagedFile, match="new bytes do not have the digest"):
            host.step()
        assert host.state.position.version == 4 and on_disk(host.local) == wrong.digest()


def test_a_version_in_the_channel_proves_the_base(site: Site, place: Place) -> None:
    channel = channel_of(site, place, "stitch")
    for seed in (1, 2, 3):
        channel.publish(channel.weights[-1].changed(seed))
    host = host_of(site, channel)
    host.options = replace(host.options, base_version=2)
    host.restart()
    with pytest.raises(WrongRun, match="base-0 is not version 2: "):
        host.step()
    assert list(host.local.glob("*.safetensors")) == []
    host.options = replace(host.options, base=channel.weights[2].write(site.root / "base-2"))
    host.restart()
    assert host.step().ready and on_disk(host.local) == channel.digest(3)


def test_the_base_of_a_channel_of_weightcast_is_version_0(site: Site) -> None:
    run = site.run()
    host = site.host(run, base_version=4)
    with pytest.raises(Refused, match=r"--base-version 4: the base of .* is version 0"):
        host.step()

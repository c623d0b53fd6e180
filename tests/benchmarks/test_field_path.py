"""The field's path as it is measured: its round trip, its files, and that weightcast follows them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
import zstandard
from core_cases import header_of, read_checkpoint, tensor, write_checkpoint

from benchmarks.field_path import (
    INDEX,
    PIECE,
    FieldChunks,
    FieldHost,
    FieldPathError,
    FieldPublisher,
    version_directory,
)
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.checkpoint.local_updater import LocalUpdater

ROOT = Path(__file__).parents[2]


class Site:
    """A checkpoint that takes steps, a publisher and a host of the field's path."""

    def __init__(self, root: Path, threads: int = 2) -> None:
        self.root, self.random = root, np.random.default_rng(7)
        self.tensors = {
            "embed": tensor(self.random, "BF16", 3 * PIECE // 4 + 5, 2),
            "layer.0.up": tensor(self.random, "BF16", 33, 17),
            "layer.0.scale": tensor(self.random, "F32"),
            "layer.0.quantised": tensor(self.random, "F8_E4M3", 31),
            "layer.1.empty": tensor(self.random, "BF16", 0, 4),
            "layer.1.frozen": tensor(self.random, "BF16", 64),
        }
        write_checkpoint(root / "base", self.tensors)
        self.channel = root / "channel"
        self.publisher = FieldPublisher(self.channel, root / "publisher", root / "base", threads)
        self.host = FieldHost(self.channel, root / "host", root / "base", threads)
        self.written = 0

    def step(self, *names: str) -> Path:
        """A checkpoint in which a few words of these tensors have moved."""
        for name in names:
            words = self.tensors[name]
            self.tensors[name] = words.changed(self.random, max(1, words.data.size // 500))
        self.written += 1
        write_checkpoint(self.root / f"new{self.written}", self.tensors)
        return self.root / f"new{self.written}"

    def bytes(self) -> dict[str, bytes]:
        return {name: words.data.tobytes() for name, words in self.tensors.items()}

    def close(self) -> None:
        self.publisher.close()
        self.host.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.close()


MOVED = ("embed", "layer.0.up", "layer.0.scale", "layer.0.quantised")


def test_host_and_publisher_hold_every_published_bit(site: Site) -> None:
    for number in (1, 2):
        done = site.publisher.publish(site.step(*MOVED))
        synced = site.host.sync()
        assert (done.version, synced.version) == (number, number)
        assert done.nbytes == synced.nbytes > 0
        assert {"xor", "zstd", "digest", "write", "baseline", "commit"} == set(done.profile)
        assert {"read", "zstd", "xor", "digest"} == set(synced.profile)
        assert read_checkpoint(site.root / "publisher") == site.bytes()
        assert read_checkpoint(site.root / "host") == site.bytes()


def test_a_host_takes_several_versions_at_once_and_a_new_process_goes_on(site: Site) -> None:
    site.publisher.publish(site.step("embed"))
    site.publisher.publish(site.step("layer.0.up"))
    site.host.sync()
    assert read_checkpoint(site.root / "host") == site.bytes()
    again = FieldHost(site.channel, site.root / "host", site.root / "base", 1)
    site.publisher.publish(site.step("embed"))
    assert again.sync().version == 3
    assert read_checkpoint(site.root / "host") == site.bytes()
    again.close()


def test_nothing_changed_is_a_version_without_shards(site: Site) -> None:
    site.publisher.publish(site.step())
    directory = version_directory(site.channel, 1)
    assert [path.name for path in directory.iterdir()] == [INDEX]
    assert json.loads((directory / INDEX).read_text())["weight_map"] == {}
    assert site.host.sync().version == 1


def test_files_are_those_of_the_format(site: Site) -> None:
    old = site.bytes()
    site.publisher.publish(site.step(*MOVED))
    directory = version_directory(site.channel, 1)
    weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
    assert set(weight_map) == set(MOVED)
    assert (site.channel / "latest").read_bytes() == b"000001"
    for name, file in weight_map.items():
        data = (directory / file).read_bytes()
        header, start = header_of(data)
        begin, end = header[name]["data_offsets"]
        assert header[name] == {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        frame = data[start + begin : start + end]
        new = site.bytes()[name]
        assert zstandard.get_frame_parameters(frame).content_size == len(new)
        different = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), np.uint8)
        assert (different ^ np.frombuffer(old[name], np.uint8)).tobytes() == new
        assert header["__metadata__"][name] == xxhash.xxh3_128_hexdigest(new)


def test_weightcast_follows_the_channel_bit_for_bit(site: Site) -> None:
    for _ in range(2):
        site.publisher.publish(site.step(*MOVED))
    updater = LocalUpdater(open_store(site.channel), site.root / "ours", site.root / "base")
    updater.update_to(Channel.open(open_store(site.channel)))
    updater.close()
    assert read_checkpoint(site.root / "ours") == site.bytes()


def test_damage_is_found_and_the_local_copy_is_not_used_again(site: Site) -> None:
    site.publisher.publish(site.step("layer.0.scale"))
    (shard,) = version_directory(site.channel, 1).glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    with pytest.raises((FieldPathError, zstandard.ZstdError)):
        site.host.sync()
    with pytest.raises(FieldPathError, match="unfinished"):
        FieldHost(site.channel, site.root / "host", site.root / "base", 1)


def test_another_model_is_refused_and_writes_nothing(site: Site, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "other", {"embed": tensor(site.random, "BF16", 4)})
    with pytest.raises(FieldPathError, match="other tensors"):
        site.publisher.publish(tmp_path / "other")
    assert list(site.channel.iterdir()) == []
    assert site.publisher.publish(site.step("embed")).version == 1


def test_chunks_in_memory_come_back() -> None:
    random = np.random.default_rng(0)
    chunks = FieldChunks()
    for size in (1, PIECE, PIECE + 3):
        old = random.integers(0, 256, size, np.uint8)
        new = old ^ (random.random(size) < 0.01).astype(np.uint8)
        blob, digest = chunks.encode(old, new)
        assert chunks.decode(blob, old) == digest == xxhash.xxh3_128_hexdigest(new)
        assert np.array_equal(old, new)


def test_commands_publish_sync_and_serve(site: Site) -> None:
    here = ["--channel", site.root / "c", "--base", site.root / "base", "--threads", "1"]

    def call(*words: object, given: str = "") -> list[object]:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.field_path", *map(str, words), *map(str, here)],
            check=True,
            cwd=ROOT,
            input=given,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ},
        )
        return [json.loads(line) for line in done.stdout.splitlines()]

    call("publish", site.step("embed"), "--local", site.root / "p")
    answers = call("serve", "publisher", "--local", site.root / "p", given=f"{site.step('layer.0.up')}\n")
    assert answers[0] == "ready" and answers[1]["version"] == 2  # type: ignore[index]
    (synced,) = call("sync", "--local", site.root / "h")
    assert synced["version"] == 2  # type: ignore[index]
    assert read_checkpoint(site.root / "h") == site.bytes()

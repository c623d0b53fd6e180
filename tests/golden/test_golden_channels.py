"""Channels as they were written once: read to the same root and bytes by every release."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from core_cases import (
    Model,
    all_changed,
    bytes_of,
    every_dtype,
    read_checkpoint,
    rot,
    some_changed,
    tensor,
    write_checkpoint,
)
from faulty_store import Fault, FaultyStore
from field_reader import follow
from field_writer import root_of, write_pointer, write_version
from independent_reader import components, read, read_component
from memory_store import MemoryStore

from weightcast.publisher import Publisher, init_channel
from weightcast.shared.base.errors import DamagedFile, NeedsReseed, Refused, RetryLater
from weightcast.shared.channel.chain import verify
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.components import all_faults, open_component, read_components
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.store import Store
from weightcast.shared.checkpoint.local_updater import LocalUpdater, UpdaterOptions
from weightcast.shared.checkpoint.verify.hashing import full_hash

CHANNELS = Path(__file__).parent / "channels"
BASE = CHANNELS / "base"
EXPECTED = json.loads((CHANNELS / "expected.json").read_text())
OURS = ("fast", "xor", "overwrite")
FIELD = ("field-plain", "field-run", "skyrl")


def in_memory(channel: Path) -> MemoryStore:
    """A copy of a channel's directory."""
    store = MemoryStore()
    for path in channel.rglob("*"):
        if path.is_file():
            store.create(path.relative_to(channel).as_posix(), path.read_bytes())
    return store


def bring(channel: Path | Store, local: Path, base: Path | None = BASE) -> str:
    """Follows to the pointer; the root that lies there."""
    updater = LocalUpdater(
        open_store(channel),
        local,
        base,
        UpdaterOptions(visible_seconds=2.0 if isinstance(channel, FaultyStore) else 0.2),
    )
    try:
        updater.update_to(Channel.open(open_store(channel)))
        assert updater.local is not None
        report = full_hash(updater.local)
        assert report.intact
        return report.root
    finally:
        updater.close()


@pytest.mark.parametrize("name", OURS)
def test_a_host_reads_what_was_written_once(tmp_path: Path, name: str) -> None:
    assert bring(CHANNELS / name, tmp_path / "local") == EXPECTED["roots"][name]
    assert root_of(read_checkpoint(tmp_path / "local")) == EXPECTED["bytes"]
    assert verify(Channel.open(open_store(CHANNELS / name))) == []


ADAPTERS, NESTED = CHANNELS / "adapters", CHANNELS / "adapters" / "components"


def test_an_adapter_is_read_as_it_was_written_once(tmp_path: Path) -> None:
    run = Channel.open(open_store(ADAPTERS))
    assert [(one.name, one.active) for one in read_components(run)] == [
        ("adapter/math", True),
        ("adapter/old", False),
    ]
    nested = open_component(run, "adapter/math")
    assert bring(nested.store, tmp_path / "local", None) == EXPECTED["adapters"]["math"]
    assert root_of(read_checkpoint(tmp_path / "local")) == EXPECTED["adapters"]["bytes"]
    assert json.loads((tmp_path / "local" / "adapter_config.json").read_text())["lora_alpha"] == 3
    index = nested.own_index(3)
    assert index is not None
    assert (index.main_version, index.main_root) == (1, EXPECTED["adapters"]["main"])
    assert all_faults(open_store(ADAPTERS)) == []


def test_a_reader_that_knows_no_components_follows_main(tmp_path: Path) -> None:
    """And refuses an adapter by its name, wherever it finds one."""
    assert bring(ADAPTERS, tmp_path / "local") == EXPECTED["adapters"]["main"]
    assert read(ADAPTERS, BASE) == read_checkpoint(tmp_path / "local")
    with pytest.raises(AssertionError, match="component adapter/math"):
        read(NESTED / "adapter/math", BASE)
    with pytest.raises(Refused, match="expected component 'main', found 'adapter/math'"):
        bring(NESTED / "adapter/math", tmp_path / "other")


def test_another_reader_agrees_on_adapters() -> None:
    assert components(ADAPTERS) == ["adapter/math"]
    held, own = read_component(ADAPTERS, "adapter/math")
    assert root_of(held) == EXPECTED["adapters"]["bytes"]
    assert (own["main_version"], own["main_root"]) == (1, EXPECTED["adapters"]["main"])


def test_a_draft_model_is_read_as_it_was_written_once(tmp_path: Path) -> None:
    run = Channel.open(open_store(CHANNELS / "draft"))
    assert [(one.name, one.active) for one in read_components(run)] == [("draft", True)]
    nested, local = open_component(run, "draft"), tmp_path / "local"
    assert bring(nested.store, local, None) == EXPECTED["draft"]["draft"]
    assert json.loads((local / "config.json").read_text()) == {"architectures": ["Tiny"], "step": 3}
    held, own = read_component(CHANNELS / "draft", "draft")
    assert root_of(held) == root_of(read_checkpoint(local)) == EXPECTED["bytes"]
    assert (own["main_version"], own["main_root"]) == (1, EXPECTED["draft"]["main"])
    assert all_faults(open_store(CHANNELS / "draft")) == []


@pytest.mark.parametrize("name", FIELD)
def test_a_host_reads_the_field_s_channels(tmp_path: Path, name: str) -> None:
    assert bring(CHANNELS / name, tmp_path / "local") == EXPECTED["roots"]["fast"]
    assert root_of(read_checkpoint(tmp_path / "local")) == EXPECTED["bytes"]


@pytest.mark.parametrize("name", [*OURS, *FIELD])
def test_a_host_reads_a_channel_that_is_not_a_directory(tmp_path: Path, name: str) -> None:
    store = in_memory(CHANNELS / name)
    expected = EXPECTED["roots"]["fast" if name in FIELD else name]
    assert bring(store, tmp_path / "local") == expected
    assert root_of(read_checkpoint(tmp_path / "local")) == EXPECTED["bytes"]
    assert verify(Channel.open(store)) == []


@pytest.mark.parametrize("fault", ["late", "unavailable", "cut", "wrong"])
def test_a_fetch_over_a_faulty_store_ends_right(tmp_path: Path, fault: Fault) -> None:
    store = FaultyStore(in_memory(CHANNELS / "fast"))
    for name in store.names():
        if name.startswith("weight_v"):
            for shard in store.names(name):
                if shard.endswith(".safetensors"):
                    store.fail("pieces", f"{name}/{shard}", fault)
    assert bring(store, tmp_path / "local") == EXPECTED["roots"]["fast"]
    assert not store.unused


@pytest.mark.parametrize("name", ["xor", "overwrite", *FIELD])
def test_another_reader_agrees(name: str) -> None:
    assert root_of(follow(CHANNELS / name, BASE / "model.safetensors")) == EXPECTED["bytes"]


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_another_reader_follows_what_is_written_today(tmp_path: Path, encoding: str) -> None:
    rng = np.random.default_rng(12)
    model: Model = {
        **every_dtype(rng),
        "wide": tensor(rng, "BF16", 300, 1000),
        '1/ü"\\': tensor(rng, "U8", 9),
    }
    base = write_checkpoint(tmp_path / "base", model)
    init_channel(tmp_path / "channel", base)
    steps = [some_changed(model, rng), all_changed(model, rng, 700), all_changed(model, rng, 700), model]
    with Publisher.open(
        tmp_path / "channel", local=tmp_path / "pub", base=base, encoding=encoding
    ) as publisher:  # type: ignore[arg-type]
        for number, new in enumerate(steps):
            publisher.publish_checkpoint(write_checkpoint(tmp_path / f"new-{number}", new))
            assert follow(tmp_path / "channel", base / "model.safetensors") == bytes_of(new)


# foreign channels, made by the other writer


def foreign(
    tmp_path: Path, *, run: str | None = None, count: int = 3, **options: str
) -> tuple[Path, Path, list[Model]]:
    rng = np.random.default_rng(13)
    models = [every_dtype(rng)]
    channel = tmp_path / "channel"
    prefix = channel if run is None else channel / "updates"
    for version in range(1, count + 1):
        models.append(some_changed(models[-1], rng))
        directory = prefix / f"weight_v{version:06d}"
        write_version(directory, version, bytes_of(models[-2]), bytes_of(models[-1]), shards=3, **options)  # type: ignore[arg-type]
    write_pointer(channel, count, run)
    return channel, write_checkpoint(tmp_path / "base", models[0]), models


@pytest.mark.parametrize("run", [None, "run-a"])
@pytest.mark.parametrize("encoding", ["xor", "overwrite", "xor_sparse"])
@pytest.mark.parametrize("checksum", ["xxh3-128", "blake3", "adler32"])
def test_foreign_channels(tmp_path: Path, run: str | None, encoding: str, checksum: str) -> None:
    channel, base, models = foreign(tmp_path, run=run, encoding=encoding, checksum=checksum)
    write_pointer(channel, 1, run)
    bring(channel, tmp_path / "local", base)
    assert read_checkpoint(tmp_path / "local") == bytes_of(models[1])
    write_pointer(channel, 3, run)
    bring(channel, tmp_path / "local", base)
    assert read_checkpoint(tmp_path / "local") == bytes_of(models[3])


@pytest.mark.parametrize("name", ["model-00000-of-00003.safetensors", "model-00002-of-00003.safetensors"])
def test_a_damaged_foreign_shard_changes_nothing(tmp_path: Path, name: str) -> None:
    channel, base, models = foreign(tmp_path)
    write_pointer(channel, 2)
    bring(channel, tmp_path / "local", base)
    write_pointer(channel, 3)
    shard = channel / "weight_v000003" / name
    good = shard.read_bytes()
    shard.write_bytes(good[:-3] + bytes([good[-3] ^ 4]) + good[-2:])
    with pytest.raises(DamagedFile):
        bring(channel, tmp_path / "local", base)
    assert read_checkpoint(tmp_path / "local") == bytes_of(models[2])
    shard.write_bytes(good)
    bring(channel, tmp_path / "local", base)
    assert read_checkpoint(tmp_path / "local") == bytes_of(models[3])


def test_a_new_run_in_a_foreign_channel_starts_over(tmp_path: Path) -> None:
    channel, base, models = foreign(tmp_path, run="run-a")
    bring(channel, tmp_path / "local", base)
    shutil.rmtree(channel / "updates")
    other = all_changed(models[0], np.random.default_rng(5))
    write_version(channel / "updates/weight_v000001", 1, bytes_of(models[0]), bytes_of(other))
    write_pointer(channel, 1, "run-b")
    bring(channel, tmp_path / "local", base)
    assert read_checkpoint(tmp_path / "local") == bytes_of(other)


def test_a_foreign_trainer_that_rewinds(tmp_path: Path) -> None:
    """Its receivers would stay on version 3 of the old weights."""
    channel, base, models = foreign(tmp_path)
    bring(channel, tmp_path / "local", base)
    shutil.rmtree(channel / "weight_v000002")
    shutil.rmtree(channel / "weight_v000003")
    other = all_changed(models[1], np.random.default_rng(5))
    write_version(channel / "weight_v000002", 2, bytes_of(models[1]), bytes_of(other))
    write_pointer(channel, 2)
    bring(channel, tmp_path / "local", base)
    assert read_checkpoint(tmp_path / "local") == bytes_of(other)


def test_drift_under_a_foreign_channel_is_found_where_it_is_touched(tmp_path: Path) -> None:
    channel, base, models = foreign(tmp_path)
    write_pointer(channel, 2)
    bring(channel, tmp_path / "local", base)
    old, new = bytes_of(models[2]), bytes_of(models[3])
    rot(tmp_path / "local", next(name for name in old if old[name] != new[name]))
    write_pointer(channel, 3)
    updater = LocalUpdater(
        open_store(channel),
        tmp_path / "local",
        base,
        UpdaterOptions(visible_seconds=2.0 if isinstance(channel, FaultyStore) else 0.2),
    )
    with pytest.raises(NeedsReseed):
        updater.update_to(Channel.open(open_store(channel)))
    updater.release()
    updater.update_to(Channel.open(open_store(channel)))
    updater.close()
    assert read_checkpoint(tmp_path / "local") == new


@pytest.mark.parametrize("what", ["shard missing", "index missing"])
def test_a_foreign_version_that_is_not_whole_waits(tmp_path: Path, what: str) -> None:
    channel, base, models = foreign(tmp_path)
    write_pointer(channel, 2)
    bring(channel, tmp_path / "local", base)
    write_pointer(channel, 3)
    name = "model-00001-of-00003.safetensors" if what == "shard missing" else "model.safetensors.index.json"
    gone = channel / "weight_v000003" / name
    data = gone.read_bytes()
    gone.unlink()
    with pytest.raises(RetryLater, match=name):
        bring(channel, tmp_path / "local", base)
    assert read_checkpoint(tmp_path / "local") == bytes_of(models[2])
    gone.write_bytes(data)
    bring(channel, tmp_path / "local", base)
    assert read_checkpoint(tmp_path / "local") == bytes_of(models[3])

"""What the subscriber writes is what the engine reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from patch_writer import header_and_payload, packed, write_checkpoint
from test_engine_patch_file import GOLDEN, models
from weightcast_engine.update.patch_file import read_patch

from weightcast.publisher import Publisher, init_channel
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.checkpoint.local_updater import LocalUpdater, UpdaterOptions
from weightcast.shared.checkpoint.update.engine_patch import write_engine_patch
from weightcast.shared.checkpoint.update.plan import Seed
from weightcast.shared.checkpoint.update.stage import Staged


@pytest.fixture
def host(tmp_path: Path) -> Iterator[LocalUpdater]:
    """On the base of the golden patch, with its target published."""
    base, target = models()
    write_checkpoint(tmp_path / "base", base)
    (tmp_path / "base" / "config.json").write_text("{}")
    channel = tmp_path / "channel"
    init_channel(channel, tmp_path / "base")
    with Publisher.open(channel, local=tmp_path / "publisher", base=tmp_path / "base") as publisher:
        publisher.publish(target, step=1)
    options = UpdaterOptions(visible_seconds=0.2)
    with closing(LocalUpdater(open_store(channel), tmp_path / "host", tmp_path / "base", options)) as updater:
        yield updater


def staged(updater: LocalUpdater) -> tuple[LocalCheckpoint, Staged]:
    channel = Channel.open(updater.store)
    updater.own()
    updater.load(channel)
    pointer = channel.pointer()
    assert pointer is not None
    route = updater.route(channel, pointer, 1, exact=True)
    assert isinstance(route.plan, Seed)
    updater.seed(channel, route, route.plan)
    assert updater.local is not None
    return updater.local, updater.prepare(route, route.plan.then.legs[0])


def test_the_golden_patch_is_what_the_subscriber_writes(host: LocalUpdater) -> None:
    local, version = staged(host)
    patch = write_engine_patch(local, [version.step], 5)
    data = (local.paths.engine / patch.name).read_bytes()
    end = 16 + int.from_bytes(data[8:16], "little")
    header, payload = json.loads(data[16:end]), data[-(-end // 64) * 64 : -32]
    golden, _ = header_and_payload(*models(), 7, step=2)
    # what names the run and its versions cannot be the same; all else is, byte for byte
    renamed = header | {key: golden[key] for key in ("run_id", "base", "target")}
    assert packed(renamed, payload) == GOLDEN.read_bytes()


def test_the_engine_reads_it(host: LocalUpdater) -> None:
    local, version = staged(host)
    written = write_engine_patch(local, [version.step], 5)
    patch = read_patch(local.paths.engine, written.name)
    assert (patch.base.version, patch.base.root) == (5, version.step.base.root)
    assert (patch.target.version, patch.target.root) == (1, version.step.target.root)
    assert (patch.count, patch.nbytes) == (written.changes, written.nbytes)
    base, target = models()
    for change in patch.changes:
        new = base[change.name].clone().view(-1)
        new[torch.from_numpy(change.index.astype("int64"))] = change.words.view(new.dtype)
        assert torch.equal(new.view(torch.uint8), target[change.name].view(-1).view(torch.uint8)), change.name

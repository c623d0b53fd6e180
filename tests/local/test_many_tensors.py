"""A model of many small tensors: several files, dtypes and alignments, none in the order of the table."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from core_cases import Model, bytes_of, read_checkpoint, some_changed, tensor, write_checkpoint
from local_cases import Run, following, patch_keeping_undo, staged, step_to

from weightcast.publisher import Publisher, init_channel
from weightcast.publisher.weights.match import match
from weightcast.shared.base.elements import TensorTable
from weightcast.shared.base.errors import DamagedFile, NeedsReseed, Refused
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.index import INDEX_NAME, parse_index
from weightcast.shared.channel.run_files import ChannelFile, parse_base
from weightcast.shared.checkpoint.local_updater import LocalUpdater
from weightcast.shared.checkpoint.verify.hashing import full_hash
from weightcast.shared.files.hf_checkpoint import open_checkpoint
from weightcast.shared.files.safetensors import parse_header, read_header_of

DTYPES = ("BF16", "F8_E4M3", "BF16", "F32", "BF16")


def model(rng: np.random.Generator) -> Model:
    sizes = {n: int(rng.integers(1, 300)) for n in rng.permutation(600).tolist()}
    return {f"experts.{n}.weight": tensor(rng, DTYPES[n % 5], size) for n, size in sizes.items()}


def like(other: Model, rng: np.random.Generator) -> Model:
    return {name: tensor(rng, one.dtype, *one.shape) for name, one in other.items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    rng = np.random.default_rng(11)
    base = model(rng)
    run = Run(tmp_path_factory.mktemp("many"), [base])
    write_checkpoint(run.base, base, files=3)
    init_channel(run.channel, run.base)
    with Publisher.open(run.channel, local=run.root / "pub", base=run.base) as publisher:
        for version in range(1, 5):
            # all words change last
            run.models.append(some_changed(run.latest, rng) if version < 4 else like(run.latest, rng))
            new = write_checkpoint(run.root / f"new-{version}", run.latest, files=3)
            publisher.publish_checkpoint(new, step=version)
    return run


def holds(updater: LocalUpdater, run: Run, version: int) -> None:
    assert read_checkpoint(updater.paths.directory) == bytes_of(run.models[version])
    assert updater.local is not None and full_hash(updater.local).intact


def test_there_and_back(run: Run, tmp_path: Path) -> None:
    with following(run, tmp_path / "host") as updater:
        for version in (0, 1, 2):
            step_to(updater, version)
            holds(updater, run, version)
        step_to(updater, 3)
        patch_keeping_undo(updater, 4)
        holds(updater, run, 4)
        assert updater.local is not None
        with updater.local.patching():
            updater.undo()
        holds(updater, run, 3)


def test_a_foreign_word_is_named(run: Run, tmp_path: Path) -> None:
    with following(run, tmp_path / "host") as updater:
        step_to(updater, 0)
        found = staged(updater, 1)
        local = updater.local
        assert local is not None
        changed = [n for n in range(len(local.table)) if local.table[n].dtype == "BF16"]
        victim = next(n for n in changed[len(changed) // 2 :] if differs(run, local.table[n].name, 1))
        local.words(victim)[:] ^= 0x4001
        with local.patching(), pytest.raises(NeedsReseed, match=f"of {local.table[victim].name} is not what"):
            updater.patch(found)


def differs(run: Run, name: str, version: int) -> bool:
    return bytes_of(run.models[version])[name] != bytes_of(run.models[version - 1])[name]


def test_what_never_changes_is_parsed_once(run: Run, tmp_path: Path) -> None:
    channel = Channel.open(open_store(run.channel))
    assert channel.base is not None and Channel.open(open_store(run.channel)).base is channel.base
    data = (run.channel / "base.json").read_bytes()
    assert parse_base(data + b" ") is not channel.base

    shard = run.base / "model-00001-of-00003.safetensors"
    header = read_header_of(shard)
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(shard.read_bytes())
    assert read_header_of(copy) is header
    with pytest.raises(DamagedFile, match="copy: longer than its header says"):
        parse_header(shard.read_bytes(), shard.stat().st_size + 1, what="copy")


def test_checkpoints_with_the_same_headers_have_one_table(run: Run, tmp_path: Path) -> None:
    copy = shutil.copytree(run.base, tmp_path / "copy")
    first, second = (open_checkpoint(at, follow_links=False) for at in (run.base, copy))
    assert second.table is first.table
    assert {place.file.parent for place in second.places} == {copy}
    assert [place[1:] for place in second.places] == [place[1:] for place in first.places]
    # what is remembered is no longer what lies there
    (copy / "model-00002-of-00003.safetensors").rename(copy / "model-00001-of-00003.safetensors")
    with pytest.raises(DamagedFile, match=r"copy/model-00002-of-00003\.safetensors is missing"):
        open_checkpoint(copy, follow_links=False)
    shutil.copy(run.base / "model-00002-of-00003.safetensors", copy)
    with pytest.raises(DamagedFile, match=r"copy/model-00001\S+ and model-00002\S+ both hold "):
        open_checkpoint(copy, follow_links=False)


def test_weights_that_fitted_are_not_taken_for_others(run: Run, tmp_path: Path) -> None:
    names = [spec.name for spec in open_checkpoint(run.base, follow_links=False).table]
    for number, others in enumerate((run.models[0], {n: run.models[0][n] for n in names[1:]}, run.models[0])):
        given = open_checkpoint(write_checkpoint(tmp_path / f"{number}", others, files=3), follow_links=False)
        table = Channel.open(open_store(run.channel)).require_ours()[1].table
        if len(others) == len(names):
            matched = match(given.table, table, ChannelFile("run", 0.0), partial=False)
            assert [matched.sources[n] for n in range(len(names))] == names
        else:
            with pytest.raises(Refused, match=f"{re.escape(names[0])} is missing"):
                match(given.table, table, ChannelFile("run", 0.0), partial=False)
            matched = match(given.table, table, ChannelFile("run", 0.0, (names[0],)), partial=False)
            assert matched.absent == (0,)


def test_an_index_is_parsed_once_for_a_table(run: Run) -> None:
    channel = Channel.open(open_store(run.channel))
    pointer = channel.pointer()
    assert channel.base is not None and pointer is not None
    table = channel.base.table
    first = channel.index(pointer, 2, table)
    assert channel.index(pointer, 2, table) is first
    data = (run.channel / "weight_v000002" / INDEX_NAME).read_bytes()
    other = parse_index(data, TensorTable(table.specs))
    assert other is not first and other == first
    for version in (1, 2, 3):
        found = channel.index(pointer, version, table)
        assert found is not None and found.version == version

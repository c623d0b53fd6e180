"""Versions whose parts split tensors, and versions of other splits one after the other."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hosts import Run, SGLang, Site, Weights

from weightcast.publisher.publisher import Publisher
from weightcast.shared.channel.chunk_step import ChunkStep
from weightcast.shared.channel.delta_writer import open_shard_writer
from weightcast.shared.channel.index import Encoding, Index, TensorRecord, Totals, write_index
from weightcast.shared.channel.layout import Layout
from weightcast.shared.channel.pointer import write_pointer
from weightcast.shared.codec.changes import compare
from weightcast.shared.digest.lanes import Lanes
from weightcast.shared.digest.ledger import Ledger
from weightcast.shared.digest.root import root
from weightcast.shared.digest.touched import span_sums
from weightcast.shared.files.checkpoint import open_checkpoint
from weightcast.shared.local.local_checkpoint import LocalCheckpoint, gather
from weightcast.shared.local.seed import ReadCheckpoint
from weightcast.shared.local.state import unpack_lanes
from weightcast.shared.words import Part, Segment, TensorTable, grid

INDEX = "model.safetensors.index.json"


def cut(table: TensorTable) -> tuple[Part, ...]:
    """Two parts; every tensor that is long enough lies in both, most of it in the second."""
    first, second = [], []
    for number, spec in enumerate(table):
        border = 64 if spec.words > 64 else spec.words
        first.append(Segment(number, 0, border))
        if border < spec.words:
            second.append(Segment(number, border, spec.words))
    return Part(0, tuple(first)), Part(1, tuple(second))


def commit_in_parts(run: Run, new: Weights) -> int:
    """A version of one shard per part, written with the parts of a publisher; pointed to, not patched in."""
    number = len(run.versions)
    directory = new.write(run.root / f"given{number}")
    with LocalCheckpoint.open(run.root / "publisher") as local:  # type: ignore[union-attr]
        assert local.state.position.version == number - 1
        index = write_parts(run, local, directory, number, "fast")
        version = Layout(run.channel).version_dir(number)
        (version / INDEX).write_bytes(write_index(index, local.table))
    write_pointer(run.channel, number)
    run.versions.append(new)
    return number


def write_parts(run: Run, local: LocalCheckpoint, given: Path, number: int, encoding: Encoding) -> Index:
    version = Layout(run.channel).version_dir(number)
    version.mkdir()
    table, parts, position = local.table, cut(local.table), local.state.position
    ledger, changed = Ledger(len(table)), {}
    files, chunks = [], []
    with ReadCheckpoint(open_checkpoint(given, follow_links=False)) as read:
        for part in parts:
            name = f"model-{part.number:05d}-of-{len(parts):05d}.safetensors"
            writer = open_shard_writer(encoding, version / name, table, sum(1 for _ in grid(table, part)))
            for chunk in grid(table, part):
                old, words = local.chunk_words(chunk), gather(chunk, read.words_in)
                changes = compare(old, words)
                step = ChunkStep(changes, span_sums(chunk, old, changes)) if len(changes) else None
                if step is not None:
                    ledger.add(step.sums)
                    changed |= dict.fromkeys(step.sums.tensors.tolist(), name)
                prepared = (
                    writer.prepare(chunk, old, lambda new=words: new, changes) if step is not None else b""
                )
                writer.append(chunk, prepared, lambda new=words: new, step)
            written = writer.close()
            files += written.files
            chunks += written.chunks
    lanes = ledger.after(unpack_lanes(position.lanes))
    return Index(
        run_id=local.state.run_id,
        version=number,
        kind="delta",
        base_version=number - 1,
        base_root=position.root,
        root=root(table, lanes),
        parent=position.digest,
        epoch=position.epoch,
        encoding=encoding,
        step=None,
        created=time.time(),
        weight_map={table[tensor].name: name for tensor, name in changed.items()},
        files=tuple(files),
        tensors={table[t].name: TensorRecord(Lanes(*lanes[t].tolist()), 1) for t in changed},
        parts=parts,
        chunks=tuple(chunks),
        totals=Totals(0, table.elements, table.nbytes, sum(file.size for file in files)),
    )


def both_halves(weights: Weights) -> Weights:
    """The first and the last byte of every tensor are others."""
    tensors = {}
    for name, (dtype, shape, data) in weights.tensors.items():
        array = np.frombuffer(data, np.uint8).copy()
        array[:1] ^= 3
        array[-1:] ^= 5
        tensors[name] = dtype, shape, array.tobytes()
    return Weights(tensors)


@pytest.fixture
def run(site: Site) -> Run:
    """Versions 1 of one part, 2 of two parts that split tensors, 3 of one part again."""
    made = site.run()
    made.publish()
    made._publisher.close()
    commit_in_parts(made, both_halves(made.versions[-1]))
    made._publisher = site.stack.enter_context(
        Publisher.open(made.channel, local=made.root / "publisher", base=made.base_dir)
    )
    assert made._publisher.local_version == 2
    made.publish(both_halves(made.versions[-1].changed(9)))
    return made


def test_a_host_far_behind_reloads_once(site: Site, run: Run) -> None:
    engine = SGLang()
    host = site.host(run, engine, target="0")
    assert host.step().ready and host.at(run, 0)
    engine.calls.clear()
    follower = site.host(run, engine, name="host")
    host.sync.close()
    outcome = follower.step()
    assert outcome.ready and follower.at(run, 3) and engine.held == run.digest(3)
    assert len(engine.of("/update_weights_from_disk")) == 1
    assert follower.status.updates[-1].folded == 3


@pytest.mark.parametrize("version", [1, 2, 3])
def test_every_version_of_a_split_arrives(site: Site, run: Run, version: int) -> None:
    host = site.host(run, target=str(version), threads=3)
    host.step()
    assert host.at(run, version)

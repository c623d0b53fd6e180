"""For a trainer that waits for its tensors: they are compared before the channel is asked for anything.

A single process writes its delta into an outbox beside the local checkpoint. One of several ranks keeps in
memory what differs from the local checkpoint, and meets the others later.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from weightcast.publisher.publish.commit import Files, put
from weightcast.publisher.publish.draft import PartWriter, prefixed
from weightcast.publisher.publish.publish_job import Input, PublishJob, PublishOptions
from weightcast.publisher.ranks.compared_weights import ComparedWeights
from weightcast.publisher.ranks.rendezvous import Attempt, Rank
from weightcast.publisher.ranks.shards import RankWeights
from weightcast.publisher.weights.tensors import InputFacts
from weightcast.shared.base.errors import DamagedFile
from weightcast.shared.channel.directory_store import DirectoryStore
from weightcast.shared.channel.index import Index
from weightcast.shared.channel.run_files import ChannelFile
from weightcast.shared.channel.store import pieces_of
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.files.paths import is_link

_OUTBOX = "outbox"


@dataclass(frozen=True)
class EarlyInput(Input):
    """Weights that a rank compared before it asked the channel."""

    weights: ComparedWeights


def compares_early(job: PublishJob, rank: Rank) -> bool:
    """Somebody waits for the tensors; those of several ranks are compared on the host."""
    source = job.source
    return source.lent and (rank.alone or not (source.copied or source.on_device))


def compare_early(
    local: LocalCheckpoint, file: ChannelFile, job: PublishJob, rank: Rank, threads: int
) -> EarlyInput:
    """One of several ranks. The tensors belong to their owner again when this returns or raises."""
    try:
        given = Input.open(job.source, file, local.table, rank, job.phase)
        try:
            with job.phase("compare"):
                own = RankWeights.of(rank.number, local, given.weights, given.matched)
                compared = ComparedWeights.compared(own, threads)
        finally:
            given.weights.close()
    finally:
        job.source.release_tensors()
    with job.phase("prove"):
        compared.prove(threads)
    return EarlyInput(compared, given.matched, given.facts)


@dataclass(frozen=True)
class SpooledDelta:
    """A delta in the outbox, a local directory; not durable yet."""

    draft: Index
    outbox: DirectoryStore
    facts: InputFacts
    non_finite: Mapping[str, int]
    """elements by tensor that became NaN or infinite"""

    def copy_to(self, files: Files) -> Index:
        """Makes its shards durable in `files`. Raises DamagedFile when they are not what was written."""
        for record in self.draft.files:
            name = files.prefix + record.name
            if put(files.directory, name, pieces_of(self.outbox, record.name)) != replace(record, name=name):
                raise DamagedFile(
                    f"{files.directory.place(name)} differs from what was written to {self.outbox.place()}",
                    remedy="nothing was published; check memory and disks of this machine",
                )
        self.drop()
        return prefixed(self.draft, files.prefix)

    def drop(self) -> None:
        for record in self.draft.files:
            (self.outbox.directory / record.name).unlink(missing_ok=True)


def spool(
    local: LocalCheckpoint, file: ChannelFile, attempt: Attempt, job: PublishJob, options: PublishOptions
) -> SpooledDelta:
    """Raises what `PartWriter.write` does."""
    given = Input.open(job.source, file, local.table, Rank(0, 1), job.phase)
    try:
        with job.phase("diff"):
            outbox = DirectoryStore(_emptied(local.paths.room / _OUTBOX))
            writer = PartWriter(local, attempt, Files(outbox, ""), 0, options, sync=False)
            part = writer.write(given, local.table.whole, job.advance)
    finally:
        given.weights.close()
    job.source.release_tensors()
    return SpooledDelta(part.draft, outbox, given.facts, part.non_finite)


def _emptied(outbox: Path) -> Path:
    """Without what a killed publication left."""
    if is_link(outbox):
        outbox.unlink()
    outbox.mkdir(exist_ok=True)
    for entry in os.scandir(outbox):
        os.unlink(entry.path)
    return outbox

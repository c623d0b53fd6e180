"""A part that is compared and encoded beside the local checkpoint, before the channel is asked for anything.

A trainer that hands its tensors over waits for memory and local disk then, not for a shared file system.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weightcast.publisher.version.draft import Frame
from weightcast.publisher.version.rendezvous import Rank
from weightcast.publisher.version.work import PartWriter, PublishOptions
from weightcast.publisher.weights.match import Matched
from weightcast.publisher.weights.tensors import NewWeights
from weightcast.shared.channel.file_record import file_record
from weightcast.shared.channel.index import Index
from weightcast.shared.errors import DamagedFile
from weightcast.shared.files import durable
from weightcast.shared.files.entries import is_link
from weightcast.shared.local.local_checkpoint import LocalCheckpoint
from weightcast.shared.progress import Advance

_OUTBOX = "outbox"


@dataclass(frozen=True)
class Spooled:
    frame: Frame
    draft: Index
    directory: Path
    non_finite: Mapping[str, int]
    """elements by tensor that became NaN or infinite"""

    def copy_to(self, parts: Path) -> None:
        """Makes its shards durable in `parts`. Raises DamagedFile when they are not what was written."""
        for record in self.draft.files:
            target = parts / record.name
            shutil.copyfile(self.directory / record.name, target, follow_symlinks=False)
            durable.sync_file(target)
            if file_record(target) != record:
                raise DamagedFile(
                    f"{target} is not what was written to {self.directory}",
                    remedy="nothing was published; check memory and disks of this machine",
                )
        self.drop()

    def drop(self) -> None:
        for record in self.draft.files:
            (self.directory / record.name).unlink(missing_ok=True)


def spool(
    local: LocalCheckpoint,
    frame: Frame,
    weights: NewWeights,
    matched: Matched,
    options: PublishOptions,
    advance: Advance | None,
) -> Spooled:
    """Raises what `PartWriter.write` does."""
    outbox = _emptied(local.paths.room / _OUTBOX)
    writer = PartWriter(
        local,
        frame,
        outbox,
        Rank(0, 1),
        options.threads,
        durable=False,
        non_finite=options.non_finite,
    )
    written = writer.write(weights, matched, local.table.whole, advance)
    return Spooled(frame, written.draft, outbox, written.non_finite)


def _emptied(outbox: Path) -> Path:
    """Whatever a killed publication left there."""
    if is_link(outbox):
        outbox.unlink()
    outbox.mkdir(exist_ok=True)
    for entry in os.scandir(outbox):
        os.unlink(entry.path)
    return outbox

"""Files beside the weights of a local checkpoint: missing ones are completed, damaged ones repaired."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from weightcast.shared.channel.base import Base, write_base
from weightcast.shared.channel.chain import check_files
from weightcast.shared.channel.file_record import file_record
from weightcast.shared.channel.records import FileRecord
from weightcast.shared.errors import WeightcastError
from weightcast.shared.files import durable
from weightcast.shared.files.checkpoint import Checkpoint
from weightcast.shared.files.entries import is_file
from weightcast.shared.files.side_files import side_files
from weightcast.shared.local.carried import Carried, proven
from weightcast.shared.local.local_checkpoint import LocalCheckpoint
from weightcast.shared.local.seed import check_other_files

UNLISTED = "unknown: base.json of an older release does not list them; start once with --base"


def complete(local: LocalCheckpoint, run: Base | None, base: Checkpoint | None) -> tuple[str, ...]:
    """Copies files that are missing from `base`, which need not be the run's: bytes decide. `run`: the
    channel's. Returns the names of files that are still missing. Raises OSError."""
    known = local.base.side_files
    listed = {record.name: record for record in known or ()}
    if run is not None and run.side_files is not None:
        listed |= {record.name: record for record in run.side_files}
        _list(local, tuple(listed.values()))
    elif known is None and base is not None:
        _list(local, _found(local.base, base))
    missing = [record for record in local.base.all_files if not is_file(local.directory / record.name)]
    source = None if base is None else base.directory
    return tuple(
        record.name for record in missing if source is None or not _copied(source, local.directory, record)
    )


def _found(run: Base, base: Checkpoint) -> tuple[FileRecord, ...] | None:
    """Files beside the weights that no base.json lists; None where `base` cannot be read or is another."""
    known = {record.name for record in run.files}
    with contextlib.suppress(WeightcastError, OSError):
        if _is_of(run, base):
            files = side_files(base).files
            return tuple(file_record(path, name) for name, path in files.items() if name not in known)
    return None


def _is_of(run: Base, base: Checkpoint) -> bool:
    """Whether `base` has the run's tensors, config and tokenizer. Nothing else vouches for side files that
    no base.json lists."""
    if base.table == run.table:
        check_other_files(base.directory, {path.name: path for path in base.other_files}, run.files)
        return True
    return False


def _list(local: LocalCheckpoint, listed: tuple[FileRecord, ...] | None) -> None:
    if listed != local.base.side_files:
        local.base = replace(local.base, side_files=listed)
        durable.replace(local.paths.base, write_base(local.base))


def repair_files(local: LocalCheckpoint, sources: Sequence[Path]) -> list[str]:
    """Copies files beside the weights that are not the run's from a source that has the right ones. Returns
    the names of those that were written."""
    return [
        record.name
        for record in Carried(local.paths).expected(local.base, local.state.position)
        if any(check_files(local.directory, [record]))
        and any(_copied(source, local.directory, record) for source in sources)
    ]


def _copied(source: Path, directory: Path, record: FileRecord) -> bool:
    with contextlib.suppress(WeightcastError, OSError):
        pieces = durable.pieces_of(source / record.name)
        durable.replace(durable.make_within(directory, record.name), proven(record, pieces))
        return True
    return False

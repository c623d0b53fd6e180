"""Config files of a version: those of the version before, with those that an export changed or took back.

Every version carries all of them, so that any of its hosts needs no other version for them.
"""

from __future__ import annotations

from pathlib import Path

from weightcast.publisher.publish.publish_job import Work
from weightcast.publisher.weights.tensors import NewWeights
from weightcast.shared.base.errors import DamagedFile
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.index import CARRIED, FileRecord, Index, file_record
from weightcast.shared.channel.layout import Pointer
from weightcast.shared.checkpoint.state.side_files import Carried, proven
from weightcast.shared.files import durable


def carry(channel: Channel, store: Carried, made: Path, work: Work) -> tuple[FileRecord, ...]:
    """Writes them, durable, into the directory that becomes the version, and lists them. `store`: the
    publisher's own copies, in case that the channel lost one. Raises DamagedFile when a file of the version
    before is lost in both."""
    at = channel.pointed() if work.carried_of is None else work.carried_of
    given = work.carry.keys() | {name for name, digest in (work.configs or {}).items() if not digest}
    records = []
    for record in _of(channel, at):
        if work.carried_of is not None or record.name not in given:
            source = channel.layout.version_dir(at) / CARRIED / record.name
            records.append(_again(store, made, record, source))
    for name, data in work.carry.items():
        target = durable.make_within(made, f"{CARRIED}/{name}")
        durable.replace(target, data)
        record = file_record(target, name)
        store.keep(record, [data])
        records.append(record)
    return tuple(sorted(records, key=lambda record: record.name))


def is_carried(channel: Channel, weights: NewWeights, version: int) -> bool:
    """Whether `version` carries what these weights would have it carry. True for one that was pruned: only
    its root is remembered."""
    try:
        there = {record.name: record.blake3 for record in _of(channel, version)}
    except DamagedFile:
        return True
    configs = weights.configs or {}
    dropped = (name for name, digest in configs.items() if not digest)
    return all(there.get(name) == configs[name] for name in weights.carry) and there.keys().isdisjoint(
        dropped
    )


def _of(channel: Channel, version: int) -> tuple[FileRecord, ...]:
    if version == 0:
        return ()
    _, base = channel.require_ours()
    index = channel.index(Pointer(version, None, channel.directory), version, base.table)
    if not isinstance(index, Index):
        raise DamagedFile(
            f"{channel.layout.index(version)} is missing although the pointer names it",
            remedy="restore it; run `weightcast channel verify`",
        )
    return index.carried


def _again(store: Carried, made: Path, record: FileRecord, source: Path) -> FileRecord:
    kept = store.path(record)
    target = durable.make_within(made, f"{CARRIED}/{record.name}")
    pieces = durable.pieces_of(source if kept is None else kept, follow_links=False)
    durable.replace(target, proven(record, pieces))
    if kept is None:
        store.keep(record, durable.pieces_of(target, follow_links=False))
    return record

"""Signing what a channel already holds: when signing begins, and when a key is replaced."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from weightcast.shared.base.elements import TensorTable
from weightcast.shared.base.errors import DamagedFile
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.chain import ChainEntry, entries, verify
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.index import INDEX_NAME, Index
from weightcast.shared.channel.render import look
from weightcast.shared.channel.signing import (
    PrivateKey,
    Statement,
    signature_path,
    stated_by,
    stated_by_base,
    write_signature,
)
from weightcast.shared.files import durable


def sign_channel(directory: Path, key: PrivateKey, advance: Advance | None = None) -> int:
    """Signs every index up to the pointer, then base.json, in place of the signatures that are there. Returns
    how many versions. Raises DamagedFile, and signs nothing, when `verify` finds anything wrong."""
    channel = Channel.open(directory)
    _, base = channel.require_ours()
    problems = verify(channel, advance)
    if problems:
        raise DamagedFile(
            f"{directory} is not signed: {problems[0].message} ({len(problems)} problems)",
            remedy="`weightcast channel verify` lists them",
        )
    signed = dict(_statements(channel))
    for path, statement in signed.items():
        durable.replace(signature_path(path), write_signature(statement, key))
    sealed = write_signature(stated_by_base(base, time.time()), key)
    durable.replace(signature_path(channel.layout.base_json), sealed)
    return sum(not statement.main for statement in signed.values())


def _statements(channel: Channel) -> Iterator[tuple[Path, Statement]]:
    _, base = channel.require_ours()
    for entry in entries(channel, channel.pointer()):
        main = entry.index
        if not isinstance(main, Index):
            raise DamagedFile(f"{entry.directory}: {entry.problem}", remedy="nothing was signed")
        yield entry.directory / INDEX_NAME, stated_by(main, main.digest)
        for directory, index in _beside(channel, entry, base.table):
            yield directory / INDEX_NAME, stated_by(index, index.digest, main.digest)


def _beside(channel: Channel, entry: ChainEntry, table: TensorTable) -> Iterator[tuple[Path, Index]]:
    anchor, shown = channel.anchor(entry.version, table), look(entry.directory)
    if anchor is not None:
        yield channel.layout.anchor_dir(entry.version), anchor
    for base_version in () if shown is None else shown.skips:
        skip = channel.skip(entry.version, base_version, table)
        if skip is not None:
            yield channel.layout.from_dir(entry.version, base_version), skip

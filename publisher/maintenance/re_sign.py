"""Signing what a channel already holds: when signing begins, and when a key is replaced."""

from __future__ import annotations

import time
from collections.abc import Iterator

from weightcast.shared.base.elements import TensorTable
from weightcast.shared.base.errors import DamagedFile
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.chain import ChainEntry, entries, verify
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.index import INDEX_NAME, Index
from weightcast.shared.channel.layout import BASE_JSON
from weightcast.shared.channel.listing import look
from weightcast.shared.channel.signing import (
    PrivateKey,
    Statement,
    signature_key,
    stated_by,
    stated_by_base,
    write_signature,
)
from weightcast.shared.channel.store import Address, Store


def sign_channel(address: Address, key: PrivateKey, advance: Advance | None = None) -> int:
    """Signs every index up to the pointer, then base.json, in place of the signatures that are there. Returns
    how many versions. Raises DamagedFile, and signs nothing, when `verify` finds anything wrong."""
    channel = Channel.open(address)
    _, base = channel.require_ours()
    problems = verify(channel, advance)
    if problems:
        raise DamagedFile(
            f"{channel.place} is not signed: {problems[0].message} ({len(problems)} problems)",
            remedy="list them with `weightcast channel verify`",
        )
    signed = list(_statements(channel))
    for files, statement in signed:
        files.replace(signature_key(INDEX_NAME), write_signature(statement, key))
    channel.store.replace(signature_key(BASE_JSON), write_signature(stated_by_base(base, time.time()), key))
    return sum(not statement.main for _, statement in signed)


def _statements(channel: Channel) -> Iterator[tuple[Store, Statement]]:
    """With the directory of each index."""
    _, base = channel.require_ours()
    for entry in entries(channel, channel.pointer()):
        main = entry.index
        if not isinstance(main, Index):
            raise DamagedFile(f"{entry.files.place()}: {entry.problem}", remedy="nothing was signed")
        yield entry.files, stated_by(main, main.digest)
        for files, index in _further(channel, entry, base.table):
            yield files, stated_by(index, index.digest, main.digest)


def _further(channel: Channel, entry: ChainEntry, table: TensorTable) -> Iterator[tuple[Store, Index]]:
    """The anchor and the multi-step deltas of a version."""
    anchor, shown = channel.anchor(entry.version, table), look(entry.files)
    if anchor is not None:
        yield channel.anchor_files(entry.version), anchor
    for base_version in () if shown is None else shown.skips:
        skip = channel.skip(entry.version, base_version, table)
        if skip is not None:
            yield channel.multi_step_files(entry.version, base_version), skip

"""From staged shards to a version that the fleet follows. The index's link is the commit point.

Killed before it: parts without an index, moved away by the owner's next attempt. Killed after it, before the
pointer: `recover` verifies the version and finishes.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from blake3 import blake3

from weightcast.shared.channel.claims import Claim
from weightcast.shared.channel.file_record import file_record
from weightcast.shared.channel.index import INDEX_NAME, Index
from weightcast.shared.channel.keys import PrivateKey
from weightcast.shared.channel.layout import Layout
from weightcast.shared.channel.pointer import write_pointer
from weightcast.shared.channel.signing import signature_path, stated_by, write_signature
from weightcast.shared.errors import DamagedFile, Forked, RetryLater
from weightcast.shared.failpoints import failpoint
from weightcast.shared.files import durable
from weightcast.shared.files.entries import exists, is_directory, is_file, is_link

PostWrite = Callable[[int, Path, str], None]
"""Called with version, its directory and the phase `version` (files are there) or `pointer`."""

PRUNED = ".pruned"
"""what versions in the trash end in that readers may still have open"""
_HOOK_TRIES = 5


def move_shards(layout: Layout, version: int, parts: Path, sources: Mapping[str, str]) -> Path:
    """Makes the version's directory with exactly the listed shards in it. A leftover without an index is
    moved away first; a directory with an index is never touched."""
    directory = layout.version_dir(version)
    if exists(directory):
        if exists(directory / INDEX_NAME):
            raise Forked(
                f"{directory} is already committed",
                remedy="another publisher owns this channel; stop one of them",
            )
        discard(layout, directory)
    directory.mkdir()
    failpoint("version.begun", directory)
    for name, source in sources.items():
        (parts / source).rename(directory / name)
        failpoint("version.moved", directory)
    durable.sync_directory(directory)
    return directory


def discard(layout: Layout, path: Path) -> None:
    """Moves leftovers out of sight, then deletes them."""
    layout.trash.mkdir(exist_ok=True)
    grave = layout.trash / f"{path.name}-{secrets.token_hex(4)}"
    with contextlib.suppress(FileNotFoundError):
        path.rename(grave)
        failpoint("trash.moved", path)
        shutil.rmtree(grave)
        failpoint("trash.deleted", path)


def commit_index(
    layout: Layout, index: Index, data: bytes, claim: Claim, directory: Path, key: PrivateKey | None = None
) -> None:
    """The commit point: an exclusive create that fails when the index exists. `data`: the index, written."""
    try:
        create_index(directory, index, data, claim, key)
    except FileExistsError as error:
        raise Forked(
            f"{directory} was committed by somebody else", remedy="stop the other publisher of this channel"
        ) from error
    durable.sync_directory(layout.channel)


def create_index(
    directory: Path, index: Index, data: bytes, claim: Claim, key: PrivateKey | None, main: str = ""
) -> None:
    """The signature, then the index: none is ever seen without. `data`: the index, written; `main`: digest of
    the version's main index for one that lies beside it and does not say. Raises FileExistsError."""
    path = directory / INDEX_NAME
    if key is not None:
        statement = stated_by(index, blake3(data).hexdigest(), main or index.main)
        claim.check()
        durable.create(signature_path(path), write_signature(statement, key))
    claim.check()
    failpoint("index.allowed", directory)
    durable.create(path, data)


def advance_pointer(layout: Layout, version: int, claim: Claim, post_write: PostWrite | None) -> None:
    """Tells the fleet. Hooks are retried; the version is not written again for them."""
    directory = layout.version_dir(version)
    _hook(post_write, version, directory, "version")
    claim.check()
    failpoint("pointer.allowed", directory)
    write_pointer(layout.channel, version)
    failpoint("pointer.moved", directory)
    _hook(post_write, version, layout.channel, "pointer")


def _hook(post_write: PostWrite | None, version: int, directory: Path, phase: str) -> None:
    if post_write is None:
        return
    for left in reversed(range(_HOOK_TRIES)):
        try:
            return post_write(version, directory, phase)
        except RetryLater:
            if not left:
                raise
            time.sleep(0.2 * (_HOOK_TRIES - left))


def verify_files(directory: Path, index: Index, but: Collection[str] = ()) -> None:
    """Every file that the index names is there and what it says. `but`: those that are known to be."""
    for record in index.files:
        if record.name in but:
            continue
        path = directory / record.name
        if is_link(path) or not is_file(path) or file_record(path) != record:
            raise DamagedFile(
                f"{path} is missing or damaged",
                remedy="the version is not served; run `weightcast channel verify`",
            )


def drop_parts(layout: Layout) -> None:
    """Parts of attempts that came to nothing, and what a kill left half deleted: only the channel's owner may
    call this."""
    for entry in layout.channel.iterdir():
        if entry.name.endswith(".parts") and is_directory(entry) and not is_link(entry):
            discard(layout, entry)
    for entry in layout.trash.iterdir() if is_directory(layout.trash) else ():
        if is_directory(entry) and not is_link(entry) and not entry.name.endswith(PRUNED):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(entry)


def new_parts_dir(layout: Layout, version: int, epoch: int) -> Path:
    directory = layout.parts_dir(version, epoch, secrets.token_hex(4))
    directory.parent.mkdir(exist_ok=True)
    directory.mkdir()
    failpoint("attempt.begun", directory)
    return directory

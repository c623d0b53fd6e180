"""From staged shards to a version that the fleet follows.

The commit point is the rename of a directory that is complete, index and all, to a name that nobody has. What
an owner writes lies under names of its own until then: who lost the channel can neither clear it away nor
write into it. Killed before: parts, cleared away by the next attempt. Killed after, before the pointer:
`recover` verifies the version and finishes.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from weightcast.publisher.publish.report import InputFacts
from weightcast.publisher.weights.tensors import NewWeights
from weightcast.shared.base.errors import DamagedFile, Forked, Refused, RetryLater
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.claims import Claim
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.index import CARRIED, INDEX_NAME, FileRecord, Index, file_record
from weightcast.shared.channel.layout import Layout, Pointer, TornPointer, read_pointer, write_pointer
from weightcast.shared.channel.signing import (
    PrivateKey,
    Trust,
    load_private_key,
    signature_key,
    signature_path,
    stated_by,
    trusted_keys,
    write_signature,
)
from weightcast.shared.checkpoint.state.side_files import Carried, proven
from weightcast.shared.files import durable
from weightcast.shared.files.paths import (
    exists,
    is_directory,
    is_file,
    is_link,
    is_own_directory,
    matching,
)

PostWrite = Callable[[int, Path, str], None]
"""Called with version, its directory and the phase `version` (files are there) or `pointer`."""

PRUNED = ".pruned"
"""what versions in the trash end in that readers may still have open"""
PUT_AWAY = ".put-away"
"""what in the trash ends in that somebody may want back"""
_HOOK_TRIES = 5
_WHOLE = "whole"


@dataclass(frozen=True)
class Signer:
    """`trust` holds the publisher's own key too. None: nothing is signed, nothing is checked."""

    key: PrivateKey | None = None
    trust: Trust | None = None

    @classmethod
    def load(cls, sign_key: str | Path | None, trusted: Sequence[str | Path] = ()) -> Signer:
        """Raises Refused for files that are no keys."""
        if sign_key is None:
            return cls(None, Trust.load(trusted))
        key = load_private_key(Path(sign_key))
        others = [other for text in trusted for other in trusted_keys(text)]
        return cls(key, Trust.of([key.public, *others]))

    def check_owner(self, layout: Layout) -> None:
        """Raises Refused where hosts would refuse what this publisher writes, or it what it wrote itself."""
        if self.key is not None:
            return
        if self.trust is not None:
            raise Refused(
                "trusted keys are given but no signing key: the publisher would refuse its own versions",
                remedy="give --sign-key, or leave out --trusted-key",
            )
        signature = signature_path(layout.base_json)
        if exists(signature):
            raise Refused(
                f"{layout.channel} is signed ({signature.name}), but no signing key is given",
                remedy="give --sign-key; to stop signing, remove that file and the hosts' --trusted-key",
            )


UNSIGNED = Signer()


def move_shards(parts: Path, sources: Mapping[str, str]) -> Path:
    """The version's directory as it will be, among the parts of its attempt: exactly the listed files."""
    directory = parts / _WHOLE
    directory.mkdir()
    failpoint("version.begun", directory)
    for name, source in sources.items():
        (parts / source).rename(durable.make_within(directory, name))
        failpoint("version.moved", directory)
    durable.sync_directory(directory)
    return directory


def discard(layout: Layout, path: Path) -> None:
    """Moves leftovers out of sight, then deletes them."""
    open_store(layout.channel).discard(_key(layout, path))


def _key(layout: Layout, path: Path) -> str:
    return path.relative_to(layout.channel).as_posix()


def commit_version(
    layout: Layout, made: Path, index: Index, data: bytes, claim: Claim, key: PrivateKey | None = None
) -> Path:
    """Gives what `made` holds the version's name. `data`: the index, written."""
    directory = layout.version_dir(index.version)
    try:
        commit(layout, made, directory, index, data, claim, key)
    except FileExistsError as error:
        raise Forked(
            f"{directory} was committed by another publisher",
            remedy="stop the other publisher of this channel",
        ) from error
    return directory


def commit(
    layout: Layout,
    made: Path,
    directory: Path,
    index: Index,
    data: bytes,
    claim: Claim,
    key: PrivateKey | None,
    main: str = "",
) -> None:
    """Signature and index into `made`, which then becomes `directory`. `data`: the index, written; `main`:
    digest of the version's main index, for an anchor without it. Raises AlreadyExists, and Refused
    of `claim`; what is there by then is untouched."""

    def allowed() -> None:
        claim.check()
        failpoint("index.allowed", made)

    store, draft = open_store(layout.channel), _key(layout, made)
    if key is not None:
        statement = stated_by(index, blake3(data).hexdigest(), main or index.main)
        store.within(draft).create(signature_key(INDEX_NAME), write_signature(statement, key))
    store.commit(draft, _key(layout, directory), INDEX_NAME, data, allowed)


def advance_pointer(layout: Layout, version: int, claim: Claim, post_write: PostWrite | None) -> None:
    """Tells the fleet. Hooks are retried; the version is not written again for them. Raises Refused of
    `claim`, also where the channel was lost while the pointer was written."""
    directory = layout.version_dir(version)
    _hook(post_write, version, directory, "version")
    _point(layout, version, claim)
    failpoint("pointer.moved", directory)
    _hook(post_write, version, layout.channel, "pointer")


def put_pointer_right(layout: Layout, claim: Claim) -> None:
    """A former owner that was suspended right before its rename may have put the pointer back, or the file
    was damaged. If the version is gone too, the channel was restored, and the pointer stays. Raises
    DamagedFile and TornPointer if this owner never saw a valid pointer."""
    try:
        pointer = read_pointer(layout.channel)
    except (DamagedFile, TornPointer):
        if not claim.pointed:
            raise
        pointer = None
    at = 0 if pointer is None or pointer.run is not None else pointer.version
    if at < claim.pointed and exists(layout.index(claim.pointed)):
        _point(layout, claim.pointed, claim)
    claim.pointed = max(claim.pointed, at)


def _point(layout: Layout, version: int, claim: Claim) -> None:
    def allowed() -> None:
        claim.check()
        failpoint("pointer.allowed", layout.version_dir(version))

    write_pointer(layout.channel, version, allowed)
    # no rename compares: who lost the channel in between says so, and the new owner puts the pointer right
    claim.check()
    claim.pointed = max(claim.pointed, version)


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
    for record in index.all_files:
        if record.name in but:
            continue
        path = durable.within(directory, record.name)
        if is_link(path) or not is_file(path) or file_record(path, record.name) != record:
            raise DamagedFile(
                f"{path} is missing or damaged",
                remedy="the version is not served; run `weightcast channel verify`",
            )


def drop_parts(layout: Layout, epoch: int) -> None:
    """Parts of attempts that came to nothing, up to those of `epoch`, and what a kill left half deleted: only
    the channel's owner may call this. Who is no longer that leaves alone what newer owners make."""
    for entry in layout.channel.iterdir():
        if entry.name.endswith(".parts") and is_own_directory(entry):
            for attempt in matching(entry, "*"):
                if is_own_directory(attempt) and not _is_newer(attempt.name, epoch):
                    drop_attempt(layout, attempt)
            with contextlib.suppress(OSError):
                entry.rmdir()
    for entry in layout.trash.iterdir() if is_directory(layout.trash) else ():
        if is_own_directory(entry) and not entry.name.endswith((PRUNED, PUT_AWAY)):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(entry)


def new_beside(directory: Path, epoch: int) -> Path:
    """Where what will be `directory`, beside a version, is made: under a name that nobody else has."""
    made = directory.with_name(f"{directory.name}.{epoch}-{secrets.token_hex(4)}")
    made.mkdir()
    return made


def drop_attempt(layout: Layout, attempt: Path) -> None:
    discard(layout, attempt)
    with contextlib.suppress(OSError):  # while there are others
        attempt.parent.rmdir()


def _is_newer(attempt: str, epoch: int) -> bool:
    number = attempt.partition("-")[0]
    return number.isascii() and number.isdigit() and int(number[:15]) > epoch


def new_parts_dir(layout: Layout, version: int, epoch: int) -> Path:
    directory = layout.parts_dir(version, epoch, secrets.token_hex(4))
    directory.parent.mkdir(exist_ok=True)
    directory.mkdir()
    failpoint("attempt.begun", directory)
    return directory


def carry(
    channel: Channel, store: Carried, made: Path, facts: InputFacts, carried_of: int | None
) -> tuple[FileRecord, ...]:
    """Writes the version's config files, durable, into `made` and lists them: those of version `carried_of`,
    or those of the previous version with what the input changed or took back. Every version has all of them,
    so that no host needs another version. `store`: the publisher's own copies, in case that the channel lost
    one. Raises DamagedFile for a file that both lost."""
    at = channel.pointed() if carried_of is None else carried_of
    given = facts.carry.keys() | {name for name, digest in (facts.configs or {}).items() if not digest}
    records = []
    for record in _of(channel, at):
        if carried_of is not None or record.name not in given:
            source = channel.layout.version_dir(at) / CARRIED / record.name
            records.append(_again(store, made, record, source))
    for name, data in facts.carry.items():
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
    index = channel.index(Pointer(version), version, base.table)
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

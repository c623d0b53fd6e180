"""From staged shards to a version that the fleet follows.

The commit point is the rename of a directory that is complete, index and all, to a name that nobody has;
in an object store, the creation of the index. What an owner writes has names of its own until then: who lost
the channel can neither clear it away nor write into it. Killed before: files that the next attempt clears
away. Killed after, before the pointer: `recover` verifies the version and finishes.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from blake3 import blake3

from weightcast.publisher.weights.tensors import InputFacts
from weightcast.shared.base.errors import DamagedFile, Forked, Refused, RetryLater
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.claims import Claim
from weightcast.shared.channel.index import (
    CARRIED,
    INDEX_LIMIT,
    INDEX_NAME,
    FileRecord,
    Index,
    object_record,
    upload,
)
from weightcast.shared.channel.layout import (
    ATTEMPTS,
    BASE_JSON,
    TornPointer,
    attempts_key,
    index_key,
    read_pointer,
    version_name,
    version_of,
    write_pointer,
)
from weightcast.shared.channel.signing import (
    PrivateKey,
    Trust,
    load_private_key,
    signature_key,
    stated_by,
    trusted_keys,
    write_signature,
)
from weightcast.shared.channel.store import (
    TRASH,
    AlreadyExists,
    NotFound,
    Store,
    StoreError,
    read_if_there,
)
from weightcast.shared.checkpoint.state.side_files import SideFiles
from weightcast.shared.checkpoint.verify.hashing import proven
from weightcast.shared.files import durable
from weightcast.shared.files.paths import ChannelAddress, channel_address

PostWrite = Callable[[int, ChannelAddress, str], None]
"""Called with version, its directory or URL, and the phase `version` (files are there) or `pointer`."""

PRUNED = ".pruned"
"""what versions in the trash end in that readers may still have open"""
PUT_AWAY = ".put-away"
"""what in the trash ends in that somebody may want back"""
_HOOK_TRIES = 5
_WHOLE = "whole"
_LEFT_LIMIT = 1 << 30
"""bytes of a config file"""
_COMMITTING = threading.RLock()


@dataclass(frozen=True)
class Signer:
    """`trust` holds the publisher's own key too. None: nothing is signed, nothing is checked."""

    key: PrivateKey | None
    trust: Trust | None

    @classmethod
    def load(cls, sign_key: str | Path | None, trusted: Sequence[str | Path] = ()) -> Signer:
        """Raises Refused for files that are no keys."""
        if sign_key is None:
            return cls(None, Trust.load(trusted))
        key = load_private_key(Path(sign_key))
        others = [other for text in trusted for other in trusted_keys(text)]
        return cls(key, Trust.of([key.public, *others]))

    def check_owner(self, store: Store) -> None:
        """Raises Refused where hosts would refuse what this publisher writes, or it what it wrote itself."""
        if self.key is not None:
            return
        if self.trust is not None:
            raise Refused(
                "trusted keys are given but no signing key: the publisher would refuse its own versions",
                remedy="give --sign-key, or leave out --trusted-key",
            )
        signature = signature_key(BASE_JSON)
        if store.stat(signature) is not None:
            raise Refused(
                f"{store.place()} is signed ({signature}), but no signing key is given",
                remedy="give --sign-key; to stop signing, remove that file and the hosts' --trusted-key",
            )


def begin_attempt(claim: Claim, version: int) -> str:
    """Key of a directory in which a version is made, under a name that nobody else has."""
    attempts = attempts_key(version)
    with contextlib.suppress(AlreadyExists):
        claim.store.begin(attempts)
    key = f"{attempts}/{_own_name(claim)}"
    claim.store.begin(key)
    failpoint("attempt.begun", claim.store.place(key))
    return key


@dataclass(frozen=True)
class Files:
    """Where the files of an attempt are written. `key`: of the directory; `prefix`: of the names of weights.
    In a store that does not rename they are written where they stay, with names of this attempt alone."""

    store: Store
    key: str
    prefix: str = ""

    @classmethod
    def of(cls, store: Store, attempt: str) -> Files:
        """`attempt`: as `begin_attempt` gave it."""
        if store.renames:
            return cls(store, attempt)
        attempts, own = attempt.split("/")
        return cls(store, attempts.removesuffix(ATTEMPTS), f"{own}.")

    @property
    def directory(self) -> Store:
        return self.store.within(self.key)

    def discard(self) -> None:
        """Those of this attempt alone, unless they were committed and only the answer was lost."""
        if not self.prefix:
            self.store.discard(self.key)
            return
        index = read_if_there(self.directory, INDEX_NAME, INDEX_LIMIT)
        if index is None or self.prefix.encode() not in index:
            for name in self.directory.names():
                if name.startswith(self.prefix):
                    self.directory.delete(name)


def begin_beside(claim: Claim, key: str) -> Files:
    """As `begin_attempt`, for what will be the directory `key` in that of a version."""
    own = _own_name(claim)
    if not claim.store.renames:
        return Files(claim.store, key, f"{own}.")
    made = f"{key}.{own}"
    claim.store.begin(made)
    return Files(claim.store, made)


def _own_name(claim: Claim) -> str:
    return f"{claim.epoch}-{secrets.token_hex(4)}"


def end_attempt(store: Store, key: str) -> None:
    Files.of(store, key).discard()
    store.discard(key)
    with contextlib.suppress(StoreError):  # while there are others
        store.delete(key.rpartition("/")[0])


def drop_parts(claim: Claim) -> None:
    """Parts of attempts that came to nothing, up to those of the claim's epoch, and what a kill left half
    deleted: only the channel's owner may call this. Who is no longer that leaves alone what newer owners
    make."""
    store = claim.store
    names = _directories(store, "")
    if not store.renames:
        _drop_uncommitted(claim, names)
    for name in names:
        if name.endswith(ATTEMPTS):
            for attempt in _directories(store, name):
                if _epoch_of(attempt) <= claim.epoch:
                    store.discard(f"{name}/{attempt}")
            with contextlib.suppress(StoreError):  # while there are others
                store.delete(name)
    for name in _directories(store, TRASH):
        if not name.endswith((PRUNED, PUT_AWAY)):
            store.discard(f"{TRASH}/{name}")


def _drop_uncommitted(claim: Claim, names: Iterable[str]) -> None:
    """Files of versions beyond the pointer that have no index. `names`: the channel's directories."""
    pointer = read_pointer(claim.store)
    at = 0 if pointer is None else pointer.version
    for name in names:
        version = version_of(name)
        if version is not None and version > at and claim.store.stat(index_key(version)) is None:
            drop_unfinished(claim, name)


def drop_unfinished(claim: Claim, key: str) -> None:
    """What is below `key`, which has no index, unless a newer owner writes there."""
    claim.check()
    if all(_epoch_of(name) <= claim.epoch for name in claim.store.names(key)):
        claim.store.discard(key)


def drop_strays(claim: Claim, key: str, names: Iterable[str]) -> None:
    """Of `names` below `key`, in an object store, deletes files of former owners' attempts that the index
    does not name."""
    old = [name for name in names if 0 <= _epoch_of(name) < claim.epoch]
    files = claim.store.within(key)
    index = read_if_there(files, INDEX_NAME, INDEX_LIMIT) if old and not claim.store.renames else None
    for name in old:
        if index is not None and name.encode() not in index:
            files.delete(name)


def _directories(store: Store, prefix: str) -> list[str]:
    return sorted(entry.name for entry in store.list(prefix) if entry.kind == "directory")


def _epoch_of(attempt: str) -> int:
    """-1 for a name that is none of an attempt."""
    number = attempt.partition("-")[0]
    return int(number[:15]) if number.isascii() and number.isdigit() else -1


def move_shards(store: Store, attempt: str, sources: Mapping[str, str]) -> str:
    """Key of the version's directory as it will be, in that of its attempt: exactly the listed files."""
    if not store.renames:
        return Files.of(store, attempt).key
    whole = store.within(attempt).begin(_WHOLE)
    failpoint("version.begun", whole.place())
    for name, source in sources.items():
        store.within(attempt).move(source, f"{_WHOLE}/{name}", sync="/" in name)
        failpoint("version.moved", whole.place())
    return f"{attempt}/{_WHOLE}"


def put(
    files: Store, name: str, pieces: Iterable[durable.Piece], check: Callable[[], None] | None = None
) -> FileRecord:
    """Writes a file of a draft, durable with it. `check`: of the claim, under which what another attempt left
    is replaced; None: raises AlreadyExists for it, unless it has these bytes."""
    try:
        return upload(files, name, pieces)
    except AlreadyExists:
        data = b"".join(pieces)
        record = FileRecord(name, len(data), blake3(data).hexdigest())
        if files.renames or (object_record(files, name) != record and check is None):
            raise
        if check is not None:
            _put_right(files, name, data, check)
        return record


def _put_right(files: Store, name: str, data: bytes, check: Callable[[], None]) -> None:
    """In place of what an attempt left that ended before its index. Raises Changed where somebody replaces it
    meanwhile, and what `check` raises."""
    left = files.read(name, _LEFT_LIMIT)
    # whoever lost the channel may have read what the new owner wrote
    check()
    if left != data:
        files.replace(name, data, expected=left)


def commit_version(claim: Claim, made: str, index: Index, data: bytes, key: PrivateKey | None = None) -> None:
    """Gives what `made` holds the version's name. `data`: the index, written."""
    name = version_name(index.version)
    try:
        commit_draft(claim, made, name, index, data, key)
    except AlreadyExists as error:
        raise Forked(
            f"{claim.store.place(name)} was committed by another publisher",
            remedy="stop the other publisher of this channel",
        ) from error


def commit_draft(
    claim: Claim, draft: str, name: str, index: Index, data: bytes, key: PrivateKey | None
) -> None:
    """Signature and index into `draft`, which then becomes `name`. `data`: the index, written. Raises
    AlreadyExists, and Refused of `claim`; what is there by then is untouched."""
    store = claim.store

    def allowed() -> None:
        claim.check()
        failpoint("index.allowed", store.place(draft))

    # no thread of this process replaces the signature of another one's index
    with _COMMITTING:
        if not store.renames and store.stat(f"{name}/{INDEX_NAME}") is not None:
            raise AlreadyExists.at(store.place(name))
        if key is not None:
            statement = stated_by(index, blake3(data).hexdigest(), index.main)
            files, signature = store.within(draft), write_signature(statement, key)
            try:
                files.create(signature_key(INDEX_NAME), signature)
            except AlreadyExists:
                _put_right(files, signature_key(INDEX_NAME), signature, claim.check)
        store.commit(draft, name, INDEX_NAME, data, allowed)


def advance_pointer(claim: Claim, version: int, post_write: PostWrite | None) -> None:
    """Tells the fleet. Hooks are retried; the version is not written again for them. Raises Refused of
    `claim`, also where the channel was lost while the pointer was written."""
    place = claim.store.place(version_name(version))
    _hook(post_write, version, place, "version")
    _point(claim, version)
    failpoint("pointer.moved", place)
    _hook(post_write, version, claim.store.place(), "pointer")


def put_pointer_right(claim: Claim) -> None:
    """A former owner that was suspended right before its rename may have put the pointer back, or the file
    was damaged. If the version is gone too, the channel was restored, and the pointer stays. Raises
    DamagedFile and TornPointer if this owner never saw a valid pointer."""
    try:
        pointer = read_pointer(claim.store)
    except (DamagedFile, TornPointer):
        if not claim.pointed:
            raise
        pointer = None
    at = 0 if pointer is None or pointer.run is not None else pointer.version
    if at < claim.pointed and claim.store.stat(index_key(claim.pointed)) is not None:
        _point(claim, claim.pointed)
    claim.saw(at)


def _point(claim: Claim, version: int) -> None:
    def allowed() -> None:
        claim.check()
        failpoint("pointer.allowed", claim.store.place(version_name(version)))

    try:
        write_pointer(claim.store, version, allowed)
    finally:
        # no rename compares: who lost the channel in between says so; the new owner puts the pointer right
        claim.check()
    claim.saw(version)


def _hook(post_write: PostWrite | None, version: int, place: str, phase: str) -> None:
    if post_write is None:
        return
    for left in reversed(range(_HOOK_TRIES)):
        try:
            return post_write(version, channel_address(place), phase)
        except RetryLater:
            if not left:
                raise
            time.sleep(0.2 * (_HOOK_TRIES - left))


def verify_files(files: Store, index: Index, but: Collection[str] = ()) -> None:
    """Every file that the index names is there and what it says. `but`: those that are known to be."""
    for record in index.all_files:
        found = None
        with contextlib.suppress(NotFound, DamagedFile):
            found = record if record.name in but else object_record(files, record.name)
        if found != record:
            raise DamagedFile(
                f"{files.place(record.name)} is missing or damaged",
                remedy="the version is not served; run `weightcast channel verify`",
            )


def carry(
    channel: Channel, kept: SideFiles, made: Store, facts: InputFacts, carried_of: int | None
) -> tuple[FileRecord, ...]:
    """Writes the version's config files into `made` and lists them: those of version `carried_of`, or those
    of the previous version with what the input changed or took back. Every version has all of them, so that
    no host needs another version. `kept`: the publisher's own copies, in case that the channel lost one.
    Raises DamagedFile for a file that both lost."""
    at = channel.pointed() if carried_of is None else carried_of
    given = facts.carry.keys() | {name for name, digest in (facts.configs or {}).items() if not digest}
    records = []
    for record in _of(channel, at):
        if carried_of is not None or record.name not in given:
            _again(kept, made, record, channel.store.within(version_name(at)))
            records.append(record)
    for name, data in facts.carry.items():
        record = replace(put(made, f"{CARRIED}/{name}", [data]), name=name)
        kept.keep(record, [data])
        records.append(record)
    return tuple(sorted(records, key=lambda record: record.name))


def is_carried(channel: Channel, facts: InputFacts, version: int) -> bool:
    """Whether `version` carries what an input with these facts would have it carry. True for one that was
    pruned: only its root is remembered."""
    try:
        there = {record.name: record.blake3 for record in _of(channel, version)}
    except DamagedFile:
        return True
    configs = facts.configs or {}
    dropped = (name for name, digest in configs.items() if not digest)
    return all(there.get(name) == configs[name] for name in facts.carry) and there.keys().isdisjoint(dropped)


def _of(channel: Channel, version: int) -> tuple[FileRecord, ...]:
    return () if version == 0 else announced(channel, version).carried


def announced(channel: Channel, version: int) -> Index:
    """The index of a version up to the pointer. Raises DamagedFile where the channel lost it."""
    index = channel.own_index(version)
    if index is None:
        raise DamagedFile(
            f"{channel.store.place(index_key(version))} is missing although the pointer names it",
            remedy="restore it; run `weightcast channel verify`",
        )
    return index


def _again(kept: SideFiles, made: Store, record: FileRecord, source: Store) -> None:
    key, copy = f"{CARRIED}/{record.name}", kept.path(record)
    pieces = source.pieces(key) if copy is None else durable.pieces_of(copy, follow_links=False)
    put(made, key, proven(record, pieces))
    if copy is None:
        kept.keep(record, made.pieces(key))

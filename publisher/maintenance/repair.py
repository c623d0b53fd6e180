"""Repair of a channel by its owner: fix what can be fixed, report what is lost.

Nothing is deleted at once: files that no host can use move to `.trash`. A file that is only unreadable now
stays where it is. Committed versions never change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from blake3 import blake3

from weightcast.publisher.maintenance.multi_step_deltas import write_steps
from weightcast.publisher.maintenance.prune import put_away, put_copy_away
from weightcast.publisher.maintenance.replay_log import KeptJournals, ReplayLog
from weightcast.publisher.publish.anchors import write_weights
from weightcast.publisher.publish.commit import Files, begin_attempt, end_attempt, put
from weightcast.shared.base.elements import Part, grid
from weightcast.shared.base.errors import DamagedFile, Refused, Untrusted, WeightcastError
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.chain import (
    NO_WAY_ROUND,
    Problem,
    check_files,
    faults,
    highest_sound,
    of_channel,
    unannounced,
)
from weightcast.shared.channel.channel import Channel, require_named
from weightcast.shared.channel.claims import Claim
from weightcast.shared.channel.delta import begin_shard
from weightcast.shared.channel.directory_store import DirectoryStore
from weightcast.shared.channel.index import (
    CARRIED,
    INDEX_LIMIT,
    INDEX_NAME,
    Encoding,
    FileRecord,
    Index,
    parse_index,
)
from weightcast.shared.channel.layout import (
    BASE_JSON,
    CHANNEL_JSON,
    anchor_key,
    index_key,
    read_pointer,
    version_name,
    write_pointer,
)
from weightcast.shared.channel.reports import read_reports
from weightcast.shared.channel.run_files import (
    BASE_LIMIT,
    CHANNEL_FILE_LIMIT,
    Base,
    parse_base,
    parse_channel_file,
    write_channel_file,
)
from weightcast.shared.channel.signing import SIGNATURE_LIMIT, Trust, signature_key
from weightcast.shared.channel.store import NotFound, Store, read_if_there
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, LocalPaths
from weightcast.shared.checkpoint.state.side_files import SideFiles
from weightcast.shared.checkpoint.state.state import Position, read_state
from weightcast.shared.checkpoint.verify.hashing import Credit
from weightcast.shared.daemon.timing import Due
from weightcast.shared.files import durable
from weightcast.shared.files.strict_json import parse_object

WriteAnchor = Callable[[], int | None]
"""writes an anchor of the newest version; returns its number, None where one exists"""
_BACKUP = "restore channel.json from a backup of the channel; without one, make a new channel"
_MOVED = ("anchor", "skip", "stray", "report")


@dataclass(frozen=True)
class Repairs:
    """`left`: what is still wrong afterwards; `notes`: what is nobody's fault."""

    done: list[str] = field(default_factory=list)
    left: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def plus(self, other: Repairs, prefix: str) -> Repairs:
        """With those of a component. `prefix`: its name, before each line."""
        left = [replace(each, message=prefix + each.message) for each in other.left]
        done, notes = ([prefix + line for line in lines] for lines in (other.done, other.notes))
        return Repairs([*self.done, *done], [*self.left, *left], [*self.notes, *notes])


def is_sound(store: Store, advance: Advance | None = None, trust: Trust | None = None) -> bool:
    """Whether nothing is to be repaired. Reads the whole channel. Raises Refused where there is none."""
    if faults(store, advance, trust):
        return False
    require_named(store)
    return True


def repair(
    claim: Claim,
    local: Path | None,
    write_anchor: WriteAnchor,
    *,
    advance: Advance | None = None,
    trust: Trust | None = None,
) -> Repairs:
    """Repairs the channel that is claimed. `local`: the publisher's own local checkpoint, for what only its
    bytes can restore. `write_anchor`: writes full weights of the newest version from it.

    Raises Refused for another tool's channel and where the claim is outdated."""
    store, repairs = claim.store, Repairs()
    own = None if local is None else _OwnState(local, claim, repairs)
    if own is not None:
        own.restore_channel_file()
        own.restore_base()
        own.make_again(trust)
    channel = Channel.open(store, trust)
    if channel.foreign:
        raise Refused(f"{channel.place} belongs to another tool", remedy="repair it with that tool")
    version = None if _points_somewhere(store) else highest_sound(channel, _known(channel, own), advance)
    if version is not None:
        claim.check()
        write_pointer(store, version)
        repairs.done.append(f"latest restored to version {version}, the newest intact one")
        if own is not None:
            # what failed before may succeed now: full weights are written only for what is lost
            own.make_again(trust)
    _move_away(channel, claim, repairs, advance)
    if own is not None:
        own.write_anchor(write_anchor)
    repairs.left.extend(faults(store, advance, trust))
    repairs.notes.extend(
        f"version {version} is committed but not announced: start its publisher to announce it"
        for version in unannounced(Channel.open(store))
    )
    return repairs


@dataclass(frozen=True)
class _OwnState:
    """What the publisher's own local checkpoint `local` can restore."""

    local: Path
    claim: Claim
    repairs: Repairs

    @property
    def _store(self) -> Store:
        return self.claim.store

    @property
    def _room(self) -> Store:
        return DirectoryStore(LocalPaths(self.local).room)

    def restore_channel_file(self) -> None:
        """Of this run alone: the local state names it. A newer format is left as it is."""
        try:
            parse_channel_file(self._store.read(CHANNEL_JSON, CHANNEL_FILE_LIMIT))
            return
        except NotFound:
            if self._store.stat(BASE_JSON) is None:
                return
        except DamagedFile:
            pass
        try:
            data = self._room.read(CHANNEL_JSON, CHANNEL_FILE_LIMIT)
        except NotFound as error:
            place = self._store.place(CHANNEL_JSON)
            raise DamagedFile(f"{place} is damaged; {self.local} has no copy", remedy=_BACKUP) from error
        kept, bases = parse_channel_file(data), map(_base_in, (self._store, self._room))
        if any(base is not None and base.run_id != kept.run_id for base in bases):
            raise Refused(
                f"{self._room.place(CHANNEL_JSON)} is of run {kept.run_id}, the channel is not",
                remedy="give the --local of this channel's publisher",
            )
        horizon = self._horizon(kept.horizon)
        if horizon > kept.horizon:
            data = write_channel_file(replace(kept, horizon=horizon))
        self._store.replace(CHANNEL_JSON, data, allowed=self.claim.check)
        self.repairs.done.append(f"channel.json restored from {self.local}")

    def _horizon(self, kept: int) -> int:
        """No lower than what was pruned, perhaps by a command on another machine: then every version from one
        with full weights on is there, and the one before is not."""
        first = _pointed(self._store)
        while first > kept and self._store.stat(index_key(first - 1)) is not None:
            first -= 1
        full = self._stated(first).get("kind") == "anchor" or (
            self._store.stat(f"{anchor_key(first)}/{INDEX_NAME}") is not None
        )
        return first if full and first > max(kept, 1) else kept

    def restore_base(self) -> None:
        """A local checkpoint keeps the exact bytes. They must be those that the first version names."""
        here = _base_in(self._store)
        if here is not None and not self._starts_elsewhere(here):
            return
        data = self._room.read(BASE_JSON, BASE_LIMIT)
        kept = parse_base(data)
        run_id = parse_channel_file(self._store.read(CHANNEL_JSON, CHANNEL_FILE_LIMIT)).run_id
        if kept.run_id != run_id or self._starts_elsewhere(kept):
            raise Refused(
                f"{self._room.place(BASE_JSON)} is not the base that the first version starts from",
                remedy="give the --local of this channel's publisher",
            )
        self._store.replace(BASE_JSON, data)
        self.repairs.done.append(f"base.json restored from {self.local}")

    def _starts_elsewhere(self, base: Base) -> bool:
        """Whether version 1 names another base. Its index cannot be checked further without one."""
        stated = self._stated(1)
        return stated.get("kind") == "delta" and stated.get("parent") != base.digest

    def _stated(self, version: int) -> Mapping[str, object]:
        """What a version's index says of itself, unchecked; empty where it cannot be read."""
        with suppress(WeightcastError, OSError):
            data = self._store.read(index_key(version), INDEX_LIMIT)
            ours = parse_object(data, f"index of version {version}").get("weightcast")
            return ours if isinstance(ours, dict) else {}
        return {}

    def version(self, run_id: str) -> int:
        """The newest that was published from here. Raises Refused for the local checkpoint of another run."""
        state = read_state(LocalPaths(self.local).state)
        if state is None or state.run_id != run_id:
            raise Refused(
                f"{self.local} is not a local checkpoint of run {run_id}",
                remedy="give the --local of this channel's publisher",
            )
        return state.position.version

    def make_again(self, trust: Trust | None) -> None:
        """What the publisher's own bytes and journals still give."""
        try:
            file = parse_channel_file(self._store.read(CHANNEL_JSON, CHANNEL_FILE_LIMIT))
            newest = self.version(file.run_id)
            if _points_somewhere(self._store):
                newest = _pointed(self._store)
            found = remake(self.claim, self.local, range(max(1, file.horizon), newest + 1), trust=trust)
        except (WeightcastError, OSError) as error:
            self.repairs.notes.append(f"cannot restore anything from {self.local}: {error}")
            return
        self.repairs.done.extend(found.done)
        self.repairs.notes.extend(found.notes)

    def write_anchor(self, write: WriteAnchor) -> None:
        """Full weights of the newest version lead hosts past lost deltas."""
        lost = [problem for problem in faults(self._store) if problem.part in ("version", "link")]
        if not any(NO_WAY_ROUND in problem.meaning for problem in lost):
            return
        try:
            version = write()
            if version is not None:
                self.repairs.done.append(f"anchor of version {version} written from {self.local}")
        except (WeightcastError, OSError) as error:
            self.repairs.notes.append(f"cannot write an anchor from {self.local}: {error}")


def _base_in(store: Store) -> Base | None:
    try:
        return parse_base(store.read(BASE_JSON, BASE_LIMIT))
    except WeightcastError:
        return None


def _pointed(store: Store) -> int:
    """0 where the pointer says nothing."""
    with suppress(WeightcastError):
        pointer = read_pointer(store)
        return 0 if pointer is None else pointer.version
    return 0


def _known(channel: Channel, own: _OwnState | None) -> int:
    """The newest version that the pointer, the publisher or a host says was published."""
    run_id = channel.require_ours()[0].run_id
    said = [report.local_version for report in read_reports(channel.store) if report.run_id == run_id]
    with suppress(WeightcastError, OSError):
        said.append(None if own is None else own.version(run_id))
    return max([_pointed(channel.store), *(version for version in said if version is not None)])


def _points_somewhere(store: Store) -> bool:
    """To a version that is there, whole or not. Its index is asked for, as a listing may lack it."""
    version = _pointed(store)
    there = store.stat(index_key(version)) is not None or bool(store.names(version_name(version)))
    return version > 0 and there


def _move_away(channel: Channel, claim: Claim, repairs: Repairs, advance: Advance | None) -> None:
    moved: set[str] = set()
    for problem in of_channel(channel, advance):
        key = problem.directory.removeprefix(channel.place).lstrip("/")
        if problem.unread or not key or key in moved:
            continue
        epoch = PurePosixPath(key).stem
        old_claim = problem.part == "claim" and epoch.isdigit() and int(epoch) < claim.epoch
        if old_claim or problem.part in _MOVED:
            claim.check()
            moved.add(key)
            if put_away(channel.store, key):
                repairs.done.append(f"{key} moved to .trash")


def remake(
    claim: Claim, local: Path, there: range, *, only: int | None = None, trust: Trust | None = None
) -> Repairs:
    """What was made, and what could not be. `there`: versions that must be in the channel; others may be gone
    on purpose, or were never announced. `only`: the one version to look at. With `trust` a signature that it
    refuses is replaced by the one that was kept. Raises RetryLater and NeedsReseed
    when the local checkpoint cannot be read now."""
    found = Repairs()
    with ReplayLog(local) as log:
        for version, position in sorted(log.positions().items()):
            is_meant = only in (None, version) and version > 0
            if not is_meant or not (version in there or claim.store.names(version_name(version))):
                continue
            try:
                for line in _Remake(log, claim, position, trust).lines():
                    found.done.append(line)
            except (WeightcastError, OSError) as error:
                found.notes.append(f"version {version} cannot be restored: {error}")
    return found


@dataclass(frozen=True)
class _Remake:
    """Of one version, under a claim."""

    log: ReplayLog
    claim: Claim
    position: Position
    trust: Trust | None

    def lines(self) -> Iterator[str]:
        """Makes what can be made again; says what was."""
        store, version = self.claim.store, version_name(self.position.version)
        data, lost = self._index()
        if data is None:
            return
        index = parse_index(data, self.log.table)
        bad = [record for record in index.all_files if any(check_files(store.within(version), [record]))]
        if bad:
            self.claim.check()
            draft = begin_attempt(self.claim, index.version)
            try:
                self._make(store.within(draft), index, bad)
                for name in sorted(record.name for record in bad):
                    self.claim.check()
                    put_copy_away(store, f"{version}/{name}")
                    store.move(f"{draft}/{name}", f"{version}/{name}", sync=True)
                    yield f"{version}/{name} written again byte for byte"
            finally:
                end_attempt(store, draft)
        key, signature = f"{version}/{INDEX_NAME}", self.log.journals.signature(index.version)
        if lost:
            self.claim.check()
            put_copy_away(store, key)
            if signature is not None:
                store.replace(signature_key(key), signature)
            store.replace(key, data)
            yield f"{key} restored byte for byte"
        elif signature is not None and self._is_better(signature, signature_key(key)):
            self.claim.check()
            store.replace(signature_key(key), signature)
            yield f"{signature_key(key)} restored byte for byte"

    def _is_better(self, kept: bytes, key: str) -> bool:
        """Whether a key that is trusted made the kept signature, and not the one that is there."""
        there = read_if_there(self.claim.store, key, SIGNATURE_LIMIT)
        return self._is_trusted(kept) and not self._is_trusted(there)

    def _is_trusted(self, signature: bytes | None) -> bool:
        with suppress(Untrusted):
            return self.trust is not None and bool(self.trust.check(signature, "", self.position.digest))
        return False

    def _index(self) -> tuple[bytes | None, bool]:
        """What was committed, and whether the channel lost it. None where nobody knows it."""
        with suppress(WeightcastError, OSError):
            data = self.claim.store.read(index_key(self.position.version), INDEX_LIMIT)
            if blake3(data).hexdigest() == self.position.digest:
                return data, False
        return self.log.journals.index(self.position), True

    def _make(self, files: Store, index: Index, bad: list[FileRecord]) -> None:
        """Raises DamagedFile for a file that does not become what the index says."""
        for record in index.carried:
            kept = SideFiles(self.log.journals.paths).path(record)
            if kept is not None:
                put(files, f"{CARRIED}/{record.name}", durable.pieces_of(kept))
        if index.encoding is None:
            words = self.log.words_at(index.version)
            write_weights(Files(files, ""), self.log.table, words, self.log.local.side_files)
        else:
            for part in index.parts:
                # each part has one shard
                name = next((record.file for record in index.chunks if record.key.part == part.number), "")
                if any(record.name == name for record in bad):
                    self._write_shard(files, name, index, part, index.encoding)
        for record in bad:
            if any(check_files(files, [record])):
                raise DamagedFile(
                    f"{version_name(index.version)}/{record.name} differs from the committed file",
                    remedy="repair with the release that wrote it and its compression library",
                )

    def _write_shard(self, files: Store, name: str, index: Index, part: Part, encoding: Encoding) -> None:
        """As it was published: the words of both versions, encoded once more."""
        log = self.log
        # a rank knows of one part, its own
        chunks = list(grid(log.table, Part(0, part.segments)))
        steps = ((chunk, *log.step(chunk, index.version, index.base_version)) for chunk in chunks)
        write_steps(begin_shard(encoding, files, name, log.table, len(chunks)), steps)


_ROUND_SECONDS = 30.0
"""from the beginning of one round to the next, at least"""


class ChannelCheck:
    """Compares files of versions with their indexes, newest version first, round after round. Used by the
    publishing thread. `rate`: bytes per second, at most; 0 reads nothing."""

    def __init__(self, rate: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._credit, self._round_due = Credit(rate, clock), Due(_ROUND_SECONDS, clock)
        self._round: Iterator[int | None] | None = None
        self._given_up: set[int] = set()

    def turn(self, store: Store, local: LocalCheckpoint) -> int | None:
        """Reads what the rate allows since the last turn. Returns a version with a damaged or lost file."""
        self._credit.earn()
        if self._round is None and self._credit.left > 0 and self._round_due.take():
            self._round = self._files(store, local)
        while self._round is not None and self._credit.left > 0:
            try:
                damaged = next(self._round)
            except StopIteration:
                damaged, self._round = None, None
            if damaged is not None:
                self._round = None
                return damaged
        return None

    def give_up(self, version: int) -> None:
        """Its files could not be written again: they are not read again either."""
        self._given_up.add(version)

    def _files(self, store: Store, local: LocalCheckpoint) -> Iterator[int | None]:
        """After each file that was read: its version where the file is damaged or lost, else None."""
        history = KeptJournals(local.paths)
        for version, step in history.back_from(local.state.position).items():
            data = None if version in self._given_up else history.index(step.target)
            if data is None:
                continue
            yield version if self._has_other_index(store, version, data) else None
            with suppress(WeightcastError):
                for record in parse_index(data, local.table).all_files:
                    if store.stat(index_key(version)) is None:
                        break  # pruned meanwhile
                    self._credit.left -= record.size
                    flaws = check_files(store.within(version_name(version)), [record])
                    yield version if any(not flaw.unread for flaw in flaws) else None

    def _has_other_index(self, store: Store, version: int, expected: bytes) -> bool:
        """False for an index that cannot be read now, and for a version that was pruned."""
        self._credit.left -= len(expected)
        try:
            return store.read(index_key(version), INDEX_LIMIT) != expected
        except NotFound:
            return version >= parse_channel_file(store.read(CHANNEL_JSON, CHANNEL_FILE_LIMIT)).horizon
        except (WeightcastError, OSError):
            return False

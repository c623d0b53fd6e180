"""One channel copied into another, version by version: files, then index with signature, then pointer.

The mirror reads the source as a host does, writes the destination as a publisher does, and changes no byte.
Everything is found out from the two channels: what is remembered of them is forgotten after any error.
docs/adr/0023 says what a kill leaves and what is refused.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from weightcast.publisher.maintenance.prune import (
    ActiveHosts,
    empty_trash,
    held_versions,
    prune,
    raise_horizon,
    what_to_prune,
)
from weightcast.publisher.maintenance.retention import GRACE_SECONDS, Retention, Situation, cheapest, decide
from weightcast.publisher.maintenance.upkeep import sweep
from weightcast.publisher.publish.commit import (
    Files,
    advance_pointer,
    announced,
    begin_attempt,
    begin_beside,
    commit_draft,
    drop_parts,
    end_attempt,
    put,
    put_pointer_right,
)
from weightcast.shared.base.elements import TensorTable
from weightcast.shared.base.errors import DamagedFile, Forked, Refused, RetryLater, WrongRun, on_error
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel import pins
from weightcast.shared.channel.chain import committed, versions_in
from weightcast.shared.channel.channel import Channel, NoChannel, Shown, look
from weightcast.shared.channel.claims import Heart, claim, current_epoch, require_fences, this_process
from weightcast.shared.channel.components import REGISTRY, REGISTRY_LIMIT, component_store, read_components
from weightcast.shared.channel.directory_store import mounted
from weightcast.shared.channel.index import (
    INDEX_LIMIT,
    INDEX_NAME,
    FileRecord,
    Index,
    object_record,
    parse_index,
)
from weightcast.shared.channel.layout import (
    BASE_JSON,
    CHANNEL_JSON,
    LATEST,
    Pointer,
    TornPointer,
    anchor_key,
    index_key,
    multi_step_key,
    read_pointer,
    version_name,
)
from weightcast.shared.channel.run_files import (
    BASE_LIMIT,
    CHANNEL_FILE_LIMIT,
    is_adapter,
    parse_base,
    parse_channel_file,
    write_channel_file,
)
from weightcast.shared.channel.signing import SIGNATURE_LIMIT, Trust, signature_key
from weightcast.shared.channel.store import AlreadyExists, NotFound, Store, read_if_there
from weightcast.shared.checkpoint.verify.hashing import proven
from weightcast.shared.daemon.logs import get_log
from weightcast.shared.daemon.status import SOFTWARE, FollowerStatus
from weightcast.shared.daemon.timing import Due
from weightcast.shared.files.durable import Piece

LOOK_SECONDS = 30.0
_FILES_AT_ONCE = 4
_REPAIR_SOURCE = "run `weightcast channel repair` on the source; the mirror goes on once it is right"
_SIGNATURE = signature_key(INDEX_NAME)
_NO_ANCHOR = Refused(
    "a mirror copies anchors and writes none", remedy="order it of the source: `weightcast channel anchor`"
)
_NEW_DESTINATION = "give a new destination (--to), or restore the source"
log = get_log("mirror")


class MirrorStatus(FollowerStatus):
    """`channel`: the source; `local`: the destination, whose pointer names the local and the served version.
    `bytes`, `versions`, `mended`: copied, or repaired files, since the start. `ready`: the last pass ended
    well."""

    role: str = "mirror"
    host: str = field(default_factory=socket.gethostname)
    software: str = SOFTWARE
    target: str = LATEST
    epoch: int | None = None
    bytes: int = 0
    versions: int = 0
    mended: int = 0


@dataclass(frozen=True)
class MirrorOptions:
    """`look_seconds`: between two looks for anchors, multi-step deltas and tags. `retention`: of the
    destination; `grace_seconds` as of upkeep. `keep_bytes`: what the destination's versions may take; 0: no
    limit. With it nothing waits in the trash."""

    retention: Retention = field(default_factory=Retention)
    look_seconds: float = LOOK_SECONDS
    grace_seconds: float = GRACE_SECONDS
    keep_bytes: int = 0
    trust: Trust | None = None
    take_over: bool = False
    unfenced: bool = False


class Mirror:
    """For one thread; `status` may be read by any. `advance` is called by several threads, and may raise
    to stop. Opening it takes the destination: raises OwnerAlive and Refused."""

    def __init__(
        self, source: Store, store: Store, options: MirrorOptions, advance: Advance = lambda nbytes: None
    ) -> None:
        if source.place() == store.place():
            raise Refused(f"{store.place()} is the source too", remedy="give another --to")
        self._source, self._store, self._options, self._advance = source, store, options, advance
        self.status = MirrorStatus(channel=source.place(), local=store.place())
        self._active, self._look_due = ActiveHosts(), Due(options.look_seconds)
        self._channel: Channel | None = None
        self._nested: dict[str, tuple[Mirror, Heart]] = {}
        """of components, by name"""
        self._at: int | None = None
        """where the destination's pointer is"""
        self._check = True
        """what is there is compared with the source: index, sizes and signatures"""
        self._checked()
        if (directory := mounted(store)) is not None:
            directory.mkdir(parents=True, exist_ok=True)
        require_fences(store, unfenced=options.unfenced)
        # no lower than those whose files are copied: they would look like a newer owner's
        above = current_epoch(source)
        self.claim = claim(store, this_process(), take_over=options.take_over, above=above)
        with on_error(self.claim.release):
            self._opened()
            self._readable_pointer()
            drop_parts(self.claim)
            sweep(Channel.open(store), self.claim)
        self._show(epoch=self.claim.epoch)

    def step(self, *, verify: bool = False) -> None:
        """One pass: the next versions, one after another, then anchors, multi-step deltas and tags. `verify`:
        reads and repairs all that is there. Raises DamagedFile for what the source lacks, after the rest;
        Forked, WrongRun and Untrusted with the destination left as it is."""
        try:
            channel, failures = self._opened(), list[DamagedFile | NotFound]()
            pointer, due = self._followed(channel), self._look_due.take()
            deep = verify or (due and pins.is_ordered(self._store, "repair"))
            if self._check or deep:
                # what is there has to be the source's before anything is added
                self._look(channel, failures, deep=deep)
                self._check = False
            if deep:
                pins.end_order(self._store, "repair")
            if due and pins.is_ordered(self._store, "anchor"):
                log.warning("order refused", reason=str(_NO_ANCHOR))
                pins.refuse_order(self._store, "anchor", _NO_ANCHOR)
            reached = {self._pointed}
            for version, held in self._candidates(channel, pointer).items():
                if not (held.full or reached & {version - 1, *held.skips}):
                    continue  # no host could go there
                try:
                    self._bring_version(channel, version, held)
                except (DamagedFile, NotFound) as error:
                    failures.append(error)
                    continue
                advance_pointer(self.claim, version, None)
                reached.add(version)
                self._at = version
                self._show_place(version, pointer.version, versions=self.status.versions + 1)
                log.info("version mirrored", version=version, lag=self.status.lag_versions)
            if due:
                self._look(channel, failures)
                self._prune()
            self._mirror_components(channel, failures, verify)
            self._require_reached(pointer, failures)
            self._show(state="idle")
        except BaseException:
            self._channel = self._at = None
            self.look_now()
            raise

    def _mirror_components(
        self, channel: Channel, failures: list[DamagedFile | NotFound], verify: bool
    ) -> None:
        """After main, whose versions theirs name; the destination lists them once they are there."""
        for name in [each.name for each in read_components(channel)]:
            if name not in self._nested:
                places = component_store(self._source, name), component_store(self._store, name)
                nested = Mirror(*places, self._options, self._advance)
                self._nested[name] = nested, Heart(nested.claim)
            nested, before = self._nested[name][0], self._nested[name][0].status
            try:
                nested.step(verify=verify)
            except (DamagedFile, NotFound) as error:
                failures.append(error)
            for what in ("bytes", "versions", "mended"):
                more = getattr(nested.status, what) - getattr(before, what)
                self._show(**{what: getattr(self.status, what) + more})
        data = read_if_there(self._source, REGISTRY, REGISTRY_LIMIT)
        there = read_if_there(self._store, REGISTRY, REGISTRY_LIMIT)
        if data is not None and data != there:
            self.claim.check()
            self._store.replace(REGISTRY, data, expected=there)

    def look_now(self) -> None:
        """At the next pass. For any thread."""
        self._look_due.at_once()
        for nested, _ in tuple(self._nested.values()):
            nested.look_now()

    def close(self) -> None:
        """Gives the destination back. Raises StoreError."""
        while self._nested:
            nested, heart = self._nested.popitem()[1]
            heart.stop()
            nested.close()
        self.claim.release()

    def _show(self, **changes: object) -> None:
        self.status = self.status.but(**changes)

    # ---- the two channels

    def _checked(self) -> Channel:
        """The source. Raises WrongRun and Forked for a destination of another run, and Refused for other
        files, before anything is written."""
        channel, theirs = Channel.open(self._source, self._options.trust), self._store
        if channel.file is None:
            if self._source.stat(BASE_JSON) is None and channel.pointer() is not None:
                raise Refused(
                    f"{channel.place} is another system's channel, which mirrors do not copy",
                    remedy="give --from a channel of weightcast's own; copy this one with its own tool",
                )
            raise NoChannel.within(channel.place)
        file, base = channel.require_ours()
        data = read_if_there(theirs, CHANNEL_JSON, CHANNEL_FILE_LIMIT)
        if data is None and (theirs.stat(LATEST) is not None or versions_in(theirs)):
            raise Refused(
                f"{theirs.place()} holds versions and no channel.json",
                remedy="restore it, or give a new destination (--to)",
            )
        if data is not None and (found := parse_channel_file(data).run_id) != file.run_id:
            raise WrongRun(
                f"{theirs.place()} is of run {found}, the source of run {file.run_id}",
                remedy=_NEW_DESTINATION,
            )
        there = read_if_there(theirs, BASE_JSON, BASE_LIMIT)
        with contextlib.suppress(DamagedFile):  # it is written again
            # an adapter without versions may get other tensors
            fixed = not is_adapter(theirs.component) or theirs.stat(LATEST) is not None
            if fixed and there is not None and parse_base(there).digest != base.digest:
                place = theirs.place(BASE_JSON)
                raise Forked(f"{place} is not that of the source", remedy=_NEW_DESTINATION)
        return channel

    def _opened(self) -> Channel:
        """The source, and the destination as a channel of the same run: its channel.json is written last."""
        if self._channel is None or not self._at:
            channel = self._checked()
            file, _ = channel.require_ours()
            for key in (BASE_JSON, signature_key(BASE_JSON)):
                data = read_if_there(self._source, key, BASE_LIMIT)
                if data is not None and read_if_there(self._store, key, BASE_LIMIT) != data:
                    self._store.replace(key, data)
            with contextlib.suppress(AlreadyExists):
                self._store.create(CHANNEL_JSON, write_channel_file(replace(file, horizon=0)))
            self._show(run_id=file.run_id)
            self._channel = channel
        return self._channel

    def _followed(self, channel: Channel) -> Pointer:
        """The source's pointer, version 0 before the first. Raises Forked where it is behind."""
        pointer = channel.pointer() or Pointer(0)
        if self._at is None:
            self._at = self._found(pointer)
            self.claim.saw(self._at)
        self._show_place(self._at, pointer.version)
        if pointer.version < self._at:
            raise Forked(
                f"{channel.place} was rewound: latest names version {pointer.version}, the mirror has "
                f"version {self._at}",
                remedy=_NEW_DESTINATION,
            )
        return pointer

    def _found(self, pointer: Pointer) -> int:
        """Where the pointer was lost: right before the newest version that is there."""
        found = self._readable_pointer()
        if found is not None:
            return found.version
        there = [version for version in committed(self._store) if version <= pointer.version]
        return max(there) - 1 if there else 0

    def _readable_pointer(self) -> Pointer | None:
        """The destination's. A damaged one is as good as lost."""
        try:
            return read_pointer(self._store)
        except (DamagedFile, TornPointer):
            self._store.delete(LATEST)
            return None

    @property
    def _pointed(self) -> int:
        return self._at or 0

    @property
    def _table(self) -> TensorTable:
        return self._opened().require_ours()[1].table

    def _show_place(self, version: int, target: int, **changes: object) -> None:
        places = {"target_version": target, "local_version": version, "served_version": version}
        self._show(**places, lag_versions=target - version, **changes)

    # ---- versions

    def _candidates(self, channel: Channel, pointer: Pointer) -> dict[int, Shown]:
        """Versions of the source above the pointer here that the retention would keep, in order."""
        if pointer.version == self._pointed:
            return {}
        held = held_versions(channel, pointer, above=self._pointed)
        verdict = decide(Situation(pointer.version, held, time.time()), self._options.retention)
        gone = {removal.version for removal in verdict.removals}
        return {version: held[version] for version in sorted(held.keys() - gone)}

    def _bring_version(self, channel: Channel, version: int, shown: Shown) -> None:
        index = announced(channel, version)
        base_version = index.base_version
        has_gap = base_version > 0 and self._store.stat(index_key(base_version)) is None
        if has_gap:
            raise_horizon(self.claim, version)
        elif base_version > 0:
            there = self._store.read(index_key(base_version), INDEX_LIMIT)
            if parse_index(there, self._table).digest != index.parent:
                raise Forked(
                    f"{self._source.place(version_name(version))} continues another version {base_version} "
                    "than the mirror has",
                    remedy=_NEW_DESTINATION,
                )
        self._bring(version_name(version), index)
        if has_gap:
            # what leads to it has to be there before it is announced
            self._bring_beside(channel, version, shown)

    def _bring_beside(self, channel: Channel, version: int, shown: Shown, *, deep: bool = False) -> None:
        """Anchor and multi-step deltas of a version."""
        found: dict[str, Index | None] = {}
        if shown.anchor is not None:
            found[anchor_key(version)] = channel.anchor(version, self._table)
        for base_version in shown.skips:
            found[multi_step_key(version, base_version)] = channel.skip(version, base_version, self._table)
        for key, index in found.items():
            if index is not None:
                self._bring(key, index, deep=deep)

    def _bring(self, key: str, index: Index, *, deep: bool = False) -> None:
        """Commits the source's directory `key`, or repairs what is there of it. Raises Forked for another."""
        files, place = self._source.within(key), f"{key}/{INDEX_NAME}"
        data, there = files.read(INDEX_NAME, INDEX_LIMIT), read_if_there(self._store, place, INDEX_LIMIT)
        if there == data:
            self._mend(key, index, deep)
            return
        if there is not None:
            with contextlib.suppress(DamagedFile):
                parse_index(there, self._table)
                raise Forked(
                    f"{self._store.place(place)} is not that of the source",
                    remedy=f"{_NEW_DESTINATION}; if that file was damaged, delete it: it is copied again",
                )
            self._store.delete(place)
        self._show(state=f"copying {key}")
        self._commit(index, files, key, data)

    def _has_room(self, index: Index, key: str) -> bool:
        """For a version, an anchor or a multi-step delta; False where its version was removed to make room.
        Raises Refused where it does not fit."""
        most, pointer = self._options.keep_bytes, Pointer(self._pointed)
        if not most:
            return True
        mine, size = Channel.open(self._store), sum(record.size for record in index.all_files)

        def used() -> int:
            return sum(held.stored for held in held_versions(mine, pointer).values())

        if used() + size > most:
            newest = Retention(keep_versions=1, host_versions=0)
            prune(what_to_prune(mine, pointer, self._active, newest), self.claim)
            empty_trash(self._store, 0.0)
            if "/" in key and self._store.stat(index_key(index.version)) is None:
                return False
            if (needed := used()) + size > most:
                raise Refused(
                    f"{key} ({size} bytes) does not fit: {needed} of --keep-bytes {most} are needed",
                    remedy="raise --keep-bytes, or have the publisher write anchors more often",
                )
        return True

    def _commit(self, index: Index, files: Store, key: str, data: bytes) -> None:
        if not self._has_room(index, key):
            return
        attempt = "" if "/" in key else begin_attempt(self.claim, index.version)
        draft = Files.of(self._store, attempt) if attempt else begin_beside(self.claim, key)
        made = draft.directory
        try:
            with ThreadPoolExecutor(_FILES_AT_ONCE, "mirror") as pool:
                for size in pool.map(lambda record: self._copy(files, made, record), index.all_files):
                    self._show(bytes=self.status.bytes + size)
            signature = read_if_there(files, _SIGNATURE, SIGNATURE_LIMIT)
            if signature is not None:
                made.replace(_SIGNATURE, signature)
            failpoint("mirror.copied", made.place())
            commit_draft(self.claim, draft.key, key, index, data, None)
            failpoint("mirror.committed", self._store.place(key))
        except BaseException:
            draft.discard()
            raise
        finally:
            if attempt and self._store.renames:
                end_attempt(self._store, attempt)

    def _copy(self, files: Store, made: Store, record: FileRecord) -> int:
        """The number of bytes. Only those that the record names get a name, and they are read back."""

        def pieces() -> Iterator[Piece]:
            for piece in files.pieces(record.name):
                self._advance(len(piece))
                yield piece

        # damaged, or of an attempt at a version that never was
        made.delete(record.name)
        whole = proven(record, pieces(), files.place(record.name), _REPAIR_SOURCE)
        if put(made, record.name, whole) != record:
            place = made.place(record.name)
            raise DamagedFile(f"{place} was not written as it was read", remedy="check the store")
        return record.size

    def _mend(self, key: str, index: Index, deep: bool) -> None:
        """Replaces what is missing or has another size; `deep`: or other bytes."""
        files, there = self._source.within(key), self._store.within(key)
        for record in index.all_files:
            if not _is_right(there, record, deep):
                self.claim.check()
                self._mend_file(key, index, record)
                self._show(mended=self.status.mended + 1)
                log.warning("file repaired", file=there.place(record.name))
        signature = read_if_there(files, _SIGNATURE, SIGNATURE_LIMIT)
        if signature is not None and read_if_there(there, _SIGNATURE, SIGNATURE_LIMIT) != signature:
            there.replace(_SIGNATURE, signature, allowed=self.claim.check)

    def _mend_file(self, key: str, index: Index, record: FileRecord) -> None:
        files = self._source.within(key)
        if not self._store.renames:
            self._copy(files, self._store.within(key), record)
            return
        attempt = begin_attempt(self.claim, index.version)
        try:
            self._copy(files, self._store.within(attempt), record)
            self._store.move(f"{attempt}/{record.name}", f"{key}/{record.name}", sync=True)
        finally:
            end_attempt(self._store, attempt)

    # ---- anchors, multi-step deltas, tags

    def _look(self, channel: Channel, failures: list[DamagedFile | NotFound], *, deep: bool = False) -> None:
        """What the destination lacks up to its pointer: versions that were lost or are tagged, anchors,
        multi-step deltas, tags."""
        if self._pointed:
            put_pointer_right(self.claim)
        held, there = held_versions(channel, Pointer(self._pointed)), set(versions_in(self._store))
        horizon = parse_channel_file(self._store.read(CHANNEL_JSON, CHANNEL_FILE_LIMIT)).horizon
        tags: Mapping[str, int] | None = None
        try:
            tags = pins.tags(channel.store)
        except DamagedFile as error:
            failures.append(error)
        wanted = {version for version in held if version in there or version >= max(horizon, 1)}
        for target in held.keys() & set((tags or {}).values()) - there:
            way = cheapest(held, target, {0: 0})
            wanted.update(() if way is None else (hop.version for hop in way.hops))
        for version in sorted(wanted):
            try:
                self._complete(channel, version, held[version], version not in there, deep)
                there.add(version)
            except (DamagedFile, NotFound) as error:
                failures.append(error)
        if tags is not None:
            self._set_tags(tags, there)

    def _complete(self, channel: Channel, version: int, shown: Shown, lost: bool, deep: bool) -> None:
        if lost or deep or self._check:
            self._bring(version_name(version), announced(channel, version), deep=deep)
        else:
            there = look(self._store.within(version_name(version)))
            if there is not None:
                skips = {base: size for base, size in shown.skips.items() if base not in there.skips}
                shown = replace(shown, skips=skips, anchor=shown.anchor if there.anchor is None else None)
        self._bring_beside(channel, version, shown, deep=deep)

    def _set_tags(self, tags: Mapping[str, int], versions: Collection[int]) -> None:
        """Those of the source. `versions`: that are here."""
        there = dict[str, int]()
        with contextlib.suppress(DamagedFile):  # all are set again
            there = pins.tags(self._store)
        for name, version in tags.items() - there.items():
            if version in versions:
                pins.set_tag(self._store, name, version)
        for name in there.keys() - tags.keys():
            pins.delete_tag(self._store, name)

    def _prune(self) -> None:
        if self._options.retention.bounded and self._pointed:
            mine = Channel.open(self._store)
            verdict = what_to_prune(mine, Pointer(self._pointed), self._active, self._options.retention)
            prune(verdict, self.claim)
        empty_trash(self._store, 0.0 if self._options.keep_bytes else self._options.grace_seconds)

    def _require_reached(self, pointer: Pointer, failures: Sequence[DamagedFile | NotFound]) -> None:
        if failures:
            raise failures[0]
        if self._pointed < pointer.version:
            raise RetryLater(
                f"{self._source.place()} has no way from version {self._pointed} to {pointer.version}",
                remedy="wait for its next anchor; `weightcast channel verify` lists what it lacks",
            )


def _is_right(there: Store, record: FileRecord, deep: bool) -> bool:
    if not deep:
        stat = there.stat(record.name)
        return stat is not None and stat.size == record.size
    with contextlib.suppress(NotFound, DamagedFile):
        return object_record(there, record.name) == record
    return False

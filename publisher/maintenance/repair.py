"""Repair of a channel by its owner: fix what can be fixed, report what is lost.

Nothing is deleted at once: files that no host can use move to `.trash`. A file that is only unreadable now
stays where it is. Committed versions never change.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from weightcast.publisher.maintenance.prune import put_away, put_link_away
from weightcast.publisher.maintenance.replay_log import KeptJournals, ReplayLog
from weightcast.publisher.publish.anchors import write_weights
from weightcast.publisher.publish.commit import drop_attempt, new_parts_dir
from weightcast.shared.base.elements import Chunk, Part, Words, grid
from weightcast.shared.base.errors import DamagedFile, Refused, WeightcastError
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.chain import Problem, check_files
from weightcast.shared.channel.channel import Channel, require_named
from weightcast.shared.channel.claims import Claim
from weightcast.shared.channel.delta_writer import ChunkStep, ShardWriter, open_shard_writer
from weightcast.shared.channel.faults import faults, highest_sound, of_channel, unannounced
from weightcast.shared.channel.index import (
    CARRIED,
    INDEX_LIMIT,
    INDEX_NAME,
    FileRecord,
    Index,
    parse_index,
)
from weightcast.shared.channel.layout import Layout, read_pointer, version_name, write_pointer
from weightcast.shared.channel.run_files import (
    BASE_LIMIT,
    CHANNEL_FILE_LIMIT,
    Base,
    parse_base,
    parse_channel_file,
    read_channel_file,
)
from weightcast.shared.channel.signing import Trust, signature_path
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, LocalPaths
from weightcast.shared.checkpoint.state.side_files import SideFiles
from weightcast.shared.checkpoint.state.state import Position
from weightcast.shared.checkpoint.verify.hashing import Credit
from weightcast.shared.codec.changes import compare
from weightcast.shared.daemon.backoff import Due
from weightcast.shared.digest.checksums import span_sums
from weightcast.shared.files import durable
from weightcast.shared.files.paths import exists, is_directory
from weightcast.shared.files.strict_json import parse_object

WriteAnchor = Callable[[], int | None]
"""writes an anchor of the newest version; returns its number, None where one exists"""
_BACKUP = "restore channel.json from a backup of the channel; without one, make a new channel"
_MOVED = ("anchor", "skip", "stray", "report")


@dataclass
class Repairs:
    """`left`: what is still wrong afterwards; `notes`: what is nobody's fault."""

    done: list[str] = field(default_factory=list)
    left: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def is_sound(directory: Path, advance: Advance | None = None, trust: Trust | None = None) -> bool:
    """Whether nothing is to be repaired. Reads the whole channel. Raises Refused where there is none."""
    if faults(directory, advance, trust):
        return False
    require_named(directory)
    return True


def repair(
    directory: Path,
    held: Claim,
    local: Path | None,
    write_anchor: WriteAnchor,
    *,
    advance: Advance | None = None,
    trust: Trust | None = None,
) -> Repairs:
    """Repairs the channel that `held` claims. `local`: the publisher's own local checkpoint, for what only
    its bytes can restore. `write_anchor`: writes full weights of the newest version from it.

    Raises Refused for another tool's channel and where `held` is outdated."""
    repairs = Repairs()
    if local is not None:
        _restore_channel_file(directory, local, held, repairs)
        _restore_base(directory, local, repairs)
        _make_again(directory, local, held, repairs)
    channel = Channel.open(directory, trust)
    if channel.foreign:
        raise Refused(f"{directory} belongs to another tool", remedy="repair it with that tool")
    if _restore_pointer(channel, held, repairs, advance) and local is not None:
        # only now it is known which versions must be there
        _make_again(directory, local, held, repairs)
    _move_away(channel, held, repairs, advance)
    if local is not None:
        _write_anchor(directory, local, repairs, write_anchor)
    repairs.left = faults(directory, advance, trust)
    repairs.notes += [
        f"version {version} is committed but not announced: start its publisher to announce it"
        for version in unannounced(Channel.open(directory))
    ]
    return repairs


def keep_channel_file(directory: Path, local: Path) -> None:
    """Copies channel.json to the publisher's local state: no other file has the time, globs and aliases of
    the run. For a repair only, so errors of the disk are left to what needs the disk."""
    with suppress(WeightcastError, OSError):
        data = durable.read_file(Layout(directory).channel_json, CHANNEL_FILE_LIMIT)
        parse_channel_file(data)
        kept = LocalPaths(local).channel
        if not exists(kept) or durable.read_file(kept, CHANNEL_FILE_LIMIT) != data:
            durable.replace(kept, data)


def _restore_channel_file(directory: Path, local: Path, held: Claim, repairs: Repairs) -> None:
    """Of this run alone: the local state names it. A newer format is left as it is."""
    layout, paths = Layout(directory), LocalPaths(local)
    try:
        read_channel_file(layout.channel_json)
        return
    except FileNotFoundError:
        if not exists(layout.base_json):
            return
    except DamagedFile:
        pass
    here, own = _base_in(layout.base_json), _base_in(paths.base)
    try:
        data = durable.read_file(paths.channel, CHANNEL_FILE_LIMIT)
        kept = parse_channel_file(data)
    except FileNotFoundError as error:
        raise DamagedFile(f"{layout.channel_json} is damaged; {local} has no copy", remedy=_BACKUP) from error
    if any(base is not None and base.run_id != kept.run_id for base in (here, own)):
        raise Refused(
            f"{paths.channel} is of run {kept.run_id}, the channel is not",
            remedy="give the --local of this channel's publisher",
        )
    held.check()
    durable.replace(layout.channel_json, data)
    repairs.done.append(f"channel.json restored from {local}")


def _restore_base(directory: Path, local: Path, repairs: Repairs) -> None:
    """A local checkpoint keeps the exact bytes. They must be those that the first version names."""
    path = Layout(directory).base_json
    here = _base_in(path)
    if here is not None and not _starts_elsewhere(directory, here.digest):
        return
    data = durable.read_file(LocalPaths(local).base, BASE_LIMIT)
    kept = parse_base(data)
    if kept.run_id != _run_of(directory) or _starts_elsewhere(directory, kept.digest):
        raise Refused(
            f"{LocalPaths(local).base} is not the base that the first version starts from",
            remedy="give the --local of this channel's publisher",
        )
    durable.replace(path, data)
    repairs.done.append(f"base.json restored from {local}")


def _base_in(path: Path) -> Base | None:
    try:
        return parse_base(durable.read_file(path, BASE_LIMIT))
    except (WeightcastError, FileNotFoundError):
        return None


def _run_of(directory: Path) -> str:
    return read_channel_file(Layout(directory).channel_json).run_id


def _starts_elsewhere(directory: Path, digest: str) -> bool:
    """Whether version 1 names another base. Its index cannot be checked further without one."""
    try:
        index = parse_object(durable.read_file(Layout(directory).index(1), INDEX_LIMIT), "index of version 1")
    except (WeightcastError, OSError):
        return False
    ours = index.get("weightcast")
    return isinstance(ours, dict) and ours.get("kind") == "delta" and ours.get("parent") != digest


def _make_again(directory: Path, local: Path, held: Claim, repairs: Repairs) -> None:
    """What the publisher's own bytes and journals still give."""
    layout = Layout(directory)
    try:
        file = read_channel_file(layout.channel_json)
        done, lost = remake(layout, local, held, range(max(1, file.horizon), _pointed(directory) + 1))
    except (WeightcastError, OSError) as error:
        repairs.notes.append(f"cannot restore anything from {local}: {error}")
        return
    repairs.done += done
    repairs.notes += lost


def _pointed(directory: Path) -> int:
    """0 where the pointer says nothing."""
    try:
        pointer = read_pointer(directory)
    except WeightcastError:
        return 0
    return 0 if pointer is None else pointer.version


def _restore_pointer(channel: Channel, held: Claim, repairs: Repairs, advance: Advance | None) -> bool:
    version = None if _points_somewhere(channel) else highest_sound(channel, advance)
    if version is None:
        return False
    held.check()
    write_pointer(channel.directory, version)
    repairs.done.append(f"latest restored to version {version}, the newest intact one")
    return True


def _points_somewhere(channel: Channel) -> bool:
    try:
        pointer = read_pointer(channel.directory)
    except WeightcastError:
        return False
    return pointer is not None and is_directory(channel.layout.version_dir(pointer.version))


def _move_away(channel: Channel, held: Claim, repairs: Repairs, advance: Advance | None) -> None:
    moved: set[str] = set()
    for problem in of_channel(channel, advance):
        if problem.unread:
            continue
        if problem.part == "claim":
            wanted = Path(problem.directory).stem.isdigit() and int(Path(problem.directory).stem) < held.epoch
        else:
            wanted = problem.part in _MOVED
        if wanted and problem.directory and problem.directory not in moved:
            held.check()
            moved.add(problem.directory)
            _to_trash(channel.layout, Path(problem.directory), repairs)


def _to_trash(layout: Layout, path: Path, repairs: Repairs) -> None:
    if put_away(layout, path):
        repairs.done.append(f"{path.relative_to(layout.channel)} moved to .trash")


def _write_anchor(directory: Path, local: Path, repairs: Repairs, write_anchor: WriteAnchor) -> None:
    """Full weights of the newest version lead hosts past lost deltas."""
    lost = [problem for problem in faults(directory) if problem.part in ("version", "link")]
    if not lost or not any("until an anchor" in problem.meaning for problem in lost):
        return
    try:
        version = write_anchor()
        if version is not None:
            repairs.done.append(f"anchor of version {version} written from {local}")
    except (WeightcastError, OSError) as error:
        repairs.notes.append(f"cannot write an anchor from {local}: {error}")


@dataclass(frozen=True)
class Remake:
    """Of one channel, under a claim. `there`: versions that must be in it; others may be gone on purpose, or
    were never announced."""

    layout: Layout
    replay_log: ReplayLog
    journals: KeptJournals
    claim: Claim
    there: range
    only: int | None = None
    lost: list[str] = field(default_factory=list)
    """what could not be made, and why"""

    def versions(self) -> Iterator[str]:
        """Makes what can be made again, version by version; says what was."""
        for version, position in sorted(self.replay_log.positions().items()):
            if self.only not in (None, version):
                continue
            if version in self.there or (version > 0 and is_directory(self.layout.version_dir(version))):
                yield from self._version(position)

    def _version(self, position: Position) -> Iterator[str]:
        directory = self.layout.version_dir(position.version)
        data, lost = self._index(directory, position)
        if data is None:
            return
        index = parse_index(data, self.replay_log.table)
        bad = [record for record in index.all_files if any(check_files(directory, [record]))]
        if not bad and not lost:
            return
        self.claim.check()
        directory.mkdir(exist_ok=True)
        try:
            yield from self._files(directory, index, bad)
        except (WeightcastError, OSError) as error:
            self.lost.append(f"version {index.version} cannot be restored: {error}")
            return
        if lost:
            self._restore_index(directory, position.version, data)
            yield f"{directory.name}/{INDEX_NAME} restored byte for byte"

    def _index(self, directory: Path, position: Position) -> tuple[bytes | None, bool]:
        """What was committed, and whether the channel lost it. None where nobody knows it."""
        with contextlib.suppress(WeightcastError, OSError):
            data = durable.read_file(directory / INDEX_NAME, INDEX_LIMIT)
            if blake3(data).hexdigest() == position.digest:
                return data, False
        return self.journals.index(position), True

    def _files(self, directory: Path, index: Index, bad: list[FileRecord]) -> Iterator[str]:
        if not bad:
            return
        scratch = new_parts_dir(self.layout, index.version, self.claim.epoch)
        try:
            for name in sorted(self._made(scratch, index, bad)):
                self.claim.check()
                _put(self.layout, scratch / name, durable.make_within(directory, name))
                yield f"{directory.name}/{name} written again byte for byte"
        finally:
            drop_attempt(self.layout, scratch)

    def _made(self, scratch: Path, index: Index, bad: list[FileRecord]) -> list[str]:
        """Names of the files in `scratch` that are what the index says. Raises DamagedFile for one that is
        not."""
        wanted = {record.name: record for record in bad}
        for record in index.carried:
            kept = SideFiles(self.journals.paths).path(record)
            if kept is not None:
                durable.replace(
                    durable.make_within(scratch, f"{CARRIED}/{record.name}"), durable.pieces_of(kept)
                )
        if index.kind == "anchor":
            words = self.replay_log.words_at(index.version)
            write_weights(scratch, self.replay_log.table, words, self.replay_log.side_files)
        else:
            for part in index.parts:
                name = _shard_of(index, part)
                if name in wanted:
                    _write_part(scratch / name, self.replay_log, index, part)
        for name, record in wanted.items():
            if any(check_files(scratch, [record])):
                raise DamagedFile(
                    f"{version_name(index.version)}/{name} differs from the committed file",
                    remedy="repair with the release that wrote it and its compression library",
                )
        return list(wanted)

    def _restore_index(self, directory: Path, version: int, data: bytes) -> None:
        path, signature = directory / INDEX_NAME, self.journals.signature(version)
        put_link_away(self.layout, path)
        if signature is not None:
            durable.replace(signature_path(path), signature)
        durable.replace(path, data)
        durable.sync_directory(self.layout.channel)


def _shard_of(index: Index, part: Part) -> str:
    """The file that a part's chunks lie in: each part has one."""
    return next((record.file for record in index.chunks if record.key.part == part.number), "")


def _write_part(path: Path, log: ReplayLog, index: Index, part: Part) -> None:
    """As it was published: the words of both versions, encoded once more."""
    if index.encoding is None:
        raise DamagedFile(f"version {index.version} has no encoding")
    # a rank knows of one part, its own
    part = Part(0, part.segments)
    count = sum(1 for _ in grid(log.table, part))
    writer = open_shard_writer(index.encoding, path, log.table, count)
    try:
        for chunk in grid(log.table, part):
            new = log.chunk_at(chunk, index.version)
            old = new.copy()
            log.undo_chunk(chunk, old, index.version, index.base_version)
            _append(writer, chunk, old, new)
        writer.close()
    except BaseException:
        writer.abandon()
        raise


def _append(writer: ShardWriter, chunk: Chunk, old: Words, new: Words) -> None:
    changes = compare(old, new)
    if len(changes):
        prepared = writer.prepare(chunk, old, lambda: new, changes)
        writer.append(chunk, prepared, lambda: new, ChunkStep(changes, span_sums(chunk, old, changes)))
    else:
        writer.append(chunk, b"", lambda: new, None)


def _put(layout: Layout, made: Path, target: Path) -> None:
    put_link_away(layout, target)
    made.rename(target)
    durable.sync_directory(target.parent)


def remake(
    layout: Layout, local: Path, claim: Claim, there: range, *, only: int | None = None
) -> tuple[list[str], list[str]]:
    """What was made, and what could not be. `only`: the one version to look at. Raises RetryLater and
    NeedsReseed when the local checkpoint cannot be read now."""
    with ReplayLog(local) as log:
        run = Remake(layout, log, KeptJournals(LocalPaths(local)), claim, there, only)
        return list(run.versions()), run.lost


_ROUND_SECONDS = 30.0
"""from the beginning of one round to the next, at least"""


class ChannelCheck:
    """Compares files of versions with their indexes, newest version first, round after round. Used by the
    publishing thread. `rate`: bytes per second, at most; 0 reads nothing."""

    def __init__(self, rate: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._credit, self._round_due = Credit(rate, clock), Due(_ROUND_SECONDS, clock)
        self._round: Iterator[int | None] | None = None
        self._given_up: set[int] = set()

    def turn(self, layout: Layout, local: LocalCheckpoint) -> int | None:
        """Reads what the rate allows since the last turn. Returns a version with a damaged or lost file."""
        self._credit.earn()
        if self._round is None and self._credit.left > 0 and self._round_due.take():
            self._round = self._files(layout, local)
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

    def _files(self, layout: Layout, local: LocalCheckpoint) -> Iterator[int | None]:
        """After each file that was read: its version where the file is damaged or lost, else None."""
        history = KeptJournals(local.paths)
        for version, kept in history.back_from(local.state.position).items():
            data = None if version in self._given_up else history.index(kept.step.target)
            if data is None:
                continue
            directory = layout.version_dir(version)
            yield version if self._has_other_index(layout, version, data) else None
            with suppress(WeightcastError):
                for record in parse_index(data, local.table).all_files:
                    if not is_directory(directory):
                        break  # pruned meanwhile
                    self._credit.left -= record.size
                    flaws = check_files(directory, [record])
                    yield version if any(not flaw.unread for flaw in flaws) else None

    def _has_other_index(self, layout: Layout, version: int, expected: bytes) -> bool:
        """False for an index that cannot be read now, and for a version that was pruned."""
        self._credit.left -= len(expected)
        try:
            return durable.read_file(layout.version_dir(version) / INDEX_NAME, INDEX_LIMIT) != expected
        except FileNotFoundError:
            return version >= read_channel_file(layout.channel_json).horizon
        except (WeightcastError, OSError):
            return False

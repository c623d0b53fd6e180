"""Looking at a watched directory, and removing from it what was published: IO without rules."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from errno import ELOOP, ENOENT
from pathlib import Path

from blake3 import blake3

from weightcast.publisher.daemon.sources.inbox import (
    Candidate,
    FileMark,
    Marks,
    holds_weights,
    is_of_a_checkpoint,
    is_temporary,
)
from weightcast.publisher.daemon.sources.layouts import ROOT, Unpublished, parents_of, save_of, step_of
from weightcast.shared.base.errors import RetryLater, WeightcastError
from weightcast.shared.checkpoint.verify.seed import ReadCheckpoint
from weightcast.shared.daemon.loop import failure_of
from weightcast.shared.files import durable
from weightcast.shared.files.hf_checkpoint import (
    ADAPTER_CONFIG,
    ADAPTER_MODEL,
    first_hole,
    is_other_format,
    open_checkpoint,
)
from weightcast.shared.files.paths import exists, is_plain, printable

OURS = ".weightcast-"
"""names of ours in the watched directory begin so"""
_READ_WHOLE = 64 << 20
_BLOCK, _BLOCKS = 16 << 10, 256
"""bytes of a block of a larger checkpoint's sample, and how many"""
_MOST_ENTRIES = 20_000
"""files and directories in one look"""
_DEPTH = 12
"""directories within directories that are looked into"""
_ONE_CLOCK = 0.5
"""seconds"""
_MODEL_FILES = ("config", "generation_config", "tokenizer", "special_tokens_map", "chat_template", "adapter_")
_NAME = "rename it if it is a checkpoint: printable characters, 255 at most"
_TOO_MANY = "watch a directory that contains only checkpoints, or give --watch-pattern"
_READABLE = "let the publisher's user read it, or move it out of the watched directory"

_Problems = dict[str, Unpublished]
"""directories that could not be read, by name"""


@dataclass(frozen=True)
class Observation:
    """`unknown`: of directories whose files are not known; `names`: of all that are there; `unreadable`:
    which of them could not be looked into."""

    unknown: tuple[Candidate, ...]
    names: frozenset[str]
    unreadable: tuple[Unpublished, ...] = ()


@dataclass
class _Directory:
    """`name`: relative to the watched directory, as those of `inner` and `links` (to directories)."""

    name: str
    files: list[str] = field(default_factory=list)
    inner: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)

    @property
    def temporary(self) -> bool:
        return self.name != ROOT and any(map(is_temporary, self.name.split("/")))

    @property
    def has_weights(self) -> bool:
        """Full ones."""
        return any(name != ADAPTER_MODEL and holds_weights(name) for name in self.files)

    @property
    def has_adapter(self) -> bool:
        return ADAPTER_MODEL in self.files

    @property
    def rank(self) -> int:
        """What its files say of a checkpoint: 3 for weights in another format, 2 for a configuration, 1 for
        something else, 0 for nothing."""
        if any(map(is_other_format, self.files)):
            return 3
        if self.name == ROOT or not self.files:
            return 0
        return 2 if any(map(is_of_a_checkpoint, self.files)) else int("/" not in self.name)


def look(
    watch: Path,
    marker: str | None,
    is_known: Callable[[str, Marks], bool],
    has_arrived: Callable[[str, Marks], bool],
    is_left: Callable[[str], bool] = lambda name: False,
    own: Collection[str] = (),
    is_adapter: Callable[[str], bool] | None = None,
) -> Observation:
    """Reads the headers of unknown directories only. `has_arrived`: whether that was seen to be renamed into
    place; `is_left`: whether that is never published; `own`: real paths of our own directories; `is_adapter`:
    which directories with an adapter are looked at, and nothing else; None: full weights are.
    Raises RetryLater when `watch` is not there."""
    tree, problems = _walk(watch, own)
    adapters = {name for name, each in tree.items() if each.has_adapter}
    if is_adapter is None:
        tree = {name: each for name, each in tree.items() if not each.has_adapter or each.has_weights}
    else:
        tree = {name: each for name, each in tree.items() if each.has_adapter and is_adapter(name)}
        problems = {}
    unknown = []
    for name in _worth_a_look(tree, adapters) if is_adapter is None else sorted(tree):
        is_checkpoint = any(map(is_of_a_checkpoint, tree[name].files))
        if is_checkpoint and not tree[name].temporary and is_left(name):
            continue
        try:
            files = marks_of(watch, name, marker)
            # Weights without a file are links that lead nowhere.
            if (files or tree[name].has_weights) and not is_known(name, files):
                if tree[name].temporary:
                    unknown.append(Candidate(name, files, temporary=True))
                else:
                    arrived, adapter = has_arrived(name, files), is_adapter is not None
                    unknown.append(observe_candidate(watch, name, files, marker, arrived, adapter))
        except FileNotFoundError:
            continue  # removed meanwhile
        except OSError as error:
            # An unreadable checkpoint must not keep others from being published.
            problems[name] = Unpublished(name, failure_of(error).message, _READABLE)
    nothing = frozenset() if ROOT in tree and tree[ROOT].has_weights else frozenset({ROOT})
    return Observation(tuple(unknown), frozenset({*tree, *problems}) - nothing, tuple(problems.values()))


def adapters_in(watch: Path, own: Collection[str]) -> list[str]:
    """Names of the directories with an adapter. Raises as `look`."""
    return sorted(name for name, each in _walk(watch, own)[0].items() if each.has_adapter)


def _walk(watch: Path, own: Collection[str]) -> tuple[dict[str, _Directory], _Problems]:
    """All directories by name, and what could not be read. Links are followed to directories elsewhere, and
    not below these."""
    found: dict[str, _Directory] = {}
    problems: _Problems = {}
    level, links, entries = [ROOT], list[str](), 0
    for depth in range(_DEPTH + 1):
        scanned = [each for name in level if (each := _scanned(watch, name, own, problems)) is not None]
        found |= {each.name: each for each in scanned}
        links += [link for each in scanned for link in each.links]
        level = [name for each in scanned for name in each.inner]
        entries += sum(len(each.files) + len(each.inner) for each in scanned)
        if depth and level and entries > _MOST_ENTRIES:
            reason = f"more than {_MOST_ENTRIES:,} files: nested directories were left out"
            problems[ROOT] = Unpublished(ROOT, reason, _TOO_MANY)
            break
    for name in links:
        target = os.path.relpath(os.path.realpath(watch / name), os.path.realpath(watch))
        if target not in found or found[target].temporary:
            linked = _scanned(watch, name, own, problems)
            found |= {} if linked is None else {name: linked}
    return found, problems


def _scanned(watch: Path, name: str, own: Collection[str], problems: _Problems) -> _Directory | None:
    """None where it is not there, is a channel, a local checkpoint or another directory of weightcast's, or
    where `problems` says why it could not be read."""
    found = _Directory(name)
    try:
        with os.scandir(watch / name) as scan:
            for entry in sorted(scan, key=lambda entry: entry.name):
                _sort(found, entry, problems)
    except (FileNotFoundError, NotADirectoryError) as error:
        if name == ROOT:
            raise RetryLater(f"{watch} is not a directory", remedy="mount it, or correct --watch") from error
        return None
    except OSError as error:
        if name == ROOT:
            raise
        problems[name] = Unpublished(name, failure_of(error).message, _READABLE)
        return None
    ours = f"{name}/.weightcast" in found.inner or "channel.json" in found.files
    return None if name != ROOT and (ours or os.path.realpath(watch / name) in own) else found


def _sort(found: _Directory, entry: os.DirEntry[str], problems: _Problems) -> None:
    try:
        kind = found.inner if entry.is_dir(follow_symlinks=False) else found.files
        if kind is found.files and entry.is_dir(follow_symlinks=True):
            kind = found.links
    except OSError:
        kind = found.links  # scanned later, which tells why it fails
    if kind is not found.files and not (is_plain(entry.name) and len(entry.name) <= 255):
        name = printable(entry.name)
        problems[name] = Unpublished(name, "its name has characters that are not allowed", _NAME)
    elif not entry.name.startswith(OURS):
        kind.append(entry.name if kind is found.files or found.name == ROOT else f"{found.name}/{entry.name}")


def _worth_a_look(tree: Mapping[str, _Directory], adapters: Collection[str]) -> list[str]:
    """Directories with weights, and one directory of each save that has none. `adapters`: what is around
    them, unless it has weights in another format, and what is in them is theirs."""
    whole = {name for name, each in tree.items() if each.has_weights}
    saves = {save_of(name) for name in whole if step_of(name) is not None}
    above = {parent for name in whole for parent in parents_of(name)}
    around = {parent for name in adapters for parent in parents_of(name)}
    others: dict[str, _Directory] = {}
    for name, each in tree.items():
        of_a_checkpoint = name in above or (name in around and each.rank < 3)
        of_a_checkpoint |= not {*whole, *saves, *adapters}.isdisjoint((name, *parents_of(name)))
        if each.rank and not each.temporary and not of_a_checkpoint:
            best = others.setdefault(save_of(name), each)
            others[save_of(name)] = each if each.rank > best.rank else best
    return sorted([*whole, *(each.name for each in others.values())])


def marks_of(watch: Path, name: str, marker: str | None = None) -> Marks:
    """`marks` of a checkpoint. Of the watched directory itself those of a model: it may hold logs, too."""
    found = marks(watch / name)
    if name != ROOT:
        return found
    return frozenset(
        mark
        for mark in found
        if holds_weights(mark.name)
        or is_other_format(mark.name)
        or mark.name.startswith(_MODEL_FILES)
        or mark.name == marker
    )


def marks(directory: Path) -> Marks:
    """Of all regular files in it that are not hidden, through links. Raises FileNotFoundError."""
    found = all_files(directory)
    return frozenset(mark for mark in found if is_plain(mark.name) and not mark.name.startswith("."))


def all_files(directory: Path) -> Marks:
    found = set()
    with os.scandir(directory) as scan:
        for entry in scan:
            try:
                # Not entry.stat(): that may answer from what the listing knew.
                at = os.stat(entry.path)
            except OSError as error:
                if error.errno in (ENOENT, ELOOP):
                    continue
                raise
            if stat.S_ISREG(at.st_mode):
                found.add(FileMark(entry.name, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns))
    return frozenset(found)


def observe_candidate(
    watch: Path, name: str, files: Marks, marker: str | None, arrived: bool, adapter: bool = False
) -> Candidate:
    """`files`: the marks taken before; `adapter`: of the adapter in it. Raises OSError where it cannot be
    read."""
    directory = watch / name
    found = None if marker is None else _marker_after(watch, name, files, marker)
    finished = found is not None if marker is not None else arrived or was_moved_in(watch, name)
    try:
        checkpoint = open_checkpoint(directory, follow_links=True, adapter=adapter)
        if adapter and all(mark.name != ADAPTER_CONFIG for mark in files):
            raise RetryLater(f"{directory} has no {ADAPTER_CONFIG}", remedy="save it with peft")
    except WeightcastError as error:
        return Candidate(name, files, finished=finished, problem=failure_of(error))
    index = () if checkpoint.index_file is None else (checkpoint.index_file,)
    names = {path.name for path in (*checkpoint.weight_files, *index)}
    if adapter:
        names.add(ADAPTER_CONFIG)
    weights = frozenset(mark for mark in files if mark.name in names)
    if len(weights) != len(names):
        raise FileNotFoundError(f"{directory} grew while it was looked at")
    signs = [directory / each for each in names] + ([] if found is None else [found])
    hidden = frozenset(m for m in all_files(directory) if is_plain(m.name) and m.name.startswith("."))
    if finished and name != ROOT:
        signs += [watch / around for around in (name, *parents_of(name)) if around.startswith(save_of(name))]
    # ctime, since copies keep the mtime of their originals
    completed_ns = max((sign.lstat().st_ctime_ns for sign in signs if exists(sign)), default=0)
    hole, table = "" if finished else first_hole(checkpoint), checkpoint.table
    return Candidate(name, files, weights, completed_ns, finished, hidden=hidden, table=table, hole=hole)


def _marker_after(watch: Path, name: str, files: Marks, marker: str) -> Path | None:
    """The marker in it or in a directory around it, if it was put there after all weights: one of the save
    before says nothing of this one. Raises FileNotFoundError."""
    weights = [watch / name / mark.name for mark in files if holds_weights(mark.name)]
    for around in (name, *parents_of(name)):
        at = watch / around / marker
        if exists(at) and all(_put_ns(path) <= _put_ns(at) for path in weights):
            return at
    return None


def _put_ns(path: Path) -> int:
    """When it was last changed or given its name: the link, or what it leads to."""
    return max(path.lstat().st_ctime_ns, path.stat().st_ctime_ns)


def was_moved_in(watch: Path, name: str) -> bool:
    """Whether it, or a directory around it, got its name after the last file was made and written in it. A
    rename touches the ctime of what is renamed, making files in a directory its mtime too. False where one
    tick of the clock has both."""
    newest = 0
    for around in () if name == ROOT else (name, *parents_of(name)):
        at = (watch / around).stat()
        with os.scandir(watch / around) as scan:
            newest = max([newest, *(entry.stat(follow_symlinks=False).st_ctime_ns for entry in scan)])
        if at.st_ctime_ns > at.st_mtime_ns and at.st_ctime_ns >= newest:
            return True
    return False


def sample(directory: Path, adapter: bool = False) -> str:
    """Digest of a checkpoint's tensors in whatever files: of all their bytes, or of blocks spread evenly over
    them where they are many. Raises WeightcastError and OSError where it cannot be read."""
    checkpoint = open_checkpoint(directory, follow_links=True, adapter=adapter)
    table, digest, at = checkpoint.table, blake3(), 0
    with ReadCheckpoint(checkpoint) as read:
        for number in sorted(range(len(table)), key=lambda number: table[number].name):
            spec, place = table[number], checkpoint.places[number]
            digest.update(f"{spec.name}\0{spec.dtype}{list(spec.shape)}".encode())
            for start, nbytes in _blocks(spec.nbytes, at, table.nbytes):
                digest.update(read.bytes_at(place._replace(offset=place.offset + start, nbytes=nbytes)).data)
            at += spec.nbytes
    return digest.hexdigest()


def _blocks(nbytes: int, at: int, total: int) -> Iterator[tuple[int, int]]:
    """First byte and size of what is read of a tensor that begins at byte `at` of `total`."""
    if total <= _READ_WHOLE:
        yield 0, nbytes
        return
    stride = total // _BLOCKS
    for start in range(-at % stride, nbytes, stride):
        yield start, min(_BLOCK, nbytes - start)


def clock_offset(watch: Path) -> float:
    """Seconds by which the watched file system's clock is ahead of this machine's; 0.0 where that is
    unknown, or less than what clocks of one machine differ."""
    try:
        offset = durable.file_system_time(watch) - time.time()
    except OSError:
        return 0.0
    return offset if abs(offset) > _ONE_CLOCK else 0.0

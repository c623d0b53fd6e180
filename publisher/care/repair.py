"""Repair of a channel by its owner: fix what can be fixed, report what is lost.

Nothing is deleted at once: files that no host can use move to `.trash`. A file that is only unreadable now
stays where it is. Committed versions never change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from weightcast.publisher.care.prune import put_away
from weightcast.publisher.care.remake import remake
from weightcast.shared.channel.base import BASE_LIMIT, Base, parse_base
from weightcast.shared.channel.chain import Problem
from weightcast.shared.channel.channel_file import read_channel_file
from weightcast.shared.channel.claims import Claim
from weightcast.shared.channel.faults import faults, highest_sound, of_channel, unannounced
from weightcast.shared.channel.index import INDEX_LIMIT
from weightcast.shared.channel.layout import Layout
from weightcast.shared.channel.pointer import read_pointer, write_pointer
from weightcast.shared.channel.signing import Trust
from weightcast.shared.channel.store import Channel, require_named
from weightcast.shared.errors import Refused, WeightcastError
from weightcast.shared.files import durable
from weightcast.shared.files.entries import is_directory
from weightcast.shared.files.strict_json import parse_object
from weightcast.shared.local.local_checkpoint import LocalPaths
from weightcast.shared.progress import Advance

WriteAnchor = Callable[[], int | None]
"""writes an anchor of the newest version; returns its number, None where one exists"""
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
        _restore_base(directory, local, repairs)
        _make_again(directory, local, held, repairs)
    channel = Channel.open(directory, trust)
    if channel.foreign:
        raise Refused(f"{directory} is another tool's channel", remedy="repair it with that tool")
    if _restore_pointer(channel, held, repairs, advance) and local is not None:
        # only now it is known which versions must be there
        _make_again(directory, local, held, repairs)
    _move_away(channel, held, repairs, advance)
    if local is not None:
        _write_anchor(directory, local, repairs, write_anchor)
    repairs.left = faults(directory, advance, trust)
    repairs.notes += [
        f"version {version} is committed but not announced: its publisher announces it at its next start"
        for version in unannounced(Channel.open(directory))
    ]
    return repairs


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
    repairs.done.append(f"base.json is restored from {local}")


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
        repairs.notes.append(f"nothing can be made again from {local}: {error}")
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
    repairs.done.append(f"latest names version {version} again, the highest that is whole")
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
        repairs.done.append(f"{path.relative_to(layout.channel)} is moved to .trash")


def _write_anchor(directory: Path, local: Path, repairs: Repairs, write_anchor: WriteAnchor) -> None:
    """Full weights of the newest version lead hosts past lost deltas."""
    lost = [problem for problem in faults(directory) if problem.part in ("version", "link")]
    if not lost or not any("until an anchor" in problem.meaning for problem in lost):
        return
    try:
        version = write_anchor()
        if version is not None:
            repairs.done.append(f"an anchor of version {version} is written from {local}")
    except (WeightcastError, OSError) as error:
        repairs.notes.append(f"no anchor can be written from {local}: {error}")

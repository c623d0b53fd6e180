"""Repair of a channel: what can be brought right is, what is lost is said. Only under a claim.

Nothing is deleted at once: what no host can use is moved to `.trash`. What merely cannot be read now stays
where it is. Committed versions are never written again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from weightcast.publisher.care.prune import put_away
from weightcast.publisher.care.remake import remake
from weightcast.publisher.publisher import Publisher
from weightcast.shared.channel.base import BASE_LIMIT, Base, parse_base
from weightcast.shared.channel.chain import Problem
from weightcast.shared.channel.channel_file import parse_channel_file
from weightcast.shared.channel.claims import Claim, claim, this_process
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

_CHANNEL_LIMIT = 16 << 20
_MOVED = ("anchor", "skip", "stray", "report")


@dataclass
class Repairs:
    """`left`: what is still wrong afterwards; `notes`: what is nobody's fault."""

    done: list[str] = field(default_factory=list)
    left: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def repair_channel(
    directory: Path,
    local: Path | None = None,
    *,
    take_over: bool = False,
    patience: float = 60.0,
    advance: Advance | None = None,
    sign_key: Path | None = None,
    trusted_keys: Sequence[str | Path] = (),
) -> Repairs:
    """`local`: the publisher's own local checkpoint, for what only its bytes can restore. Raises Refused
    while a publisher lives, for a channel that another tool writes, and for what is none."""
    repairs, trust = Repairs(), Trust.load(trusted_keys)
    if not faults(directory, advance, trust):
        require_named(directory)
        return repairs
    with _claimed(directory, take_over, patience) as held:
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
        _write_anchor(directory, local, repairs, sign_key, trusted_keys)
    repairs.left = faults(directory, advance, trust)
    repairs.notes += [
        f"version {version} is committed and not announced: that is its publisher's matter, at its next start"
        for version in unannounced(Channel.open(directory))
    ]
    return repairs


@contextmanager
def _claimed(directory: Path, take_over: bool, patience: float) -> Iterator[Claim]:
    held = claim(directory, this_process(), take_over=take_over, patience=patience)
    try:
        yield held
    finally:
        held.release()


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
    return parse_channel_file(durable.read_file(Layout(directory).channel_json, _CHANNEL_LIMIT)).run_id


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
        file = parse_channel_file(durable.read_file(layout.channel_json, _CHANNEL_LIMIT))
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


def _write_anchor(
    directory: Path,
    local: Path,
    repairs: Repairs,
    sign_key: Path | None,
    trusted_keys: Sequence[str | Path],
) -> None:
    """Over steps that are lost, hosts get along with full weights of the newest version."""
    lost = [problem for problem in faults(directory) if problem.part in ("version", "link")]
    if not lost or not any("until an anchor" in problem.meaning for problem in lost):
        return
    try:
        with Publisher.open(
            directory, local=local, sign_key=sign_key, trusted_keys=trusted_keys
        ) as publisher:
            if publisher.write_anchor():
                repairs.done.append(f"an anchor of version {publisher.version} is written from {local}")
    except (WeightcastError, OSError) as error:
        repairs.notes.append(f"no anchor can be written from {local}: {error}")

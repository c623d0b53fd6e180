"""Takes versions out of a channel: horizon first, then out of sight, and deleted after a grace period.

Only the channel's owner does this. A reader that was on its way to a version that goes plans another way.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from weightcast.publisher.maintenance.retention import HeldVersion, Situation, Verdict
from weightcast.publisher.publish.commit import PRUNED, PUT_AWAY
from weightcast.shared.base.errors import RetryLater, WeightcastError
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.channel import pins
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.claims import Claim
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.index import INDEX_NAME, Index
from weightcast.shared.channel.layout import Layout, Pointer
from weightcast.shared.channel.reports import Report, forgotten
from weightcast.shared.channel.run_files import write_channel_file
from weightcast.shared.channel.store import Address, StoreError
from weightcast.shared.checkpoint.state.state import Boot
from weightcast.shared.files import durable
from weightcast.shared.files.paths import is_directory, is_own_directory
from weightcast.shared.files.strict_json import parse_object

GRACE_SECONDS = 3600.0
_NOTE, _NOTE_LIMIT = "pruned.json", 4096
_PRUNED = re.compile(r"weight_v\d{6,15}-(\d{1,15})-[0-9a-f]{8}\.pruned", re.ASCII)


def situation(channel: Channel, pointer: Pointer, hosts: Collection[int], now: float) -> Situation:
    """Raises DamagedFile for a tag that cannot be read: nothing is pruned then."""
    full = channel.require_ours()[1].table.nbytes
    versions = {}
    for version, shown in channel.shown(pointer).items():
        with contextlib.suppress(FileNotFoundError):
            created = (channel.layout.index(version)).stat().st_mtime
            whole = shown.nbytes >= full and _is_whole(channel, pointer, version)
            versions[version] = HeldVersion(shown, created, whole)
    wanted = {*pins.kept(channel.directory), *pins.tags(channel.directory).values()}
    return Situation(pointer.version, versions, now, hosts, wanted)


def _is_whole(channel: Channel, pointer: Pointer, version: int) -> bool:
    index = channel.index(pointer, version, channel.require_ours()[1].table)
    return isinstance(index, Index) and index.kind == "anchor"


def prune(channel: Channel, verdict: Verdict, claim: Claim, now: float | None = None) -> None:
    """Carries out what `decide` says."""
    layout, (file, _) = channel.layout, channel.require_ours()
    if not verdict.removals:
        return
    claim.check()
    if verdict.horizon > file.horizon:
        raised = replace(file, horizon=verdict.horizon)
        durable.replace(layout.channel_json, write_channel_file(raised))
        failpoint("prune.horizon", layout.channel_json)
    layout.trash.mkdir(exist_ok=True)
    for removal in verdict.removals:
        claim.check()
        _bury(layout, layout.version_dir(removal.version), time.time() if now is None else now)
    durable.sync_directory(layout.channel)


def _bury(layout: Layout, directory: Path, now: float) -> None:
    grave = layout.trash / f"{directory.name}-{int(now)}-{secrets.token_hex(4)}{PRUNED}"
    with contextlib.suppress(FileNotFoundError):
        directory.rename(grave)
        failpoint("prune.moved", directory)
        _seconds_in(grave, Uptime.here())


def put_away(layout: Layout, path: Path) -> bool:
    """Moves what is of no use into the trash, in a directory of its own: for the grace period it can be had
    back. False when it is not there."""
    grave = _new_grave(layout, path)
    try:
        path.rename(grave / path.name)
    except OSError as error:
        grave.rmdir()
        if isinstance(error, FileNotFoundError):
            return False
        raise
    durable.sync_directory(path.parent)
    _seconds_in(grave, Uptime.here())
    return True


def put_link_away(layout: Layout, path: Path) -> None:
    """As `put_away` of a file that is about to be replaced: readers never see nothing where something was."""
    grave = _new_grave(layout, path)
    try:
        os.link(path, grave / path.name, follow_symlinks=False)
    except OSError:
        grave.rmdir()
    else:
        _seconds_in(grave, Uptime.here())


def _new_grave(layout: Layout, path: Path) -> Path:
    grave = layout.trash / f"{path.name}-{secrets.token_hex(4)}{PUT_AWAY}"
    layout.trash.mkdir(exist_ok=True)
    grave.mkdir()
    return grave


@dataclass(frozen=True)
class Uptime:
    """A clock that nobody sets: seconds since a boot, suspended ones included. `boot`: empty where the system
    does not tell."""

    boot: str
    seconds: float

    @classmethod
    def here(cls) -> Uptime:
        return cls(Boot.here().boot_id, time.clock_gettime(time.CLOCK_BOOTTIME))


def _noted(grave: Path, uptime: Uptime) -> float | None:
    """How long something has been in the trash; None where that is not known here: after a boot, or on
    another machine."""
    note = grave / _NOTE
    try:
        facts = parse_object(durable.read_file(note, _NOTE_LIMIT), str(note))
        boot, since = facts["boot"], facts["seconds"]
    except (WeightcastError, FileNotFoundError, KeyError):
        return None
    if boot == uptime.boot and isinstance(since, int | float) and 0 <= since <= uptime.seconds:
        return uptime.seconds - since
    return None


def _seconds_in(grave: Path, uptime: Uptime) -> float:
    """As `_noted`; counted anew where it is not known, from when the note of it can be written."""
    seconds = _noted(grave, uptime)
    if seconds is None:
        # a full disk is no reason to leave the rest as it is
        with contextlib.suppress(OSError):
            (grave / _NOTE).write_text(json.dumps({"boot": uptime.boot, "seconds": uptime.seconds}))
    return seconds or 0.0


def is_due(layout: Layout, grace_seconds: float = GRACE_SECONDS) -> bool:
    """Whether something there may be deleted. Writes nothing."""
    uptime = Uptime.here()
    known = (_noted(entry, uptime) for entry in _resting(layout))
    return any(seconds is not None and seconds >= grace_seconds for seconds in known)


def _resting(layout: Layout) -> Iterator[Path]:
    """What was pruned or put away."""
    for entry in layout.trash.iterdir() if is_directory(layout.trash) else ():
        named = _PRUNED.fullmatch(entry.name) is not None or entry.name.endswith(PUT_AWAY)
        if named and is_own_directory(entry):
            yield entry


def forget_hosts(channel: Address, claim: Claim, now: float) -> None:
    """Deletes reports of hosts that are no more. One that comes back writes its report again. Raises OSError
    where they cannot be listed."""
    store = open_store(channel)
    old = forgotten(store, now)
    if old:
        claim.check()
    for key in old:
        # a file of another user in a directory with the sticky bit cannot be deleted; it does no harm
        with contextlib.suppress(StoreError):
            store.delete(key)


def empty_trash(layout: Layout, grace_seconds: float = GRACE_SECONDS, uptime: Uptime | None = None) -> int:
    """Deletes what was pruned or put away longer ago than that; how many of these. The time of day is not
    asked: it may jump. Raises RetryLater for what cannot be deleted, after the rest."""
    uptime = Uptime.here() if uptime is None else uptime
    deleted, kept = 0, ""
    for entry in _resting(layout):
        if _seconds_in(entry, uptime) < grace_seconds:
            continue
        try:
            # the index goes first: what is half deleted is no version
            (entry / INDEX_NAME).unlink(missing_ok=True)
            failpoint("prune.emptying", entry)
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(entry)
                deleted += 1
            failpoint("prune.deleted", entry)
        except OSError as error:
            kept = f"cannot delete {entry}: {error.strerror}"
    if kept:
        raise RetryLater(kept, remedy="delete it by hand")
    return deleted


ACTIVE_SECONDS = 600.0
"""since a report last changed here"""


class ActiveHosts:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[tuple[str, str], tuple[int, float]] = {}

    def versions(self, reports: Iterable[Report]) -> list[int]:
        """Versions that living hosts hold. A report that is met for the first time counts as changed."""
        now, before, self._seen = self._clock(), self._seen, {}
        found = []
        for report in reports:
            key = report.host, report.local
            counter, since = before.get(key, (report.counter, now))
            changed = now if counter != report.counter else since
            self._seen[key] = report.counter, changed
            if report.local_version is not None and now - changed < ACTIVE_SECONDS:
                found.append(report.local_version)
        return found

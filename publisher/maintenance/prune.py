"""Takes versions out of a channel: horizon first, then out of sight, and deleted after a grace period.

Only the channel's owner does this. A reader that was on its way to a version that goes plans another way.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from weightcast.publisher.maintenance.retention import GRACE_SECONDS, Retention, Situation, Verdict, decide
from weightcast.publisher.publish.commit import PRUNED, PUT_AWAY
from weightcast.shared.base.errors import RetryLater, WeightcastError
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.channel import pins
from weightcast.shared.channel.channel import Channel, Shown
from weightcast.shared.channel.claims import Claim
from weightcast.shared.channel.index import INDEX_NAME
from weightcast.shared.channel.layout import CHANNEL_JSON, Pointer, version_name
from weightcast.shared.channel.reports import Report, forgotten, read_reports
from weightcast.shared.channel.run_files import CHANNEL_FILE_LIMIT, parse_channel_file, write_channel_file
from weightcast.shared.channel.store import TRASH, NotFound, Store, StoreError
from weightcast.shared.checkpoint.local_checkpoint import LocalPaths
from weightcast.shared.checkpoint.state.state import Boot
from weightcast.shared.files import durable
from weightcast.shared.files.paths import exists
from weightcast.shared.files.strict_json import Members, parse_object, write_object

_NOTE, _NOTE_LIMIT = "pruned.json", 4096
_PRUNED = re.compile(r"weight_v\d{6,15}-(\d{1,15})-[0-9a-f]{8}\.pruned", re.ASCII)


def held_versions(channel: Channel, pointer: Pointer, above: int = 0) -> dict[int, Shown]:
    """The versions above `above` that are in the channel. One whose index cannot be read now counts as a
    delta."""
    table, found = channel.require_ours()[1].table, channel.shown(pointer, above=above)
    for version, shown in found.items():
        if shown.nbytes >= table.nbytes:
            with contextlib.suppress(WeightcastError):
                index = channel.own_index(version)
                found[version] = replace(shown, whole=index is not None and index.kind == "anchor")
    return found


def what_to_prune(channel: Channel, pointer: Pointer, hosts: ActiveHosts, retention: Retention) -> Verdict:
    """Raises DamagedFile for a tag that cannot be read: nothing is pruned then."""
    store, held = channel.store, held_versions(channel, pointer)
    wanted = {*pins.kept(store), *pins.tags(store).values()}
    living = hosts.versions(read_reports(store))
    return decide(Situation(pointer.version, held, time.time(), living, wanted), retention)


def prune(verdict: Verdict, claim: Claim, local: Path | None = None) -> None:
    """Carries out what `decide` says. `local`: the publisher's own local checkpoint, if it is here."""
    store = claim.store
    if verdict.removals and raise_horizon(claim, verdict.horizon):
        failpoint("prune.horizon", store.place(CHANNEL_JSON))
        if local is not None:
            keep_channel_file(store, local)
    for removal in verdict.removals:
        claim.check()
        name = version_name(removal.version)
        if not store.renames:
            store.discard(name)
            continue
        grave = f"{TRASH}/{name}-{int(time.time())}-{secrets.token_hex(4)}{PRUNED}"
        with contextlib.suppress(NotFound):
            # the last one makes all names durable
            store.move(name, grave, sync=removal is verdict.removals[-1])
            failpoint("prune.moved", store.place(name))
            _seconds_in(store.within(grave), Uptime.here())


def raise_horizon(claim: Claim, version: int) -> bool:
    """False where it is as high already."""
    file = parse_channel_file(claim.store.read(CHANNEL_JSON, CHANNEL_FILE_LIMIT))
    if version <= file.horizon:
        return False
    data = write_channel_file(replace(file, horizon=version))
    claim.store.replace(CHANNEL_JSON, data, allowed=claim.check)
    return True


def keep_channel_file(store: Store, local: Path) -> None:
    """Copies channel.json to the publisher's local state: no other file has the time, globs and aliases of
    the run. For a repair only, so errors of the disk are left to what needs the disk."""
    with contextlib.suppress(WeightcastError, OSError):
        data = store.read(CHANNEL_JSON, CHANNEL_FILE_LIMIT)
        parse_channel_file(data)
        kept = LocalPaths(local).channel
        if not exists(kept) or durable.read_file(kept, CHANNEL_FILE_LIMIT) != data:
            durable.replace(kept, data)


def put_away(store: Store, key: str) -> bool:
    """Moves what is of no use into the trash, in a directory of its own: for the grace period it can be had
    back. False when it is not there."""
    name, grave = _grave_of(key)
    try:
        store.move(key, f"{grave}/{name}", sync=True)
    except NotFound:
        return False
    _seconds_in(store.within(grave), Uptime.here())
    return True


def put_copy_away(store: Store, key: str) -> None:
    """As `put_away` of an object that is about to be replaced: readers never see nothing where something
    was."""
    name, grave = _grave_of(key)
    with contextlib.suppress(StoreError):
        store.copy(key, f"{grave}/{name}")
        _seconds_in(store.within(grave), Uptime.here())


def _grave_of(key: str) -> tuple[str, str]:
    name = key.rpartition("/")[2]
    return name, f"{TRASH}/{name}-{secrets.token_hex(4)}{PUT_AWAY}"


@dataclass(frozen=True)
class Uptime:
    """A clock that nobody sets: seconds since a boot, suspended ones included. `boot`: empty where the system
    does not tell."""

    boot: str
    seconds: float

    @classmethod
    def here(cls) -> Uptime:
        return cls(Boot.here().boot_id, time.clock_gettime(time.CLOCK_BOOTTIME))


def _noted(grave: Store, uptime: Uptime) -> float | None:
    """How long something has been in the trash; None where that is not known here: after a boot, or on
    another machine."""
    try:
        place = grave.place(_NOTE)
        since = Members(parse_object(grave.read(_NOTE, _NOTE_LIMIT), place), place).record(Uptime)
    except WeightcastError:
        return None
    is_known = since.boot == uptime.boot and 0 <= since.seconds <= uptime.seconds
    return uptime.seconds - since.seconds if is_known else None


def _seconds_in(grave: Store, uptime: Uptime) -> float:
    """As `_noted`; counted anew where it is not known, from when the note of it can be written."""
    seconds = _noted(grave, uptime)
    if seconds is None:
        # a full disk is no reason to leave the rest as it is
        with contextlib.suppress(StoreError):
            grave.replace(_NOTE, write_object(asdict(uptime)), sync=False)
    return seconds or 0.0


def is_due(store: Store, grace_seconds: float = GRACE_SECONDS) -> bool:
    """Whether something there may be deleted. Writes nothing."""
    uptime = Uptime.here()
    known = (_noted(store.within(grave), uptime) for grave in _resting(store))
    return any(seconds is not None and seconds >= grace_seconds for seconds in known)


def _resting(store: Store) -> Iterator[str]:
    """Keys of what was pruned or put away."""
    for entry in list(store.list(TRASH)):
        named = _PRUNED.fullmatch(entry.name) is not None or entry.name.endswith(PUT_AWAY)
        if named and entry.kind == "directory":
            yield f"{TRASH}/{entry.name}"


def empty_trash(store: Store, grace_seconds: float = GRACE_SECONDS, uptime: Uptime | None = None) -> int:
    """Deletes what was pruned or put away longer ago than that; how many of these. The time of day is not
    asked: it may jump. Raises RetryLater for what cannot be deleted, after the rest."""
    uptime = Uptime.here() if uptime is None else uptime
    deleted, kept = 0, ""
    for grave in _resting(store):
        if _seconds_in(store.within(grave), uptime) < grace_seconds:
            continue
        try:
            # the index goes first: what is half deleted is no version
            store.delete(f"{grave}/{INDEX_NAME}")
            failpoint("prune.emptying", store.place(grave))
            store.discard(grave)
            deleted += 1
            failpoint("prune.deleted", store.place(grave))
        except StoreError as error:
            kept = f"cannot delete {store.place(grave)}: {error.strerror}"
    if kept:
        raise RetryLater(kept, remedy="delete it by hand")
    return deleted


def forget_hosts(claim: Claim, now: float) -> None:
    """Deletes reports of hosts that are no more. One that comes back writes its report again. Raises
    StoreError where they cannot be listed."""
    old = forgotten(claim.store, now)
    if old:
        claim.check()
    for key in old:
        # a file of another user in a directory with the sticky bit cannot be deleted; it does no harm
        with contextlib.suppress(StoreError):
            claim.store.delete(key)


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

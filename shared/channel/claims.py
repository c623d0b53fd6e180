"""Claims: which publisher owns the channel. docs/FORMAT.md, Claims.

`publishers/<epoch>.json` is made by exclusive create; the highest epoch owns. An owner calls `Claim.check`
before each commit: nothing else keeps a former owner from writing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le, MaxLen

from weightcast.shared.base.errors import DamagedFile, Refused, WeightcastError
from weightcast.shared.channel.layout import PUBLISHERS, claim_key
from weightcast.shared.channel.run_files import FORMAT, check_format
from weightcast.shared.channel.store import AlreadyExists, NotFound, Store, read_if_there
from weightcast.shared.files.disk_errors import error_text
from weightcast.shared.files.strict_json import Members, parse_object, write_object
from weightcast.shared.files.system import BOOT_ID, system_text

_log = logging.getLogger("weightcast.claims")
PATIENCE_SECONDS = 60.0
_POLL_SECONDS = 1.0
_BEAT_SECONDS = 10.0
CLAIM_LIMIT = 64 << 10
_NAME = re.compile(r"([1-9]\d{0,14})\.json", re.ASCII)
_Text = Annotated[str, MaxLen(256)]


@dataclass(frozen=True)
class Claimant:
    """A publisher's process. Empty texts are unknown facts, and prove nothing."""

    host: _Text
    pid: Annotated[int, Ge(1), Le((1 << 31) - 1)]
    boot_id: _Text = ""
    pid_namespace: _Text = ""
    process_start: _Text = ""
    """clock ticks after boot, as text"""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def this_process() -> Claimant:
    return Claimant(
        socket.gethostname(),
        os.getpid(),
        system_text(BOOT_ID),
        _pid_namespace(),
        _process_start(os.getpid()),
    )


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _process_start(pid: int) -> str:
    """Empty where it cannot be read, and for a process that has ended but was not waited for."""
    # The command's name is in parentheses and may contain spaces and parentheses itself.
    fields = system_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in ("Z", "X") else ""


def process_began() -> float:
    """When this process began, as unix time, not earlier than it did; now, where the system does not tell."""
    ticks = _process_start(os.getpid())
    if not ticks.isdigit() or not int(ticks):
        return time.time()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - (int(ticks) + 1) / os.sysconf("SC_CLK_TCK")
    return time.time() - max(0.0, age)


@dataclass(frozen=True)
class ClaimRecord:
    """What a claim's file says."""

    claimant: Claimant
    claimed: float
    """unix time on the claimant's clock: information only"""
    counter: int = 0
    """raised by a living owner"""
    released: bool = False


def write_claim(record: ClaimRecord) -> bytes:
    facts = asdict(record)
    return write_object({"format": FORMAT, **facts.pop("claimant"), **facts})


def parse_claim(data: bytes, what: str) -> ClaimRecord:
    """Raises DamagedFile and UnknownFormat."""
    members = Members(parse_object(data, what), what)
    check_format(members, what)
    return members.record(ClaimRecord, claimant=members.record(Claimant))


def current_epoch(store: Store) -> int:
    """The highest claimed epoch, 0 when nobody ever claimed the channel."""
    matches = map(_NAME.fullmatch, store.names(PUBLISHERS))
    return max((int(match[1]) for match in matches if match is not None), default=0)


@dataclass
class Claim:
    """Ownership of a channel by this process, until somebody makes a higher epoch."""

    store: Store
    epoch: int
    record: ClaimRecord = field(repr=False)
    pointed: int = field(default=0, repr=False)
    """the highest version at which the pointer was seen under this claim"""
    on_pointer: Callable[[int], None] = field(default=lambda version: None, repr=False)
    """called with `pointed` whenever the pointer was seen or moved; may raise"""

    def check(self) -> None:
        """Raises Refused, naming the newer owner, when the channel has one."""
        newest = current_epoch(self.store)
        # a listing may come from a cache that an open goes past
        with contextlib.suppress(NotFound):
            self.store.read_range(claim_key(self.epoch + 1), 0, 1)
            newest = max(newest, self.epoch + 1)
        if newest > self.epoch:
            raise Refused(
                f"{self.store.place()} now belongs to {_owner(self.store, newest)}; this publisher's epoch "
                f"is {self.epoch}",
                remedy="stop one of the two",
            )

    def saw(self, version: int) -> None:
        """The pointer at this version."""
        self.pointed = max(self.pointed, version)
        self.on_pointer(self.pointed)

    def beat(self) -> None:
        """Shows that the owner lives to publishers that wait to take over."""
        self._write(replace(self.record, counter=self.record.counter + 1))

    def release(self) -> None:
        """Lets the next publisher in without a wait."""
        self._write(replace(self.record, released=True))

    def _write(self, record: ClaimRecord) -> None:
        # only over our own: where the mount is gone, nothing is written into the directory below it
        self.store.replace(claim_key(self.epoch), write_claim(record), expected=write_claim(self.record))
        self.record = record


_IGNORED: dict[str, str] = {}
"""by channel: what `Store.ignored` said when this process tried it"""


def require_fences(store: Store, *, unfenced: bool) -> None:
    """Claims keep publishers apart only where the store honours conditions of writes: tried once per process
    and channel. Raises Refused unless `unfenced` allows it."""
    place = store.place()
    ignored = _IGNORED[place] if place in _IGNORED else store.ignored()
    _IGNORED[place] = ignored
    lost = f"{place}: the store ignores {ignored}: two publishers would overwrite each other's versions"
    if ignored and not unfenced:
        raise Refused(lost, remedy="use another store; or give --unfenced and never run two publishers")
    if ignored:
        _log.warning("%s; --unfenced was given: never run two publishers", lost)


class OwnerAlive(Refused):
    """Another process owns the channel and is alive."""


def claim(
    store: Store,
    claimant: Claimant,
    *,
    take_over: bool,
    patience: float = PATIENCE_SECONDS,
    above: int = 0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Claim:
    """Makes the next epoch, higher than `above` (one known from before the channel was restored). A present
    owner gives way when it released the channel, when its process is known to be dead, when its file does not
    change for `patience` seconds of `clock`, or at once to `take_over`. Raises Refused, naming an owner that
    lives, and OSError."""
    epoch = current_epoch(store)
    if epoch and not take_over and not _is_over(store, epoch, claimant):
        first, deadline = _read(store, epoch), clock() + patience
        place, owner = store.place(), _owner(store, epoch)
        _log.warning("%s belongs to %s: waiting up to %g s for a sign of life", place, owner, patience)
        while clock() < deadline:
            sleep(min(_POLL_SECONDS, patience))
            if _read(store, epoch) != first:
                record = _record(store, epoch)
                if record is not None and record.claimant == claimant:
                    raise OwnerAlive(
                        f"this process has {place} open already (epoch {epoch})",
                        remedy="call close() of the earlier Publisher",
                    )
                raise OwnerAlive(
                    f"{place} belongs to {_owner(store, epoch)}, which is alive",
                    remedy="stop that publisher, or take the channel from it: --take-over, or in Python "
                    "PublisherOptions(take_over=True)",
                )
        _log.warning("no sign of life from %s: taking %s", owner, place)
    record = ClaimRecord(claimant, time.time())
    following = max(epoch, above) + 1
    try:
        store.create(claim_key(following), write_claim(record))
    except AlreadyExists as error:
        # a store whose answer was lost reports our own success as a conflict
        if _read(store, following) != write_claim(record):
            raise Refused(
                f"{_owner(store, following)} claimed {store.place()} at the same moment",
                remedy="stop one of the two",
            ) from error
    return Claim(store, following, record)


def _read(store: Store, epoch: int) -> bytes | None:
    return read_if_there(store, claim_key(epoch), CLAIM_LIMIT)


def _record(store: Store, epoch: int) -> ClaimRecord | None:
    """None for a claim that cannot be read: it still owns the channel."""
    try:
        data = _read(store, epoch)
        return None if data is None else parse_claim(data, f"claim {epoch}")
    except DamagedFile:
        return None


def _owner(store: Store, epoch: int) -> str:
    record = _record(store, epoch)
    return f"{'an unreadable claim' if record is None else record.claimant} (epoch {epoch})"


@dataclass(frozen=True)
class Owner:
    """Who owns a channel, by its claim. `dead`: its process is known to be gone, and released nothing;
    `written`: when it last showed that it lives, by the clock of the channel's store."""

    name: str
    released: bool
    dead: bool
    written: float


def owner_of(store: Store) -> Owner | None:
    """None where nobody claimed the channel. Raises StoreError."""
    epoch = current_epoch(store)
    found = store.stat(claim_key(epoch)) if epoch else None
    if found is None:
        return None
    record = _record(store, epoch)
    released = record is not None and record.released
    dead = not released and _is_over(store, epoch, this_process())
    return Owner(_owner(store, epoch), released, dead, found.written)


def _is_over(store: Store, epoch: int, claimant: Claimant) -> bool:
    record = _record(store, epoch)
    return record is not None and (record.released or is_dead(record.claimant, claimant))


def is_dead(old: Claimant, observer: Claimant) -> bool:
    """Whether `observer` can know that `old` ended: both ran in one pid namespace of one boot of one host.
    A pid may have been given to another process since, or to the observer itself."""
    seen_from = (observer.host, observer.boot_id, observer.pid_namespace)
    if "" in seen_from or (old.host, old.boot_id, old.pid_namespace) != seen_from:
        return False
    try:
        os.kill(old.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False  # another user's process, of which /proc may show nothing
    return old.process_start != "" and _process_start(old.pid) != old.process_start


class Heart:
    """Shows in the claim that this process lives, also while nothing is published."""

    def __init__(self, claimed: Claim) -> None:
        self._claim = claimed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weightcast-claim", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        said = ""
        while not self._stop.wait(_BEAT_SECONDS):
            # the channel may be away for a while; the next beat tells
            try:
                self._claim.beat()
                said = ""
            except (OSError, WeightcastError) as error:
                if (reason := error_text(error)) != said:
                    _log.warning("the claim to the channel was not renewed: %s", reason)
                said = reason

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

"""What is done to a whole channel by command: repair, here while no publisher runs, else by an order to the
publisher that owns it; signing what is there, when signing begins and when a key is replaced."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from weightcast.publisher.api import DEFAULTS, PublisherOptions
from weightcast.publisher.maintenance.repair import Repairs, is_sound, repair
from weightcast.publisher.run_publisher import RunPublisher
from weightcast.shared.base.elements import MAIN
from weightcast.shared.base.errors import DamagedFile, NotInTime, Refused
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel import pins
from weightcast.shared.channel.chain import entries, faults, verify
from weightcast.shared.channel.channel import Channel, look
from weightcast.shared.channel.claims import claim, owner_of, require_fences, this_process
from weightcast.shared.channel.components import sign_registry
from weightcast.shared.channel.index import INDEX_NAME, Index
from weightcast.shared.channel.layout import BASE_JSON
from weightcast.shared.channel.signing import (
    PrivateKey,
    Statement,
    Trust,
    signature_key,
    stated_by,
    stated_by_base,
    write_signature,
)
from weightcast.shared.channel.store import Store

_POLL_SECONDS = 0.2
_WAIT_SECONDS = 600.0


def repair_channel(
    store: Store,
    local: Path | None = None,
    options: PublisherOptions = DEFAULTS,
    advance: Advance | None = None,
) -> Repairs:
    """`local`: the publisher's own local checkpoint, for what only its bytes can restore.

    Raises OwnerAlive while a publisher owns the channel, and what `repair` raises."""
    trust = Trust.load(options.trusted_keys)
    if is_sound(store, advance, trust):
        return Repairs()

    def write_anchor() -> int | None:
        held.release()
        with RunPublisher.open(store, local=local or "", options=options) as own:
            return own.version if own.write_anchor() else None

    require_fences(store, unfenced=options.unfenced)
    held = claim(store, this_process(), take_over=options.take_over, patience=options.take_over_seconds)
    try:
        return repair(held, local, write_anchor, advance=advance, trust=trust)
    finally:
        held.release()


def ask_for_repair(store: Store, options: PublisherOptions, advance: Advance | None) -> Repairs:
    """Orders the running publisher to repair its channel, and waits until it has. Raises NotInTime after ten
    minutes; the order stays."""
    trust = Trust.load(options.trusted_keys)
    before = faults(store, advance, trust)
    _have_done(store, "repair", "see its log and status; or stop it and repeat this command with --local")
    left = faults(store, advance, trust)
    still = {problem.message for problem in left}
    done = [f"repaired by the publisher: {p.where}{p.message}" for p in before if p.message not in still]
    return Repairs(done=done, left=left)


def _have_done(store: Store, work: pins.Work, remedy: str) -> None:
    pins.order(store, work)
    deadline = time.monotonic() + _WAIT_SECONDS
    while pins.is_ordered(store, work):
        if time.monotonic() > deadline:
            raise NotInTime(
                f"the publisher of {store.place()} has not finished the {work} within {_WAIT_SECONDS:g} s",
                remedy=remedy,
            )
        time.sleep(_POLL_SECONDS)
    if (refused := pins.refusal(store)) is not None:
        raise refused


def ask_for_anchor(store: Store) -> int | None:
    """Orders the running publisher to write full weights of the newest version, and waits until it has.
    Returns the version; None: no publisher runs, and the next one obeys. Raises NotInTime as
    `ask_for_repair`, and what the owner refused it with."""
    channel, owner = Channel.open(store), owner_of(store)
    channel.require_ours()
    pointer = channel.pointer()
    if pointer is None:
        raise Refused(f"{store.place()} has no version yet", remedy="hosts need --base until it has one")
    if owner is None or owner.released or owner.dead:
        pins.order(store, "anchor")
        return None
    _have_done(store, "anchor", "see its log and status; the order stays")
    return channel.pointed()


def sign_channel(store: Store, key: PrivateKey, advance: Advance | None = None) -> int:
    """Signs every index up to the pointer, then base.json and components.json, in place of the signatures
    that are there. Returns how many versions. Raises DamagedFile, and signs nothing, when `verify` finds
    anything wrong."""
    channel = Channel.open(store)
    _, base = channel.require_ours()
    problems = verify(channel, advance)
    if problems:
        raise DamagedFile(
            f"{channel.place} is not signed: {problems[0].message} ({len(problems)} problems)",
            remedy="list them with `weightcast channel verify`",
        )
    signed = list(_statements(channel))
    for files, statement in signed:
        files.replace(signature_key(INDEX_NAME), write_signature(statement, key))
    channel.store.replace(signature_key(BASE_JSON), write_signature(stated_by_base(base, time.time()), key))
    if store.component == MAIN:
        sign_registry(channel, key)
    return sum(not statement.main for _, statement in signed)


def _statements(channel: Channel) -> Iterator[tuple[Store, Statement]]:
    """Of every index up to the pointer, with the files of its directory."""
    _, base = channel.require_ours()
    for entry in entries(channel, channel.pointer()):
        version, main, shown = entry.version, entry.index, look(entry.files)
        if not isinstance(main, Index):
            raise DamagedFile(f"{entry.files.place()}: {entry.problem}", remedy="nothing was signed")
        yield entry.files, stated_by(main, main.digest)
        beside = [(channel.anchor_files(version), channel.anchor(version, base.table))]
        for start in () if shown is None else shown.skips:
            beside.append(
                (channel.multi_step_files(version, start), channel.skip(version, start, base.table))
            )
        for files, index in beside:
            if index is not None:
                yield files, stated_by(index, index.digest, main.digest)

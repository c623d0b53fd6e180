"""Repair of a channel: here while no publisher runs, else by an order to the publisher that owns it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from weightcast.publisher.api import Publisher, PublisherOptions
from weightcast.publisher.maintenance.repair import Repairs, is_sound, repair
from weightcast.shared.base.errors import NotInTime
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel import pins
from weightcast.shared.channel.claims import Claim, claim, this_process
from weightcast.shared.channel.faults import faults
from weightcast.shared.channel.signing import Trust

_POLL_SECONDS = 0.2
_WAIT_SECONDS = 600.0


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
    """`local`: the publisher's own local checkpoint, for what only its bytes can restore.

    Raises OwnerAlive while a publisher owns the channel, and what `repair` raises."""
    trust = Trust.load(trusted_keys)
    if is_sound(directory, advance, trust):
        return Repairs()

    def write_anchor() -> int | None:
        held.release()
        with Publisher.open(
            directory,
            local=local or "",
            options=PublisherOptions(sign_key=sign_key, trusted_keys=trusted_keys),
        ) as own:
            return own.version if own.write_anchor() else None

    with _claimed(directory, take_over, patience) as held:
        return repair(directory, held, local, write_anchor, advance=advance, trust=trust)


@contextmanager
def _claimed(directory: Path, take_over: bool, patience: float) -> Iterator[Claim]:
    held = claim(directory, this_process(), take_over=take_over, patience=patience)
    try:
        yield held
    finally:
        held.release()


def ask_for_repair(
    directory: Path,
    *,
    wait_seconds: float = _WAIT_SECONDS,
    advance: Advance | None = None,
    trusted_keys: Sequence[str | Path] = (),
) -> Repairs:
    """Orders the running publisher to repair its channel, and waits until it has. Raises NotInTime after
    `wait_seconds`; the order stays."""
    trust = Trust.load(trusted_keys)
    before = faults(directory, advance, trust)
    pins.order_repair(directory)
    deadline = time.monotonic() + wait_seconds
    while pins.repair_ordered(directory):
        if time.monotonic() > deadline:
            raise NotInTime(
                f"the publisher of {directory} has not finished the repair within {wait_seconds:g} s",
                remedy="see its log and status; or stop it and repeat this command with --local",
            )
        time.sleep(_POLL_SECONDS)
    left = faults(directory, advance, trust)
    still = {problem.message for problem in left}
    done = [f"repaired by the publisher: {p.message}" for p in before if p.message not in still]
    return Repairs(done=done, left=left)

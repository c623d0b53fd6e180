"""The channel position in a trainer's checkpoint, and what it says when training is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weightcast.publisher.maintenance.orders import root_of
from weightcast.shared.base.errors import Forked, Refused, WrongRun
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.layout import index_key
from weightcast.shared.channel.store import Store

FORMAT = 1


@dataclass(frozen=True)
class Resumed:
    """`then`: the channel's version when the checkpoint was written, `now`: its newest, which hosts go on
    serving until the next publication."""

    run_id: str
    then: int
    now: int

    @property
    def behind(self) -> int:
        """Versions that were published after the checkpoint: the next one takes their changes back."""
        return self.now - self.then


def position(store: Store) -> dict[str, object]:
    channel = Channel.open(store)
    run_id, version = channel.require_ours()[0].run_id, channel.pointed()
    return {"format": FORMAT, "run_id": run_id, "version": version, "root": root_of(channel, version)}


def resumed(store: Store, state: Mapping[str, object]) -> Resumed:
    """See `Publisher.load_state_dict`."""
    run_id, then, root = _read(state)
    channel = Channel.open(store)
    found = channel.require_ours()[0].run_id
    if found != run_id:
        raise WrongRun(
            f"the checkpoint belongs to run {run_id}, {channel.place} is of run {found}: its hosts would go "
            "from this channel's weights to the checkpoint's",
            remedy="open the channel of the run; for a new run make a channel from the weights "
            "that its hosts start with",
        )
    newest = channel.pointed()
    if then > newest:
        raise Forked(
            f"the checkpoint was written at version {then}, {channel.place} ends at version {newest}",
            remedy="mount the channel that was published to; this one may be an older copy",
        )
    pruned = then > 0 and channel.store.stat(index_key(then)) is None
    if not pruned and root_of(channel, then) != root:
        raise Forked(
            f"version {then} of {channel.place} has other weights than when the checkpoint was written",
            remedy="mount the channel that was published to; this one was restored or written by another run",
        )
    return Resumed(run_id, then, newest)


def _read(state: Mapping[str, object]) -> tuple[str, int, str]:
    run_id, version, root = (state.get(name) for name in ("run_id", "version", "root"))
    good = type(version) is int and version >= 0 and isinstance(run_id, str) and isinstance(root, str)
    if state.get("format") != FORMAT or not good:
        raise Refused("not a Publisher state_dict", remedy="give the mapping that state_dict() returned")
    return str(run_id), int(str(version)), str(root)

"""How full weights of a version can be had: from the base or from an anchor, over the deltas since."""

from __future__ import annotations

from pathlib import Path

from weightcast.shared.channel.index import Index
from weightcast.shared.channel.pointer import Pointer
from weightcast.shared.channel.store import Channel, FullVersion
from weightcast.shared.errors import WeightcastError
from weightcast.shared.local.plan import Seed
from weightcast.shared.local.repair import Delta, Way
from weightcast.shared.local.route import Route, find_route
from weightcast.shared.words import TensorTable


def ways_to(channel: Channel, version: int, table: TensorTable, base: Path | None) -> list[Way]:
    """At most one over each kind of source: the cheapest, anchors, the base. A version that the channel
    cannot lead to has none."""
    digest = None if base is None else "" if channel.base is None else channel.base.digest
    found: list[Way] = []
    for source, beside in ((digest, True), (None, True), (digest, False)):
        route = _route(channel, version, table, source, beside)
        way = None if route is None else _way(channel, route, base)
        if way is not None and way not in found and (channel.trust is None or _is_ours(way, base)):
            found.append(way)
    return found


def _is_ours(way: Way, base: Path | None) -> bool:
    """Repairs read shards where they lie, proven by lanes alone: no guard against who can write there."""
    return way.directory == base and not way.deltas


def _route(
    channel: Channel, version: int, table: TensorTable, base: str | None, beside: bool
) -> Route | None:
    try:
        pointer = channel.pointer()
        if pointer is None:
            pointer = Pointer(0, None, channel.directory)
        return find_route(
            channel,
            pointer,
            table,
            None,
            target=version,
            exact=True,
            base=base,
            beside=beside,
            visible_seconds=0.0,
        )
    except (WeightcastError, OSError):
        # other sources may do; where none does, the caller seeds, and is told why that fails
        return None


def _way(channel: Channel, route: Route, base: Path | None) -> Way | None:
    plan = route.plan
    if not isinstance(plan, Seed):
        return None
    deltas = tuple(Delta(*route.delta(version)) for leg in plan.then.legs for version in leg)
    if plan.version == 0:
        return None if base is None else Way(base, True, deltas)
    return Way(_full_weights(channel, route, plan.version), False, deltas)


def _full_weights(channel: Channel, route: Route, version: int) -> Path:
    index = route.indexes.get(version)
    if isinstance(index, FullVersion):
        return index.directory
    if isinstance(index, Index) and index.kind == "anchor":
        return channel.layout.version_dir(version)
    return channel.layout.anchor_dir(version)

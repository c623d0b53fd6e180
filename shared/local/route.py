"""Gathers the facts that `plan` asks for, from the channel. Reads indexes only."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from blake3 import blake3

from weightcast.shared.channel.index import ForeignIndex, Index
from weightcast.shared.channel.pointer import Pointer
from weightcast.shared.channel.store import Channel, FullVersion
from weightcast.shared.errors import RetryLater
from weightcast.shared.local.plan import Facts, Here, Link, Need, Plan, Refuse, Seed, plan
from weightcast.shared.local.state import LocalState, Phase
from weightcast.shared.words import Part, TensorTable

_RETRY_EVERY = 0.2
AnyIndex = Index | ForeignIndex | FullVersion


@dataclass(frozen=True)
class Route:
    """A plan and the indexes it speaks of."""

    plan: Plan
    pointer: Pointer
    indexes: dict[int, AnyIndex]


def find_route(
    channel: Channel,
    pointer: Pointer,
    table: TensorTable | None,
    state: LocalState | None,
    *,
    target: int,
    exact: bool,
    base: str | None,
    visible_seconds: float,
    wait: Callable[[float], None] = time.sleep,
) -> Route:
    """`base`: digest of version 0 when its weights are at hand; `table`: None while a foreign run's tensors
    are unknown. An index that the pointer implies and that does not show within `visible_seconds` is
    RetryLater for the target, and taken as pruned below it."""
    indexes: dict[int, AnyIndex] = {}
    facts = Facts(
        here=_here(state),
        target=target,
        links={},
        base=base,
        exact=exact or channel.foreign,
        blocked=frozenset(b.digest for b in state.blocked) if state is not None else frozenset(),
        epoch=0 if state is None else state.epoch,
    )
    reader = _IndexReader(channel, pointer, table, time.monotonic() + visible_seconds, wait)
    answer = _ask(facts, reader, indexes)
    if isinstance(answer, Seed | Refuse) and not channel.foreign:
        anchored = channel.anchored(pointer)
        if anchored and not (isinstance(answer, Seed) and answer.version in anchored):
            better = _ask(replace(facts, links=_links(indexes), anchors=anchored), reader, indexes)
            answer = better if isinstance(answer, Refuse) and not answer.waits else answer
    return Route(answer, pointer, indexes)


def _ask(facts: Facts, reader: _IndexReader, indexes: dict[int, AnyIndex]) -> Plan:
    links = dict(facts.links)
    while True:
        answer = plan(replace(facts, links=links))
        if not isinstance(answer, Need):
            return answer
        index = reader.read(answer.version, required=answer.version == facts.target)
        links[answer.version] = None if index is None else link_of(index)
        if index is not None:
            indexes[answer.version] = index


def _here(state: LocalState | None) -> Here | None:
    if state is None or state.phase is not Phase.CLEAN:
        return None
    position = state.position
    return Here(position.version, position.digest, position.root, position.epoch)


def _links(indexes: dict[int, AnyIndex]) -> dict[int, Link | None]:
    return {version: link_of(index) for version, index in indexes.items()}


@dataclass
class _IndexReader:
    channel: Channel
    pointer: Pointer
    table: TensorTable | None
    deadline: float
    wait: Callable[[float], None]

    def read(self, version: int, *, required: bool) -> AnyIndex | None:
        """An index may be visible later than the pointer that implies it."""
        while True:
            index = self.channel.index(self.pointer, version, self.table or TensorTable(()))
            if index is not None or self._pruned(version):
                return index
            if time.monotonic() >= self.deadline:
                break
            self.wait(_RETRY_EVERY)
        if required:
            raise RetryLater(
                f"{self.channel.layout.index(version)} is not there although the pointer names {version}",
                remedy="is the mount stale? `weightcast channel verify` says what is missing",
            )
        return None

    def _pruned(self, version: int) -> bool:
        return self.channel.file is not None and version < self.channel.file.horizon


def link_of(index: AnyIndex) -> Link:
    if isinstance(index, FullVersion):
        return Link(index.version, "anchor", -1, None, index.digest, "", 0, "", 0)
    if isinstance(index, ForeignIndex):
        return Link(index.version, "delta", index.base_version, None, index.digest, "", 0, "whole", 0)
    return Link(
        index.version,
        index.kind,
        index.base_version,
        index.parent,
        index.digest,
        index.root,
        index.epoch,
        grid_digest(index.parts),
        sum(file.size for file in index.files),
    )


def grid_digest(parts: Iterable[Part]) -> str:
    """Equal for versions whose chunks fold onto each other."""
    plain = [[[s.tensor, s.start, s.stop] for s in part.segments] for part in parts]
    return blake3(json.dumps(plain).encode()).hexdigest()

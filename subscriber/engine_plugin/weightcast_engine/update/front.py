"""All ranks of an engine as one: the orders of an update, and what only all of them together can tell.

A rank sums what it holds, block by block. Blocks that several ranks hold must be equal and count once; those
of a tensor must hold every element of it once. Then the sums are those of the whole tensor, and are
compared with the lanes of the version.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from weightcast_engine.update.checksums import Lanes
from weightcast_engine.update.places import Key, tile
from weightcast_engine.update.rank import Answer, Order
from weightcast_engine.update.refusals import (
    RELOAD,
    RELOAD_AND_TELL,
    BadPatch,
    InDoubt,
    NotPaused,
    OtherBase,
    Refusal,
)

CHANGES = 1 << 18
"""checked between two steps of an engine that serves: tens of milliseconds"""
WORDS = 1 << 21
"""8-byte words summed between two steps"""
UNKNOWN = "is not in the engine's model directory"
PLACE = "start the engine on the local checkpoint, with <local>/.weightcast/engine for patches"
NOWHERE = "is taken nowhere by the model's loader, or not as a whole"
_MODULUS = 1 << 64
Sums = dict[int, list[Lanes]]
"""number of a tensor: its sums over all ranks, once or before and after"""


class Controls(Protocol):
    """The engine's own controls."""

    async def ranks(self, order: Order) -> Sequence[Answer]:
        """Carried out by every rank."""

    async def rest(self, seconds: float) -> None:
        """While there is nothing to do for the ranks."""

    async def pause(self, policy: str) -> None: ...

    async def resume(self) -> None: ...

    async def paused(self) -> bool: ...

    async def relabel(self, label: str) -> None: ...


class World:
    """Where the checkpoint is on all ranks. `maps`: of each rank, as it tells them. Raises BadPatch for ranks
    of different checkpoints."""

    def __init__(self, maps: Sequence[Answer]) -> None:
        self.maps = maps
        self.elements: Mapping[str, int] = maps[0]["elements"]
        if any(told["elements"] != self.elements for told in maps):
            raise BadPatch("the ranks have different checkpoints in their model directories", remedy=RELOAD)
        self.keys: Sequence[Mapping[str, Sequence[Key]]] = [
            {name: [tuple(key) for key in rows] for name, rows in told["keys"].items()} for told in maps
        ]
        """per rank"""
        self.refused = {name: reason for told in maps for name, reason in told["refused"].items()}
        for name, count in self.elements.items():
            keys = {key for own in self.keys for key in own.get(name, ())}
            if name not in self.refused and not tile(list(keys), count):
                self.refused[name] = NOWHERE

    @property
    def prints(self) -> list[str]:
        return [told["print"] for told in self.maps]

    def require_whole(self, name: str) -> None:
        reason = self.refused.get(name) if name in self.elements else UNKNOWN
        if reason is not None:
            raise BadPatch(f"{name} {reason}", tensor=name, remedy=RELOAD)


class Front:
    """One order at a time: `busy` says whether one is being carried out."""

    def __init__(self, controls: Controls) -> None:
        self._controls = controls
        self._lock = asyncio.Lock()
        self._world: World | None = None

    @property
    def busy(self) -> bool:
        return self._lock.locked()

    async def state(self) -> Answer:
        """As `GET /v1/weightcast` answers."""
        busy, looks = self.busy, await self._controls.ranks({"do": "look"})
        paused = await self._controls.paused()
        reason, refused = await self._patchable(paused)
        if reason:  # found out just now, perhaps to a rank's harm
            looks = await self._controls.ranks({"do": "look"})
        held = _held(looks)
        return {
            **{key: looks[0][key] for key in ("plugin", "format", "process", "label", "drafter", "draft")},
            **{key: held[key] for key in ("version", "root", "misplaced")},
            "ranks": len(looks),
            "paused": paused,
            "patchable": not reason,
            "reason": reason,
            "refused": dict(sorted(refused.items())[:100]),
            "refused_count": len(refused),
            "in_doubt": bool(held["doubt"]) and not (busy or self.busy),
        }

    async def _patchable(self, paused: bool) -> tuple[str, Mapping[str, str]]:
        """As of before, where somebody waits for the engine to go on."""
        if self.busy or (paused and self._world is not None):
            return ("", {}) if self._world is None else ("", self._world.refused)
        async with self._lock:
            try:
                return "", (await self._look_around()).refused
            except Refusal as refusal:
                return refusal.message, {}

    async def held(self) -> Answer:
        """Version and root, what makes them doubtful, and why a reload would bring others."""
        return _held(await self._controls.ranks({"do": "look"}))

    async def hold(self, version: int, root: str, label: str) -> Answer:
        async with self._lock:
            await self._all({"do": "hold", "version": version, "root": root, "label": label})
        return {}

    async def check(self, file: str) -> Answer:
        """While the engine serves. Raises BadPatch and OtherBase."""
        began = time.monotonic()
        async with self._lock:
            world, [staged, *_] = await self._look_around(), await self._stage(file)
            for name, *_ in staged["tensors"]:
                world.require_whole(name)
            order = {"do": "sums", "file": file, "turn": uuid.uuid4().hex}
            sums = await self._gather(order, world, [name for name, *_ in staged["tensors"]], CHANGES)
            _require_base(staged["tensors"], sums)
            # other sums than these were judged by another server, if at all
            await self._all({**order, "do": "passed"})
        return {
            "tensors": len(staged["tensors"]),
            "changes": staged["changes"],
            "bytes": staged["bytes"],
            "seconds": time.monotonic() - began,
        }

    async def _stage(self, file: str) -> Sequence[Answer]:
        order = {"do": "stage", "file": file}
        answers = await self._all({**order, "anew": True, "seconds": 0.02})
        pause = 0.002
        while not all(answer["ready"] for answer in answers):
            await self._controls.rest(pause)
            pause = min(2 * pause, 0.1)
            answers = await self._all({**order, "anew": False, "seconds": 0.0})
        return answers

    async def pause(self, policy: str) -> Answer:
        async with self._lock:
            await self._controls.pause(policy)
        return {}

    async def resume(self) -> Answer:
        async with self._lock:
            await self._controls.resume()
        return {}

    async def apply(self, file: str, label: str) -> Answer:
        """On all ranks or on none. The answer is what all of them hold after it."""
        async with self._lock:
            await self._require_paused()
            began = time.monotonic()
            return await self._finished(await self._written(file, label), label, began)

    async def update(self, file: str, label: str, policy: str) -> Answer:
        """Pause, `apply` and resume in one order: the engine waits for nobody in between, and resumes even if
        the sender is gone. An engine paused before stays paused, as does an engine in doubt; after any other
        refusal it resumes with what it held. `still`: seconds that it computed nothing."""
        async with self._lock:
            was_paused = await self._paused_before(policy)
            began = time.monotonic()
            try:
                answers = await self._written(file, label)
            except Refusal:
                if not was_paused and not (await self.held())["doubt"]:
                    await self._controls.resume()
                raise
            told = await self._finished(answers, label, began)
            told["resumed"] = False
            if not was_paused:
                # an engine's own error, of any kind: the weights are right, and whoever sent the order may
                # resume it again
                with suppress(Exception):
                    await self._controls.resume()
                    told["resumed"] = True
            told["seconds"]["still"] = time.monotonic() - began
            return told

    async def _paused_before(self, policy: str) -> bool:
        """Pauses. Question and order are sent together: every answer waits for the end of a step."""
        try:
            was_paused, _ = await asyncio.gather(self._controls.paused(), self._controls.pause(policy))
        except Exception as error:  # an engine's own, of any kind
            raise NotPaused(f"the engine does not pause: {error}"[:300], remedy="see its log") from error
        return was_paused

    async def _written(self, file: str, label: str) -> Sequence[Answer]:
        """What the ranks hold then. What any of them refuses is raised, and none has anything of it."""
        # a rank of its own has no other to wait for
        alone = self._world is not None and len(self._world.keys) == 1
        ended = label if alone else None
        answers = await self._controls.ranks({"do": "apply", "file": file, "label": ended})
        if any(answer["status"] != 200 for answer in answers):
            await self._certain({"do": "rollback", "file": file})
            raise _refusal(answers)
        return answers if alone else await self._certain({"do": "commit", "file": file, "label": label})

    async def _finished(self, answers: Sequence[Answer], label: str, began: float) -> Answer:
        written = time.monotonic()
        await self._named(label)
        named = time.monotonic()
        held = _held(answers)
        if held["doubt"]:
            raise InDoubt(held["doubt"], remedy=RELOAD_AND_TELL)
        return {
            **{key: held[key] for key in ("version", "root")},
            "label": label,
            "seconds": {"write": written - began, "label": named - written},
        }

    async def _certain(self, order: Order) -> Sequence[Answer]:
        """An order that must not fail on any rank."""
        answers = await self._controls.ranks(order)
        failed = [answer for answer in answers if answer["status"] != 200]
        if failed:
            raise InDoubt(f"{order['do']}: {failed[0]['error']}", remedy=RELOAD_AND_TELL)
        return answers

    async def _named(self, label: str) -> None:
        try:
            await self._controls.relabel(label)
        except Exception as error:  # an engine's own, of any kind
            raise InDoubt(f"the engine does not take the label {label!r}: {error}"[:300]) from error

    async def transfer(self, wanted: Order, label: str) -> Answer:
        """The patch of a version in the local checkpoint, which ranks of CheckpointRank find themselves."""
        [found, *_] = await self._all({**wanted, "do": "find"})
        await self.check(found["file"])
        await self._all({**wanted, **found, "do": "named"})
        return await self.apply(found["file"], label)

    async def reload(self, label: str) -> Answer:
        async with self._lock:
            await self._require_paused()
            held = await self.held()
            if held["misplaced"]:
                raise BadPatch(held["misplaced"], remedy=PLACE)
            began = time.monotonic()
            await self._certain({"do": "reload"})
            await self._named(label)
        return {"label": label, "seconds": time.monotonic() - began}

    async def draft(self) -> Answer:
        """Loads the draft model again, in a pause of its own where the engine is not paused: requests in
        flight go on after it, and blocks that the old weights computed are computed anew."""
        async with self._lock:
            was_paused = await self._paused_before("recompute")
            try:
                await self._all({"do": "draft"})
            finally:
                if not was_paused:
                    await self._controls.resume()
        return {}

    async def _require_paused(self) -> None:
        if not await self._controls.paused():
            raise NotPaused("the engine generates", remedy="pause it first")

    async def digest(self, names: Sequence[str] | None, start: int, count: int) -> Answer:
        """Lanes of the live words of `count` tensors from `start` on, while the engine serves."""
        async with self._lock:
            world, before = await self._look_around(), await self._all({"do": "look"})
            every = sorted(world.elements, key=str.encode) if names is None else list(names)
            asked = every[start : start + count]
            unknown = {name: UNKNOWN for name in asked if name not in world.elements}
            refused = unknown | {name: world.refused[name] for name in asked if name in world.refused}
            summed = [name for name in asked if name not in refused]
            order = {"do": "digest", "names": summed, "turn": uuid.uuid4().hex}
            sums = await self._gather(order, world, summed, WORDS)
            after = await self._all({"do": "look"})
        return {
            "version": after[0]["version"],
            "lanes": {name: sums[number][0].hex() for number, name in enumerate(summed)},
            "refused": refused,
            "next": start + count if start + count < len(every) else None,
            "changed": [look["changes"] for look in before] != [look["changes"] for look in after],
        }

    async def _all(self, order: Order) -> Sequence[Answer]:
        """Raises what the first rank says that refuses."""
        answers = await self._controls.ranks(order)
        if any(answer["status"] != 200 for answer in answers):
            raise _refusal(answers)
        return answers

    async def _look_around(self) -> World:
        """Raises BadPatch where nothing can be patched."""
        known = [] if self._world is None else self._world.prints
        answers = await self._all({"do": "map", "known": known})
        if self._world is None or known != [answer["print"] for answer in answers]:
            before = [] if self._world is None else self._world.maps
            self._world = World([new if "keys" in new else before[rank] for rank, new in enumerate(answers)])
        return self._world

    async def _gather(self, order: Order, world: World, names: Sequence[str], budget: int) -> Sums:
        """All that the ranks sum for this order, in steps between which the engine serves. Raises OtherBase
        where ranks hold different words of the same elements, or another server's order came between."""
        await self._all(order)
        found: dict[tuple[int, int, int], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        done = False
        while not done:
            answers = await self._all({"do": "more", "turn": order["turn"], "budget": budget})
            done = all(answer["done"] for answer in answers)
            for rank, answer in enumerate(answers):
                for number, piece, *lanes in answer["rows"]:
                    sums = found[rank, number, piece]
                    sums[: len(lanes)] = [(one + new) % _MODULUS for one, new in zip(sums, lanes)]  # noqa: B905
        return {number: _of_tensor(world, number, name, found) for number, name in enumerate(names)}


def _held(looks: Sequence[Answer]) -> Answer:
    doubt = next((look["doubt"] for look in looks if look["doubt"]), "")
    misplaced = next((look["misplaced"] for look in looks if look["misplaced"]), "")
    if len({(look["version"], look["root"]) for look in looks}) > 1:
        doubt = doubt or "the ranks hold different versions"
    return {**{key: looks[0][key] for key in ("version", "root")}, "doubt": doubt, "misplaced": misplaced}


def _of_tensor(
    world: World, number: int, name: str, found: Mapping[tuple[int, int, int], list[int]]
) -> list[Lanes]:
    """Once, or before and after."""
    nothing = [0, 0, 0, 0]
    parts: dict[Key, list[int]] = {}
    for rank, own in enumerate(world.keys):
        for piece, key in enumerate(own[name]):
            sums = found.get((rank, number, piece), nothing)
            if parts.setdefault(key, sums) != sums:
                raise OtherBase(
                    f"{name}: places that hold the same elements differ", tensor=name, remedy=RELOAD_AND_TELL
                )
    total = [sum(column) % _MODULUS for column in zip(nothing, *parts.values(), strict=True)]
    return [Lanes(total[0], total[1]), Lanes(total[2], total[3])]


def _require_base(tensors: Iterable[Sequence[str]], totals: Mapping[int, list[Lanes]]) -> None:
    """The touched words are those of the base, and the new ones make the target of it."""
    for number, (name, before, after) in enumerate(tensors):
        old, new = totals[number]
        if Lanes.from_hex(before).minus(old).plus(new) != Lanes.from_hex(after):
            raise OtherBase(
                f"{name}: its live words are not those of the patch's base",
                tensor=name,
                remedy=RELOAD_AND_TELL,
            )


def _refusal(answers: Sequence[Answer]) -> Refusal:
    """Of the ranks that refused, the gravest."""
    failed = [answer for answer in answers if answer["status"] != 200]
    return Refusal.of(max(failed, key=lambda answer: answer["status"] == InDoubt.status))

"""The plugin's orders, the same for every engine: what a request may say, and what it is answered.

For engines whose ranks can only be reached from within, one call at a time, an order is a coroutine that is
carried out in steps, with the engine at work between them. All ranks of such an engine take the same steps:
they decide by what all of them received.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from functools import partial
from types import coroutine
from typing import Any, TypeVar

from weightcast_engine.update import strict_json
from weightcast_engine.update.front import Controls, Front
from weightcast_engine.update.patch_file import NAME
from weightcast_engine.update.rank import Answer, Order
from weightcast_engine.update.refusals import BadPatch, Refusal

PREFIX = "/v1/weightcast"
BODY_LIMIT = 64 << 10
POLICIES = ("recompute", "wait", "abort")
_COUNT = 1 << 20

Reply = tuple[int, Answer]
Acting = Coroutine[Any, Any, Reply]
Field = Callable[[object, str], object]
"""Parses a member of a request's body, given its name. Raises ValueError."""
T = TypeVar("T")


@coroutine
def end_of_step(seconds: float = 0.0) -> Generator[float, None, None]:
    """Awaited where an order may rest. `seconds`: how long there is nothing to do."""
    yield seconds


def step(acting: Coroutine[Any, Any, T]) -> tuple[float, T | None]:
    """Goes on with an order: seconds to wait, and what it came to when it has ended."""
    try:
        return float(acting.send(None)), None
    except StopIteration as ended:
        return 0.0, ended.value


def at_once(acting: Coroutine[Any, Any, T]) -> T:
    """All of an order, without a pause between its steps."""
    while True:
        rest, answer = step(acting)
        if answer is not None:
            return answer
        time.sleep(rest)


class FromWithin(Controls):
    """Of one rank among all: each carries an order out and hears what the others answer. The engine's own
    routes pause it and name its weights."""

    def __init__(self, obey: Callable[[Order], Answer], gather: Callable[[Any], Sequence[Any]]) -> None:
        self._obey, self._gather = obey, gather

    async def ranks(self, order: Order) -> Sequence[Answer]:
        return self._gather(self._obey(order))

    async def rest(self, seconds: float) -> None:
        await end_of_step(seconds)

    async def pause(self, policy: str) -> None:
        raise BadPatch("pause by the engine's own route")

    async def resume(self) -> None:
        raise BadPatch("resume by the engine's own route")

    async def paused(self) -> bool:
        return True

    async def relabel(self, label: str) -> None: ...


async def look(front: Front) -> Reply:
    return await _answered(front, front.state())


async def order(front: Front, route: str, data: bytes) -> Reply:
    """`route`: one of `ROUTES`; `data`: the request's body."""
    act, fields = ROUTES[route]
    try:
        body = strict_json.members(strict_json.json_object(data), set(fields), "body")
        arguments = [parse(body[name], name) for name, parse in fields.items()]
    except ValueError as error:
        return 400, {"error": f"{route}: {error}", "remedy": "see docs/live-patch.md"}
    if front.busy:
        return 503, {"error": "another order is being carried out", "remedy": "send one at a time"}
    return await _answered(front, act(front, *arguments))


async def _answered(front: Front, acting: Awaitable[Answer]) -> Reply:
    try:
        return 200, await acting
    except Refusal as refusal:
        told = {key: word for key, word in refusal.told().items() if key != "status"}
        return refusal.status, told | await _standing(front, refusal.status)
    except Exception as error:  # an engine's own, of any kind: it is told, and the server goes on
        return 500, {"error": f"{type(error).__name__}: {error}"[:500], "state": "in-doubt"}


async def _standing(front: Front, status: int) -> Answer:
    """What whoever is refused wants to know next."""
    if status not in (409, 500):
        return {}
    held = await front.held()
    state = {"state": "in-doubt" if held["doubt"] else "rolled-back"} if status == 500 else {}
    return {"holds": {key: held[key] for key in ("version", "root")}, **state}


def _file(value: object, what: str) -> str:
    if type(value) is not str or not NAME.fullmatch(value):
        raise ValueError(f"{what}: <version>-<8 hex>.patch, without a path")
    return value


_label = partial(strict_json.text, limit=128)
_root = partial(strict_json.hexadecimal, digits=64)


def _policy(value: object, what: str) -> str:
    if value not in POLICIES:
        raise ValueError(f"{what}: one of {', '.join(POLICIES)}")
    return str(value)


def _names(value: object, what: str) -> list[str] | None:
    if value is not None and type(value) is not list:
        raise ValueError(f"{what}: an array of names, or null")
    return None if value is None else [strict_json.text(name, what) for name in value]


def _count(value: object, what: str) -> int:
    if value == 0:
        raise ValueError(f"{what}: at least 1")
    return strict_json.natural(value, what, _COUNT)


ROUTES: Mapping[str, tuple[Callable[..., Awaitable[Answer]], Mapping[str, Field]]] = {
    "holds": (Front.hold, {"version": strict_json.natural, "root": _root, "label": _label}),
    "check": (Front.check, {"file": _file}),
    "update": (Front.update, {"file": _file, "label": _label, "policy": _policy}),
    "pause": (Front.pause, {"policy": _policy}),
    "apply": (Front.apply, {"file": _file, "label": _label}),
    "reload": (Front.reload, {"label": _label}),
    "draft": (Front.draft, {}),
    "resume": (Front.resume, {}),
    "digest": (Front.digest, {"tensors": _names, "from": strict_json.natural, "count": _count}),
}
"""What carries an order out, and the members of its body in the order of that method's arguments."""

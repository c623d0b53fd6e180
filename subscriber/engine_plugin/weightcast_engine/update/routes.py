"""An order that is carried out in steps, with the engine at work between them: for engines whose ranks can
only be reached from within, one call at a time.

All ranks of such an engine take the same steps: they decide by what all of them received.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from types import coroutine
from typing import Any, Generic, TypeVar

from weightcast_engine.update import strict_json
from weightcast_engine.update.front import Front
from weightcast_engine.update.patch_file import NAME
from weightcast_engine.update.rank import Answer
from weightcast_engine.update.refusals import Refusal

_T = TypeVar("_T")


@coroutine
def end_of_step(seconds: float = 0.0) -> Generator[float, None, None]:
    """Awaited where an order may rest. `seconds`: how long there is nothing to do."""
    yield seconds


class OrderSteps(Generic[_T]):
    """Of one order at a time, which is known by its text."""

    def __init__(self) -> None:
        self._order = ""
        self._left: Coroutine[Any, Any, _T] | None = None

    @property
    def order(self) -> str:
        """What was begun and has not ended; empty: nothing."""
        return self._order

    def step(self, order: str, begin: Callable[[], Coroutine[Any, Any, _T]]) -> tuple[float, _T | None]:
        """Goes on with an order, or begins it: seconds to wait, and what it came to when it has ended."""
        if self._left is None:
            self._order, self._left = order, begin()
        try:
            return float(self._left.send(None)), None
        except StopIteration as ended:
            self._order, self._left = "", None
            return 0.0, ended.value
        except BaseException:
            self._order, self._left = "", None
            raise

    def give_up(self) -> None:
        if self._left is not None:
            self._left.close()
        self._order, self._left = "", None


def at_once(acting: Coroutine[Any, Any, _T]) -> _T:
    """All of an order, without a pause between its steps."""
    try:
        while True:
            time.sleep(acting.send(None))
    except StopIteration as ended:
        result: _T = ended.value
        return result


PREFIX = "/v1/weightcast"
BODY_LIMIT = 64 << 10
POLICIES = ("recompute", "wait", "abort")
_COUNT = 1 << 20

Body = dict[str, object]
Reply = tuple[int, Answer]


async def look(front: Front) -> Reply:
    return await _answered(front, front.state())


async def order(front: Front, door: str, data: bytes) -> Reply:
    """`door`: one of `DOORS`; `data`: the request's body."""
    parse, act = DOORS[door]
    try:
        arguments = parse(strict_json.json_object(data))
    except ValueError as error:
        return 400, {"error": f"{door}: {error}", "remedy": "see docs/engines.md, The plugin"}
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


def _file(value: object) -> str:
    if type(value) is not str or not NAME.fullmatch(value):
        raise ValueError("file: <version>-<8 hex>.patch, without a path")
    return value


def _label(value: object) -> str:
    return strict_json.text(value, "label", 128)


def _holds(body: Body) -> tuple[int, str, str]:
    found = strict_json.members(body, {"version", "root", "label"}, "body")
    root = strict_json.hexadecimal(found["root"], 64, "root")
    return strict_json.natural(found["version"], "version"), root, _label(found["label"])


def _check(body: Body) -> tuple[str]:
    return (_file(strict_json.members(body, {"file"}, "body")["file"]),)


def _apply(body: Body) -> tuple[str, str]:
    found = strict_json.members(body, {"file", "label"}, "body")
    return _file(found["file"]), _label(found["label"])


def _update(body: Body) -> tuple[str, str, str]:
    found = strict_json.members(body, {"file", "label", "policy"}, "body")
    return _file(found["file"]), _label(found["label"]), _policy(found["policy"])


def _pause(body: Body) -> tuple[str]:
    return (_policy(strict_json.members(body, {"policy"}, "body")["policy"]),)


def _policy(value: object) -> str:
    if value not in POLICIES:
        raise ValueError(f"policy: one of {', '.join(POLICIES)}")
    return str(value)


def _resume(body: Body) -> tuple[()]:
    strict_json.members(body, set(), "body")
    return ()


def _reload(body: Body) -> tuple[str]:
    return (_label(strict_json.members(body, {"label"}, "body")["label"]),)


def _digest(body: Body) -> tuple[list[str] | None, int, int]:
    found = strict_json.members(body, {"tensors", "from", "count"}, "body")
    names = found["tensors"]
    if names is not None and type(names) is not list:
        raise ValueError("tensors: an array of names, or null")
    wanted = None if names is None else [strict_json.text(name, "tensors") for name in names]
    count = strict_json.natural(found["count"], "count", _COUNT)
    if count == 0:
        raise ValueError("count: at least 1")
    return wanted, strict_json.natural(found["from"], "from"), count


DOORS: Mapping[str, tuple[Callable[[Body], tuple[Any, ...]], Callable[..., Awaitable[Answer]]]] = {
    "holds": (_holds, Front.hold),
    "check": (_check, Front.check),
    "update": (_update, Front.update),
    "pause": (_pause, Front.pause),
    "apply": (_apply, Front.apply),
    "reload": (_reload, Front.reload),
    "resume": (_resume, Front.resume),
    "digest": (_digest, Front.digest),
}

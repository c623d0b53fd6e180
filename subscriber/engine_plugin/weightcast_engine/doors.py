"""What a request to `/v1/weightcast` may say, and what it is answered. docs/engines.md, The plugin.

    GET  /v1/weightcast           what the engine holds, and whether it can be patched
    POST /v1/weightcast/holds     what a confirmed reload, or a fresh start, gave it
    POST /v1/weightcast/check     a patch, while the engine serves
    POST /v1/weightcast/update    pause, apply and resume in one order
    POST /v1/weightcast/pause, /apply, /reload, /resume
    POST /v1/weightcast/digest    lanes of the live words, while the engine serves

No request names a path: patches lie in one directory, and weights are reloaded from the engine's own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from weightcast_engine import strict
from weightcast_engine.front import Front
from weightcast_engine.patch_file import NAME
from weightcast_engine.rank import Answer
from weightcast_engine.refusals import Refusal

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
        arguments = parse(strict.json_object(data))
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
    return strict.text(value, "label", 128)


def _holds(body: Body) -> tuple[int, str, str]:
    found = strict.members(body, {"version", "root", "label"}, "body")
    root = strict.hexadecimal(found["root"], 64, "root")
    return strict.natural(found["version"], "version"), root, _label(found["label"])


def _check(body: Body) -> tuple[str]:
    return (_file(strict.members(body, {"file"}, "body")["file"]),)


def _apply(body: Body) -> tuple[str, str]:
    found = strict.members(body, {"file", "label"}, "body")
    return _file(found["file"]), _label(found["label"])


def _update(body: Body) -> tuple[str, str, str]:
    found = strict.members(body, {"file", "label", "policy"}, "body")
    return _file(found["file"]), _label(found["label"]), _policy(found["policy"])


def _pause(body: Body) -> tuple[str]:
    return (_policy(strict.members(body, {"policy"}, "body")["policy"]),)


def _policy(value: object) -> str:
    if value not in POLICIES:
        raise ValueError(f"policy: one of {', '.join(POLICIES)}")
    return str(value)


def _resume(body: Body) -> tuple[()]:
    strict.members(body, set(), "body")
    return ()


def _reload(body: Body) -> tuple[str]:
    return (_label(strict.members(body, {"label"}, "body")["label"]),)


def _digest(body: Body) -> tuple[list[str] | None, int, int]:
    found = strict.members(body, {"tensors", "from", "count"}, "body")
    names = found["tensors"]
    if names is not None and type(names) is not list:
        raise ValueError("tensors: an array of names, or null")
    wanted = None if names is None else [strict.text(name, "tensors") for name in names]
    count = strict.natural(found["count"], "count", _COUNT)
    if count == 0:
        raise ValueError("count: at least 1")
    return wanted, strict.natural(found["from"], "from"), count


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

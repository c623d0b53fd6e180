"""Prints the HTTP routes of the daemons as a page, from their OpenAPI: python docs/make_http.py"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from pydantic import BaseModel

from weightcast.publisher.daemon.daemon import publication_routes, repair_routes
from weightcast.publisher.daemon.status import PublisherStatus
from weightcast.publisher.fleet.routes import fleet_routes
from weightcast.publisher.mirror.mirror import MirrorStatus
from weightcast.publisher.mirror.served import served
from weightcast.shared.daemon.http import docs_text, make_app
from weightcast.shared.daemon.metrics import new_registry
from weightcast.subscriber.gateway.daemon import GatewayStatus
from weightcast.subscriber.groups.messages import ADAPTERS_PATH, HOLD_PATH, RELEASE_PATH
from weightcast.subscriber.status import HostStatus
from weightcast.subscriber.sync.adapters import Adapters
from weightcast.subscriber.sync.group_follower import Post

NOTHING: Any = None
TOP = """\
# HTTP routes

Each daemon shows its own as text under `/docs` and as OpenAPI 3.1 under `/openapi.json`. Ports: publisher
8340, subscriber 8341, mirror 8342, gateway 8343. Failures are a `Failure`. Tokens:
[security](../security.md#the-http-side). Status fields: [status](../status.md). Further routes of gate and
gateway: [gate](../gate.md#routes-of-its-own); of the engine plugin:
[live patch](../live-patch.md#the-plugin).
"""


def document() -> str:
    return f"{TOP}\n" + "\n".join(
        line
        for app in (publisher(), subscriber(), mirror(), gateway())
        for line in _markdown(list(docs_text(app.openapi())))
    )


def publisher() -> FastAPI:
    app = _app("Publisher", PublisherStatus)
    for router in (publication_routes(NOTHING, NOTHING), repair_routes(NOTHING, NOTHING)):
        app.include_router(router)
    app.include_router(fleet_routes(NOTHING, NOTHING, NOTHING))
    return app


def subscriber() -> FastAPI:
    """With the routes of a group's follower."""
    app, post = _app("Subscriber", HostStatus), object.__new__(Post)
    routes = APIRouter()
    routes.post(HOLD_PATH, name="hold")(post.take)
    routes.get(HOLD_PATH, name="look")(post.look)
    routes.post(RELEASE_PATH, name="release")(post.release)
    routes.post(ADAPTERS_PATH, name="adapters")(object.__new__(Adapters).share)
    app.include_router(routes)
    return app


def mirror() -> FastAPI:
    """With the files that `--serve` offers."""
    app = _app("Mirror", MirrorStatus)
    app.include_router(served(Path()))
    return app


def gateway() -> FastAPI:
    return _app("Gateway", GatewayStatus)


def _app(title: str, status: type[BaseModel]) -> FastAPI:
    return make_app(title, NOTHING, NOTHING, new_registry(), None, NOTHING, status)


def _markdown(lines: list[str]) -> Iterator[str]:
    """Of the text that `/docs` shows: a heading for each route or schema, a table of a schema's fields."""
    title = lines[0].partition(";")[0]
    yield f"\n## {title}\n"
    for block in "\n".join(lines[1:]).strip("\n").split("\n\n"):
        head, *rows = block.split("\n")
        name, _, about = head.partition(": ")
        yield f"\n### `{name}`\n"
        if re.fullmatch(r"[A-Z]+ /\S*", head):
            about, *rows = map(str.strip, rows)
            takes = (row.removeprefix("takes ") for row in rows if row.startswith("takes"))
            answers = (row for row in rows if not row.startswith(("takes", "else")))
            yield _text(about)
            yield from (f"\n- takes {_text(each)}" for each in takes)
            yield f"\n- answers {_text('; '.join(answers))}"
            continue
        yield _text(about.strip()) + "\n"
        yield from ("| field | type | |\n|---|---|---|", *(_row(row.strip()) for row in rows))


def _row(text: str) -> str:
    """`FIELD (TYPE): MEANING` of a schema."""
    field = re.fullmatch(r"(\w+) \((.*?)\)(?:: (.*))?", text)
    name, kind, about = field.groups("") if field else (text, "", "")
    return f"| `{name}` | {_text(kind)} | {_text(about)} |"


def _text(words: str) -> str:
    escaped = words.replace("|", "\\|")
    return escaped if "`" in words else re.sub(r"([<*_])", r"\\\1", escaped)


if __name__ == "__main__":
    print(document(), end="")

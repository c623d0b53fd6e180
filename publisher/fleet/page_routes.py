"""The fleet page at `/`: files of the wheel, built from `publisher/page`.

They are the same for everybody and are served without a token, since a browser cannot send one with an
address; what the page shows it asks for with the token that its reader gives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib.resources import files
from typing import Annotated

from fastapi import APIRouter, Header
from fastapi.responses import Response

_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "licenses.txt": "text/plain; charset=utf-8",
}


def _path(name: str) -> str:
    return "/" if name == "index.html" else f"/page/{name}"


PAGE_PATHS = frozenset(map(_path, _TYPES))

_HEADERS = {
    # Scripts, styles, fonts, pictures and requests: from this publisher or not at all.
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Kept, but asked for each time: an upgraded publisher shows its own page at once.
    "Cache-Control": "no-cache",
}


def page_routes() -> APIRouter:
    """Reads the page once. Raises OSError where the package was installed without it."""
    router = APIRouter(include_in_schema=False)
    built = files("weightcast.publisher") / "page" / "dist"
    for name, media_type in _TYPES.items():
        serve = _serving((built / name).read_bytes(), media_type)
        router.add_api_route(_path(name), serve, methods=["GET", "HEAD"], response_class=Response)
    return router


def _serving(content: bytes, media_type: str) -> Callable[[str | None], Response]:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "ETag": tag}

    def serve(if_none_match: Annotated[str | None, Header()] = None) -> Response:
        known = [each.strip().removeprefix("W/") for each in (if_none_match or "").split(",")]
        if tag in known:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return serve

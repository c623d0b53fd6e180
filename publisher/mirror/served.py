"""The destination over HTTP, read-only, for hosts of the cluster: `--channel http://HOST:8342/channel`."""

from __future__ import annotations

import stat
from http import HTTPStatus
from pathlib import Path

from blake3 import blake3
from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, Response

from weightcast.shared.base.errors import DamagedFile
from weightcast.shared.channel.components import COMPONENTS
from weightcast.shared.channel.layout import ATTEMPTS, HOSTS, PUBLISHERS
from weightcast.shared.channel.store import check_key
from weightcast.shared.daemon.http import Answer

PREFIX = "/channel"
_PRIVATE = ([HOSTS], [PUBLISHERS], ["orders"], ["keep"])
"""of publishers"""
_SMALL = 1 << 20
"""Files up to here may be replaced. They are answered from one read, with a tag made of their bytes"""


class _File(FileResponse):
    chunk_size = 1 << 20


def served(root: Path) -> APIRouter:
    router = APIRouter()

    @router.get(f"{PREFIX}/{{key:path}}", response_class=Response)
    @router.head(f"{PREFIX}/{{key:path}}", response_class=Response, include_in_schema=False)
    def read_file(key: str, request: Request) -> Response:
        """A file of the mirror's destination, as hosts read it with `--channel http://HOST:PORT/channel`."""
        path = _file_of(root, key)
        if path.stat().st_size > _SMALL:
            return _File(path, media_type="application/octet-stream")
        data = path.read_bytes()
        tag = f'"{blake3(data).hexdigest()[:32]}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers={"ETag": tag})
        return Response(data, headers={"ETag": tag}, media_type="application/octet-stream")

    return router


def _file_of(root: Path, key: str) -> Path:
    """Raises Answer for what is not a file of the channel that hosts may read."""
    try:
        parts = check_key(key).split("/")
        # an adapter may have any of these names
        own = parts[3:] if parts[0] == COMPONENTS else parts
        hidden = own[:1] in _PRIVATE or any(one.startswith(".") or one.endswith(ATTEMPTS) for one in own)
        path = root / key
        if not hidden and path.resolve() == root.resolve() / key and stat.S_ISREG(path.stat().st_mode):
            return path
    except (DamagedFile, OSError, ValueError):
        pass
    raise Answer(404, f"{key[:200]!r} is not in the channel", "see docs/FORMAT.md, Layout")

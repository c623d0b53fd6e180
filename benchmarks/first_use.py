"""How long a fresh interpreter takes until it is ready, with and without compiled kernels on disk."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .results import FirstUse

_KERNELS = "from weightcast.shared.codec.warm_up import warm_up; warm_up()"
_FIELD = f"import {__package__}.field_path"


def measure_first_use(directory: Path, *, empty_cache: bool) -> Iterator[FirstUse]:
    """`directory`: where an empty cache of kernels is made. Without `empty_cache` the user's own is used,
    filled first."""
    with tempfile.TemporaryDirectory(dir=directory) as cache:
        environment = {**os.environ, "WEIGHTCAST_CACHE": cache} if empty_cache else dict(os.environ)
        first = _seconds(_KERNELS, environment)
        if empty_cache:
            yield FirstUse(what="weightcast, kernels compiled for the first time", seconds=first)
        ready = min(_seconds(_KERNELS, environment) for _ in range(3))
        yield FirstUse(what="weightcast, kernels read from their cache", seconds=ready)
    yield FirstUse(what="field's path", seconds=min(_seconds(_FIELD, dict(os.environ)) for _ in range(3)))


def _seconds(code: str, environment: dict[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=600)
    return time.perf_counter() - began

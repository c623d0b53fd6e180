"""The limit on open files: a checkpoint of many shards needs more than the usual 1,024."""

from __future__ import annotations

import contextlib
import resource

_MOST = 1 << 20
"""where the hard limit is higher or infinite: some programs close all files up to their limit"""


def raise_limit() -> None:
    """Sets this process's soft limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

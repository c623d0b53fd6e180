"""The limit on open files: a checkpoint of many shards needs more than the usual 1,024."""

from __future__ import annotations

import contextlib
import resource
from errno import EMFILE, ENFILE

from weightcast.shared.errors import RetryLater

_MOST = 1 << 20
"""where the hard limit is higher or infinite: some programs close all files up to their limit"""


def raise_limit() -> None:
    """Sets this process's soft limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def too_many_files(error: OSError) -> RetryLater | None:
    """What to raise instead of an error that says that no further file can be opened."""
    if error.errno == ENFILE:
        return RetryLater("the system has too many open files", remedy="raise the sysctl fs.file-max")
    if error.errno != EMFILE:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return RetryLater(
        f"{error.filename or 'a file'}: too many open files, the limit is {soft:,} (hard limit {hard:,})",
        remedy="raise it above three times the number of shards: `ulimit -n`, LimitNOFILE= of the unit",
    )

"""The tree of errors. What a caller does next is decided where the fact is known, never from message text.

WeightcastError                 exit 1,  HTTP 500
├── Refused                     exit 3,  HTTP 422   permanent: the input is wrong; nothing was changed
│   ├── DamagedFile                                 a file is not what its index, header or digest says
│   ├── UnknownFormat                               a format version or encoding this release does not read
│   ├── WrongRun                                    the directory belongs to another run or another base
│   ├── Forked                                      the chain does not continue what lies here
│   └── Untrusted                                   no trusted key vouches for it
├── NeedsReseed                 exit 3,  HTTP 409   the local checkpoint cannot be patched on; bring it anew
├── NotInTime                   exit 4,  HTTP 504   a deadline passed
├── EngineFailed                exit 5,  HTTP 502   the local checkpoint is right, an engine is not
└── RetryLater                  exit 75, HTTP 503   busy, not visible yet, no space: try again later
    └── Stopped                                     this process ends

An OSError leaves a command or a daemon as an error of `shared/files/disk_errors.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

OK = 0
USAGE = 2


MEND_CHANNEL = (
    "`weightcast channel verify` lists the damage, `weightcast channel repair` fixes what can be fixed"
)
"""the remedy for a damaged file of a channel"""
FIX_ENGINE = (
    "fix the cause (see the engine's log); `weightcast wake URL`, with the subscriber's URL, retries at once"
)
"""the remedy for an engine that failed"""
RESUME = "remove bad checkpoints and rewind the trainer, then `weightcast channel resume`"
"""the remedy while a rollback holds publishing"""
NON_FINITE = "if training broke: `weightcast channel rollback`; --non-finite refuse holds back such versions"
"""the remedy for a version in which elements became NaN or infinite"""


def counted(number: int, noun: str) -> str:
    """For messages: "1 host", "2 hosts", "18,432 tensors"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@contextlib.contextmanager
def on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Calls `undo` when the block raises."""
    try:
        yield
    except BaseException:
        undo()
        raise


def age(seconds: float | None) -> str:
    """For people: `5 s`, `22 min`, `3 h`, `4 days`; `?` where it is not known."""
    if seconds is None:
        return "?"
    for unit, size, most in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if seconds < most:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


class WeightcastError(Exception):
    """`message` says what is wrong and names the file or tensor; `remedy` says what to do about it."""

    exit_code = 1
    http_status = 500

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message


class Refused(WeightcastError):
    """The input is wrong, and nothing was changed: the same call fails again."""

    exit_code = 3
    http_status = 422


class DamagedFile(Refused):
    """A file is not what its index, header or digest says."""


class UnknownFormat(Refused):
    """A format version or encoding that this release does not read."""


class WrongRun(Refused):
    """A directory belongs to another run or another base."""


class Forked(Refused):
    """The channel does not continue what the local checkpoint holds."""


class Linked(Refused):
    """A local file that another directory has too."""


class Untrusted(Refused):
    """No trusted key signed it. `unknown_key`: another key did, which its reader may lack."""

    def __init__(self, message: str, *, remedy: str = "", unknown_key: bool = False) -> None:
        super().__init__(message, remedy=remedy)
        self.unknown_key = unknown_key


class NeedsReseed(WeightcastError):
    """The local checkpoint cannot be patched any more; seed it anew."""

    exit_code = 3
    http_status = 409


class NotInTime(WeightcastError):
    """A deadline passed."""

    exit_code = 4
    http_status = 504


class EngineFailed(WeightcastError):
    exit_code = 5
    http_status = 502


class RetryLater(WeightcastError):
    """Busy, not visible yet, or out of space: the same call may succeed later."""

    exit_code = 75
    http_status = 503


class Stopped(RetryLater):
    """The process ends; what was begun is continued by the next start."""

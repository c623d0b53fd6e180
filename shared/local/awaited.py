"""What a reader of the channel waits for: a file that is missing, unreadable or not yet what it should be."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Awaited:
    """`reason` names the file and says what is wrong with it. `waited`, `left`: seconds since the wait began
    and until it is given up."""

    version: int
    file: str
    reason: str
    retries: int
    waited: float
    left: float


OnWait = Callable[[Awaited | None], None]
"""Called before each retry, with None once the file is right. May raise to give up."""


def ignore(awaited: Awaited | None) -> None:
    pass


@dataclass(frozen=True)
class Patience:
    """How long the files of a version are waited for: `seconds` from `began` (monotonic) on."""

    version: int
    seconds: float
    wait: Callable[[float], None]
    on_wait: OnWait = ignore
    began: float = field(default_factory=time.monotonic)

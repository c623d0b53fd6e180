"""Compiled kernels, ready before the first version needs them."""

from __future__ import annotations

import threading
from typing import Literal

from weightcast.shared.codec.warm_up import warm_up
from weightcast.shared.digest.hash import compiled
from weightcast.shared.errors import Refused
from weightcast.shared.service.facts import Facts, Snapshot
from weightcast.shared.service.logs import get_log

log = get_log("kernels")


class KernelStatus(Facts):
    """`kind`: what digest and codec run on."""

    kind: Literal["starting", "numba", "unusable"] = "starting"
    cached_in: str = ""
    """directory that keeps compiled kernels; empty: every process compiles them anew"""
    problem: str = ""
    """why kernels are not compiled, or not kept"""


STATUS = Snapshot(KernelStatus())
"""of this process"""


def warm_up_in_background() -> None:
    """At a daemon's start: about a minute of one core where nothing is cached. The process may end before it
    is done."""
    threading.Thread(target=_warm_up, name="warm-up", daemon=True).start()


def _warm_up() -> None:
    if kernel_status().kind == "numba":
        warm_up()
    STATUS.set(kernel_status())
    if STATUS.get().problem:
        log.warning("kernels", **STATUS.get().by_name())


def kernel_status() -> KernelStatus:
    """Compiles a first kernel if none is."""
    try:
        compiled()
    except Refused as error:
        return KernelStatus(kind="unusable", problem=f"{error.message}; {error.remedy}")
    from weightcast.shared.digest.native import CACHE, STORE

    if CACHE is None:
        return KernelStatus(
            kind="numba", problem="no private directory to keep kernels in: set WEIGHTCAST_CACHE"
        )
    lost = f"not all can be kept, so that every process compiles some: {STORE.problem}"
    return KernelStatus(kind="numba", cached_in=str(CACHE), problem=lost if STORE.problem else "")

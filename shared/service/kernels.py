"""Compiled kernels, ready before the first version needs them."""

from __future__ import annotations

import threading

from weightcast.shared.codec.warm_up import warm_up


def warm_up_in_background() -> None:
    """At a daemon's start: seconds where nothing is cached. The process may end before it is done."""
    threading.Thread(target=warm_up, name="warm-up", daemon=True).start()

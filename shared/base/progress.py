"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Advance = Callable[[int], None]
"""Called with bytes done since the last call, for progress bars and status."""

"""How many threads work."""

from __future__ import annotations

import os

MEMORY_BUDGET = 256 << 20
SCRATCH_BYTES = 128 << 20
"""of working buffers per thread: a chunk of 4 Mi words as old and new words, changes and code"""

DAEMON_BYTES = 512 << 20
"""that a daemon's own memory grows by at most (tests/publisher/test_core_memory.py)"""


def working_threads(
    threads: int | None, memory_budget: int = MEMORY_BUDGET, *, default: int | None = None
) -> int:
    """Threads asked for (else `default`, else every core), as many as the budget has buffers for."""
    cores = usable_cores()
    wanted = threads if threads is not None else cores if default is None else min(cores, default)
    return max(1, min(wanted, memory_budget // SCRATCH_BYTES))


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

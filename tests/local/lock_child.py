"""Holds a lock until its stdin ends: lock_child.py FILE exclusive|shared."""

import sys
from pathlib import Path

from weightcast.shared.checkpoint.state.locks import FileLock, owner_text

lock = FileLock(Path(sys.argv[1]))
lock.acquire(shared=sys.argv[2] == "shared", text=owner_text() if sys.argv[2] == "exclusive" else "")
print("held", flush=True)
sys.stdin.read()

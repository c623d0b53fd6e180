"""Holds a lock and forks: forking_child.py FILE. Prints the pid of the fork, which lives until it is killed;
releases the lock at a line of stdin, and ends at the next.
"""

import os
import signal
import sys
from pathlib import Path

from weightcast.shared.checkpoint.state.locks import FileLock, owner_text

lock = FileLock(Path(sys.argv[1]))
lock.acquire(text=owner_text())
child = os.fork()
if child == 0:
    print(os.getpid(), flush=True)
    while True:
        signal.pause()
sys.stdin.readline()
lock.release()
print("released", flush=True)
sys.stdin.readline()

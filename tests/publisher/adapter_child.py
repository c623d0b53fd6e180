"""Publishes an adapter until it is killed: adapter_child.py CHANNEL LOCAL BASE FAILPOINT.

It kills itself the first time that it passes FAILPOINT below the directory of the adapter's channel or of its
local checkpoint.
"""

import os
import signal
import sys
from pathlib import Path

from adapters import CONFIG, MATH, adapter

from weightcast.publisher import Publisher
from weightcast.shared.base.failpoints import watch

channel, local, base = map(Path, sys.argv[1:4])


def look(name: str, where: Path | None) -> None:
    if name == sys.argv[4] and where is not None and MATH in str(where):
        os.kill(os.getpid(), signal.SIGKILL)


with Publisher.open(channel, local=local, base=base) as publisher:
    watch(look)
    publisher.publish(adapter(1), component=MATH, config=CONFIG)
print("not killed", flush=True)

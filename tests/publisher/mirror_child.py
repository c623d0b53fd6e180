"""One pass of a mirror that dies at the Nth time that it passes a failpoint, and reads and repairs all:
mirror_child.py FAILPOINT N SOURCE TO KEEP_VERSIONS. Without a failpoint: prints those that it passes."""

import os
import signal
import sys
from collections import Counter
from pathlib import Path

from weightcast.publisher.maintenance.retention import Retention
from weightcast.publisher.mirror.mirror import Mirror, MirrorOptions
from weightcast.shared.base.failpoints import watch
from weightcast.shared.channel.directory_store import open_store

name, number, source, to, kept = sys.argv[1:]
passed: Counter[str] = Counter()


def pass_by(point: str, where: Path | None) -> None:
    passed[point] += 1
    if point == name and passed[point] == int(number):
        os.kill(os.getpid(), signal.SIGKILL)


watch(pass_by)
retention = Retention(int(kept), host_versions=0)
mirror = Mirror(open_store(source), open_store(to), MirrorOptions(retention, grace_seconds=0.0))
mirror.step(verify=True)
mirror.close()
print(*(f"{point}={times}" for point, times in sorted(passed.items())))

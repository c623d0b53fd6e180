"""Run inside user and mount namespaces of its own: little_room_child.py ROOT MOUNT.

A host whose local checkpoint is on a small tmpfs at MOUNT falls behind a run in ROOT while something else
fills that disk but for 1800 KiB. Prints which version it has after one pass, which its engine has loaded, how
many reloads that took, and how many journals are left.
"""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from hosts import Run, SGLang, Site, Weights

VERSIONS = 7
root, mount = map(Path, sys.argv[1:])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(mount)], check=True)
data = np.random.default_rng(1).bytes(1 << 21)
with ExitStack() as stack:
    run = Run(root / "run", stack, base=Weights({"model.embed.weight": ("BF16", (1 << 10, 1 << 10), data)}))
    site, engine = Site(root, stack), SGLang()
    host = site.host(run, engine, local=mount / "local")
    host.step()
    before = len(engine.of("/update_weights_from_disk"))
    for _ in range(VERSIONS):
        run.publish()
    left = os.statvfs(mount)
    (mount / "filler").write_bytes(bytes(left.f_bavail * left.f_frsize - (1800 << 10)))
    status = host.step()
    versions = [n for n in range(VERSIONS + 1) if run.digest(n) == engine.held]
    reloads = len(engine.of("/update_weights_from_disk")) - before
    print(json.dumps([status.ready, host.state.position.version, versions, reloads, len(host.journals)]))

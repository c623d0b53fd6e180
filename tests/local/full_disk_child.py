"""Run inside user and mount namespaces of its own:
full_disk_child.py WHAT CHANNEL BASE MOUNT MEBIBYTES FREE MOMENT.

Mounts a small tmpfs, brings a local checkpoint there to version 0 (WHAT `stage`; `spare`: with one; `repair`:
with a wrong byte, found by reading) or not (`seed`), fills it up to FREE KiB, at once or at the failpoint
MOMENT (for `repair` files may then have FREE KiB), tries to follow, prints what happened; then makes room and
tries again.
"""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

from core_cases import snapshot

from weightcast.shared.base import failpoints
from weightcast.shared.base.errors import RetryLater
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.checkpoint import local_updater
from weightcast.shared.checkpoint.update.plan import Seed

what, channel_dir, base, mount = sys.argv[1], *map(Path, sys.argv[2:5])
size, free = int(sys.argv[5]), int(sys.argv[6])
moment = sys.argv[7]
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}m", "tmpfs", str(mount)], check=True)
local = mount / "local"
updater = local_updater.LocalUpdater(
    open_store(channel_dir), local, base, local_updater.UpdaterOptions(visible_seconds=0.2)
)
channel = Channel.open(open_store(channel_dir))
updater.load(channel)
if what != "seed":
    pointer = channel.pointer()
    assert pointer is not None
    route = updater.route(channel, pointer, 0, exact=True)
    assert isinstance(route.plan, Seed)
    updater.seed(channel, route, route.plan)
if what == "spare":
    updater.paths.spare.write_bytes(bytes(6 << 20))
if what == "repair":
    weights = local / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read()
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    updater.rehash()
filler = mount / "filler"


def fill(name: str, where: Path | None) -> None:
    if what == "repair" and name == moment:
        # its look at the room comes right before it writes
        resource.setrlimit(resource.RLIMIT_FSIZE, (free * 1024, resource.RLIM_INFINITY))
        return
    left = os.statvfs(mount)
    if name == moment and not filler.exists():
        filler.write_bytes(bytes(max(0, left.f_bavail * left.f_frsize - free * 1024)))


if moment:
    failpoints.watch(fill)
else:
    fill("", None)
before = snapshot(local)
try:
    if what == "repair":
        updater.repair(channel)
        outcome = updater.trouble
    else:
        updater.update_to(channel)
        outcome = "no error"
except RetryLater as error:
    outcome = str(error)
same = snapshot(local) == before
updater.release()
failpoints.watch(None)
if what == "repair":
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
filler.unlink(missing_ok=True)
updater.update_to(channel)
assert updater.local is not None
print(json.dumps([outcome, same, updater.local.state.position.version]))
updater.close()

"""Moves a local checkpoint and is killed on the way: patching_child.py WAY CHANNEL LOCAL BASE.

WAY: `patch` to the pointer; `undo` back from there; `seed` from the base; `repair` what differs.
"""

import signal
import sys
from pathlib import Path

from weightcast.shared.channel.channel import Channel
from weightcast.shared.checkpoint.local_updater import LocalUpdater
from weightcast.shared.checkpoint.update.plan import Patch

way, channel_dir, local, base = sys.argv[1], *map(Path, sys.argv[2:5])
updater = LocalUpdater(channel_dir, local, base)
channel = Channel.open(channel_dir)
if way == "seed":
    print("ready", flush=True)
    updater.update_to(channel)
    sys.exit()
updater.load(channel)
if way == "repair":
    print("ready", flush=True)
    updater.rehash()
    updater.repair(channel, lambda nbytes: signal.pause())
pointer = channel.pointer()
assert pointer is not None and updater.local is not None
route = updater.route(channel, pointer, pointer.version, exact=False)
if isinstance(route.plan, Patch):
    for leg in route.plan.legs:
        staged = updater.prepare(route, leg)
        print("ready", flush=True)
        with updater.local.patching():
            updater.patch(staged)
if way == "undo":
    with updater.local.patching():
        print("ready", flush=True)
        updater.undo()
updater.close()

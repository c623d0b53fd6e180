"""Moves a local checkpoint and is killed on the way: patching_child.py WAY CHANNEL LOCAL BASE.

WAY: `patch` to the pointer; `undo` back from there; `seed` from the base; `repair` what differs.
"""

import signal
import sys
from pathlib import Path

from weightcast.shared.channel.store import Channel
from weightcast.shared.checkpoint.follower import Follower
from weightcast.shared.checkpoint.update.plan import Patch

way, channel_dir, local, base = sys.argv[1], *map(Path, sys.argv[2:5])
follower = Follower(channel_dir, local, base)
channel = Channel.open(channel_dir)
if way == "seed":
    print("ready", flush=True)
    follower.catch_up(channel)
    sys.exit()
follower.load(channel)
if way == "repair":
    print("ready", flush=True)
    follower.rehash()
    follower.repair(channel, lambda nbytes: signal.pause())
pointer = channel.pointer()
assert pointer is not None and follower.local is not None
route = follower.route(channel, pointer, pointer.version, exact=False)
if isinstance(route.plan, Patch):
    for leg in route.plan.legs:
        staged = follower.prepare(route, leg)
        print("ready", flush=True)
        with follower.local.patching():
            follower.patch(staged)
if way == "undo":
    with follower.local.patching():
        print("ready", flush=True)
        follower.undo()
follower.close()

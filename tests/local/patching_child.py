"""Moves a local checkpoint and stops, to be killed: patching_child.py WAY CHANNEL LOCAL BASE [MOMENT].

WAY: `patch` to the pointer; `undo` back from there; `seed` from the base; `repair` what differs. Every thread
that passes the failpoint MOMENT stops there; a line says so. `repair` stops before its first word.
"""

import signal
import sys
from pathlib import Path

from weightcast.shared.base.failpoints import watch
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.checkpoint.local_updater import LocalUpdater
from weightcast.shared.checkpoint.update.plan import Patch

way, channel_dir, local, base = sys.argv[1], *map(Path, sys.argv[2:5])
moment = sys.argv[5] if len(sys.argv) > 5 else ""
updater = LocalUpdater(open_store(channel_dir), local, base)
channel = Channel.open(open_store(channel_dir))


def stop() -> None:
    print("stopped", flush=True)
    signal.pause()


def stop_at(name: str, where: Path | None) -> None:
    if name == moment:
        stop()


if way == "seed":
    watch(stop_at)
    updater.update_to(channel)
    sys.exit()
updater.load(channel)
if way == "repair":
    updater.rehash()
    updater.repair(channel, lambda nbytes: stop())
pointer = channel.pointer()
assert pointer is not None and updater.local is not None
route = updater.route(channel, pointer, pointer.version, exact=False)
if way == "patch":
    watch(stop_at)
if isinstance(route.plan, Patch):
    for leg in route.plan.legs:
        staged = updater.prepare(route, leg)
        with updater.local.patching():
            updater.patch(staged)
if way == "undo":
    watch(stop_at)
    with updater.local.patching():
        updater.undo()
updater.close()

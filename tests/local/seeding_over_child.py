"""Run inside user and mount namespaces of its own:
seeding_over_child.py HOW CHANNEL BASE OTHER MOUNT MEBIBYTES FREE.

Mounts a small tmpfs, seeds a local checkpoint there from BASE, fills it up to FREE KiB, and seeds it again:
from the anchor of version 1, or (HOW `others`) from OTHER, the same weights in other files. Before that the
file of the weights gets a second name (`linked`) or holes (`holes`), or is opened (`open`). Prints what
happened, whether the local checkpoint was left as it was, and whether it has the new weights.
"""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from core_cases import read_checkpoint, snapshot

from weightcast.shared.base.errors import RetryLater
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.layout import anchor_key
from weightcast.shared.checkpoint.local_updater import LocalUpdater, UpdaterOptions
from weightcast.shared.checkpoint.update.plan import Patch, Seed

how, channel_dir, base, other, mount = sys.argv[1], *map(Path, sys.argv[2:6])
size, free = int(sys.argv[6]), int(sys.argv[7])
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}m", "tmpfs", str(mount)], check=True)
local, channel = mount / "local", Channel.open(open_store(channel_dir))


def seed(base: Path, version: int) -> None:
    updater = LocalUpdater(open_store(channel_dir), local, base, UpdaterOptions(visible_seconds=0.2))
    try:
        pointer = channel.pointer()
        assert pointer is not None
        route = updater.route(channel, pointer, version, exact=True)
        updater.seed(channel, route, Seed(version, Patch((), 0), "asked for"))
    finally:
        updater.close()


seed(base, 0)
weights = local / "model.safetensors"
with ExitStack() as opened:
    if how == "linked":
        os.link(weights, mount / "linked")
    elif how == "open":
        opened.enter_context(weights.open("rb"))
    elif how == "holes":
        length = weights.stat().st_size
        os.truncate(weights, 1 << 16)
        os.truncate(weights, length)
    left = os.statvfs(mount)
    (mount / "filler").write_bytes(bytes(max(0, left.f_bavail * left.f_frsize - free * 1024)))
    before = snapshot(local)
    source, version = (other, 0) if how == "others" else (channel_dir / anchor_key(1), 1)
    try:
        seed(other if how == "others" else base, version)
        outcome = "no error"
    except RetryLater as error:
        outcome = str(error)
same, there = snapshot(local) == before, read_checkpoint(local) == read_checkpoint(source)
print(json.dumps([outcome, same, there]))

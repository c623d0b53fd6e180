"""Run inside user and mount namespaces of its own: short_disk_child.py WHAT ROOT MOUNT.

Publishes from ROOT with a local checkpoint on a small tmpfs at MOUNT, keeping history, until something else
fills that disk. Then WHAT: a version is published (`publish`) or submitted (`submit`), one of another
publisher is caught up with (`follow`), or the oldest version that history leads to is published again
(`rollback`), first on the full disk, then with room. Prints errors, the versions whose journals are kept
before and after, and whether the last version has the right bytes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from core_cases import Model, all_changed, bytes_of, read_checkpoint, tensor, write_checkpoint

from weightcast.publisher import PublisherOptions, init_channel
from weightcast.publisher.maintenance.orders import order_rollback
from weightcast.publisher.maintenance.upkeep import UpkeepOptions
from weightcast.publisher.run_publisher import RunPublisher
from weightcast.shared.base.errors import RetryLater
from weightcast.shared.channel.directory_store import open_store

what, root, mount = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(mount)], check=True)
rng = np.random.default_rng(17)
models: list[Model] = [{f"w{n}": tensor(rng, "F16", 1 << 19) for n in range(4)}]
channel, local, history = root / "channel", mount / "local", mount / "local/.weightcast/history"
init_channel(channel, write_checkpoint(root / "base", models[0]))
keeping = UpkeepOptions(skip_span=64)
errors: list[str] = []


def grow(publisher: RunPublisher) -> None:
    models.append(all_changed(models[-1], rng, 40_000))
    new = write_checkpoint(root / f"new-{len(models)}", models[-1])
    assert publisher.publish_checkpoint(new).version == len(models) - 1


def kept() -> list[int]:
    return sorted(int(path.stem) for path in history.glob("*.journal"))


def fill() -> Path:
    filler, left = mount / "filler", os.statvfs(mount)
    filler.write_bytes(bytes(max(0, left.f_bavail * left.f_frsize - (100 << 10))))
    return filler


with RunPublisher.open(
    channel, local=local, base=root / "base", options=PublisherOptions(upkeep_thread=False, upkeep=keeping)
) as publisher:
    for _ in range(8):
        grow(publisher)
    before = kept()
    if what == "submit":
        fill()
        models.append(all_changed(models[-1], rng, 40_000))
        words = {name: one.data.view("<f2") for name, one in models[-1].items()}
        publisher.submit(words).result()
    elif what == "publish":
        fill()
        grow(publisher)

if what == "follow":
    with RunPublisher.open(channel, local=root / "other", base=root / "base") as other:
        grow(other)
    fill()
    RunPublisher.open(
        channel, local=local, options=PublisherOptions(upkeep_thread=False, upkeep=keeping)
    ).close()
elif what == "rollback":
    order_rollback(open_store(channel), before[0] - 1)
    models.append(models[before[0] - 1])
    filler = fill()
    with RunPublisher.open(
        channel, local=local, options=PublisherOptions(upkeep_thread=False, upkeep=keeping)
    ) as publisher:
        try:
            publisher.obey_orders()
        except RetryLater as error:
            errors.append(str(error))
        assert kept() == before
        filler.unlink()
        publisher.obey_orders()

right = read_checkpoint(local) == bytes_of(models[-1])
print(json.dumps([errors, before, kept(), right, (channel / "latest").read_text()]))

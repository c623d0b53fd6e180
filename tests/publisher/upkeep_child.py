"""Publishes NEW, if given, makes what is due and dies at a failpoint:
upkeep_child.py FAILPOINT CHANNEL LOCAL BASE [NEW]."""

import os
import signal
import sys
from pathlib import Path

from weightcast.publisher import PublisherOptions
from weightcast.publisher.maintenance.retention import Retention
from weightcast.publisher.maintenance.upkeep import UpkeepOptions
from weightcast.publisher.run_publisher import RunPublisher
from weightcast.shared.base.failpoints import watch

name, channel, local, base, *new = sys.argv[1:]


def die(passed: str, where: Path | None) -> None:
    if passed == name:
        os.kill(os.getpid(), signal.SIGKILL)


retention = Retention(2, host_versions=0)
options = UpkeepOptions(skip_span=4, history_share=1000.0, retention=retention, grace_seconds=0.0)
with RunPublisher.open(
    channel, local=local, base=base, options=PublisherOptions(upkeep_thread=False, upkeep=options)
) as publisher:
    watch(die)
    for directory in new:
        publisher.publish_checkpoint(directory)
    print(publisher.make_due(), publisher.make_due(), flush=True)

"""A publisher's daemon that dies at the n-th passing of a failpoint: receiving_child.py NAME N FLAGS..."""

import os
import signal
import sys
from pathlib import Path

from weightcast.publisher.daemon.daemon import run_publisher
from weightcast.publisher.daemon.settings import PublisherSettings
from weightcast.shared.base.failpoints import watch

name, left = sys.argv[1], int(sys.argv[2])
channel, base, local, hand_over, port_file = map(Path, sys.argv[3:8])


def die(passed: str, where: Path | None) -> None:
    global left
    left -= passed == name
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)


watch(die)
run_publisher(
    PublisherSettings(
        channel=channel,
        base=base,
        local=local,
        hand_over=hand_over,
        port=0,
        port_file=port_file,
        threads=1,
        poll_seconds=0.1,
        take_over=True,
        skip_span=0,
    )
)

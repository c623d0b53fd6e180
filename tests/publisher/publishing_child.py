"""Publishes until it is killed: publishing_child.py CHANNEL LOCAL BASE SEED [PHASE].

Prints each version; with PHASE, stops there for good at the second version.
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np
from publisher_cases import as_numpy, numpy_model

from weightcast.publisher import Publisher
from weightcast.shared.codec.warm_up import warm_up

channel, local, base = map(Path, sys.argv[1:4])
seed = int(sys.argv[4])
stop_at = sys.argv[5] if len(sys.argv) > 5 else ""
model = numpy_model(np.random.default_rng(3))
rng = np.random.default_rng(seed)
published = 0


def watching(phase: str) -> None:
    if phase == stop_at and published == 1:
        print("stopped", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)


warm_up()
with Publisher.open(channel, local=local, base=base) as publisher:
    print("ready", publisher.version, flush=True)
    while True:
        model = {name: one.changed(rng, 4) if len(one.data) else one for name, one in model.items()}
        given = {name: as_numpy(one) for name, one in model.items()}
        version = publisher.publish(given, watching=watching).version
        published += 1
        print("published", version, flush=True)

"""Hands weights over until it is killed: handing_child.py EXPORT MOMENT.

The second time it dies at MOMENT: in the middle of the copy, or at a failpoint of the commit.
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np
from core_cases import all_changed
from publisher_cases import as_numpy, numpy_model

from weightcast.publisher.trainer.handover import HandOver
from weightcast.publisher.weights.given import CastTensor
from weightcast.shared.base.failpoints import watch

export, moment = Path(sys.argv[1]), sys.argv[2]
model = numpy_model(np.random.default_rng(3))


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def failing(name: str, where: Path | None) -> None:
    if name == moment and where is not None and where.name in ("a.json", "b.json", export.name):
        die()


with HandOver(export) as hand_over:
    first = all_changed(model, np.random.default_rng(1))
    hand_over.put({name: as_numpy(one) for name, one in first.items()}, step=1)
    second = all_changed(first, np.random.default_rng(2))
    given = {name: as_numpy(one) for name, one in second.items()}
    if moment == "copying":
        given["f32.matrix"] = CastTensor(given["f32.matrix"], "F32", die)
    watch(failing)
    hand_over.put(given, step=2)
    print("put", flush=True)

"""One rank of a publication: rank_child.py CHANNEL LOCAL BASE RANK WORLD STEPS ENCODING HOW DEADLINE.

Publishes its share of the tensors for steps 1..STEPS and prints a line of JSON for each. HOW: `well`;
`absent` (publishes nothing); `failing` (an error of its own); `greedy` (gives a tensor of another rank's
too); `other-encoding`; `other-step`.
"""

import json
import sys
from pathlib import Path

import numpy as np
from core_cases import Model, all_changed
from publisher_cases import as_numpy, numpy_model

from weightcast.publisher import Publisher, PublisherOptions
from weightcast.shared.base.errors import WeightcastError

channel, local, base = map(Path, sys.argv[1:4])
rank, world, steps = map(int, sys.argv[4:7])
encoding, how, deadline = sys.argv[7], sys.argv[8], float(sys.argv[9])


def share(model: Model, of: int) -> Model:
    return {name: one for name, one in model.items() if list(model).index(name) % world == of}


def given(model: Model) -> Model:
    mine = share(model, rank)
    if how == "greedy":
        mine |= dict(list(share(model, (rank + 1) % world).items())[:1])
    return mine


def broken():  # type: ignore[no-untyped-def]
    raise ValueError("the tensors\nare away")
    yield


encoding = "overwrite" if how == "other-encoding" else encoding
model = numpy_model(np.random.default_rng(3))
rng = np.random.default_rng(4)
with Publisher.open(
    channel,
    local=local,
    base=base,
    rank=rank,
    world_size=world,
    encoding=encoding,  # type: ignore[arg-type]
    options=PublisherOptions(deadline_seconds=deadline),
) as publisher:
    print("ready", flush=True)
    for step in range(1, steps + 1):
        model = all_changed(model, rng, 3)
        if how == "absent":
            continue
        tensors = {name: as_numpy(one) for name, one in given(model).items()}
        try:
            wanted = step + 7 if how == "other-step" else step
            report = publisher.publish(broken() if how == "failing" else tensors, step=wanted)
            print(json.dumps([report.version, report.root, report.tensors_changed]), flush=True)
        except (WeightcastError, ValueError) as error:
            print(json.dumps([type(error).__name__, str(error)]), flush=True)
            break

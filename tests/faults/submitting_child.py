"""A trainer on a channel that stops answering: submitting_child.py SOURCE MOUNT RULES LOCAL BASE.

Runs in namespaces of its own. Prints a line for each thing that went on.
"""

import json
import os
import signal
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "publisher"), str(TESTS)]

import numpy as np  # noqa: E402
from core_cases import all_changed  # noqa: E402
from faulty_fs import serve  # noqa: E402
from publisher_cases import as_numpy, numpy_model  # noqa: E402

from weightcast.publisher import Publisher  # noqa: E402

source, mount, rules, local, base = map(Path, sys.argv[1:6])


def tell(*all_rules: object) -> None:
    new = rules.with_suffix(".new")
    new.write_text(json.dumps(all_rules))
    new.rename(rules)


here, there = os.pipe()
server = os.fork()
if server == 0:
    serve(source, mount, rules, lambda: bool(os.write(there, b"1")))
    os._exit(0)
os.read(here, 1)
try:
    model = numpy_model(np.random.default_rng(3))
    with Publisher.open(mount, local=local, base=base) as publisher:
        for seed in (1, 2):
            model = all_changed(model, np.random.default_rng(seed))
            arrays = {name: as_numpy(one).copy() for name, one in model.items()}
            if seed == 2:
                tell({"path": "*", "action": "hang"})
            handle = publisher.submit(arrays, step=seed)
            for array in arrays.values():
                array.reshape(-1).view(np.uint8)[...] ^= 1
            print("free", handle.free, "done", handle.done, flush=True)
            tell()
            print("version", handle.result(120).version, flush=True)
finally:
    os.kill(server, signal.SIGKILL)

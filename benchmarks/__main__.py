"""python -m benchmarks: the verb `weightcast bench` in a checkout."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint

from weightcast.shared.cli.main import VERBS, run

if __name__ == "__main__":
    verb = EntryPoint("benchmarks", f"{__package__}.verbs:register", VERBS)
    sys.exit(run(["bench", *sys.argv[1:]], [verb]))

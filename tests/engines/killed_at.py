"""The command `weightcast`, sent a signal where it first passes a failpoint:
killed_at.py FAILPOINT SIGNAL ARGUMENTS..."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from weightcast.shared.base import failpoints
from weightcast.shared.cli.main import main


def struck_at(wanted: str, number: signal.Signals) -> None:
    left = [wanted]

    def pass_by(name: str, where: Path | None) -> None:
        if name in left:
            left.remove(name)
            os.kill(os.getpid(), number)

    failpoints.watch(pass_by)


if __name__ == "__main__":
    struck_at(sys.argv[1], signal.Signals[sys.argv[2]])
    main(sys.argv[3:])

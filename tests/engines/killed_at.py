"""The command `weightcast`, killed where it first passes a failpoint: killed_at.py FAILPOINT ARGUMENTS..."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from weightcast.shared import failpoints
from weightcast.shared.service.cli import main


def killed_at(wanted: str) -> None:
    def pass_by(name: str, where: Path | None) -> None:
        if name == wanted:
            os.kill(os.getpid(), signal.SIGKILL)

    failpoints.watch(pass_by)


if __name__ == "__main__":
    killed_at(sys.argv[1])
    main(sys.argv[2:])

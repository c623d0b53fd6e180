"""Makes the modules of this folder importable from the tests of every room."""

import os
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings

# how fast inputs are drawn says more about the machine's other work than about a strategy
settings.register_profile("shared-machine", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("shared-machine")

# set in the processes of pytest-xdist: what goes into a pipe would be wrapped as on a small terminal
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)


def in_memory(directory: Path) -> bool:
    """Whether it lies in a file system of type tmpfs."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [fields for fields in mounts if directory.is_relative_to(fields[1])]
    return max(inside, key=lambda fields: len(fields[1]))[2] == "tmpfs"


# there files have no blocks to write over, and Debian 13 has /tmp so
if "TMPDIR" not in os.environ and in_memory(Path(tempfile.gettempdir()).resolve()):
    os.environ["TMPDIR"] = "/var/tmp"
    tempfile.tempdir = None

"""What kind of file system a file lies on."""

from __future__ import annotations

import os
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")


def file_system(device: int) -> str:
    """The kernel's name (`ext4`, `tmpfs`, `nfs4`) for `st_dev`; empty where it cannot be told. Fields of
    mountinfo as in proc(5): major:minor is the third, the type the first after the lone hyphen."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        fields = line.split()
        if fields[2:3] == [wanted] and "-" in fields:
            return "".join(fields[fields.index("-") + 1 :][:1])
    return ""

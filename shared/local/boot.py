"""What identifies this boot of this machine: a journal is trusted only within one."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MACHINE_ID = Path("/etc/machine-id")


@dataclass(frozen=True)
class Boot:
    """Empty strings where the system does not tell: then nothing unsynced is trusted after a restart."""

    boot_id: str
    machine_id: str

    @classmethod
    def here(cls) -> Boot:
        return cls(_line(_BOOT_ID), _line(_MACHINE_ID) or socket.gethostname())

    def same_boot(self, other: Boot) -> bool:
        return bool(self.boot_id) and self == other


UNKNOWN_BOOT = Boot("", "")


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

"""What identifies this boot of this machine: a journal is trusted only within one."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from weightcast.shared.files.system_files import BOOT_ID, MACHINE_ID, system_text


@dataclass(frozen=True)
class Boot:
    """Empty strings where the system does not tell: then nothing unsynced is trusted after a restart."""

    boot_id: str
    machine_id: str

    @classmethod
    def here(cls) -> Boot:
        return cls(system_text(BOOT_ID), system_text(MACHINE_ID) or socket.gethostname())

    def same_boot(self, other: Boot) -> bool:
        return bool(self.boot_id) and self == other


UNKNOWN_BOOT = Boot("", "")

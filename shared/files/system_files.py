"""Small files in which the system tells of itself."""

from __future__ import annotations

from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MACHINE_ID = Path("/etc/machine-id")


def system_text(path: Path) -> str:
    """Empty where the system does not tell."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""

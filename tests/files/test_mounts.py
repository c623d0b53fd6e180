"""Kinds of file systems."""

from __future__ import annotations

import os
from pathlib import Path

from weightcast.shared.files.system import file_system


def test_known_mounts_have_their_kinds() -> None:
    assert file_system(Path("/proc").stat().st_dev) == "proc"
    assert file_system(Path("/dev/shm").stat().st_dev) == "tmpfs"


def test_an_unknown_device_has_none() -> None:
    assert file_system(os.makedev(4095, 1048575)) == ""

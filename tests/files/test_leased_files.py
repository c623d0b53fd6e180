"""Files of others that are read in place: whole while a lease holds, an error where none is to be had."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from weightcast.shared.base.errors import DamagedFile, RetryLater
from weightcast.shared.files.mapping import LeasedFile

DATA = np.random.default_rng(3).integers(0, 256, 100_000, np.uint8).tobytes()
WAIT = 20.0

_TRUNCATE = """
import os, sys
print("ready", flush=True)
os.truncate(sys.argv[1], 10)
print("done", flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    file.write_bytes(DATA)
    return file


def test_views_are_the_files_bytes(path: Path) -> None:
    file = LeasedFile(path, follow_links=False)
    assert file.view(0, len(DATA)).tobytes() == DATA
    assert file.view(777, 1001).tobytes() == DATA[777:1778]
    assert file.view(len(DATA), 0).tobytes() == b""
    file.close()


def test_a_file_in_use_is_not_cut_short_before_it_is_closed(path: Path) -> None:
    file = LeasedFile(path, follow_links=False)
    view = file.view(0, len(DATA))
    command = [sys.executable, "-c", _TRUNCATE, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "ready\n"
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.5)
        assert view.tobytes() == DATA
        del view
        file.close()
        assert other.stdout.readline() == "done\n"
        assert other.wait(WAIT) == 0
    assert path.stat().st_size == 10


def test_a_file_that_is_being_written_is_read_and_its_end_is_an_error(path: Path) -> None:
    with path.open("r+b") as writer:
        file = LeasedFile(path, follow_links=False)
        assert file.view(5, 5000).tobytes() == DATA[5:5005]
        writer.truncate(4000)
        with pytest.raises(RetryLater, match=r"model\.safetensors was cut short"):
            file.view(5, 5000)
        file.close()


def test_reading_past_the_end_is_an_error(path: Path) -> None:
    file = LeasedFile(path, follow_links=False)
    with pytest.raises(RetryLater, match="cut short"):
        file.view(len(DATA) - 1, 2)
    file.close()


def test_an_empty_file_has_an_empty_view(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    file = LeasedFile(tmp_path / "empty", follow_links=False)
    assert file.view(0, 0).tobytes() == b""
    file.close()


def test_links_are_followed_only_when_asked(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    with pytest.raises(DamagedFile, match="not a regular file"):
        LeasedFile(link, follow_links=False)
    file = LeasedFile(link, follow_links=True)
    assert file.view(0, 10).tobytes() == DATA[:10]
    file.close()


def test_no_descriptor_is_left_open(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        file = LeasedFile(path, follow_links=False)
        file.view(0, 10)
        file.close()
    assert len(os.listdir("/proc/self/fd")) == before

"""Pages made present at once."""

from __future__ import annotations

import mmap
import os
import resource
import tempfile
from pathlib import Path

import numpy as np

from weightcast.shared.files.mapping import populate, ready_to_write

SIZE = 16 << 20


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_populated_pages_fault_no_more_and_keep_their_bytes() -> None:
    data = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.write(data.tobytes())
        file.flush()
        with mmap.mmap(file.fileno(), SIZE) as mapped:
            words = np.frombuffer(mapped, np.uint8)[100:-100]
            populate(words)
            before = faults()
            words[:: mmap.PAGESIZE] ^= 0
            assert faults() - before < SIZE // mmap.PAGESIZE // 4
            assert np.array_equal(words, data[100:-100])
            del words


def test_a_file_made_ready_keeps_its_bytes_and_what_was_stored_before(tmp_path: Path) -> None:
    data = np.random.default_rng(2).integers(0, 256, SIZE, np.uint8)
    path = tmp_path / "file"
    path.write_bytes(data.tobytes())
    with path.open("r+b") as file, mmap.mmap(file.fileno(), SIZE) as mapped:
        words = np.frombuffer(mapped, np.uint8)
        words[5] = data[5] = 7  # not written back yet
        ready_to_write(words[100:-100])
        os.fsync(file.fileno())
        ready_to_write(words[100:-100])
        before = faults()
        words[4096 :: mmap.PAGESIZE] ^= 0
        assert faults() - before < SIZE // mmap.PAGESIZE // 4
        assert np.array_equal(words, data)
        del words
    assert path.read_bytes() == data.tobytes()


def test_pages_are_mapped_anew_unless_the_first_may_be_written(tmp_path: Path) -> None:
    """That would take as long as writing what changes in them. What is stored in a private mapping is lost
    with its pages."""
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE))
    with path.open("rb") as file, mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_COPY) as mapped:
        words = np.frombuffer(mapped, np.uint8)
        words[-1] = 7
        ready_to_write(words)
        assert words[-1] == 0
        words[-1] = 7
        ready_to_write(words)
        assert words[-1] == 7
        del words

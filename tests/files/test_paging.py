"""Pages made present at once."""

from __future__ import annotations

import mmap
import resource
import tempfile

import numpy as np

from weightcast.shared.files.paging import populate

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

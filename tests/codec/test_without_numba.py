"""The same tests on the numpy kernels, in a process where numba cannot compile. With the golden blobs among
them, each kind of kernel reads and writes the other's bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from weightcast.shared.codec.warm_up import warm_up
from weightcast.shared.digest.hash import kernels

ROOT = Path(__file__).parent.parent.parent
FILES = [
    "tests/codec/test_golden_blobs.py",
    "tests/codec/test_chunks.py",
    "tests/codec/test_scan.py",
    "tests/digest",
]
TOO_SLOW = "small_steps any_words any_table under_the_checksum random_payloads all_words with_contexts near"
SELECTION = "not (" + " or ".join(TOO_SLOW.split()) + ")"


def in_a_process_without_numba(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_numba_is_used_here_and_not_there() -> None:
    warm_up()
    assert kernels() == "numba"
    code = "from weightcast.shared.digest.hash import kernels; print(kernels())"
    assert in_a_process_without_numba("-c", code).stdout == "numpy\n"


def test_all_tests_pass_on_the_numpy_kernels() -> None:
    options = ["-q", "-p", "no:cacheprovider", "-k", SELECTION]
    done = in_a_process_without_numba("-m", "pytest", *options, *FILES)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]

"""The codec's tests on the numpy oracle, in a process of its own. The golden blobs are among them: the oracle
and the compiled kernels read and write the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FILES = [
    "tests/codec/test_golden_blobs.py",
    "tests/codec/test_chunks.py",
    "tests/codec/test_scan.py",
    "tests/digest/test_lanes.py",
    "tests/digest/test_root.py",
    "tests/digest/test_touched.py",
]
TOO_SLOW = "small_steps any_words any_table under_the_checksum random_payloads all_words with_contexts near"
SELECTION = "not (" + " or ".join(TOO_SLOW.split()) + ")"


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_all_tests_pass_on_the_oracle() -> None:
    options = ["-q", "-p", "no:cacheprovider", "-k", SELECTION]
    done = run("-m", "pytest", *options, *FILES, WEIGHTCAST_TEST_ORACLE="1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_a_machine_that_cannot_compile_is_refused_with_the_reason(tmp_path: Path) -> None:
    done = run(
        "-m",
        "weightcast.shared.cli.main",
        "bench",
        "--quick",
        "--json",
        NUMBA_DISABLE_JIT="1",
        WEIGHTCAST_CACHE=str(tmp_path),
    )
    assert done.returncode == 3, done.stdout + done.stderr
    assert "NUMBA_DISABLE_JIT is set" in done.stdout + done.stderr

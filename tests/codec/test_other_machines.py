"""Kernels that move lanes of vectors or ask for memory ahead, compiled for machines that have less of the
one, or want the other otherwise, than this one may."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
_AVX2 = "+sse4.2,+avx,+avx2,+bmi,+bmi2,+popcnt,+lzcnt,+fma"
MACHINES = {
    "haswell": _AVX2,
    "skylake-avx512": f"{_AVX2},+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512cd",
    "znver3": _AVX2,
}


def runs(features: str) -> bool:
    """Whether this machine has them."""
    from llvmlite import binding

    ours = set(binding.get_host_cpu_features().flatten().split(","))
    return set(features.split(",")) <= ours


@pytest.mark.parametrize("name", MACHINES)
def test_the_same_words_there(name: str) -> None:
    if not runs(MACHINES[name]):
        pytest.skip("this machine cannot run what is compiled for the other")
    environment = {**os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": MACHINES[name]}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/codec/test_exchange.py"]
    command += [
        "tests/codec/test_scan.py",
        "tests/codec/test_decoded_sums.py",
        "-k",
        "mask or pages or behind or exchange or several_blocks or padding or many_blocks or many_short_spans",
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]

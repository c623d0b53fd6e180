"""The kept corpus, and a little beside it: only weightcast's own errors come out of any reader."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fuzz_targets import TARGETS
from hypothesis import given
from hypothesis import strategies as st
from test_fuzz_parsers import QUICK, damaged, tolerates

CORPUS = Path(__file__).with_name("corpus")
CHILD = Path(__file__).with_name("memory_child.py")
KEPT = sorted(path for path in CORPUS.rglob("*") if path.is_file())


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_corpus(path: Path) -> None:
    _, read = TARGETS[path.parent.name]
    tolerates(read, path.read_bytes())


def test_every_reader_has_a_corpus() -> None:
    assert {path.parent.name for path in KEPT} == set(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
@QUICK
@given(data=st.data())
def test_damaged_examples(name: str, data: st.DataObject) -> None:
    good, read = TARGETS[name]
    tolerates(read, damaged(data, good))


@pytest.mark.parametrize("kind", ["lists", "objects", "numbers", "strings", "deep", "wide text"])
def test_memory_stays_bounded(kind: str) -> None:
    """A hostile index as large as one may be, read under a limit of memory."""
    done = subprocess.run(
        [sys.executable, str(CHILD), kind], capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "refused"), done.stderr[-2000:]

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

# runs, engines, mounts and daemons are shared with other rooms' tests
TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / room) for room in ("faults", "subscriber", "crash", "browser")] + [str(TESTS)]

from faultkit import Namespace, Place  # noqa: E402


@pytest.fixture(scope="session")
def namespace() -> Iterator[Namespace]:
    made = Namespace()
    yield made
    made.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def place(namespace: Namespace, tmp_path: Path, stack: ExitStack) -> Place:
    return Place(namespace, tmp_path, stack)

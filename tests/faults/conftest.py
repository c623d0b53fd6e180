from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

# runs, engines and orders for processes are shared with other rooms' tests
TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "subscriber"), str(TESTS / "crash"), str(TESTS)]

from faultkit import Namespace, Place  # noqa: E402
from hosts import Site  # noqa: E402


@pytest.fixture(scope="session")
def namespace() -> Iterator[Namespace]:
    made = Namespace()
    yield made
    made.close()


@pytest.fixture
def place(namespace: Namespace, tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(namespace, tmp_path, stack)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(tmp_path, stack)

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import Cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    try:
        made.start()
        yield made
    finally:
        made.close()

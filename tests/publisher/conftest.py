"""The places that most tests of publishers work in."""

from pathlib import Path

import pytest
from daemonkit import Places
from publisher_cases import Place, make_place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return make_place(tmp_path)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places.made(tmp_path)

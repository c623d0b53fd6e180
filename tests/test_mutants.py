"""The bugs of `tests/mutants.py` can still be planted, and their tests exist."""

from __future__ import annotations

import pytest
from mutants import MUTANTS, ROOT


@pytest.mark.parametrize("name", MUTANTS)
def test_it_can_be_planted(name: str) -> None:
    mutant = MUTANTS[name]
    compile(mutant.planted(), mutant.file, "exec")
    assert all((ROOT / test).is_file() for test in mutant.tests.split())

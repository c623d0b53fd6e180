"""Every test that docs/hazards.md and docs/reliability.md name exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| (?P<situation>[^|]+) \| (?P<outcome>[^|]+) \| (?P<shown>[^|]+) \|$")


def rows() -> list[re.Match[str]]:
    lines = (ROOT / "docs/hazards.md").read_text().splitlines()
    found = [ROW.fullmatch(line) for line in lines if line.startswith("|") and "---" not in line]
    assert all(found), "every row has three cells"
    return [row for row in found if row is not None and row["situation"] != "situation"]


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["situation"][:40])
def test_a_hazard_has_its_test_or_is_a_limit(row: re.Match[str]) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row["shown"])
    assert named or row["shown"] == "limit"
    for path, name in named:
        assert name in functions_of(ROOT / path), f"{path}::{name}"


def test_files_that_the_reliability_page_names_exist() -> None:
    text = (ROOT / "docs/reliability.md").read_text()
    for path in re.findall(r"`(tests/[\w/]+(?:\.py)?)`", text):
        assert (ROOT / path).exists(), path

"""The failpoints in the code and in their document; only tests arm them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash_failpoints import FAILPOINTS

from weightcast.shared.base import failpoints
from weightcast.shared.base.failpoints import failpoint, watch
from weightcast.shared.files import durable

ROOT = Path(__file__).parents[2]
PACKAGES = ("shared", "publisher", "subscriber")


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text())


def calls(module: ast.Module, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and name in (
            getattr(node.func, "id", ""),
            getattr(node.func, "attr", ""),
        ):
            yield node


def test_the_documentation_lists_every_failpoint_in_the_code_once() -> None:
    found = [ast.literal_eval(call.args[0]) for _, module in modules() for call in calls(module, "failpoint")]
    assert sorted(set(found)) == sorted(FAILPOINTS)


def test_nothing_in_the_packages_can_arm_one() -> None:
    """No import of anything but `failpoint` itself, and no other word of the module's inside."""
    for path, module in modules():
        if path == Path("shared/base/failpoints.py"):
            continue
        for node in ast.walk(module):
            if isinstance(node, ast.ImportFrom) and node.module == "weightcast.shared.base.failpoints":
                assert [alias.name for alias in node.names] == ["failpoint"], path
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name.rpartition(".")[2] for alias in node.names}
                assert "failpoints" not in names, path
            assert not (isinstance(node, ast.Attribute) and node.attr == "failpoints"), path


def test_the_module_reads_nothing_from_outside() -> None:
    module = ast.parse((ROOT / "shared" / "base" / "failpoints.py").read_text())
    imported = {node.module for node in ast.walk(module) if isinstance(node, ast.ImportFrom)}
    assert imported == {"__future__", "collections.abc", "pathlib"}
    assert not [node for node in ast.walk(module) if isinstance(node, ast.Import)]
    assert not [*calls(module, "open"), *calls(module, "__import__"), *calls(module, "read_text")]


@pytest.fixture
def seen() -> Iterator[list[str]]:
    names: list[str] = []
    watch(lambda name, where: names.append(f"{name} {'' if where is None else where.name}".strip()))
    yield names
    watch(None)


def test_they_are_passed_in_the_order_of_what_happens(seen: list[str], tmp_path: Path) -> None:
    durable.replace(tmp_path / "state", b"a")
    order = ["file.begun", "file.written", "file.synced", "file.renamed"]
    assert seen == [*(f"{name} state" for name in order), f"directory.synced {tmp_path.name}"]


def test_an_unwatched_one_does_nothing() -> None:
    assert failpoints._watcher is None
    failpoint("no such name, and nobody asks")

"""What has a name: a file system that fails is never taken for a file that is missing."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weightcast.shared.files.paths import exists, is_directory, is_file, is_link, matching

_ROOT = Path(__file__).parents[2]
_QUESTIONS = (exists, is_directory, is_file, is_link)
_OF_PATHLIB = {"exists", "is_dir", "is_file", "is_symlink", "glob"}


def _answers(path: Path) -> tuple[bool, ...]:
    return tuple(question(path) for question in _QUESTIONS)


def test_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "to-file").symlink_to("file")
    (tmp_path / "to-directory").symlink_to(tmp_path)
    (tmp_path / "to-nothing").symlink_to("nothing")
    (tmp_path / "to-itself").symlink_to("to-itself")
    os.mkfifo(tmp_path / "pipe")
    assert _answers(tmp_path) == (True, True, False, False)
    assert _answers(tmp_path / "file") == (True, False, True, False)
    assert _answers(tmp_path / "pipe") == (True, False, False, False)
    assert _answers(tmp_path / "to-file") == (True, False, True, True)
    assert _answers(tmp_path / "to-directory") == (True, True, False, True)
    assert _answers(tmp_path / "to-nothing") == (False, False, False, True)
    assert _answers(tmp_path / "to-itself") == (False, False, False, True)


@pytest.mark.parametrize("name", ["nothing", "file/below-a-file", "a\0b"])
def test_what_there_is_not(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert _answers(tmp_path / name) == (False, False, False, False)


@pytest.mark.parametrize("question", [*_QUESTIONS, lambda path: matching(path, "*")])
def test_errors_are_raised(tmp_path: Path, question: Callable[[Path], object]) -> None:
    # of the errors other than "not there" the one that root meets too
    with pytest.raises(OSError, match="too long"):
        question(tmp_path / ("n" * 300))


def test_names_that_match(tmp_path: Path) -> None:
    for name in ("b.json", "a.json", "A.JSON", "c.txt"):
        (tmp_path / name).write_bytes(b"")
    assert matching(tmp_path, "*.json") == [tmp_path / "a.json", tmp_path / "b.json"]
    assert matching(tmp_path / "nothing", "*") == matching(tmp_path / "c.txt", "*") == []


def _asked_of_pathlib(source: Path) -> Iterator[tuple[str, str]]:
    """Calls by the names of pathlib's methods. Of os.scandir's entries, which raise what they meet, it is
    asked whether links are followed."""
    for node in ast.walk(ast.parse(source.read_bytes())):
        match node:
            case ast.Call(func=ast.Attribute(attr=name), keywords=keywords) if name in _OF_PATHLIB:
                if all(keyword.arg != "follow_symlinks" for keyword in keywords):
                    yield str(source.relative_to(_ROOT)), name


def test_nobody_asks_pathlib() -> None:
    plugin = _ROOT / "subscriber/engine_plugin"
    rooms = [_ROOT / room for room in ("shared", "publisher", "subscriber")]
    sources = [source for room in rooms for source in room.rglob("*.py") if not source.is_relative_to(plugin)]
    assert _ROOT / "shared/files/paths.py" in sources
    assert {call for source in sources for call in _asked_of_pathlib(source)} == {
        ("shared/files/hf_checkpoint.py", "is_symlink"),  # of os.scandir's entries
        ("shared/kernels/loader.py", "glob"),  # the package's own sources
    }

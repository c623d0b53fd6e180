"""Every refusal comes with its remedy, and the trainers' page quotes the messages that the code has."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SIDES = ("publisher", "shared", "subscriber")


def refusals() -> Iterator[tuple[str, ast.Call]]:
    for side in SIDES:
        for path in sorted((ROOT / side).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Refused":
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_every_refusal_has_a_remedy() -> None:
    found = list(refusals())
    assert len(found) > 50
    assert [place for place, call in found if not any(key.arg == "remedy" for key in call.keywords)] == []


@functools.cache
def sources() -> str:
    """All text literals of the publisher's side and the channel, without what is put into them."""
    texts = []
    for path in [*(ROOT / "publisher").rglob("*.py"), *(ROOT / "shared" / "channel").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


QUOTED = [
    "the weights do not fit the run: ",
    " is missing",
    " is not part of the run",
    " but has other values",
    "frozen tensors changed: ",
    "elements became NaN or infinite: ",
    ": rounding cannot convert it",
    " is a shard of a distributed tensor, and this publisher has no other ranks",
    "the ranks' tensors do not cover the model: ",
    " has other values on rank ",
    " left no part in time",
    " was not published: step ",
    ", which is alive",
    "the channel left version ",
]


@pytest.mark.parametrize("text", QUOTED)
def test_the_page_quotes_the_code(text: str) -> None:
    assert text in sources()
    page = (ROOT / "docs" / "trainers.md").read_text()
    assert re.search(re.escape(text.strip()), page)

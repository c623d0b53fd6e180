"""Documents, messages and docstrings keep to the words of docs/glossary.md: no phrase of `WORST`.

A room of the source, or a document, has at most its number in `BUDGET`: lower it, never raise it.
"""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORST = (
    "lies", "stands", "is no", "are no", "is told", "told", "beside", "one that", "of which", "in vain",
    "brought right", "bring right", "shall", "doors", "stood still", "stands still", "for good",
    "nobody foresaw",
)  # fmt: skip
PHRASE = re.compile(r"\b(" + "|".join(map(re.escape, sorted(WORST, key=len, reverse=True))) + r")\b", re.I)
ALLOWED = re.compile(r"\bis no longer\b|\bare no longer\b|\bno one that\b", re.I)
"""English that a phrase of `WORST` begins, and that is plain"""
CODE = re.compile(r"^```.*?^```|^    .*?$|`[^`\n]*`|\]\([^)]*\)", re.MULTILINE | re.DOTALL)
"""code, field values and link targets of a document"""
UNCHECKED = (
    "docs/glossary.md",
    "docs/measurements/",
    "docs/settings.md",
    "docs/metrics.md",
)
"""the page that quotes the words, pages of figures, pages made from strings of the source, history"""
BUDGET = {
    "publisher": 23,
    "publisher/daemon": 2,
    "publisher/maintenance": 17,
    "publisher/publish": 23,
    "publisher/ranks": 9,
    "publisher/trainer": 2,
    "publisher/weights": 6,
    "shared/base": 3,
    "shared/checkpoint": 0,
    "shared/cli": 3,
    "shared/daemon": 9,
    "shared/doctor": 3,
    "shared/files": 0,
    "subscriber/engine_plugin": 5,
}
"""phrases allowed in the strings and docstrings of a room, and in a document; 0 where nothing is listed"""


@cache
def tracked(pattern: str) -> tuple[str, ...]:
    """Files of the project; outside a Git tree, all that match."""
    found = subprocess.run(
        ["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return tuple(found.stdout.split()) or tuple(str(path.relative_to(ROOT)) for path in ROOT.rglob(pattern))


def phrases(text: str) -> list[str]:
    return PHRASE.findall(ALLOWED.sub("", text))


DOCUMENTS = [name for name in tracked("*.md") if not name.startswith(UNCHECKED)]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_document_has_no_more_of_them_than_its_budget(document: str) -> None:
    text = CODE.sub(lambda code: "\n" * code[0].count("\n"), (ROOT / document).read_text())
    found = [f"{at}: {phrase}" for at, line in enumerate(text.splitlines(), 1) for phrase in phrases(line)]
    assert len(found) <= BUDGET.get(document, 0), f"reword (docs/glossary.md): {found}"


def room_of(name: str) -> str:
    """`shared/codec`, `publisher/ranks`, or the side for a module directly in it."""
    parts = Path(name).parts
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


@cache
def found_by_room() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in (*tracked("publisher/*.py"), *tracked("subscriber/*.py"), *tracked("shared/*.py")):
        if (ROOT / name).exists():
            for node in ast.walk(ast.parse((ROOT / name).read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.setdefault(room_of(name), []).extend(
                        f"{name}:{node.lineno}: {phrase}" for phrase in phrases(node.value)
                    )
    return found


@pytest.mark.parametrize("room", sorted({*found_by_room()}))
def test_a_room_has_no_more_of_them_than_its_budget(room: str) -> None:
    found = found_by_room().get(room, [])
    assert len(found) <= BUDGET.get(room, 0), "reword (docs/glossary.md):\n" + "\n".join(found)


PAGES = [name for name in DOCUMENTS if name == "README.md" or re.fullmatch(r"docs/[\w-]+\.md", name)]
LIST_ITEM = re.compile(r"\s*([-*]|\d+\.) ")


@pytest.mark.parametrize("page", PAGES)
def test_a_paragraph_has_at_most_five_lines(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!-- .*?<!-- end", "", text, flags=re.DOTALL)
    lengths: list[tuple[str, int]] = [("", 0)]
    for line in text.splitlines():
        if not line.strip() or line.startswith(("|", "#", "!", "<")):
            lengths.append(("", 0))
        elif LIST_ITEM.match(line) or not lengths[-1][0]:
            lengths.append((line, 1))
        else:
            lengths[-1] = (lengths[-1][0], lengths[-1][1] + 1)
    assert [first for first, lines in lengths if lines > 5] == [], "make it a list or a table"

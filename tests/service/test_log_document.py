"""The table of events in docs/monitoring.md against what the code logs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}


def logged() -> Iterator[tuple[str, frozenset[str]]]:
    """(event, fields) of every call of a logger."""
    for room in ("publisher", "shared", "subscriber"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_log(node.func):
                    fields = frozenset(
                        word.arg for word in node.keywords if word.arg not in (None, "exc_info", "sentence")
                    )
                    for event in _texts(node.args[0]):
                        yield event, frozenset(field for field in fields if field is not None)


def _is_log(call: ast.Attribute) -> bool:
    return isinstance(call.value, ast.Name) and call.value.id == "log" and call.attr in LEVELS


def _texts(node: ast.expr) -> list[str]:
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body), *_texts(node.orelse)]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


EVENTS = sorted({(event, tuple(sorted(fields))) for event, fields in logged()})


def row_of(event: str) -> str:
    """The line of the table, and the lines above where it says `the same`."""
    lines = (ROOT / "docs" / "monitoring.md").read_text().splitlines()
    found = [
        at for at, line in enumerate(lines) if line.startswith("| `") and f"`{event}`" in line.split("|")[1]
    ]
    assert found, f"docs/monitoring.md, Logs: no line for {event!r}"
    return "\n".join(lines[at - 1] + lines[at] if "the same" in lines[at] else lines[at] for at in found)


def test_the_code_logs() -> None:
    assert {"version", "engines reloaded", "version published", "step failed"} <= {
        event for event, _ in EVENTS
    }


@pytest.mark.parametrize(("event", "fields"), EVENTS)
def test_every_event_and_its_fields_are_documented(event: str, fields: tuple[str, ...]) -> None:
    row = row_of(event)
    assert [field for field in fields if f"`{field}`" not in row] == []

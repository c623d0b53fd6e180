"""The table of events in docs/monitoring.md against what the code logs."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}


def logged() -> Iterator[tuple[str, frozenset[str]]]:
    """(event, fields) of every call of a logger, or of one that has fields bound to it."""
    for room in ("publisher", "shared", "subscriber"):
        for path in sorted((ROOT / room).rglob("*.py")):
            nodes = list(ast.walk(ast.parse(path.read_text())))
            loggers = {"log": frozenset[str]()} | dict(_bound(nodes))
            for node in nodes:
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                    logger = getattr(node.func.value, "id", "")
                    if logger in loggers and node.func.attr in LEVELS:
                        for event in _texts(node.args[0]):
                            yield event, (loggers[logger] | _fields(node)) - {"exc_info", "sentence"}


def _bound(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, frozenset[str]]]:
    for node in nodes:
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("log.bind("):
            assert isinstance(node.value, ast.Call)
            yield ast.unparse(node.targets[0]), _fields(node.value)


def _fields(call: ast.Call) -> frozenset[str]:
    return frozenset(word.arg for word in call.keywords if word.arg is not None)


def _texts(node: ast.expr) -> list[str]:
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body), *_texts(node.orelse)]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def row_of(event: str) -> str:
    """The line of the table, and the lines above where it says `the same`."""
    lines = (ROOT / "docs" / "monitoring.md").read_text().splitlines()
    found = [
        at for at, line in enumerate(lines) if line.startswith("| `") and f"`{event}`" in line.split("|")[1]
    ]
    assert found, f"docs/monitoring.md, Logs: no line for {event!r}"
    return "\n".join(lines[at - 1] + lines[at] if "the same" in lines[at] else lines[at] for at in found)


def test_every_event_and_its_fields_are_documented() -> None:
    events = set(logged())
    assert {"version", "engines reloaded", "version published", "step failed"} <= dict(events).keys()
    missing = {event: [one for one in fields if f"`{one}`" not in row_of(event)] for event, fields in events}
    assert {event: fields for event, fields in missing.items() if fields} == {}

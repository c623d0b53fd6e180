"""The tutorial's commands, one after the other in one shell, and what it says that they print."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from ports import free_ports

TUTORIAL = Path(__file__).parent.parent.parent / "docs" / "tutorial.md"
PORTS = ("8340", "8341")
_BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_END = "-- end of block {} --"
_HOST = ("vm ", "publisher alive", "run run-9d94b9f18a0d, latest 2 (")
"""how lines begin that tell of the tutorial's own machine at one moment, and ages"""
_VARIES = re.compile(r"\b[0-9a-f]{8,}\b|\d[\d,.:-]*")


@dataclass
class Block:
    commands: str
    shown: str = ""


def blocks() -> list[Block]:
    found: list[Block] = []
    for kind, text in _BLOCK.findall(TUTORIAL.read_text()):
        if kind == "sh":
            found.append(Block(text))
        else:
            found[-1].shown = text
    return found


def steady(text: str) -> list[str]:
    """Lines without what differs from run to run: numbers, digests, the width of columns."""
    lines = (" ".join(_VARIES.sub("0", line).split()) for line in text.splitlines())
    return [line for line in lines if line]


def script(parts: list[Block]) -> str:
    text = "set -euo pipefail\n"
    for number, block in enumerate(parts):
        text += f"{block.commands}echo '{_END.format(number)}'\n"
    for port, free in zip(PORTS, free_ports(len(PORTS)), strict=True):
        text = text.replace(port, str(free))
    return text


@pytest.mark.timeout(600)
def test_each_command_works_and_prints_what_is_shown(tmp_path: Path) -> None:
    follow(tmp_path, Path(sys.executable).parent)


def follow(tmp_path: Path, programs: Path) -> None:
    """Runs the tutorial in a directory; `programs` has `weightcast`, and a `python` with torch."""
    parts = blocks()
    environment = {name: text for name, text in os.environ.items() if not name.startswith("WEIGHTCAST_")}
    environment |= {"PATH": f"{programs}:{environment['PATH']}", "COLUMNS": "110"}
    output = tmp_path / "printed"
    with output.open("wb") as stream:
        shell = subprocess.Popen(
            ["bash", "-c", script(parts)],
            cwd=tmp_path,
            env=environment,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    try:
        status = shell.wait(timeout=500)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)  # the daemons too, where a command failed
        shell.wait()
    printed = output.read_text()
    logs = "\n".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert status == 0, f"{printed}\n{logs}"
    rest = printed
    for number, block in enumerate(parts):
        here, end, rest = rest.partition(_END.format(number))
        assert end, f"block {number} did not end:\n{printed}"
        found = steady(here)
        lines = [line for line in block.shown.splitlines() if not line.startswith(_HOST)]
        shown = steady("\n".join(lines))
        missing = [line for line in shown if line not in found]
        assert not missing, f"not printed by block {number}: {missing}\n{here}"
    assert any(block.shown for block in parts)

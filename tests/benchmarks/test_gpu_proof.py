"""benchmarks.gpu_proof from end to end on torch's CPU device, too small to say anything about speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

from benchmarks.gpu_proof import SECTIONS, Section

REPOSITORY = Path(__file__).resolve().parents[2]


def test_every_section(tmp_path: Path) -> None:
    page, facts = tmp_path / "gpu.md", tmp_path / "gpu.json"
    options = ("--no-tests", "--megabytes", "0.3", "--layers", "1", "--hidden", "128", "--rounds", "1")
    where = ("--threads", "2", "--dir", tmp_path, "--memory", tmp_path, "--json", facts, "--markdown", page)
    command = [sys.executable, "-m", "benchmarks.gpu_proof", *options, *map(str, where)]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "every check holds" in ran.stdout
    found = json.loads(facts.read_text())
    assert found["machine"]["torch"]
    assert len(found["sections"]) == len(SECTIONS)
    for section in found["sections"]:
        assert section["failed"] == [] and section["rows"]
        assert section["title"] in ran.stdout and f"## {section['title']}" in page.read_text()
    checks = {row[0] for section in found["sections"] for row in section["rows"] if row[-1] == "yes"}
    assert {"tokens are those of a fresh load", "hand-over: bytes of the device's tensors"} <= checks


def test_a_check_that_does_not_hold() -> None:
    section = Section("title", ("check", "", "holds"))
    section.check("this", True)
    section.check("that", False)
    assert section.failed == ["that"]
    assert section.rows == [("this", "", "yes"), ("that", "", "NO")]

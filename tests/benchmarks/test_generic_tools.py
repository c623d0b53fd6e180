"""The comparison with tools for any files, on a small step: what each makes is checked by the benchmark."""

from __future__ import annotations

import json
import shutil

import pytest

from benchmarks import generic_tools


def test_every_tool_that_is_here_makes_the_new_file(capsys: pytest.CaptureFixture[str]) -> None:
    generic_tools.main(["--megabytes", "1", "--rounds", "1", "--json"])
    rows = {row["tool"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    here = {name for name in generic_tools.PROGRAMS if shutil.which(name.split()[0])}
    assert rows.keys() == here | {"xor, zstd -1", "weightcast fast", "weightcast small"}
    sizes = [rows[name]["nbytes"] for name in ("weightcast small", "weightcast fast", "xor, zstd -1")]
    assert 0 < sizes[0] < sizes[1] < sizes[2]

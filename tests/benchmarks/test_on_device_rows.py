"""The rows of benchmarks.on_device, on a tensor too small to say anything about speed."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from benchmarks.on_device import measure, show  # noqa: E402


def test_rows(capsys: pytest.CaptureFixture[str]) -> None:
    device = torch.device("cpu")
    rows = measure(0.3, 0.014, 1, device)
    assert len(rows) == 7 and all(0 < row.seconds < float("inf") for row in rows)
    show(rows, device)
    shown = capsys.readouterr().out
    assert all(row.way in shown for row in rows) and "no GPU" in shown

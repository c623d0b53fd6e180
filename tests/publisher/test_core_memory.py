"""Memory does not grow with the model: measured on a checkpoint of 1 GiB, half of it one tensor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from core_cases import ended, start

from weightcast.publisher import init_channel

CHILD = Path(__file__).with_name("memory_child.py")
LARGE, SMALL = 256 << 20, 16 << 20
"""words of two bytes: one tensor of 512 MiB, sixteen of 32 MiB"""
BOUND = 256 << 20
ROOM = 6 << 30


def write(path: Path, steps: bool) -> None:
    """A period of weights, repeated; with `steps`, 1% of them one unit further."""
    path.mkdir()
    rng = np.random.default_rng(1)
    period = ((rng.standard_normal(1 << 20) * 0.02).astype(np.float32).view(np.uint32) >> 16).astype("<u2")
    if steps:
        period[rng.random(len(period)) < 0.01] += 1
    sizes = {"large": LARGE, **{f"small.{n:02}": SMALL for n in range(16)}}
    header, end = {}, 0
    for name, words in sizes.items():
        header[name] = {"dtype": "BF16", "shape": [words], "data_offsets": [end, end + 2 * words]}
        end += 2 * words
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(end // period.nbytes):
            file.write(period.data)
    (path / "config.json").write_text("{}")


@pytest.fixture
def root(tmp_path: Path):  # type: ignore[no-untyped-def]
    if shutil.disk_usage(tmp_path).free < ROOM:
        pytest.skip("not enough disk space")
    write(tmp_path / "base", steps=False)
    write(tmp_path / "new", steps=True)
    init_channel(tmp_path / "channel", tmp_path / "base")
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.slow
def test_publishing_and_following_a_gigabyte(root: Path) -> None:
    code, text = ended(start(CHILD, root, "fast"))
    assert code == 0, text
    grown, changed, elements = json.loads(text.splitlines()[-1])
    assert 0.005 < changed / elements < 0.02
    assert max(grown.values()) <= BOUND, {kind: f"{size >> 20} MiB" for kind, size in grown.items()}

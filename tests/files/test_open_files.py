"""More shards than files may be open: the limit is raised where it can be, else named with its remedy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

SHARDS = 150
LIMIT = 100


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    names = {f"w{n}": f"model-{n:05d}-of-{SHARDS:05d}.safetensors" for n in range(SHARDS)}
    for number, (name, file) in enumerate(names.items()):
        save_file({name: np.full(4, number, np.float32)}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return directory


def limited(kind: str, *words: object) -> subprocess.CompletedProcess[str]:
    """`kind`: S for the soft limit alone, H for both."""
    shell = f'ulimit -S -n {LIMIT} && ulimit -{kind} -n {LIMIT} && exec "$@"'
    command = ["sh", "-c", shell, "sh", sys.executable, "-m", "weightcast.shared.cli.main"]
    return subprocess.run(
        [*command, *map(str, words)], check=False, capture_output=True, text=True, timeout=120
    )


def test_the_soft_limit_is_raised(base: Path, tmp_path: Path) -> None:
    made = limited("S", "channel", "init", "--channel", tmp_path / "channel", "--base", base)
    assert made.returncode == 0, made.stderr
    where = ("--channel", tmp_path / "channel", "--base", base, "--local", tmp_path / "host")
    synced = limited("S", "sync", *where)
    assert synced.returncode == 0, synced.stderr


def test_a_hard_limit_is_named_with_its_remedy(base: Path, tmp_path: Path) -> None:
    made = limited("H", "channel", "init", "--channel", tmp_path / "channel", "--base", base)
    assert made.returncode == 75
    assert f"too many open files, the limit is {LIMIT}" in made.stderr and "ulimit -n" in made.stderr
    assert not (tmp_path / "channel" / "channel.json").exists()

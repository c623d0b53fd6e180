"""A channel that stops answering costs the trainer's step nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from faultkit import UNSHARE

sys.path.insert(0, str(Path(__file__).parents[1] / "publisher"))

from core_cases import all_changed
from publisher_cases import make_place, numpy_model

CHILD = Path(__file__).with_name("submitting_child.py")


def test_submit_returns_while_the_channel_hangs(tmp_path: Path) -> None:
    place = make_place(tmp_path, numpy_model(np.random.default_rng(3)))
    mount, rules = tmp_path / "mount", tmp_path / "rules"
    mount.mkdir()
    rules.write_text("[]")
    command = [*UNSHARE, sys.executable, str(CHILD)]
    arguments = [str(path) for path in (place.channel, mount, rules, place.pub, place.base)]
    done = subprocess.run([*command, *arguments], check=False, capture_output=True, text=True, timeout=280)
    lines = done.stdout.splitlines()
    assert lines[1:] == ["version 1", "free True done False", "version 2"], done.stdout + done.stderr
    first = all_changed(place.model, np.random.default_rng(1))
    place.arrives(all_changed(first, np.random.default_rng(2)), 2)

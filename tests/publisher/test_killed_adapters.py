"""A publisher killed while it adds an adapter and publishes its first version: the next one goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from adapters import CONFIG, MATH, adapter, bytes_of, follow
from publisher_cases import make_place, numpy_model

from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.components import all_faults, read_components
from weightcast.shared.channel.directory_store import open_store

CHILD = Path(__file__).with_name("adapter_child.py")
BEFORE_IT_IS_LISTED = ("component.described", "component.made")
MOMENTS = (
    *BEFORE_IT_IS_LISTED,
    "component.listed",
    "seed.checked",
    "seed.copied",
    "attempt.begun",
    "publish.proven",
    "index.allowed",
    "pointer.allowed",
    "pointer.moved",
)


@pytest.mark.parametrize("moment", MOMENTS)
def test_what_a_kill_leaves_is_finished_by_the_next_publisher(tmp_path: Path, moment: str) -> None:
    place = make_place(tmp_path, numpy_model(np.random.default_rng(3)))
    paths = os.pathsep.join([str(CHILD.parents[1]), str(CHILD.parent), os.environ.get("PYTHONPATH", "")])
    killed = subprocess.run(
        [sys.executable, CHILD, place.channel, place.pub, place.base, moment],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    run = Channel.open(open_store(place.channel))
    listed = [each.name for each in read_components(run)]
    assert listed == ([] if moment in BEFORE_IT_IS_LISTED else [MATH])
    if moment != "pointer.allowed":
        # then there is a version, and no pointer
        assert all_faults(open_store(place.channel)) == []
    # other tensors than those of the attempt, where nobody could have read that
    first = adapter(2, rank=8) if moment == "component.described" else adapter(2)
    with place.publisher() as publisher:
        report = publisher.publish(first, component=MATH, config=CONFIG)
        # committed is committed
        assert report.version == (2 if moment in ("pointer.allowed", "pointer.moved") else 1)
        publisher.publish_checkpoint(place.new(numpy_model(np.random.default_rng(4))))
    assert follow(place.channel, MATH, tmp_path / "host")[:2] == (report.version, bytes_of(first))
    assert all_faults(open_store(place.channel)) == []

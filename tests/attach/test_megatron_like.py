"""The worked example of Megatron-like exports: what arrives is the model by its HF names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from core_cases import read_checkpoint

from examples.attach.megatron_like import Sizes, exported, held, places, random_model, run
from weightcast.publisher import Shard
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.checkpoint.local_updater import LocalUpdater, UpdaterOptions


@pytest.mark.parametrize(("tensors", "stages"), [(2, 2), (1, 4)])
def test_what_arrives(tmp_path: Path, tensors: int, stages: int) -> None:
    model = run(tmp_path, 2, tensors, stages)
    updater = LocalUpdater(
        open_store(tmp_path / "channel"), tmp_path / "host", tmp_path / "base", UpdaterOptions()
    )
    try:
        updater.update_to(Channel.open(open_store(tmp_path / "channel")), 2)
    finally:
        updater.close()
    arrived = read_checkpoint(tmp_path / "host")
    assert arrived == {name: one.tobytes() for name, one in model.items()}


def test_the_padding_of_the_vocabulary_stays_behind() -> None:
    """With four ranks the last one has 48 to 63 of 51 rows, with eight it has none of them."""
    sizes = Sizes(heads=8, key_heads=8, feed_forward=48)
    model = random_model(sizes, np.random.default_rng(1))
    for count, rows in ((4, [16, 16, 16, 3]), (8, [8, 8, 8, 8, 8, 8, 3, 0])):
        ranks = places(count, 1)
        pieces = [dict(exported(held(model, sizes, one), sizes, one))["lm_head.weight"] for one in ranks]
        assert all(isinstance(one, Shard) and one.shape == (51, sizes.hidden) for one in pieces)
        assert [len(one.tensor) for one in pieces] == rows

"""Chunks of several tensors that lie one behind the other in a file: read where they lie, and only then."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from core_cases import Model, bytes_of, read_checkpoint, some_changed, tensor, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from local_cases import Run, following

from weightcast.publisher import Publisher, init_channel
from weightcast.publisher.weights.tensors import CheckpointWeights
from weightcast.shared.base.elements import Chunk, Span, grid
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, gather
from weightcast.shared.files.hf_checkpoint import Place, Places, run_of

ORDERS = ("by name", "shuffled", "backwards")
WORDS = 256
"""of a chunk"""


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Model, int, bool]:
    """A model in the order in which it is written, in how many files, and whether these are aligned."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    blocks = draw(st.lists(st.integers(1, 9), min_size=1, max_size=9))
    odd = draw(st.sampled_from([0, 0, 0, 1, 63]))
    dtypes = draw(st.sampled_from([("BF16",), ("U8",), ("BF16", "F32"), ("U8", "BF16")]))
    sizes = [64 * count for count in blocks]
    sizes[draw(st.integers(0, len(sizes) - 1))] += odd
    model = {f"t{n}": tensor(rng, dtypes[n % len(dtypes)], size) for n, size in enumerate(sizes)}
    names = {"by name": sorted(model), "shuffled": draw(st.permutations(sorted(model)))}
    names["backwards"] = names["by name"][::-1]
    order, files = names[draw(st.sampled_from(ORDERS))], draw(st.integers(1, min(3, len(model))))
    return {name: model[name] for name in order}, files, draw(st.booleans())


def opened(root: Path, model: Model, files: int, aligned: bool) -> LocalCheckpoint:
    write_checkpoint(root / "base", model, files=files, aligned=aligned)
    init_channel(root / "channel", root / "base")
    with Publisher.open(root / "channel", local=root / "pub", base=root / "base") as publisher:
        publisher.publish_checkpoint(root / "base")
    local = LocalCheckpoint.open(root / "pub")
    assert local is not None
    return local


def chunks_of(local: LocalCheckpoint) -> list[Chunk]:
    return list(grid(local.table, local.table.whole, WORDS))


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_a_run_is_what_would_be_gathered(layout: tuple[Model, int, bool]) -> None:
    with TemporaryDirectory() as root:
        local = opened(Path(root), *layout)
        weights = CheckpointWeights(Path(root) / "base")
        try:
            for chunk in chunks_of(local):
                expected = gather(chunk, local.words_in)
                assert np.array_equal(local.chunk_words(chunk), expected)
                run = weights.run_in(chunk, chunk.tensors)
                assert run is None or np.array_equal(run, expected)
        finally:
            weights.close()
            local.close()


def test_tensors_in_the_order_of_their_names_are_not_copied(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    local = opened(tmp_path, {f"t{n}": tensor(rng, "BF16", 64 * (n % 3 + 1)) for n in range(9)}, 1, True)
    weights = CheckpointWeights(tmp_path / "base")
    several = [chunk for chunk in chunks_of(local) if len(chunk.spans) > 1]
    assert len(several) > 2
    for chunk in several:
        assert np.shares_memory(local.chunk_words(chunk), local.words(chunk.spans[0].tensor))
        assert weights.run_in(chunk, chunk.tensors) is not None
    weights.close()
    local.close()


CHUNK = Chunk(0, "BF16", 0, (Span(3, 64, 128, 0), Span(5, 0, 128, 64)), 192)
ODD = (Span(3, 64, 127, 0), Span(5, 0, 128, 64))
FILES = Path("model.safetensors"), Path("other")


def placed(three: tuple[int, int, int], five: tuple[int, int, int]) -> Places:
    """Of tensors 3 and 5: number of the file, offset, bytes."""
    rows = np.full((6, 3), -1, np.int64)
    rows[3], rows[5] = three, five
    return Places(FILES, rows)


THREE, FIVE = (0, 1000, 256), (0, 1256, 512)


def test_where_a_run_begins() -> None:
    assert run_of(CHUNK, placed(THREE, FIVE), CHUNK.tensors) == Place(FILES[0], 1128, 384)


@pytest.mark.parametrize(
    ("spans", "words", "places"),
    [
        (CHUNK.spans, 256, placed(THREE, FIVE)),
        (ODD, 192, placed((0, 1000, 254), FIVE)),
        (CHUNK.spans, 192, placed(THREE, (0, 1258, 512))),
        (CHUNK.spans, 192, placed(THREE, (1, 1256, 512))),
        ((), 0, placed(THREE, FIVE)),
    ],
    ids=["padded", "padded within", "a gap", "two files", "nothing"],
)
def test_what_is_no_run(spans: tuple[Span, ...], words: int, places: Places) -> None:
    chunk = Chunk(0, "BF16", 0, spans, words)
    assert run_of(chunk, places, chunk.tensors) is None


def test_a_tensor_that_is_not_given_makes_no_run() -> None:
    assert run_of(CHUNK, placed(THREE, FIVE), np.array([3, -1])) is None


def test_versions_arrive_where_one_tensor_is_not_given(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    run = Run(tmp_path, [{f"t{n}": tensor(rng, "BF16", 64 * (n + 1)) for n in range(40)}])
    write_checkpoint(run.base, run.models[0], aligned=True)
    init_channel(run.channel, run.base, frozen=["t7"])
    with Publisher.open(run.channel, local=run.root / "pub", base=run.base) as publisher:
        for version in (1, 2):
            new = {n: one for n, one in some_changed(run.latest, rng).items() if n != "t7"}
            run.models.append(new | {"t7": run.models[0]["t7"]})
            publisher.publish_checkpoint(write_checkpoint(run.root / f"new-{version}", new, aligned=True))
    with following(run, tmp_path / "host") as updater:
        updater.update_to(Channel.open(open_store(run.channel)))
        assert read_checkpoint(updater.paths.directory) == bytes_of(run.latest)

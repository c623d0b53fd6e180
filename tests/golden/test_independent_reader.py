"""What is published today is read by a reader that knows the format's page alone."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
from core_cases import (
    Model,
    Tensor,
    all_changed,
    bytes_of,
    every_dtype,
    read_checkpoint,
    some_changed,
    tensor,
    write_checkpoint,
)
from cut_versions import commit_cut
from independent_reader import read

from weightcast.publisher import Publisher, init_channel
from weightcast.shared.base.elements import Part, Segment, TensorTable
from weightcast.shared.channel.index import INDEX_NAME, Encoding

GOLDEN = Path(__file__).parent / "channels"
SEED = 11


class Run:
    """A channel, its base, a publisher's directory, and what was published so far."""

    def __init__(self, directory: Path, model: Model) -> None:
        self.directory, self.model = directory, model
        self.channel, self.base = directory / "channel", write_checkpoint(directory / "base", model)
        init_channel(self.channel, self.base)

    def open(self, encoding: Encoding = "fast", rank: int = 0, ranks: int = 1) -> Publisher:
        local = self.directory / f"local{rank}"
        return Publisher.open(
            self.channel, local=local, base=self.base, encoding=encoding, rank=rank, world_size=ranks
        )

    def given(self, model: Model, number: int, name: str = "new") -> Path:
        self.model = model
        return write_checkpoint(self.directory / f"{name}{number}", model)

    def publish(self, model: Model, number: int, encoding: Encoding) -> None:
        with self.open(encoding) as publisher:
            assert publisher.publish_checkpoint(self.given(model, number)).version == number

    def is_read(self) -> None:
        assert read(self.channel, self.base) == bytes_of(self.model)


def stepped(model: Model, rng: np.random.Generator, share: float, longest: int = 3) -> Model:
    """As an optimizer does: of each tensor of floats, a share of the words up or down by some ulps."""
    moved = dict(model)
    for name in ("bf16", "f16", "f32", "f8"):
        words = model[name].data.view({"f8": "<u1", "f32": "<u4"}.get(name, "<u2")).copy()
        steps = rng.integers(1, longest + 1, len(words)) * rng.choice([-1, 1], len(words))
        words += np.where(rng.random(len(words)) < share, steps, 0).astype(words.dtype)
        moved[name] = Tensor(model[name].dtype, model[name].shape, words.view(np.uint8))
    return moved


def modes(run: Run, version: int) -> set[int]:
    """The first byte of every blob of a version."""
    directory = run.channel / f"weight_v{version:06d}"
    own = json.loads((directory / INDEX_NAME).read_bytes())["weightcast"]
    files = [(directory / name).read_bytes() for name, _, _ in own["files"]]
    return {files[row[3]][row[4]] for row in own["chunks"]}


@pytest.mark.parametrize("encoding", ["fast", "small"])
def test_every_width_is_read(tmp_path: Path, encoding: Encoding) -> None:
    rng = np.random.default_rng(SEED)
    run = Run(tmp_path, every_dtype(rng))
    changes = (some_changed, all_changed, lambda model, _: model)
    for number, change in enumerate(changes, 1):
        run.publish(change(run.model, rng), number, encoding)
        run.is_read()


@pytest.mark.parametrize(("encoding", "expected"), [("fast", {0, 1, 3, 4}), ("small", {0, 2, 3, 4})])
def test_every_mode_is_read(tmp_path: Path, encoding: Encoding, expected: set[int]) -> None:
    rng = np.random.default_rng(SEED)
    dtypes = {"bf16": "BF16", "f16": "F16", "f32": "F32", "f8": "F8_E5M2"}
    model = {name: tensor(rng, dtype, 7001) for name, dtype in dtypes.items()}
    run = Run(tmp_path, model)
    met: set[int] = set()
    for number, (share, longest) in enumerate([(0.01, 1), (0.1, 3), (0.9, 2), (0.9, 120)], 1):
        run.publish(stepped(run.model, rng, share, longest), number, encoding)
        run.is_read()
        met |= modes(run, number)
    noise = {name: tensor(rng, "F32" if name == "f32" else dtypes[name], 7001) for name in dtypes}
    run.publish(noise, number + 1, encoding)
    run.is_read()
    assert met | modes(run, number + 1) >= expected


@pytest.mark.parametrize("encoding", ["fast", "small"])
def test_chunks_larger_than_one_are_read(tmp_path: Path, encoding: Encoding) -> None:
    """Short tensors fill a chunk and end in the next; a long one has two of its own."""
    rng = np.random.default_rng(SEED)
    sizes = {"a": 70, "b": (1 << 22) + 1000, "d": (1 << 22) - 100, "e": 300}
    big = {name: tensor(rng, "U8", size) for name, size in sizes.items()}
    big["c"] = tensor(rng, "BF16", 5)
    run = Run(tmp_path, big)
    run.publish(some_changed(big, rng, 2000), 1, encoding)
    run.is_read()


def test_parts_of_two_ranks_are_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(SEED)
    run = Run(tmp_path, {name: tensor(rng, "F32", 40, 3) for name in ("a", "b", "c", "d")})
    run.model = some_changed(run.model, rng)
    failures: list[BaseException] = []

    def publish(rank: int) -> None:
        own = sorted(run.model)[rank::2]
        try:
            with run.open(rank=rank, ranks=2) as publisher:
                tensors = {name: run.model[name].data.view("<f4").reshape(40, 3) for name in own}
                publisher.publish(tensors, step=1)
        except BaseException as error:
            failures.append(error)

    ranks = [threading.Thread(target=publish, args=(rank,)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert failures == []
    run.is_read()


def test_a_tensor_in_two_parts_is_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(SEED)
    run = Run(tmp_path, every_dtype(rng))
    run.publish(some_changed(run.model, rng), 1, "fast")
    run.model = all_changed(run.model, rng)
    given = write_checkpoint(tmp_path / "cut", run.model)
    commit_cut(run.channel, run.directory / "local0", given, 2, halves)
    run.is_read()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_damage_is_seen(tmp_path: Path, number: int) -> None:
    """The reader would notice: it is no rubber stamp."""
    rng = np.random.default_rng(number)
    run = Run(tmp_path, every_dtype(rng))
    run.publish(some_changed(run.model, rng), 1, "fast")
    shard = next((run.channel / "weight_v000001").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[int(rng.integers(len(data)))] ^= 1
    shard.write_bytes(data)
    with pytest.raises(AssertionError):
        run.is_read()


def test_what_was_written_once_is_read() -> None:
    assert read(GOLDEN / "fast", GOLDEN / "base").keys() == read_checkpoint(GOLDEN / "base").keys()


def halves(table: TensorTable) -> tuple[Part, Part]:
    """Tensors above 128 words lie in both, cut at word 128."""
    left = tuple(Segment(number, 0, min(128, spec.words)) for number, spec in enumerate(table))
    right = tuple(Segment(number, 128, spec.words) for number, spec in enumerate(table) if spec.words > 128)
    return Part(0, left), Part(1, right)

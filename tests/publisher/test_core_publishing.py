"""What is given is what arrives: every dtype, every encoding, tensors in process and checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from core_cases import Model, Tensor, all_changed, every_dtype, some_changed, tensor
from publisher_cases import ENCODINGS, as_numpy, make_place, numpy_model

from weightcast.shared.base.errors import Refused
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store

torch = pytest.importorskip("torch")

TORCH_TYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
    "F64": torch.float64,
}


def as_torch(one: Tensor) -> Any:
    if not len(one.data):
        return torch.empty(one.shape, dtype=TORCH_TYPES[one.dtype])
    flat = torch.from_numpy(one.data.copy())
    return flat.view(TORCH_TYPES[one.dtype]).reshape(one.shape)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(21)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_checkpoints_of_every_dtype(tmp_path: Path, rng: np.random.Generator, encoding: str) -> None:
    place = make_place(tmp_path)
    model = place.model
    with place.publisher(encoding=encoding) as publisher:
        for version in range(1, 5):
            model = all_changed(model, rng, 500) if version == 3 else some_changed(model, rng)
            report = publisher.publish_checkpoint(place.new(model), step=10 * version)
            assert (report.version, report.step, report.encoding) == (version, 10 * version, encoding)
            if version != 2:
                place.arrives(model, version)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("threads", [1, 3])
def test_torch_tensors(tmp_path: Path, rng: np.random.Generator, encoding: str, threads: int) -> None:
    place = make_place(tmp_path)
    model = place.model
    with place.publisher(encoding=encoding, threads=threads) as publisher:
        for version in (1, 2):
            model = some_changed(model, rng)
            publisher.publish({name: as_torch(one) for name, one in model.items()})
            place.arrives(model, version)


def test_numpy_arrays_from_an_iterator(tmp_path: Path, rng: np.random.Generator) -> None:
    place = make_place(tmp_path, numpy_model(rng))
    model = all_changed(place.model, rng)
    with place.publisher() as publisher:
        publisher.publish((name, as_numpy(one)) for name, one in model.items())
    place.arrives(model, 1)


def test_tensors_that_lie_oddly_in_memory(tmp_path: Path, rng: np.random.Generator) -> None:
    shapes: Model = {name: tensor(rng, "F32", 40, 30) for name in ("a", "b", "c", "d", "e")}
    place = make_place(tmp_path, shapes)
    model = all_changed(shapes, rng)
    arrays = {name: as_numpy(one) for name, one in model.items()}
    wide = torch.zeros(80, 60)
    wide[::2, ::2] = torch.from_numpy(arrays["b"].copy())
    padded = np.zeros((40, 33), np.float32)
    padded[:, 3:] = arrays["c"]
    with place.publisher() as publisher:
        publisher.publish(
            {
                "a": torch.from_numpy(arrays["a"].T.copy()).t(),
                "b": wide[::2, ::2],
                "c": padded[:, 3:],
                "d": np.asfortranarray(arrays["d"]),
                "e": torch.nn.Parameter(torch.from_numpy(arrays["e"].copy())),
            }
        )
    place.arrives(model, 1)


def test_counts_in_the_report(tmp_path: Path, rng: np.random.Generator) -> None:
    place = make_place(tmp_path)
    model = dict(place.model)
    model["long"] = model["long"].changed(rng, 5)
    model["f64.matrix"] = model["f64.matrix"].changed(rng, 2)
    with place.publisher() as publisher:
        report = publisher.publish_checkpoint(place.new(model))
    assert (report.changed_elements, report.tensors_changed) == (7, 2)
    assert report.changed_bytes == 5 * 2 + 2 * 8
    assert report.full_bytes == sum(len(one.data) for one in model.values())
    files = place.channel / "weight_v000001"
    assert report.delta_bytes == sum(path.stat().st_size for path in files.iterdir())


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_nothing_changed_is_a_version_without_shards(
    tmp_path: Path, rng: np.random.Generator, encoding: str
) -> None:
    place = make_place(tmp_path)
    assert place.publish(place.model, encoding=encoding) == 1
    names = [path.name for path in (place.channel / "weight_v000001").iterdir()]
    assert names == ["model.safetensors.index.json"]
    place.arrives(place.model, 1)
    inode = (place.host / "model.safetensors").stat().st_mtime_ns
    model = some_changed(place.model, rng)
    assert place.publish(model, encoding=encoding) == 2
    assert place.publish(model, encoding=encoding) == 3
    place.arrives(model, 3)
    before = (place.host / "model.safetensors").stat().st_mtime_ns
    assert before != inode
    assert place.publish(model, encoding=encoding) == 4
    place.arrives(model, 4)
    assert (place.host / "model.safetensors").stat().st_mtime_ns == before


def test_a_version_is_bound_to_its_run_epoch_and_parent(tmp_path: Path, rng: np.random.Generator) -> None:
    place = make_place(tmp_path)
    place.publish(some_changed(place.model, rng))
    place.publish(some_changed(place.model, rng))
    channel = Channel.open(open_store(place.channel))
    pointer = channel.pointer()
    file, base = channel.require_ours()
    assert pointer is not None
    first, second = (channel.index(pointer, version, base.table) for version in (1, 2))
    assert first is not None and second is not None
    assert (first.run_id, first.epoch, first.parent) == (file.run_id, 1, base.digest)  # type: ignore[union-attr]
    assert (second.run_id, second.epoch, second.parent) == (file.run_id, 2, first.digest)  # type: ignore[union-attr]
    assert second.base_root == first.root  # type: ignore[union-attr]


# tied and frozen tensors

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def tied_model(rng: np.random.Generator, *, both: bool) -> Model:
    model = {EMBEDDING: tensor(rng, "BF16", 50, 8), "model.norm.weight": tensor(rng, "F32", 8)}
    return {**model, HEAD: model[EMBEDDING]} if both else model


TIED = '{"tie_word_embeddings": true}'


@pytest.mark.parametrize("given", ["embedding alone", "both, equal", "one object"])
@pytest.mark.parametrize("both", [False, True])
def test_tied_embeddings(tmp_path: Path, rng: np.random.Generator, given: str, both: bool) -> None:
    place = make_place(tmp_path, tied_model(rng, both=both), config=TIED)
    model = all_changed(tied_model(rng, both=False), rng)
    expected = {**model, HEAD: model[EMBEDDING]} if both else model
    tensors = {name: as_torch(one) for name, one in model.items()}
    if given == "both, equal":
        tensors[HEAD] = tensors[EMBEDDING].clone()
    elif given == "one object":
        tensors[HEAD] = tensors[EMBEDDING]
    with place.publisher() as publisher:
        publisher.publish(tensors)
    place.arrives({name: expected[name] for name in place.model}, 1)


@pytest.mark.parametrize("both", [False, True])
def test_an_untied_head_is_refused(tmp_path: Path, rng: np.random.Generator, both: bool) -> None:
    place = make_place(tmp_path, tied_model(rng, both=both), config=TIED)
    tensors = {name: as_torch(one) for name, one in tied_model(rng, both=False).items()}
    other = tensors[EMBEDDING].clone()
    other[3, 3] += 1
    with place.publisher() as publisher:
        with pytest.raises(Refused, match="tied"):
            publisher.publish({**tensors, HEAD: other})
        with pytest.raises(Refused, match=HEAD):
            publisher.publish({**tensors, HEAD: other[:-1]})
        assert publisher.version == 0


def test_the_same_name_twice(tmp_path: Path, rng: np.random.Generator) -> None:
    place = make_place(tmp_path, numpy_model(rng))
    model = all_changed(place.model, rng)
    pairs = [(name, as_numpy(one)) for name, one in model.items()]
    name, array = "f32.matrix", as_numpy(model["f32.matrix"])
    other = array.copy()
    other[0, 0] += 1
    with place.publisher() as publisher:
        with pytest.raises(Refused, match=f"{name} was given twice"):
            publisher.publish([*pairs, (name, other)])
        with pytest.raises(Refused, match=f"{name} was given twice"):
            publisher.publish([*pairs, (name, array[1:])])
        assert publisher.publish([*pairs, (name, array.copy())]).version == 1
    place.arrives(model, 1)


def test_frozen_tensors_may_be_left_out_and_must_not_move(tmp_path: Path, rng: np.random.Generator) -> None:
    place = make_place(tmp_path, frozen=["*.odd", "scalar"])
    model = dict(place.model)
    model["long"] = model["long"].changed(rng, 9)
    given = {name: as_torch(one) for name, one in model.items()}
    with place.publisher() as publisher:
        few = {name: one for name, one in given.items() if not name.endswith(".odd") and name != "scalar"}
        assert publisher.publish(few).version == 1
        assert publisher.publish(given).version == 2
        with pytest.raises(Refused, match="frozen tensors changed: scalar"):
            publisher.publish({**given, "scalar": given["scalar"] + 1})
        # nor where no delta can be made
        moved = {**model, "scalar": model["scalar"].changed(rng, 1)}
        (place.channel / "weight_v000003").mkdir()
        ((place.channel / "weight_v000003") / "model.safetensors.index.json").write_bytes(b"somebody else's")
        with pytest.raises(Refused, match="frozen tensors changed: scalar"):
            publisher.publish_checkpoint(place.new(moved))
        shutil.rmtree(place.channel / "weight_v000003")
        del few["long"]
        with pytest.raises(Refused, match="long is missing"):
            publisher.publish(few)
    place.arrives(model, 2)


@pytest.mark.parametrize("bad", ["big endian", "strings", "a partial sum"])
def test_tensors_that_are_no_tensors_of_a_file(tmp_path: Path, rng: np.random.Generator, bad: str) -> None:
    class Partial:
        dtype, shape = np.dtype("f4"), (2, 2)
        placements = (SimpleNamespace(is_partial=lambda: True),)

        def full_tensor(self) -> object:
            return self

    made = {
        "big endian": np.zeros((2, 2), ">f4"),
        "strings": np.array(["a"]),
        "a partial sum": Partial(),
    }
    place = make_place(tmp_path, {"w": tensor(rng, "F32", 2, 2)})
    with place.publisher() as publisher, pytest.raises(Refused, match="w"):
        publisher.publish({"w": made[bad]})


def test_weights_are_every_dtype() -> None:
    assert {one.dtype for one in every_dtype(np.random.default_rng(0)).values()} == set(TORCH_TYPES)

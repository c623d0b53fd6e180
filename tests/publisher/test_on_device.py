"""Tensors compared where they live: torch's CPU device stands for a GPU, the same code runs on both.

One property over both ways: the version directories are equal, byte for byte.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_cases import ITEM_SIZES, Model, Tensor, all_changed, every_dtype, some_changed, tensor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from publisher_cases import Place, make_place

from weightcast.publisher import Publisher
from weightcast.shared.base.errors import Refused, RetryLater

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
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HELD = {"on_device": "always", "device_baseline_bytes": 1 << 30}
PINNED = {"on_device": "always", "pinned_baseline_bytes": 1 << 30}
FRESH = {"on_device": "always"}
TIGHT = {"on_device": "always", "device_baseline_bytes": 9000, "pinned_baseline_bytes": 3000}


def as_torch(one: Tensor) -> Any:
    if not len(one.data):
        return torch.empty(one.shape, dtype=TORCH_TYPES[one.dtype], device=DEVICE)
    flat = torch.from_numpy(one.data.copy())
    return flat.view(TORCH_TYPES[one.dtype]).reshape(one.shape).to(DEVICE)


def given_of(model: Model) -> dict[str, Any]:
    return {name: as_torch(one) for name, one in model.items()}


def files_of(place: Place, version: int) -> dict[str, Any]:
    """What was published, without the times and what follows from them."""
    found: dict[str, Any] = {}
    for path in sorted((place.channel / f"weight_v{version:06d}").iterdir()):
        found[path.name] = path.read_bytes()
    index = json.loads(found["model.safetensors.index.json"])
    for timed in ("created", "parent"):
        del index["weightcast"][timed]
    return {**found, "model.safetensors.index.json": index}


@dataclass(frozen=True)
class Both:
    """The same run twice: compared on the host, and on the device."""

    host: tuple[Place, Publisher]
    device: tuple[Place, Publisher]

    def publish(self, given: Mapping[str, Any]) -> int:
        versions = {publisher.publish(given).version for _, publisher in (self.host, self.device)}
        (version,) = versions
        assert files_of(self.device[0], version) == files_of(self.host[0], version)
        return version


@contextlib.contextmanager
def both(root: Path, model: Model, options: Mapping[str, Any], **shared: Any) -> Iterator[Both]:
    host, device = (make_place(root / name, model) for name in ("host", "device"))
    with (
        host.publisher(on_device="never", **shared) as one,
        device.publisher(**options, **shared) as other,
    ):
        yield Both((host, one), (device, other))


def compared(publisher: Publisher) -> int:
    """Chunks that the last publication compared on the device."""
    assert publisher.baselines is not None
    return publisher.baselines.compared


def held(publisher: Publisher) -> int:
    assert publisher.baselines is not None
    return sum(held.words.nbytes for held in publisher.baselines._held.values())


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(31)


@pytest.mark.parametrize(
    "options,encoding",
    [(HELD, "fast"), (PINNED, "fast"), (FRESH, "fast"), (TIGHT, "fast"), (TIGHT, "small")],
    ids=["held", "pinned", "fresh", "tight", "tight-small"],
)
def test_every_dtype(
    tmp_path: Path, rng: np.random.Generator, options: Mapping[str, Any], encoding: str
) -> None:
    model = every_dtype(rng)
    first = some_changed(model, rng)
    second = all_changed(first, rng, 2)
    with both(tmp_path, model, options, encoding=encoding) as run:
        for version, changed in enumerate([first, second, second, some_changed(second, rng)], 1):
            model = changed
            assert run.publish(given_of(model)) == version
            assert compared(run.device[1]) > 0
        assert (held(run.device[1]) > 0) is (options is not FRESH)
    run.device[0].arrives(model, 4)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_the_fields_encodings_are_made_on_the_host(
    tmp_path: Path, rng: np.random.Generator, encoding: str
) -> None:
    model = every_dtype(rng)
    with both(tmp_path, model, HELD, encoding=encoding) as run:
        assert run.device[1].baselines is None
        model = some_changed(model, rng)
        run.publish(given_of(model))
    run.device[0].arrives(model, 1)


@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.sampled_from(sorted(ITEM_SIZES)), st.integers(0, 700)), min_size=1, max_size=6),
    st.lists(st.integers(0, 40), min_size=2, max_size=3),
    st.sampled_from([HELD, PINNED, FRESH]),
    st.sampled_from([1, 3]),
    st.integers(0, 1 << 32),
)
def test_any_model(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: list[tuple[str, int]],
    changes: list[int],
    options: Mapping[str, Any],
    threads: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    model = {f"t{n}": tensor(rng, dtype, size) for n, (dtype, size) in enumerate(tensors)}
    with both(tmp_path_factory.mktemp("any"), model, options, threads=threads) as run:
        for elements in changes:
            model = all_changed(model, rng, elements)
            run.publish(given_of(model))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("held", [0, 1 << 30])
def test_auto_compares_on_a_gpu_with_a_baseline_alone(
    tmp_path: Path, rng: np.random.Generator, held: int
) -> None:
    model = every_dtype(rng)
    with both(tmp_path, model, {"on_device": "auto", "device_baseline_bytes": held}) as run:
        model = some_changed(model, rng)
        run.publish(given_of(model))
        assert (compared(run.device[1]) > 0) is (held > 0)


def test_odd_values_are_compared_by_their_bits(tmp_path: Path) -> None:
    old = np.array([0x7FC0, 0x7FC1, 0x0000, 0x8000, 0x7F80, 0x3F80] * 40, "<u2")
    new = old.copy()
    new[[0, 2, 3]] = [0x7FC2, 0x8000, 0x0000]
    model: Model = {"odd": Tensor("BF16", (len(old),), old.view(np.uint8))}
    with both(tmp_path, model, HELD) as run:
        model = {"odd": Tensor("BF16", (len(old),), new.view(np.uint8))}
        run.publish(given_of(model))
        assert compared(run.device[1]) == 1
    run.device[0].arrives(model, 1)


def test_tensors_that_lie_oddly_in_memory(tmp_path: Path, rng: np.random.Generator) -> None:
    model: Model = {name: tensor(rng, "BF16", 40, 32) for name in ("a", "b", "c", "d")}
    with both(tmp_path, model, HELD) as run:
        for _ in range(2):
            model = all_changed(model, rng)
            plain = given_of(model)
            wide = torch.zeros(80, 64, dtype=torch.bfloat16, device=DEVICE)
            wide[::2, ::2] = plain["b"]
            shifted = torch.zeros(40 * 32 + 3, dtype=torch.bfloat16, device=DEVICE)[3:].view(40, 32)
            shifted.copy_(plain["c"])
            odd = {
                "a": plain["a"].t().contiguous().t(),
                "b": wide[::2, ::2],
                "c": shifted,
                "d": torch.nn.Parameter(plain["d"]),
            }
            run.publish(odd)
    run.device[0].arrives(model, 2)


def test_views_that_turn_signs_are_published_as_what_they_show(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    def given_as_views(model: Model) -> dict[str, Any]:
        real, pairs = as_torch(model["f"]), as_torch(Tensor("F32", (60, 2), model["c"].data))
        turned = torch.view_as_complex(pairs).conj_physical()
        return {"f": torch._neg_view(-real), "c": turned.conj()}

    floats = {name: tensor(rng, "F32", 120) for name in "fc"}
    complexes = [{**floats, "c": Tensor("C64", (60,), floats["c"].data)}]
    for _ in range(2):
        floats = all_changed(floats, rng)
        complexes.append({**floats, "c": Tensor("C64", (60,), floats["c"].data)})
    with both(tmp_path, complexes[0], HELD) as run:
        for model in complexes[1:]:
            run.publish(given_as_views(model))
    run.device[0].arrives(model, 2)


@pytest.mark.parametrize("on_device", ["never", "always"])
def test_tensors_that_are_not_dense_are_refused_by_name(
    tmp_path: Path, rng: np.random.Generator, on_device: str
) -> None:
    model: Model = {"a": tensor(rng, "F32", 40, 3)}
    place = make_place(tmp_path, model)
    dense = as_torch(model["a"])
    with place.publisher(on_device=on_device) as publisher:
        for odd in (dense.to_sparse(), torch.nested.nested_tensor([dense], layout=torch.jagged)):
            with pytest.raises(Refused, match="a: expected a dense tensor"):
                publisher.publish({"a": odd})


def test_a_tensor_of_several_chunks_that_starts_between_8_byte_words(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    size = (4 << 20) + 70
    model: Model = {"long": tensor(rng, "U8", size), "short": tensor(rng, "U8", 9)}
    with both(tmp_path, model, HELD) as run:
        for start in (0, 3):
            model = {**model, "long": model["long"].changed(rng, 50)}
            flat = torch.zeros(size + start, dtype=torch.uint8, device=DEVICE)[start:]
            flat.copy_(as_torch(model["long"]))
            run.publish({"long": flat, "short": as_torch(model["short"])})
            assert compared(run.device[1]) == 3
        assert held(run.device[1]) == (4 << 20) + 128 + 64
    run.device[0].arrives(model, 2)


def test_numpy_and_torch_in_one_chunk_are_compared_on_the_host(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model: Model = {"a": tensor(rng, "F32", 30), "b": tensor(rng, "F32", 30), "c": tensor(rng, "U8", 99)}
    place = make_place(tmp_path, model)
    with place.publisher(**HELD) as publisher:
        for mixed in (True, False):
            model = all_changed(model, rng)
            given = given_of(model)
            if mixed:
                given["b"] = model["b"].data.view(np.float32)
            publisher.publish(given)
            assert compared(publisher) == (1 if mixed else 2)
    place.arrives(model, 2)


def test_dense_steps_cross_as_wholes(tmp_path: Path, rng: np.random.Generator) -> None:
    model: Model = {"a": tensor(rng, "BF16", 9000), "b": tensor(rng, "F32", 500)}
    with both(tmp_path, model, HELD) as run:
        for elements, chunks in ((10, 2), (8000, 1), (10, 2), (10, 2)):
            model = {"a": model["a"].changed(rng, elements), "b": model["b"].changed(rng, 3)}
            run.publish(given_of(model))
            assert compared(run.device[1]) == chunks
    run.device[0].arrives(model, 4)


@dataclass
class _FailsOnce:
    """A hook after the index or pointer was written."""

    failures: int = 1

    def __call__(self, *_: object) -> None:
        if self.failures:
            self.failures -= 1
            raise Refused("the hook has failed")


def fail_at_commit(phase: str) -> None:
    if phase == "commit":
        raise RetryLater("not now")


def test_what_was_not_published_is_forgotten(tmp_path: Path, rng: np.random.Generator) -> None:
    """A publication that fails after its comparison changes nothing that the next one is compared with."""
    model: Model = {"a": tensor(rng, "BF16", 5000), "f": tensor(rng, "F32", 100)}
    place = make_place(tmp_path, model)
    with place.publisher(**HELD) as publisher:
        first = all_changed(model, rng)
        publisher.publish(given_of(first))
        lost = all_changed(first, rng)
        with pytest.raises(RetryLater):
            publisher.publish(given_of(lost), watching=fail_at_commit)
        second = some_changed(first, rng)
        publisher.publish(given_of(second))
        assert compared(publisher) == 2
        publisher.publish(given_of(first))
        assert compared(publisher) == 2
    place.arrives(first, 3)


def test_a_committed_version_whose_hook_failed_is_known(tmp_path: Path, rng: np.random.Generator) -> None:
    model: Model = {"a": tensor(rng, "BF16", 5000)}
    place = make_place(tmp_path, model)
    with place.publisher(**HELD, post_write=_FailsOnce()) as publisher:
        model = all_changed(model, rng)
        with pytest.raises(Refused, match="hook"):
            publisher.publish(given_of(model))
        model = all_changed(model, rng)
        version = publisher.publish(given_of(model)).version
        assert compared(publisher) == 1
        model = all_changed(model, rng)
        assert publisher.publish(given_of(model)).version == version + 1
    place.arrives(model, version + 1)


def test_a_version_from_elsewhere_makes_the_baseline_void(tmp_path: Path, rng: np.random.Generator) -> None:
    model: Model = {"a": tensor(rng, "BF16", 5000)}
    place = make_place(tmp_path, model)
    with place.publisher(**HELD) as publisher:
        model = all_changed(model, rng)
        publisher.publish(given_of(model))
        model = all_changed(model, rng)
        publisher.publish_checkpoint(place.new(model))
        for _ in range(2):
            model = all_changed(model, rng)
            publisher.publish(given_of(model))
            assert compared(publisher) == 1
    place.arrives(model, 4)


def mapped_word(publisher: Publisher, tensor: int) -> Any:
    local = publisher._updater.local
    assert local is not None
    return local.words(tensor)


@pytest.mark.parametrize("encoding", ["fast", "small"])
@pytest.mark.parametrize("options", [HELD, FRESH], ids=["held", "fresh"])
def test_a_drifted_local_checkpoint_is_found(
    tmp_path: Path, rng: np.random.Generator, encoding: str, options: Mapping[str, Any]
) -> None:
    """It is seeded again, and the version is that of the words the channel knows."""
    model: Model = {"a": tensor(rng, "BF16", 5000)}
    with both(tmp_path, model, options, encoding=encoding) as run:
        model = all_changed(model, rng, 400)
        run.publish(given_of(model))
        model = all_changed(model, rng, 400)
        place = int(np.flatnonzero(as_words(model) != mapped_word(run.device[1], 0))[7])
        mapped_word(run.device[1], 0)[place] ^= 1 << 12
        run.publish(given_of(model))
        assert compared(run.device[1]) == 0
        model = all_changed(model, rng, 400)
        run.publish(given_of(model))
        assert compared(run.device[1]) == 1
    run.device[0].arrives(model, 3)


def as_words(model: Model) -> Any:
    return model["a"].data.view("<u2")


def test_small_proves_the_old_words_that_do_not_change(tmp_path: Path, rng: np.random.Generator) -> None:
    """Its positions depend on all old words: hosts could not read what was made from others."""
    model: Model = {"a": tensor(rng, "BF16", 5000)}
    with both(tmp_path, model, HELD, encoding="small") as run:
        model = all_changed(model, rng, 400)
        run.publish(given_of(model))
        model = all_changed(model, rng, 400)
        place = int(np.flatnonzero(as_words(model) == mapped_word(run.device[1], 0))[7])
        mapped_word(run.device[1], 0)[place] ^= 1 << 12
        run.publish(given_of(model))
        assert compared(run.device[1]) == 0
    run.device[0].arrives(model, 2)


def test_raw_words_show_old_ones_that_have_drifted(tmp_path: Path, rng: np.random.Generator) -> None:
    """Beside an 8-byte word that changes, whose sums would show it."""
    model: Model = {"a": tensor(rng, "U8", 16)}
    flip = (np.arange(16) == 3).astype(np.uint8)
    with both(tmp_path, model, HELD) as run:
        for drift in (0, 1):
            model = {"a": Tensor("U8", (16,), model["a"].data ^ flip)}
            mapped_word(run.device[1], 0)[12] ^= drift
            run.publish(given_of(model))
            assert compared(run.device[1]) == 1 - drift
    run.device[0].arrives(model, 2)


def test_a_wrong_baseline_publishes_nothing_wrong(tmp_path: Path, rng: np.random.Generator) -> None:
    """Memory of the device that changed by itself: found, and the words are compared on the host."""
    model: Model = {"a": tensor(rng, "BF16", 5000)}
    with both(tmp_path, model, HELD) as run:
        for chunks in (1, 0, 1):
            model = all_changed(model, rng)
            run.publish(given_of(model))
            assert compared(run.device[1]) == chunks
            baselines = run.device[1].baselines
            assert baselines is not None
            for one in baselines._held.values():
                one.words[4321] ^= 1
    run.device[0].arrives(model, 3)


def test_no_memory_on_the_device(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Model = {"a": tensor(rng, "BF16", 5000), "f": tensor(rng, "F32", 100)}
    with both(tmp_path, model, HELD) as run:
        model = all_changed(model, rng)
        run.publish(given_of(model))
        assert held(run.device[1]) > 0

        def full(*_: object, **__: object) -> None:
            raise torch.cuda.OutOfMemoryError("none left")

        with monkeypatch.context() as patch:
            patch.setattr(torch, "arange", full)
            model = all_changed(model, rng)
            run.publish(given_of(model))
            assert compared(run.device[1]) == 0
        model = all_changed(model, rng)
        run.publish(given_of(model))
        assert compared(run.device[1]) == 2
        assert held(run.device[1]) == 0
    run.device[0].arrives(model, 3)


def test_by_itself_only_tensors_on_gpus_are_compared_on_a_device(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model: Model = {"a": tensor(rng, "BF16", 5000)}
    place = make_place(tmp_path, model)
    with place.publisher() as publisher:
        model = all_changed(model, rng)
        publisher.publish({"a": as_torch(model["a"]).cpu()})
        assert compared(publisher) == 0
    place.arrives(model, 1)


@pytest.mark.parametrize("base_ties", [False, True])
def test_tied_tensors_are_compared_by_bits(tmp_path: Path, rng: np.random.Generator, base_ties: bool) -> None:
    model: Model = {"embed": tensor(rng, "BF16", 90, 8), "other": tensor(rng, "F32", 8)}
    if base_ties:
        model["head"] = model["embed"]
    place = make_place(tmp_path, model, aliases={"head": "embed"})
    with place.publisher(**HELD) as publisher:
        for step in range(3):
            model = {**model, "embed": model["embed"].changed(rng, 4)}
            tied = {**model, "head": model["embed"]}
            given = given_of(tied)
            given["head"] = (given["embed"], given["embed"].view(90, 8), given["head"])[step]
            publisher.publish(given)
            untied = {**given, "head": as_torch(model["embed"].changed(rng, 1))}
            with pytest.raises(Refused, match="tied"):
                publisher.publish(untied)
    place.arrives(tied if base_ties else model, 3)


def test_the_same_name_twice(tmp_path: Path, rng: np.random.Generator) -> None:
    place = make_place(tmp_path, {"a": tensor(rng, "F16", 90)})
    model = all_changed(place.model, rng)
    given = as_torch(model["a"])
    with place.publisher(**HELD) as publisher:
        with pytest.raises(Refused, match="twice"):
            publisher.publish([("a", given), ("a", as_torch(place.model["a"]))])
        publisher.publish([("a", given), ("a", given.clone())])
    place.arrives(model, 1)


def test_ranks_compare_what_they_own(tmp_path: Path, rng: np.random.Generator) -> None:
    """A tensor that another rank owned for a while has moved on."""
    model: Model = {dtype: tensor(rng, dtype, 700) for dtype in ("BF16", "F32", "U8", "I16")}
    place = make_place(tmp_path, model)
    with (
        place.publisher(world_size=2, deadline_seconds=40, **HELD) as zero,
        place.publisher(rank=1, world_size=2, deadline_seconds=40, **HELD) as one,
        ThreadPoolExecutor(1) as pool,
    ):
        for step, count in enumerate((2, 2, 1, 2), 1):
            model = all_changed(model, rng)
            given = given_of(model)
            owned = list(given)[:count]
            first = pool.submit(zero.publish, {name: given.pop(name) for name in owned}, step=step)
            one.publish(given, step=step)
            assert first.result().version == step
            assert (compared(zero), compared(one)) == (count, 4 - count)
    place.arrives(model, 4)


def test_a_frozen_tensor_that_changed_is_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    model: Model = {"a": tensor(rng, "BF16", 5000), "f": tensor(rng, "F32", 100)}
    place = make_place(tmp_path, model, frozen=["f"])
    with place.publisher(**HELD) as publisher:
        with pytest.raises(Refused, match="frozen"):
            publisher.publish(given_of(all_changed(model, rng)))
        model = {**model, "a": model["a"].changed(rng, 4)}
        for chunks in (0, 2):
            publisher.publish(given_of(model))
            assert compared(publisher) == chunks
    place.arrives(model, 2)

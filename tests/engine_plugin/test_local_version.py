"""Versions of a real local checkpoint, loaded into ranks of an engine that a training framework drives."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Command
from patch_writer import WEIGHTS, bytes_of, some_changed, write_checkpoint
from plugin_models import Llama, ToyEngine, checkpoint
from torch import Tensor, nn
from weightcast_engine.update.local_version import CheckpointRank
from weightcast_engine.update.refusals import BadPatch, InDoubt, OtherBase, Refusal

from weightcast.publisher import Publisher, init_channel


class Turned(nn.Module):
    """Keeps its weight transposed, as some kernels do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(32, 24), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in weights:
            self.weight.data.copy_(tensor.t())


class Host:
    """A channel, and the local checkpoint that follows it."""

    def __init__(self, room: Path, base: Mapping[str, Tensor], weightcast: Command) -> None:
        self._room, self._weightcast = room, weightcast
        self.tensors, self.version, self.local = dict(base), 0, room / "local"
        write_checkpoint(room / "base", base)
        (room / "base" / "config.json").write_text("{}")
        init_channel(room / "channel", room / "base")
        self._publisher = Publisher.open(room / "channel", local=room / "publisher", base=room / "base")

    def publish(self, *names: str) -> None:
        """A version that changes these tensors; all of them without a name."""
        self.version += 1
        changed = some_changed(self.tensors, self.version)
        self.tensors |= {name: changed[name] for name in names or changed}
        self._publisher.publish(self.tensors, step=self.version)
        paths = ("--channel", self._room / "channel", "--base", self._room / "base", "--local", self.local)
        assert self._weightcast("sync", *paths).code == 0

    @property
    def root(self) -> str:
        state = json.loads((self.local / ".weightcast" / "state.json").read_text())
        return str(state["position"]["root"])

    def close(self) -> None:
        self._publisher.close()


class Gathering:
    """What ranks in threads of this process give each other."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._given: dict[int, Any] = {}
        self._barrier = threading.Barrier(count)

    def engine(self, rank: int, model: nn.Module, local: Path) -> ToyEngine:
        def gather(own: Any) -> list[Any]:
            self._given[rank] = own
            self._barrier.wait(60)
            found = [self._given[each] for each in range(self.count)]
            self._barrier.wait(60)
            return found

        engine = ToyEngine(model, local)
        engine.gather = gather  # type: ignore[method-assign]
        return engine


class Rank:
    """Around a model on the local checkpoint. `loads`: how often the model's own loader loaded all of it."""

    def __init__(self, model: nn.Module, local: Path, engine: ToyEngine | None = None) -> None:
        self.model, self.loads = model, 0
        self.engine = engine or ToyEngine(model, local)
        self.rank = CheckpointRank(self.engine, local / ".weightcast" / "engine", 1 << 24)  # type: ignore[arg-type]

    def load(self, version: int, root: str | None = None) -> None:
        self.rank.load(version, root, self._load_all)

    def patch(self, *, base: int, version: int, **claims: Any) -> None:
        wanted = dict.fromkeys(("root", "names", "dtype_names", "shapes"))
        self.rank.patch({**wanted, "base": base, "version": version, **claims})

    def _load_all(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.loads += 1
        self.model.load_weights(weights)  # type: ignore[operator]

    def live(self) -> dict[str, bytes]:
        return {name: bytes_of(weight).tobytes() for name, weight in self.model.named_parameters()}


@pytest.fixture
def host(tmp_path: Path, weightcast: Command) -> Iterator[Callable[[Mapping[str, Tensor]], Host]]:
    hosts = list[Host]()

    def made(base: Mapping[str, Tensor]) -> Host:
        hosts.append(Host(tmp_path, base, weightcast))
        hosts[0].publish()
        return hosts[0]

    yield made
    for one in hosts:
        one.close()


def fresh(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    model.load_weights(tensors.items())  # type: ignore[operator]
    return {name: bytes_of(weight).tobytes() for name, weight in model.named_parameters()}


def of_llama(ranks: int) -> tuple[dict[str, Tensor], list[Callable[[], nn.Module]]]:
    def model(rank: int) -> Callable[[], nn.Module]:
        return lambda: Llama(torch.float32, rank, ranks)

    return checkpoint(), [model(rank) for rank in range(ranks)]


TURNED = {"weight": torch.arange(24 * 32, dtype=torch.float32).reshape(24, 32)}


@pytest.mark.parametrize(
    ("base", "models"),
    [of_llama(1), of_llama(2), of_llama(4), (TURNED, [Turned])],
    ids=["one rank", "two ranks", "more ranks than heads", "transposed"],
)
def test_later_versions_are_written_in_place_and_equal_a_fresh_load(
    host: Callable[[Mapping[str, Tensor]], Host],
    base: dict[str, Tensor],
    models: list[Callable[[], nn.Module]],
) -> None:
    following = host(base)
    ranks = [Rank(model(), following.local) for model in models]
    for names in ((), (), tuple(base)[-1:]):
        for rank, model in zip(ranks, models, strict=True):
            rank.load(following.version, following.root)
            assert rank.live() == fresh(model(), following.tensors)
            held = rank.rank.obey({"do": "look"})
            assert (held["version"], held["root"], held["doubt"]) == (following.version, following.root, "")
        following.publish(*names)
    assert [rank.loads for rank in ranks] == [1] * len(ranks)
    # what somebody else loaded is not known: all of it is loaded again
    ranks[0].rank.forget("")
    ranks[0].load(following.version)
    assert ranks[0].loads == 2


def in_threads(ranks: Sequence[Rank], work: Callable[[Rank], None]) -> list[str]:
    """What each of them raised; empty where it did not."""

    def outcome(rank: Rank) -> str:
        try:
            work(rank)
        except Refusal as refusal:
            return f"{type(refusal).__name__}: {refusal.message}"
        return ""

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(outcome, ranks))


def erase_words(directory: Path) -> None:
    """Names, shapes and dtypes stay."""
    for path in directory.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        data[start:] = bytes(len(data) - start)
        path.write_bytes(data)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_patch_brings_all_ranks_to_what_a_full_load_brings(
    host: Callable[[Mapping[str, Tensor]], Host], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setenv("WEIGHTCAST_TRANSFER_PATCH", "true")
    base, models = of_llama(count)
    following, together = host(base), Gathering(count)
    ranks = []
    for at, model in enumerate(made() for made in models):
        ranks.append(Rank(model, following.local, together.engine(at, model, following.local)))
        ranks[-1].load(1)
    for names in ((), ("o.weight",), tuple(base)):
        before = following.version
        following.publish(*names)
        state = following.root
        if names == tuple(base):
            erase_words(following.local)
        assert (
            in_threads(ranks, partial(Rank.patch, base=before, version=before + 1, root=state))
            == [""] * count
        )
        for rank, model in zip(ranks, models, strict=True):
            assert rank.live() == fresh(model(), following.tensors)
            held = rank.rank.obey({"do": "look"})
            assert (held["version"], held["root"], held["label"]) == (before + 1, state, str(before + 1))
    assert [rank.loads for rank in ranks] == [1] * count


def test_a_patch_that_does_not_fit_is_refused_by_name_and_changes_nothing(
    host: Callable[[Mapping[str, Tensor]], Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTCAST_TRANSFER_PATCH", "true")
    base, models = of_llama(2)
    following, together = host(base), Gathering(2)
    ranks = []
    for at, model in enumerate(made() for made in models):
        ranks.append(Rank(model, following.local, together.engine(at, model, following.local)))
    following.publish("o.weight")

    def refused(words: str, version: int = 3, base: int = 2, **claims: Any) -> None:
        before = [rank.live() for rank in ranks]
        for said in in_threads(ranks, partial(Rank.patch, base=base, version=version, **claims)):
            assert words in said
        assert [rank.live() for rank in ranks] == before

    refused("the engine holds an unknown version, expected base 1", version=2, base=1)
    for rank in ranks:
        rank.load(2)
    following.publish("o.weight", "q.bias")
    refused("the engine holds version 2, expected base 1", base=1)
    refused("holds version 3 with root", version=4)
    refused("holds version 3 with root", root="0" * 64)
    refused("version 3 changes q.bias too, expected in names", names=["o.weight"])
    both = {"names": ["o.weight", "q.bias"], "dtype_names": ["float32", "float32"]}
    refused("o.weight is ('float32', [16, 32])", **{**both, "shapes": [[16, 16], [32]]})
    refused("q.bias is ('float32', [32])", **{**both, "dtype_names": ["float32", "bfloat16"]})
    refused("other is None in the local checkpoint", names=["o.weight", "q.bias", "other"])
    # words that one rank holds are not the base's
    weight = ranks[1].model.get_parameter("o").data
    right = weight.clone()
    weight.add_(1)
    refused("o.weight: its live words are not those of the patch's base")
    weight.copy_(right)
    ranks[1].engine.failures = 1
    refused("RuntimeError: the device is gone")
    for path in (following.local / ".weightcast" / "engine").iterdir():
        path.unlink()
    refused("has 0 patches of version 3, expected 1")
    for rank, model in zip(ranks, models, strict=True):
        rank.load(3)
        assert rank.live() == fresh(model(), following.tensors) and rank.loads == 1
    # what a rank holds after a patch is known, too: a tensor that goes back is written in place
    before = dict(following.tensors)
    following.publish("o.weight")
    assert in_threads(ranks, partial(Rank.patch, base=3, version=4)) == ["", ""]
    following.tensors = before
    following.publish("q.bias")
    for rank, model in zip(ranks, models, strict=True):
        rank.load(5)
        assert rank.live() == fresh(model(), following.tensors) and rank.loads == 1


def test_a_version_that_is_not_there_or_not_right_changes_nothing(
    host: Callable[[Mapping[str, Tensor]], Host],
) -> None:
    following = host(TURNED)
    rank = Rank(Turned(), following.local)
    rank.load(1)
    before = rank.live()
    following.publish()
    for version, root in ((1, None), (3, None), (2, "0" * 64)):
        with pytest.raises(OtherBase, match=f"holds version 2 .* expected version {version}"):
            rank.load(version, root)
    path = following.local / WEIGHTS
    right = path.read_bytes()
    path.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    with pytest.raises(BadPatch, match="weight in the local checkpoint differs from version 2"):
        rank.load(2)
    state = following.local / ".weightcast" / "state.json"
    told = state.read_text()
    state.write_text(told.replace('"clean"', '"patching"'))
    with pytest.raises(OtherBase, match="unfinished: patching"):
        rank.load(2)
    assert rank.live() == before and rank.rank.obey({"do": "look"})["version"] == 1
    state.write_text(told)
    path.write_bytes(right)
    rank.load(2)
    assert rank.live() == fresh(Turned(), following.tensors)


def test_after_a_failure_in_the_middle_all_is_loaded_again(
    host: Callable[[Mapping[str, Tensor]], Host],
) -> None:
    following = host(TURNED)
    rank = Rank(Turned(), following.local)
    rank.load(1)
    following.publish()
    rank.engine.failures = 1
    with pytest.raises(InDoubt, match="version 2 was not loaded: RuntimeError"):
        rank.load(2)
    assert "version 2 was not loaded" in rank.rank.obey({"do": "look"})["doubt"]
    rank.load(2)
    assert rank.loads == 2 and rank.rank.obey({"do": "look"})["doubt"] == ""


def test_a_subscriber_is_refused(host: Callable[[Mapping[str, Tensor]], Host]) -> None:
    following = host(TURNED)
    rank = Rank(Turned(), following.local)
    rank.load(1)
    for order in (
        {"do": "hold", "version": 2, "root": "0" * 64, "label": "2"},
        {"do": "stage", "file": "2-00000000.patch", "anew": True, "seconds": 0.0},
        {"do": "reload"},
    ):
        assert "weight transfer" in rank.rank.obey(order)["error"]
    held = rank.rank.obey({"do": "look"})
    assert held["version"] == 1 and "remove its --engine" in held["misplaced"]

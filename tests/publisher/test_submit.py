"""Publishing beside a trainer's step: when tensors are free, what waits, where errors come out."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_cases import Model, Tensor, all_changed, rot, some_changed, tensor
from publisher_cases import Place, as_numpy, make_place, numpy_model
from waiting import wait_until

from weightcast.publisher import cast_like
from weightcast.publisher.maintenance.orders import order_rollback
from weightcast.shared.base.errors import NotInTime, Refused, RetryLater, WeightcastError
from weightcast.shared.channel import pins
from weightcast.shared.channel.directory_store import open_store

Arrays = dict[str, np.ndarray[Any, Any]]
SECONDS = 240.0


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(8)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return make_place(tmp_path, numpy_model(np.random.default_rng(3)))


class Gate:
    """A hook at which publications wait while it is shut."""

    def __init__(self, phase: str = "version") -> None:
        self.open = threading.Event()
        self.reached: list[int] = []
        self._phase = phase

    def __call__(self, version: int, directory: Path, phase: str) -> None:
        if phase == self._phase:
            self.reached.append(version)
            assert self.open.wait(SECONDS)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


def writable(model: Model) -> Arrays:
    return {name: as_numpy(one).copy() for name, one in model.items()}


def scribble(arrays: Arrays) -> None:
    """What an optimizer does to tensors that it may change."""
    for array in arrays.values():
        array.reshape(-1).view(np.uint8)[...] ^= 1


def scribbled(arrays: Arrays) -> Arrays:
    scribble(arrays)
    return arrays


@pytest.mark.parametrize("encoding", ["fast", "xor"])
def test_tensors_may_change_before_the_version_is_out(
    place: Place, rng: np.random.Generator, encoding: str
) -> None:
    gate, model = Gate(), place.model
    with place.publisher(post_write=gate, encoding=encoding) as publisher:
        for version in (1, 2, 3):
            gate.open.clear()
            model = all_changed(model, rng)
            arrays = writable(model)
            handle = publisher.submit(arrays, step=version)
            assert handle.free and not handle.done
            scribble(arrays)
            assert publisher.version == version - 1
            gate.open.set()
            report = handle.result(SECONDS)
            assert (report.version, report.step) == (version, version)
            place.arrives(model, version)
    assert gate.reached == [1, 2, 3]


def test_torch_tensors(place: Place, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    model = place.model
    with place.publisher() as publisher:
        for version in (1, 2, 3):
            model = some_changed(model, rng)
            arrays = writable(model)
            tensors = {name: torch.from_numpy(array) for name, array in arrays.items() if array.size}
            tensors |= {n: torch.from_numpy(a.copy()) for n, a in arrays.items() if not a.size}
            handle = publisher.submit(tensors)
            scribble(arrays)
            assert handle.result(SECONDS).version == version
            place.arrives(model, version)


def test_nothing_changed_and_an_iterator(place: Place, rng: np.random.Generator) -> None:
    with place.publisher() as publisher:
        for version in (1, 2):
            pairs = ((name, array) for name, array in writable(place.model).items())
            assert publisher.submit(pairs).result(SECONDS).changed_elements == 0
            assert publisher.version == version
    place.arrives(place.model, 2)


def test_block_publishes_every_submission(place: Place, rng: np.random.Generator) -> None:
    models = [place.model]
    with place.publisher() as publisher:
        handles = []
        for step in range(5):
            models.append(some_changed(models[-1], rng))
            arrays = writable(models[-1])
            handles.append(publisher.submit(arrays, step=step))
            scribble(arrays)
    assert [handle.result(0).step for handle in handles] == list(range(5))
    place.arrives(models[-1], 5)


def test_the_newest_wins(place: Place, rng: np.random.Generator, gate: Gate) -> None:
    models = [some_changed(place.model, rng) for _ in range(4)]
    with place.publisher(post_write=gate) as publisher:
        first = publisher.submit(writable(models[0]), step=0, when_busy="newest")
        wait_until(lambda: gate.reached, SECONDS, "the first is being published")
        later = [publisher.submit(writable(models[n]), step=n, when_busy="newest") for n in (1, 2, 3)]
        assert [handle.done for handle in later] == [True, True, False]
        for handle in later[:2]:
            assert handle.free
            with pytest.raises(Refused, match=f"step {handle.step} was not published: step"):
                handle.result(0)
        with pytest.raises(NotInTime):
            later[2].result(0)
        gate.open.set()
        assert (first.result(SECONDS).version, later[2].result(SECONDS).version) == (1, 2)
    place.arrives(models[3], 2)


def test_release_before_the_tensors_change(place: Place, rng: np.random.Generator, gate: Gate) -> None:
    model = some_changed(place.model, rng)
    with place.publisher(post_write=gate) as publisher:
        first, arrays = publisher.submit(writable(model), when_busy="newest"), writable(model)
        assert first.release(SECONDS)
        wait_until(lambda: gate.reached, SECONDS, "the first is being published")
        waiting = publisher.submit(arrays, step=2, when_busy="newest")
        assert not waiting.free and not waiting.release()
        scribble(arrays)
        with pytest.raises(Refused, match="changed before its turn"):
            waiting.result()
        gate.open.set()
        third = publisher.submit(writable(model), when_busy="newest")
        third.result(SECONDS)
        assert third.release() and third.free
    assert publisher.version == 2
    place.arrives(model, 2)


def test_what_went_wrong_comes_out_once(place: Place, rng: np.random.Generator) -> None:
    model = some_changed(place.model, rng)
    broken = writable(model)
    del broken["f32.matrix"]
    with place.publisher() as publisher:
        publisher.submit(broken)
        with pytest.raises(Refused, match=r"f32\.matrix is missing"):
            publisher.submit(writable(model))
        seen = publisher.submit(broken)
        with pytest.raises(Refused, match=r"f32\.matrix is missing"):
            seen.result(SECONDS)
        arrays = writable(model)
        handle = publisher.submit(arrays)
        scribble(arrays)
        assert handle.result(SECONDS).version == 1
        assert publisher.submit(writable(model)).result(SECONDS).version == 2
        publisher.submit(broken)
        with pytest.raises(Refused, match=r"f32\.matrix is missing"):
            publisher.publish(writable(model))
    place.arrives(model, 2)


def test_the_end_waits_and_tells(place: Place, rng: np.random.Generator) -> None:
    model = some_changed(place.model, rng)
    with place.publisher() as publisher:
        handle = publisher.submit(writable(model))
    assert handle.done
    place.arrives(model, 1)
    with pytest.raises(Refused, match="not part of the run"), place.publisher() as publisher:
        publisher.submit({**writable(model), "surplus": np.zeros(3, np.float32)})


def test_a_hook_that_fails_after_the_commit(place: Place, rng: np.random.Generator) -> None:
    class Fails:
        left = 2

        def __call__(self, version: int, directory: Path, phase: str) -> None:
            if version == 2 and self.left:
                self.left -= 1
                raise Refused("the mount does not commit")

    models = [all_changed(place.model, rng) for _ in range(3)]
    with place.publisher(post_write=Fails()) as publisher:
        publisher.submit(writable(models[0])).result(SECONDS)
        with pytest.raises(Refused, match="does not commit"):
            publisher.submit(writable(models[1])).result(SECONDS)
        arrays = writable(models[2])
        handle = publisher.submit(arrays)
        scribble(arrays)
        with pytest.raises(Refused, match="does not commit"):
            handle.result(SECONDS)
        assert publisher.submit(writable(models[2])).result(SECONDS).version == 3
    place.arrives(models[2], 3)


def test_a_drifted_local_checkpoint_is_brought_anew(place: Place, rng: np.random.Generator) -> None:
    model = some_changed(place.model, rng)
    with place.publisher() as publisher:
        publisher.submit(writable(model)).result(SECONDS)
        rot(place.pub, "f32.matrix", 40)
        model = some_changed(model, rng)
        arrays = writable(model)
        handle = publisher.submit(arrays)
        scribble(arrays)
        assert handle.result(SECONDS).version == 2
    place.arrives(model, 2)


def test_a_channel_that_went_on_meanwhile(place: Place, rng: np.random.Generator) -> None:
    """The comparison was with bytes that are no longer the newest: nothing may come of it."""
    models = [all_changed(place.model, rng) for _ in range(4)]
    with place.publisher() as publisher:
        publisher.submit(writable(models[0])).result(SECONDS)
        publisher.submit(writable(models[1])).result(SECONDS)
        order_rollback(open_store(place.channel), 1)
        arrays = writable(models[2])
        handle = publisher.submit(arrays)
        scribble(arrays)
        with pytest.raises(WeightcastError, match="on hold since the rollback to version 1"):
            handle.result(SECONDS)
        place.arrives(models[0], 3)
        pins.resume(open_store(place.channel))
        assert publisher.submit(writable(models[3])).result(SECONDS).version == 4
    place.arrives(models[3], 4)


def test_a_second_publisher_wins(place: Place, rng: np.random.Generator) -> None:
    model = all_changed(place.model, rng)
    with place.publisher() as publisher:
        publisher.submit(writable(model)).result(SECONDS)
        with place.publisher(local=place.root / "other", take_over=True) as other:
            other.publish(writable(all_changed(model, rng)))
            with pytest.raises(Refused, match=r"epoch|publisher"):
                publisher.submit(writable(model)).result(SECONDS)
            assert other.version == 2


def test_leftovers_in_the_outbox(place: Place, rng: np.random.Generator) -> None:
    outbox = place.pub / ".weightcast" / "outbox"
    model = all_changed(place.model, rng)
    with place.publisher() as publisher:
        publisher.submit(writable(model)).result(SECONDS)
        outbox.mkdir(exist_ok=True)
        (outbox / "part-00000.safetensors").write_bytes(b"of a killed process")
        model = all_changed(model, rng)
        assert publisher.submit(writable(model)).result(SECONDS).version == 2
        assert not list(outbox.iterdir())
    place.arrives(model, 2)


def test_other_calls_wait_their_turn(place: Place, rng: np.random.Generator, gate: Gate) -> None:
    model = all_changed(place.model, rng)
    with place.publisher(post_write=gate) as publisher:
        handle = publisher.submit(writable(model))
        threading.Timer(0.2, gate.open.set).start()
        publisher.recover()
        assert handle.done and publisher.write_anchor()
        assert publisher.publish(writable(model)).version == 2


def test_what_is_not_a_policy(place: Place) -> None:
    with place.publisher() as publisher, pytest.raises(Refused, match="when_busy"):
        publisher.submit(writable(place.model), when_busy="sometimes")


def test_ranks_submit(tmp_path: Path, rng: np.random.Generator) -> None:
    base = {name: tensor(rng, "F32", 50, 7) for name in "abcd"}
    place = make_place(tmp_path, base)
    model = all_changed(base, rng)
    shares = {0: ("a", "c"), 1: ("b", "d")}
    with (
        place.publisher(rank=0, world_size=2) as zero,
        place.publisher(rank=1, world_size=2, local=tmp_path / "pub1") as one,
    ):
        for version in (1, 2):
            model = all_changed(model, rng)
            handles = []
            given = [{n: writable(model)[n] for n in shares[r]} for r in (0, 1)]
            for publisher, arrays in zip((zero, one), given, strict=True):
                handles.append(publisher.submit(arrays, step=version, when_busy="newest"))
            for handle, arrays in zip(handles, given, strict=True):
                assert handle.release(SECONDS)
                scribble(arrays)
            assert [handle.result(SECONDS).version for handle in handles] == [version] * 2
            place.arrives(model, version)


def test_an_error_is_retried_by_the_trainer(place: Place, rng: np.random.Generator) -> None:
    """A channel that is away for a while costs versions, not the run."""
    model = all_changed(place.model, rng)
    away = place.channel.with_name("away")
    with place.publisher() as publisher:
        publisher.submit(writable(model)).result(SECONDS)
        place.channel.rename(away)
        handle = publisher.submit(scribbled(writable(model)))
        with pytest.raises((RetryLater, Refused)):
            handle.result(SECONDS)
        away.rename(place.channel)
        assert publisher.submit(writable(model)).result(SECONDS).version == 2
    place.arrives(model, 2)


def test_a_thread_that_cannot_be_started_costs_a_submission_and_nothing_else(
    place: Place, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, start = all_changed(place.model, rng), threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name == "weightcast-publish":
            raise RuntimeError("can't start new thread")
        start(thread)

    with place.publisher() as publisher:
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", fail)
            for policy in ("block", "newest"):
                arrays = writable(model)
                kept = [weakref.ref(array) for array in arrays.values()]
                with pytest.raises(RetryLater, match="can't start new thread"):
                    publisher.submit(arrays, when_busy=policy)
                del arrays
                gc.collect()
                assert not any(ref() is not None for ref in kept)
        assert publisher.submit(writable(model)).result(SECONDS).version == 1
    place.arrives(model, 1)


# copies


def test_a_copy_frees_the_tensors_whatever_the_channel_does(
    place: Place, rng: np.random.Generator, gate: Gate
) -> None:
    first = all_changed(place.model, rng)
    second = all_changed(first, rng)
    with place.publisher(post_write=gate) as publisher:
        handles = []
        for model in (first, second):
            arrays = writable(model)
            handles.append(publisher.submit(arrays, when_busy="newest", hold="copy"))
            assert handles[-1].free
            scribble(arrays)
            assert handles[-1].release(), "a copy is not withdrawn"
        assert publisher.version == 0
        gate.open.set()
        assert [handle.result(SECONDS).version for handle in handles] == [1, 2]
    place.arrives(second, 2)


def test_a_copy_waits_for_its_turn(place: Place, rng: np.random.Generator) -> None:
    model = place.model
    with place.publisher() as publisher:
        for _ in range(3):
            model = all_changed(model, rng)
            arrays = writable(model)
            publisher.submit(arrays, hold="copy")
            scribble(arrays)
    place.arrives(model, 3)


def test_a_copy_of_torch_tensors_tied_and_cast(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    weight = torch.linspace(-2, 2, 70).reshape(7, 10)
    base = {"e.weight": tensor(np.random.default_rng(0), "BF16", 7, 10)}
    place = make_place(tmp_path, base, aliases={"head.weight": "e.weight"})
    with place.publisher() as publisher:
        tied = {"e.weight": weight, "head.weight": weight.view(7, 10)}
        handle = publisher.submit(cast_like(publisher, tied), hold="copy")
        expected = weight.to(torch.bfloat16)
        weight.zero_()
        handle.result(SECONDS)
    data = expected.view(torch.uint8).numpy().reshape(-1).copy()
    place.arrives({"e.weight": Tensor("BF16", (7, 10), data)}, 1)


def test_an_unknown_hold_is_refused(place: Place) -> None:
    with place.publisher() as publisher, pytest.raises(Refused, match="hold is 'both'"):
        publisher.submit(writable(place.model), hold="both")  # type: ignore[arg-type]


def test_casting_does_not_ask_the_channel(place: Place, rng: np.random.Generator) -> None:
    arrays = writable(place.model)
    with place.publisher() as publisher:
        assert cast_like(publisher, arrays).tensors == 0
        hidden = place.channel.with_name("gone")
        place.channel.rename(hidden)
        try:
            assert cast_like(publisher, arrays).tensors == 0
        finally:
            hidden.rename(place.channel)

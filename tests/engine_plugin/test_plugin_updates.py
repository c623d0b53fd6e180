"""Live weights after an update are those of a fresh load, on every rank, or what they were before."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from patch_writer import bytes_of, lanes, root, some_changed, write_patch
from plugin_models import Llama, Mixture, ToyHost, checkpoint
from weightcast_engine.update import live_elements
from weightcast_engine.update.elements import INTEGERS
from weightcast_engine.update.live_elements import LiveUpdate
from weightcast_engine.update.patch_file import read_patch
from weightcast_engine.update.places import Block, Piece
from weightcast_engine.update.rank import Answer, Order
from weightcast_engine.update.refusals import BadPatch, InDoubt, NotPaused, OtherBase, Refusal

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)


def llama_host(room: Path, dtype: torch.dtype = torch.float32, ranks: int = 1, tied: bool = False) -> ToyHost:
    models = [Llama(dtype, rank, ranks, tied) for rank in range(ranks)]
    host = ToyHost(models, checkpoint(dtype, tied=tied), room)
    host.run("hold", 0, root(0), "0")
    return host


def fresh(room: Path, host: ToyHost, tensors: dict[str, torch.Tensor]) -> list[dict[str, bytes]]:
    first = host.engines[0].model
    assert isinstance(first, Llama)
    models = [Llama(first.embed.dtype, rank, first.ranks, first.tied) for rank in range(first.ranks)]
    return ToyHost(models, tensors, room / "fresh").live()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_twenty_updates_are_a_fresh_load(tmp_path: Path, dtype: torch.dtype, ranks: int, tied: bool) -> None:
    host, base = llama_host(tmp_path, dtype, ranks, tied), checkpoint(dtype, tied=tied)
    refused = set(host.run("state")["refused"])
    for version in range(1, 21):
        target = some_changed(base, version)
        target |= {name: base[name] for name in refused}
        done = host.update(write_patch(host.patches, base, target, version), str(version))
        assert (done["version"], done["root"], done["label"]) == (version, root(version), str(version))
        base = target
    assert host.live() == fresh(tmp_path, host, base)
    assert host.controls.labels == [str(version) for version in range(1, 21)]
    told = host.run("digest", None, 0, 100)
    assert told["lanes"] == {name: lanes(base[name]) for name in base if name not in refused}
    assert set(told["refused"]) == refused and told["next"] is None and not told["changed"]


def test_what_slices_cut_inside_a_word_of_the_digest_is_refused_by_name(tmp_path: Path) -> None:
    host = llama_host(tmp_path, torch.float8_e4m3fn, 4)
    assert host.run("state")["refused"] == {
        "down.weight": "has slices that share an 8-byte word of its digest"
    }
    assert llama_host(tmp_path, torch.float32, 4).run("state")["refused"] == {}


@settings(max_examples=15, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(data=st.data())
def test_any_change_of_any_ranks(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    room = tmp_path_factory.mktemp("any")
    ranks = data.draw(st.sampled_from([1, 2, 4]))
    host, base = llama_host(room, ranks=ranks), checkpoint()
    target = {name: tensor.clone() for name, tensor in base.items()}
    names = data.draw(st.lists(st.sampled_from([n for n in base if base[n].numel()]), unique=True))
    for name in names:
        words = target[name].view(-1).view(torch.int32)
        for at in data.draw(st.sets(st.integers(0, len(words) - 1), max_size=9)):
            words[at] ^= 1
    before = host.live()
    host.update(write_patch(host.patches, base, target, 1))
    assert host.live() == fresh(room, host, target)
    host.update(write_patch(host.patches, target, base, 2))
    assert host.live() == before


def test_folded_versions_are_one_update(tmp_path: Path) -> None:
    host, base = llama_host(tmp_path), checkpoint()
    third = some_changed(some_changed(some_changed(base, 1), 2), 3)
    host.update(write_patch(host.patches, base, third, 3, step=3))
    assert host.live() == fresh(tmp_path, host, third)


def test_nothing_changed_is_an_update_too(tmp_path: Path) -> None:
    host, base = llama_host(tmp_path), checkpoint()
    before = host.live()
    assert host.update(write_patch(host.patches, base, base, 1))["version"] == 1
    assert host.live() == before


def test_another_base_is_refused_and_told(tmp_path: Path) -> None:
    host, base = llama_host(tmp_path), checkpoint()
    file = write_patch(host.patches, base, some_changed(base, 1), 5)
    before = host.live()
    with pytest.raises(OtherBase, match="starts from version 4"):
        host.run("check", file)
    assert host.live() == before and host.run("state")["version"] == 0


def test_a_flipped_bit_is_found_by_the_check_and_by_the_digest(tmp_path: Path) -> None:
    host, base = llama_host(tmp_path, ranks=2), checkpoint()
    target = some_changed(base, 1)
    file = write_patch(host.patches, base, target, 1)
    host.engines[1].model.down.view(torch.int32)[3, 4] ^= 1 << 20
    found = host.run("digest", ["down.weight", "up.weight"], 0, 2)["lanes"]
    assert found["down.weight"] != lanes(base["down.weight"])
    assert found["up.weight"] == lanes(base["up.weight"])
    host.engines[1].model.down.view(torch.int32)[3, 4] ^= 1 << 20
    touched = int((target["q.weight"] != base["q.weight"]).view(-1).nonzero()[0])
    model = host.engines[touched * 2 // base["q.weight"].numel()].model
    model.qkv.view(-1).view(torch.int32)[touched % (base["q.weight"].numel() // 2)] ^= 1
    with pytest.raises(OtherBase, match=r"q\.weight: its live words are not those"):
        host.run("check", file)


def test_replicas_that_differ_are_found(tmp_path: Path) -> None:
    host = llama_host(tmp_path, ranks=2)
    host.engines[1].model.norm.view(torch.int32)[0] ^= 1
    with pytest.raises(OtherBase, match=r"norm\.weight: places that hold the same elements differ"):
        host.run("digest", None, 0, 100)


def test_only_what_was_checked_last_is_applied_and_only_to_a_paused_engine(tmp_path: Path) -> None:
    host, base = llama_host(tmp_path), checkpoint()
    first = write_patch(host.patches, base, some_changed(base, 1), 1)
    second = write_patch(host.patches, base, some_changed(base, 2), 2, step=2)
    before = host.live()
    host.run("check", first)
    with pytest.raises(NotPaused):
        host.run("apply", first, "1")
    host.run("pause", "wait")
    with pytest.raises(OtherBase, match="was not checked"):
        host.run("apply", second, "2")
    host.run("check", second)
    with pytest.raises(OtherBase, match="was not checked"):
        host.run("apply", first, "1")
    assert host.live() == before
    assert host.run("apply", second, "2")["version"] == 2


def test_weights_that_moved_since_the_check_are_refused_then_found_again(tmp_path: Path) -> None:
    host, base = llama_host(tmp_path), checkpoint()
    target = some_changed(base, 1)
    file = write_patch(host.patches, base, target, 1)
    host.run("check", file)
    model = host.engines[0].model
    model.norm.data = model.norm.data.clone()
    host.run("pause", "abort")
    with pytest.raises(OtherBase, match="weights moved"):
        host.run("apply", file, "1")
    host.run("check", file)
    host.run("apply", file, "1")
    assert host.live() == fresh(tmp_path, host, target)


def test_a_check_that_is_not_ended_leaves_nothing_to_apply(tmp_path: Path) -> None:
    host, base = llama_host(tmp_path, ranks=2), checkpoint()
    target = some_changed(base, 1)
    file = write_patch(host.patches, base, target, 1)
    before = host.live()
    host.run("check", file)
    for order in (
        {"do": "stage", "anew": True, "seconds": 60.0},
        {"do": "sums"},
        {"do": "more", "budget": 1},
    ):
        asyncio.run(host.controls.ranks({**order, "file": file}))
    host.run("pause", "wait")
    with pytest.raises(OtherBase, match="was not checked"):
        host.run("apply", file, "1")
    assert host.live() == before
    host.run("check", file)
    host.run("apply", file, "1")
    assert host.live() == fresh(tmp_path, host, target)


@pytest.mark.parametrize(("ranks", "orders"), [(1, ["apply"]), (2, ["apply", "commit"])])
def test_a_rank_of_its_own_is_asked_once_in_the_pause(tmp_path: Path, ranks: int, orders: list[str]) -> None:
    host, base = llama_host(tmp_path, ranks=ranks), checkpoint()
    target = some_changed(base, 1)
    file = write_patch(host.patches, base, target, 1)
    host.run("check", file)
    host.run("pause", "wait")
    host.controls.orders.clear()
    told = host.run("apply", file, "one")
    assert host.controls.orders == orders and host.controls.labels == ["one"]
    assert {key: told[key] for key in ("version", "root", "label")} == {
        "version": 1,
        "root": root(1),
        "label": "one",
    }
    state = host.run("state")
    assert (state["version"], state["label"], state["in_doubt"]) == (1, "one", False)


def test_what_an_update_needed_is_given_back_after_its_pause(tmp_path: Path) -> None:
    gc.collect()
    others = [one for one in gc.get_objects() if type(one) is LiveUpdate]

    def held() -> int:
        updates = [one for one in gc.get_objects() if type(one) is LiveUpdate]
        return sum(bool(one._parts) for one in updates if not any(one is other for other in others))

    host, base = llama_host(tmp_path), checkpoint()
    file = write_patch(host.patches, base, some_changed(base, 1), 1)
    host.run("check", file)
    host.run("pause", "wait")
    assert held() == 1
    host.run("apply", file, "1")
    host.run("resume")
    assert held() == 1
    host.run("state")
    assert held() == 0


def test_ranks_that_hold_different_versions_after_an_update_are_in_doubt(tmp_path: Path) -> None:
    host, base = llama_host(tmp_path, ranks=2), checkpoint()
    file = write_patch(host.patches, base, some_changed(base, 1), 1)
    host.run("check", file)
    host.run("pause", "wait")
    asked = host.controls.ranks

    async def one_strays(order: Order) -> Sequence[Answer]:
        answers = await asked(order)
        if order["do"] == "commit":
            answers[1]["version"] = 7
        return answers

    host.controls.ranks = one_strays  # type: ignore[method-assign]
    with pytest.raises(InDoubt, match="different versions"):
        host.run("apply", file, "1")


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """torch's, of which there were others before and are again behind it."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize("budget", [0, 3000, 1 << 30])
def test_an_update_is_the_same_whatever_of_it_is_ready_before_the_pause(
    tmp_path: Path, budget: int, threads: int
) -> None:
    assert torch.get_num_threads() == threads
    base = {"w": (torch.arange(300_000) % 1000).to(torch.float16), "rows": torch.arange(64.0).reshape(8, 8)}
    target = {name: tensor.clone() for name, tensor in base.items()}
    target["w"][1::2] += 1
    target["rows"][::3, 1:7:2] += 1
    changes = {
        change.name: change for change in read_patch(tmp_path, write_patch(tmp_path, base, target, 1)).changes
    }
    live = {"w": base["w"].clone(), "rows": base["rows"][:, 4:].clone()}
    places = {"w": Block(0, 0, 1, 300_000, 300_000, 300_000), "rows": Block(4, 0, 8, 8, 4, 4)}
    update = LiveUpdate(budget)
    for name, change in changes.items():
        flat = live[name].view(-1).view(INTEGERS[change.form.width])
        assert all(changes for changes, _ in update.touched(Piece(flat, places[name]), change))
    assert live["w"].equal(base["w"])
    for _ in range(2):
        update.write()
        assert live["w"].equal(target["w"]) and live["rows"].equal(target["rows"][:, 4:])
        update.take_back()
        assert live["w"].equal(base["w"]) and live["rows"].equal(base["rows"][:, 4:])


def test_hundreds_of_experts_are_looked_up_in_steps_and_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, calls = Mixture.checkpoint(200), list[int]()
    host = ToyHost([Mixture(200)], base, tmp_path)
    host.run("hold", 0, root(0), "0")
    host.run("state")

    def counted(write: Any) -> Any:
        def counting(flat: torch.Tensor, *arguments: Any) -> torch.Tensor:
            calls.append(len(flat))
            return write(flat, *arguments)

        return counting

    before = host.live()
    for version in (1, 2):
        target = some_changed(base, version)
        file, engine = write_patch(host.patches, base, target, version), host.engines[0]
        asked = engine.asked
        host.controls.rows.clear()
        host.run("check", file)
        rows = host.controls.rows
        assert sum(rows) > 150 and max(rows) <= 128, "the engine serves between them"
        assert engine.asked - asked < 10, "looking around takes milliseconds"
        host.run("pause", "wait")
        with monkeypatch.context() as patched:
            for way in ("scatter_", "index_copy_"):
                patched.setattr(torch.Tensor, way, counted(getattr(torch.Tensor, way)))
            if version == 1:
                engine.failures = 1
                with pytest.raises(InDoubt, match="the device is gone"):
                    host.run("apply", file, "1")
                assert host.live() == before
                host.run("check", file)
            calls.clear()
            patched.setattr(torch, "cat", None)  # done before the pause
            host.run("apply", file, str(version))
        assert len(calls) == 2, "one for each parameter"
        host.run("resume")
        base = target
        model = Mixture(200)
        model.load_weights(base.items())
        assert host.live() == [{name: bytes_of(one).tobytes() for name, one in model.named_parameters()}]


def test_short_parts_are_written_together_as_far_as_memory_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is short, and whatever is prepared before the pause."""
    base = {str(n): torch.zeros(100 + n, dtype=torch.int32) for n in range(30)}
    target = {name: tensor.clone() for name, tensor in base.items()}
    for number, tensor in enumerate(target.values()):
        tensor[: 3 * number + 1] += number + 1
    changes = read_patch(tmp_path, write_patch(tmp_path, base, target, 1)).changes
    starts = dict(zip(base, range(0, 30 * 130, 130), strict=True))
    for short, checked, budget in ((1 << 14, 1 << 17, 1 << 30), (20, 100, 1 << 30), (20, 100, 9000)):
        monkeypatch.setattr(live_elements, "SHORT", short)
        monkeypatch.setattr(live_elements, "CHECKED", checked)
        live = torch.full((30 * 130,), -1, dtype=torch.int32)
        for name, start in starts.items():
            live[start : start + len(base[name])] = 0
        before, after = live.clone(), live.clone()
        for name, start in starts.items():
            after[start : start + len(base[name])] = target[name]
        update = LiveUpdate(budget)
        for change in changes:
            size = change.form.elements
            piece = Piece(live, Block(0, starts[change.name], 1, size, size, size))
            assert sum(changes for changes, _ in update.touched(piece, change)) == len(change)
        update.write()
        assert live.equal(after)
        update.take_back()
        assert live.equal(before)


@pytest.mark.parametrize("failing", [0, 1])
def test_the_failure_of_one_rank_takes_all_back(tmp_path: Path, failing: int) -> None:
    host, base = llama_host(tmp_path, ranks=2), checkpoint()
    target = some_changed(base, 1)
    file = write_patch(host.patches, base, target, 1)
    before = host.live()
    host.run("check", file)
    host.run("pause", "recompute")
    host.engines[failing].failures = 1
    with pytest.raises(InDoubt, match="the device is gone"):
        host.run("apply", file, "1")
    assert host.live() == before
    state = host.run("state")
    assert (state["version"], state["in_doubt"], state["paused"]) == (0, False, True)
    host.run("check", file)
    host.run("apply", file, "1")
    assert host.live() == fresh(tmp_path, host, target)


def test_an_undo_that_fails_leaves_a_doubt_until_a_reload(tmp_path: Path) -> None:
    host, base = llama_host(tmp_path, ranks=2), checkpoint()
    file = write_patch(host.patches, base, some_changed(base, 1), 1)
    host.run("check", file)
    host.run("pause", "recompute")
    host.engines[0].failures = 3
    with pytest.raises(InDoubt):
        host.run("apply", file, "1")
    assert host.run("state")["in_doubt"]
    for order in (("check", file), ("hold", 0, root(0), "0")):
        with pytest.raises(OtherBase, match="in doubt"):
            host.run(*order)
    host.run("reload", "0")
    state = host.run("state")
    assert (state["in_doubt"], state["version"]) == (False, None)
    assert host.live() == fresh(tmp_path, host, base)
    host.run("hold", 0, root(0), "0")
    host.run("check", file)


def test_a_digest_says_when_weights_changed_between_its_pieces(tmp_path: Path) -> None:
    host, base = llama_host(tmp_path), checkpoint()
    file = write_patch(host.patches, base, some_changed(base, 1), 1)
    names = sorted(base)
    first = host.run("digest", None, 0, 5)
    assert list(first["lanes"]) == names[:5] and first["next"] == 5 and first["version"] == 0
    host.update(file)
    assert host.run("digest", None, 5, 100)["version"] == 1
    unknown = host.run("digest", ["none"], 0, 1)
    assert unknown["refused"] == {"none": "is not in the engine's model directory"}


def test_a_hindrance_refuses_everything_by_its_reason(tmp_path: Path) -> None:
    host, base = llama_host(tmp_path), checkpoint()
    host.engines[0].said = "the model is quantised (fp8)"
    state = host.run("state")
    assert (state["patchable"], state["reason"]) == (False, "the model is quantised (fp8)")
    with pytest.raises(BadPatch, match="quantised"):
        host.run("check", write_patch(host.patches, base, some_changed(base, 1), 1))


def test_a_draft_model_is_loaded_in_the_pause_that_there_is_or_in_one_of_its_own(tmp_path: Path) -> None:
    host = llama_host(tmp_path)
    [engine, *_] = host.engines
    host.run("draft")
    assert (engine.drafted, host.controls.pauses, host.controls.is_paused) == (1, 1, False)
    host.run("pause", "wait")
    host.run("draft")
    assert (engine.drafted, host.controls.pauses, host.controls.is_paused) == (2, 2, True)
    host.run("resume")
    engine.failures = 1
    with pytest.raises(Refusal, match="the device is gone"):
        host.run("draft")
    assert not host.controls.is_paused
    # what the engine says with the main weights is not in doubt
    assert not host.run("state")["in_doubt"]

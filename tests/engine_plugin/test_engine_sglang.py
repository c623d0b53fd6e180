"""The hook around SGLang's update, on two ranks at once, with stand-ins for the server's parts around it."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from patch_writer import lanes, name_of, root, some_changed, write_checkpoint, write_patch
from plugin_models import Llama, ToyHost, checkpoint
from weightcast_engine.sglang import hook

RANKS = 2
ITS_OWN = ("checksum", "snapshot", "compare", "reset_tensors")
"""questions that SGLang answers itself"""


class Group:
    """A process group of threads: what each rank says is told to all."""

    def __init__(self) -> None:
        self._barrier, self._said = threading.Barrier(RANKS, timeout=60), dict[int, Any]()
        self.rank = threading.local()

    def all_gather_object(self, answer: Any) -> list[Any]:
        self._said[self.rank.number] = json.loads(json.dumps(answer))
        self._barrier.wait()
        answers = [self._said[rank] for rank in range(RANKS)]
        self._barrier.wait()
        return answers


class Server:
    """The ranks' weight updaters behind one call, as the scheduler makes it."""

    def __init__(self, room: Path, group: Group) -> None:
        self.base = checkpoint()
        directory = write_checkpoint(room / "model", self.base)
        self.models = [Llama(torch.float32, rank, RANKS) for rank in range(RANKS)]
        for model in self.models:
            model.load_weights(self.base.items())
        self.patches = room / "patches"
        self.patches.mkdir()
        self._group = group
        self.updaters = [
            SimpleNamespace(
                get_model=lambda m=model: m, model_config=SimpleNamespace(model_path=str(directory))
            )
            for model in self.models
        ]
        self.managers = [
            SimpleNamespace(
                tp_worker=SimpleNamespace(
                    weight_update_runners=lambda u=updater: [("target", SimpleNamespace(weight_updater=u))]
                ),
                draft_worker=None,
            )
            for updater in self.updaters
        ]

    def update(self, route: str, **body: Any) -> tuple[bool, Any]:
        return self.send(json.dumps({"door": route, "body": body}))

    def send(self, name: str, load_format: str = hook.LOADER) -> tuple[bool, Any]:
        def on_rank(rank: int) -> tuple[bool, str]:
            result: tuple[bool, str] = hook.around_update(
                lambda *given, **named: (True, json.dumps("the server's own")),
                self.updaters[rank],
                named_tensors=[(name, torch.zeros(1))],
                load_format=load_format,
            )
            return result

        first, *others = self.on_ranks(on_rank)
        assert (
            [json.loads(told)["status"] for _, told in others] == [json.loads(first[1])["status"]]
            if (load_format == hook.LOADER)
            else others == [first]
        )
        return first[0], json.loads(first[1])

    def ask(self, route: str, **body: Any) -> Any:
        """Until it is answered, however many steps it takes."""
        while (told := self.question(json.dumps({"door": route, "body": body})))["status"] == 202:
            pass
        return told

    def question(self, text: str) -> Any:
        """One step, beside the serving engine."""

        def on_rank(rank: int) -> SimpleNamespace:
            answer: SimpleNamespace = hook.around_question(
                lambda manager, question: SimpleNamespace(success=True, message="the server's own"),
                self.managers[rank],
                SimpleNamespace(action=text if text in ITS_OWN else hook.ACTION + text),
            )
            return answer

        first, *others = self.on_ranks(on_rank)
        if text in ITS_OWN:
            return first.message
        told = json.loads(first.message)
        assert first.success == (told["status"] < 300)
        assert [json.loads(other.message)["status"] for other in others] == [told["status"]]
        return told

    def reload(self, success: bool = True) -> None:
        """By the server itself."""
        answers = self.on_ranks(
            lambda rank: hook.around_reload(
                lambda updater, path: (success, "said"), self.updaters[rank], "/model"
            )
        )
        assert answers == [(success, "said")] * RANKS

    def on_ranks(self, act: Callable[[int], Any]) -> list[Any]:
        def on_rank(rank: int) -> Any:
            self._group.rank.number = rank
            return act(rank)

        with ThreadPoolExecutor(RANKS) as pool:
            return list(pool.map(on_rank, range(RANKS)))

    def live(self) -> list[dict[str, bytes]]:
        return [{n: p.numpy().tobytes() for n, p in model.named_parameters()} for model in self.models]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    group = Group()
    monkeypatch.setenv("WEIGHTCAST_PATCH_DIR", str(tmp_path / "patches"))
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    distributed = ModuleType("sglang.srt.distributed")
    distributed.get_tp_group = lambda: group  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, distributed.__name__, distributed)
    structs = ModuleType("sglang.srt.managers.io_struct")
    structs.CheckWeightsReqOutput = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.managers", ModuleType("sglang.srt.managers"))
    monkeypatch.setitem(sys.modules, structs.__name__, structs)
    return Server(tmp_path, group)


def test_updates_through_orders_in_a_tensors_name(server: Server, tmp_path: Path) -> None:
    assert server.update("look")[1]["patchable"]
    assert server.update("holds", version=0, root=root(0), label="0")[0]
    base = server.base
    for version in (1, 2):
        target = some_changed(base, version)
        file = write_patch(server.patches, base, target, version)
        assert server.update("check", file=file)[0]
        done, told = server.update("apply", file=file, label=str(version))
        assert done and (told["status"], told["version"]) == (200, version)
        base = target
    fresh = ToyHost([Llama(torch.float32, rank, RANKS) for rank in range(RANKS)], base, tmp_path / "fresh")
    assert server.live() == fresh.live()


def test_a_refusal_is_a_message_and_changes_nothing(server: Server) -> None:
    before = server.live()
    server.update("holds", version=0, root=root(0), label="0")
    done, told = server.update("check", file=name_of(3))
    assert not done and told["status"] == 422
    done, told = server.update("apply", file=name_of(3), label="3")
    assert not done and told["status"] == 422
    for name in (
        "w",
        "{}",
        '{"door":"reload","body":{}}',
        '{"door":"look"}',
        '{"door":"look","body":{},"x":1}',
    ):
        done, told = server.send(name)
        assert not done and told["status"] == 400
    assert server.live() == before


def test_other_updates_and_questions_are_the_servers_own(server: Server) -> None:
    assert server.send("w", "direct") == (True, "the server's own")
    assert server.question("checksum") == "the server's own"


@pytest.mark.parametrize("step", [0.0, 60.0])
def test_a_patch_is_checked_and_memory_read_while_it_serves(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    monkeypatch.setattr(hook, "STEP", step)
    assert server.ask("holds", version=0, root=root(0), label="0") == {"status": 200}
    base = server.base
    for version in (1, 2):
        target = some_changed(base, version)
        file = write_patch(server.patches, base, target, version)
        before = server.live()
        assert server.ask("check", file=file)["tensors"]
        assert server.live() == before
        done, told = server.update("apply", file=file, label=str(version))
        assert done and (told["status"], told["version"]) == (200, version)
        base = target
    fresh = ToyHost([Llama(torch.float32, rank, RANKS) for rank in range(RANKS)], base, tmp_path / "fresh")
    assert server.live() == fresh.live()
    told = server.ask("digest", **EVERYTHING)
    assert told["lanes"] == {name: lanes(base[name]) for name in base if name not in told["refused"]}
    seen = server.ask("look")
    assert (seen["version"], seen["root"], seen["label"]) == (2, root(2), "2")
    assert (seen["paused"], seen["patchable"], seen["in_doubt"]) == (False, True, False)


EVERYTHING: dict[str, Any] = {"tensors": None, "from": 0, "count": 100}
READ = json.dumps({"door": "digest", "body": EVERYTHING})


def test_an_order_ends_before_another_begins(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "STEP", 0.0)
    assert server.question(READ) == {"status": 202, "rest": 0.0}
    other = json.dumps({"door": "holds", "body": {"version": 0, "root": root(0), "label": "0"}})
    assert server.question(other)["status"] == 503
    assert server.question('{"door":"look","body":{}}')["status"] == 200
    steps = 1
    while (told := server.question(READ))["status"] == 202:
        steps += 1
    assert told["lanes"] and steps > 2
    assert server.ask("holds", version=0, root=root(0), label="0")["status"] == 200


def test_an_order_that_nobody_goes_on_with_makes_room(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook, "STEP", 0.0)
    monkeypatch.setattr(hook, "ABANDONED", -1.0)
    assert server.question(READ)["status"] == 202
    assert server.ask("holds", version=0, root=root(0), label="0")["status"] == 200


def test_what_comes_in_the_pause_does_not_wait(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "STEP", 0.0)
    server.ask("holds", version=0, root=root(0), label="0")
    target = some_changed(server.base, 1)
    file = write_patch(server.patches, server.base, target, 1)
    server.ask("check", file=file)
    assert server.question(READ)["status"] == 202
    assert server.update("apply", file=file, label="1")[0]
    told = server.ask("digest", **EVERYTHING)
    assert told["lanes"]["o.weight"] == lanes(target["o.weight"])


def test_what_the_server_loads_itself_is_known_by_nobody(server: Server) -> None:
    server.ask("holds", version=0, root=root(0), label="0")
    target = some_changed(server.base, 1)
    file = write_patch(server.patches, server.base, target, 1)
    server.ask("check", file=file)
    server.reload()
    seen = server.ask("look")
    assert (seen["version"], seen["label"], seen["in_doubt"]) == (None, None, False)
    done, told = server.update("apply", file=file, label="1")
    assert not done and told["status"] == 409
    server.ask("holds", version=0, root=root(0), label="0")
    assert server.send("w", "direct") == (True, "the server's own")
    assert server.ask("look")["version"] is None


def test_a_reload_that_fails_leaves_a_doubt_until_one_that_does_not(server: Server) -> None:
    server.ask("holds", version=0, root=root(0), label="0")
    server.reload(success=False)
    assert server.ask("look")["in_doubt"]
    assert server.ask("holds", version=0, root=root(0), label="0")["status"] == 409
    server.send("w", "direct")
    assert server.ask("look")["in_doubt"], "some weights are not all"
    server.reload()
    assert not server.ask("look")["in_doubt"]
    assert server.ask("holds", version=0, root=root(0), label="0")["status"] == 200


def test_a_server_with_a_draft_model_is_loaded_from_disk(server: Server) -> None:
    server.ask("holds", version=0, root=root(0), label="0")
    for manager in server.managers:
        manager.draft_worker = object()
    seen = server.ask("look")
    assert (seen["patchable"], seen["reason"]) == (False, "a draft model has weights of its own")
    file = write_patch(server.patches, server.base, some_changed(server.base, 1), 1)
    assert server.ask("check", file=file)["status"] == 422
    assert server.update("apply", file=file, label="1")[0] is False


def test_weights_are_changed_in_the_pause_alone(server: Server) -> None:
    long = json.dumps({"door": "look", "body": {}}) + " " * (64 << 10)
    for order in ('{"door":"apply","body":{}}', '{"door":"reload","body":{}}', "w", "{}", long):
        assert server.question(order)["status"] == 400


def test_a_question_of_the_servers_own_that_changes_weights_is_seen(server: Server) -> None:
    for question, version in (("checksum", 0), ("snapshot", 0), ("compare", 0), ("reset_tensors", None)):
        server.ask("holds", version=0, root=root(0), label="0")
        assert server.question(question) == "the server's own"
        assert server.ask("look")["version"] == version, question


@pytest.mark.parametrize(("run_post_load", "version"), [(False, 0), (True, None)])
def test_a_session_in_which_nothing_was_loaded_had_weights_from_without(
    server: Server, run_post_load: bool, version: int | None
) -> None:
    server.ask("holds", version=0, root=root(0), label="0")
    ended = server.on_ranks(
        lambda rank: hook.around_end(
            lambda updater, run_post_load: run_post_load, server.updaters[rank], run_post_load=run_post_load
        )
    )
    assert ended == [run_post_load] * RANKS and server.ask("look")["version"] == version


class UnquantizedLinearMethod:
    """Named as SGLang's."""


PACKED: dict[str, tuple[Callable[[torch.nn.Module], None], str]] = {
    "AMX": (lambda m: setattr(m, "use_intel_amx_backend", True), "is packed for AMX"),
    "interleaved": (
        lambda m: setattr(m, "quant_method", SimpleNamespace(w13_swiglu_interleaved=True)),
        "are interleaved",
    ),
    "TensorRT": (
        lambda m: setattr(m, "quant_method", SimpleNamespace(use_flashinfer_trtllm_moe=True)),
        "TensorRT-LLM",
    ),
    "AITER": (lambda m: setattr(m, "quant_method", UnquantizedLinearMethod()), "is packed for AITER"),
}


@pytest.mark.parametrize("case", PACKED)
def test_a_model_with_a_layer_that_each_session_packs_is_refused_as_a_whole(
    server: Server, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, reason = PACKED[case]
    for model in server.models:
        model.odd_one = torch.nn.Module()
        pack(model.odd_one)
    monkeypatch.setattr(sys.modules[__name__], "_use_aiter", case == "AITER", raising=False)
    told = server.ask("look")
    assert not told["patchable"] and reason in told["reason"] and "odd_one" in told["reason"]
    file = write_patch(server.patches, server.base, some_changed(server.base, 1), 1)
    server.ask("holds", version=0, root=root(0), label="0")
    before = server.live()
    assert server.ask("check", file=file)["status"] == 422
    assert server.update("apply", file=file, label="1")[1]["status"] in (409, 422)
    assert server.live() == before


@pytest.mark.parametrize("by", ["caches", "shared", ""])
def test_what_sglang_itself_would_not_load_is_not_patched(
    server: Server, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    updaters = ModuleType("updaters")

    class WeightUpdater(SimpleNamespace):
        def _assert_weight_cache_inactive(self, op: str) -> None:
            if by == "shared":
                raise RuntimeError("the daemon's master copy")

    def error(model: torch.nn.Module) -> str | None:
        return "a split is cached" if by == "caches" else None

    updaters._unsupported_derived_weight_cache_error = error  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "updaters", updaters)
    monkeypatch.setattr(WeightUpdater, "__module__", "updaters")
    server.updaters[:] = [WeightUpdater(**vars(updater)) for updater in server.updaters]
    for updater, manager in zip(server.updaters, server.managers, strict=True):
        runners = [("target", SimpleNamespace(weight_updater=updater))]
        manager.tp_worker.weight_update_runners = lambda found=runners: found
    told = server.ask("look")
    assert told["patchable"] is (by == "")
    assert ("SGLang takes no weights while it runs" in told["reason"]) is (by != "")


def test_the_hook_is_registered_only_where_patches_are_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[tuple[str, Callable[..., Any], str]] = []
    module = ModuleType("sglang.srt.plugins.hook_registry")
    module.HookRegistry = SimpleNamespace(register=lambda *given: registered.append(given))  # type: ignore[attr-defined]
    module.HookType = SimpleNamespace(AROUND="around")  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv("WEIGHTCAST_PATCH_DIR", raising=False)
    hook.register()
    assert registered == []
    monkeypatch.setenv("WEIGHTCAST_PATCH_DIR", "/x")
    hook.register()
    assert registered == [
        (hook.TARGET, hook.around_update, "around"),
        (hook.ASKED, hook.around_question, "around"),
        (hook.RELOADS, hook.around_reload, "around"),
        (hook.ENDED, hook.around_end, "around"),
        *((target, hook.around_load, "around") for target in hook.LOADS),
    ]

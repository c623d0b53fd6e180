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
from patch_writer import name_of, root, some_changed, write_checkpoint, write_patch
from plugin_models import Llama, ToyHost, checkpoint
from weightcast_engine import sglang_hook

RANKS = 2


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

    def update(self, door: str, **body: Any) -> tuple[bool, Any]:
        return self.send(json.dumps({"door": door, "body": body}))

    def send(self, name: str, load_format: str = sglang_hook.LOADER) -> tuple[bool, Any]:
        def on_rank(rank: int) -> tuple[bool, str]:
            self._group.rank.number = rank
            result: tuple[bool, str] = sglang_hook.around_update(
                lambda *given, **named: (True, json.dumps("the server's own")),
                self.updaters[rank],
                named_tensors=[(name, torch.zeros(1))],
                load_format=load_format,
            )
            return result

        with ThreadPoolExecutor(RANKS) as pool:
            first, *others = pool.map(on_rank, range(RANKS))
        assert (
            [json.loads(told)["status"] for _, told in others] == [json.loads(first[1])["status"]]
            if (load_format == sglang_hook.LOADER)
            else others == [first]
        )
        return first[0], json.loads(first[1])

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


def test_other_updates_are_the_servers_own(server: Server) -> None:
    assert server.send("w", "direct") == (True, "the server's own")


def test_the_hook_is_registered_only_where_patches_are_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[tuple[str, Callable[..., Any], str]] = []
    module = ModuleType("sglang.srt.plugins.hook_registry")
    module.HookRegistry = SimpleNamespace(register=lambda *given: registered.append(given))  # type: ignore[attr-defined]
    module.HookType = SimpleNamespace(AROUND="around")  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv("WEIGHTCAST_PATCH_DIR", raising=False)
    sglang_hook.register()
    assert registered == []
    monkeypatch.setenv("WEIGHTCAST_PATCH_DIR", "/x")
    sglang_hook.register()
    assert registered == [(sglang_hook.TARGET, sglang_hook.around_update, "around")]

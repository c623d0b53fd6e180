"""The backend fits vLLM's base class and factory as they are in a release, recorded from its wheel."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from abc import ABCMeta
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from weightcast_engine.vllm.hook import register

SCHEMA = Path(__file__).parents[1] / "engines" / "schemas" / "weight-transfer-vllm-0.33.0.json"
TRANSFER = "weightcast_engine.vllm.transfer"


def stand_in(methods: dict[str, Any]) -> type:
    """The recorded base class."""

    def method(name: str, abstract: bool) -> Any:
        def called(self: Any, *arguments: Any) -> None:
            if name == "__init__":
                self.config, self.vllm_config, self.device, self.model = arguments

        called.__isabstractmethod__ = abstract  # type: ignore[attr-defined]
        return called

    made = {name: method(name, told["abstract"]) for name, told in methods.items()}
    return ABCMeta("WeightTransferEngine", (), made)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    schema = json.loads(SCHEMA.read_text())
    registered: dict[str, tuple[str, str]] = {}

    class Factory:
        @classmethod
        def register_engine(cls, name: str, module_path_or_cls: str, class_name: str) -> None:
            if name in registered:
                raise ValueError(f"Weight transfer engine '{name}' is already registered.")
            registered[name] = (module_path_or_cls, class_name)

    modules = {"base": ModuleType("base"), "factory": ModuleType("factory")}
    info = {name: type(name, (), {}) for name in ("WeightTransferInitInfo", "WeightTransferUpdateInfo")}
    vars(modules["base"]).update(info, WeightTransferEngine=stand_in(schema["WeightTransferEngine"]))
    vars(modules["factory"]).update(WeightTransferEngineFactory=Factory)
    for parent in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"vllm.distributed.weight_transfer.{name}", module)
    monkeypatch.delitem(sys.modules, TRANSFER, raising=False)
    yield {**schema, "registered": registered, "factory": Factory}
    sys.modules.pop(TRANSFER, None)


def test_it_registers_as_the_factory_takes_it(
    recorded: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEIGHTCAST_PATCH_DIR", raising=False)
    register()
    register()
    assert recorded["registered"] == {"weightcast": (TRANSFER, "WeightcastTransfer")}
    own = list(inspect.signature(recorded["factory"].register_engine).parameters)
    assert own == recorded["WeightTransferEngineFactory"]["register_engine"]


class Client:
    """Of an engine of two ranks, of which one may not do what it is told."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.looks = [{"refusal": "", "version": 3, "doubt": "", "label": "3"} for _ in range(2)]

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self.sent.append(("init", request.init_info))

    async def update_weights(self, request: Any) -> None:
        self.sent.append(("update", request.update_info))

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.sent.append(("finish", weight_version))

    async def ranks(self, order: object) -> Any:
        return self.looks

    async def relabel(self, label: str) -> None:
        self.sent.append(("label", label))


def test_what_a_rank_refuses_is_raised_in_the_server(recorded: dict[str, Any]) -> None:
    from weightcast_engine.vllm import transfer

    client, controls = Client(), Client()
    transfer.follow(client, controls)  # type: ignore[arg-type]

    def update(**info: Any) -> None:
        asyncio.run(client.update_weights(SimpleNamespace(update_info=info)))

    update(version=3)
    asyncio.run(client.finish_weight_update())
    quiet = {**vars(transfer.UpdateInfo(3)), "quiet": True}
    assert client.sent == [("update", quiet), ("finish", None)] and controls.sent == [("label", "3")]
    # the session is ended on all ranks, and the next one may begin
    controls.looks[1]["refusal"] = "not here"
    client.sent.clear()
    with pytest.raises(RuntimeError, match="not here"):
        update(version=4)
    assert client.sent == [("update", {**quiet, "version": 4}), ("finish", None)]
    with pytest.raises(RuntimeError, match="not here"):
        asyncio.run(client.finish_weight_update())
    controls.looks[1] |= {"refusal": "", "version": 4}
    with pytest.raises(RuntimeError, match="update again"):
        asyncio.run(client.finish_weight_update("mine"))
    assert controls.sent == [("label", "3")]
    for wrong, words in (
        ({"version": "4"}, "version"),
        ({"version": 4, "base": -1}, "base"),
        ({"version": 4, "names": ["w"]}, "give base too"),
        ({"version": 4, "base": 3, "names": ["w"], "shapes": []}, "one length"),
        ({"version": 4, "base": 3, "dtype_names": ["float32"]}, "one length"),
    ):
        with pytest.raises(ValueError, match=words):
            update(**wrong)
    with pytest.raises(ValueError, match="all ranks take one patch"):
        each = [{"version": 4, "base": 3}, {"version": 4}]
        asyncio.run(client.update_weights(SimpleNamespace(update_info=each)))


def test_it_has_all_that_the_base_class_asks_for(
    recorded: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightcast_engine.vllm import transfer

    backend: Any = transfer.WeightcastTransfer
    for name, told in recorded["WeightTransferEngine"].items():
        if name in vars(backend):
            assert list(inspect.signature(vars(backend)[name]).parameters)[1:] == told["arguments"], name
    arguments = recorded["WeightTransferEngineFactory"]["create_engine"]
    assert arguments == recorded["WeightTransferEngine"]["__init__"]["arguments"]
    config = SimpleNamespace(model_config=SimpleNamespace(model="/model"), speculative_config=None)
    drafting = SimpleNamespace(
        model_config=config.model_config, speculative_config=SimpleNamespace(method="eagle")
    )
    for given, patches, words in (
        (config, "", "WEIGHTCAST_PATCH_DIR is not set"),
        (config, "/other/.weightcast/engine", "start vLLM on the local checkpoint"),
        (drafting, "/model/.weightcast/engine", "draft model"),
    ):
        monkeypatch.setenv("WEIGHTCAST_PATCH_DIR", patches)
        with pytest.raises(ValueError, match=words):
            backend(None, given, None, None)
    made = backend(None, config, None, None)
    made.init_transfer_engine(transfer.InitInfo("/model"))
    with pytest.raises(RuntimeError, match="expected vLLM's model directory"):
        made.init_transfer_engine(transfer.InitInfo("/other"))
    for version in (-1, True, "1", 1.0):
        with pytest.raises(ValueError, match="version"):
            transfer.UpdateInfo(version)
    with pytest.raises(ValueError, match="root"):
        transfer.UpdateInfo(1, "beef")

"""SGLang: orders come as the *name* of a tensor in `/update_weights_from_tensor`, with
`"load_format": "weightcast_engine.sglang_hook.load"`, which the server allows by `--custom-weight-loader`.

    name      {"door": "check", "body": {"file": "8-0011aabb.patch"}}      the doors and bodies of `doors`
    message   {"status": 200, ...}                                         what the door answers, as JSON

A loader that raises would end the server, and one that returns moves the weight version. So the entry point
`sglang.srt.plugins` puts a hook around the update that carries orders out itself: a refusal is a 400, the
server lives, the version stays. Nothing is done unless WEIGHTCAST_PATCH_DIR is set. Written against SGLang
0.5.23, and run with its server on a CPU.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from weightcast_engine import doors, strict
from weightcast_engine.front import Front
from weightcast_engine.patch_file import LIMIT
from weightcast_engine.piece import storage
from weightcast_engine.rank import Answer, Order, Rank
from weightcast_engine.refusals import BadPatch

LOADER = "weightcast_engine.sglang_hook.load"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
TARGET = f"{_UPDATER}.update_weights_from_tensor"
_SERVED = frozenset({"look", "holds", "check", "apply", "digest"})
"""pause, reload and resume are the server's own"""
_fronts: WeakKeyDictionary[torch.nn.Module, Front] = WeakKeyDictionary()


def register() -> None:
    if not os.environ.get("WEIGHTCAST_PATCH_DIR"):
        return
    from sglang.srt.plugins.hook_registry import (  # type: ignore[import-not-found]
        HookRegistry,
        HookType,
    )

    HookRegistry.register(TARGET, around_update, HookType.AROUND)


def load(model: object, named_tensors: object) -> None:
    """Named in `--custom-weight-loader`; called only where the hook is not there."""
    raise BadPatch("the hook of weightcast-engine is not loaded", remedy="set WEIGHTCAST_PATCH_DIR")


def around_update(original: Callable[..., Any], updater: Any, *arguments: Any, **named: Any) -> Any:
    """Around `WeightUpdater.update_weights_from_tensor(named_tensors, load_format)` on every rank."""
    tensors, load_format = _given(*arguments, **named)
    if load_format != LOADER:
        return original(updater, *arguments, **named)
    status, answer = _carried_out(updater, tensors)
    return status == 200, json.dumps({"status": status, **answer})


def _given(named_tensors: Any, load_format: str | None = None) -> tuple[Any, str | None]:
    return named_tensors, load_format


def _carried_out(updater: Any, tensors: Sequence[tuple[str, object]]) -> doors.Reply:
    try:
        [(name, _)] = tensors
        order = strict.members(strict.json_object(name.encode()), {"door", "body"}, "order")
        if order["door"] not in _SERVED:
            raise ValueError(f"no door {str(order['door'])[:40]!r}; doors: {', '.join(sorted(_SERVED))}")
    except ValueError as error:
        return 400, {"error": f"not an order: {error}", "remedy": "see docs/engines.md, The plugin"}
    # every rank runs this, with the same answers of all ranks, and comes to the same end
    front = _front(updater)
    if order["door"] == "look":
        return asyncio.run(doors.look(front))
    return asyncio.run(doors.order(front, str(order["door"]), json.dumps(order["body"]).encode()))


def _front(updater: Any) -> Front:
    model = updater.get_model()
    if model not in _fronts:
        limit = int(os.environ.get("WEIGHTCAST_PATCH_LIMIT", LIMIT))
        rank = Rank(SglangEngine(updater), Path(os.environ["WEIGHTCAST_PATCH_DIR"]), limit)
        _fronts[model] = Front(SglangControls(rank))
    return _fronts[model]


class SglangControls:
    """`front.Controls` of one rank among all: each carries the order out and tells the others."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    async def ranks(self, order: Order) -> Sequence[Answer]:
        from sglang.srt.distributed import get_tp_group  # type: ignore[import-not-found]

        answers: Sequence[Answer] = get_tp_group().all_gather_object(self._rank.obey(order))
        return answers

    async def pause(self, policy: str) -> None:
        raise BadPatch("pause by the server's own /pause_generation")

    async def resume(self) -> None:
        raise BadPatch("resume by the server's own /continue_generation")

    async def paused(self) -> bool:
        """An update is carried out between two steps of the scheduler, with the caches flushed after it."""
        return True

    async def relabel(self, label: str) -> None:
        """The server does, by `weight_version`, when the update succeeds."""


class SglangEngine:
    """`rank.Engine` around a `WeightUpdater`."""

    def __init__(self, updater: Any) -> None:
        self._updater = updater

    @property
    def model(self) -> Any:
        return self._updater.get_model()

    @property
    def directory(self) -> Path:
        return Path(self._updater.model_config.model_path)

    def hindrance(self) -> str | None:
        quantised = getattr(self._updater.model_config, "quantization", None)
        if quantised is not None:
            return f"the model is quantised: {quantised}"
        return None if self.directory.is_dir() else f"{self.directory} is no directory"

    def misplaced(self, patches: Path) -> str | None:
        """A reload is told its path, by /update_weights_from_disk."""
        return None

    def refusals(self) -> Mapping[int, str]:
        found: dict[int, str] = {}
        for name, module in self.model.named_modules():
            method = type(getattr(module, "quant_method", None)).__name__
            if method != "NoneType" and not method.startswith("Unquantized"):
                reason = f"belongs to {name}, which computes by {method}"
                found |= {storage(weight): reason for weight in module.parameters()}
        return found

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        yield

    def synchronise(self) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def reload(self) -> None:
        raise BadPatch("reload by the server's own /update_weights_from_disk")

"""SGLang: an order comes as the text of a question that the server passes on to all its ranks.

    while it serves   POST /weights_checker {"action": "weightcast " + order}
    in the pause      POST /update_weights_from_tensor, the order as the *name* of a tensor, with
                      "load_format": "weightcast_engine.sglang.hook.load" (`--custom-weight-loader`)

    order     {"door": "check", "body": {"file": "8-0011aabb.patch"}}      the names and bodies of `routes`
    message   {"status": 200, ...}                                         the answer, as JSON
              {"status": 202, "rest": 0.01}                                again, for the order's next step

The entry point `sglang.srt.plugins` puts hooks around what the ranks do with these questions, and around
their own ways of loading weights, after which nobody knows what they hold until `holds`. A loader that
raises would end the server, and one that returns moves the weight version: so the hook carries orders out
itself, a refusal is a 400, the server lives, the version stays. Nothing is done unless WEIGHTCAST_PATCH_DIR
is set. Written against SGLang 0.5.23, and run with its server on a CPU.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from weightcast_engine.update import routes, strict_json
from weightcast_engine.update.front import Front
from weightcast_engine.update.rank import NOT_ENDED, Answer, EngineHere, EngineRank, Order
from weightcast_engine.update.refusals import BadPatch

LOADER = "weightcast_engine.sglang.hook.load"
ACTION = "weightcast "
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
TARGET = f"{_UPDATER}.update_weights_from_tensor"
ASKED = f"{_MANAGER}.check_weights"
RELOADS = f"{_UPDATER}.update_weights_from_disk"
LOADS = (f"{_UPDATER}.load_weights_from_distributed", f"{_UPDATER}.update_weights_from_ipc")
ENDED = f"{_UPDATER}.end_weight_update"
_RESETS = "reset_tensors"
"""the question of the server's own that changes weights"""
_PAUSED = frozenset({"look", "holds", "check", "apply", "digest"})
_SERVING = _PAUSED - {"apply"}
"""pause, reload and resume are the server's own"""
STEP = 0.02
"""seconds of the slowest rank, after which the engine's own work comes first"""
ABANDONED = 30.0
"""seconds after which an order that nobody went on with makes room for another"""
_parts: WeakKeyDictionary[torch.nn.Module, _Part] = WeakKeyDictionary()


def register() -> None:
    if not os.environ.get("WEIGHTCAST_PATCH_DIR"):
        return
    from sglang.srt.plugins.hook_registry import (  # type: ignore[import-not-found]
        HookRegistry,
        HookType,
    )

    hooks = {TARGET: around_update, ASKED: around_question, RELOADS: around_reload, ENDED: around_end}
    for target, around in (hooks | dict.fromkeys(LOADS, around_load)).items():
        HookRegistry.register(target, around, HookType.AROUND)


def load(model: object, named_tensors: object) -> None:
    """Named in `--custom-weight-loader`; called only where the hook is not there."""
    raise BadPatch("the hook of weightcast-engine is not loaded", remedy="set WEIGHTCAST_PATCH_DIR")


def around_update(
    original: Callable[..., Any], updater: Any, named_tensors: Any, load_format: str | None = None
) -> Any:
    """Around `WeightUpdater.update_weights_from_tensor(named_tensors, load_format)` on every rank."""
    if load_format != LOADER:
        return around_load(original, updater, named_tensors, load_format)
    names = [name for name, _ in named_tensors]
    status, answer = _part(updater).in_pause(names[0] if len(names) == 1 else "")
    return status == 200, json.dumps({"status": status, **answer})


def around_question(original: Callable[..., Any], manager: Any, question: Any) -> Any:
    """Around `SchedulerWeightUpdaterManager.check_weights(recv_req)` on every rank, between two steps of the
    scheduler."""
    action = question.action
    if type(action) is not str or not action.startswith(ACTION):
        if action == _RESETS:
            _forget(_updater_of(manager))
        return original(manager, question)
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput  # type: ignore[import-not-found]

    part = _part(_updater_of(manager))
    status, answer = part.beside(action.removeprefix(ACTION), has_draft=manager.draft_worker is not None)
    return CheckWeightsReqOutput(success=status < 300, message=json.dumps({"status": status, **answer}))


def around_load(original: Callable[..., Any], updater: Any, *arguments: Any, **named: Any) -> Any:
    """Around the server's own ways to some new weights."""
    _forget(updater)
    return original(updater, *arguments, **named)


def around_end(original: Callable[..., Any], updater: Any, *, run_post_load: bool) -> Any:
    """Around `WeightUpdater.end_weight_update`. With `run_post_load` nothing was loaded in this session:
    weights were written from without, or an order was refused in it."""
    if run_post_load:
        _forget(updater)
    return original(updater, run_post_load=run_post_load)


def _forget(updater: Any) -> None:
    part = _parts.get(updater.get_model())
    if part is not None:
        part.forget()


def _updater_of(manager: Any) -> Any:
    return dict(manager.tp_worker.weight_update_runners())["target"].weight_updater


def around_reload(original: Callable[..., Any], updater: Any, *arguments: Any, **named: Any) -> Any:
    """Around `WeightUpdater.update_weights_from_disk`: all weights, with (success, message) for an answer."""
    part = _parts.get(updater.get_model())
    if part is None:
        return original(updater, *arguments, **named)
    part.forget(NOT_ENDED)
    result = original(updater, *arguments, **named)
    if result[0]:
        part.forget("")
    return result


def _part(updater: Any) -> _Part:
    model = updater.get_model()
    if model not in _parts:
        from sglang.srt.distributed import get_tp_group  # type: ignore[import-not-found]

        _parts[model] = _Part(SglangEngine(updater), get_tp_group())
    return _parts[model]


class _Part:
    """One rank's. Every rank is asked the same, hears what all of them answer, and comes to the same end."""

    def __init__(self, engine: SglangEngine, group: Any) -> None:
        self._engine, self._group = engine, group
        self._rank = EngineRank.from_environment(engine)
        self._controls = SglangControls(self._rank, group)
        self._front = Front(self._controls)
        self._begun = ""
        """the text of the order that is carried out in steps; empty: none"""
        self._left: routes.Acting | None = None
        self._stepped = 0.0

    def forget(self, doubt: str | None = None) -> None:
        self._give_up()
        self._rank.forget(doubt)

    def _give_up(self) -> None:
        """What was begun and has not ended."""
        if self._left is not None:
            self._left.close()
        self._begun, self._left = "", None

    def in_pause(self, text: str) -> routes.Reply:
        """Drops what runs while the engine serves."""
        try:
            _, begin = self._parsed(text, _PAUSED)
        except ValueError as error:
            return _not_an_order(error)
        self._give_up()
        self._controls.begin_step(paused=True)
        return routes.at_once(begin())

    def beside(self, text: str, *, has_draft: bool) -> routes.Reply:
        """Between two steps of the scheduler. `has_draft`: the server has a draft model."""
        self._engine.has_draft = has_draft
        try:
            order, begin = self._parsed(text, _SERVING)
        except ValueError as error:
            return _not_an_order(error)
        self._controls.begin_step(paused=False)
        if order == "look":
            return routes.at_once(begin())
        if self._begun not in ("", text) and not self._is_abandoned():
            return 503, {"error": "another order is being carried out", "remedy": "send one at a time"}
        if self._left is None or self._begun != text:
            self._give_up()
            self._begun, self._left = text, begin()
        try:
            rest, answer = routes.step(self._left)
        except BaseException:
            self._give_up()
            raise
        self._stepped = time.monotonic()
        if answer is None:
            return 202, {"rest": rest}
        self._give_up()
        return answer

    def _is_abandoned(self) -> bool:
        """As the first rank's clock says."""
        told: Sequence[bool] = self._group.all_gather_object(time.monotonic() - self._stepped > ABANDONED)
        return told[0]

    def _parsed(self, text: str, served: frozenset[str]) -> tuple[str, Callable[[], routes.Acting]]:
        """The order's route, and what carries it out. Raises ValueError unless it is an order that is served
        now."""
        if len(text) > routes.BODY_LIMIT:
            raise ValueError(f"more than {routes.BODY_LIMIT} characters")
        order = strict_json.members(strict_json.json_object(text.encode()), {"door", "body"}, "order")
        route = str(order["door"])
        if route not in served:
            raise ValueError(f"no order {route[:40]!r}; orders: {', '.join(sorted(served))}")
        if route == "look":
            return route, lambda: routes.look(self._front)
        return route, lambda: routes.order(self._front, route, json.dumps(order["body"]).encode())


def _not_an_order(error: ValueError) -> routes.Reply:
    return 400, {"error": f"not an order: {error}", "remedy": "see docs/live-patch.md"}


class SglangControls(routes.FromWithin):
    """`weight_version` of an update names its weights, when it succeeds."""

    def __init__(self, rank: EngineRank, group: Any) -> None:
        super().__init__(rank.obey, group.all_gather_object)
        self._spent = 0.0
        """seconds of this step"""
        self._is_paused = True
        """an update is carried out between two steps of the scheduler, with the caches flushed after it"""

    def begin_step(self, *, paused: bool) -> None:
        self._is_paused, self._spent = paused, 0.0

    async def ranks(self, order: Order) -> Sequence[Answer]:
        if self._spent >= STEP:
            await routes.end_of_step()
        began = time.monotonic()
        answer = self._obey(order)
        told: Sequence[tuple[float, Answer]] = self._gather((time.monotonic() - began, answer))
        self._spent += max(seconds for seconds, _ in told)
        return [answer for _, answer in told]

    async def paused(self) -> bool:
        return self._is_paused


class SglangEngine(EngineHere):
    """Around a `WeightUpdater`."""

    def __init__(self, updater: Any) -> None:
        self._updater = updater
        self.has_draft = False
        """a model of its own, which every update is meant for too"""
        self._form: str | None = None
        """why the form of the weights does not let them be patched; empty: it does"""

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
        if self.has_draft:
            return "a draft model has weights of its own"
        if self._form is None:  # settled when the server starts
            self._form = _packed(self.model) or _vetoed(self._updater) or ""
        if self._form:
            return self._form
        return None if self.directory.is_dir() else f"{self.directory} is not a directory"

    def drafter(self) -> str:
        """Which reloads reach; the server tells its method by /server_info."""
        return "draft model" if self.has_draft else "none"

    def packed(self, name: str, module: Any) -> str | None:
        method = type(getattr(module, "quant_method", None)).__name__
        plain = method == "NoneType" or method.startswith("Unquantized")
        return None if plain else f"which computes by {method}"

    def reload(self) -> None:
        raise BadPatch("reload by the server's own /update_weights_from_disk")


def _packed(model: Any) -> str | None:
    """Every session of an update ends with what SGLang does after it has loaded weights, which packs these
    layers once more, patched or not."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if getattr(module, "use_intel_amx_backend", False):
            return f"{name} is packed for AMX"
        if getattr(method, "w13_swiglu_interleaved", False):
            return f"the experts of {name} are interleaved"
        if getattr(method, "use_flashinfer_trtllm_moe", False):
            return f"the experts of {name} are packed for TensorRT-LLM's kernels"
        if getattr(sys.modules.get(type(method).__module__), "_use_aiter", False):
            return f"{name} is packed for AITER"
    return None


def _vetoed(updater: Any) -> str | None:
    """Why SGLang itself would take no new weights while it runs: it says so to whom it is asked by, and the
    hook takes its place."""
    ask = getattr(sys.modules.get(type(updater).__module__), "_unsupported_derived_weight_cache_error", None)
    reason = None if ask is None else ask(updater.get_model())
    if reason is None and hasattr(updater, "_assert_weight_cache_inactive"):
        try:
            updater._assert_weight_cache_inactive("a live patch")
        except RuntimeError as error:
            reason = str(error)
    return None if reason is None else f"SGLang takes no weights while it runs: {reason}"[:300]

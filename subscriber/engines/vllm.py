"""vLLM. `VLLM` (>= 0.16, started with VLLM_SERVER_DEV_MODE=1): `reload_weights` between pause and resume.

`VLLMLive`, with the plugin of `weightcast-engine`: patches, reloads and pauses through its routes under /v1.
No dev mode is needed. A path is never sent: patches are named files in a directory that was fixed at the
engine's start, and a reload reads the model's own directory.
"""

from __future__ import annotations

import json
import posixpath
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx

from weightcast.shared.base.errors import EngineFailed, WeightcastError
from weightcast.shared.checkpoint.update.engine_patch import EnginePatch
from weightcast.shared.files import durable
from weightcast.shared.files.hf_checkpoint import open_checkpoint
from weightcast.subscriber.engines.adapter import (
    LOG,
    NONE,
    UNKNOWN,
    AdapterLimits,
    Identities,
    LiveAdapter,
    PluginAnswer,
    Server,
    TakesAdapters,
    drafter_named,
)
from weightcast.subscriber.engines.base import (
    NO_ROUTE,
    Confirmation,
    Done,
    EngineFacts,
    EngineSpec,
    HeldWeights,
    Intact,
    Policy,
    ReloadOutcome,
    Suspect,
    Unfit,
    unreachable,
)
from weightcast.subscriber.engines.wire import NEVER_HANDLED, Reply, Wire, not_an_engine, start_time

PAUSE_MODES: dict[Policy, str] = {"recompute": "keep", "wait": "wait", "abort": "abort"}
CONFIG_LIMIT = 4 << 20
"""bytes of config.json"""
_HEAD = "lm_head.weight"
DEV_MODE = "start vLLM >= 0.16 with VLLM_SERVER_DEV_MODE=1"

PACKED_HEAD = (
    "vLLM on a CPU keeps the output layer packed at its start, and tied embeddings are not reloaded",
    "use via=live (docs/live-patch.md), or save the model untied; a restart does not help with via=reload",
)
PACKED_EXPERTS = (
    "vLLM on a CPU keeps the experts packed at its start, and they are not reloaded",
    "use via=live (docs/live-patch.md), whose plugin packs them; a restart does not help with via=reload",
)
PACKED_INT8 = (
    "vLLM on a CPU computes NaN after a reload of int8 layers",
    "use fp8, or run `weightcast sync` before each start of the engine",
)
LISTS_PACKAGES = "vLLM lists its packages for this answer: install pip into its environment, and restart it"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""in the configurations of mixtures of experts"""


class _LoRA(TakesAdapters):
    _lora_start = "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"


class VLLM(_LoRA, Server):
    def _look(self) -> EngineFacts:
        control = self._ask("/is_paused").require_key()
        metrics = self._processes.read(lambda: self._ask("/metrics"), start_time)
        process = start_time(metrics)
        label = self._steady_label(process, self._label)
        paused = control.told().get("is_paused")
        facts = EngineFacts(
            reachable=True,
            label=label,
            process=process,
            paused=paused if isinstance(paused, bool) else None,
            software=self._ask("/version").told_text("version"),
            remedy="" if metrics.refusal is None else str(metrics.refusal),
            drafter=UNKNOWN,
        )
        return facts if facts.tell_something else not_an_engine(control)

    def _ask(self, path: str) -> Reply:
        return self._wire.get(path, self._timeouts.probe)

    def _label(self) -> str | None:
        return self._ask("/weight_info").require_key().told_text("weight_version")

    def _drafter_in(self, settings: Mapping[str, object]) -> str:
        config = vllm_config(settings)
        transfer = config.get("weight_transfer_config")
        if isinstance(transfer, dict) and transfer.get("backend") == "weightcast":
            raise Unfit(
                f"{self.spec.shown_url} takes its versions by vLLM's weight transfer",
                remedy="remove this --engine, or start vLLM without --weight-transfer-config",
            )
        self._require_reloadable(config)
        return require_vllm(self.spec, vllm_drafter(config))

    def _start_of(self, settings: Mapping[str, object]) -> str | None:
        found = vllm_config(settings).get("instance_id")
        return None if found is None else repr(found)

    def _ask_settings(self, seconds: float) -> Mapping[str, object]:
        """Empty from releases without it. Raises Unfit where vLLM fails to answer: what a reload would leave
        old or wrong is not known then."""
        reply = self._wire.get("/server_info?config_format=json", seconds).require_key()
        if reply.status not in NO_ROUTE | {200}:
            raise Unfit(reply.describe(), remedy=LISTS_PACKAGES)
        return reply.told()

    def adapter_limits(self) -> AdapterLimits:
        """Adapters beyond `max_cpu_loras` are read from disk again when they are asked for."""
        told = vllm_config(self._told or {}).get("lora_config", {})
        return self._limits(told, "target_modules", "max_cpu_loras", drops=False)

    def pause(self) -> None:
        # A reload leaves the prefix cache as it is: only the pause clears it.
        mode = PAUSE_MODES[self.spec.policy]
        seconds = self._drain_seconds or self._timeouts.control
        reply = self._wire.post(f"/pause?mode={mode}&clear_cache=true", {}, seconds)
        reply.require_route(DEV_MODE).require_ok(LOG)

    def resume(self) -> None:
        self._wire.post("/resume", {}, self._timeouts.control).require_ok(
            "resume the engine by hand or restart it"
        )

    def _load(self, path: str, label: str) -> ReloadOutcome:
        # vLLM remembers weights_path, so that a call without it may read another directory.
        call = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        return self._judged(self._rpc(call), label)

    def _rpc(self, call: Mapping[str, object]) -> Reply | Intact | Suspect:
        """Of all workers."""
        seconds = self._timeouts.reload
        return self._wire.order("/collective_rpc", {**call, "timeout": seconds}, seconds, DEV_MODE)

    def _judged(self, reply: Reply | Intact | Suspect, label: str) -> ReloadOutcome:
        if not isinstance(reply, Reply):
            return reply
        # every worker's result is null, as `reload_weights` returns nothing; anything else is a failure
        results = reply.fields().get("results")
        is_done = isinstance(results, list) and bool(results) and all(result is None for result in results)
        if reply.status != 200 or not is_done:
            return Suspect(reply.describe())
        try:
            self._set_label(label)
        except EngineFailed as failure:
            return Suspect(str(failure))
        return Done()

    def _require_reloadable(self, server: Mapping[str, Any]) -> None:
        """Raises Unfit where a reload would be answered with success and yet leave wrong weights. Seen on the
        CPU build of 0.32: what is packed at the start is not packed at a reload."""
        device, model = (server.get(part) for part in ("device_config", "model_config"))
        on_cpu = isinstance(device, dict) and device.get("device") == "cpu"
        if self.spec.local is None or not on_cpu:
            return
        parts = configuration(self.spec.local)
        untied = isinstance(model, dict) and model.get("word_embeddings_untied_by_checkpoint") is True
        if any("'type': 'int'" in repr(part.get("quantization_config")) for part in parts):
            says, remedy = PACKED_INT8
        elif any(part.get(key) for part in parts for key in EXPERTS):
            says, remedy = PACKED_EXPERTS
        elif not untied and _tied(self.spec.local, parts):
            says, remedy = PACKED_HEAD
        else:
            return
        raise Unfit(f"{self.spec.shown_url}: {says}", remedy=remedy)

    def read_back(self, label: str) -> Confirmation:
        reply = self._wire.get("/weight_info", self._timeouts.control)
        if reply.status in NO_ROUTE:
            return "status-only"
        if self._asked is None:
            self._labels.read(self._label, lambda label: label)
        shown = reply.require_ok(LOG).text_field("weight_version")
        return self._require_label(shown, label)


def vllm_config(server: Mapping[str, object]) -> Mapping[str, Any]:
    config = server.get("vllm_config")
    return config if isinstance(config, dict) else {}


def configuration(directory: Path) -> list[dict[str, Any]]:
    """config.json and its text part; nothing where there is none that can be read."""
    try:
        # not the strict reader: configurations of some models hold an Infinity
        config = json.loads(durable.read_file(directory / "config.json", CONFIG_LIMIT))
    except (OSError, ValueError, RecursionError, WeightcastError):
        return []
    parts = [config, config.get("text_config") if isinstance(config, dict) else None]
    return [part for part in parts if isinstance(part, dict)]


def _tied(directory: Path, parts: Sequence[dict[str, Any]]) -> bool:
    """What the configuration says; else whether the checkpoint lacks a head."""
    for part in parts:
        if isinstance(said := part.get("tie_word_embeddings"), bool):
            return said
    try:
        return bool(parts) and _HEAD not in open_checkpoint(directory, follow_links=False).table.numbers
    except (OSError, ValueError, WeightcastError):
        return False


def vllm_drafter(config: Mapping[str, Any]) -> str:
    """The method in `vllm_config`."""
    speculative = config.get("speculative_config", UNKNOWN)
    if isinstance(speculative, dict):
        return drafter_named(speculative.get("method") or "draft_model")
    return NONE if speculative is None else UNKNOWN


def require_vllm(spec: EngineSpec, drafter: str, source: str | None = None) -> str:
    """What to show. `source`: the directory of its draft model. Raises Unfit for a model that every reload
    would leave old: up to 0.32 `reload_weights` loads the main model alone, and the routes for draft models
    take no files."""
    if spec.draft:
        if posixpath.normpath(source or "") == posixpath.normpath(spec.draft):
            return drafter
        raise Unfit(
            f"{spec.shown_url} drafts with {source or 'no model of its own'}, expected {spec.draft}",
            remedy="start vLLM with it as model of --speculative-config, or give draft=, its path there",
        )
    # from the main checkpoint the plugin reloads both
    inside = source is not None and posixpath.normpath(source) == posixpath.normpath(spec.path)
    if drafter in (NONE, UNKNOWN) or spec.drafter == "keep" or inside:
        return drafter
    raise Unfit(
        f"{spec.shown_url} runs a draft model ({drafter}), which vLLM would leave at its old weights",
        remedy="start vLLM without --speculative-config, follow the component draft (--draft), or give "
        "drafter=keep to leave it old; with via=live one in the main checkpoint is reloaded",
    )


ROUTES = "/v1/weightcast"
FORMAT = 1
INSTALL = "install weightcast-engine in vLLM's environment and name it in VLLM_PLUGINS (docs/live-patch.md)"
_BASE, _PAUSED, _BUSY = 409, 423, 503
"""it holds another base; it is not paused; it carries out another order and has not begun this one"""
_UNTOUCHED = NEVER_HANDLED | {400, _BASE, 413, 422, _PAUSED}
"""nothing was written"""
_BUSY_SECONDS = 0.05
Sent = TypeVar("Sent")


class VLLMLive(_LoRA, LiveAdapter):
    """A vLLM that has the plugin, through the plugin's routes under /v1/weightcast."""

    def __init__(self, spec: EngineSpec, wire: Wire) -> None:
        super().__init__(spec, wire)
        # where requests in flight are waited for the engine takes no other order meanwhile, for minutes
        self.pauses_itself = spec.policy != "wait"
        # each look is one question, which a balancer answers from one process after the other
        self._processes = Identities(spec.shown_url, times=1)
        self._told: tuple[HeldWeights, str] | None = None
        """what all ranks said to hold, in the answer to the last patch"""

    def probe(self) -> EngineFacts:
        try:
            reply = self._processes.read(lambda: self._wire.get(ROUTES, self._timeouts.probe), _process_of)
            hindrance = _hindrance(reply.require_key())
            told = reply.text_field("drafter")
            drafter = UNKNOWN if told is None else drafter_named(told)
            drafter = require_vllm(self.spec, drafter, reply.text_field("draft"))
        except EngineFailed as failure:
            return unreachable(failure)
        if hindrance:
            return EngineFacts(reachable=False, hindrance=hindrance)
        process, paused = _process_of(reply), reply.fields().get("paused")
        facts = EngineFacts(
            reachable=True,
            label=reply.text_field("label"),
            process=process,
            unique=process is not None,
            paused=paused if isinstance(paused, bool) else None,
            drafter=drafter,
        )
        return _told(reply).onto(facts)

    def pause(self) -> None:
        seconds = self._timeouts.control + self._drain_seconds
        self._post("pause", {"policy": self.spec.policy}, seconds).require_ok(LOG)

    def resume(self) -> None:
        self._post("resume", {}, self._timeouts.control).require_ok("resume or restart the engine by hand")

    def reload(self, path: str, label: str) -> ReloadOutcome:
        self._told = None
        reply = self._order("reload", {"label": label})
        if not isinstance(reply, Reply):
            return reply
        told = _told(reply)
        # not paused: another process answers than the one that was
        if reply.status in _UNTOUCHED - {_BASE, _PAUSED}:
            return Intact(told.text)
        return Done() if told.says(label=label) else Suspect(told.text)

    def apply(self, patch: EnginePatch, label: str, *, pausing: bool) -> ReloadOutcome:
        self._told = None
        body = {"file": patch.name, "label": label}
        if pausing:
            reply = self._order("update", {**body, "policy": self.spec.policy})
        else:
            reply = self._order("apply", body)
        if not isinstance(reply, Reply):
            return reply
        told = _told(reply)
        if told.untouched:
            return Intact(told.text)
        if not told.says(version=patch.version, root=patch.root, label=label):
            return Suspect(told.text)
        self._told = (HeldWeights(patch.version, patch.root), label)
        seconds = told.body.get("seconds")
        still = seconds.get("still") if isinstance(seconds, dict) else None
        still = still if isinstance(still, float) and still >= 0 else None
        return Done(resumed=pausing and told.body.get("resumed") is True, still=still)

    def confirm(self, held: HeldWeights | None, label: str) -> Confirmation:
        """After a patch no second question, which the pause would wait for."""
        before, self._told = self._told, None
        if before == (held, label):
            return "label"
        told = self._look()
        shown = told.body.get("label")
        if told.in_doubt or shown != label or (held is not None and told.held != held):
            raise EngineFailed(
                f"{self.spec.shown_url} says that it holds {shown!r}, {told.held}"
                f"{', in doubt' if told.in_doubt else ''}, after it loaded {label!r}",
                remedy="see the engine's log; restart it if this stays",
            )
        return "label"

    def load_draft(self) -> None:
        self._post("draft", {}, self._timeouts.reload).require_ok(LOG)

    def relabel(self, label: str) -> Confirmation:
        """Labels are versions here (`rules.label_of`)."""
        found = self._look().held
        if found is None:
            raise EngineFailed(f"{self.spec.shown_url} does not know what it holds", remedy="it is reloaded")
        held = HeldWeights(int(label), found.root)
        self.hold(held, label)
        return self.confirm(held, label)

    def _look(self) -> PluginAnswer:
        return _told(self._wire.get(ROUTES, self._timeouts.control).require_ok(LOG))

    def _ask(self, order: str, body: Mapping[str, object], seconds: float) -> PluginAnswer:
        return _told(self._post(order, body, seconds).require_key())

    def _post(self, order: str, body: Mapping[str, object], seconds: float) -> Reply:
        return _patiently(lambda left: self._wire.post(f"{ROUTES}/{order}", body, left), seconds)

    def _order(self, order: str, body: Mapping[str, object]) -> Reply | ReloadOutcome:
        return _patiently(
            lambda left: self._wire.order(f"{ROUTES}/{order}", body, left), self._timeouts.reload
        )


def _patiently(send: Callable[[float], Sent], seconds: float) -> Sent:
    """Sends again what the plugin has not begun, since another order was under way."""
    deadline = time.monotonic() + seconds
    reply = send(seconds)
    while isinstance(reply, Reply) and reply.status == _BUSY:
        left = deadline - time.monotonic()
        if left <= _BUSY_SECONDS:
            break
        time.sleep(_BUSY_SECONDS)
        reply = send(left)
    return reply


def _process_of(reply: Reply) -> str | None:
    return reply.text_field("process")


def _hindrance(reply: Reply) -> str:
    if reply.status in NO_ROUTE:
        return f"{reply.url} answers {reply.status}: {INSTALL}"
    if reply.status != httpx.codes.OK:
        return reply.describe()
    spoken = reply.fields().get("format")
    if type(spoken) is not int or spoken != FORMAT:
        return f"{reply.url} speaks format {spoken!r}, not {FORMAT}: {INSTALL}"
    misplaced = reply.fields().get("misplaced")
    return f"{reply.url}: {misplaced}" if misplaced else ""


def _told(reply: Reply) -> PluginAnswer:
    body = reply.fields()
    words = "; ".join(filter(None, map(reply.text_field, ("error", "remedy"))))
    has_own = words and reply.refusal is None
    text = f"{reply.url} answered {reply.status}: {words}" if has_own else reply.describe()
    rolled_back = reply.status >= 500 and body.get("state") == "rolled-back"
    return PluginAnswer(reply.status, body, text, reply.status in _UNTOUCHED or rolled_back)

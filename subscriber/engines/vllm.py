"""vLLM. `VLLM` (>= 0.16, started with VLLM_SERVER_DEV_MODE=1): `reload_weights` between pause and resume.

`VLLMLive`, with the plugin of `weightcast-engine`: patches, reloads and pauses through its routes under /v1.
No dev mode is needed. A path is never sent: patches are named files in a directory that was fixed at the
engine's start, and a reload reads the model's own directory.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from weightcast.shared.base.errors import EngineFailed, WeightcastError
from weightcast.shared.files import durable
from weightcast.shared.files.hf_checkpoint import open_checkpoint
from weightcast.subscriber.engines.base import (
    Confirmation,
    Done,
    EngineFacts,
    EngineSpec,
    HeldWeights,
    Intact,
    Misconfigured,
    NoReply,
    NotSent,
    Policy,
    ReloadOutcome,
    Suspect,
    Timeouts,
    unreachable,
)
from weightcast.subscriber.engines.live import EngineLanes, NotTaken, PatchFile, held_of, lanes_of
from weightcast.subscriber.engines.probes import (
    UNKNOWN,
    Adapter,
    Identities,
    Settings,
    drafter_named,
    require_vllm,
    vllm_drafter,
)
from weightcast.subscriber.engines.wire import (
    NEVER_HANDLED,
    NO_ROUTE,
    Reply,
    Wire,
    failed_reload,
    not_an_engine,
    not_handled,
    start_time,
)

PAUSE_MODES: dict[Policy, str] = {"recompute": "keep", "wait": "wait", "abort": "abort"}
CONFIG_LIMIT = 4 << 20
"""bytes of config.json"""
_HEAD = "lm_head.weight"
DEV_MODE = "start vLLM >= 0.16 with VLLM_SERVER_DEV_MODE=1"

PACKED_HEAD = (
    "with tied embeddings vLLM on a CPU keeps the output layer that it packed at its start, and answers "
    "a reload with success: give the model a head of its own (tie_word_embeddings false), or restart the "
    "engine for new weights"
)
PACKED_EXPERTS = (
    "vLLM on a CPU packs experts at its start, and not at a reload, yet answers with success: use via=live, "
    "whose plugin packs them again, or restart the engine for new weights"
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""in the configurations of mixtures of experts"""


class VLLM(Adapter):
    def __init__(self, spec: EngineSpec, wire: Wire, timeouts: Timeouts) -> None:
        super().__init__(spec, wire, timeouts)
        self._server = Settings(spec.shown_url, self._server_info, _instance)

    def probe(self) -> EngineFacts:
        try:
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
            if not facts.tell_something:
                return not_an_engine(control)
            with suppress(NoReply):  # it gathers facts about its machine when it is first asked
                return replace(facts, drafter=self._drafter(process, self._timeouts.probe))
            return facts
        except EngineFailed as failure:
            if not isinstance(failure, Misconfigured):
                self._server.forget()
            return unreachable(failure)

    def _ask(self, path: str) -> Reply:
        return self._wire.get(path, self._timeouts.probe)

    def _label(self) -> str | None:
        return self._ask("/weight_info").require_key().told_text("weight_version")

    def _drafter(self, process: str | None, seconds: float) -> str:
        """Raises StaleDrafter, and NoReply while it does not say."""
        return require_vllm(self.spec, vllm_drafter(self._server.of(process, seconds).get("vllm_config")))

    def _server_info(self, seconds: float) -> Mapping[str, object]:
        """Empty from releases without it."""
        reply = self._wire.get("/server_info?config_format=json", seconds).require_key()
        if reply.status != httpx.codes.OK:
            reply = self._wire.get("/server_info", seconds)
        return reply.told()

    def pause(self) -> None:
        # A reload leaves the prefix cache as it is: only the pause clears it.
        mode = PAUSE_MODES[self.spec.policy]
        seconds = self._timeouts.drain if mode == "wait" else self._timeouts.control
        reply = self._wire.post(f"/pause?mode={mode}&clear_cache=true", {}, seconds)
        reply.require_ok(DEV_MODE if reply.status in NO_ROUTE else "see the engine's log")

    def resume(self) -> None:
        self._wire.post("/resume", {}, self._timeouts.control).require_ok(
            "resume the engine by hand or restart it"
        )

    def reload(self, path: str, version: int, label: str) -> ReloadOutcome:
        # vLLM remembers weights_path, so that a call without it may read another directory.
        order = {
            "method": "reload_weights",
            "kwargs": {"weights_path": path},
            "timeout": self._timeouts.reload,
        }
        self._forget_labels()
        try:
            self._drafter(self._server.process, self._timeouts.control)
        except EngineFailed as failure:
            return Intact(str(failure), untried=True)
        hindrance = self._hindrance()
        if hindrance is not None:
            return Intact(hindrance)
        try:
            reply = self._wire.post_once("/collective_rpc", order, self._timeouts.reload)
        except (NotSent, NoReply) as failure:
            return failed_reload(failure)
        if reply.status in NEVER_HANDLED:
            return not_handled(reply, DEV_MODE)
        if reply.status != 200 or not _all_workers_done(reply):
            return Suspect(reply.describe())
        return self._labelled(label)

    def _hindrance(self) -> str | None:
        """Why a reload would be answered with success and yet leave wrong weights; None: nothing is known
        against it. Seen on the CPU build of 0.32: what is packed at the start is not packed at a reload."""
        if self.spec.local is None:
            return None
        parts = _configuration(self.spec.local)
        tied = _tied(self.spec.local, parts)
        experts = any(part.get(key) for part in parts for key in _EXPERTS)
        if not (tied or experts):
            return None
        device, untied = _runs_on(self._server.of(self._server.process, self._timeouts.control))
        if device != "cpu":
            return None
        if experts:
            return PACKED_EXPERTS
        return None if untied else PACKED_HEAD

    def _labelled(self, label: str) -> ReloadOutcome:
        try:
            self._set_label(label)
        except EngineFailed as failure:
            return Suspect(str(failure))
        return Done()

    def _set_label(self, label: str) -> Confirmation:
        reply = self._wire.post("/update_weight_version", {"new_version": label}, self._timeouts.control)
        if reply.status in NO_ROUTE:
            return "status-only"
        reply.require_ok("see the engine's log")
        return "label"

    def read_back(self, label: str) -> Confirmation:
        reply = self._wire.get("/weight_info", self._timeouts.control)
        if reply.status in NO_ROUTE:
            return "status-only"
        if self._server.process is None:
            self._labels.read(self._label, lambda label: label)
        shown = reply.require_ok("see the engine's log").text_field("weight_version")
        return self._require_label(shown, label)

    def relabel(self, label: str) -> Confirmation:
        return "status-only" if self._set_label(label) == "status-only" else self.read_back(label)


def _instance(server: Mapping[str, object]) -> object:
    config = server.get("vllm_config")
    return config.get("instance_id") if isinstance(config, dict) else None


def _all_workers_done(reply: Reply) -> bool:
    """`reload_weights` returns nothing, so that every worker's result is null; anything else is a failure."""
    results = reply.fields().get("results")
    return isinstance(results, list) and bool(results) and all(result is None for result in results)


def _configuration(directory: Path) -> list[dict[str, Any]]:
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


def _runs_on(server: Mapping[str, object]) -> tuple[object, bool]:
    """The device, if it says one, and whether the checkpoint has a head of its own."""
    config = server.get("vllm_config")
    device, model = (
        config.get(part) if isinstance(config, dict) else None for part in ("device_config", "model_config")
    )
    untied = isinstance(model, dict) and model.get("word_embeddings_untied_by_checkpoint") is True
    return device.get("device") if isinstance(device, dict) else None, untied


DOOR = "/v1/weightcast"
FORMAT = 1
INSTALL = "install weightcast-engine in vLLM's environment and name it in VLLM_PLUGINS (docs/engines.md)"
LOG = "see the engine's log"
_BASE, _PAUSED, _BUSY = 409, 423, 503
"""it holds another base; it is not paused; it carries out another order and has not begun this one"""
_UNTOUCHED = NEVER_HANDLED | {400, _BASE, 413, 422, _PAUSED}
"""nothing was written"""
_BUSY_SECONDS = 0.05


class VLLMLive(Adapter):
    """A vLLM that has the plugin: `Patchable` by the plugin's routes under /v1/weightcast."""

    def __init__(self, spec: EngineSpec, wire: Wire, timeouts: Timeouts) -> None:
        super().__init__(spec, wire, timeouts)
        # each look is one question, which a balancer answers from one process after the other
        self._processes = Identities(spec.shown_url, times=1)
        self._told: tuple[HeldWeights, str] | None = None
        """what all ranks said to hold, in the answer to the last patch"""

    @property
    def pauses_itself(self) -> bool:
        """Not where requests in flight are waited for: that may take minutes, and the engine takes no other
        order meanwhile."""
        return self.spec.policy != "wait"

    def probe(self) -> EngineFacts:
        try:
            reply = self._processes.read(lambda: self._wire.get(DOOR, self._timeouts.probe), _process_of)
            hindrance = _hindrance(reply.require_key())
            told = reply.text_field("drafter")
            drafter = require_vllm(self.spec, UNKNOWN if told is None else drafter_named(told))
        except EngineFailed as failure:
            return unreachable(failure)
        if hindrance:
            return EngineFacts(reachable=False, hindrance=hindrance)
        fields = reply.fields()
        doubtful, plugin = fields.get("in_doubt") is not False, reply.text_field("plugin")
        process = _process_of(reply)
        return EngineFacts(
            reachable=True,
            # a label of weights that are in doubt must not resume anybody
            label=None if doubtful else reply.text_field("label"),
            process=process,
            unique=process is not None,
            paused=_truth(fields, "paused"),
            software=None if plugin is None else f"with weightcast-engine {plugin}",
            held=None if doubtful else held_of(reply.fields()),
            in_doubt=doubtful,
            unpatchable=_unpatchable(reply),
            drafter=drafter,
        )

    def pause(self) -> None:
        drain = self._timeouts.drain if self.spec.policy == "wait" else 0.0
        self._post("pause", {"policy": self.spec.policy}, self._timeouts.control + drain).require_ok(LOG)

    def resume(self) -> None:
        self._post("resume", {}, self._timeouts.control).require_ok("resume or restart the engine by hand")

    def reload(self, path: str, label: str) -> ReloadOutcome:
        self._told = None
        try:
            reply = self._once("reload", {"label": label})
        except (NotSent, NoReply) as failure:
            return failed_reload(failure)
        # not paused: another process answers than the one that was
        if reply.refusal is not None:
            return not_handled(reply)
        if reply.status in _UNTOUCHED - {_BASE, _PAUSED}:
            return Intact(_said(reply))
        return Done() if _says(reply, label=label) else Suspect(_said(reply))

    def hold(self, held: HeldWeights, label: str) -> None:
        order = {"version": held.version, "root": held.root, "label": label}
        self._post("holds", order, self._timeouts.control).require_ok(LOG)

    def check(self, patch: PatchFile) -> None:
        try:
            reply = self._post("check", {"file": patch.name}, self._timeouts.reload)
        except EngineFailed as failure:
            raise NotTaken(failure.message, remedy=failure.remedy) from failure
        if not _says(reply, changes=patch.changes):
            raise NotTaken(_said(reply), remedy=LOG)

    def apply(self, patch: PatchFile, label: str, *, pausing: bool) -> ReloadOutcome:
        self._told = None
        order = {"file": patch.name, "label": label}
        try:
            if pausing:
                reply = self._once("update", {**order, "policy": self.spec.policy})
            else:
                reply = self._once("apply", order)
        except (NotSent, NoReply) as failure:
            return failed_reload(failure)
        if reply.status in _UNTOUCHED or _is_rolled_back(reply):
            return Intact(_said(reply))
        if not _says(reply, version=patch.version, root=patch.root, label=label):
            return Suspect(_said(reply))
        self._told = (HeldWeights(patch.version, patch.root), label)
        return Done(resumed=pausing and reply.fields().get("resumed") is True, still=_still(reply))

    def confirm(self, held: HeldWeights | None, label: str) -> Confirmation:
        """After a patch no second question, which the pause would wait for."""
        told, self._told = self._told, None
        if told == (held, label):
            return "label"
        reply = self._wire.get(DOOR, self._timeouts.control).require_ok(LOG)
        shown, found = reply.text_field("label"), held_of(reply.fields())
        doubtful = reply.fields().get("in_doubt") is not False
        if doubtful or shown != label or (held is not None and found != held):
            raise EngineFailed(
                f"{self.spec.shown_url} says that it holds {shown!r}, {found}"
                f"{', in doubt' if doubtful else ''}, after it was brought to {label!r}",
                remedy="see the engine's log; restart it if this stays",
            )
        return "label"

    def relabel(self, label: str) -> Confirmation:
        """Labels are versions here (`rules.label_of`)."""
        found = held_of(self._wire.get(DOOR, self._timeouts.control).require_ok(LOG).fields())
        if found is None:
            raise EngineFailed(f"{self.spec.shown_url} does not know what it holds", remedy="it is reloaded")
        held = HeldWeights(int(label), found.root)
        self.hold(held, label)
        return self.confirm(held, label)

    def lanes(self, names: Sequence[str]) -> EngineLanes:
        order = {"tensors": list(names), "from": 0, "count": len(names)}
        reply = self._post("digest", order, self._timeouts.control).require_ok(LOG)
        return lanes_of(reply.fields())

    def _post(self, door: str, order: Mapping[str, object], seconds: float) -> Reply:
        return _patiently(lambda left: self._wire.post(f"{DOOR}/{door}", order, left), seconds)

    def _once(self, door: str, order: Mapping[str, object]) -> Reply:
        return _patiently(
            lambda left: self._wire.post_once(f"{DOOR}/{door}", order, left), self._timeouts.reload
        )


def _patiently(send: Callable[[float], Reply], seconds: float) -> Reply:
    """Sends again what the plugin has not begun, since another order was under way."""
    deadline = time.monotonic() + seconds
    reply = send(seconds)
    while reply.status == _BUSY and (left := deadline - time.monotonic()) > _BUSY_SECONDS:
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


def _unpatchable(reply: Reply) -> str:
    if reply.fields().get("patchable") is True:
        return ""
    return reply.text_field("reason") or "the engine says that it cannot be patched"


def _truth(fields: Mapping[str, object], key: str) -> bool | None:
    value = fields.get(key)
    return value if isinstance(value, bool) else None


def _still(reply: Reply) -> float | None:
    seconds = reply.fields().get("seconds")
    still = seconds.get("still") if isinstance(seconds, dict) else None
    return still if isinstance(still, float) and still >= 0 else None


def _says(reply: Reply, **wanted: object) -> bool:
    """Success is 200 with these facts, and nothing else."""
    fields = reply.fields()
    return reply.status == httpx.codes.OK and all(fields.get(key) == value for key, value in wanted.items())


def _is_rolled_back(reply: Reply) -> bool:
    return reply.status >= 500 and reply.fields().get("state") == "rolled-back"


def _said(reply: Reply) -> str:
    """The plugin's own words, where it has some."""
    if reply.refusal is not None:
        return str(reply.refusal)
    words = [text for key in ("error", "remedy") if (text := reply.text_field(key))]
    return f"{reply.url} answered {reply.status}: {'; '.join(words)}" if words else reply.describe()

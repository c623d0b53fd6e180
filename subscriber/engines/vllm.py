"""vLLM (>= 0.16, started with VLLM_SERVER_DEV_MODE=1): `reload_weights` between pause and resume."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
from weightcast.subscriber.engines.drafters import UNKNOWN, Settings, require_vllm, vllm_drafter
from weightcast.subscriber.engines.identities import Identities
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


class VLLM:
    def __init__(self, spec: EngineSpec, wire: Wire, timeouts: Timeouts) -> None:
        self.spec = spec
        self._wire = wire
        self._timeouts = timeouts
        self._processes = Identities(spec.shown_url)
        self._labels = Identities(spec.shown_url, lasting=False)
        self._server = Settings(spec.shown_url, self._server_info, _instance)

    @property
    def copies_weights(self) -> bool:
        return self.spec.copies_weights

    def close(self) -> None:
        self._wire.close()

    def probe(self) -> EngineFacts:
        try:
            control = self._ask("/is_paused").require_key()
            metrics = self._processes.read(lambda: self._ask("/metrics"), start_time)
            process = start_time(metrics)
            label = (
                self._label() if process is not None else self._labels.read(self._label, lambda label: label)
            )
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
        self._labels = Identities(self.spec.shown_url, lasting=False)
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
        if shown != label:
            raise EngineFailed(
                f"{self.spec.shown_url} says that it has the weights {shown!r} after a reload of {label!r}",
                remedy="see the engine's log; restart it if this stays",
            )
        return "label"

    def relabel(self, label: str) -> Confirmation:
        return "status-only" if self._set_label(label) == "status-only" else self.read_back(label)


def _instance(server: Mapping[str, object]) -> object:
    config = server.get("vllm_config")
    return config.get("instance_id") if isinstance(config, dict) else None


def _all_workers_done(reply: Reply) -> bool:
    """`reload_weights` returns nothing, so that every worker's result is null; all else is no success."""
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
    """What the configuration says; else whether there is no head."""
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

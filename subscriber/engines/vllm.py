"""vLLM (>= 0.16, started with VLLM_SERVER_DEV_MODE=1): `reload_weights` between pause and resume."""

from __future__ import annotations

from weightcast.shared.errors import EngineFailed
from weightcast.subscriber.engines.base import (
    Confirmation,
    Done,
    EngineFacts,
    EngineSpec,
    Intact,
    Policy,
    ReloadOutcome,
    Suspect,
    Timeouts,
)
from weightcast.subscriber.engines.wire import (
    NEVER_HANDLED,
    NO_ROUTE,
    NoReply,
    NotSent,
    Reply,
    Wire,
    failed_reload,
    start_time,
)

PAUSE_MODES: dict[Policy, str] = {"recompute": "keep", "wait": "wait", "abort": "abort"}
DEV_MODE = "start vLLM >= 0.16 with VLLM_SERVER_DEV_MODE=1"


class VLLM:
    def __init__(self, spec: EngineSpec, wire: Wire, timeouts: Timeouts) -> None:
        self.spec = spec
        self._wire = wire
        self._timeouts = timeouts

    @property
    def copies_weights(self) -> bool:
        return self.spec.copies_weights

    def close(self) -> None:
        self._wire.close()

    def probe(self) -> EngineFacts:
        try:
            paused = self._probe("/is_paused").fields().get("is_paused")
            return EngineFacts(
                reachable=True,
                label=self._probe("/weight_info").text_field("weight_version"),
                process=start_time(self._probe("/metrics")),
                paused=paused if isinstance(paused, bool) else None,
                software=self._probe("/version").text_field("version"),
            )
        except EngineFailed as failure:
            return EngineFacts(reachable=False, absent=isinstance(failure, NotSent))

    def _probe(self, path: str) -> Reply:
        return self._wire.get(path, self._timeouts.probe)

    def pause(self) -> None:
        # A reload leaves the prefix cache as it is: only the pause clears it.
        mode = PAUSE_MODES[self.spec.policy]
        seconds = self._timeouts.drain if mode == "wait" else self._timeouts.control
        self._wire.post(f"/pause?mode={mode}&clear_cache=true", {}, seconds).require_ok(DEV_MODE)

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
        try:
            reply = self._wire.post_once("/collective_rpc", order, self._timeouts.reload)
        except (NotSent, NoReply) as failure:
            return failed_reload(failure)
        if reply.status in NEVER_HANDLED:
            return Intact(f"{reply.describe()} ({DEV_MODE})")
        if reply.status != 200 or not _all_workers_done(reply):
            return Suspect(reply.describe())
        return self._labelled(label)

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
        shown = reply.require_ok("see the engine's log").text_field("weight_version")
        if shown != label:
            raise EngineFailed(
                f"{self.spec.url} says that it has the weights {shown!r} after a reload of {label!r}",
                remedy="see the engine's log; restart it if this stays",
            )
        return "label"

    def relabel(self, label: str) -> Confirmation:
        return "status-only" if self._set_label(label) == "status-only" else self.read_back(label)


def _all_workers_done(reply: Reply) -> bool:
    """`reload_weights` returns nothing, so that every worker's result is null; all else is no success."""
    results = reply.fields().get("results")
    return isinstance(results, list) and bool(results) and all(result is None for result in results)

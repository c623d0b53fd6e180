"""SGLang: `/update_weights_from_disk` between `/pause_generation` and `/continue_generation` (0.5.x)."""

from __future__ import annotations

from weightcast.shared.errors import EngineFailed
from weightcast.subscriber.engines.base import (
    QUOTED,
    Confirmation,
    Done,
    EngineFacts,
    EngineSpec,
    Intact,
    NobodyListens,
    NoReply,
    NotSent,
    Policy,
    ReloadOutcome,
    Suspect,
    Timeouts,
)
from weightcast.subscriber.engines.wire import (
    NEVER_HANDLED,
    NO_ROUTE,
    Reply,
    Wire,
    failed_reload,
    not_an_engine,
    start_time,
)

PAUSE_MODES: dict[Policy, str | None] = {"recompute": "retract", "abort": "abort", "wait": None}
"""None: no pause, the update itself waits for the requests in flight"""
UNREAD = "Failed to get weights iterator"
"""How SGLang begins the message of the one refusal that it gives before it touches a weight: it could not
open the directory. Its other refusals come with changed or half-changed weights."""
INFO_ROUTES = ("/server_info", "/get_server_info")
RANKS = " | "
"""between the messages of data-parallel ranks"""
STARTUP, WHOLE = b"sglang:startup_time_seconds{", b'phase="tokenizer_e2e"'


class SGLang:
    def __init__(self, spec: EngineSpec, wire: Wire, timeouts: Timeouts) -> None:
        self.spec = spec
        self._wire = wire
        self._timeouts = timeouts
        self._label: str | None = None
        self._source: str | None = None

    @property
    def copies_weights(self) -> bool:
        return self.spec.copies_weights

    def close(self) -> None:
        self._wire.close()

    def probe(self) -> EngineFacts:
        """Pausing is not visible from outside."""
        try:
            metrics = self._wire.get("/metrics", self._timeouts.probe)
            told = start_time(metrics)
            process = told or _start_taken(metrics)
            unique = told is None and process is not None
            label = self._read_label(self._timeouts.probe)
        except (NotSent, NoReply) as failure:
            return EngineFacts(reachable=False, absent=isinstance(failure, NobodyListens))
        except EngineFailed as failure:
            if process is None:
                return EngineFacts(reachable=False, hindrance=failure.message)
            return EngineFacts(reachable=True, process=process, unique=unique)
        facts = EngineFacts(reachable=True, label=label, process=process, unique=unique, source=self._source)
        return facts if facts.tell_something else not_an_engine(metrics)

    def release(self) -> str | None:
        """The version of the software; None where it does not say. Raises EngineFailed."""
        for route in INFO_ROUTES:
            reply = self._wire.get(route, self._timeouts.probe)
            if reply.status not in NO_ROUTE:
                return reply.text_field("version")
        return None

    def pause(self) -> None:
        mode = PAUSE_MODES[self.spec.policy]
        if mode is not None:
            self._post(
                "/pause_generation", {"mode": mode}, "this SGLang cannot pause: upgrade it or use policy=wait"
            )

    def resume(self) -> None:
        self._post("/continue_generation", {}, "continue the engine by hand or restart it")

    def reload(self, path: str, version: int, label: str) -> ReloadOutcome:
        seconds = self._timeouts.reload + (self._timeouts.drain if self.spec.policy == "wait" else 0)
        order = {
            "model_path": path,
            "load_format": None,
            "weight_version": label,
            "abort_all_requests": False,
            "flush_cache": True,
        }
        before = self._label
        try:
            reply = self._wire.post_once("/update_weights_from_disk", order, seconds)
            return self._judge(reply, before)
        except (NotSent, NoReply) as failure:
            return failed_reload(failure)

    def _judge(self, reply: Reply, before: str | None) -> ReloadOutcome:
        success = reply.fields().get("success")
        if reply.status == 200 and success is True:
            return Done()
        if reply.status in NEVER_HANDLED:
            return Intact(reply.describe())
        unread = reply.status == 400 and success is False and _nothing_read(reply)
        if unread and self._still(before) and not self._has_draft():
            return Intact(reply.describe())
        return Suspect(reply.describe())

    def _still(self, before: str | None) -> bool:
        try:
            return before is not None and self._read_label(self._timeouts.control) == before
        except EngineFailed:
            return False

    def _has_draft(self) -> bool:
        """A draft model is loaded after the model itself: then a directory that could not be opened says
        nothing of the model."""
        try:
            for route in INFO_ROUTES:
                reply = self._wire.get(route, self._timeouts.control)
                if reply.status not in NO_ROUTE:
                    reply.require_ok("see the engine's log")
                    return reply.fields().get("speculative_algorithm") is not None
        except EngineFailed:
            return True
        return False

    def read_back(self, label: str) -> Confirmation:
        shown = self._read_label(self._timeouts.control)
        if shown is None:
            return "status-only"
        if shown != label:
            raise EngineFailed(
                f"{self.spec.shown_url} says that it has the weights {shown!r} after a reload of {label!r}",
                remedy="see the engine's log; restart it if this stays",
            )
        return "label"

    def relabel(self, label: str) -> Confirmation:
        # abort_all_requests defaults to true there.
        order = {"new_version": label, "abort_all_requests": False}
        reply = self._wire.post("/update_weight_version", order, self._timeouts.control)
        if reply.status in NO_ROUTE:
            return "status-only"
        reply.require_ok("see the engine's log")
        return self.read_back(label)

    def _read_label(self, seconds: float) -> str | None:
        """None from releases that have no labels."""
        self._label = self._source = None
        for route in ("/model_info", "/get_model_info", "/get_weight_version"):
            reply = self._wire.get(route, seconds)
            if reply.status in NO_ROUTE:
                continue
            reply.require_ok("see the engine's log")
            self._source = self._source or reply.text_field("model_path")
            if reply.fields().get("weight_version") is not None:
                self._label = reply.text_field("weight_version")
                return self._told(reply)
        return None

    def _told(self, reply: Reply) -> str:
        if self._label is None:
            raise EngineFailed(reply.describe(), remedy="its weight_version is no text: see the engine's log")
        return self._label

    def _post(self, path: str, body: dict[str, object], remedy: str) -> None:
        self._wire.post(path, body, self._timeouts.control).require_ok(remedy)


def _start_taken(metrics: Reply) -> str | None:
    """SGLang gathers the metrics of several processes, and then no page tells when one of them started. How
    long its start took, in billionths of a second, tells one start from another as well."""
    if metrics.status != 200:
        return None
    for line in metrics.body.splitlines():
        if line.startswith(STARTUP) and WHOLE in line:
            return line.rpartition(b" ")[2][:QUOTED].decode("ascii", "replace")
    return None


def _nothing_read(reply: Reply) -> bool:
    message = reply.fields().get("message")
    return isinstance(message, str) and all(part.startswith(UNREAD) for part in message.split(RANKS))

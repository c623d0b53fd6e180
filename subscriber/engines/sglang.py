"""SGLang: `/update_weights_from_disk` between `/pause_generation` and `/continue_generation` (0.5.x)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from weightcast.shared.base.errors import EngineFailed
from weightcast.subscriber.engines.base import (
    QUOTED,
    Confirmation,
    Done,
    EngineFacts,
    EngineSpec,
    Intact,
    KeyRefused,
    Misconfigured,
    NoReply,
    NotSent,
    Policy,
    ReloadOutcome,
    Suspect,
    Timeouts,
    unreachable,
)
from weightcast.subscriber.engines.drafters import UNKNOWN, Settings, require_sglang
from weightcast.subscriber.engines.identities import Identities
from weightcast.subscriber.engines.keys import ADMIN_LOOK, READ_LOOK
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
        self._unread = ""
        """why its info routes refuse the one key that its control routes take; empty: they do not"""
        self._processes = Identities(spec.shown_url)
        self._labels = Identities(spec.shown_url, lasting=False)
        self._server = Settings(spec.shown_url, self._settings, _start_of)

    @property
    def copies_weights(self) -> bool:
        return self.spec.copies_weights

    def close(self) -> None:
        self._wire.close()

    def probe(self) -> EngineFacts:
        """Pausing is not visible from outside."""
        facts = EngineFacts(reachable=True)
        try:
            seconds = self._timeouts.probe
            metrics = self._processes.read(lambda: self._wire.get("/metrics", seconds), _process_of)
            facts = _facts_of(metrics)
            label = self._read_label(seconds) if facts.process is not None else self._shown_labels(seconds)
            facts = replace(facts, label=label, source=self._source, remedy=self._unread or facts.remedy)
            if not facts.tell_something and not self._unread:
                return not_an_engine(metrics)
            with suppress(NoReply):
                return replace(facts, drafter=self._drafter(facts.process, seconds))
            return replace(facts, drafter=UNKNOWN)
        except (NotSent, NoReply, Misconfigured) as failure:
            if not isinstance(failure, Misconfigured):
                self._server.forget()
            return unreachable(failure)
        except EngineFailed as failure:
            return facts if facts.process is not None else EngineFacts(False, hindrance=failure.message)

    def _shown_labels(self, seconds: float) -> str | None:
        """Of an engine whose process is not told: read several times, since only labels may differ."""
        return self._labels.read(lambda: self._read_label(seconds), lambda label: label)

    def _drafter(self, process: str | None, seconds: float) -> str:
        """Raises StaleDrafter, and NoReply while it does not say."""
        return require_sglang(self.spec, self._server.of(process, seconds))

    def _settings(self, seconds: float) -> Mapping[str, object]:
        try:
            return self._server_info(seconds)
        except (NotSent, NoReply):
            raise
        except EngineFailed as failure:
            if isinstance(failure, Misconfigured) and not self._unread:
                raise
            return {}

    def _server_info(self, seconds: float) -> Mapping[str, object]:
        """Its settings; empty from releases that do not tell them. Raises EngineFailed."""
        for route in INFO_ROUTES:
            reply = self._wire.get(route, seconds)
            if reply.status not in NO_ROUTE:
                return reply.require_ok("see the engine's log").fields()
        return {}

    def require_control(self) -> None:
        """Raises KeyRefused where orders would be refused. Nothing is ordered. A server that takes the key of
        questions there does not guard this route as its control routes."""
        if self._unread:
            return  # this was asked already
        by_control, by_read = (self._wire.get(path, self._timeouts.probe) for path in (ADMIN_LOOK, READ_LOOK))
        if by_read.refusal is not None:
            by_control.require_key()

    def release(self) -> str | None:
        """The version of the software; None where it does not say. Raises EngineFailed."""
        version = self._settings(self._timeouts.probe).get("version")
        return version if isinstance(version, str) else None

    def pause(self) -> None:
        mode = PAUSE_MODES[self.spec.policy]
        if mode is not None:
            reply = self._wire.post("/pause_generation", {"mode": mode}, self._timeouts.control)
            lacks = reply.status in NO_ROUTE
            reply.require_ok("upgrade SGLang, or use policy=wait" if lacks else "see the engine's log")

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
        self._labels = Identities(self.spec.shown_url, lasting=False)
        try:
            self._drafter(self._server.process, self._timeouts.control)
        except EngineFailed as failure:
            return Intact(str(failure), untried=True)
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
            return not_handled(reply)
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
            return self._server_info(self._timeouts.control).get("speculative_algorithm") is not None
        except EngineFailed:
            return True

    def read_back(self, label: str) -> Confirmation:
        seconds = self._timeouts.control
        shown = self._read_label(seconds) if self._server.process is not None else self._shown_labels(seconds)
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
        """None from releases that have no labels, and while only control routes take the key."""
        self._label = self._source = None
        try:
            label, self._unread = self._asked_label(seconds), ""
        except KeyRefused as refused:
            if not self._may_control(seconds):
                raise
            label, self._unread = None, str(refused)
        return label

    def _may_control(self, seconds: float) -> bool:
        """Whether the only key given is that of control routes: one is asked that orders nothing."""
        one = self._wire.keys.are_one
        return one and self._wire.post(ADMIN_LOOK, {}, seconds).refusal is None

    def _asked_label(self, seconds: float) -> str | None:
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


def _process_of(metrics: Reply) -> str | None:
    return start_time(metrics) or _start_taken(metrics)


def _start_of(settings: Mapping[str, object]) -> object:
    """The seed is drawn at each start; how long the start took came with 0.5.2x."""
    told = [settings.get(key) for key in ("random_seed", "startup_time")]
    return None if told == [None, None] else told


def _facts_of(metrics: Reply) -> EngineFacts:
    process = _process_of(metrics)
    unique = process is not None and start_time(metrics) is None
    refusal = "" if metrics.refusal is None else str(metrics.refusal)
    return EngineFacts(True, process=process, unique=unique, remedy=refusal)


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

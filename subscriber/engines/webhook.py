"""Any engine behind one URL (docs/engines.md, Webhook).

`POST URL` with `{"phase": "pause" | "reload" | "resume", "engine", "run_id", "policy", "path", "version",
"label"}`; `version` and `label` are null in a pause. Success is a 2xx status with `{"ok": true}`; a reload's
reply that repeats `version` or `label` is read back from. `{"ok": false, "intact": true}` refuses a reload
with the weights from before untouched. A phase may arrive twice. `GET URL` may answer `{"label", "process",
"paused", "software"}`.
"""

from __future__ import annotations

from collections.abc import Callable

import httpx

from weightcast.shared.base.errors import EngineFailed
from weightcast.subscriber.engines.adapter import Adapter
from weightcast.subscriber.engines.base import (
    Confirmation,
    Done,
    EngineFacts,
    EngineSpec,
    Intact,
    ReloadOutcome,
    Suspect,
    unreachable,
)
from weightcast.subscriber.engines.wire import Reply, Wire, not_an_engine

REMEDY = 'the receiver must answer 2xx with {"ok": true}; see its log'


class Webhook(Adapter):
    def __init__(self, spec: EngineSpec, wire: Wire, run_id: Callable[[], str]) -> None:
        super().__init__(spec, wire)
        self._run_id = run_id
        self._ordered: dict[str, object] = {"version": None, "label": None}
        self._echoed: list[object] = []
        self._tells = False
        """it has answered GET: a proxy in its place may not"""

    def probe(self) -> EngineFacts:
        try:
            reply = self._processes.read(self._look, _process_of)
            if _accepted(reply) and _process_of(reply) is None:
                reply = self._labels.read(self._look, lambda again: again.text_field("label"))
        except EngineFailed as failure:
            return unreachable(failure)
        if reply.refusal is not None and reply.status != httpx.codes.FORBIDDEN:
            return unreachable(reply.refusal)
        if not _accepted(reply):
            takes_no_get = 400 <= reply.status < 500 or reply.status == httpx.codes.NOT_IMPLEMENTED
            silent = takes_no_get and not self._tells
            return EngineFacts(reachable=True) if silent else not_an_engine(reply)
        self._tells = True
        paused = reply.fields().get("paused")
        return EngineFacts(
            reachable=True,
            label=reply.text_field("label"),
            process=reply.text_field("process"),
            paused=paused if isinstance(paused, bool) else None,
            software=reply.text_field("software"),
        )

    def _look(self) -> Reply:
        return self._wire.get("", self._timeouts.probe)

    def pause(self) -> None:
        self._ordered = {"version": None, "label": None}
        self._require(
            self._wire.post("", self._order("pause"), self._drain_seconds or self._timeouts.control)
        )

    def resume(self) -> None:
        self._require(self._wire.post("", self._order("resume"), self._timeouts.control))

    def reload(self, path: str, label: str) -> ReloadOutcome:
        self._ordered, self._echoed = {"version": int(label), "label": label}, []
        reply = self._wire.order("", self._order("reload") | {"path": path}, self._timeouts.reload)
        if not isinstance(reply, Reply):
            return reply
        if _confirmed(reply):
            fields = reply.fields()
            self._echoed = [fields[key] for key in ("version", "label") if fields.get(key) is not None]
            return Done()
        if _denied(reply) and reply.fields().get("intact") is True:
            return Intact(reply.describe())
        return Suspect(reply.describe())

    def read_back(self, label: str) -> Confirmation:
        if not self._echoed:
            return "status-only"
        # `True == 1` in Python: compared as texts.
        known = {str(self._ordered["version"]), label}
        for shown in self._echoed:
            if str(shown) not in known:
                raise EngineFailed(
                    f"{self.spec.shown_url} answered that it has {shown!r} after a reload of {label!r}",
                    remedy=REMEDY,
                )
        return "label"

    def relabel(self, label: str) -> Confirmation:
        """Nothing is sent: a receiver hears of weights that changed."""
        return "status-only"

    def _order(self, phase: str) -> dict[str, object]:
        return {
            "phase": phase,
            "engine": self.spec.name,
            "run_id": self._run_id(),
            "policy": self.spec.policy,
            "path": self.spec.path,
            **self._ordered,
        }

    def _require(self, reply: Reply) -> None:
        reply.require_key()
        if not _confirmed(reply):
            raise EngineFailed(reply.describe(), remedy=REMEDY)


def _process_of(reply: Reply) -> str | None:
    return reply.text_field("process") if _accepted(reply) else None


def _accepted(reply: Reply) -> bool:
    return 200 <= reply.status < 300


def _denied(reply: Reply) -> bool:
    fields = reply.fields()
    return fields.get("ok") is False or fields.get("success") is False


def _confirmed(reply: Reply) -> bool:
    return _accepted(reply) and reply.fields().get("ok") is True and not _denied(reply)

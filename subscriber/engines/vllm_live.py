"""vLLM with the plugin of `weightcast-engine`: patches, reloads and pauses through its doors under /v1.

No dev mode is needed. A path is never sent: patches are named files in a directory that was fixed at the
engine's start, and a reload reads the model's own directory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import httpx

from weightcast.shared.base.errors import EngineFailed
from weightcast.subscriber.engines.base import (
    Confirmation,
    Done,
    EngineFacts,
    EngineSpec,
    HeldWeights,
    Intact,
    NoReply,
    NotSent,
    ReloadOutcome,
    Suspect,
    Timeouts,
    unreachable,
)
from weightcast.subscriber.engines.drafters import UNKNOWN, drafter_named, require_vllm
from weightcast.subscriber.engines.identities import Identities
from weightcast.subscriber.engines.live import EngineLanes, NotTaken, PatchFile, held_of, lanes_of
from weightcast.subscriber.engines.wire import (
    NEVER_HANDLED,
    NO_ROUTE,
    Reply,
    Wire,
    failed_reload,
    not_handled,
)

DOOR = "/v1/weightcast"
FORMAT = 1
INSTALL = "install weightcast-engine beside vLLM and name it in VLLM_PLUGINS (docs/engines.md)"
LOG = "see the engine's log"
_BASE, _PAUSED, _BUSY = 409, 423, 503
"""it holds another base; it is not paused; it carries out another order and has not begun this one"""
_UNTOUCHED = NEVER_HANDLED | {400, _BASE, 413, 422, _PAUSED}
"""nothing was written"""
_BUSY_SECONDS = 0.05


class VLLMLive:
    """A vLLM that has the plugin: `Patchable` by the plugin's doors under /v1/weightcast."""

    def __init__(self, spec: EngineSpec, wire: Wire, timeouts: Timeouts) -> None:
        self.spec = spec
        self._wire = wire
        self._timeouts = timeouts
        # each look is one question, which a balancer answers from one process after the other
        self._processes = Identities(spec.shown_url, times=1)
        self._told: tuple[HeldWeights, str] | None = None
        """what all ranks said to hold, in the answer to the last patch"""

    @property
    def pauses_itself(self) -> bool:
        """Not where requests in flight are waited for: that may take minutes, and the engine takes no other
        order meanwhile."""
        return self.spec.policy != "wait"

    def close(self) -> None:
        self._wire.close()

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
        """Labels are versions here (`aligned.label_of`)."""
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

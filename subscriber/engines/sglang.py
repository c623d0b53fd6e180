"""SGLang (0.5.x): `/update_weights_from_disk` between `/pause_generation` and `/continue_generation`.

`SGLangLive`, with the hook of `weightcast-engine`, gives orders through two routes of the server.
`/weights_checker` passes a question on to all ranks between two steps of a server that serves: there a patch
is checked, its memory is read, and it is asked what it holds, a step at a time. Patches are applied through
the route for tensors, in the pause; an order is the *name* of a tensor there, and the tensor is a dummy. A
server that does not answer questions, or of a kind whose ranks do not all hear them, is loaded from disk.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import httpx

from weightcast.shared.base.errors import DamagedFile, EngineFailed
from weightcast.shared.files.strict_json import parse_object
from weightcast.subscriber.engines.base import (
    QUOTED,
    Confirmation,
    Done,
    EngineFacts,
    EngineSpec,
    HeldWeights,
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
from weightcast.subscriber.engines.live import EngineLanes, NotTaken, PatchFile, held_of, lanes_of
from weightcast.subscriber.engines.probes import UNKNOWN, Adapter, Settings, require_sglang
from weightcast.subscriber.engines.wire import (
    ADMIN_LOOK,
    NEVER_HANDLED,
    NO_ROUTE,
    READ_LOOK,
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
NO_PAUSE = "check that it is SGLang (the kind of --engine); then upgrade it, or use policy=wait"
INFO_ROUTES = ("/server_info", "/get_server_info")
RANKS = " | "
"""between the messages of data-parallel ranks"""
STARTUP, WHOLE = b"sglang:startup_time_seconds{", b'phase="tokenizer_e2e"'


class SGLang(Adapter):
    def __init__(self, spec: EngineSpec, wire: Wire, timeouts: Timeouts) -> None:
        super().__init__(spec, wire, timeouts)
        self._label: str | None = None
        self._source: str | None = None
        self._unread = ""
        """why its info routes refuse the one key that its control routes take; empty: they do not"""
        self._server = Settings(spec.shown_url, self._settings, _start_of)

    def probe(self) -> EngineFacts:
        """Pausing is not visible from outside."""
        facts = EngineFacts(reachable=True)
        try:
            seconds = self._timeouts.probe
            metrics = self._processes.read(lambda: self._wire.get("/metrics", seconds), _process_of)
            facts = _facts_of(metrics)
            label = self._steady_label(facts.process, lambda: self._read_label(seconds))
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
            if facts.process is not None:
                return facts
            return EngineFacts(False, hindrance=failure.message, remedy=failure.remedy)

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
            reply.require_ok(NO_PAUSE if lacks else "see the engine's log")

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
        self._forget_labels()
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
        shown = self._steady_label(self._server.process, lambda: self._read_label(seconds))
        return "status-only" if shown is None else self._require_label(shown, label)

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
            raise EngineFailed(reply.describe(), remedy="see the engine's log; weight_version must be text")
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


LOADER = "weightcast_engine.sglang.hook.load"
INSTALL = "install weightcast-engine in SGLang's environment and start it as docs/engines.md says"
LOG = "see the engine's log"
NOT_PATCHABLE = "the engine says that it cannot be patched"
UNTOUCHED = frozenset({400, 409, 422, 423, 503})
"""the hook refused before anything was written"""
MOST_RANKS = 1024
ACTION = "weightcast "
"""how a question begins that is for the hook"""
_MORE, _BUSY = 202, 503
"""there is a next step, for the same words; another order is under way"""
_BUSY_SECONDS, _MOST_REST = 0.05, 0.1


@dataclass(frozen=True)
class _Told:
    """What the hook answered. `status` 0: it has not answered, and nobody knows what was done."""

    status: int
    body: Mapping[str, object]
    text: str

    def says(self, **wanted: object) -> bool:
        return self.status == httpx.codes.OK and all(self.body.get(k) == v for k, v in wanted.items())

    @property
    def untouched(self) -> bool:
        return self.status in UNTOUCHED or self.body.get("state") == "rolled-back"


class _NoHook(EngineFailed):
    """The server has answered by itself."""


class SGLangLive:
    """A released SGLang with the plugin's loader: `Patchable` by the server's own routes (docs/adr/0012)."""

    def __init__(self, spec: EngineSpec, wire: Wire, timeouts: Timeouts) -> None:
        self.spec = spec
        self._plain = SGLang(spec, wire, timeouts)
        self._wire = wire
        self._timeouts = timeouts
        self._held: HeldWeights | None = None
        """named or patched by this process; the hook compares it with what it has, at every patch"""
        self._process: str | None = None
        self._unfit: str | None = None
        """why this process takes no orders; empty: it does; None: not known of it yet"""
        self._checked = ""
        """the patch that it has checked so"""
        self._ranks = 1
        """tensor-parallel ones: each takes its own copy of an order"""

    @property
    def pauses_itself(self) -> bool:
        return False

    def close(self) -> None:
        self._plain.close()

    def probe(self) -> EngineFacts:
        facts = self._plain.probe()
        if not facts.reachable:
            return facts
        if self._process != facts.process:
            self._process, self._held, self._unfit, self._checked = facts.process, None, None, ""
        try:
            told = self._beside("look", {}, self._timeouts.probe)
        except KeyRefused as failure:
            return unreachable(failure)
        except EngineFailed:  # in a long step of its own, or unfit
            return replace(facts, held=self._held, unpatchable=(self._unfit or "")[:QUOTED])
        if not told.says():
            return replace(facts, reachable=False, hindrance=told.text)
        return self._with_told(facts, told)

    def _with_told(self, facts: EngineFacts, told: _Told) -> EngineFacts:
        doubtful = told.body.get("in_doubt") is not False
        # a label that the hook was not told is of weights that it does not know
        named = not doubtful and told.body.get("label") == facts.label
        self._held = held_of(told.body) if named else None
        plugin, reason = told.body.get("plugin"), told.body.get("reason")
        return replace(
            facts,
            label=None if doubtful else facts.label,
            software=f"with weightcast-engine {plugin}" if isinstance(plugin, str) else None,
            held=self._held,
            in_doubt=doubtful,
            unpatchable="" if told.body.get("patchable") is True else str(reason or NOT_PATCHABLE)[:QUOTED],
        )

    def pause(self) -> None:
        self._plain.pause()

    def resume(self) -> None:
        self._plain.resume()

    def relabel(self, label: str) -> Confirmation:
        held, self._held = self._held, None
        confirmed = self._plain.relabel(label)
        if held is not None:
            self.hold(HeldWeights(int(label), held.root), label)
        return confirmed

    def reload(self, path: str, label: str) -> ReloadOutcome:
        self._held = None
        return self._plain.reload(path, int(label), label)

    def hold(self, held: HeldWeights, label: str) -> None:
        order = {"version": held.version, "root": held.root, "label": label}
        told = self._beside("holds", order, self._timeouts.control)
        if not told.says():
            raise EngineFailed(told.text, remedy=INSTALL)
        self._held = held

    def check(self, patch: PatchFile) -> None:
        self._checked = ""
        try:
            told = self._beside("check", {"file": patch.name}, self._timeouts.reload)
        except EngineFailed as failure:
            raise NotTaken(failure.message, remedy=failure.remedy) from failure
        if not told.says(changes=patch.changes):
            raise NotTaken(told.text, remedy=LOG)
        self._checked = patch.name

    def apply(self, patch: PatchFile, label: str, *, pausing: bool) -> ReloadOutcome:
        self._held = None
        if self._checked != patch.name:
            return Intact(f"{patch.name} was not checked")
        try:
            self._begin()
        except EngineFailed as failure:
            return Intact(str(failure))
        try:
            outcome = self._apply(patch, label)
            self._end()
        except EngineFailed as failure:
            with suppress(EngineFailed):
                self._end()
            return Suspect(str(failure))
        if isinstance(outcome, Done):
            self._held = HeldWeights(patch.version, patch.root)
        return outcome

    def _apply(self, patch: PatchFile, label: str) -> ReloadOutcome:
        told = self._send(_order("apply", {"file": patch.name, "label": label}), label)
        if told.untouched:
            return Intact(told.text)
        return (
            Done() if told.says(version=patch.version, root=patch.root, label=label) else Suspect(told.text)
        )

    def confirm(self, held: HeldWeights | None, label: str) -> Confirmation:
        confirmed = self._plain.read_back(label)
        if held is not None and held != self._held:
            raise EngineFailed(f"{self.spec.shown_url} was not given {held}", remedy="it is reloaded")
        return confirmed

    def lanes(self, names: Sequence[str]) -> EngineLanes:
        order = {"tensors": list(names), "from": 0, "count": len(names)}
        told = self._beside("digest", order, self._timeouts.control)
        if not told.says():
            raise EngineFailed(told.text, remedy=LOG)
        return lanes_of(told.body)

    def _beside(self, door: str, body: Mapping[str, object], seconds: float) -> _Told:
        """What the hook answers a server that serves, after as many steps as it takes. Raises EngineFailed
        for a server that does not answer, or takes no orders."""
        if self._unfit is None:
            self._unfit = self._look_at_server() or self._hook_missing(seconds)
        if self._unfit:
            raise EngineFailed(f"{self.spec.shown_url}: {self._unfit}", remedy=INSTALL)
        deadline = time.monotonic() + seconds
        told = self._question(door, body, seconds)
        while told.status in (_MORE, _BUSY):
            left = deadline - time.monotonic()
            if left <= 0:
                raise EngineFailed(f"{self.spec.shown_url} did not end {door} in {seconds:g} s", remedy=LOG)
            rest = told.body.get("rest") if told.status == _MORE else _BUSY_SECONDS
            time.sleep(min(_rest(rest), left))
            told = self._question(door, body, left)
        return told

    def _question(self, door: str, body: Mapping[str, object], seconds: float) -> _Told:
        question = {"action": ACTION + _order(door, body)}
        reply = self._wire.post("/weights_checker", question, seconds)
        told = _told(reply.require_key())
        if not told.body:
            kind = EngineFailed if httpx.codes.is_server_error(reply.status) else _NoHook
            raise kind(f"weightcast-engine does not answer: {told.text}", remedy=INSTALL)
        return told

    def _look_at_server(self) -> str:
        """Why it takes no orders, as it describes itself: one would end it, or not be heard by all ranks."""
        fields = self._wire.get("/server_info", self._timeouts.control).require_ok(INSTALL).fields()
        loaders, ranks = fields.get("custom_weight_loader"), fields.get("tp_size", 1)
        if not isinstance(loaders, list) or LOADER not in loaders:
            return f"was started without {LOADER}"
        if type(ranks) is not int or not 0 < ranks <= MOST_RANKS:
            return f"tells {ranks!r} tensor-parallel ranks"
        self._ranks = ranks
        return next((reason for reason, applies in _hindrances(fields).items() if applies), "")

    def _hook_missing(self, seconds: float) -> str:
        try:
            self._question("look", {}, seconds)
        except _NoHook as failure:
            return failure.message
        return ""

    def _begin(self) -> None:
        """Opens the session in which SGLang takes tensors, after another that was left open. Raises
        EngineFailed when it does not."""
        reply = self._wire.post_once("/begin_weight_update", {}, self._timeouts.control)
        if reply.status == httpx.codes.BAD_REQUEST:
            self._end()
            reply = self._wire.post_once("/begin_weight_update", {}, self._timeouts.control)
        reply.require_ok(INSTALL)

    def _end(self) -> None:
        self._wire.post_once("/end_weight_update", {}, self._timeouts.control).require_ok(INSTALL)

    def _send(self, order: str, label: str) -> _Told:
        request = {
            "serialized_named_tensors": [named_dummy(order)] * self._ranks,
            "load_format": LOADER,
            "weight_version": label,
            "flush_cache": True,
            "abort_all_requests": False,
        }
        # without a pause the update itself waits for the requests in flight
        drain = self._timeouts.drain if self.spec.policy == "wait" else 0.0
        seconds = self._timeouts.reload + drain
        return _told(self._wire.post_once("/update_weights_from_tensor", request, seconds))


def _hindrances(fields: Mapping[str, object]) -> Mapping[str, bool]:
    """What SGLang's settings say against patches in memory."""

    def more_than(most: int, *keys: str) -> bool:
        values = [fields.get(key) for key in keys]
        return any(isinstance(value, int | float) and value > most for value in values)

    return {
        "only the first stage of a pipeline answers": more_than(1, "pp_size"),
        "only the first of data parallel replicas answers": more_than(1, "dp_size"),
        "experts move between ranks (EPLB)": fields.get("enable_eplb") is True,
        "weights are offloaded": more_than(0, "cpu_offload_gb", "offload_group_size"),
        "weights that are away can't be read (--enable-memory-saver)": fields.get("enable_memory_saver")
        is True,
        "LoRA adapters are on": fields.get("enable_lora") is True,
    }


def _order(door: str, body: Mapping[str, object]) -> str:
    return json.dumps({"door": door, "body": body}, separators=(",", ":"))


def named_dummy(name: str) -> str:
    """Base64 of a pickle, protocol 2, of `[(name, torch.FloatTensor(1))]`: written by hand, as neither torch
    nor pickle has a place here. SGLang reads nothing else, and lets only such classes pass."""
    text = name.encode()
    pickled = (
        *(b"\x80\x02", b"]", b"X", len(text).to_bytes(4, "little"), text),
        *(b"ctorch\nFloatTensor\n", b"K\x01", b"\x85", b"R", b"\x86", b"a", b"."),
    )
    return base64.b64encode(b"".join(pickled)).decode()


def _rest(told: object) -> float:
    """Seconds until the next question, within what is sensible whatever number the hook tells."""
    # in this order NaN comes to 0, and an integer beyond all floats is never made one
    return min(max(0.0, told), _MOST_REST) if isinstance(told, int | float) else 0.0


def _hooks_object(message: str, where: str) -> Mapping[str, object]:
    """The hook's answer, empty where it is none. SGLang may add words of its own behind it."""
    try:
        _, end = json.JSONDecoder().raw_decode(message)
        return parse_object(message[:end].encode(), where)
    except (ValueError, RecursionError, DamagedFile):
        return {}


def _told(reply: Reply) -> _Told:
    fields = reply.fields()
    message = fields.get("message")
    body = _hooks_object(message if isinstance(message, str) else "", reply.url)
    status = body.get("status")
    if type(status) is not int or httpx.codes.is_success(status) != (fields.get("success") is True):
        return _Told(400 if reply.status in NEVER_HANDLED else 0, {}, reply.describe())
    words = [str(body[key])[:QUOTED] for key in ("error", "remedy") if body.get(key)]
    return _Told(status, body, f"{reply.url}: {'; '.join(words) or reply.describe()}")

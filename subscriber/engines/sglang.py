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
import posixpath
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

import httpx

from weightcast.shared.base.errors import DamagedFile, EngineFailed
from weightcast.shared.checkpoint.update.engine_patch import EnginePatch
from weightcast.shared.files.strict_json import parse_object
from weightcast.subscriber.engines.adapter import (
    LOG,
    NONE,
    UNKNOWN,
    AdapterLimits,
    LiveAdapter,
    PluginAnswer,
    Server,
    TakesAdapters,
    drafter_named,
)
from weightcast.subscriber.engines.base import (
    NO_ROUTE,
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
    Unfit,
    unreachable,
)
from weightcast.subscriber.engines.wire import (
    ADMIN_LOOK,
    NEVER_HANDLED,
    READ_LOOK,
    Reply,
    Wire,
    not_an_engine,
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
RELOADS_DRAFTERS = (0, 5, 11)
STARTUP, WHOLE = b"sglang:startup_time_seconds{", b'phase="tokenizer_e2e"'


class SGLang(TakesAdapters, Server):
    _lora_routes = ""
    _any_model = frozenset(("default",))
    _lora_start = "start SGLang with --enable-lora, --max-lora-rank and --lora-target-modules"
    _with_label: ClassVar = {"abort_all_requests": False}
    """which defaults to true there"""

    def __init__(self, spec: EngineSpec, wire: Wire) -> None:
        super().__init__(spec, wire)
        self._label: str | None = None
        self._source: str | None = None
        self._unread = ""
        """why its info routes refuse the one key that its control routes take; empty: they do not"""

    def _look(self) -> EngineFacts:
        """Pausing is not visible from outside."""
        seconds = self._timeouts.probe
        metrics = self._processes.read(lambda: self._wire.get("/metrics", seconds), _process_of)
        process, refusal = _process_of(metrics), "" if metrics.refusal is None else str(metrics.refusal)
        unique = process is not None and start_time(metrics) is None
        facts = EngineFacts(True, process=process, unique=unique, remedy=refusal)
        try:
            label = self._steady_label(process, lambda: self._read_label(seconds))
        except (NotSent, NoReply, Misconfigured):
            raise
        except EngineFailed as failure:
            if process is not None:
                return facts
            return EngineFacts(False, hindrance=failure.message, remedy=failure.remedy)
        remedy = self._unread or refusal
        facts = replace(facts, label=label, source=self._source, remedy=remedy, drafter=UNKNOWN)
        return facts if facts.tell_something or self._unread else not_an_engine(metrics)

    def _drafter_in(self, settings: Mapping[str, object]) -> str:
        """By the releases' sources: from 0.5.11 the draft model is loaded after the main model, from the same
        directory; before that it stays as it is. A draft model with its own directory is not in it.
        """
        if "speculative_algorithm" not in settings:
            return UNKNOWN
        algorithm = settings["speculative_algorithm"]
        drafter = NONE if algorithm is None else drafter_named(algorithm)
        if drafter == NONE or self.spec.drafter == "keep":
            return drafter
        draft, main = (settings.get(key) for key in ("speculative_draft_model_path", "model_path"))
        release, runs = settings.get("version"), f"{self.spec.shown_url} runs a draft model ({drafter})"
        if isinstance(release, str) and _numbers(release) < RELOADS_DRAFTERS:
            raise Unfit(
                f"{runs}, which SGLang {release[:20]} would leave at its old weights",
                remedy="upgrade SGLang to 0.5.11 or later, start it without a draft model, or give "
                "drafter=keep",
            )
        places = [posixpath.normpath(str(path)) for path in (draft, main, self.spec.path)]
        if draft and places[0] not in places[1:]:
            raise Unfit(
                f"{runs} of another checkpoint, {str(draft)[:100]}",
                remedy="start SGLang without --speculative-draft-model-path, or give drafter=keep",
            )
        return drafter

    def adapter_limits(self) -> AdapterLimits:
        told = self._told or {}
        lora = told if told.get("enable_lora", True) else None
        return self._limits(lora, "lora_target_modules", "max_loaded_loras", drops=True)

    def _start_of(self, settings: Mapping[str, object]) -> str | None:
        """The seed is drawn at each start; how long the start took came with 0.5.2x."""
        told = [settings.get(key) for key in ("random_seed", "startup_time")]
        return None if told == [None, None] else repr(told)

    def _ask_settings(self, seconds: float) -> Mapping[str, object]:
        """Empty where it refuses to tell them."""
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
                return reply.require_ok(LOG).fields()
        return {}

    def require_control(self) -> None:
        """Raises KeyRefused where orders would be refused. Nothing is ordered. A server that takes the key of
        questions there does not guard this route as its control routes."""
        if self._unread:
            return  # this was asked already
        by_control, by_read = (self._wire.get(path, self._timeouts.probe) for path in (ADMIN_LOOK, READ_LOOK))
        if by_read.refusal is not None:
            by_control.require_key()

    def pause(self) -> None:
        mode = PAUSE_MODES[self.spec.policy]
        if mode is not None:
            reply = self._wire.post("/pause_generation", {"mode": mode}, self._timeouts.control)
            reply.require_route(NO_PAUSE).require_ok(LOG)

    def resume(self) -> None:
        reply = self._wire.post("/continue_generation", {}, self._timeouts.control)
        reply.require_ok("continue the engine by hand or restart it")

    def _load(self, path: str, label: str) -> ReloadOutcome:
        body = {"model_path": path, "load_format": None, "abort_all_requests": False}
        return self._judged(self._update("/update_weights_from_disk", body, label), label)

    def _update(self, route: str, body: Mapping[str, object], label: str) -> Reply | Intact | Suspect:
        body = {**body, "weight_version": label, "flush_cache": True}
        return self._wire.order(route, body, self._timeouts.reload + self._drain_seconds)

    def _judged(self, reply: Reply | Intact | Suspect, label: str) -> ReloadOutcome:
        if not isinstance(reply, Reply):
            return reply
        before = self._label
        success = reply.fields().get("success")
        if reply.status == 200 and success is True:
            return Done()
        message = reply.fields().get("message")
        unread = isinstance(message, str) and all(part.startswith(UNREAD) for part in message.split(RANKS))
        if reply.status == 400 and success is False and unread:
            with suppress(EngineFailed):
                is_same = before is not None and self._read_label(self._timeouts.control) == before
                # a draft model is loaded after the model itself: then a directory that could not be opened
                # says nothing of the model
                key = "speculative_algorithm"
                if is_same and self._server_info(self._timeouts.control).get(key) is None:
                    return Intact(reply.describe())
        return Suspect(reply.describe())

    def read_back(self, label: str) -> Confirmation:
        seconds = self._timeouts.control
        shown = self._steady_label(self._asked, lambda: self._read_label(seconds))
        return "status-only" if shown is None else self._require_label(shown, label)

    def _read_label(self, seconds: float) -> str | None:
        """None from releases that have no labels, and while only control routes take the key."""
        self._label = self._source = None
        try:
            label, self._unread = self._asked_label(seconds), ""
        except KeyRefused as refused:
            # the only key given may be that of control routes: one is asked that orders nothing
            keys = self._wire.keys
            are_one = keys.read.value == keys.control.value
            if not are_one or self._wire.post(ADMIN_LOOK, {}, seconds).refusal is not None:
                raise
            label, self._unread = None, str(refused)
        return label

    def _asked_label(self, seconds: float) -> str | None:
        for route in ("/model_info", "/get_model_info", "/get_weight_version"):
            reply = self._wire.get(route, seconds)
            if reply.status in NO_ROUTE:
                continue
            reply.require_ok(LOG)
            self._source = self._source or reply.text_field("model_path")
            if reply.fields().get("weight_version") is not None:
                self._label = reply.text_field("weight_version")
                if self._label is None:
                    raise EngineFailed(
                        reply.describe(), remedy="see the engine's log; weight_version must be text"
                    )
                return self._label
        return None


def _numbers(release: str) -> tuple[int, ...]:
    """Of `0.5.9`, `0.5.10.post1`, `0.5.11rc0`. Any other form counts as new."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", release)
    return RELOADS_DRAFTERS if found is None else tuple(map(int, found.groups()))


def _process_of(metrics: Reply) -> str | None:
    """SGLang gathers the metrics of several processes, and then no page tells when one of them started. How
    long its start took, in billionths of a second, tells one start from another as well."""
    lines = metrics.body.splitlines() if metrics.status == httpx.codes.OK else ()
    taken = (
        line.rpartition(b" ")[2][:QUOTED].decode("ascii", "replace")
        for line in lines
        if line.startswith(STARTUP) and WHOLE in line
    )
    return start_time(metrics) or next(taken, None)


LOADER = "weightcast_engine.sglang.hook.load"
INSTALL = "install weightcast-engine in SGLang's environment and start it as docs/live-patch.md says"
UNTOUCHED = frozenset({400, 409, 422, 423, 503})
"""the hook refused before anything was written"""
MOST_RANKS = 1024
ACTION = "weightcast "
"""how a question begins that is for the hook"""
_MORE, _BUSY = 202, 503
"""there is a next step, for the same words; another order is under way"""
_BUSY_SECONDS, _MOST_REST = 0.05, 0.1


class _NoHook(EngineFailed):
    """The server has answered by itself."""


class SGLangLive(LiveAdapter, SGLang):
    """A released SGLang with the plugin's loader, through the server's own routes (docs/adr/0012)."""

    def __init__(self, spec: EngineSpec, wire: Wire) -> None:
        super().__init__(spec, wire)
        self._held: HeldWeights | None = None
        """named or patched by this process; the hook compares it with what it has, at every patch"""
        self._process: str | None = None
        self._unfit: str | None = None
        """why this process takes no orders; empty: it does; None: not known of it yet"""
        self._checked = ""
        """the patch that it has checked so"""
        self._ranks = 1
        """tensor-parallel ones: each takes its own copy of an order"""

    def probe(self) -> EngineFacts:
        facts = super().probe()
        if not facts.reachable:
            return facts
        if self._process != facts.process:
            self._process, self._held, self._unfit, self._checked = facts.process, None, None, ""
        try:
            told = self._ask("look", {}, self._timeouts.probe)
        except KeyRefused as failure:
            return unreachable(failure)
        except EngineFailed:  # in a long step of its own, or unfit
            return replace(facts, held=self._held, unpatchable=(self._unfit or "")[:QUOTED])
        if not told.says():
            return replace(facts, reachable=False, hindrance=told.text)
        # a label that the hook was not told is of weights that it does not know
        named = not told.in_doubt and told.body.get("label") == facts.label
        self._held = told.held if named else None
        return replace(told.onto(facts), held=self._held)

    def relabel(self, label: str) -> Confirmation:
        held, self._held = self._held, None
        confirmed = super().relabel(label)
        if held is not None:
            self.hold(HeldWeights(int(label), held.root), label)
        return confirmed

    def reload(self, path: str, label: str) -> ReloadOutcome:
        self._held = None
        return super().reload(path, label)

    def hold(self, held: HeldWeights, label: str) -> None:
        super().hold(held, label)
        self._held = held

    def check(self, patch: EnginePatch) -> None:
        self._checked = ""
        super().check(patch)
        self._checked = patch.name

    def apply(self, patch: EnginePatch, label: str, *, pausing: bool) -> ReloadOutcome:
        self._held = None
        if self._checked != patch.name:
            return Intact(f"{patch.name} was not checked")
        try:
            self._begin()
        except EngineFailed as failure:
            return Intact(str(failure))
        try:
            told = self._send(_order("apply", {"file": patch.name, "label": label}), label)
            self._end()
        except EngineFailed as failure:
            with suppress(EngineFailed):
                self._end()
            return Suspect(str(failure))
        if told.untouched:
            return Intact(told.text)
        if not told.says(version=patch.version, root=patch.root, label=label):
            return Suspect(told.text)
        self._held = HeldWeights(patch.version, patch.root)
        return Done()

    def confirm(self, held: HeldWeights | None, label: str) -> Confirmation:
        confirmed = SGLang.read_back(self, label)
        if held is not None and held != self._held:
            raise EngineFailed(f"{self.spec.shown_url} was not given {held}", remedy="it is reloaded")
        return confirmed

    def _ask(self, order: str, body: Mapping[str, object], seconds: float) -> PluginAnswer:
        """What the hook answers a server that serves, after as many steps as it takes. Raises EngineFailed
        for a server that does not answer, or takes no orders."""
        if self._unfit is None:
            self._unfit = self._look_at_server() or self._hook_missing(seconds)
        if self._unfit:
            raise EngineFailed(f"{self.spec.shown_url}: {self._unfit}", remedy=INSTALL)
        deadline = time.monotonic() + seconds
        told = self._question(order, body, seconds)
        while told.status in (_MORE, _BUSY):
            left = deadline - time.monotonic()
            if left <= 0:
                raise EngineFailed(f"{self.spec.shown_url} did not end {order} in {seconds:g} s", remedy=LOG)
            rest = told.body.get("rest") if told.status == _MORE else _BUSY_SECONDS
            time.sleep(min(_rest(rest), left))
            told = self._question(order, body, left)
        return told

    def _question(self, order: str, body: Mapping[str, object], seconds: float) -> PluginAnswer:
        question = {"action": ACTION + _order(order, body)}
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
        reply = self._session("begin")
        if reply.status == httpx.codes.BAD_REQUEST:
            self._end()
            reply = self._session("begin")
        reply.require_ok(INSTALL)

    def _end(self) -> None:
        self._session("end").require_ok(INSTALL)

    def _session(self, what: str) -> Reply:
        return self._wire.post(f"/{what}_weight_update", {}, self._timeouts.control, again=False)

    def _send(self, order: str, label: str) -> PluginAnswer:
        request = {
            "serialized_named_tensors": [named_dummy(order)] * self._ranks,
            "load_format": LOADER,
            "weight_version": label,
            "flush_cache": True,
            "abort_all_requests": False,
        }
        # without a pause the update itself waits for the requests in flight
        seconds = self._timeouts.reload + self._drain_seconds
        return _told(self._wire.post("/update_weights_from_tensor", request, seconds, again=False))


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


def _order(name: str, body: Mapping[str, object]) -> str:
    return json.dumps({"door": name, "body": body}, separators=(",", ":"))


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


def _told(reply: Reply) -> PluginAnswer:
    fields = reply.fields()
    message = fields.get("message")
    body = _hooks_object(message if isinstance(message, str) else "", reply.url)
    status = body.get("status")
    if type(status) is not int or httpx.codes.is_success(status) != (fields.get("success") is True):
        return PluginAnswer(0, {}, reply.describe(), reply.status in NEVER_HANDLED)
    words = [str(body[key])[:QUOTED] for key in ("error", "remedy") if body.get(key)]
    untouched = status in UNTOUCHED or body.get("state") == "rolled-back"
    return PluginAnswer(status, body, f"{reply.url}: {'; '.join(words) or reply.describe()}", untouched)

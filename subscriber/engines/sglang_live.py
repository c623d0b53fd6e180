"""SGLang with the hook of `weightcast-engine`: patches through its own door for tensors, in the pause.

That door waits for all requests in flight unless the server is paused, so that nothing is asked of the hook
while it serves: a patch is checked right before it is applied. An order is the *name* of a tensor; the tensor
is a dummy.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import httpx

from weightcast.shared.errors import EngineFailed
from weightcast.subscriber.engines.base import (
    Confirmation,
    Done,
    EngineFacts,
    EngineSpec,
    Held,
    Intact,
    ReloadOutcome,
    Suspect,
    Timeouts,
)
from weightcast.subscriber.engines.live import EngineLanes, PatchFile
from weightcast.subscriber.engines.sglang import SGLang
from weightcast.subscriber.engines.wire import (
    NEVER_HANDLED,
    QUOTED,
    Reply,
    Wire,
)

LOADER = "weightcast_engine.sglang_hook.load"
INSTALL = "install weightcast-engine beside SGLang and start it as docs/engines.md says"
UNTOUCHED = frozenset({400, 409, 422, 423})
"""the hook refused before anything was written"""
MOST_RANKS = 1024


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


class SGLangLive:
    def __init__(self, spec: EngineSpec, wire: Wire, timeouts: Timeouts) -> None:
        self.spec = spec
        self._plain = SGLang(spec, wire, timeouts)
        self._wire = wire
        self._timeouts = timeouts
        self._held: Held | None = None
        """told or patched by this process; the hook compares it with what it has, at every patch"""
        self._process: str | None = None
        self._ranks = 1
        """tensor-parallel ones: each takes its own copy of an order"""

    def close(self) -> None:
        self._plain.close()

    def probe(self) -> EngineFacts:
        facts = self._plain.probe()
        if facts.reachable and self._process != facts.process:
            self._process, self._held = facts.process, None
        return replace(facts, held=self._held)

    def pause(self) -> None:
        self._plain.pause()

    def resume(self) -> None:
        self._plain.resume()

    def relabel(self, label: str) -> Confirmation:
        """The hook is not told: the version after this one is loaded from disk."""
        self._held = None
        return self._plain.relabel(label)

    def reload(self, path: str, label: str) -> ReloadOutcome:
        self._held = None
        return self._plain.reload(path, int(label), label)

    def hold(self, held: Held, label: str) -> None:
        self._begin()
        try:
            told = self._ask("holds", {"version": held.version, "root": held.root, "label": label})
        finally:
            self._end()
        if not told.says():
            raise EngineFailed(told.text, remedy=INSTALL)
        self._held = held

    def check(self, patch: PatchFile) -> None:
        """In the pause, by `apply`."""

    def apply(self, patch: PatchFile, label: str) -> ReloadOutcome:
        self._held = None
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
            self._held = Held(patch.version, patch.root)
        return outcome

    def _apply(self, patch: PatchFile, label: str) -> ReloadOutcome:
        told = self._ask("check", {"file": patch.name})
        if not told.says(changes=patch.changes):
            return Intact(told.text) if told.status else Suspect(told.text)
        told = self._ask("apply", {"file": patch.name, "label": label}, label)
        if told.untouched:
            return Intact(told.text)
        return (
            Done() if told.says(version=patch.version, root=patch.root, label=label) else Suspect(told.text)
        )

    def confirm(self, held: Held | None, label: str) -> Confirmation:
        confirmed = self._plain.read_back(label)
        if held is not None and held != self._held:
            raise EngineFailed(f"{self.spec.url} was not told to hold {held}", remedy="it is reloaded")
        return confirmed

    def lanes(self, names: Sequence[str]) -> EngineLanes:
        raise EngineFailed(
            f"{self.spec.url}: SGLang's memory cannot be read while it serves",
            remedy="its reloads from disk are proven; see docs/engines.md",
        )

    def _begin(self) -> None:
        """Opens the session in which SGLang takes tensors. Raises EngineFailed when it does not, or would end
        on an order, since it does not know whom that is for."""
        reply = self._wire.get("/server_info", self._timeouts.control).require_ok(INSTALL)
        fields = reply.fields()
        loaders, ranks = fields.get("custom_weight_loader"), fields.get("tp_size", 1)
        if not isinstance(loaders, list) or LOADER not in loaders:
            raise EngineFailed(f"{self.spec.url} was started without {LOADER}", remedy=INSTALL)
        if type(ranks) is not int or not 0 < ranks <= MOST_RANKS:
            raise EngineFailed(f"{reply.url} tells {ranks!r} tensor-parallel ranks", remedy=INSTALL)
        self._ranks = ranks
        self._wire.post_once("/begin_weight_update", {}, self._timeouts.control).require_ok(INSTALL)

    def _end(self) -> None:
        self._wire.post_once("/end_weight_update", {}, self._timeouts.control).require_ok(INSTALL)

    def _ask(self, door: str, body: Mapping[str, object], label: str | None = None) -> _Told:
        order = json.dumps({"door": door, "body": body}, separators=(",", ":"))
        request = {
            "serialized_named_tensors": [named_dummy(order)] * self._ranks,
            "load_format": LOADER,
            "weight_version": label,
            "flush_cache": door == "apply",
            "abort_all_requests": False,
        }
        # without a pause the update itself waits for the requests in flight
        drain = self._timeouts.drain if self.spec.policy == "wait" else 0.0
        seconds = self._timeouts.reload + drain
        return _told(self._wire.post_once("/update_weights_from_tensor", request, seconds))


def named_dummy(name: str) -> str:
    """Base64 of a pickle, protocol 2, of `[(name, torch.FloatTensor(1))]`: written by hand, as neither torch
    nor pickle has a place here. SGLang reads nothing else, and lets only such classes pass."""
    text = name.encode()
    pickled = (
        *(b"\x80\x02", b"]", b"X", len(text).to_bytes(4, "little"), text),
        *(b"ctorch\nFloatTensor\n", b"K\x01", b"\x85", b"R", b"\x86", b"a", b"."),
    )
    return base64.b64encode(b"".join(pickled)).decode()


def _told(reply: Reply) -> _Told:
    """SGLang may add words of its own behind the hook's."""
    fields = reply.fields()
    message = fields.get("message")
    try:
        body, _ = json.JSONDecoder().raw_decode(message if isinstance(message, str) else "")
    except (ValueError, RecursionError):
        body = None
    status = body.get("status") if isinstance(body, dict) else None
    if type(status) is not int or (status == httpx.codes.OK) != (fields.get("success") is True):
        return _Told(400 if reply.status in NEVER_HANDLED else 0, {}, reply.describe())
    words = [str(body[key])[:QUOTED] for key in ("error", "remedy") if body.get(key)]
    return _Told(status, body, f"{reply.url}: {'; '.join(words) or reply.describe()}")

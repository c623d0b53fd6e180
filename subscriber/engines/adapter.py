"""What adapters of all engines share: their interface, the plugin's answers, which process answers.

An adapter speaks one engine's dialect and decides from status codes and fields what a reply proves; the order
of the calls is decided in `reload`. Adapters are used by one thread at a time.

Processes: a replaced one never comes back. Where an identity that was seen before answers again, two
or more processes share the address, and an order reaches one of them. Every question has a connection of its
own (`wire`), so that a load balancer may answer each from another process.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, TypeVar

from weightcast.shared.base.errors import EngineFailed
from weightcast.shared.checkpoint.update.engine_patch import EnginePatch
from weightcast.subscriber.engines.base import (
    NO_ROUTE,
    QUOTED,
    Confirmation,
    EngineFacts,
    EngineSpec,
    HeldWeights,
    Intact,
    Misconfigured,
    NoReply,
    ReloadOutcome,
    Suspect,
    Unfit,
    unreachable,
)

if TYPE_CHECKING:
    from weightcast.subscriber.engines.wire import Reply, Wire

ASKED = 8
"""times at the first look, and after a change: a balancer that picks one of two at random shows only one of
them in 1 of 128 cases"""
STEADY = 24
"""equal answers in a row after which one process is believed in again"""
_REMEMBERED = 64
LOG = "see the engine's log"
NONE, UNKNOWN = "none", "unknown"
"""of draft models"""
T = TypeVar("T")
# Of the standard library: the log repeats such a record only once in a while, and every look may fail.
log = logging.getLogger("engines")


class NoAdapters(EngineFailed):
    """The engine, as it was started, loads no LoRA adapters."""


@dataclass(frozen=True)
class AdapterLimits:
    """LoRA options that an engine was started with: its own `settings`, empty where it does not say.
    `modules`, `slots`: what two of them are called there. `drops`: beyond its slots it unloads adapters."""

    settings: Mapping[str, object] = field(default_factory=dict)
    modules: str = ""
    slots: str = ""
    drops: bool = False

    @property
    def most(self) -> int | None:
        found = self.settings.get(self.slots)
        return found if isinstance(found, int) else None

    def require(self, name: str, config: Mapping[str, object]) -> None:
        """Raises EngineFailed where an adapter with this adapter_config.json does not fit."""
        most, modules = self.settings.get("max_lora_rank"), self.settings.get(self.modules)
        pattern, wanted = config.get("rank_pattern"), config.get("target_modules")
        ranks = [config.get("r"), *(pattern.values() if isinstance(pattern, dict) else ())]
        rank = max((each for each in ranks if isinstance(each, int)), default=0)
        if isinstance(most, int) and rank > most:
            problem, option = f"has rank {rank}", f"--max-lora-rank {most}"
        elif isinstance(wanted, list) and isinstance(modules, list) and (more := _lacking(wanted, modules)):
            problem, option = f"adapts {more[0]}", f"--lora-target-modules {' '.join(modules)}"
        else:
            return
        remedy = "restart it with the adapter's rank, or more, and all of its target_modules"
        raise EngineFailed(f"{name} {problem}, the engine was started with {option}", remedy=remedy)


_FUSED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj")
_FUSED |= dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")


def _lacking(wanted: Iterable[object], modules: Iterable[object]) -> list[str]:
    """Engines compute some layers together, and adapt these together."""
    names = [{str(each).rpartition(".")[2] for each in some} for some in (wanted, modules)]
    asked, there = ({_FUSED.get(name, name) for name in some} for some in names)
    return [] if "all" in there else sorted(asked - there)


@contextmanager
def guarded(spec: EngineSpec) -> Iterator[None]:
    """The block raises EngineFailed and nothing else."""
    try:
        yield
    except EngineFailed:
        raise
    except Exception as error:
        log.error(f"adapter of engine {spec.name} failed", exc_info=error)
        raise EngineFailed(
            f"unexpected error in the adapter of engine {spec.name}: {type(error).__name__}: "
            f"{str(error)[:QUOTED]}",
            remedy="report this fault of weightcast with the traceback in the log",
        ) from error


class Adapter(ABC):
    """An inference server. All methods but `probe` and `reload` raise EngineFailed when the engine does not
    answer in time or answers anything but success. `pause`, `resume` and `relabel` may be repeated."""

    models: Set[str] = frozenset()
    """names that requests may give as its model, as of the last `adapters`"""

    def __init__(self, spec: EngineSpec, wire: Wire) -> None:
        self.spec, self._wire, self._timeouts = spec, wire, wire.timeouts
        self._processes = Identities(spec.shown_url)
        self._labels = Identities(spec.shown_url, lasting=False)

    @abstractmethod
    def probe(self) -> EngineFacts:
        """Never raises for what an engine does."""

    def require_fit(self) -> None:  # noqa: B027
        """Raises EngineFailed where no version can be loaded into it as it was started, or nobody knows yet.
        Asked before a pause: requests do not wait for the answer."""

    @abstractmethod
    def pause(self) -> None: ...

    @abstractmethod
    def reload(self, path: str, label: str) -> ReloadOutcome:
        """Sent once, never repeated here."""

    @abstractmethod
    def read_back(self, label: str) -> Confirmation:
        """Asks which weights the engine says it has. EngineFailed when it names others."""

    @abstractmethod
    def resume(self) -> None: ...

    @abstractmethod
    def relabel(self, label: str) -> Confirmation:
        """New name for the same weights; `status-only` where the engine has no labels."""

    def load_draft(self) -> None:
        """Its draft model's weights again, from the directory that it was started with. Pauses by itself
        unless it is paused."""
        raise NotImplementedError

    def adapter_limits(self) -> AdapterLimits:
        """As the process of the last look was started. NoAdapters where that is without LoRA."""
        return AdapterLimits()

    def adapters(self) -> Mapping[str, str]:
        """Directory of each LoRA adapter that it has loaded, by name. NoAdapters where it takes none."""
        raise NoAdapters(f"{self.spec.shown_url} takes no adapters", remedy="give --adapters none")

    def load_adapter(self, name: str, path: str) -> None:
        """Under a name that it does not have. May be repeated only after `adapters`."""
        raise NotImplementedError

    def unload_adapter(self, name: str) -> None:
        """No request that comes later gets it; those under way may go on."""
        raise NotImplementedError

    def close(self) -> None:
        self._wire.close()

    @property
    def _drain_seconds(self) -> float:
        """For a call that also waits for the requests in flight."""
        return self._timeouts.drain if self.spec.policy == "wait" else 0.0

    def _steady_label(self, process: str | None, ask: Callable[[], str | None]) -> str | None:
        """Of an engine that does not name its process: read several times, since only labels may differ."""
        return ask() if process is not None else self._labels.read(ask, lambda label: label)

    def _require_label(self, shown: str | None, label: str) -> Confirmation:
        if shown != label:
            raise EngineFailed(
                f"{self.spec.shown_url} reports weights {shown!r} after a reload of {label!r}",
                remedy="see the engine's log; restart it if this stays",
            )
        return "label"


class TakesAdapters(Adapter):
    """An inference server with LoRA: it lists adapters among its models, with the model that they are for."""

    _lora_routes: ClassVar[str] = "/v1"
    _any_model: ClassVar[Set[str]] = frozenset()
    """names that it takes for its model although it does not list them"""
    _lora_start: ClassVar[str]
    """how it is started so that it takes adapters"""

    def _limits(self, told: object, modules: str, slots: str, *, drops: bool) -> AdapterLimits:
        if not isinstance(told, dict):
            text = f"{self.spec.shown_url} was started without --enable-lora"
            raise NoAdapters(text, remedy=self._lora_start)
        return AdapterLimits(told, modules, slots, drops)

    def adapters(self) -> Mapping[str, str]:
        reply = self._wire.get("/v1/models", self._timeouts.probe).require_ok(LOG)
        models = reply.fields().get("data")
        cards = [each for each in models if isinstance(each, dict)] if isinstance(models, list) else []
        self.models = {str(card["id"]) for card in cards} | self._any_model
        return {str(card["id"]): str(card.get("root")) for card in cards if card.get("parent")}

    def load_adapter(self, name: str, path: str) -> None:
        self._lora("load", {"lora_name": name, "lora_path": path}, self._timeouts.reload)

    def unload_adapter(self, name: str) -> None:
        self._lora("unload", {"lora_name": name}, self._timeouts.control)

    def _lora(self, verb: str, body: Mapping[str, object], seconds: float) -> None:
        """Raises NoAdapters where it has no such route, or says that it was started without LoRA."""
        reply = self._wire.post(f"{self._lora_routes}/{verb}_lora_adapter", body, seconds, again=False)
        reply.require_key()
        if reply.status != 200 or reply.fields().get("success", True) is not True:
            said = reply.body.lower()
            lacks = b"lora is not enabled" in said or (reply.status in NO_ROUTE and b"lora" not in said)
            error = NoAdapters if lacks else EngineFailed
            raise error(reply.describe(), remedy=self._lora_start if lacks else LOG)


@dataclass(frozen=True)
class PluginAnswer:
    """Of weightcast-engine. `status` 0: it has not answered, and nobody knows what was done. `untouched`: it
    says that nothing was written; `text`: its own words, where it has some."""

    status: int
    body: Mapping[str, object]
    text: str
    untouched: bool = False

    def says(self, **wanted: object) -> bool:
        """Success is 200 with these facts, and nothing else."""
        return self.status == 200 and all(self.body.get(key) == value for key, value in wanted.items())

    @property
    def in_doubt(self) -> bool:
        return self.body.get("in_doubt") is not False

    @property
    def held(self) -> HeldWeights | None:
        """What it says that the engine holds; None where it does not know."""
        version, root = self.body.get("version"), self.body.get("root")
        if type(version) is not int or not isinstance(root, str) or len(root) > QUOTED:
            return None
        return HeldWeights(version, root)

    def onto(self, facts: EngineFacts) -> EngineFacts:
        """These facts, with what it says to a look."""
        plugin, reason = self.body.get("plugin"), self.body.get("reason")
        unpatchable = str(reason or "the engine says that it cannot be patched")[:QUOTED]
        return replace(
            facts,
            # a label of weights that are in doubt must not resume anybody
            label=None if self.in_doubt else facts.label,
            software=f"with weightcast-engine {plugin[:QUOTED]}" if isinstance(plugin, str) else None,
            held=None if self.in_doubt else self.held,
            in_doubt=self.in_doubt,
            unpatchable="" if self.body.get("patchable") is True else unpatchable,
        )


@dataclass(frozen=True)
class EngineLanes:
    """Lanes of live parameters as hex text, as of `version`; `refused`: tensors without lanes, and why.
    `changed`: a patch came between."""

    version: int | None
    lanes: Mapping[str, str]
    refused: Mapping[str, str]
    changed: bool


class LiveAdapter(Adapter):
    """An engine whose memory can be patched, through weightcast-engine in it. After a reload from disk it
    holds nothing that it has a name for, until `hold`."""

    pauses_itself = False
    """whether it takes a patch with the pause around it as one order"""

    @abstractmethod
    def _ask(self, order: str, body: Mapping[str, object], seconds: float) -> PluginAnswer:
        """While it serves."""

    @abstractmethod
    def apply(self, patch: EnginePatch, label: str, *, pausing: bool) -> ReloadOutcome:
        """Sent once. `pausing`: with a pause of its own, as part of the order; else it is paused. Intact:
        nothing of it is in the weights."""

    @abstractmethod
    def confirm(self, held: HeldWeights | None, label: str) -> Confirmation:
        """Asks what it holds. EngineFailed when it names other weights."""

    def read_back(self, label: str) -> Confirmation:
        return self.confirm(None, label)

    def hold(self, held: HeldWeights, label: str) -> None:
        """Tells the engine what it has loaded from disk."""
        body = {"version": held.version, "root": held.root, "label": label}
        self._require(self._ask("holds", body, self._timeouts.control))

    def check(self, patch: EnginePatch) -> None:
        """Whether all of its workers could take it now, while it serves."""
        told = self._ask("check", {"file": patch.name}, self._timeouts.reload)
        self._require(told, changes=patch.changes)

    def lanes(self, names: Sequence[str]) -> EngineLanes:
        """Of these tensors, read from its memory while it serves."""
        body = {"tensors": list(names), "from": 0, "count": len(names)}
        told = self._ask("digest", body, self._timeouts.control)
        self._require(told)
        version, changed = told.body.get("version"), told.body.get("changed") is True
        lanes, refused = (_texts(told.body.get(key)) for key in ("lanes", "refused"))
        return EngineLanes(version if type(version) is int else None, lanes, refused, changed)

    @staticmethod
    def _require(told: PluginAnswer, **facts: object) -> None:
        if not told.says(**facts):
            raise EngineFailed(told.text, remedy=LOG)


def _texts(value: object) -> dict[str, str]:
    return {k: v for k, v in value.items() if isinstance(v, str)} if isinstance(value, dict) else {}


class Identities:
    """Of one address. `lasting`: an identity is never used twice, so that all earlier ones are remembered;
    labels of weights may come back between two looks, but not within one."""

    def __init__(self, url: str, *, lasting: bool = True, times: int = 2) -> None:
        """`times`: that it is asked at a usual look."""
        self._url = url
        self._lasting = lasting
        self._times = times
        self._seen = deque[str](maxlen=_REMEMBERED)
        self._now: str | None = None
        self._several = False
        self._equal = 0

    def read(self, ask: Callable[[], T], identity: Callable[[T], str | None]) -> T:
        """The last answer; where it has no identity there is nothing to compare. Raises Unfit, and
        what `ask` raises."""
        before = self._now
        if not self._lasting:
            self._forget_all_but(before)
        for number in range(1, ASKED + 1):
            answer = ask()
            found = identity(answer)
            self._note(found)
            has_returned = self._several and self._equal == 0
            if found is None or (number >= self._times and self._now == before) or has_returned:
                break
        if self._several:
            raise Unfit(
                f"two or more processes answer at {self._url} (a load balancer?)",
                remedy="give each replica its own --engine with its own address",
            )
        return answer

    def _note(self, found: str | None) -> None:
        if found is None:
            return
        if found == self._now:
            self._equal += 1
        else:
            self._several |= found in self._seen
            self._equal = 0
            self._now = found
            if found not in self._seen:
                self._seen.append(found)
        if self._several and self._equal >= STEADY:
            self._several = False
            self._forget_all_but(found)

    def _forget_all_but(self, one: str | None) -> None:
        self._seen = deque([] if one is None else [one], _REMEMBERED)


class Server(Adapter):
    """An inference server that says how it was started, and has labels of its weights. Its settings are asked
    once of every process; where no process is known, they are asked several times, and `_start_of` them tells
    one start from another."""

    _with_label: ClassVar[Mapping[str, object]] = {}
    """what else an order to change the label says"""
    _told: Mapping[str, object] | None = None
    """its settings"""
    _asked: str | None = None
    """the process that they are of"""

    @abstractmethod
    def _look(self) -> EngineFacts:
        """All but its draft model, which is asked next where it is `UNKNOWN`. Raises EngineFailed."""

    @abstractmethod
    def _ask_settings(self, seconds: float) -> Mapping[str, object]: ...

    @abstractmethod
    def _start_of(self, settings: Mapping[str, object]) -> str | None: ...

    @abstractmethod
    def _drafter_in(self, settings: Mapping[str, object]) -> str:
        """As it is shown. Raises Unfit where a reload would leave old or wrong weights."""

    @abstractmethod
    def _load(self, path: str, label: str) -> ReloadOutcome: ...

    @abstractmethod
    def _judged(self, reply: Reply | Intact | Suspect, label: str) -> ReloadOutcome:
        """What the answer to a load proves."""

    def probe(self) -> EngineFacts:
        try:
            facts = self._look()
            if facts.drafter == UNKNOWN:
                # vLLM gathers facts about its machine when it is first asked
                with suppress(NoReply):
                    settings = self._settings(facts.process, self._timeouts.probe)
                    release = settings.get("version")
                    software = release if isinstance(release, str) else facts.software
                    return replace(facts, drafter=self._drafter_in(settings), software=software)
            return facts
        except EngineFailed as failure:
            if not isinstance(failure, Misconfigured):
                self._told = None  # a server that was away may be another one
            return unreachable(failure)

    def require_fit(self) -> None:
        self._drafter_in(self._settings(self._asked, self._timeouts.control))

    def reload(self, path: str, label: str) -> ReloadOutcome:
        self._labels = Identities(self.spec.shown_url, lasting=False)
        try:
            self.require_fit()
        except EngineFailed as failure:
            return Intact(str(failure), untried=True)
        return self._load(path, label)

    def relabel(self, label: str) -> Confirmation:
        return self.read_back(label) if self._set_label(label) else "status-only"

    def _set_label(self, label: str) -> bool:
        """Whether it has labels."""
        body = {"new_version": label, **self._with_label}
        reply = self._wire.post("/update_weight_version", body, self._timeouts.control)
        if reply.status in NO_ROUTE:
            return False
        reply.require_ok(LOG)
        return True

    def _settings(self, process: str | None, seconds: float) -> Mapping[str, object]:
        """Raises Unfit, and what `_ask_settings` raises."""
        if self._told is None or process != self._asked:
            self._asked, self._told = process, None
            self._told = Identities(self.spec.shown_url).read(
                lambda: self._ask_settings(seconds),
                lambda told: self._start_of(told) if process is None else None,
            )
        return self._told


_WEIGHTLESS = frozenset({"ngram", "ngram_gpu", "suffix", "extract_hidden_states", "uno", "none"})
"""methods that draft without a model of their own"""


def drafter_named(method: object) -> str:
    """As it is shown; `none` for what has no weights."""
    name = str(method)[:100] if method else NONE
    return NONE if name.lower() in _WEIGHTLESS else name

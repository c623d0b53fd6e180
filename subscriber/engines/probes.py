"""What adapters share: which process answers, and which draft model it runs.

Processes: a replaced one never comes back. Where an identity that was seen before answers again, two
or more processes share the address, and an order reaches one of them. Every question has a connection of its
own (`wire`), so that a load balancer may answer each from another process.

Draft and MTP models (speculative decoding) when weights are loaded from disk, by the releases' sources:
- vLLM (up to 0.32): `reload_weights` loads the main model alone. Its routes for draft models take weights
  from a trainer's GPU, not from files.
- SGLang: from 0.5.11 the draft model is loaded after the main model, from the same directory; before that it
  stays as it is. A draft model of a directory of its own is not in that directory.
"""

from __future__ import annotations

import posixpath
import re
from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeVar

from weightcast.shared.base.errors import EngineFailed
from weightcast.subscriber.engines.base import Confirmation, EngineSpec, Misconfigured, Timeouts
from weightcast.subscriber.engines.wire import Wire

ASKED = 8
"""times at the first look, and after a change: a balancer that picks one of two at random shows only one of
them in 1 of 128 cases"""
STEADY = 24
"""equal answers in a row after which one process is believed in again"""
_REMEMBERED = 64
T = TypeVar("T")


class SeveralProcesses(Misconfigured):
    unfit = True

    def __init__(self, url: str) -> None:
        super().__init__(
            f"two or more processes answer at {url} (a load balancer?)",
            remedy="give each replica its own --engine with its own address",
        )


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
        """The last answer; where it has no identity there is nothing to compare. Raises SeveralProcesses, and
        what `ask` raises."""
        before = self._now
        if not self._lasting:
            self._forget_all_but(before)
        for number in range(1, ASKED + 1):
            answer = ask()
            found = identity(answer)
            self._note(found)
            if found is None or (number >= self._times and self._now == before) or self._returned:
                break
        if self._several:
            raise SeveralProcesses(self._url)
        return answer

    @property
    def _returned(self) -> bool:
        return self._several and self._equal == 0

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


NONE, UNKNOWN = "none", "unknown"
CANNOT_TELL = "cannot tell whether a draft model is loaded: a reload would leave its weights old"
_WEIGHTLESS = frozenset({"ngram", "ngram_gpu", "suffix", "extract_hidden_states", "uno", "none"})
"""methods that draft without a model of their own"""
_TEXT = re.compile(r"speculative_config=(None\b|SpeculativeConfig\(method='([^']{1,100})')")
_SGLANG_RELOADS = (0, 5, 11)


class Adapter:
    """What the adapters of all kinds have."""

    def __init__(self, spec: EngineSpec, wire: Wire, timeouts: Timeouts) -> None:
        self.spec = spec
        self._wire = wire
        self._timeouts = timeouts
        self._processes = Identities(spec.shown_url)
        self._labels = Identities(spec.shown_url, lasting=False)

    @property
    def copies_weights(self) -> bool:
        return self.spec.copies_weights

    def close(self) -> None:
        self._wire.close()

    def _steady_label(self, process: str | None, ask: Callable[[], str | None]) -> str | None:
        """Of an engine that does not name its process: read several times, since only labels may differ."""
        return ask() if process is not None else self._labels.read(ask, lambda label: label)

    def _forget_labels(self) -> None:
        """Before a reload gives it another one."""
        self._labels = Identities(self.spec.shown_url, lasting=False)

    def _require_label(self, shown: str | None, label: str) -> Confirmation:
        if shown != label:
            raise EngineFailed(
                f"{self.spec.shown_url} reports weights {shown!r} after a reload of {label!r}",
                remedy="see the engine's log; restart it if this stays",
            )
        return "label"


class StaleDrafter(Misconfigured):
    unfit = True


class Settings:
    """How a server was started, as it says itself; asked once of every process. Where no process is known, it
    is asked several times, and `of_start` of its settings tells one start from another."""

    def __init__(
        self,
        url: str,
        ask: Callable[[float], Mapping[str, object]],
        of_start: Callable[[Mapping[str, object]], object],
    ) -> None:
        self._url, self._ask, self._of_start = url, ask, of_start
        self._told: Mapping[str, object] | None = None
        self.process: str | None = None

    def of(self, process: str | None, seconds: float) -> Mapping[str, object]:
        """Raises SeveralProcesses, and what `ask` raises."""
        if self._told is None or process != self.process:
            self.process, self._told = process, None
            processes = Identities(self._url)
            self._told = processes.read(lambda: self._ask(seconds), self._identity)
        return self._told

    def _identity(self, told: Mapping[str, object]) -> str | None:
        identity = None if self.process is not None else self._of_start(told)
        return None if identity is None else repr(identity)

    def forget(self) -> None:
        """A server that was away may be another one."""
        self._told = None


def vllm_drafter(config: object) -> str:
    """The method in `vllm_config`, in either of the formats of `/server_info`."""
    if isinstance(config, str):
        found = _TEXT.search(config)
        return UNKNOWN if found is None else drafter_named(found[2])
    if not isinstance(config, dict) or "speculative_config" not in config:
        return UNKNOWN
    speculative = config["speculative_config"]
    if isinstance(speculative, dict):
        return drafter_named(speculative.get("method") or "draft_model")
    return NONE if speculative is None else vllm_drafter(f"speculative_config={speculative}")


def require_vllm(spec: EngineSpec, drafter: str) -> str:
    """What to show. Raises StaleDrafter for a model that every reload would leave old."""
    if drafter in (NONE, UNKNOWN) or spec.drafter == "keep":
        return drafter
    raise StaleDrafter(
        f"{spec.shown_url} runs a draft model ({drafter}), which vLLM would leave at its old weights",
        remedy="start vLLM without --speculative-config, or give drafter=keep to leave it old",
    )


def require_sglang(spec: EngineSpec, settings: Mapping[str, object]) -> str:
    """As `require_vllm`. `settings`: of the server, as `/server_info` tells them."""
    if "speculative_algorithm" not in settings:
        return UNKNOWN
    algorithm = settings["speculative_algorithm"]
    drafter = NONE if algorithm is None else drafter_named(algorithm)
    if drafter == NONE or spec.drafter == "keep":
        return drafter
    draft, main = (settings.get(key) for key in ("speculative_draft_model_path", "model_path"))
    release, runs = settings.get("version"), f"{spec.shown_url} runs a draft model ({drafter})"
    if isinstance(release, str) and _numbers(release) < _SGLANG_RELOADS:
        raise StaleDrafter(
            f"{runs}, which SGLang {release[:20]} would leave at its old weights",
            remedy="upgrade SGLang to 0.5.11 or later, start it without a draft model, or give drafter=keep",
        )
    if draft and _place(draft) not in (_place(main), _place(spec.path)):
        raise StaleDrafter(
            f"{runs} of another checkpoint, {str(draft)[:100]}",
            remedy="start SGLang without --speculative-draft-model-path, or give drafter=keep",
        )
    return drafter


def drafter_named(method: object) -> str:
    """As it is shown; `none` for what has no weights."""
    name = str(method)[:100] if method else NONE
    return NONE if name.lower() in _WEIGHTLESS else name


def _place(path: object) -> str:
    return posixpath.normpath(str(path))


def _numbers(release: str) -> tuple[int, ...]:
    """Of `0.5.9`, `0.5.10.post1`, `0.5.11rc0`. Any other form counts as new."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", release)
    return _SGLANG_RELOADS if found is None else tuple(map(int, found.groups()))

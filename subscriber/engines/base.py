"""The edge between weightcast and an inference engine: the `--engine` option, what an engine says of itself,
and what its answers prove.
"""

from __future__ import annotations

import difflib
import ipaddress
import posixpath
import re
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args
from urllib.parse import unquote, urlsplit

from weightcast.shared.base.choices import size
from weightcast.shared.base.errors import USAGE, EngineFailed, Refused
from weightcast.shared.daemon.environment import hide_queries, http_parts, port_of

Kind = Literal["sglang", "vllm", "webhook"]
Policy = Literal["recompute", "wait", "abort"]
"""What becomes of requests in flight: recomputed under the new weights, finished before, or ended early."""
Via = Literal["reload", "live", "ipc"]
"""How versions come into an engine: from disk, as patches of its memory where that can be done, or from this
host's memory."""
Confirmation = Literal["digest", "label", "status-only"]
"""What says that the engine took the weights, from strongest to weakest."""

Drafter = Literal["refuse", "keep"]
"""What becomes of an engine with a draft model that a reload would leave old."""
KINDS: tuple[Kind, ...] = get_args(Kind)
POLICIES: tuple[Policy, ...] = get_args(Policy)
SYNTAX = "give KIND=URL[,KEY=VALUE...]; kinds: sglang, vllm, webhook; keys and values: docs/engines.md"
NO_ROUTE = frozenset({404, 405})
"""what an HTTP server answers where it has no such route"""
QUOTED = 300
"""characters of a reply that an error message repeats"""
Address = tuple[str, int, str, str]
"""host, port, path, query"""
_LOOPBACK = frozenset({"127.0.0.1", "::1", "0.0.0.0", "::"})
_LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})
_USER = re.compile(r"[^/?#]*//[^/?#]*@")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@\[\]-]{0,99}").fullmatch
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*").fullmatch
_TRUTH = ("true", "false").__contains__
_MOST_SECONDS = 86400.0


def _seconds(text: str) -> bool:
    return bool(re.fullmatch(r"\d{1,6}(\.\d{1,3})?", text, re.ASCII)) and 0 < float(text) <= _MOST_SECONDS


def _size(text: str) -> bool:
    with suppress(ValueError):
        return size(text) >= 1 << 20
    return False


OPTIONS: Mapping[str, Callable[[str], object]] = {
    "path": bool,
    "via": get_args(Via).__contains__,
    "policy": POLICIES.__contains__,
    "name": _NAME,
    "copies": _TRUTH,
    "api_key_env": _VARIABLE,
    "admin_api_key_env": _VARIABLE,
    "deadline": _seconds,
    "ca": bool,
    "verify": _TRUTH,
    "drafter": get_args(Drafter).__contains__,
    "draft": bool,
    "devices": re.compile(r"[\w./-]{1,100}(,[\w./-]{1,100}){0,63}", re.ASCII).fullmatch,
    "buffer": _size,
}
"""Whether a value fits."""
_CONVERTED: Mapping[str, Callable[[str], object]] = {
    "copies": "true".__eq__,
    "verify": "true".__eq__,
    "deadline": float,
    "ca": Path,
    "devices": lambda text: tuple(text.split(",")),
    "buffer": size,
}


def without_query(url: str) -> str:
    """The URL as people may see it: receivers take tokens in its query."""
    place, _, query = url.partition("?")
    return f"{place}?..." if query else place


class BadEngineOption(Refused):
    """A usage error: the text of an `--engine` option is wrong."""

    exit_code = USAGE

    def __init__(self, message: str, *, remedy: str = SYNTAX) -> None:
        super().__init__(hide_queries(message), remedy=remedy)


@dataclass(frozen=True)
class EngineSpec:
    """One `--engine` option. Holds no secret: `api_key_env` and `admin_api_key_env` name variables."""

    kind: Kind
    url: str
    """of an inference server: without a slash at the end"""
    path: str
    """the local checkpoint as the engine sees it; absolute"""
    name: str
    """unique on a host; the key under which state and status speak of the engine"""
    policy: Policy = "recompute"
    copies_weights: bool = True
    api_key_env: str | None = None
    admin_api_key_env: str | None = None
    """of SGLang's --admin-api-key"""
    deadline: float | None = None
    """seconds that it may take to reload; None: as all engines of the host"""
    ca: Path | None = None
    """certificates that an https engine is checked against; None: the system's"""
    verify: bool = True
    """False: whoever answers at the URL is believed to be the engine"""
    via: Via = "reload"
    drafter: Drafter = "refuse"
    draft: str = ""
    """the draft model's local checkpoint as the engine sees it; empty: it loads none"""
    devices: tuple[str, ...] = ()
    """with via=ipc: UUIDs of this host's GPUs; empty: as nvidia-smi lists them"""
    buffer: int = 4 << 30
    """with via=ipc: bytes of shared memory that a load may take"""
    local: Path | None = field(default=None, compare=False)
    """the local checkpoint as the subscriber sees it"""

    @property
    def shown_url(self) -> str:
        """For status, log and errors."""
        return without_query(self.url)


@dataclass(frozen=True)
class HeldWeights:
    """The weights that an engine states to hold."""

    version: int
    root: str


@dataclass(frozen=True)
class EngineFacts:
    """What an engine says about itself now; None where it does not say."""

    reachable: bool
    absent: bool = False
    """The connection was refused: no process listens there. An engine that is silent otherwise may be
    serving."""
    label: str | None = None
    process: str | None = None
    """differs after a restart"""
    unique: bool = False
    """no other process ever tells the same `process`"""
    paused: bool | None = None
    software: str | None = None
    source: str | None = None
    """the directory that it says it loaded last"""
    held: HeldWeights | None = None
    in_doubt: bool = False
    """it says itself that its weights are none that may be served"""
    unpatchable: str = ""
    """why its memory cannot be patched at all; empty: it can, or is never asked to"""
    hindrance: str = ""
    """why it counts as not reachable although something answers"""
    remedy: str = ""
    """against the hindrance; of an engine that is reachable: against `process` being None"""
    unfit: bool = False
    """it answers, and cannot be used as it was started: waiting does not help"""
    drafter: str = ""
    """its draft model: `none`, the method, or `unknown`; empty: not asked"""

    @property
    def tell_something(self) -> bool:
        """A proxy that answers for an engine that is gone tells nothing of this."""
        told = (self.label, self.process, self.paused, self.software, self.source)
        return any(one is not None for one in told)


@dataclass(frozen=True)
class Done:
    """The engine answered that it has the new weights. `resumed`: it paused for them by itself, and goes on;
    `still`: seconds that it says it was paused."""

    resumed: bool = False
    still: float | None = None


@dataclass(frozen=True)
class Intact:
    """The reload was never sent, or the reply proves that the weights from before are untouched.
    `unpaused`: it was not sent, since the engine did not pause for it."""

    reason: str
    unpaused: EngineFailed | None = None
    untried: bool = False
    """it says nothing about the version: the engine was never asked to load it"""


@dataclass(frozen=True)
class Suspect:
    """Nobody knows which weights the engine holds: it must not generate before a good reload."""

    reason: str


ReloadOutcome = Done | Intact | Suspect


@dataclass(frozen=True)
class Timeouts:
    """Seconds until a call counts as unanswered."""

    connect: float = 5.0
    probe: float = 5.0
    control: float = 30.0
    """pause, resume, labels"""
    drain: float = 300.0
    """added where the engine first waits for the requests in flight (policy wait)"""
    reload: float = 300.0


class NotSent(EngineFailed):
    """No connection came about: the engine has not seen the request."""


class NobodyListens(NotSent):
    """The connection was refused, by each address of the engine: no process listens."""


class NoReply(EngineFailed):
    """The request may have been carried out: timeout, or the connection was lost."""


class Misconfigured(EngineFailed):
    """The engine answers, and cannot be used as it, or its `--engine` option, is configured."""


class Unfit(Misconfigured):
    """As of EngineFacts: two processes at one address, a draft model that a reload would leave old."""


class Unhandled(Misconfigured):
    """The request was not handled: the engine has no such route as it was started."""


class KeyRefused(Unhandled):
    """Its key is missing or wrong."""


def unreachable(failure: EngineFailed) -> EngineFacts:
    """What a probe answers that failed."""
    if isinstance(failure, Misconfigured):
        return EngineFacts(
            False, hindrance=failure.message, remedy=failure.remedy, unfit=isinstance(failure, Unfit)
        )
    return EngineFacts(False, absent=isinstance(failure, NobodyListens))


def parse_engine(text: str, local: Path, draft: Path | None = None) -> EngineSpec:
    """`text` is the value of an `--engine` option, `local` the local checkpoint, `draft` that of the draft
    model. Raises BadEngineOption."""
    head, *rest = re.split(r",(?=[A-Za-z_]+=)", text)
    kind_text, equals, url = head.partition("=")
    faults: dict[str, str] = {}
    """with their remedies"""
    if http_parts(head) is not None:
        faults["no engine kind"] = f"give sglang={head} or vllm={head}"
    elif not equals or kind_text not in KINDS:
        faults[f"unknown engine kind {kind_text!r}"] = _meant(kind_text, KINDS)
    else:
        url = _checked_url(text, url)
    kind = cast("Kind", kind_text)
    given: dict[str, str] = {}
    for pair in rest:
        key, _, value = pair.partition("=")
        if key not in OPTIONS:
            faults[f"unknown option {key!r}"] = _meant(key, OPTIONS)
        elif key in given:
            faults[f"{key} is given twice"] = SYNTAX
        given[key] = value
    if faults:
        remedy = "; ".join(dict.fromkeys(faults.values()))
        raise BadEngineOption(f"--engine {text!r}: {'; '.join(faults)}", remedy=remedy)
    for key, value in given.items():
        _check(text, key, value)
    values: dict[str, Any] = {
        "path": str(local.absolute()),
        "name": f"{kind}@{urlsplit(url).netloc}",
        "copies": "false" if kind == "webhook" else "true",
        "draft": "" if draft is None or given.get("drafter") == "keep" else str(draft.absolute()),
        **given,
    }
    values |= {key: convert(values[key]) for key, convert in _CONVERTED.items() if key in values}
    spec = EngineSpec(kind, url, copies_weights=values.pop("copies"), local=local, **values)
    _check(text, "name", spec.name)
    followed = draft is not None and spec.drafter != "keep"
    for fault, applies in _contradictions(spec, given.keys(), followed=followed).items():
        if applies:
            raise BadEngineOption(f"--engine {text!r}: {fault}")
    return spec


def _contradictions(spec: EngineSpec, given: Collection[str], *, followed: bool) -> Mapping[str, bool]:
    has_key = spec.api_key_env is not None or spec.admin_api_key_env is not None
    is_copied = spec.kind != "webhook" and spec.copies_weights
    return {
        f"via={spec.via} is for vllm and sglang, which copy weights": spec.via != "reload" and not is_copied,
        "via=ipc needs an engine on this host: give its loopback address": (
            spec.via == "ipc" and address_of(spec.url)[0] != "localhost"
        ),
        "devices= and buffer= are for via=ipc": (
            spec.via != "ipc" and not {"devices", "buffer"}.isdisjoint(given)
        ),
        "with --draft, give vllm with via=live, which reloads a draft model, or drafter=keep": (
            spec.draft != "" and (spec.kind != "vllm" or spec.via != "live")
        ),
        "draft= needs --draft, and no drafter=keep": "draft" in given and not followed,
        f"path={spec.path!r} must be absolute, as the engine sees it": not spec.path.startswith("/"),
        "admin_api_key_env= is for sglang; use api_key_env=": (
            spec.kind != "sglang" and spec.admin_api_key_env is not None
        ),
        "ca= and verify= are for https URLs": (
            not {"ca", "verify"}.isdisjoint(given) and not spec.url.startswith("https:")
        ),
        "verify=false leaves ca= without a use": not spec.verify and spec.ca is not None,
        "verify=false would give the API key to whoever answers": not spec.verify and has_key,
    }


def parse_engines(texts: Sequence[str], local: Path, draft: Path | None = None) -> tuple[EngineSpec, ...]:
    """All `--engine` options of a host. Raises BadEngineOption, also for two of one name or address."""
    specs = tuple(parse_engine(text, local, draft) for text in texts)
    seen: dict[Address, str] = {}
    for spec in specs:
        address = address_of(spec.url)
        if address in seen:
            raise BadEngineOption(
                f"two --engine options are one engine: {seen[address]} and {spec.shown_url}"
            )
        seen[address] = spec.shown_url
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise BadEngineOption(f"two --engine options are named {name}: give them name=")
    return specs


def address_of(url: str) -> Address:
    """Equal for URLs that lead to one place, as far as they tell. One port of the loopback is one place,
    whatever the scheme and the family of addresses. Raises ValueError for an invalid URL."""
    parts = urlsplit(url)
    path = posixpath.normpath(f"/{unquote(parts.path).lstrip('/')}")
    return _host(parts.hostname or ""), port_of(parts), path, parts.query


def _host(name: str) -> str:
    name = name.rstrip(".")
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        try:
            # 127.1 and 0x7f000001 are addresses to a resolver
            address = ipaddress.ip_address(socket.inet_aton(name))
        except (OSError, ValueError):
            return "localhost" if name in _LOOPBACK_NAMES else name
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return "localhost" if str(address) in _LOOPBACK else str(address)


def _check(text: str, key: str, value: str) -> None:
    if not value or "\0" in value or not OPTIONS[key](value):
        raise BadEngineOption(f"--engine {text!r}: {key}={value!r} is not valid")


def _meant(given: str, known: Collection[str]) -> str:
    close = [] if given in known else difflib.get_close_matches(given.lower(), known, 1)
    return f"did you mean {close[0]}?" if close else SYNTAX


def _checked_url(text: str, url: str) -> str:
    if _USER.match(url):
        raise BadEngineOption("--engine: a URL with a password would be logged; use api_key_env=")
    parts = http_parts(url)
    if parts is None or "#" in url:
        raise BadEngineOption(f"--engine {text!r}: expected an http or https URL, got {url!r}")
    # schemes are read in any case (RFC 3986, 3.1), and compared in this one from here on
    url = parts.scheme + url[len(parts.scheme) :]
    if text.startswith("webhook="):
        return url.removesuffix("?")
    if "?" in url:
        raise BadEngineOption(f"--engine {text!r}: the URL of an inference server has no query")
    if (root := url.rstrip("/").removesuffix("/v1")) != url.rstrip("/"):
        raise BadEngineOption(f"--engine {text!r}: the URL ends in /v1", remedy=f"give {root}")
    return url.rstrip("/")

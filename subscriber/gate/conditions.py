"""What a request asks of the version that answers it, in headers or in the `weightcast` member of its JSON
body. docs/gate.md has the table."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Literal

from weightcast.subscriber.gate import stitch

MEMBER = "weightcast"
_HEADER = "weightcast-"
_SESSION_LIMIT = 256
_SESSION_HEADERS = ("modal-session-id", "x-smg-routing-key")
"""by which trainers made for Stitch and for SGLang's router name a session"""

UpdatePolicy = Literal["pass", "drain", "partial"]
"""What an update of an engine does with its requests: those that allow the new version go on as the engine's
own pause has it; or all have time to finish; or all end with what they have."""


_NUMBERS = ("min_version", "exact_version", "max_lag")


class BadCondition(ValueError):
    pass


@dataclass(frozen=True)
class Conditions:
    """`wait`: seconds that the request may wait for a version that it allows; None: it does not say."""

    min_version: int | None = None
    exact_version: int | None = None
    max_lag: int | None = None
    session: str = ""
    wait: float | None = None

    @classmethod
    def of(cls, headers: Mapping[str, str], member: Mapping[str, Any]) -> Conditions:
        """`headers`: with names in lower case. Raises BadCondition for a name or a value that is none, and
        for two values of one condition."""
        named = (headers[name][:_SESSION_LIMIT] for name in _SESSION_HEADERS if name in headers)
        given: dict[str, Any] = {}
        for name, text in headers.items():
            if name.startswith(_HEADER):
                key = name.removeprefix(_HEADER).replace("-", "_")
                given[key] = text if key not in _NUMBERS and key != "wait" else _number(name, text)
        for key, value in member.items():
            if key in given and given[key] != value:
                raise BadCondition(f"{key} has one value in the headers and another one in the body")
            given[key] = value
        given.setdefault("session", next(named, None))
        given = {key: value for key, value in given.items() if value is not None}
        for key, value in given.items():
            _check(key, value)
        found = cls(**given)
        if found.exact_version is not None and found.exact_version < (found.min_version or 0):
            raise BadCondition(
                f"exact_version {found.exact_version} is below min_version {found.min_version}"
            )
        return found

    def allow(self, version: int, target: int) -> bool:
        """`target`: the version that the host is to reach."""
        if self.exact_version is not None and version != self.exact_version:
            return False
        return version >= self._least(target)

    def _least(self, target: int) -> int:
        return max(self.min_version or 0, 0 if self.max_lag is None else target - self.max_lag)

    def wanted(self, target: int) -> str:
        """The versions that are allowed, for messages."""
        exact = self.exact_version
        return f"at least {self._least(target)}" if exact is None else f"exactly {exact}"

    def for_gate(self, target: int) -> dict[str, str]:
        """Headers for a gate, whose target may be older: all but the session, which is text. It does not
        wait for a version: the gateway does, for one at any host."""
        exact, least = self.exact_version, self._least(target)
        asked = {
            "wait": 0,
            "min-version": None if exact is not None and exact < least else least or None,
            "exact-version": exact,
            "max-lag": self.max_lag,
        }
        return {_HEADER + name: str(value) for name, value in asked.items() if value is not None}

    def asked(self) -> dict[str, object]:
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in found.items() if value not in (None, "")}


@dataclass(frozen=True)
class Abort:
    """Which requests are to end. None: whatever they have."""

    rid: str | None = None
    session: str | None = None
    version: int | None = None

    @classmethod
    def of(cls, body: bytes, *, by_rid: bool) -> Abort:
        """`by_rid`: as SGLang is asked. Raises BadCondition."""
        try:
            asked = json.loads(body or b"{}")
            if by_rid:
                return cls(rid=None if asked.get("abort_all") is True else str(asked.get("rid") or ""))
            return cls(session=asked.get("session"), version=asked.get("version"))
        except (ValueError, AttributeError, RecursionError):
            raise BadCondition("send {}, or an object with session, version or rid") from None

    @property
    def is_narrow(self) -> bool:
        """Of requests whose name the caller knows."""
        return bool(self.rid or self.session)

    def fits(self, conditions: Conditions, rids: Iterable[str], version: int) -> bool:
        return (
            self.rid in (None, *rids)
            and self.session in (None, conditions.session)
            and self.version in (None, version)
        )


def affinity(session: str, place: str) -> bytes:
    """The place with the highest takes the session: all who choose agree, and a place that goes moves its own
    sessions alone."""
    return hashlib.blake2b(f"{session}\0{place}".encode(), digest_size=8).digest()


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise BadCondition(f"{name}: {text[:40]!r} is not a number") from None
    return int(number) if number.is_integer() else number


def _check(key: str, value: object) -> None:
    if key == "session":
        fits = isinstance(value, str) and len(value) <= _SESSION_LIMIT
    elif key == "wait":
        fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 86400
    elif key in _NUMBERS:
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    else:
        known = ", ".join(each.name for each in fields(Conditions))
        raise BadCondition(f"{key[:40]!r} is not a condition; known: {known}")
    if not fits:
        raise BadCondition(f"{key}: {str(value)[:40]!r} is out of range")


@dataclass(frozen=True)
class Asked:
    """What a body asks: its `weightcast` member, and the body without it. `rids`: the caller's own names of
    the request. `is_stitch`: asked in Stitch's dialect, which wants its answer in it. `named`: what may be an
    adapter's name."""

    member: Mapping[str, Any]
    body: bytes
    rids: tuple[str, ...] = ()
    is_stitch: bool = False
    named: tuple[str, ...] = ()

    @classmethod
    def of(cls, body: bytes, *, names: bool = False) -> Asked:
        """A body that is not an object stays as it is. `names`: looks for names of adapters, too. Raises
        BadCondition."""
        members = (*_ADAPTER_IN.values(),) if names else ()
        value = _members(body, (MEMBER, stitch.MEMBER, "rid", *members))
        given = len(value)
        member = value.pop(MEMBER, None)
        if not isinstance(member, dict | None):
            raise BadCondition(f"{MEMBER} must be an object")
        rid, foreign = value.get("rid"), value.get(stitch.MEMBER)
        rids = tuple(one for one in (rid if isinstance(rid, list) else [rid]) if isinstance(one, str) and one)
        is_stitch = isinstance(foreign, dict)
        if is_stitch:
            member = stitch.conditions(value.pop(stitch.MEMBER)) | (member or {})
        left = body if len(value) == given else json.dumps(value).encode()
        named = tuple(text for key in members if isinstance(text := value.get(key), str))
        return cls(member or {}, left, rids, is_stitch, named)

    def body_for(self, kind: str, label: str) -> bytes:
        """For an engine of this kind, which knows the adapter as `label`."""
        value = json.loads(self.body)
        return json.dumps({**value, _ADAPTER_IN[kind]: label}).encode()


_ADAPTER_IN = {"sglang": "lora_path", "vllm": "model"}
"""the member of a request that names an adapter, by the kind of engine"""


def adapter_named(texts: Iterable[str], adapters: Collection[str]) -> tuple[str, int | None]:
    """The first of the texts that names an adapter: its name, empty where none does, and a version."""
    for text in texts:
        name, at, version = text.removeprefix("adapter/").partition("@")
        if name in adapters and (not at or (version.isdecimal() and version.isascii() and len(version) < 16)):
            return name, int(version) if at else None
    return "", None


def with_members(body: bytes, added: Mapping[str, str]) -> bytes:
    """An object with the members `added`: before the text of a member that is there (of a list: of each),
    with a dot between them. A body that is not an object stays as it is."""
    start = len(body) - len(body.lstrip())
    if not added or body[start : start + 1] != b"{":
        return body
    value = _members(body, added)
    if not value:
        rest = body[start + 1 :]
        comma = b"" if rest.lstrip()[:1] == b"}" else b","
        return b"{" + json.dumps(dict(added))[1:-1].encode() + comma + rest
    for name, text in added.items():
        own = value.get(name)
        value[name] = [_joined(text, one) for one in own] if isinstance(own, list) else _joined(text, own)
    return json.dumps(value).encode()


def batch_of(asked: Mapping[str, Any]) -> list[Any] | None:
    """The prompts of a request that lists them; None: it has one prompt."""
    given = next((asked[name] for name in ("prompt", "text", "input_ids") if name in asked), None)
    return given if isinstance(given, list) and given and isinstance(given[0], list | str) else None


def answers_of(body: bytes) -> int:
    """How many a request asks for: `n` to each of its prompts."""
    with suppress(ValueError, AttributeError, LookupError, RecursionError, TypeError):
        asked = json.loads(body)
        each = asked.get("n") or (asked.get("sampling_params") or {}).get("n") or 1
        return len(batch_of(asked) or [0]) * int(each)
    return 1


def _members(body: bytes, names: Iterable[str]) -> dict[str, Any]:
    """Of an object that may have one of these members; empty for any other body, which is not parsed: prompts
    are long."""
    # an escape may hide a name
    if not any(f'"{name}"'.encode() in body for name in names) and b"\\u" not in body:
        return {}
    with suppress(ValueError, RecursionError):
        value = json.loads(body)
        return value if isinstance(value, dict) else {}
    return {}


def _joined(text: str, own: object) -> str:
    return f"{text}.{own}" if own else text

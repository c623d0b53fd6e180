"""What `weightcast status` says first: one sentence, the remedy, and the facts that an operator asks for.

Rules without IO, over the JSON of either daemon; members of other releases may be absent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightcast.shared.errors import FIX_ENGINE
from weightcast.shared.service.fleet import age

Answer = Mapping[str, Any]
Row = tuple[str, str]
_REASONS = 2
"""in the sentence"""
_NEWEST = 2
"""rows of a kind"""


@dataclass(frozen=True)
class Summary:
    well: bool
    sentence: str
    remedy: str
    rows: Sequence[Row]


def summary(answer: Answer) -> Summary:
    return _publisher(answer) if answer.get("role") == "publisher" else _host(answer)


def _publisher(answer: Answer) -> Summary:
    publications, refused = _list(answer, "publications"), _of(answer, "last_refused")
    newest = publications[0] if publications else {}
    # by the daemon's own clock
    now = answer.get("now") or time.time()
    is_refusing = bool(refused) and refused.get("at", 0.0) > newest.get("at", 0.0)
    version = answer.get("version")
    where = "no version yet" if version is None else f"version {version}{_when(newest, version, now)}"
    remedy = ""
    if not answer.get("ready"):
        sentence, remedy = (
            f"publisher is not ready: {_reasons(answer)}",
            _of(answer, "last_error").get("remedy", ""),
        )
    elif is_refusing:
        what = f"{refused.get('source')} {age(now - refused.get('at', now))} ago: {refused.get('message')}"
        sentence, remedy = f"publisher is ready at {where}, but refused {what}", refused.get("remedy", "")
    elif answer.get("held"):
        sentence, remedy = (
            f"publisher is held at {where}: {answer['held']}",
            "`weightcast channel resume` ends it",
        )
    else:
        sentence = f"publisher is ready at {where}"
    well = bool(answer.get("ready")) and not is_refusing and not answer.get("held")
    return Summary(well, sentence, remedy, list(_publisher_rows(answer)))


def _when(newest: Answer, version: int, now: float) -> str:
    if newest.get("version") != version:
        return ""
    step = "" if newest.get("step") is None else f"step {newest['step']}, "
    if newest.get("resumed_from_step") is not None:
        step += f"after step {newest['resumed_from_step']}, "
    return f" ({step}published {age(max(0.0, now - newest.get('at', now)))} ago)"


def _publisher_rows(answer: Answer) -> Iterator[Row]:
    doing, inbox = _of(answer, "publishing"), _of(answer, "inbox")
    yield from _places(answer)
    yield "publishing", f"{doing.get('source')}: {doing.get('phase')}" if doing else "nothing now"
    yield "queue", str(len(_list(answer, "queue")))
    if inbox:
        counts = {name.removesuffix("_count"): n for name, n in inbox.items() if name.endswith("_count")}
        said = ", ".join(f"{number} {what.replace('_', ' ')}" for what, number in counts.items() if number)
        yield "inbox", f"{inbox.get('watch')}: {said or 'nothing waits'}"
    for each in _list(inbox, "waiting")[:_NEWEST]:
        yield "waiting", f"{each.get('name')}: {each.get('reason')}"
    for each in _list(inbox, "left_alone")[-_NEWEST:]:
        yield "left alone", f"{each.get('name')}: {each.get('reason')} ({each.get('remedy')})"
    for each in _list(inbox, "refused")[-_NEWEST:]:
        yield "refused", f"{each.get('name')}: {_of(each, 'error').get('message')}"
    hosts = _list(answer, "hosts")
    yield "config changed", ", ".join(_texts(answer, "config_changed"))
    yield "hosts", f"{sum(host.get('state') == 'ready' for host in hosts)} of {len(hosts)} say ready"
    yield from _troubles(answer)
    yield "maintenance", _of(answer, "upkeep").get("problem", "")


def _host(answer: Answer) -> Summary:
    engines = _list(answer, "engines")
    well, error = bool(answer.get("ready")), _of(answer, "last_error")
    name, served = answer.get("host") or "host", answer.get("served_version")
    failed = [engine for engine in engines if engine.get("state") == "failed"]
    remedy = error.get("remedy") or (FIX_ENGINE if failed else "")
    if not well:
        return Summary(False, f"{name} is not ready: {_reasons(answer)}", remedy, list(_host_rows(answer)))
    target = answer.get("target_version")
    newest = "" if target in (None, served) else f", version {target} is its target"
    degraded = _texts(answer, "degraded")
    but = f", but degraded: {_some(degraded)}" if degraded else ""
    sentence = f"{name} is ready: serves version {served}{newest}{but}"
    return Summary(not degraded, sentence, remedy if degraded else "", list(_host_rows(answer)))


def _host_rows(answer: Answer) -> Iterator[Row]:
    yield from _places(answer)
    target, versions = (
        answer.get("target_version"),
        [answer.get("local_version"), answer.get("served_version")],
    )
    yield "target", f"{answer.get('target')}{'' if target is None else f' ({target})'}"
    yield "versions", "local {}, served {}".format(*("-" if each is None else each for each in versions))
    # a step that ended says nothing of engines that are still to follow
    idle = answer.get("state") == "idle" and not answer.get("ready")
    yield "doing", "waiting for what is named above" if idle else str(answer.get("state"))
    for engine in _list(answer, "engines"):
        version = engine.get("version")
        held = "no version" if version is None else f"version {version}"
        said = f"{engine.get('name')} ({engine.get('kind')}) {engine.get('state')}, {held}"
        yield "engine", f"{said}: {engine['reason']}" if engine.get("reason") else said
    for update in _list(answer, "updates")[-1:]:
        total = _of(update, "seconds").get("total", 0.0)
        yield "last update", f"{update.get('kind')} {update.get('version')} in {total:.2f} s"
    for blocked in _list(answer, "blocked")[-_NEWEST:]:
        yield "blocked", f"version {blocked.get('version')}: {blocked.get('reason')}"
    yield from _troubles(answer)


def _places(answer: Answer) -> Iterator[Row]:
    yield "run", str(answer.get("run_id") or "-")
    yield "channel", str(answer.get("channel"))
    yield "local", str(answer.get("local"))


def _troubles(answer: Answer) -> Iterator[Row]:
    error = _of(answer, "last_error")
    known = error.get("message") == _of(answer, "last_refused").get("message")
    yield "last error", "" if known else str(error.get("message", ""))
    yield "reports", str(answer.get("report_error") or "")
    verify = _of(answer, "verify")
    yield "verify", f"{verify['faults']} faults: {verify.get('last_fault')}" if verify.get("faults") else ""
    yield "kernels", str(_of(answer, "kernels").get("problem") or "")


def _reasons(answer: Answer) -> str:
    return _some(_texts(answer, "not_ready_reasons")) or "it gives no reason"


def _some(texts: Sequence[str]) -> str:
    more = f" (and {len(texts) - _REASONS} more)" if len(texts) > _REASONS else ""
    return "; ".join(texts[:_REASONS]) + more


def _of(answer: Answer, name: str) -> Answer:
    found = answer.get(name)
    return found if isinstance(found, dict) else {}


def _list(answer: Answer, name: str) -> list[Answer]:
    found = answer.get(name)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _texts(answer: Answer, name: str) -> list[str]:
    found = answer.get(name)
    return [str(each) for each in found] if isinstance(found, list) else []

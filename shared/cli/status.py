"""Commands `status` and `wake`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from weightcast.shared.base.errors import FIX_ENGINE, RESUME, age, counted
from weightcast.shared.cli.options import Number, daemon_options, json_option, option
from weightcast.shared.cli.output import Output, facts_table, time_text
from weightcast.shared.files.paths import printable

if TYPE_CHECKING:
    from rich.console import Console

    from weightcast.shared.daemon.tls import TrustFor

_TIMES = ("at", "now", "since", "created", "last_full_hash", "full_pass", "last_fault_at", "step_began")

url_argument = click.argument(
    "url", help="Address of a daemon: 127.0.0.1:8341, http[s]://HOST:PORT, or a port of this machine."
)
timeout_option = option(
    "--timeout", type=Number(0.1, 3600), default=10.0, help="Seconds to wait for the answer."
)


@click.command
@url_argument
@daemon_options
@option("--verbose", "-v", is_flag=True, help="Show every field of the status.")
@timeout_option
@json_option
def status(
    url: str, token: str | None, trust_for: TrustFor, verbose: bool, timeout: float, as_json: bool
) -> None:
    """Show whether a publisher, subscriber, gate or gateway is ready, its versions, and what is wrong."""
    from weightcast.shared.daemon.client import Daemon

    with Daemon(url, token, timeout, trust_for=trust_for) as daemon:
        answer = daemon.ask_object("GET", "/v1/status")
    show = _show_all if verbose else _show
    Output(json=as_json).result(answer, lambda console: show(console, answer))


@click.command
@url_argument
@daemon_options
@timeout_option
@json_option
def wake(url: str, token: str | None, trust_for: TrustFor, timeout: float, as_json: bool) -> None:
    """Make a daemon poll now. A subscriber also retries failed engines."""
    from weightcast.shared.daemon.client import Daemon

    with Daemon(url, token, timeout, trust_for=trust_for) as daemon:
        daemon.ask("POST", "/v1/wake", b"")
        facts = {"url": daemon.url, "woken": True}
    Output(json=as_json).result(facts, lambda console: console.print(f"{facts['url']} is polling now"))


def _show(console: Console, answer: dict[str, Any]) -> None:
    if "ready" not in answer:
        # not a status of ours: nothing is passed over
        _show_all(console, answer)
        return
    from rich.text import Text

    found = summary(answer)
    console.print(Text(printable(found.sentence), style="green" if found.well else "bold red"))
    if found.remedy:
        console.print(f"remedy: {printable(found.remedy)}")
    console.print(facts_table((name, printable(value)) for name, value in found.rows))


def _show_all(console: Console, answer: dict[str, Any]) -> None:
    console.print(facts_table(_flat("", answer)))


def _flat(prefix: str, value: Any) -> list[tuple[str, str]]:
    """Nested members as dotted names; an object in a list is one row, or a long history hides the rest."""
    if isinstance(value, dict) and value:
        return [
            row for name, each in value.items() for row in _flat(f"{prefix}.{name}" if prefix else name, each)
        ]
    if isinstance(value, list) and any(isinstance(each, (dict, list)) for each in value):
        return [(printable(f"{prefix}[{number}]"), _inline(each)) for number, each in enumerate(value)]
    return [(printable(prefix), _member(prefix, value))]


def _inline(value: Any) -> str:
    return ", ".join(f"{name} {cell}".strip() for name, cell in _flat("", value))


def _member(name: str, value: Any) -> str:
    if isinstance(value, float) and name.rpartition(".")[2] in _TIMES:
        return time_text(value)
    return _cell(value)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_cell, value)) or "-"
    if value is None or value == {}:
        return "-"
    return printable(value if isinstance(value, str) else json.dumps(value))


Answer = Mapping[str, Any]
Row = tuple[str, str]
Finds = Callable[[Answer], tuple[str, str]]
_MOST = 2
"""reasons in the sentence, rows of a kind"""


@dataclass(frozen=True)
class Summary:
    well: bool
    sentence: str
    remedy: str
    rows: Sequence[Row]


def summary(answer: Answer) -> Summary:
    role = str(answer.get("role", "host"))
    says, finds, lists = _ROLES.get(role, _ROLES["host"])
    name = role if role in ("publisher", "gateway", "gate") else str(answer.get("host") or "host")
    said, (problem, remedy), rows = says(answer), finds(answer), lists(answer)
    ready = "ready" if answer.get("ready") else "not ready"
    sentence = f"{name} is {ready}: {said}{'; ' if problem else ''}{problem}"
    return Summary(not problem, sentence, remedy, [row for row in (*rows, *_troubles(answer)) if row[1]])


def _publisher_says(answer: Answer) -> str:
    """The version and, where this process published it, since when by the daemon's own clock."""
    version, newest = _version(answer, "version"), _newest(answer)
    if not newest or newest.get("version") != answer.get("version"):
        return version
    step = "" if newest.get("step") is None else f"step {newest['step']}, "
    if newest.get("resumed_from_step") is not None:
        step += f"after step {newest['resumed_from_step']}, "
    return f"{version} ({step}published {age(_now(answer) - newest.get('at', 0.0))} ago)"


def _publisher_problem(answer: Answer) -> tuple[str, str]:
    """What keeps it from publishing, and the remedy; empty where nothing does."""
    refused = _of(answer, "last_refused")
    if not answer.get("ready"):
        return _reasons(answer), str(_of(answer, "last_error").get("remedy", ""))
    if answer.get("refused_since_version"):
        ago = age(_now(answer) - refused.get("at", 0.0))
        return f"{refused.get('source')} was refused {ago} ago: {refused.get('message')}", refused.get(
            "remedy", ""
        )
    return (f"held: {answer['held']}", RESUME) if answer.get("held") else ("", "")


def _host_says(answer: Answer) -> str:
    """What engines confirmed lasts longer than they do."""
    engines = _list(answer, "engines")
    gone = engines and all(engine.get("reachable") is False for engine in engines)
    is_past = answer.get("served_version") is not None and (gone or not answer.get("ready"))
    lag = f", {answer['lag_versions']} behind" if answer.get("lag_versions") else ""
    if _is_bare(answer) and not is_past:
        return f"holds {_version(answer, 'served_version')}{lag}, no engine"
    return f"{'last served' if is_past else 'serves'} {_version(answer, 'served_version')}{lag}"


def _is_bare(answer: Answer) -> bool:
    """A host without engines, its own or its group's. Mirrors say nothing of engines."""
    return answer.get("engines") == [] and not answer.get("group")


def _gate_says(answer: Answer) -> str:
    return f"serves {_version(answer, 'version')}"


def _gate_problem(answer: Answer) -> tuple[str, str]:
    if answer.get("ready"):
        return "", ""
    return "no engine takes requests", "ask its subscriber why: `weightcast status HOST:8341`"


def _gate_rows(answer: Answer) -> Iterator[Row]:
    yield "gate of", f"{answer.get('url')}, target {_version(answer, 'target')}"
    yield "requests", f"{sum(_of(answer, 'requests').values())} under way, {answer.get('waiting')} waiting"


def _gateway_says(answer: Answer) -> str:
    hosts = _list(answer, "hosts")
    taking = [host for host in hosts if host.get("version") is not None]
    newest = f", newest {_version(answer, 'served_version')}" if taking else ""
    return f"{len(taking)} of {counted(len(hosts), 'host')} take requests{newest}"


def _gateway_problem(answer: Answer) -> tuple[str, str]:
    out = [host for host in _list(answer, "hosts") if host.get("version") is None]
    reasons = [f"{host.get('name')}: {host.get('reason')}" for host in out]
    return _some(reasons) if answer.get("ready") else _reasons(answer), ""


def _gateway_rows(answer: Answer) -> Iterator[Row]:
    yield "target", _version(answer, "target_version")
    yield "waiting", f"{counted(answer.get('waiting') or 0, 'request')} for a host"
    for host in sorted(_list(answer, "hosts"), key=lambda host: host.get("version") is not None):
        has = counted(host.get("requests") or 0, "request")
        state = host.get("reason") or f"{_version(host, 'version')}, {has}"
        yield f"host {host.get('name')}", f"{host.get('url')}: {state}"


def _host_problem(answer: Answer) -> tuple[str, str]:
    # a silent engine that never served is still starting
    states = [(one.get("state"), one.get("version") is not None) for one in _list(answer, "engines")]
    failed = any(state == "failed" or (state == "silent" and served) for state, served in states)
    of_adapters = [str(one.get("remedy")) for one in _list(answer, "adapters") if one.get("remedy")]
    remedy = FIX_ENGINE if failed else next(iter(of_adapters), "")
    remedy = str(_of(answer, "last_error").get("remedy") or remedy)
    if not answer.get("ready"):
        return _reasons(answer), remedy
    degraded = _some(_texts(answer, "degraded"))
    if degraded:
        return f"degraded: {degraded}", remedy
    fails = _of(answer, "loop").get("failures_in_a_row")
    return (str(_of(answer, "last_error").get("message", "")), remedy) if fails else ("", "")


def _publisher_rows(answer: Answer) -> Iterator[Row]:
    doing, inbox = _of(answer, "publishing"), _of(answer, "inbox")
    yield from _places(answer)
    yield "publishing", f"{doing.get('source')}: {doing.get('phase')}" if doing else "nothing now"
    yield "queue", str(len(_list(answer, "queue")))
    counts = {name.removesuffix("_count"): n for name, n in inbox.items() if name.endswith("_count")}
    said = ", ".join(f"{number} {what.replace('_', ' ')}" for what, number in counts.items() if number)
    yield "inbox", f"{inbox.get('watch')}: {said or 'nothing waits'}" if inbox else ""
    for kind in ("waiting", "left_alone"):
        for each in _list(inbox, kind)[-_MOST:]:
            remedy = f" ({each['remedy']})" if each.get("remedy") else ""
            yield kind.replace("_", " "), f"{each.get('name')}: {each.get('reason')}{remedy}"
    for each in _list(answer, "components"):
        known = [str(each.get("state")), _version(each, "version")]
        known += [] if each.get("main_version") is None else [f"trained on {each['main_version']}"]
        yield str(each.get("name")), ", ".join([*known, *filter(None, [each.get("problem")])])
    for each in _list(inbox, "refused")[-_MOST:]:
        error = _of(each, "error")
        yield "refused", f"{each.get('name')}: {error.get('message')} ({error.get('remedy')})"
    yield "config changed", ", ".join(_texts(answer, "config_changed"))
    yield "config carried", ", ".join(_texts(answer, "config_carried"))
    yield "hosts", f"{len(_list(answer, 'hosts'))} reported; `weightcast fleet --url` shows them"
    yield "maintenance", str(_of(answer, "upkeep").get("problem", ""))


def _host_rows(answer: Answer) -> Iterator[Row]:
    yield from _places(answer)
    yield "target", f"{answer.get('target')}: {_version(answer, 'target_version')}"
    yield "local copy", _version(answer, "local_version")
    # a step that ended says nothing of engines that are still to follow
    idle = answer.get("state") == "idle" and not answer.get("ready")
    waits = _reasons(answer) if idle else _engine_loads(answer)
    yield "doing", f"waits: {waits}" if waits else str(answer.get("state"))
    waiting = _of(answer, "waiting_for")
    yield "waiting for", f"version {waiting.get('version')}: {waiting.get('reason')}" if waiting else ""
    engines = _list(answer, "engines")
    serving = [engine for engine in engines if engine.get("state") == "serving"]
    for engine in [engine for engine in engines if engine not in serving] + serving[:_MOST]:
        said = f"{engine.get('name')} ({engine.get('kind')}) {engine.get('state')}"
        reason = f": {engine['reason']}" if engine.get("reason") else ""
        yield "engine", f"{said}, {_version(engine, 'version')}{reason}"
    yield "engines", f"{len(serving)} of {len(engines)} serving" if len(serving) > _MOST else ""
    adapters = [*_list(answer, "adapters"), *filter(None, [_of(answer, "draft")])]
    loaded = [one for one in adapters if one.get("state") == "loaded" and not one.get("error")]
    for one in [one for one in adapters if one not in loaded]:
        error = f": {one['error']}" if one.get("error") else ""
        yield "adapter", f"{_at(one)} {one.get('state')}, newest {_version(one, 'target')}{error}"
    where = "no engine" if _is_bare(answer) else "loaded"
    yield "adapters", f"{', '.join(map(_at, loaded))} ({where})" if loaded else ""
    for update in _list(answer, "updates")[-1:]:
        total = _of(update, "seconds").get("total", 0.0)
        how = "in" if update.get("taken", True) else "not taken by any engine after"
        yield "last update", f"{update.get('kind')} {update.get('version')} {how} {total:.2f} s"
    for blocked in _list(answer, "blocked")[-_MOST:]:
        yield "blocked", f"version {blocked.get('version')}: {blocked.get('reason')}"


def _engine_loads(answer: Answer) -> str:
    """The message of a host that waits for an engine of `run-engine`; it is not an error."""
    error = _of(answer, "last_error")
    return str(error.get("message")) if error.get("error") == "EngineLoads" else ""


def _at(adapter: Answer) -> str:
    version = adapter.get("version")
    return f"{str(adapter.get('name')).rpartition('/')[2]}@{'-' if version is None else version}"


def _places(answer: Answer) -> Iterator[Row]:
    for name in ("run_id", "channel", "local"):
        yield name.removesuffix("_id"), str(answer.get(name) or "-")


def _troubles(answer: Answer) -> Iterator[Row]:
    message, verify = _of(answer, "last_error").get("message", ""), _of(answer, "verify")
    known = (_of(answer, "last_refused").get("message"), _engine_loads(answer))
    yield "last error", "" if message in known else str(message)
    loop = _of(answer, "loop")
    soon = f"within {age(loop.get('pause_seconds'))}; `weightcast wake URL` tries at once"
    yield "next try", soon if loop.get("failures_in_a_row") else ""
    yield "reports", str(answer.get("report_error") or "")
    yield "verify", f"{verify['faults']} faults: {verify.get('last_fault')}" if verify.get("faults") else ""
    yield "kernels", str(_of(answer, "kernels").get("problem") or "")


_ROLES: Mapping[str, tuple[Callable[[Answer], str], Finds, Callable[[Answer], Iterator[Row]]]] = {
    "publisher": (_publisher_says, _publisher_problem, _publisher_rows),
    "gateway": (_gateway_says, _gateway_problem, _gateway_rows),
    "gate": (_gate_says, _gate_problem, _gate_rows),
    "host": (_host_says, _host_problem, _host_rows),
}


def _newest(answer: Answer) -> Answer:
    return next(iter(_list(answer, "publications")), {})


def _now(answer: Answer) -> float:
    return float(answer.get("now") or time.time())


def _version(answer: Answer, name: str) -> str:
    return "no version" if answer.get(name) is None else f"version {answer[name]}"


def _reasons(answer: Answer) -> str:
    return _some(_texts(answer, "not_ready_reasons")) or "no reason given"


def _some(texts: Sequence[str]) -> str:
    more = f" (and {len(texts) - _MOST} more)" if len(texts) > _MOST else ""
    return "; ".join(texts[:_MOST]) + more


def _of(answer: Answer, name: str) -> Answer:
    found = answer.get(name)
    return found if isinstance(found, dict) else {}


def _list(answer: Answer, name: str) -> list[Answer]:
    return [each for each in _several(answer, name) if isinstance(each, dict)]


def _texts(answer: Answer, name: str) -> list[str]:
    return [str(each) for each in _several(answer, name)]


def _several(answer: Answer, name: str) -> Iterable[Any]:
    found = answer.get(name)
    return found if isinstance(found, list) else ()

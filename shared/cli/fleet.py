"""What the commands `fleet` and `wait` do."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import quote

import click
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.text import Text

from weightcast.shared.base.choices import MAIN
from weightcast.shared.base.errors import RESUME, Refused, WeightcastError, age, counted
from weightcast.shared.channel.channel import require_named
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.reports import UPDATES_LIMIT
from weightcast.shared.channel.reports import forget as forget_report
from weightcast.shared.cli import balancers
from weightcast.shared.cli.commands import MOST
from weightcast.shared.cli.output import Output, is_unread, or_dash, to_json
from weightcast.shared.daemon.client import Daemon
from weightcast.shared.daemon.fleet import (
    FLEET_PATH,
    WORDS,
    WORST_FIRST,
    Fleet,
    FleetReader,
    Host,
    names_of,
    parse_fleet,
    require_gone,
    short,
    short_names_of,
    shown_standing,
    trouble_of,
    verdict,
)
from weightcast.shared.daemon.tls import TrustFor
from weightcast.shared.daemon.wait import wait_for_version
from weightcast.shared.files.disk_errors import disk_text
from weightcast.shared.files.paths import ChannelAddress, printable

_WATCH_SECONDS = 1.0
_LEVELS = {"bad": "bold red", "warning": "yellow", "good": "green"}
_STYLES = {
    "failed": "bold red",
    "lost": "red",
    "stale": "yellow",
    "behind": "cyan",
    "ready": "green",
    "stopped": "dim",
}
_MOST_ERROR = 400
_NAMES_SHOWN, _NOTES_SHOWN = 10, 4
_UPDATES_SHOWN = 1
_COLUMNS = ("host", "", "doing", "served", "local", "lag", "heard", "engines", "target", "last update")
_RIGHT = ("served", "local", "lag", "heard")
_DROPPED_FIRST = ("last update", "local", "doing", "target")
_GAP, _INDENT = 2, 4

LookAtFleet = Callable[[], Fleet]


def show_fleet(
    channel: ChannelAddress | None,
    url: str | None,
    token: str | None,
    trust_for: TrustFor,
    watch: bool,
    whole: bool,
    forget: Sequence[str],
    balancer: str | None,
    as_json: bool,
) -> None:
    source = _Source(channel, url, token, trust_for)
    if forget:
        if watch or whole or balancer:
            raise click.BadParameter("--forget cannot be combined with --watch, --all or --format")
        _forget(forget, source, as_json)
        return
    if balancer:
        if watch or whole:
            raise click.BadParameter("--format cannot be combined with --watch or --all")
        with source.looking(updates=0) as look:
            print(balancers.shown(balancers.gates_of(look()), balancer), end="")
        return
    with source.looking(UPDATES_LIMIT if as_json else _UPDATES_SHOWN) as look:
        if watch:
            # the way in which it is meant to end
            with suppress(KeyboardInterrupt):
                _watch(look, as_json)
            return
        found = look()
        most = None if whole else MOST
        Output(json=as_json).result(found, lambda console: console.print(table(found, console.width, most)))


def wait_for_hosts(
    version: int,
    fraction: float | None,
    min_hosts: int | None,
    timeout: float,
    component: str,
    channel: ChannelAddress | None,
    url: str | None,
    token: str | None,
    trust_for: TrustFor,
    as_json: bool,
) -> None:
    what = f"version {version}" + (f" of {component}" if component != MAIN else "")
    output = Output(json=as_json)
    with (
        _Source(channel, url, token, trust_for).looking(updates=0) as look,
        output.waiting(f"waiting up to {timeout:g} s for {what}") as tell,
    ):
        hosts = wait_for_version(
            look,
            version,
            min_hosts,
            fraction,
            timeout,
            poll_seconds=_WATCH_SECONDS / 2,
            component=component,
            tell=tell,
        )
    facts = {"version": version, "hosts": hosts}
    output.result(
        facts,
        lambda console: console.print(f"{counted(len(hosts), 'host')} ready with version {version} or later"),
    )


def _forget(names: Sequence[str], source: _Source, as_json: bool) -> None:
    """All of them or none."""
    with source.looking(updates=0) as look:
        fleet = look()
        hosts = [_host_named(name, fleet) for name in dict.fromkeys(names)]
        for host in hosts:
            require_gone(host)
        for host in hosts:
            source.delete_report(host)
    rows = [host.model_dump(include={"key", "host", "local", "standing"}) for host in hosts]
    said = "\n".join(f"forgot {printable(h.host)} ({printable(h.local)}), {h.standing}" for h in hosts)
    Output(json=as_json).result({"forgotten": rows}, lambda console: console.print(said))


def _host_named(name: str, fleet: Fleet) -> Host:
    """By its name, a name with as much of its path as tells it apart, or its key; else by the end of
    its local checkpoint's path."""
    shorts, longs = short_names_of(fleet.hosts), names_of(fleet.hosts)
    found = [h for h in fleet.hosts if name in (h.host, shorts[h.key], longs[h.key], h.key)]
    found = found or [h for h in fleet.hosts if f"/{h.local}".endswith(f"/{name}")]
    if len(found) == 1:
        return found[0]
    known = ", ".join(sorted(printable(shorts[h.key]) for h in (found or fleet.hosts))[:_NAMES_SHOWN])
    problem = (
        f"{counted(len(found), 'host')} named {name[:100]!r}" if found else f"no host named {name[:100]!r}"
    )
    raise Refused(problem, remedy=f"give one of: {known}" if known else "no host has reported")


@dataclass(frozen=True)
class _Source:
    """`url` wins: the channel may come from the environment."""

    channel: ChannelAddress | None
    url: str | None
    token: str | None
    trust_for: TrustFor

    @contextmanager
    def looking(self, updates: int) -> Iterator[LookAtFleet]:
        """`updates`: of each host that are needed."""
        if self.url is not None:
            with Daemon(self.url, self.token, trust_for=self.trust_for) as daemon:
                yield lambda: parse_fleet(daemon.ask("GET", FLEET_PATH), daemon.url)
        elif self.channel is not None:
            store = open_store(self.channel)
            reader = FleetReader(store, updates=updates)

            def look() -> Fleet:
                require_named(store)
                return reader.read()

            yield look
        else:
            raise click.BadParameter("give --channel or --url")

    def delete_report(self, host: Host) -> None:
        if self.url is not None:
            with Daemon(self.url, self.token, trust_for=self.trust_for) as daemon:
                daemon.ask("DELETE", f"/v1/hosts/{quote(host.key, safe='')}")
        elif self.channel is not None:
            try:
                forget_report(open_store(self.channel), host.key)
            except OSError as error:
                raise Refused(
                    f"the report of {host.host} cannot be deleted: {disk_text(error, self.channel)}",
                    remedy="give --url of the publisher, or access to hosts/ in the channel",
                ) from error


def _watch(look: LookAtFleet, as_json: bool) -> None:
    if as_json:
        _repeat(look, lambda found: print(to_json(found), flush=True))
        return
    console = Console(markup=False, highlight=False, emoji=False)
    if not sys.stdout.isatty():
        _repeat(look, lambda found: console.print(table(found, console.width, MOST)))
        return
    with Live(console=console, auto_refresh=False, screen=True) as live:
        _repeat(
            look,
            lambda found: live.update(table(found, console.width, rows=console.height), refresh=True),
            lambda error: live.update(Text(printable(str(error)), style="red"), refresh=True),
        )


def _repeat(
    look: LookAtFleet,
    show: Callable[[Fleet], None],
    tell: Callable[[WeightcastError], None] = lambda error: print(error, file=sys.stderr, flush=True),
) -> None:
    """Until Ctrl-C, or until nobody reads it. A publisher that restarts, or a mount that is away, does not
    end it."""
    while not is_unread():
        try:
            show(look())
        except WeightcastError as error:
            tell(error)
        time.sleep(_WATCH_SECONDS)


def table(fleet: Fleet, width: int, most: int | None = None, rows: int | None = None) -> RenderableType:
    """The verdict, then the hosts, worst first: at most `most`, and no more than fit into `rows` lines of
    `width` columns."""
    hosts = sorted(fleet.hosts, key=lambda host: host.severity)[: rows if most is None else most]
    names = short_names_of(fleet.hosts)
    cells = [_COLUMNS, *((printable(names[host.key]), *_cells(host)) for host in hosts)]
    columns = _fitting(cells, width)
    lines: list[RenderableType] = list(_head(fleet, width if rows is not None else None))
    if hosts:
        lines.append(_row(cells[0], columns, "dim"))
    shown = 0
    for host, row in zip(hosts, cells[1:], strict=True):
        block = [_row(row, columns, "", _STYLES[host.standing]), *_trouble(host, fleet, rows and width)]
        if rows is not None and shown and len(lines) + len(block) >= rows:
            break
        lines, shown = lines + block, shown + 1
    if shown < len(fleet.hosts):
        lines.append(Text(f"and {len(fleet.hosts) - shown} more, none worse: --all, --json"))
    elif rows is None and fleet.counts.lost:
        lines.append(Text("for hosts that will not return: weightcast fleet --forget HOST", style="dim"))
    return Group(*lines)


def _head(fleet: Fleet, cut: int | None) -> list[Text]:
    found = fleet.verdict if fleet.verdict.text else verdict(fleet)
    lines = [(found.text, _LEVELS[found.level]), (_counts(fleet), "")]
    lines += [(text, "dim") for text in _publisher(fleet)]
    # without hosts hosts/ may not be there yet
    if fleet.time_source != "channel" and fleet.hosts:
        unknown = "it is behind the reports, so ages are unknown (?)"
        local = unknown if fleet.time_source == "unknown" else "ages are by this machine's clock"
        lines.append((f"hosts/ cannot be written from here: {local}", "yellow"))
    return [Text(printable(text)[:cut], style=style) for text, style in lines]


def _counts(fleet: Fleet) -> str:
    counts = fleet.counts.model_dump()
    said = ", ".join(f"{counts[each]} {WORDS.get(each, each)}" for each in WORST_FIRST[::-1] if counts[each])
    latest = or_dash(fleet.latest)
    if fleet.latest_age_seconds is not None:
        latest += f" ({age(fleet.latest_age_seconds)} old)"
    hosts = counted(len(fleet.hosts), "host")
    return f"run {fleet.run_id or 'foreign'}, latest {latest}; {hosts}{': ' if said else ''}{said}"


def _publisher(fleet: Fleet) -> Iterator[str]:
    owner, line = fleet.owner, fleet.publisher
    if fleet.rollback is not None:
        yield fleet.rollback.dated
        yield f"remedy: {RESUME}"
    if line is None:
        if owner is not None:
            yield f"publisher {owner.state}, heard {age(owner.heard_seconds_ago)} ago: {owner.name}"
        return
    inbox = [f"{number} {what.replace('_', ' ')}" for what, number in line.inbox.items() if number]
    state = "ready" if line.ready else f"not ready: {'; '.join(line.reasons)}"
    doing = f"publishing {line.publishing}" if line.publishing else ""
    waits = f"waiting for resume: {', '.join(line.waiting[:_NAMES_SHOWN])}" if line.waiting else ""
    said = (state, waits, doing, f"queue {line.queue}", *inbox)
    yield f"publisher {'; '.join(text for text in said if text)}"
    yield from line.notes[:_NOTES_SHOWN]
    if line.last_refused is not None and line.refused_since_version:
        if short(line.last_refused.message) != line.last_refused.message:
            yield f"refused {line.last_refused.source}: {line.last_refused.message}"
        yield f"remedy: {line.last_refused.remedy}"


def _fitting(cells: Sequence[Sequence[str]], width: int) -> dict[int, int]:
    """The width of each column that is shown: those that say least go first where not all fit."""
    widths = {at: max(cell_len(row[at]) for row in cells) for at in range(len(_COLUMNS))}
    if all(row[_COLUMNS.index("target")] == "latest" for row in cells[1:]):
        del widths[_COLUMNS.index("target")]
    for name in _DROPPED_FIRST:
        if sum(widths.values()) + _GAP * (len(widths) - 1) <= width:
            break
        widths.pop(_COLUMNS.index(name), None)
    return widths


def _row(cells: Sequence[str], columns: Mapping[int, int], style: str, standing: str = "") -> Text:
    line = Text(style=style)
    for at, width in columns.items():
        space = " " * (width - cell_len(cells[at]))
        cell = space + cells[at] if _COLUMNS[at] in _RIGHT else cells[at] + space
        line.append(cell, style=standing if at == 1 else None).append(" " * _GAP)
    line.rstrip()
    return line


def _trouble(host: Host, fleet: Fleet, cut: int | None) -> list[RenderableType]:
    """The error and its remedy, each on lines of its own; in a live view on one line each."""
    if host.standing == "ready" and not host.lacks_adapter:
        return []
    texts = [text for text in trouble_of(host, fleet.run_id) if text]
    shown = [Text(_cut(printable(text), cut and cut - _INDENT), style="dim") for text in texts]
    return [Padding(text, (0, 0, 0, _INDENT), expand=False) for text in shown]


def _cut(text: str, most: int | None) -> str:
    most = _MOST_ERROR if most is None else most
    return text if len(text) <= most else text[: most - 3] + "..."


def _cells(host: Host) -> Sequence[str]:
    """After its name."""
    return (
        shown_standing(host),
        _doing(host),
        or_dash(host.served_version),
        or_dash(host.local_version),
        or_dash(host.lag),
        age(host.heard_seconds_ago),
        _engines(host),
        printable(host.target),
        _last_update(host),
    )


def _doing(host: Host) -> str:
    if host.standing in ("stopped", "lost"):
        return ""
    return printable(host.state if host.state != "ready" else host.phase or host.state)


def _engines(host: Host) -> str:
    if host.standing in ("stopped", "lost"):
        return "-"
    others = [f"{one.name} {one.state}".strip() for one in host.engines if one.state != "serving"]
    if not others and host.engines:
        others = [f"{len(host.engines)} serving"]
    adapters = [f"{one.name.rpartition('/')[2]}@{or_dash(one.version)}" for one in host.adapters]
    return printable(", ".join((others or ["no engine"]) + adapters))


def _last_update(host: Host) -> str:
    if not host.updates:
        return "-"
    newest = host.updates[0]
    how = "in" if newest.outcome == "done" else "not taken in"
    return printable(f"{newest.kind} {newest.version} {how} {newest.seconds.get('total', 0.0):.2f} s")

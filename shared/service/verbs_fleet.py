"""Verbs that look at a fleet: `fleet`, `wait`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from weightcast.shared.channel.reports import UPDATES_LIMIT
from weightcast.shared.channel.store import require_named
from weightcast.shared.errors import Refused, WeightcastError, counted
from weightcast.shared.files.paths import printable
from weightcast.shared.service.arrivals import Arrivals
from weightcast.shared.service.client import Daemon
from weightcast.shared.service.common_options import JsonOption
from weightcast.shared.service.fleet import Fleet, FleetReader, Host, names_of
from weightcast.shared.service.output import Output, to_json
from weightcast.shared.service.streams import is_unread

FLEET_PATH = "/v1/fleet"
MOST = 50
"""rows, unless all are wanted: a thousand take seconds to lay out, and nobody reads them"""
_WATCH_SECONDS = 1.0
_WORST_FIRST = ("failed", "lost", "stale", "behind", "ready")
_STYLES = {"failed": "bold red", "lost": "red", "stale": "yellow", "behind": "cyan", "ready": "green"}
_MOST_ERROR = 120
_UPDATES_SHOWN = 1
_COLUMNS = ("host", "", "state", "served", "local", "lag", "target", "heard", "last update", "engines")
_RIGHT = ("served", "local", "lag", "heard")
_FRAME_ROWS = 6
"""of the screen, around the hosts"""

LookAtFleet = Callable[[], Fleet]

AnyChannelOption = Annotated[
    Path | None, typer.Option("--channel", envvar="WEIGHTCAST_CHANNEL", help="The channel's directory.")
]
UrlOption = Annotated[
    str | None, typer.Option("--url", help="Address of the publisher, e.g. 127.0.0.1:8340, instead.")
]
TokenOption = Annotated[
    str | None, typer.Option("--token", envvar="WEIGHTCAST_TOKEN", help="Bearer token of the publisher.")
]


def register_fleet(app: typer.Typer) -> None:
    app.command("fleet")(fleet)
    app.command("wait")(wait)


def fleet(
    channel: AnyChannelOption = None,
    url: UrlOption = None,
    token: TokenOption = None,
    watch: Annotated[bool, typer.Option("--watch", help="Go on, once a second, until Ctrl-C.")] = False,
    whole: Annotated[bool, typer.Option("--all", help=f"All hosts, not only the {MOST} worst.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the hosts of a run: who is behind, who is gone, and why. Hosts say this of themselves."""
    with _looking(channel, url, token, UPDATES_LIMIT if as_json else _UPDATES_SHOWN) as look:
        if watch:
            # the way in which it is meant to end
            with suppress(KeyboardInterrupt):
                _watch(look, as_json)
            return
        found = look()
        most = None if whole else MOST
        Output(json=as_json).result(found, lambda console: console.print(table(found, most)))


def wait(
    version: Annotated[int, typer.Option("--version", min=0, help="This version or a later one.")],
    fraction: Annotated[
        float | None, typer.Option("--fraction", help="Share of the hosts that are not lost, up to 1.")
    ] = None,
    min_hosts: Annotated[int | None, typer.Option("--min-hosts", help="So many hosts at least.")] = None,
    timeout: Annotated[float, typer.Option("--timeout", min=0.0, help="Seconds.")] = 600.0,
    channel: AnyChannelOption = None,
    url: UrlOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Wait until hosts are ready with a version: one, or as many as asked for. Exit code 4 after the time."""
    with _looking(channel, url, token, updates=0) as look:
        hosts = Arrivals(look, poll_seconds=_WATCH_SECONDS / 2).wait(version, min_hosts, fraction, timeout)
    facts = {"version": version, "hosts": hosts}
    Output(json=as_json).result(
        facts,
        lambda console: console.print(f"{counted(len(hosts), 'host')} ready with version {version} or later"),
    )


@contextmanager
def _looking(channel: Path | None, url: str | None, token: str | None, updates: int) -> Iterator[LookAtFleet]:
    """`--url` wins: the channel may come from the environment. `updates`: of each host that are needed."""
    if url is not None:
        with Daemon(url, token) as daemon:
            yield lambda: _parsed(daemon.get(FLEET_PATH), daemon.url)
    elif channel is not None:
        yield partial(_named, channel, FleetReader(channel, updates=updates))
    else:
        raise typer.BadParameter("give --channel or --url")


def _named(channel: Path, reader: FleetReader) -> Fleet:
    require_named(channel)
    return reader.read()


def _parsed(body: bytes, address: str) -> Fleet:
    try:
        return Fleet.model_validate_json(body)
    except ValidationError as error:
        raise Refused(
            f"{address} did not answer with a fleet: {error.error_count()} members are wrong",
            remedy="is it a publisher of this release?",
        ) from None


def _watch(look: LookAtFleet, as_json: bool) -> None:
    if as_json:
        _repeat(look, lambda found: print(to_json(found), flush=True))
        return
    console = Console(markup=False, highlight=False, emoji=False)
    if not sys.stdout.isatty():
        _repeat(look, lambda found: console.print(table(found, MOST)))
        return
    with Live(console=console, auto_refresh=False, screen=True) as live:
        _repeat(
            look,
            lambda found: live.update(table(found, console.height - _FRAME_ROWS), refresh=True),
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


def table(fleet: Fleet, most: int | None = None) -> RenderableType:
    """The worst first; at most so many hosts."""
    hosts = sorted(
        fleet.hosts, key=lambda host: (_WORST_FIRST.index(host.standing), -(host.lag or 0), host.key)
    )
    shown = hosts if most is None else hosts[: max(1, most)]
    grid = Table(box=None, pad_edge=False)
    for title in _COLUMNS:
        grid.add_column(title, justify="right" if title in _RIGHT else "left", overflow="fold")
    names = names_of(fleet.hosts)
    for host in shown:
        grid.add_row(printable(names[host.key]), *_cells(host))
        if host.last_error and host.standing != "ready":
            grid.add_row("", "", Text(_error(host), style="dim"))
    lines: list[RenderableType] = [_head(fleet), grid]
    if len(shown) < len(hosts):
        lines.append(f"and {len(hosts) - len(shown)} more, none worse: --all, --json")
    return Group(*lines)


def _head(fleet: Fleet) -> str:
    counts = fleet.counts.model_dump()
    said = ", ".join(f"{counts[standing]} {standing}" for standing in _WORST_FIRST[::-1])
    lag = ", ".join(f"{row.lag}: {row.hosts}" for row in fleet.lag) or "-"
    latest = "-" if fleet.latest is None else fleet.latest
    return printable(
        f"run {fleet.run_id or 'foreign'}, latest {latest};"
        f" {counted(len(fleet.hosts), 'host')}: {said}; by lag {lag}"
    )


def _cells(host: Host) -> Sequence[RenderableType]:
    """Beside its name."""
    return (
        Text(host.standing, style=_STYLES[host.standing]),
        printable(host.state if host.state != "ready" else host.phase or host.state),
        _number(host.served_version),
        _number(host.local_version),
        _number(host.lag),
        printable(host.target),
        f"{host.heard_seconds_ago:.0f} s",
        _last_update(host),
        printable(", ".join(f"{engine.name} {engine.state}".strip() for engine in host.engines)) or "-",
    )


def _error(host: Host) -> str:
    """What to do is shown whatever the length of what went wrong."""
    return printable(_cut(host.last_error) + (f" ({_cut(host.remedy)})" if host.remedy else ""))


def _cut(text: str) -> str:
    return text[:_MOST_ERROR] + ("..." if len(text) > _MOST_ERROR else "")


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _last_update(host: Host) -> str:
    if not host.updates:
        return "-"
    newest = host.updates[0]
    how = "in" if newest.outcome == "done" else f"{newest.outcome} after"
    return printable(f"{newest.kind} {newest.version} {how} {newest.seconds.get('total', 0.0):.2f} s")

"""The gateway as a daemon: requests in the main thread, the list of hosts in the work thread."""

from __future__ import annotations

from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from functools import partial
from urllib.parse import urlsplit

from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.daemon.client import Daemon
from weightcast.shared.daemon.environment import is_server_url
from weightcast.shared.daemon.fleet import FLEET_PATH, Fleet, FleetReader, parse_fleet
from weightcast.shared.daemon.http import make_app
from weightcast.shared.daemon.loop import Stop, Wakeup, run_daemon
from weightcast.shared.daemon.metrics import new_registry, watch_loop
from weightcast.shared.daemon.settings import text_of
from weightcast.shared.daemon.status import SOFTWARE, Facts, LoopStatus, Readiness, Snapshot
from weightcast.subscriber.gate.gate import MOST_CONNECTIONS
from weightcast.subscriber.gateway.gateway import Gateway, GatewayMetrics
from weightcast.subscriber.gateway.hosts import HostLine
from weightcast.subscriber.gateway.settings import GatewaySettings


class GatewayStatus(Facts):
    software: str = SOFTWARE
    role: str = "gateway"
    ready: bool = False
    not_ready_reasons: tuple[str, ...] = ()
    served_version: int | None = None
    """the newest that requests may be sent to"""
    target_version: int = 0
    """the newest that a host is to reach"""
    waiting: int = 0
    """requests that wait for a host"""
    hosts: tuple[HostLine, ...] = ()
    loop: LoopStatus = LoopStatus()


FindGates = Callable[[], dict[str, str]]
"""names of hosts by the URL of their gate"""


def find_gates(settings: GatewaySettings) -> FindGates:
    """Where the gates are found. Raises BadAddress."""
    if settings.gates:
        listed = {url: urlsplit(url).netloc for url in settings.gates}
        return lambda: listed
    of_fleet = partial(_gates_of, settings.gate_pattern)
    if settings.publisher is not None:
        publisher = Daemon(
            settings.publisher,
            text_of(settings.publisher_token),
            token_from="WEIGHTCAST_PUBLISHER_TOKEN",
            trust_for=settings.client_tls,
        )
        return lambda: of_fleet(parse_fleet(publisher.ask("GET", FLEET_PATH), publisher.url))
    assert settings.channel is not None
    reader = FleetReader(open_store(settings.channel), updates=0)
    return lambda: of_fleet(reader.read())


def _gates_of(patterns: Collection[str], fleet: Fleet) -> dict[str, str]:
    """Of hosts of this run whose report is young: another run's gate may have the address of an old one.
    `patterns`: of their addresses; a report may be forged."""
    return {
        host.gate: host.key
        for host in fleet.hosts
        if host.presence == "live" and host.standing != "stopped"
        if fleet.run_id in (None, host.run_id) and is_server_url(host.gate)
        if any(fnmatchcase(urlsplit(host.gate).netloc.lower(), pattern.lower()) for pattern in patterns)
    }


def run_gateway(settings: GatewaySettings) -> None:
    """Until SIGTERM or SIGINT. Raises what `run_daemon` raises."""
    find, loop, wakeup, registry = find_gates(settings), Snapshot(LoopStatus()), Wakeup(), new_registry()
    watch_loop(registry, loop)
    gateway = Gateway(
        text_of(settings.gate_token),
        GatewayMetrics(registry),
        settings.client_tls("https:"),
        token=text_of(settings.token),
        hold_seconds=settings.hold,
        most=settings.requests,
        look_every=settings.poll_seconds,
    )
    hosts = gateway.hosts

    def step(stop: Stop) -> None:
        found = find()
        # hosts that cannot write reports may yet answer
        if found:
            gateway.follow(found)

    def ready() -> Readiness:
        if hosts.ready:
            return Readiness(ready=True)
        reasons = tuple(f"{host.name}: {host.reason}" for host in hosts.by_url.values())
        return Readiness(ready=False, reasons=reasons or ("no gate is known",))

    def status() -> GatewayStatus:
        readiness = ready()
        return GatewayStatus(
            ready=readiness.ready,
            not_ready_reasons=readiness.reasons,
            served_version=hosts.served,
            target_version=hosts.target,
            waiting=gateway.waiting,
            hosts=tuple(host.line for host in hosts.by_url.values()),
            loop=loop.get(),
        )

    app = make_app(
        "weightcast gateway",
        status,
        ready,
        registry,
        text_of(settings.token),
        wakeup.set,
        GatewayStatus,
        beyond=gateway,
        beyond_token=text_of(settings.caller_token),
    )
    app.router.lifespan_context = gateway.live
    run_daemon(app, step, wakeup, settings, loop=loop, most=MOST_CONNECTIONS)

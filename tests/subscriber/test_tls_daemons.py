"""Publisher, hosts, mirror and gateway that speak TLS alone, with client certificates, to each other and to
the commands: processes, with an authority of the test's own."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import httpx
import pytest
from gate_kit import Engine
from hosts import Site
from ports import free_port
from tls import Authority
from waiting import wait_until

from weightcast.client import Client
from weightcast.shared.daemon.tls import client_context


class World:
    """Daemons with a certificate each, which ask every caller for one."""

    def __init__(self, site: Site) -> None:
        self.site, self.ours = site, Authority(site.root)
        self.own = self.ours.issue("operator")
        self.trust = ("--ca", self.ours.file, "--tls-cert", self.own)

    def start(self, name: str, *words: object) -> str:
        """The URL."""
        port_file, cert = self.site.root / f"{name}.port", self.ours.issue(name)
        tls = ("--ca", self.ours.file, "--tls-cert", cert, "--tls-client-ca", self.ours.file)
        log = self.site.stack.enter_context((self.site.root / f"{name}.log").open("ab"))
        common = ("--port", "0", "--port-file", port_file, "--poll-seconds", "0.1")
        process = forked.weightcast(*words, *common, *tls, env=dict(os.environ), stderr=log)
        self.site.stack.callback(process.wait)
        self.site.stack.callback(process.kill)
        wait_until(port_file.exists)
        return f"https://127.0.0.1:{port_file.read_text().strip()}"

    def get(self, url: str) -> Any:
        trust = client_context(url, self.ours.file, self.own)
        return httpx.get(url, verify=trust, trust_env=False).json()

    def run(self, *words: object) -> Any:
        found = forked.run_weightcast(*words, *self.trust, "--json")
        assert found.returncode == 0, found
        return json.loads(found.stdout)


@pytest.fixture
def world(site: Site) -> Iterator[World]:
    yield World(site)


async def generated(url: str, ca: Path, cert: Path) -> int:
    async with Client(url, ca=str(ca), cert=str(cert), seconds=60) as client:
        return (await client.generate({"prompt": "p", "max_tokens": 3})).version


def test_every_daemon_reaches_every_other_over_tls(world: World) -> None:
    site, run = world.site, world.site.run()
    engine, gate = Engine(site), free_port()
    channel, base = site.root / "channel", run.base_dir
    place = ("--channel", channel, "--base", base)
    publisher = world.start("publisher", "publisher", "run", *place, "--local", site.root / "p")
    follow = ("subscriber", "run", *place, "--threads", "1", "--report-to", publisher)
    member = world.start("member", *follow, "--local", site.root / "member", "--group-follower")
    host = world.start(
        "host",
        *(*follow, "--local", site.root / "host", "--group-member", member),
        *("--engine", f"vllm={engine.url}", "--gate", gate, "--gate-url", f"https://127.0.0.1:{gate}"),
    )
    mirror = world.start(
        "mirror",
        *("mirror", "run", "--from", channel, "--to", site.root / "copy", "--report-to", publisher),
    )
    gateway = world.start("gateway", "gateway", "run", "--publisher", publisher)
    wait_until(lambda: world.get(f"{host}/v1/status")["ready"])
    wait_until(lambda: world.get(f"{mirror}/v1/status")["ready"])
    wait_until(lambda: world.get(f"{gateway}/readyz")["ready"])
    assert world.get(f"https://127.0.0.1:{gate}/readyz")["version"] == 0
    assert asyncio.run(generated(gateway, world.ours.file, world.own)) == 0

    assert world.run("status", host)["served_version"] == 0
    world.run("wake", host)
    world.run("wait", "--url", publisher, "--version", "0", "--min-hosts", "1")
    wait_until(lambda: len(world.run("fleet", "--url", publisher)["hosts"]) == 3)
    for url in (publisher, host, member, mirror, gateway, f"https://127.0.0.1:{gate}"):
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/healthz", verify=client_context(url, world.ours.file), trust_env=False)

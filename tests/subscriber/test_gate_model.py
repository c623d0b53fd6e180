"""Requests with random conditions, updates all the while, engines and subscribers killed: whatever an answer
holds is from versions that its conditions allow and its label names. Directly at gates, and through gateways,
which are killed too. `make soak-gate` makes it longer. The first host and the last gateway are never killed:
their memory and descriptors are compared."""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from gate_kit import Engine, Gateway, Host, events, gates_of
from hosts import Run, Site
from waiting import wait_until

REQUESTS = int(os.environ.get("GATE_REQUESTS", "500"))
HOSTS = int(os.environ.get("GATE_HOSTS", "3"))
CALLERS = int(os.environ.get("GATE_CALLERS", "24"))
SLACK_FDS = 80
"""idle connections that looks every 0.2 s keep from being closed after 3 s"""
PATIENCE = 60.0


class Caller:
    """`urls`: of gates or gateways; `seen`: outcomes, counted."""

    def __init__(self, host: Host, urls: list[str], seed: int, seen: Counter[str]) -> None:
        self._host, self._urls, self._random, self._seen = host, urls, random.Random(seed), seen

    async def run(self, count: int) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE) as client:
            for _ in range(count):
                try:
                    self._seen[await self._call(client)] += 1
                except httpx.TimeoutException:
                    raise
                except httpx.HTTPError as error:
                    self._seen[type(error).__name__] += 1

    async def _call(self, client: httpx.AsyncClient) -> str:
        draw, host, url = self._random, self._host, self._random.choice(self._urls)
        newest = len(host.run.versions) - 1
        asked: dict[str, int] = {}
        match draw.randrange(4):
            case 0:
                asked = {"min_version": max(0, newest - draw.randrange(3))}
            case 1:
                asked = {"exact_version": max(0, newest - draw.randrange(3))}
            case 2:
                asked = {"max_lag": draw.randrange(3)}
        prompt, tokens = draw.choice("ab"), draw.randrange(1, 12)
        body: dict[str, Any] = {
            "prompt": prompt, "max_tokens": tokens, "seconds": 0.02, "stream": draw.random() < 0.6,
            "weightcast": {**asked, "wait": draw.choice([0, 5])},
            # SGLang's
            "text": prompt, "sampling_params": {"max_new_tokens": tokens},
        }  # fmt: skip
        is_sglang = url.endswith("/generate")
        if draw.random() < 0.3:
            body["weightcast"]["session"] = draw.choice("abc")
        slow = draw.random() < 0.05
        async with client.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                return str(response.status_code)
            if draw.random() < 0.05:
                return "closed"
            if body["stream"]:
                lines = []
                async for line in response.aiter_lines():
                    lines.append(line)
                    await asyncio.sleep(0.05 if slow else 0)
                text, label = events(lines)
                if not label:
                    return "cut"
            else:
                answer = response.json() if await response.aread() else {}
                text, label = (
                    answer["text"] if is_sglang else answer["choices"][0]["text"],
                    answer["weightcast"],
                )
        self._judge(host, asked, text, label)
        return "partial" if label.get("partial") else "answered"

    def _judge(self, host: Host, asked: dict[str, int], text: str, label: dict[str, Any]) -> None:
        versions = host.version_of(text)
        told = f"{asked} {label} {versions}"
        assert all(label["version"] <= one <= label["last_version"] for one in versions), told
        assert all(one >= asked.get("min_version", 0) for one in versions), told
        assert {*versions} <= {asked.get("exact_version", one) for one in versions}, told


async def update(host: Host, done: asyncio.Event) -> None:
    while not done.is_set():
        began, number = time.monotonic(), len(host.run.versions)
        weights = host.run.versions[-1].changed(number)
        # hosts may serve it before this process hears that it is published
        host.digests[weights.digest()] = number
        await asyncio.to_thread(host.run.publish, weights)
        with suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), max(0.0, began + 1 - time.monotonic()))


async def kill(
    victims: list[Host | Engine | Gateway], done: asyncio.Event, draw: random.Random
) -> Counter[str]:
    kills = Counter[str]()
    while not done.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), 3)
        victim = draw.choice(victims)
        await asyncio.to_thread(victim.restart)
        kills[type(victim).__name__] += 1
    return kills


async def everything(
    host: Host, urls: list[str], victims: list[Host | Engine | Gateway], seed: int
) -> tuple[Counter[str], Counter[str]]:
    """What became of the requests, and what was killed how often."""
    done, seen = asyncio.Event(), Counter[str]()
    updates = asyncio.create_task(update(host, done))
    kills = asyncio.create_task(kill(victims, done, random.Random(seed)))
    try:
        async with asyncio.TaskGroup() as callers:
            for number in range(CALLERS):
                caller = Caller(host, urls, seed * 1000 + number, seen)
                callers.create_task(caller.run(-(-REQUESTS // CALLERS)))
    finally:
        done.set()
    await updates
    return seen, await kills


def resources(process: Host | Gateway) -> tuple[int, int]:
    """Resident memory in KiB, and descriptors."""
    of = Path(f"/proc/{process.process.pid}")
    [resident] = re.findall(r"VmRSS:\s+(\d+) kB", (of / "status").read_text())
    return int(resident), len(list((of / "fd").iterdir()))


@pytest.mark.parametrize("gateways", [0, 3])
def test_no_answer_is_from_a_version_that_was_not_allowed(site: Site, run: Run, gateways: int) -> None:
    kinds = ("vllm",) * HOSTS if gateways else ("vllm", "sglang")
    engines = [Engine(site, f"engine{number}", kind) for number, kind in enumerate(kinds)]
    hosts = [Host(site, run, engine, name=f"host{number}") for number, engine in enumerate(engines)]
    hosts[0].publish()
    # the others find the gates in reports
    sources = [gates_of(*hosts), *[("--channel", run.channel)] * 2][:gateways]
    before = [Gateway(site, *source, name=f"gateway{number}") for number, source in enumerate(sources)]
    for gateway in before:
        wait_until(lambda: len(gateway.hosts()) == len(hosts))  # noqa: B023
    routes = {"vllm": "/v1/completions", "sglang": "/generate"}
    urls = [gateway.url + routes["vllm"] for gateway in before]
    urls = urls or [host.gate + routes[host.engines[0].kind] for host in hosts]
    seed = int(os.environ.get("GATE_SEED", "1"))
    spared = [hosts[0], *before[-1:]]
    began, at_first = time.monotonic(), [resources(one) for one in spared]
    seen, kills = asyncio.run(everything(hosts[0], urls, [*hosts[1:], *engines, *before[:-1]], seed))
    seconds = time.monotonic() - began
    assert seen["answered"] > REQUESTS // 4
    for gateway in before:
        wait_until(lambda: gateway.client.get("/v1/status").json()["waiting"] == 0)  # noqa: B023
    for host in hosts:
        wait_until(lambda: host.status()["gate"]["waiting"] == 0)  # noqa: B023
        wait_until(lambda: set(host.status()["gate"]["requests"].values()) == {0})  # noqa: B023
        assert host.mislabeled() == 0
    for one, (_, descriptors) in zip(spared, at_first, strict=True):
        wait_until(lambda: resources(one)[1] < descriptors + SLACK_FDS)  # noqa: B023
    print(f"{dict(seen)}, kills {dict(kills)}, {len(run.versions) - 1} versions, {seconds:.0f} s")
    print(f"KiB and descriptors, first {at_first}, at the end {[resources(one) for one in spared]}")

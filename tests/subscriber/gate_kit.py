"""Hosts with a gate, in front of engines that stream what they hold: real processes, real HTTP."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import forked
import httpx
from hosts import Run, Site
from ports import free_port
from waiting import wait_until

LONG = 60


class Engine:
    """A process of `streaming_engine.py`."""

    def __init__(self, site: Site, name: str = "engine", kind: str = "vllm") -> None:
        self.kind = kind
        self._port_file = site.root / f"{name}.port"
        self.start()
        site.stack.callback(self.kill)

    def start(self, port: int = 0) -> None:
        self._port_file.unlink(missing_ok=True)
        script = Path(__file__).with_name("streaming_engine.py")
        self.process = forked.Forked([script, self._port_file, port, self.kind])
        wait_until(lambda: self._port_file.exists() and self._port_file.read_text())
        self.url = f"http://127.0.0.1:{self._port_file.read_text()}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Another process at the same address, which holds what it was made with."""
        self.kill()
        self.start(int(self.url.rpartition(":")[2]))

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, trust_env=False).json()


class Host:
    """A subscriber with a gate before `engines`."""

    def __init__(
        self,
        site: Site,
        run: Run,
        *engines: Engine,
        options: tuple[str, ...] = (),
        name: str = "host",
        of_engines: str = "",
    ) -> None:
        """`of_engines`: options of each."""
        self.run, self.engines, self._port_file = run, engines, site.root / f"{name}.port"
        self.digests: dict[str, int] = {}
        """of versions"""
        self._digested = 0
        gate_port = free_port()
        self._arguments = [
            *("subscriber", "run", "--channel", run.channel, "--base", run.base_dir, "--threads", "1"),
            *("--local", site.root / name, "--port", "0", "--port-file", self._port_file),
            *("--poll-seconds", "0.1", "--engine-check-seconds", "0.2", "--gate", gate_port, *options),
        ]
        for number, engine in enumerate(engines):
            self._arguments += ["--engine", f"{engine.kind}={engine.url},name=e{number}{of_engines}"]
        self._log = site.stack.enter_context((site.root / f"{name}.log").open("ab"))
        self.start()
        site.stack.callback(self.kill)
        self.gate = f"http://127.0.0.1:{gate_port}"
        self.client = httpx.Client(base_url=self.gate, trust_env=False, timeout=LONG)
        site.stack.callback(self.client.close)

    def start(self) -> None:
        self._port_file.unlink(missing_ok=True)
        self.process = forked.weightcast(*self._arguments, env=dict(os.environ), stderr=self._log)
        wait_until(self._port_file.exists)

    def restart(self) -> None:
        self.kill()
        self.start()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def status(self) -> dict[str, Any]:
        port, token = self._port_file.read_text().strip(), os.environ.get("WEIGHTCAST_TOKEN")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.get(f"http://127.0.0.1:{port}/v1/status", headers=headers, trust_env=False).json()

    def metrics(self) -> str:
        port = self._port_file.read_text().strip()
        return httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text

    def mislabeled(self) -> float:
        """Answers whose engine named other weights."""
        page = self.metrics()
        found = re.search(r"^weightcast_gate_mislabeled_total (\S+)$", page, re.MULTILINE)
        assert found is not None, page
        return float(found[1])

    def log(self) -> str:
        return Path(self._log.name).read_text()

    def publish(self) -> int:
        version = self.run.publish()
        self.wait_open(version)
        return version

    def wait_open(self, version: int) -> None:
        wait_until(lambda: self.status()["gate"]["version"] == version)

    def version_of(self, text: str) -> list[int]:
        """The versions whose tokens a text has."""
        while self._digested < len(self.run.versions):
            self.digests[self.run.digest(self._digested)] = self._digested
            self._digested += 1
        return [self.digests[token] for token in text.split()]

    def generate(
        self, tokens: int = 3, *, headers: dict[str, str] | None = None, **body: Any
    ) -> httpx.Response:
        """As SGLang is asked."""
        sampling = {"max_new_tokens": tokens, "temperature": 1.0}
        asked = {"text": "p", "sampling_params": sampling, **body}
        return self.client.post("/generate", json=asked, headers=headers)

    def complete(self, *, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": "p", **body}, headers=headers)


class Gateway:
    """A gateway; `source`: the options that say where it finds the gates."""

    def __init__(
        self, site: Site, *source: object, options: tuple[object, ...] = (), name: str = "gateway"
    ) -> None:
        self.port = free_port()
        self._port_file = site.root / f"{name}.port"
        self._arguments = [
            *("gateway", "run", *source, "--port", self.port, "--port-file", self._port_file),
            *("--poll-seconds", "0.2", *options),
        ]
        self._log = site.stack.enter_context((site.root / f"{name}.log").open("ab"))
        self.start()
        site.stack.callback(self.kill)
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, trust_env=False, timeout=LONG)
        site.stack.callback(self.client.close)

    def start(self) -> None:
        self._port_file.unlink(missing_ok=True)
        self.process = forked.weightcast(*self._arguments, env=dict(os.environ), stderr=self._log)
        wait_until(self._port_file.exists)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.kill()
        self.start()

    def log(self) -> str:
        return Path(self._log.name).read_text()

    def hosts(self) -> dict[str, Any]:
        return {host["url"]: host for host in self.client.get("/v1/status").json()["hosts"]}

    def wait_for(self, *versions: int) -> None:
        """Until so many hosts serve these versions, as far as it knows."""
        wait_until(lambda: sorted(h["version"] or 0 for h in self.hosts().values()) == sorted(versions))

    def complete(self, *, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": "p", **body}, headers=headers)


def gates_of(*hosts: Host) -> tuple[str, ...]:
    """Options of a gateway."""
    return tuple(word for host in hosts for word in ("--gates", host.gate))


def events(lines: Iterable[str]) -> tuple[str, dict[str, Any]]:
    """The text of a stream, and its label."""
    text, label = "", {}
    for line in lines:
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            # SGLang's events hold all that came before them
            if "text" in event:
                text = event["text"]
            else:
                [choice] = event["choices"]
                text += choice["delta"]["content"] if "delta" in choice else choice["text"]
        elif line.startswith(": weightcast "):
            label = json.loads(line.removeprefix(": weightcast "))
    return text, label

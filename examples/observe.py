"""What the demo sees of weightcast and its neighbours: status pages, the channel's files, witnesses' logs.

Everything here is read as an outsider reads it: HTTP and files, no Python code of weightcast.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from examples.summary import EngineEvent, TrainerStep, Version

INDEX = "model.safetensors.index.json"


class Daemon:
    """A daemon's HTTP side; its port is in a file that appears when it listens."""

    def __init__(self, port_file: Path) -> None:
        self._port_file = port_file
        self._client = httpx.Client(timeout=5.0, trust_env=False)

    def close(self) -> None:
        self._client.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port_file.read_text().strip()}"

    def get(self, path: str) -> Any:
        """None while it does not answer, or does not answer 200."""
        try:
            response = self._client.get(self.url + path)
        except (OSError, httpx.HTTPError):
            return None
        return response.json() if response.status_code == 200 else None

    def is_ready(self) -> bool:
        return self.get("/readyz") is not None

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._client.post(self.url + path, json=body).raise_for_status().json()


@dataclass(frozen=True)
class PublisherView:
    version: int
    facts: str


@dataclass(frozen=True)
class HostView:
    """A host in the live table; None where nothing is known yet."""

    name: str
    local_version: int | None
    served_version: int | None
    label: str | None
    """the version that its engine claims"""
    facts: str


def publisher_view(publisher: Daemon, channel: Path) -> PublisherView:
    status = publisher.get("/v1/status") or {}
    newest = next(iter(status.get("publications", ())), None)
    if newest is None:
        return PublisherView(pointer(channel), "")
    share = newest["delta_bytes"] / newest["full_bytes"]
    facts = f"{newest['density_elements']:.2%} of elements, {newest['delta_bytes']:,} bytes ({share:.2%})"
    return PublisherView(pointer(channel), facts)


def host_view(name: str, subscriber: Daemon, engine: Daemon) -> HostView:
    status = subscriber.get("/v1/status") or {}
    return HostView(
        name=name,
        local_version=status.get("local_version"),
        served_version=status.get("served_version"),
        label=label_of(engine),
        facts=_host_facts(status),
    )


def label_of(engine: Daemon) -> str | None:
    """The version that an engine claims: SGLang's route, then vLLM's."""
    facts = engine.get("/model_info") or engine.get("/weight_info") or {}
    label = facts.get("weight_version")
    return label if isinstance(label, str) else None


def _host_facts(status: dict[str, Any]) -> str:
    state = str(status.get("state", ""))
    pauses = [
        update["pause_seconds"] for update in status.get("updates", ()) if update["pause_seconds"] is not None
    ]
    return f"{state}, last pause {1000 * pauses[-1]:.0f} ms" if pauses else state


def pointer(channel: Path) -> int:
    """The newest published version, 0 before the first."""
    try:
        text = (channel / "latest").read_text()
    except FileNotFoundError:
        return 0
    return int(text) if text.isdigit() else 0


def read_versions(channel: Path, newest: int) -> list[Version]:
    return [
        _version(channel / f"weight_v{number:06}")
        for number in range(1, newest + 1)
        if (channel / f"weight_v{number:06}" / INDEX).exists()
    ]


def read_events(log: Path) -> list[EngineEvent]:
    return [EngineEvent(line["time"], line["event"], line.get("label", "")) for line in _lines(log)]


def read_steps(metrics: Path) -> list[TrainerStep]:
    return [
        TrainerStep(
            step=line["step"],
            rewards=tuple(line["rewards"]),
            lags={int(lag): count for lag, count in line["lags"].items()},
        )
        for line in _lines(metrics)
    ]


def live_checksums(engine: Daemon) -> dict[str, str]:
    ranks: Sequence[dict[str, Any]] = engine.post("/weights_checker", {"action": "checksum"})["ranks"]
    return dict(ranks[0]["checksums"])


def _version(directory: Path) -> Version:
    facts = json.loads((directory / INDEX).read_text())["weightcast"]
    changed, elements, *_ = facts["totals"]
    files = [entry for entry in directory.iterdir() if entry.is_file()]
    return Version(
        number=facts["version"],
        created=facts["created"],
        changed=changed,
        elements=elements,
        delta_bytes=sum(file.stat().st_size for file in files),
    )


def _lines(log: Path) -> Iterator[Any]:
    """Whole lines only: the last one may still be written."""
    text = log.read_text() if log.exists() else ""
    return (json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n"))

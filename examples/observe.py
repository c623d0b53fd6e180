"""What the demo sees of weightcast and its neighbours: status pages, the channel's files, witnesses' logs.

Everything here is read as an outsider reads it: HTTP, files and objects, no Python code of weightcast.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import obstore
from obstore.store import LocalStore, ObjectStore, from_url

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


def open_channel(address: str) -> ObjectStore:
    """A directory, or an s3:// URL whose server and credentials the environment names."""
    if "://" not in address:
        return LocalStore(address)
    return from_url(address, client_options={"allow_http": True})


def publisher_view(publisher: Daemon, channel: ObjectStore, adapter: str = "") -> PublisherView:
    if adapter:
        return PublisherView(pointer(channel, adapter), f"adapter {adapter}")
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


def adapter_view(name: str, subscriber: Daemon, engine: Daemon, adapter: str) -> HostView:
    """As `host_view`, with the versions of an adapter."""
    status = subscriber.get("/v1/status") or {}
    found = next((one for one in status.get("adapters", ()) if one["name"] == adapter), {})
    loaded = [label for label in loaded_adapters(engine) if label.startswith(f"{adapter}@")]
    return HostView(
        name=name,
        local_version=found.get("version"),
        served_version=next(iter(found.get("loaded", ())), None),
        label=", ".join(sorted(loaded)) or None,
        facts=str(status.get("state", "")),
    )


def loaded_adapters(engine: Daemon) -> list[str]:
    """Their names in the engine, with the version."""
    models = (engine.get("/v1/models") or {}).get("data", ())
    return [model["id"] for model in models if model["parent"]]


def ready_hosts(gateway: Daemon) -> int:
    return int((gateway.get("/health") or {}).get("ready_hosts", 0))


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


def _within(adapter: str) -> str:
    return f"components/adapter/{adapter}/" if adapter else ""


def pointer(channel: ObjectStore, adapter: str = "") -> int:
    """The newest published version, of an adapter or of the model; 0 before the first."""
    text = _read(channel, f"{_within(adapter)}latest")
    return int(text) if text.isdigit() else 0


def read_versions(channel: ObjectStore, newest: int, adapter: str = "") -> list[Version]:
    names = [f"{_within(adapter)}weight_v{number:06}" for number in range(1, newest + 1)]
    found = ((name, _read(channel, f"{name}/{INDEX}")) for name in names)
    return [_version(channel, name, index) for name, index in found if index]


def _read(channel: ObjectStore, key: str) -> bytes:
    """Empty where it is not there."""
    try:
        return bytes(obstore.get(channel, key).bytes())
    except FileNotFoundError:
        return b""


def read_events(log: Path) -> list[EngineEvent]:
    return [EngineEvent(line["time"], line["event"], line.get("label", "")) for line in _lines(log)]


def read_loads(log: Path, adapter: str) -> list[EngineEvent]:
    """Versions of the adapter that the engine loaded, which it serves from then on."""
    labels = ((event, *event.label.split("@")) for event in read_events(log) if event.event == "loaded")
    return [
        replace(event, event="resumed", label=number) for event, name, number in labels if name == adapter
    ]


def read_steps(metrics: Path) -> list[TrainerStep]:
    return [
        TrainerStep(
            step=line["step"],
            rewards=tuple(line["rewards"]),
            lags=_counts(line["lags"]),
            versions_per_answer=_counts(line["versions_per_answer"]),
            time=line["time"],
        )
        for line in _lines(metrics)
    ]


def live_checksums(engine: Daemon, adapter: str | None = None) -> dict[str, str]:
    """Of the model's weights, or of a loaded adapter's."""
    asked = {"action": "checksum", "lora_name": adapter}
    ranks: Sequence[dict[str, Any]] = engine.post("/weights_checker", asked)["ranks"]
    return dict(ranks[0]["checksums"])


def _version(channel: ObjectStore, name: str, index: bytes) -> Version:
    facts = json.loads(index)["weightcast"]
    changed, elements, *_ = facts["totals"]
    return Version(
        number=facts["version"],
        created=facts["created"],
        changed=changed,
        elements=elements,
        delta_bytes=sum(each["size"] for each in obstore.list_with_delimiter(channel, name)["objects"]),
    )


def _counts(told: Mapping[str, int]) -> dict[int, int]:
    return {int(number): count for number, count in told.items()}


def _lines(log: Path) -> Iterator[Any]:
    """Whole lines only: the last one may still be written."""
    text = log.read_text() if log.exists() else ""
    return (json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n"))

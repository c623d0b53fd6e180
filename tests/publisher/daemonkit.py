"""Checkpoints, desks and daemons for the tests of the publisher's daemon."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from core_cases import Model, pack, tensor
from forked import weightcast
from waiting import wait_until

from weightcast.publisher.daemon.sources.queue import Job
from weightcast.publisher.daemon.sources.source import new_request

_NOBODY = 65534

INDEX = "model.safetensors.index.json"


def request_for(checkpoint: str, step: int | None, key: str | None) -> Job:
    """As POST /v1/publish asks for it."""
    return Job(id=new_request(), checkpoint=checkpoint, step=step, key=key)


def base_tensors(seed: int = 0) -> Model:
    rng = np.random.default_rng(seed)
    return {
        "embed.weight": tensor(rng, "BF16", 33, 17),
        "layer.0.up": tensor(rng, "BF16", 64, 40),
        "layer.0.quantised": tensor(rng, "F8_E4M3", 31),
        "layer.0.scale": tensor(rng, "F32", 4),
        "layer.1.empty": tensor(rng, "BF16", 0, 4),
        "layer.1.up": tensor(rng, "BF16", 64, 40),
    }


def changed(tensors: Model, seed: int, share: float = 0.02) -> Model:
    """Such a share of all bytes."""
    rng, new = np.random.default_rng(seed), {}
    for name, one in tensors.items():
        data = one.data.copy()
        data[rng.random(len(data)) < share] ^= 1
        new[name] = one._replace(data=data)
    return new


def files_of(tensors: Model, shards: int = 2) -> dict[str, bytes]:
    """File name to content, in the order in which a trainer writes them."""
    if shards == 1:
        return {"config.json": b"{}", "model.safetensors": pack(tensors)}
    names = [f"model-{at + 1:05}-of-{shards:05}.safetensors" for at in range(shards)]
    shared = {name: dict(list(tensors.items())[at::shards]) for at, name in enumerate(names)}
    weight_map = {tensor: name for name, some in shared.items() for tensor in some}
    return {
        "config.json": b"{}",
        **{name: pack(some) for name, some in shared.items()},
        INDEX: json.dumps({"metadata": {}, "weight_map": weight_map}).encode(),
    }


def write(directory: Path, tensors: Model, shards: int = 2) -> Path:
    """In its place, file by file."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in files_of(tensors, shards).items():
        (directory / name).write_bytes(data)
    return directory


def rename_in(directory: Path, tensors: Model, shards: int = 2) -> Path:
    unfinished = directory.with_name(f".{directory.name}.unfinished")
    write(unfinished, tensors, shards)
    # The rename must be later than the writes even where the file system's clock ticks slowly.
    wait_until(lambda: _ticked(unfinished))
    unfinished.rename(directory)
    return directory


def _ticked(directory: Path) -> bool:
    probe = directory.parent / ".probe"
    probe.write_bytes(b"")
    ticked = probe.stat().st_mtime_ns > max(path.stat().st_mtime_ns for path in directory.iterdir())
    return ticked


def write_after(other: Path, path: Path, data: bytes) -> None:
    """In its place, later than `other` as the file system's clock tells it."""

    def written() -> bool:
        path.write_bytes(data)
        return path.stat().st_ctime_ns > other.stat().st_ctime_ns

    wait_until(written)


@contextmanager
def unprivileged() -> Iterator[Path]:
    """A directory to work in, by a user whom permissions hold back: root is refused nothing."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o777)
        if user == 0:
            os.seteuid(_NOBODY)
        try:
            yield Path(directory)
        finally:
            os.seteuid(user)


@dataclass
class Places:
    root: Path

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def channel(self) -> Path:
        return self.root / "channel"

    @property
    def local(self) -> Path:
        return self.root / "local"

    @property
    def watch(self) -> Path:
        return self.root / "watch"

    @classmethod
    def made(cls, root: Path) -> Places:
        places = cls(root)
        write(places.base, base_tensors())
        places.watch.mkdir()
        return places

    def latest(self) -> str:
        path = self.channel / "latest"
        return path.read_text() if path.exists() else ""


@dataclass
class Daemon:
    """A publisher's daemon as a process of its own."""

    process: subprocess.Popen[bytes]
    log: Path
    client: httpx.Client

    @classmethod
    def start(cls, places: Places, *flags: str, token: str = "", base: bool = True) -> Daemon:
        port_file, log = places.root / "port", places.root / "log"
        port_file.unlink(missing_ok=True)
        with log.open("ab") as stream:
            process = weightcast(
                *("publisher", "run", "--channel", places.channel, "--local", places.local),
                *("--watch", places.watch, *(("--base", places.base) if base else ())),
                *("--port", "0", "--port-file", port_file, "--threads", "1"),
                *("--poll-seconds", "0.1", "--settle-seconds", "0.3", *flags),
                stderr=stream,
                env={**os.environ, "WEIGHTCAST_TOKEN": token},
            )
        daemon = cls(process, log, httpx.Client(trust_env=False, timeout=20))
        try:
            wait_until(lambda: port_file.exists() or process.poll() is not None)
            assert process.poll() is None, log.read_text()
            daemon.client.base_url = httpx.URL(f"http://127.0.0.1:{int(port_file.read_text())}")
        except BaseException:
            daemon.kill()
            raise
        return daemon

    def ready(self) -> Daemon:
        wait_until(lambda: self.get("/readyz").status_code == 200 or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text()
        return self

    def get(self, path: str) -> httpx.Response:
        return self.client.get(path)

    def post(self, path: str, json: Any, **headers: str) -> httpx.Response:
        return self.client.post(path, json=json, headers=headers)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.get("/v1/status").json()
        return found

    def wait_for_version(self, version: int) -> dict[str, Any]:
        def published() -> dict[str, Any] | None:
            status = self.status()
            # until the step ends, inbox and local checkpoint are those of before
            has_ended = status["publishing"] is None and status["loop"]["step_began"] is None
            return status if status["version"] == version and has_ended else None

        found: dict[str, Any] = wait_until(published)
        return found

    def stop(self) -> int:
        self.client.close()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def kill(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)

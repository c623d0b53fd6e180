"""Both daemons and the commands over a channel in a real S3 server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from core_cases import Model, tensor, unpack, write_checkpoint
from ports import free_ports
from s3_gateway import Gateway
from waiting import wait_until

pytestmark = pytest.mark.s3


def _model(seed: int) -> Model:
    """Of 64 x 512 bf16 words, a few of which differ from seed 0."""
    rng = np.random.default_rng(0)
    model = {name: tensor(rng, "BF16", 64, 512) for name in ("a.weight", "b.weight")}
    for number in range(seed):
        for one in model.values():
            one.data[np.random.default_rng(number).random(len(one.data)) < 0.01] ^= 1
    return model


@contextmanager
def _daemon(root: Path, side: str, *words: object) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "weightcast.shared.cli.main", side, "run", *map(str, words)]
    with (root / f"{side}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, (root / f"{side}.log").read_text()


def _status(port: int) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"http://127.0.0.1:{port}/v1/status", timeout=10).json()
    return answer


def test_a_host_follows_a_watched_directory(bucket: str, s3: Gateway, tmp_path: Path) -> None:
    channel, local = f"{bucket}/runs/seven", tmp_path / "host"
    base = write_checkpoint(tmp_path / "base", _model(0))
    (tmp_path / "saves").mkdir()
    ports = free_ports(2)
    with ExitStack() as daemons:
        places = ["--channel", channel, "--base", base, "--poll-seconds", 0.1, "--log-format", "json"]
        watch = ["--watch", tmp_path / "saves", "--settle-seconds", 0.2, "--local", tmp_path / "publisher"]
        made = [
            daemons.enter_context(_daemon(tmp_path, "publisher", "--port", ports[0], *watch, *places)),
            daemons.enter_context(
                _daemon(tmp_path, "subscriber", "--port", ports[1], "--local", local, *places)
            ),
        ]
        for port in ports:
            # what was saved before the publisher's start is left alone
            ready = f"http://127.0.0.1:{port}/readyz"
            wait_until(
                lambda ready=ready: httpx.get(ready, timeout=10).is_success,  # type: ignore[misc]
                passing=(httpx.TransportError,),
                what=ready,
            )
        for step in (1, 2, 3):
            saved = write_checkpoint(tmp_path / "unfinished", _model(step))
            saved.rename(tmp_path / "saves" / f"step-{step}")
            wait_until(
                lambda step=step: _status(ports[1])["local_version"] == step,  # type: ignore[misc]
                passing=(httpx.TransportError,),
                what=f"version {step}",
            )
        written = (local / "model.safetensors").read_bytes()
        assert written == (tmp_path / "saves" / "step-3" / "model.safetensors").read_bytes()
        fleet = httpx.get(f"http://127.0.0.1:{ports[0]}/v1/fleet", timeout=10).text
        assert channel in json.dumps(_status(ports[0])) and channel in json.dumps(_status(ports[1]))
        said = [
            *(Path(f"/proc/{daemon.pid}/cmdline").read_text() for daemon in made),
            *(json.dumps(_status(port)) for port in ports),
            *(httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text for port in ports),
            fleet,
        ]
    said += [path.read_text() for path in tmp_path.glob("*.log")]
    assert not [text for text in said if s3.access_key in text or s3.secret_key in text]


def test_commands_take_a_url(bucket: str, tmp_path: Path) -> None:
    def weightcast(*words: object) -> str:
        command = [sys.executable, "-m", "weightcast.shared.cli.main", *map(str, words)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ})
        assert done.returncode == 0, done.stderr
        return done.stdout

    channel, base = f"{bucket}/run", write_checkpoint(tmp_path / "base", _model(0))
    weightcast("doctor", "--channel", channel, "--role", "publisher")
    weightcast("channel", "init", "--channel", channel, "--base", base)
    for step in (1, 2):
        saved = write_checkpoint(tmp_path / f"step-{step}", _model(step))
        weightcast("publish", "--channel", channel, "--local", tmp_path / "publisher", saved, "--anchor")
    for host, options in (("one", ["--base", base]), ("two", [])):
        weightcast("sync", "--channel", channel, "--local", tmp_path / host, *options)
        [written] = (tmp_path / host).glob("*.safetensors")
        saved = tmp_path / "step-2" / "model.safetensors"
        assert unpack(written.read_bytes()) == unpack(saved.read_bytes())
    weightcast("channel", "verify", "--channel", channel)
    weightcast("channel", "tag", "best", 1, "--channel", channel)
    weightcast("sync", "--channel", channel, "--local", tmp_path / "one", "--target", "best")
    assert json.loads((tmp_path / "one" / "config.json").read_text()) == {}
    assert json.loads(weightcast("fleet", "--channel", channel, "--json"))["run_id"]

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
from http_faults import http_faults
from in_process import Command, Done
from ports import free_ports
from s3_gateway import Gateway
from waiting import wait_until

from examples import observe
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.doctor.sizing import (
    HOST_POLL,
    HOST_REPORT,
    HOST_VERSION,
    PUBLISHER_POLL,
    PUBLISHER_VERSION,
)

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
    seen = observe.open_channel(channel)
    assert observe.pointer(seen) == 2
    versions = observe.read_versions(seen, 2)
    assert [(one.number, one.elements) for one in versions] == [(1, 65536), (2, 65536)]
    assert all(0 < one.changed < one.delta_bytes for one in versions)


_DEPLOY = Path(__file__).parents[2] / "deploy" / "s3"


def _statements(role: str, bucket: str, user: str, without: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    text = (_DEPLOY / f"{role}.json").read_text().replace("BUCKET", bucket).replace("PREFIX", "runs/seven")
    statements: list[dict[str, Any]] = json.loads(text)["Statement"]
    for one in statements:
        one["Principal"] = {"AWS": [f"arn:aws:iam:::user/{user}"]}
        one["Action"] = [action for action in one["Action"] if action not in without]
    return [one for one in statements if one["Action"]]


@contextmanager
def _with_keys(keys: Gateway) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in keys.environment().items():
            patch.setenv(variable, value)
        yield


@contextmanager
def _as_role(role: str, s3: Gateway, bucket: str, *without: str) -> Iterator[None]:
    """In the environment: keys of a user with the rights of deploy/s3, less some."""
    with s3.user() as (name, keys), _with_keys(keys):
        s3.allow(bucket, _statements(role, bucket, name, without))
        yield


def _published(root: Path, channel: str, weightcast: Command, *words: object) -> Done:
    saved = root / "saved"
    if not saved.exists():
        write_checkpoint(saved, _model(1))
    places = ["--channel", channel, "--local", root / "publisher", "--base", root / "base"]
    return weightcast("publish", *places, saved, *words)


def test_the_rights_of_a_role_are_enough(
    bucket: str, s3: Gateway, tmp_path: Path, weightcast: Command
) -> None:
    channel, name = f"{bucket}/runs/seven", bucket.removeprefix("s3://")
    base = write_checkpoint(tmp_path / "base", _model(0))

    def succeeds(*words: object) -> None:
        done = weightcast(*words, "--channel", channel)
        assert done.code == 0, done.out + done.err

    with _as_role("publisher", s3, name):
        succeeds("doctor", "--role", "publisher")
        succeeds("channel", "init", "--base", base)
        for step in range(1, 5):
            saved = write_checkpoint(tmp_path / f"step-{step}", _model(step))
            succeeds("publish", "--local", tmp_path / "publisher", saved, "--anchor", "--skip-span", 2)
        succeeds("channel", "tag", "best", 4)
        succeeds("channel", "verify")
        succeeds("channel", "prune", "--keep-versions", 1, "--grace-seconds", 0)
    with _as_role("host", s3, name):
        succeeds("doctor", "--role", "subscriber")
        succeeds("sync", "--local", tmp_path / "once")
        [port] = free_ports(1)
        places = ["--channel", channel, "--local", tmp_path / "host", "--port", port]
        with _daemon(tmp_path, "subscriber", *places):
            wait_until(lambda: weightcast("fleet", "--channel", channel, "--json").json["hosts"])
    with _as_role("host", s3, name, "s3:PutObject", "s3:DeleteObject"):
        succeeds("sync", "--local", tmp_path / "reporting-to-the-publisher")


@pytest.mark.parametrize("right", ["s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject"])
def test_a_right_that_a_publisher_lacks_is_named(
    bucket: str, s3: Gateway, tmp_path: Path, weightcast: Command, right: str
) -> None:
    channel, name = f"{bucket}/runs/seven", bucket.removeprefix("s3://")
    base = write_checkpoint(tmp_path / "base", _model(0))
    assert weightcast("channel", "init", "--channel", channel, "--base", base).code == 0
    with _as_role("publisher", s3, name, right):
        done = _published(tmp_path, channel, weightcast)
        if right == "s3:DeleteObject":
            assert weightcast("channel", "tag", "best", 0, "--channel", channel).code == 0
            done = weightcast("channel", "tag", "best", "--delete", "--channel", channel)
        assert done.code == 3 and "was denied" in done.err and "docs/stores.md" in done.err


@pytest.mark.parametrize("right", ["s3:ListBucket", "s3:GetObject"])
def test_a_right_that_a_host_lacks_is_named(
    bucket: str, s3: Gateway, tmp_path: Path, weightcast: Command, right: str
) -> None:
    channel, name = f"{bucket}/runs/seven", bucket.removeprefix("s3://")
    base = write_checkpoint(tmp_path / "base", _model(0))
    assert weightcast("channel", "init", "--channel", channel, "--base", base).code == 0
    assert _published(tmp_path, channel, weightcast, "--anchor").code == 0
    with _as_role("host", s3, name, right):
        done = weightcast("sync", "--channel", channel, "--local", tmp_path / "host")
        assert done.code == 3 and "was denied" in done.err and "docs/stores.md" in done.err
        assert not list(tmp_path.glob("host/*.safetensors"))


def test_a_host_writes_its_reports_only(
    bucket: str, s3: Gateway, tmp_path: Path, weightcast: Command
) -> None:
    channel, name = f"{bucket}/runs/seven", bucket.removeprefix("s3://")
    base = write_checkpoint(tmp_path / "base", _model(0))
    assert weightcast("channel", "init", "--channel", channel, "--base", base).code == 0
    with _as_role("host", s3, name):
        for done in (
            _published(tmp_path, channel, weightcast),
            weightcast("channel", "tag", "best", 0, "--channel", channel),
        ):
            assert done.code == 3 and "was denied (PUT)" in done.err and "docs/stores.md" in done.err
    assert [entry.name for entry in open_store(channel).list()] == ["base.json", "channel.json"]


def test_daemons_make_no_more_requests_than_the_plan_says(
    bucket: str, s3: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = f"{bucket}/run"
    base = write_checkpoint(tmp_path / "base", _model(0))
    ports, sides = free_ports(2), ("publisher", "subscriber")
    with ExitStack() as stack:
        proxies = [stack.enter_context(http_faults(s3.endpoint)) for _ in sides]
        for side, port, proxy in zip(sides, ports, proxies, strict=True):
            ready = f"http://127.0.0.1:{port}/readyz"
            monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
            words = ["--channel", channel, "--base", base, "--local", tmp_path / side, "--poll-seconds", 0.2]
            stack.enter_context(_daemon(tmp_path, side, "--port", port, *words))
            wait_until(
                lambda ready=ready: httpx.get(ready, timeout=10).is_success,  # type: ignore[misc]
                passing=(httpx.TransportError,),
            )
        began = [_status(port)["loop"]["steps"] for port in ports]
        for proxy in proxies:
            proxy.requests.clear()
        for step in (1, 2, 3, 4):
            saved = write_checkpoint(tmp_path / f"step-{step}", _model(step))
            url = f"http://127.0.0.1:{ports[0]}/v1/publish"
            httpx.post(url, json={"checkpoint": str(saved)}, timeout=10).raise_for_status()
            wait_until(lambda step=step: _status(ports[1])["local_version"] == step)  # type: ignore[misc]
        made = [list(proxy.requests) for proxy in proxies]
        # a step may be under way, and one more begin
        steps = [_status(port)["loop"]["steps"] - first + 2 for port, first in zip(ports, began, strict=True)]
    reports = HOST_REPORT.times(2 * 4 + 1)
    kinds = [(PUBLISHER_POLL, PUBLISHER_VERSION), (HOST_POLL, HOST_VERSION)]
    for requests, count, (poll, version) in zip(made, steps, kinds, strict=True):
        puts = sum(method != "HEAD" and (method != "GET" or "list-type" in path) for method, path in requests)
        bound = [poll.times(count), version.times(4), reports]
        assert puts <= sum(each.puts for each in bound), requests
        assert len(requests) - puts <= sum(each.gets for each in bound), requests


def test_a_mirror_has_a_host_s_rights_to_its_source_and_a_publisher_s_to_its_copy(
    bucket: str, s3: Gateway, tmp_path: Path, weightcast: Command
) -> None:
    channel, copy = f"{bucket}/runs/seven", s3.make_bucket()
    base = write_checkpoint(tmp_path / "base", _model(0))
    assert weightcast("channel", "init", "--channel", channel, "--base", base).code == 0
    assert _published(tmp_path, channel, weightcast, "--anchor").code == 0
    words = ["mirror", "sync", "--from", channel, "--to", f"s3://{copy}/runs/seven"]
    with s3.user() as (name, keys), _with_keys(keys):
        s3.allow(copy, _statements("publisher", copy, name))
        source = bucket.removeprefix("s3://")
        s3.allow(source, _statements("host", source, name, ("s3:GetObject",)))
        done = weightcast(*words)
        assert done.code == 3 and "was denied (GET)" in done.err
        s3.allow(source, _statements("host", source, name))
        done = weightcast(*words)
        assert done.code == 0, done.err
        assert weightcast("channel", "verify", "--channel", f"s3://{copy}/runs/seven").code == 0

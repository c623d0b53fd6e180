"""The commands over channels in emulators of object stores."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from core_cases import Model, some_changed, tensor, unpack, write_checkpoint
from emulators import Emulator, moto
from forked import run_weightcast
from forked import weightcast as weightcast_process
from http_faults import Fault, HttpFaults, http_faults
from in_process import Command
from ports import free_ports
from waiting import wait_until

from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.store import Unavailable

pytestmark = pytest.mark.stores
DIALECTS = ["azure", "moto"]


def _models(count: int) -> list[Model]:
    rng = np.random.default_rng(3)
    models: list[Model] = [{name: tensor(rng, "BF16", 64, 256) for name in ("a.weight", "b.weight")}]
    while len(models) < count:
        models.append(some_changed(models[-1], rng))
    return models


@pytest.mark.parametrize("dialect", DIALECTS)
def test_commands_take_a_url(
    dialect: str, make_bucket: Callable[[str], str], tmp_path: Path, weightcast: Command
) -> None:
    channel, models = f"{make_bucket(dialect)}/runs/seven", _models(6)
    base, local = write_checkpoint(tmp_path / "base", models[0]), tmp_path / "publisher"
    saved = [write_checkpoint(tmp_path / f"step-{step}", model) for step, model in enumerate(models)]

    def succeeds(*words: object) -> str:
        done = weightcast(*words, "--channel", channel)
        assert done.code == 0, done.out + done.err
        return done.out

    def follows(host: str, step: int, *words: object) -> None:
        succeeds("sync", "--local", tmp_path / host, *words)
        [written] = (tmp_path / host).glob("*.safetensors")
        assert unpack(written.read_bytes()) == unpack((saved[step] / "model.safetensors").read_bytes())

    succeeds("doctor", "--role", "publisher")
    succeeds("channel", "init", "--base", base)
    for step in range(1, 5):
        succeeds("publish", "--local", local, saved[step], "--skip-span", 2, *["--anchor"] * (step == 3))
        if step == 1:
            follows("behind", 1, "--base", base)
    follows("new", 4)
    follows("behind", 4)
    succeeds("channel", "tag", "best", 2)
    follows("tagged", 2, "--base", base, "--target", "best")
    succeeds("channel", "verify")
    store = open_store(channel)
    shard = next(name for name in store.names("weight_v000004") if name.endswith(".safetensors"))
    store.replace(f"weight_v000004/{shard}", b"damaged")
    assert weightcast("channel", "verify", "--channel", channel).code != 0
    succeeds("channel", "repair", "--local", local)
    succeeds("channel", "tag", "best", "--delete")
    succeeds("channel", "prune", "--keep-versions", 1, "--host-versions", 0, "--grace-seconds", 0)
    assert store.names("weight_v000001") == []
    succeeds("publish", "--local", local, saved[5])
    succeeds("channel", "verify")
    follows("new", 5)
    succeeds("doctor", "--role", "subscriber")
    copy = f"{channel}-copy"
    assert weightcast("mirror", "sync", "--from", channel, "--to", copy).code == 0
    assert weightcast("channel", "verify", "--channel", copy).code == 0


@pytest.fixture(params=DIALECTS)
def emulator(
    request: pytest.FixtureRequest, emulators: Callable[[str], Emulator], monkeypatch: pytest.MonkeyPatch
) -> Emulator:
    found = emulators(request.param)
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    return found


@pytest.fixture
def proxy(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpFaults]:
    with http_faults(emulator.origin) as proxy:
        for name, value in emulator.environment.items():
            monkeypatch.setenv(name, value.replace(emulator.origin, proxy.endpoint))
        yield proxy


@pytest.mark.parametrize("emulator", ["moto"], indirect=True)
@pytest.mark.parametrize("ignored", ["if-none-match", "if-match"])
def test_a_store_that_ignores_conditions_is_refused_by_whatever_writes(
    emulator: Emulator, proxy: HttpFaults, ignored: str, tmp_path: Path, weightcast: Command
) -> None:
    channel, models = f"{emulator.make_bucket()}/run", _models(3)
    base = write_checkpoint(tmp_path / "base", models[0])
    new = [write_checkpoint(tmp_path / f"new-{step}", model) for step, model in enumerate(models)]
    publish = ["publish", "--local", tmp_path / "publisher", "--anchor"]
    # in processes of their own: each tries a channel once
    assert run_weightcast("channel", "init", "--channel", channel, "--base", base).returncode == 0
    for step in (1, 2):
        assert run_weightcast(*publish, new[step], "--channel", channel).returncode == 0
    proxy.dropped = frozenset({ignored.encode()})
    prune = ["channel", "prune", "--keep-versions", 1, "--host-versions", 0]
    repair = ["channel", "repair", "--local", tmp_path / "publisher"]
    for words in (prune, [*publish, new[0]], repair):
        if words is repair:
            open_store(channel).delete("latest")
        done = weightcast(*words, "--channel", channel)
        assert done.code == 3 and f"ignores {ignored}" in done.err and "--unfenced" in done.err, done
    done = weightcast("channel", "init", "--channel", f"{channel}-other", "--base", base)
    assert done.code == 3 and f"ignores {ignored}" in done.err
    done = weightcast("doctor", "--channel", channel, "--role", "publisher")
    assert done.code != 0 and ignored in done.out


def test_what_was_deleted_meanwhile_is_deleted(emulator: Emulator, proxy: HttpFaults) -> None:
    store = open_store(f"{emulator.make_bucket()}/run")
    for name in ("one", "two"):
        store.create(f"weight_v000001/{name}", b"bytes")
    store.create("tags/best", b"000001")
    proxy.faults = [Fault("repeat", "POST", times=2)]
    store.discard("weight_v000001")
    assert store.delete("tags/best") and not store.delete("tags/best")
    assert store.names() == [] and proxy.faults[0].hits == 2


def test_errors_name_what_is_wrong_and_no_credential(
    emulator: Emulator, proxy: HttpFaults, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, keys = emulator.make_bucket(), [v for name, v in emulator.environment.items() if "KEY" in name]
    store = open_store(f"{url}/run")
    missing = open_store(f"{emulator.scheme}://weightcast-has-none/run")
    with pytest.raises(Unavailable, match="weightcast-has-none/run/latest: the bucket does not exist"):
        missing.create("latest", b"000001")
    store.create("latest", b"000001")
    for status in (401, 403):
        for method, use in (
            ("GET", lambda: store.read("latest", 10)),
            ("PUT", lambda: store.create("other", b"")),
            ("GET", store.names),
            ("POST", lambda: store.delete("latest")),
        ):
            proxy.faults = [Fault("status", method, status=status)]
            with pytest.raises(Unavailable, match=rf"access to {url}/.* was denied \(") as raised:
                use()
            assert raised.value.remedy and raised.value.exit_code == 3
            assert not [key for key in keys if key in str(raised.value)]


@contextlib.contextmanager
def _daemon(root: Path, side: str, *words: object) -> Iterator[subprocess.Popen[Any]]:
    """Ends by SIGTERM, and by nothing else."""
    with (root / f"{side}.log").open("wb") as log:
        process = weightcast_process(side, "run", *words, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, (root / f"{side}.log").read_text()


def _answer(port: int, path: str) -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=20)


def test_daemons_outlive_a_store_that_hangs_and_a_bucket_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(moto(tmp_path))
        proxy = stack.enter_context(http_faults(own.origin))
        for name, value in own.environment.items():
            monkeypatch.setenv(name, value.replace(own.origin, proxy.endpoint))
        channel = f"{own.make_bucket()}/run"
        base = write_checkpoint(tmp_path / "base", _models(1)[0])
        ports, sides = free_ports(2), ("publisher", "subscriber")
        places = ["--channel", channel, "--base", base, "--poll-seconds", 0.2]
        daemons = [
            stack.enter_context(
                _daemon(tmp_path, side, *places, "--local", tmp_path / side / "local", "--port", port)
            )
            for side, port in zip(sides, ports, strict=True)
        ]

        def waits_for(what: Callable[[], object]) -> None:
            wait_until(what, every=0.2, passing=(httpx.TransportError,))

        def shown(port: int) -> str:
            return " ".join(run_weightcast("status", str(port)).stdout.split())

        for port in ports:
            waits_for(lambda port=port: _answer(port, "/readyz").is_success)  # type: ignore[misc]

        proxy.faults = [Fault("delay", times=1_000_000, seconds=30)]
        with weightcast_process(
            "channel", "log", "--channel", channel, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
        ) as command:
            assert command.stderr is not None
            said = command.stderr.readline()
            command.kill()
        assert f"{channel}/" in said and "has not answered for" in said
        silent = f"{channel}/.* has not answered for [0-9]+ s"
        for port in ports:
            waits_for(lambda port=port: re.search(silent, _answer(port, "/v1/status").text))  # type: ignore[misc]
        for side in sides:
            waits_for(lambda side=side: re.search(silent, (tmp_path / f"{side}.log").read_text()))  # type: ignore[misc]
        waits_for(lambda: re.search(silent, shown(ports[0])) and re.search(silent, shown(ports[1])))

        proxy.faults = []
        for port in ports:
            waits_for(lambda port=port: "has not answered" not in _answer(port, "/v1/status").text)  # type: ignore[misc]
        httpx.post(f"{own.origin}/moto-api/reset").raise_for_status()
        log = tmp_path / "publisher.log"
        for text in ("step failed: s3://", "the claim to the channel was not renewed: s3://"):
            waits_for(lambda text=text: text in log.read_text())  # type: ignore[misc]
        waits_for(lambda: "the bucket does not exist" in _answer(ports[0], "/readyz").text)
        assert [daemon.poll() for daemon in daemons] == [None, None]
    for side in sides:
        assert "Traceback" not in (tmp_path / f"{side}.log").read_text()

"""Rates: the bucket by a clock of the test, and stores that move bytes through it."""

import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
from core_cases import Model, tensor, write_checkpoint
from emulators import AZURE, S3, Emulator
from forked import run_weightcast, weightcast
from http_faults import http_faults
from memory_store import MemoryStore
from waiting import wait_until

from weightcast.publisher import Publisher, init_channel
from weightcast.shared.base.errors import Stopped
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.rate import Rate, Rates
from weightcast.shared.channel.store import Store

RATE = 1_000_000


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def wait(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


class Link:
    """Moves bytes as `rate` lets it, each in some time of its own."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.rate = Rate(RATE, self.clock.wait, lambda: self.clock.now)
        self.moved: list[tuple[float, int]] = []

    def move(self, seconds: float, random: np.random.Generator, busy: Callable[[], float]) -> None:
        end = self.clock.now + seconds
        while self.clock.now < end:
            nbytes = int(random.integers(1, self.rate.piece + 1))
            self.rate.take(nbytes)
            self.moved.append((self.clock.now, nbytes))
            self.clock.now += busy()

    def most(self, seconds: float) -> int:
        """In any window of so many seconds."""
        return max(
            sum(nbytes for at, nbytes in self.moved if begin <= at < begin + seconds)
            for begin, _ in self.moved
        )


@pytest.mark.parametrize("seed", range(3))
def test_holds_within_five_percent_over_ten_seconds(seed: int) -> None:
    random, link = np.random.default_rng(seed), Link()
    began = link.clock.now
    link.move(60, random, lambda: float(random.random() * 0.1))
    assert sum(nbytes for _, nbytes in link.moved) >= 0.95 * RATE * (link.clock.now - began)
    assert link.most(10) <= 1.05 * 10 * RATE


def test_saves_little_up_while_nothing_moves() -> None:
    random, link = np.random.default_rng(0), Link()
    link.move(5, random, lambda: 0.0)
    link.clock.now += 100
    link.move(30, random, lambda: 0.0)
    assert link.most(10) <= 1.05 * 10 * RATE


def test_threads_share_a_rate() -> None:
    rate, began = Rate(RATE), time.monotonic()
    threads = [threading.Thread(target=lambda: [rate.take(50_000) for _ in range(5)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # later on a busy machine
    assert time.monotonic() - began >= 4 * 5 * 50_000 / RATE - 0.01


def _opened(kind: str, tmp_path: Path, request: pytest.FixtureRequest, rates: Rates) -> Store:
    if kind == "memory":
        return MemoryStore(rates)
    (tmp_path / "channel").mkdir()
    make_bucket = request.getfixturevalue("make_bucket")
    return open_store(tmp_path / "channel" if kind == "directory" else f"{make_bucket(kind)}/run", rates)


@pytest.mark.parametrize("kind", ["directory", "memory", S3, AZURE])
def test_stores_move_no_more_than_their_rate(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    fetched, written = Clock(), Clock()
    fetch = Rate(RATE, fetched.wait, lambda: fetched.now)
    publish = Rate(RATE, written.wait, lambda: written.now)
    store = _opened(kind, tmp_path, request, Rates(fetch, publish)).begin("version")
    data = bytes(6 * RATE)
    writer = store.write("large")
    writer.write(data)
    writer.finish()
    assert written.now - 1000 >= 5.9 and fetched.now == 1000
    assert b"".join(store.pieces("large")) == data
    assert fetched.now - 1000 >= 5.9
    store.read_range("large", 0, RATE)
    assert fetched.now - 1000 >= 6.9
    before = written.now
    store.replace("beat", bytes(100))
    assert written.now == before


@pytest.mark.parametrize("kind", ["directory", "memory", S3, AZURE])
def test_a_wait_may_be_stopped(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    def stop(seconds: float) -> None:
        raise Stopped("the process ends")

    store = _opened(kind, tmp_path, request, Rates(Rate(RATE, stop), Rate(RATE, stop)))
    with pytest.raises(Stopped):
        writer = store.write("large")
        writer.write(bytes(RATE))
        writer.finish()
    writer.discard()
    assert store.names() == []
    store.create("small", bytes(RATE))
    with pytest.raises(Stopped):
        list(store.pieces("small"))


@pytest.mark.stores
@pytest.mark.parametrize(("dialect", "part"), [("azure", 1 << 20), ("moto", 5 << 20)])
def test_uploads_that_wait_move_in_small_parts(
    dialect: str,
    part: int,
    emulators: Callable[[str], Emulator],
    make_bucket: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A part is sent as fast as the network takes it."""
    url, emulator, clock = make_bucket(dialect), emulators(dialect), Clock()
    with http_faults(emulator.origin) as proxy:
        for name, value in emulator.environment.items():
            monkeypatch.setenv(name, value.replace(emulator.origin, proxy.endpoint))
        store = open_store(f"{url}/run", Rates(publish=Rate(RATE, clock.wait, lambda: clock.now)))
        pieces = [bytes(RATE)] * 12
        store.upload("streamed", iter(pieces))
        Store.upload(store, "whole", pieces)
        puts = [headers for method, _, headers in proxy.sent if method == "PUT"]
        sizes = [int(headers.get("content-length", 0)) for headers in puts]
        assert max(sizes) == part and sum(sizes) >= 2 * 12 * RATE
        for key in ("streamed", "whole"):
            assert b"".join(store.pieces(key)) == b"".join(pieces)


def _model(seed: int) -> Model:
    return {"a.weight": tensor(np.random.default_rng(seed), "BF16", 512, 512)}


def test_commands_take_a_rate(tmp_path: Path) -> None:
    """Version 1 is full weights, nearly: every word differs."""
    base, new = (write_checkpoint(tmp_path / f"v{seed}", _model(seed)) for seed in range(2))
    channel = tmp_path / "channel"
    init_channel(channel, base)
    began = time.monotonic()
    done = run_weightcast(
        *("publish", "--channel", channel, "--local", tmp_path / "publisher", new),
        *("--anchor", "--publish-rate", "1MB"),
    )
    assert done.returncode == 0, done.stderr
    nbytes = sum(path.stat().st_size for path in channel.rglob("*.safetensors"))
    assert nbytes > 800_000
    assert time.monotonic() - began >= nbytes / 1e6 - 0.3
    began = time.monotonic()
    done = run_weightcast(
        *("sync", "--channel", channel, "--local", tmp_path / "host", "--base", base),
        *("--fetch-rate", "500kB", "--json"),
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began >= json.loads(done.stdout)["bytes_read"] / 5e5 - 0.3
    done = run_weightcast("publish", "--channel", channel, "--local", "x", new, "--publish-rate", "fast")
    assert done.returncode == 2 and "fast" in done.stderr


@pytest.mark.parametrize("side", ["publisher", "subscriber"])
def test_a_daemon_does_not_wait_for_its_rate_when_it_is_to_end(side: str, tmp_path: Path) -> None:
    """It would take an hour."""
    base, new = (write_checkpoint(tmp_path / f"v{seed}", _model(seed)) for seed in range(2))
    channel, port_file = tmp_path / "channel", tmp_path / "port"
    init_channel(channel, base)
    if side == "subscriber":
        with Publisher.open(channel, local=tmp_path / "publisher", base=base) as publisher:
            publisher.publish_checkpoint(new)
    rate = "--publish-rate" if side == "publisher" else "--fetch-rate"
    daemon = weightcast(
        *(side, "run", "--channel", channel, "--base", base, "--local", tmp_path / side),
        *("--port", 0, "--port-file", port_file, "--poll-seconds", 0.1, rate, 100, "--stop-seconds", 20),
    )
    try:
        wait_until(port_file.exists)
        url = f"http://127.0.0.1:{int(port_file.read_text())}"
        if side == "publisher":
            wait_until(lambda: httpx.get(f"{url}/readyz").is_success)
            httpx.post(f"{url}/v1/publish", json={"checkpoint": str(new)}).raise_for_status()
            wait_until(lambda: list(channel.glob("weight_v*/*")))
        else:
            wait_until(lambda: httpx.get(f"{url}/v1/status").json()["state"] == "fetching")
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(60) == 0
    finally:
        daemon.kill()
        daemon.wait()

"""Channels behind a plain HTTP server: any static one, and nginx with the files of deploy/nginx."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from core_cases import bytes_of, read_checkpoint, some_changed
from fastapi import FastAPI
from forked import weightcast as weightcast_process
from http_faults import http_faults
from in_process import Command
from ports import free_ports
from publisher_cases import Place
from tls import Authority
from waiting import wait_until

from weightcast.publisher.maintenance.upkeep import UpkeepOptions
from weightcast.publisher.mirror.served import served
from weightcast.shared.base.errors import DamagedFile, Refused
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.http_store import open_http_store
from weightcast.shared.channel.store import NotFound, Unavailable
from weightcast.subscriber.sync.options import SyncOptions
from weightcast.subscriber.sync.sync import Sync

HOSTS = 100


class Server:
    """Answers GET and HEAD of files below `root`; `needs`: an Authorization header, where it is set."""

    def __init__(self, root: Path, tls: ssl.SSLContext | None = None) -> None:
        server = self

        class Handler(SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.endswith("/moved"):
                    self.send_response(302)
                    self.send_header("Location", "/latest")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                elif server.needs and self.headers.get("Authorization") != server.needs:
                    self.send_error(401)
                else:
                    super().do_GET()

            def log_message(self, *_: object) -> None:
                pass

        self.needs = ""
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(root)))
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self._http.server_port}"
        if tls is not None:
            self._http.socket = tls.wrap_socket(self._http.socket, server_side=True)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


class Served:
    """As a mirror serves its destination."""

    def __init__(self, root: Path) -> None:
        app = FastAPI()
        app.include_router(served(root))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/channel"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],))
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()


@pytest.fixture
def static(place: Place) -> Iterator[Server]:
    with contextlib.closing(Server(place.channel)) as server:
        yield server


@pytest.fixture(params=[Server, Served])
def server(place: Place, request: pytest.FixtureRequest) -> Iterator[Server | Served]:
    with contextlib.closing(request.param(place.channel)) as server:
        yield server


def _synced(url: str, local: Path, base: Path | None) -> Sync:
    sync = Sync(SyncOptions(url, local, base, visible_seconds=5.0))
    try:
        sync.sync_once()
    finally:
        sync.close()
    return sync


class Run:
    """Publishes anchors of every fourth version, and multi-step deltas over 2 and 4 versions."""

    def __init__(self, place: Place) -> None:
        self._place, self._model, self._rng = place, place.model, np.random.default_rng(7)

    def publish(self, versions: int) -> None:
        with self._place.publisher(upkeep=UpkeepOptions(skip_span=4, anchor_every=4)) as publisher:
            for _ in range(versions):
                self._model = some_changed(self._model, self._rng)
                publisher.publish_checkpoint(self._place.new(self._model))
                publisher.make_due()

    @property
    def bytes(self) -> dict[str, bytes]:
        return bytes_of(self._model)


@pytest.fixture
def run(place: Place) -> Run:
    return Run(place)


def test_a_host_follows_a_static_server(place: Place, run: Run, server: Server | Served) -> None:
    run.publish(1)
    _synced(server.url, place.host, place.base)
    run.publish(5)
    assert _synced(server.url, place.host, place.base).status.local_version == 6
    assert read_checkpoint(place.host) == run.bytes


@contextlib.contextmanager
def _daemon(place: Place, channel: str) -> Iterator[Callable[[], dict[str, Any]]]:
    """A running subscriber; gives its status. It is stopped at the end."""
    port = place.root / "port"
    port.unlink(missing_ok=True)
    with (place.root / "daemon.log").open("ab") as log:
        words = ("--local", place.host, "--base", place.base, "--threads", 1, "--poll-seconds", 0.1)
        process = weightcast_process(
            *("subscriber", "run", "--channel", channel, "--port", 0, "--port-file", port, *words), stderr=log
        )

    def status() -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"http://127.0.0.1:{int(port.read_text())}/v1/status").json()
        return found

    try:
        wait_until(port.exists, what=f"{place.root / 'daemon.log'}")
        yield status
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(30)


def test_a_daemon_follows_a_static_server_and_goes_on_after_a_restart(
    place: Place, run: Run, server: Server | Served
) -> None:
    for versions in (2, 5):
        with _daemon(place, server.url) as status:
            for _ in range(2):
                run.publish(versions)
                wanted = int((place.channel / "latest").read_bytes())
                wait_until(lambda: status()["local_version"] == wanted)  # noqa: B023
                wait_until(lambda: status()["ready"])
                assert read_checkpoint(place.host) == run.bytes
            found = status()
            assert (found["channel"], found["report_error"]) == (server.url, "")
            # as of a host that was here before, no full weights are read again
            wait_until(lambda: any(status()["bytes_by_cause"][cause] for cause in ("step", "skip")))
            assert not status()["bytes_by_cause"]["anchor"]


def test_a_host_joins_and_catches_up_without_a_listing(
    place: Place, run: Run, server: Server | Served
) -> None:
    run.publish(6)
    joined = _synced(server.url, place.root / "joined", None)
    assert read_checkpoint(place.root / "joined") == run.bytes
    assert joined.status.bytes_by_cause["anchor"]
    behind = _synced(server.url, place.host, place.base)
    assert read_checkpoint(place.host) == run.bytes
    assert behind.status.bytes_by_cause["skip"] and not behind.status.bytes_by_cause["anchor"]


def test_commands_read_and_refuse_to_write(
    place: Place, run: Run, server: Server | Served, weightcast: Command
) -> None:
    run.publish(4)
    here = ["--channel", server.url]
    assert weightcast("channel", "verify", *here).code == 0
    log = weightcast("channel", "log", *here, "--json").out
    assert re.findall(r'"version": ?(\d)', log)[:4] and weightcast("channel", "show", 3, *here).code == 0
    found = weightcast("doctor", *here, "--role", "subscriber")
    assert found.code == 0, found
    before = sorted(place.channel.rglob("*"))
    pub = place.root / "other"
    for words in (
        ("channel", "tag", "best", 1),
        ("channel", "keep", 1),
        ("channel", "prune", "--keep-versions", 1),
        ("publish", place.base, "--local", pub, "--base", place.base),
        ("fleet",),
        ("doctor", "--role", "publisher"),
    ):
        done = weightcast(*words, *here)
        assert done.code == 3, (words, done)
        assert "over HTTP" in done.out + done.err and "Traceback" not in done.err
    assert sorted(place.channel.rglob("*")) == before and not pub.exists()
    (place.channel / "weight_v000003" / "model.safetensors.index.json").unlink()
    assert "version 3" in weightcast("channel", "verify", *here).out


def test_credentials_come_from_the_environment_and_redirects_are_refused(
    place: Place, static: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    static.needs = "Bearer se-cret"
    with pytest.raises(Unavailable, match="denied"):
        open_http_store(static.url).read("channel.json", 1 << 20)
    monkeypatch.setenv("WEIGHTCAST_CHANNEL_TOKEN", "se-cret")
    assert open_http_store(static.url).read("channel.json", 1 << 20)
    monkeypatch.delenv("WEIGHTCAST_CHANNEL_TOKEN")
    static.needs = "Basic bWU6c2UtY3JldA=="
    monkeypatch.setenv("WEIGHTCAST_CHANNEL_USER", "me")
    monkeypatch.setenv("WEIGHTCAST_CHANNEL_PASSWORD", "se-cret")
    assert open_http_store(static.url).read("channel.json", 1 << 20)
    with pytest.raises(Unavailable, match="redirect") as moved:
        open_http_store(static.url).read("moved", 100)
    assert moved.value.remedy
    with pytest.raises(Refused, match="credentials") as raised:
        open_http_store(static.url.replace("://", "://me:se-cret@"))
    assert "se-cret" not in str(raised.value)


@pytest.mark.parametrize("kind", ["http", "s3"])
def test_a_private_authority_is_trusted_for_the_right_name(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bucket" / "run").mkdir(parents=True)
    (tmp_path / "bucket" / "run" / "latest").write_bytes(b"000001")
    authority = Authority(tmp_path)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "any")

    def read(server: Server) -> bytes:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        url = "s3://bucket/run" if kind == "s3" else f"{server.url}/bucket/run"
        return open_store(url).read("latest", 10)

    with contextlib.closing(Server(tmp_path, authority.server("127.0.0.1"))) as server:
        with pytest.raises(Unavailable, match="certificate is not valid") as raised:
            read(server)
        assert "SSL_CERT_FILE" in raised.value.remedy
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        assert read(server) == b"000001"
    with (
        contextlib.closing(Server(tmp_path, authority.server("192.0.2.1"))) as server,
        pytest.raises(Unavailable, match="certificate is not valid"),
    ):
        read(server)


def test_what_a_store_over_http_promises(place: Place, server: Server | Served) -> None:
    store = open_http_store(server.url)
    (place.channel / "some file").write_bytes(b"0123456789")
    (place.channel / "empty").write_bytes(b"")
    assert store.read("some file", 10) == b"0123456789" and store.read_range("some file", 3, 4) == b"3456"
    assert store.read_range("some file", 8, 9) == b"89" and store.read_range("some file", 99, 1) == b""
    assert b"".join(store.pieces("some file")) == b"0123456789" and store.read("empty", 1) == b""
    found = store.stat("some file")
    assert found is not None and found.size == 10 and store.stat("other") is None
    for use in (lambda: store.read("other", 1), lambda: next(iter(store.pieces("other")))):
        with pytest.raises(NotFound):
            use()
    with pytest.raises(DamagedFile, match="9-byte"):
        store.read("some file", 9)
    for refused in (store.names, lambda: store.create("latest", b""), store.now):
        with pytest.raises(Refused, match="over HTTP"):
            refused()
    with http_faults("http://127.0.0.1:9") as gone, pytest.raises(Unavailable, match=gone.endpoint):
        open_http_store(gone.endpoint).read("latest", 10)


def test_a_mirror_serves_files_of_channels_alone(place: Place) -> None:
    nested = "components/adapter/keep"
    shown = [
        "latest",
        "weight_v000001/a",
        "components.json",
        f"{nested}/latest",
        f"{nested}/weight_v000001/a",
    ]
    hidden = ["hosts/a", "publishers/1", "orders/a", "keep/000001", ".trash/a", "weight_v000002.parts/a"]
    hidden += [f"{nested}/{key}" for key in hidden]
    for key in (*shown, *hidden):
        (place.channel / key).parent.mkdir(parents=True, exist_ok=True)
        (place.channel / key).write_bytes(key.encode())
    (place.channel / "weight_v000001" / "link").symlink_to(place.base / "config.json")
    hidden += ["weight_v000001/link", "weight_v000001", "", "/etc/passwd", "%2e%2e/base/config.json"]
    with contextlib.closing(Served(place.channel)) as server:
        for key in shown:
            assert httpx.get(f"{server.url}/{key}").content == key.encode()
        codes = {key: httpx.get(f"{server.url}/{key}").status_code for key in hidden}
        assert set(codes.values()) == {404}, codes


@contextlib.contextmanager
def _nginx(root: Path, channel: Path) -> Iterator[tuple[str, str, Callable[[], list[str]]]]:
    """Origin and cache as in deploy/nginx, with ports and directories of their own: their URLs, and the
    origin's log as `METHOD PATH STATUS`."""
    ports = free_ports(2)
    parts = Path(__file__).parents[2] / "deploy" / "nginx"
    own = (
        ("8080;", f"127.0.0.1:{ports[0]};"),
        ("8081;", f"127.0.0.1:{ports[1]};"),
        ("origin.example:127.0.0.1:", "127.0.0.1:"),
        ("/mnt/run7/channel", str(channel)),
        ("/var/cache/nginx/weightcast", str(root / "cache")),
    )
    for name in ("origin.conf", "cache.conf"):
        text = (parts / name).read_text()
        for old, new in own:
            text = text.replace(old, new)
        (root / name).write_text(text)
    temporary = " ".join(
        f"{kind}_temp_path {root}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (root / "nginx.conf").write_text(
        f"daemon off; user root; pid {root}/pid; error_log {root}/error.log;\n"
        "events { worker_connections 1024; }\n"
        "http { log_format counted '$server_port $request_method $uri $status';\n"
        f"access_log {root}/access.log counted; {temporary}\n"
        f"include {root}/origin.conf; include {root}/cache.conf; }}\n"
    )
    with subprocess.Popen(["nginx", "-c", str(root / "nginx.conf")]) as nginx:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        try:
            for url in urls:
                wait_until(lambda url=url: httpx.get(f"{url}/latest"), passing=(httpx.TransportError,))  # type: ignore[misc]

            def asked() -> list[str]:
                lines = (root / "access.log").read_text().splitlines()
                return [line.partition(" ")[2] for line in lines if line.startswith(f"{ports[0]} ")]

            yield urls[0], urls[1], asked
        finally:
            nginx.terminate()


@pytest.mark.nginx
def test_a_hundred_hosts_read_each_file_once_from_the_origin(place: Place, run: Run, tmp_path: Path) -> None:
    (tmp_path / "nginx").mkdir()
    with _nginx(tmp_path / "nginx", place.channel) as (_, cache, asked), ThreadPoolExecutor(HOSTS) as pool:
        for _ in range(2):
            run.publish(1)
            # the cache may have the pointer of a second ago
            wait_until(
                lambda: httpx.get(f"{cache}/latest").content == (place.channel / "latest").read_bytes()
            )
            list(pool.map(lambda n: _synced(cache, tmp_path / f"host-{n}", place.base), range(HOSTS)))
            assert all(read_checkpoint(tmp_path / f"host-{n}") == run.bytes for n in range(HOSTS))
        read = Counter(line for line in asked() if "/weight_v" in line and line.endswith(" 200"))
        assert len(read) >= 4 and set(read.values()) == {1}, read


@pytest.mark.nginx
def test_a_channel_of_nginx_is_followed_by_its_etags(
    place: Place, run: Run, tmp_path: Path, weightcast: Command
) -> None:
    (tmp_path / "nginx").mkdir()
    run.publish(3)
    with _nginx(tmp_path / "nginx", place.channel) as (origin, _, asked):
        words = ("sync", "--channel", origin, "--local", place.host, "--base", place.base, "--json")
        assert json.loads(weightcast(*words).out)["local_version"] == 3
        assert read_checkpoint(place.host) == run.bytes
        assert httpx.get(f"{origin}/publishers/1.json").status_code == 403
        store = open_http_store(origin)
        # nginx's tags are of seconds: they count for what did not change for some
        for seconds, statuses in ((0, ["200", "200", "200"]), (-60, ["200", "304", "304"])):
            now = time.time() + seconds
            os.utime(place.channel / "latest", (now, now))
            before = len(asked())
            assert {store.read("latest", 100) for _ in range(3)} == {b"000003"}
            assert [line.rsplit(" ", 1)[1] for line in asked()[before:]] == statuses

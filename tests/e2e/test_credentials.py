"""Credentials appear nowhere: marked ones, servers that repeat what they were sent, and a search of all that
weightcast wrote, answered and was started with."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import obstore
import pytest
from core_cases import Model, tensor, write_checkpoint
from forked import Forked, run_weightcast, weightcast
from obstore.store import S3Store
from ports import free_port
from s3_gateway import Gateway
from waiting import wait_until

ACCESS, SECRET, SESSION = "AKIAMARKEDACCESSKEY0", "markedsecret/of+forty=characters", "markedsessiontoken"
TOKENS = {
    "WEIGHTCAST_TOKEN": "markedbearertoken",
    "WEIGHTCAST_REPORT_TOKEN": "markedreporttoken",
    "WEIGHTCAST_GROUP_TOKEN": "markedgrouptoken",
}
MARKS = [ACCESS, SECRET, SESSION, *TOKENS.values()]


def _model(seed: int) -> Model:
    return {"a.weight": tensor(np.random.default_rng(seed), "BF16", 64, 64)}


class _Echo(BaseHTTPRequestHandler):
    """Answers with the headers of the request in its body, as real servers explain a wrong signature."""

    status = 403

    def _answer(self) -> None:
        sent = f"<Error><Code>Wrong</Code><Message>{self.path} {self.headers}</Message></Error>".encode()
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(self.status, self.headers.get("authorization", "").replace("\n", " "))
        self.send_header("content-length", str(len(sent)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(sent)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def _echo(status: int) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Echo", (_Echo,), {"status": status}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Search:
    """Starts commands and daemons with marked credentials and keeps what they say."""

    def __init__(self, root: Path, endpoint: str, marks: list[str], **credentials: str) -> None:
        self.root, self.marks = root, marks
        aws = {"AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1", **credentials}
        self.environment = {**os.environ, **aws, **TOKENS}
        self.said: dict[str, str] = {}

    def command(self, *words: object) -> int:
        name = " ".join(map(str, words[:2]))
        done = run_weightcast(*words, env=self.environment, cwd=self.root)
        self.said[name] = done.stdout + done.stderr
        return done.returncode

    @contextmanager
    def daemon(self, side: str, *words: object) -> Iterator[None]:
        port_file, log = self.root / f"{side}.port", self.root / f"{side}.log"
        with log.open("ab") as stream:
            daemon = weightcast(
                *(side, "run", "--port", 0, "--port-file", port_file, "--poll-seconds", 0.1),
                *("--log-level", "debug", "--local", self.root / side, *words),
                stdout=stream,
                stderr=stream,
                env=self.environment,
            )
        try:
            wait_until(lambda: port_file.exists() or daemon.poll() is not None)
            port = port_file.read_text().strip() if daemon.poll() is None else 1
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=20) as client:
                client.headers["Authorization"] = f"Bearer {TOKENS['WEIGHTCAST_TOKEN']}"
                yield
                self._look(side, daemon, client)
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(60)

    def _look(self, side: str, daemon: Forked, client: httpx.Client) -> None:
        """Once it has looked at the channel twice."""
        wait_until(
            lambda: daemon.poll() is not None or client.get("/v1/status").json()["loop"]["steps"] >= 2,
            passing=(httpx.TransportError,),
        )
        if daemon.poll() is not None:
            return
        for path in ("/v1/status", "/metrics", "/readyz", "/healthz", "/v1/fleet", "/openapi.json"):
            answer = client.get(path)
            self.said[f"{side} {path}"] = f"{answer.headers} {answer.text}"
        self.command("status", client.base_url)

    def found(self) -> list[str]:
        """Places with a mark's beginning: all that was said, files, and arguments of all processes."""
        marks = [mark[:10].encode() for mark in self.marks]
        texts = {name: text.encode() for name, text in self.said.items()}
        texts |= {str(path): path.read_bytes() for path in self.root.rglob("*") if path.is_file()}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                texts[str(path)] = path.read_bytes()
            except OSError:
                continue
        return [name for name, text in texts.items() if any(mark in text for mark in marks)]


def _use(search: Search, channel: str, base: Path, saved: Path) -> None:
    """Every kind of access to a channel."""
    places = ["--channel", channel, "--local", search.root / "one-shot", "--base", base]
    search.command("doctor", "--channel", channel, "--role", "publisher")
    search.command("channel", "init", "--channel", channel, "--base", base)
    search.command("publish", *places, saved)
    search.command("sync", *places, "--json")
    search.command("channel", "verify", "--channel", channel)
    search.command("fleet", "--channel", channel)
    with (
        search.daemon("publisher", "--channel", channel, "--base", base),
        search.daemon("subscriber", "--channel", channel, "--base", base, "--report-seconds", 0.5),
    ):
        pass


@pytest.mark.parametrize("status", [403, 200, None])
def test_a_server_that_repeats_what_it_was_sent(status: int | None, tmp_path: Path) -> None:
    """None: nobody listens."""
    base, saved = (
        write_checkpoint(tmp_path / name, _model(seed)) for seed, name in enumerate(("base", "new"))
    )
    keys = {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": SESSION}
    with _echo(status or 403) as echo:
        endpoint = echo if status else f"http://127.0.0.1:{free_port()}"
        search = Search(tmp_path, endpoint, MARKS, **keys)
        _use(search, "s3://marked/run", base, saved)
        assert search.command("sync", "--channel", "s3://marked/run", "--local", tmp_path / "x") != 0
    assert not search.found()


def test_credentials_in_a_url_are_not_repeated(tmp_path: Path) -> None:
    search = Search(tmp_path, "http://127.0.0.1:1", MARKS)
    base = write_checkpoint(tmp_path / "base", _model(0))
    for channel in (f"s3://{ACCESS}:markedsessiontoken@bucket/run", f"az://box/run?sig={SESSION}"):
        _use(search, channel, base, base)
    assert not search.found()


@pytest.mark.s3
def test_nothing_that_weightcast_writes_has_them(s3: Gateway, tmp_path: Path) -> None:
    base, saved = (
        write_checkpoint(tmp_path / name, _model(seed)) for seed, name in enumerate(("base", "new"))
    )
    bucket, aws = s3.make_bucket(), s3.environment()
    keys = {name: aws[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    marks = [s3.access_key, s3.secret_key, *TOKENS.values()]
    search = Search(tmp_path, s3.endpoint, marks, **keys)
    _use(search, f"s3://{bucket}/run", base, saved)
    assert search.command("sync", "--channel", f"s3://{bucket}/run", "--local", tmp_path / "one-shot") == 0
    search.command("sync", "--channel", "s3://missing-bucket/run", "--local", tmp_path / "other")
    search.environment["AWS_SECRET_ACCESS_KEY"] = SECRET
    search.marks.append(SECRET)
    search.command("sync", "--channel", f"s3://{bucket}/run", "--local", tmp_path / "wrong")
    store = S3Store(
        bucket,
        endpoint=s3.endpoint,
        access_key_id=s3.access_key,
        secret_access_key=s3.secret_key,
        region="us-east-1",
        client_options={"allow_http": True},
    )
    names: list[Any] = [meta["path"] for batch in obstore.list(store) for meta in batch]
    assert any("/hosts/" in name for name in names)
    search.said |= {name: bytes(obstore.get(store, name).bytes()).decode("latin1") for name in names}
    assert not search.found()

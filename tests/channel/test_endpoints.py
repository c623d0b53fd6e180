"""What users see of a bucket whose server is named wrongly, gone, or refuses."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from in_process import Command
from ports import free_port

from weightcast.shared.channel.object_store import open_object_store
from weightcast.shared.channel.store import Unavailable

_ENVIRONMENT = {
    "s3": {"AWS_ACCESS_KEY_ID": "a-key", "AWS_SECRET_ACCESS_KEY": "a-secret", "AWS_REGION": "us-east-1"},
    "gs": {"GOOGLE_SKIP_SIGNATURE": "true"},
    "az": {"AZURE_STORAGE_ACCOUNT_NAME": "weightcast", "AZURE_STORAGE_ACCOUNT_KEY": "a2V5"},
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No endpoint, credentials for each provider, and no metadata service."""
    for facts in _ENVIRONMENT.values():
        for name, value in facts.items():
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}")


@contextlib.contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("scheme", "variable"),
    [
        ("s3", "AWS_ENDPOINT_URL"),
        ("s3", "AWS_ENDPOINT_URL_S3"),
        ("s3", "AWS_ENDPOINT"),
        ("gs", "GOOGLE_BASE_URL"),
        ("az", "AZURE_STORAGE_ENDPOINT"),
    ],
)
@pytest.mark.parametrize("given", ["127.0.0.1:18500", "", "http://", "ftp://127.0.0.1"])
def test_an_endpoint_that_is_not_a_url_is_a_usage_error(
    scheme: str, variable: str, given: str, monkeypatch: pytest.MonkeyPatch, weightcast: Command
) -> None:
    monkeypatch.setenv(variable, given)
    for words in (["channel", "log"], ["doctor", "--role", "publisher"]):
        done = weightcast(*words, "--channel", f"{scheme}://bucket/run")
        assert done.code == 2, done
        assert f"{variable} {given!r} is not an http:// or https:// URL" in done.err


def test_a_password_in_an_endpoint_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, weightcast: Command
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "user:hidden@127.0.0.1:18500")
    done = weightcast("channel", "log", "--channel", "s3://bucket/run")
    assert done.code == 2 and "'127.0.0.1:18500'" in done.err and "hidden" not in done.err


def test_a_server_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch, weightcast: Command) -> None:
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://user:hidden@{address}")
    done = weightcast("channel", "log", "--channel", "s3://bucket/run")
    assert done.code == 75 and f"the server http://{address} cannot be reached" in done.err
    assert "hidden" not in done.err


@pytest.mark.parametrize("status", [None, 403, 404])
def test_missing_credentials_are_named(
    status: int | None, monkeypatch: pytest.MonkeyPatch, weightcast: Command
) -> None:
    """`status`: with which something else answers at the address of the metadata service."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with contextlib.ExitStack() as stack:
        if status is not None:
            monkeypatch.setenv("AWS_METADATA_ENDPOINT", stack.enter_context(answering(status, b"")))
        done = weightcast("channel", "log", "--channel", "s3://bucket/run")
    assert done.code == (3 if status == 403 else 75)
    assert "no AWS credentials found (AWS_ACCESS_KEY_ID is not set, no instance metadata service" in done.err


def test_a_panic_of_the_client_is_one_error(monkeypatch: pytest.MonkeyPatch, weightcast: Command) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "127.0.0.1:1")
    done = weightcast("channel", "log", "--channel", "s3://bucket/run")
    assert done.code == 75 and "s3://bucket/run/channel.json: the store's client crashed" in done.err


def test_a_bucket_that_is_gone_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon tries again, a command ends with 3."""
    with answering(404, b"<Error><Code>NoSuchBucket</Code></Error>") as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        with pytest.raises(Unavailable, match="s3://bucket/run/latest: the bucket does not exist") as raised:
            open_object_store("s3://bucket/run").create("latest", b"000001")
    assert raised.value.exit_code == 3

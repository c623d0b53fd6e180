"""TLS of a daemon's HTTP side, and of the commands that ask it, with an authority of the test's own."""

from __future__ import annotations

import contextlib
import io
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from click.testing import CliRunner
from forked import run_weightcast
from tls import Authority
from waiting import SECONDS, wait_until

from weightcast.publisher import HandOver
from weightcast.shared.base.errors import NotInTime, Refused
from weightcast.shared.cli.status import wake
from weightcast.shared.daemon import http
from weightcast.shared.daemon.client import Daemon
from weightcast.shared.daemon.settings import BadSettings, ServiceSettings, load_settings, require_files
from weightcast.shared.daemon.tls import client_context

Serve = Callable[..., Any]
TOKEN = "not-a-real-secret"


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def ask(url: str, ca: Path | None = None, cert: Path | None = None) -> bytes:
    with Daemon(url, TOKEN, trust_for=lambda at: client_context(at, ca, cert)) as daemon:
        return daemon.ask("GET", "/v1/status")


def test_the_daemon_answers_over_tls_alone(serve: Serve, ours: Authority) -> None:
    served = serve(token=TOKEN, tls_cert=ours.issue("daemon"))
    assert b'"version":7' in ask(served.url, ours.file)
    with pytest.raises(NotInTime, match="use https"):
        ask(served.url.replace("https", "http"))
    tls = ServiceSettings(tls_cert=ours.issue("daemon")).server_tls()
    assert tls is not None and tls.minimum_version == ssl.TLSVersion.TLSv1_2


def test_a_certificate_that_proves_nothing_is_refused_with_the_remedy(
    serve: Serve, ours: Authority, tmp_path: Path, quiet: io.StringIO
) -> None:
    stranger = Authority(tmp_path, "stranger")
    for cert, ca in (
        (ours.issue("elsewhere", address="192.0.2.1"), ours.file),
        (ours.issue("daemon"), stranger.file),
        (ours.issue("daemon"), None),
        (ours.issue("old", days=-1), ours.file),
    ):
        with pytest.raises(Refused, match=r"CERTIFICATE_VERIFY_FAILED.*--ca"):
            ask(serve(token=TOKEN, tls_cert=cert).url, ca)
    assert quiet.getvalue().count("certificate not valid: callers refuse it") == 1


def test_a_client_certificate_is_required_where_its_authority_is_given(
    serve: Serve, ours: Authority, tmp_path: Path
) -> None:
    clients = Authority(tmp_path, "clients")
    served = serve(token=TOKEN, tls_cert=ours.issue("daemon"), tls_client_ca=clients.file)
    assert ask(served.url, ours.file, clients.issue("operator"))
    for cert in (None, ours.issue("other"), clients.issue("old", days=-1)):
        with pytest.raises((Refused, NotInTime)):
            ask(served.url, ours.file, cert)


def test_a_token_is_still_asked_for(serve: Serve, ours: Authority) -> None:
    served = serve(token=TOKEN, tls_cert=ours.issue("daemon"))
    with served.client() as client:
        assert client.get("/v1/status").status_code == 401
    with pytest.raises(BadSettings, match="no token is set"):
        load_settings(ServiceSettings, {"host": "0.0.0.0", "tls_cert": ours.issue("daemon")})


def test_a_renewed_certificate_is_used_without_a_restart(
    serve: Serve, ours: Authority, tmp_path: Path, quiet: io.StringIO
) -> None:
    stranger = Authority(tmp_path, "stranger")
    cert = ours.issue("daemon")
    served = serve(token=TOKEN, tls_cert=cert)
    assert ask(served.url, ours.file)
    cert.write_text("half a file")
    assert ask(served.url, ours.file)
    assert "renewed certificate not used, the one before stays" in quiet.getvalue()
    cert.write_bytes(stranger.issue("daemon2").read_bytes())
    assert ask(served.url, stranger.file)
    with pytest.raises(Refused):
        ask(served.url, ours.file)


def test_a_client_renews_its_own_certificate(serve: Serve, ours: Authority, tmp_path: Path) -> None:
    clients = Authority(tmp_path, "clients")
    served = serve(token=TOKEN, tls_cert=ours.issue("daemon"), tls_client_ca=clients.file)
    cert = clients.issue("operator", days=-1)
    with Daemon(served.url, TOKEN, trust_for=lambda at: client_context(at, ours.file, cert)) as daemon:
        with pytest.raises((Refused, NotInTime)):
            daemon.ask("GET", "/v1/status")
        clients.issue("operator")
        assert daemon.ask("GET", "/v1/status")


def test_probes_are_answered_among_more_unfinished_handshakes_than_there_may_be(
    serve: Serve, ours: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(token=TOKEN, tls_cert=ours.issue("daemon"))
    address = urlsplit(served.url)
    with contextlib.ExitStack() as crowd:
        for _ in range(http.MOST + 50):
            crowd.enter_context(socket.create_connection((address.hostname, address.port), timeout=SECONDS))
        with served.client() as client:
            assert [client.get("/healthz").status_code for _ in range(3)] == [200] * 3
    monkeypatch.setattr(http, "REQUEST_SECONDS", 0.3)
    with socket.create_connection((address.hostname, address.port), timeout=SECONDS) as silent:
        assert silent.recv(1) == b"", "a handshake has the time of a request"


def test_a_request_in_the_packet_of_the_handshake_is_answered(serve: Serve, ours: Authority) -> None:
    """Of TLS 1.3 the client's last message may come with its first request."""
    served = serve(token=TOKEN, tls_cert=ours.issue("daemon"))
    address = urlsplit(served.url)
    arriving, leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = ssl.create_default_context(cafile=ours.file).wrap_bio(
        arriving, leaving, server_hostname=address.hostname
    )
    with socket.create_connection((address.hostname, address.port), timeout=SECONDS) as peer:
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                peer.sendall(leaving.read())
                arriving.write(peer.recv(65536))
        tls.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        peer.sendall(leaving.read())
        said = b""
        while b"200 OK" not in said:
            arriving.write(peer.recv(65536))
            with contextlib.suppress(ssl.SSLWantReadError):
                said += tls.read()


def test_files_that_cannot_be_used_are_named_before_the_start(ours: Authority, tmp_path: Path) -> None:
    good, other, junk = ours.issue("daemon"), ours.issue("other"), tmp_path / "junk.pem"
    junk.write_text("no certificate")
    missing = tmp_path / "missing.pem"
    for flags, problem in (
        ({"tls_cert": missing}, str(missing)),
        ({"tls_cert": good, "tls_key": missing}, str(missing)),
        ({"tls_cert": good, "tls_key": other}, "does not match the certificate"),
        ({"tls_cert": junk}, "hold no certificate and unencrypted private key"),
        ({"tls_cert": ours.file}, "hold no certificate and unencrypted private key"),
        ({"tls_cert": good, "tls_client_ca": junk}, "holds no certificates in PEM"),
        ({"ca": junk}, "holds no certificates in PEM"),
        ({"tls_key": good}, "without --tls-cert"),
        ({"tls_client_ca": good}, "without --tls-cert"),
    ):
        with pytest.raises(BadSettings, match=problem.replace("+", r"\+")):
            require_files(load_settings(ServiceSettings, flags))


def test_commands_take_the_authority_and_a_certificate(
    serve: Serve, ours: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ours.issue("daemon")
    served = serve(token=TOKEN, poll_seconds=600, tls_cert=own, tls_client_ca=ours.file)
    trust = ("--ca", ours.file, "--tls-cert", own, "--token", TOKEN)
    found = run_weightcast("status", served.url, *trust, "--json")
    assert (found.returncode, '"version": 7' in found.stdout) == (0, True), found
    found = run_weightcast("status", served.url, "--token", TOKEN)
    assert found.returncode == 3 and "--ca" in found.stderr
    assert run_weightcast("status", served.url, "--ca", "/nowhere.pem").returncode == 2
    monkeypatch.setenv("WEIGHTCAST_CA", str(ours.file))
    monkeypatch.setenv("WEIGHTCAST_TLS_CERT", str(own))
    wait_until(lambda: served.loop.get().steps == 1)
    assert CliRunner().invoke(wake, [served.url, "--token", TOKEN]).exit_code == 0
    wait_until(lambda: served.loop.get().steps == 2)


def test_a_trainer_that_hands_over_wakes_its_sidecar(serve: Serve, ours: Authority, tmp_path: Path) -> None:
    served = serve(token=TOKEN, poll_seconds=600, tls_cert=ours.issue("daemon"))
    wait_until(lambda: served.loop.get().steps == 1)
    with HandOver(tmp_path / "hand-over", sidecar=served.url, token=TOKEN, ca=ours.file) as hand_over:
        hand_over.put({"w": np.zeros(4, np.float32)})
        wait_until(lambda: served.loop.get().steps == 2)

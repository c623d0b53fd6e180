"""What a daemon's callers will say to its certificate, by the files alone."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

from weightcast.shared.daemon.environment import address_of, is_host
from weightcast.shared.daemon.tls import BadTls, client_context, read_certificate, server_context
from weightcast.shared.doctor.rules import Finding, Level

TLS = "tls"
_SOON = timedelta(days=14)
_MOST_NAMES = 20


def judge_certificate(
    cert: Path, key: Path | None, ca: Path | None, callers: Sequence[str] = ()
) -> Iterator[Finding]:
    """`ca`: the authorities that callers trust; None: the system's. `callers`: hosts or URLs that they ask
    for; none: this machine's name."""
    try:
        server, client = server_context(cert, key, None), client_context("https:", ca)
    except BadTls as error:
        yield Finding(TLS, "files", "failure", error.message, error.remedy)
        return
    yield Finding(TLS, "files", "ok", f"the private key matches the certificate in {cert}")
    found = read_certificate(cert)
    until = f"valid until {found.valid_until:%Y-%m-%d %H:%M} UTC"
    if found.invalid_now:
        yield Finding(TLS, "dates", "failure", found.invalid_now, "renew the certificate, or set the clock")
        return
    is_old = found.valid_until - datetime.now(UTC) < _SOON
    remedy = "renew it: daemons read the files again without a restart" if is_old else ""
    yield Finding(TLS, "dates", "warning" if is_old else "ok", until, remedy)
    yield from _judge_names(server, cert, found.names, callers)
    refused = _refusal(server, client, (*found.names, "")[0])
    level: Level = "ok" if not refused else "warning" if ca is None else "failure"
    said = f"refuse it: {refused}" if refused else "accept it"
    remedy = "give callers its authority with --ca; --tls-cert needs the chain" if refused else ""
    trusted = "the system's authorities" if ca is None else f"the authorities in {ca}"
    yield Finding(TLS, "trust", level, f"callers that trust {trusted} {said}", remedy)


def _judge_names(
    server: ssl.SSLContext, cert: Path, names: Sequence[str], callers: Sequence[str]
) -> Iterator[Finding]:
    # trusted itself, so that names alone are judged
    client = client_context("https:", cert)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    known = ", ".join(names[:_MOST_NAMES]) or "none"
    for caller in callers or ("::",):
        host = caller if is_host(caller) else urlsplit(caller).hostname or ""
        address = address_of(host)
        if address is not None and address.is_unspecified:
            host = socket.gethostname()
        refused = _refusal(server, client, host)
        level: Level = "ok" if not refused else "failure" if callers else "warning"
        verb = "refuse" if refused else "accept"
        said = f"callers that ask for {host or caller} {verb} it; its names: {known}"
        remedy = "issue it for that host, or give --tls-name as callers use it" if refused else ""
        yield Finding(TLS, "names", level, said, remedy)


def _refusal(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> str:
    """Why a handshake in memory fails; empty when it does not."""
    name = name.replace("*", "any")
    if not is_host(name):
        return "it names no host"
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    # flights of TLS 1.2 and 1.3
    for end in ends * 3:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError as error:
            return str(getattr(error, "verify_message", "") or error)
    return ""

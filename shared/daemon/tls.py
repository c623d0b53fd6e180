"""TLS of daemons and their clients: 1.2 or later. Imported only on need: one-shots start quickly."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from weightcast.shared.base.errors import USAGE, Refused
from weightcast.shared.files.disk_errors import disk_text
from weightcast.shared.files.paths import exists

TrustFor = Callable[[str], ssl.SSLContext]
"""by the URL that is asked"""


class BadTls(Refused):
    """A usage error: a file of certificates or keys that cannot be used."""

    exit_code = USAGE


class _Context(ssl.SSLContext):
    """Reads its certificate and key again before a connection when the files have changed. While they do not
    match, the pair in memory is used."""

    _files: tuple[Path, ...] = ()
    _seen: object = ()

    def own(self, cert: Path, key: Path | None) -> None:
        """Raises BadTls."""
        self._files, self._seen = (cert, key or cert), None
        self._renew()

    def _renew(self) -> None:
        stats = (file.stat() for file in self._files if exists(file))
        seen = tuple((stat.st_mtime_ns, stat.st_ino) for stat in stats)
        if seen != self._seen:
            self._seen = seen
            # a pair that does not match would leave half of it in this one
            _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), *self._files)
            _load(self, *self._files)

    def _try_to_renew(self) -> None:
        try:
            self._renew()
        except (BadTls, OSError) as error:
            from weightcast.shared.daemon.logs import get_log

            get_log("tls").warning("renewed certificate not used, the one before stays", reason=str(error))

    def wrap_socket(self, *given: Any, **named: Any) -> ssl.SSLSocket:
        self._try_to_renew()
        return super().wrap_socket(*given, **named)

    def wrap_bio(self, *given: Any, **named: Any) -> ssl.SSLObject:
        self._try_to_renew()
        return super().wrap_bio(*given, **named)


def _load(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    for file in (cert, key):
        _require_readable(file)
    try:
        # without a password OpenSSL would ask at the terminal
        context.load_cert_chain(cert, key, password=lambda: "")
    except (OSError, ValueError) as error:
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            raise BadTls(
                f"the private key in {key} does not match the certificate in {cert}",
                remedy="give the certificate's key; in a chain the daemon's own certificate comes first",
            ) from error
        raise BadTls(
            f"{cert} and {key} hold no certificate and unencrypted private key in PEM: {error}",
            remedy="give PEM files; decrypt the key",
        ) from error


def _require_readable(file: Path) -> None:
    try:
        file.open("rb").close()
    except OSError as error:
        raise BadTls(disk_text(error, file), remedy="correct the path, or grant this user access") from error


def _load_authorities(context: ssl.SSLContext, file: Path) -> None:
    _require_readable(file)
    try:
        context.load_verify_locations(file)
    except OSError as error:
        raise BadTls(
            f"{file} holds no certificates in PEM: {error}", remedy="give the authorities' certificates"
        ) from error


def server_context(cert: Path, key: Path | None, client_ca: Path | None) -> ssl.SSLContext:
    """Raises BadTls."""
    context = _Context(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.own(cert, key)
    if client_ca is not None:
        _load_authorities(context, client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(
    url: str, ca: Path | None = None, cert: Path | None = None, key: Path | None = None
) -> ssl.SSLContext:
    """Trusts nobody for http: loading the system's authorities takes a tenth of a second. `cert` and
    `key` are shown to a daemon that asks for them. Raises BadTls."""
    context = _Context(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if urlsplit(url).scheme != "https":
        return context
    if ca is None:
        context.load_default_certs()
    else:
        _load_authorities(context, ca)
    if cert is not None:
        context.own(cert, key)
    return context


@dataclass(frozen=True)
class Certificate:
    """`names`: by which callers may ask for it."""

    names: tuple[str, ...]
    valid_from: datetime
    valid_until: datetime

    @property
    def invalid_now(self) -> str:
        """Why callers refuse it by its dates; empty when they do not."""
        now = datetime.now(UTC)
        if now > self.valid_until:
            return f"expired at {self.valid_until:%Y-%m-%d %H:%M} UTC"
        return f"not valid before {self.valid_from:%Y-%m-%d %H:%M} UTC" if now < self.valid_from else ""


def read_certificate(file: Path) -> Certificate:
    """The first one in the file: a daemon's own. Raises ValueError."""
    # takes long to import
    from cryptography import x509

    own = x509.load_pem_x509_certificate(file.read_bytes())
    also = [each.value for each in own.extensions if isinstance(each.value, x509.SubjectAlternativeName)]
    names = (str(name.value) for each in also for name in each)
    return Certificate(tuple(names), own.not_valid_before_utc, own.not_valid_after_utc)


def tls_error_of(error: BaseException | None) -> ssl.SSLError | None:
    """What kept a client from a connection, where it was TLS."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error

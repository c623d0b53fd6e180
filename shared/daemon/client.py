"""Asking a weightcast daemon over HTTP: JSON in answers that are capped, and errors that say what to do."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import httpx

from weightcast.shared.base.errors import USAGE, NotInTime, Refused, RetryLater
from weightcast.shared.daemon.environment import http_parts, is_token
from weightcast.shared.daemon.timing import Deadline
from weightcast.shared.daemon.tls import TrustFor, client_context, tls_error_of

ANSWER_LIMIT = 16 << 20
_TLS = (
    "give the authority of its certificate with --ca, a host name that is in it, and with --tls-cert one of "
    "your own if it requires that"
)


class BadAddress(Refused):
    """A usage error."""

    exit_code = USAGE


class Daemon:
    """The daemon at `url` (host:port or http[s]://…). Every call raises NotInTime if it does not answer,
    RetryLater if it is too busy, Refused if it requires another token or certificate, refuses, or is not a
    daemon.
    `token_from`: where the token is set, for the remedy."""

    def __init__(
        self,
        url: str,
        token: str | None,
        timeout_seconds: float = 10.0,
        token_from: str = "--token or WEIGHTCAST_TOKEN",
        trust_for: TrustFor = client_context,
    ) -> None:
        """Connects to nothing yet. Raises BadAddress, BadTls."""
        self.url, self._token_from = base_url(url), token_from
        headers = {"Accept-Encoding": "identity"}
        if token:
            if not is_token(token):
                raise BadAddress("the token must be printable ASCII without spaces")
            headers["Authorization"] = f"Bearer {token}"
        self._seconds = timeout_seconds
        # trust_env off: neither a proxy nor a .netrc comes between two machines of one cluster.
        self._client = httpx.Client(
            timeout=timeout_seconds,
            trust_env=False,
            verify=trust_for(self.url),
            headers=headers,
            # a deadline is of a connection
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """The body of a good answer. `body`: JSON."""
        address = self.url + path
        headers = {} if body is None else {"Content-Type": "application/json"}
        deadline = Deadline(self._seconds)
        extensions = {"trace": deadline.trace}
        try:
            with (
                deadline,
                self._client.stream(
                    method, address, content=body, headers=headers, extensions=extensions
                ) as response,
            ):
                answer = _capped(response, address)
                if deadline.passed:
                    raise httpx.ReadTimeout("")
        # the latter of a redirect to nowhere
        except (httpx.TransportError, httpx.InvalidURL) as error:
            tls = tls_error_of(error)
            if tls is not None and not deadline.passed:
                raise Refused(f"TLS with {address} failed: {tls}", remedy=_TLS) from error
            why = f"incomplete after {self._seconds:g} s" if deadline.passed else str(error)
            remedy = "check address and port, http or https, and that the daemon runs"
            if isinstance(error, httpx.RemoteProtocolError):
                remedy = "use https: the daemon may serve TLS"
                if address.startswith("https:"):
                    remedy = "give --tls-cert: the daemon may require a client certificate"
            raise NotInTime(
                f"no answer from {address}: {why or type(error).__name__}", remedy=remedy
            ) from error
        self._judge(response, answer, address)
        return answer

    def ask_object(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        """As `ask`: a JSON object. Raises Refused for anything else."""
        answer = _object(self.ask(method, path, body))
        if answer is None:
            raise Refused(
                f"{self.url} did not answer with a JSON object",
                remedy="check that a weightcast daemon listens there",
            )
        return answer

    def _judge(self, response: httpx.Response, body: bytes, address: str) -> None:
        code = response.status_code
        scheme = response.headers.get("WWW-Authenticate", "").partition(" ")[0].lower()
        if code == 407 or (code in (401, 403) and scheme not in ("", "bearer")):
            raise Refused(
                f"a proxy at {address} requires credentials ({code})",
                remedy="use the daemon's own address, or exempt this host from the proxy",
            )
        if code in (401, 403):
            gave = "Authorization" in self._client.headers
            raise Refused(
                f"{address} {'refused the' if gave else 'needs a'} token ({code})",
                remedy=f"give its token with {self._token_from}",
            )
        if code in (429, 503):
            raise RetryLater(f"{address} is busy", remedy="try again")
        if code not in (200, 202):
            answer = _object(body) or {}
            said, remedy = (str(answer.get(name) or "")[:1000] for name in ("message", "remedy"))
            raise Refused(
                f"{address} answered {code}{': ' if said else ''}{said}",
                remedy=remedy or "check that a weightcast daemon of this release listens there",
            )


def base_url(url: str) -> str:
    """Without a slash at its end; a number alone is a port of this machine. Raises BadAddress."""
    place = f"127.0.0.1:{url}" if url.isascii() and url.isdecimal() else url
    text = (place if "://" in place else f"http://{place}").rstrip("/")
    if http_parts(text) is None:
        raise BadAddress(
            f"{url} is not an http address", remedy="give PORT, HOST:PORT, or http[s]://HOST:PORT"
        )
    return text


def _capped(response: httpx.Response, address: str) -> bytes:
    body = bytearray()
    for piece in response.iter_raw():
        body += piece
        if len(body) > ANSWER_LIMIT:
            raise Refused(
                f"the answer of {address} exceeds the {ANSWER_LIMIT}-byte limit", remedy="check the address"
            )
    return bytes(body)


def _object(body: bytes) -> dict[str, Any] | None:
    with suppress(ValueError, RecursionError):
        answer = json.loads(body)
        return answer if isinstance(answer, dict) else None
    return None

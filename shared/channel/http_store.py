"""A channel behind any HTTP server or cache, for readers: published files never change.

Plain HTTP has no listing: readers ask for the names that the format implies. Redirects are not followed.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
import weakref
from collections.abc import Iterator
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn
from urllib.parse import quote, urlsplit

import httpx

from weightcast.shared.base.errors import Refused
from weightcast.shared.channel.awaited import awaited
from weightcast.shared.channel.rate import NO_RATES, Rates
from weightcast.shared.channel.store import (
    POLLED_BYTES,
    Entry,
    NotFound,
    Pieces,
    Stat,
    Store,
    bad_certificate,
    check_key,
    denied,
    failed,
    joined,
    too_large,
)

TOKEN, USER, PASSWORD = (f"WEIGHTCAST_CHANNEL_{name}" for name in ("TOKEN", "USER", "PASSWORD"))
_TIMEOUT = httpx.Timeout(60.0, connect=5.0)
_PAUSES = (0.2, 0.5, 1.0)
"""before a request is sent again"""
_PASSING = frozenset({429, 500, 502, 503, 504})
_GOOD = frozenset({200, 206, 304})
_BLOCK = 1 << 20
_SETTLED_SECONDS = 10.0
"""Servers make tags of size and time in seconds. A pointer that moved twice in a second has one tag twice: a
tag counts once the object is older than that, and than what caches keep"""


class _Client:
    """Its connections end with the last store that has it, also where that is garbage in a cycle."""

    def __init__(self, client: httpx.Client) -> None:
        self.http = client
        weakref.finalize(self, client.close)


def open_http_store(url: str, rates: Rates = NO_RATES) -> HttpStore:
    """Credentials come from the environment. Raises Refused for invalid URLs, and for credentials in
    them."""
    remedy = "give http[s]://HOST[:PORT]/PATH"
    try:
        parts = urlsplit(url)
        bare = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")
        httpx.URL(bare)
    except (ValueError, httpx.InvalidURL) as error:
        raise Refused(f"--channel is not a URL: {error}", remedy=remedy) from error
    if not parts.hostname:
        raise Refused(f"{bare} has no host", remedy=remedy)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise Refused(
            f"{bare}: the URL contains credentials or a query",
            remedy=f"set {TOKEN}, or {USER} and {PASSWORD}, in the environment; see docs/stores.md",
        )
    headers, auth = {"Accept-Encoding": "identity"}, None
    if token := os.environ.get(TOKEN):
        headers["Authorization"] = f"Bearer {token}"
    elif user := os.environ.get(USER):
        auth = httpx.BasicAuth(user, os.environ.get(PASSWORD, ""))
    client = httpx.Client(headers=headers, auth=auth, timeout=_TIMEOUT)
    return HttpStore(_Client(client), bare, rates)


class HttpStore(Store):
    """`url`: of the channel, or of a directory within it, without a slash at its end."""

    def __init__(self, client: _Client, url: str, rates: Rates) -> None:
        self._client, self._url, self.rates = client, url, rates
        self._polled: dict[str, tuple[bytes, str]] = {}
        """content and tag"""

    is_static = True

    def place(self, key: str = "") -> str:
        return joined(self._url, key) if key else self._url

    def within(self, prefix: str) -> HttpStore:
        if not prefix:
            return self
        return HttpStore(self._client, f"{self._url}/{quote(check_key(prefix))}", self.rates)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        raise Refused(
            f"{self.place(prefix)} cannot be listed over HTTP",
            remedy="give the channel's own directory or bucket, or ask the publisher's daemon",
        )

    def stat(self, key: str) -> Stat | None:
        with contextlib.suppress(NotFound), self._asked("HEAD", key) as answer:
            written = _time(answer, "Last-Modified")
            nanoseconds = 0 if written is None else int(written.timestamp()) * 10**9
            return Stat(int(answer.headers.get("Content-Length", 0)), nanoseconds, _tag(answer))
        return None

    def read(self, key: str, limit: int) -> bytes:
        known = self._polled.get(key)
        with self._asked("GET", key, {} if known is None else {"If-None-Match": known[1]}) as answer:
            if answer.status_code == 304 and known is not None:
                if len(known[0]) > limit:
                    raise too_large(self.place(key), limit)
                return known[0]
            data = bytearray()
            for piece in answer.iter_raw(_BLOCK):
                data += piece
                if len(data) > limit:
                    raise too_large(self.place(key), limit)
        self._polled.pop(key, None)
        if len(data) <= POLLED_BYTES and _tag(answer) and _is_settled(answer):
            self._polled[key] = bytes(data), _tag(answer)
        return bytes(data)

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        if length <= 0:
            return b""
        last = offset + length - 1
        with self._asked("GET", key, {"Range": f"bytes={offset}-{last}"}) as answer:
            # a server may send all of it
            start = offset if answer.status_code == 200 else 0
            data = bytearray()
            for piece in answer.iter_raw(_BLOCK) if answer.status_code != 416 else ():
                start, piece = max(0, start - len(piece)), piece[start:]
                data += piece
                if len(data) >= length:
                    break
        self.rates.fetch.take(len(data))
        return bytes(data[:length])

    def pieces(self, key: str) -> Pieces:
        """One request, read as it arrives."""
        rate = self.rates.fetch
        with self._asked("GET", key) as answer:
            yield from rate.paced(answer.iter_raw(min(_BLOCK, rate.piece)))

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise Refused(
            f"{self._url}: a channel is read-only over HTTP",
            remedy="give the channel's own directory or bucket; hosts report to a publisher with --report-to",
        )

    create = replace = write = begin = move = copy = commit = discard = delete = upload = ignored = now = (
        _refuse
    )

    @contextlib.contextmanager
    def _asked(
        self, method: str, key: str, headers: dict[str, str] | None = None
    ) -> Iterator[httpx.Response]:
        """A good answer, its body unread. Errors of the client as those of a store."""
        place = self.place(key)
        try:
            with awaited(place):
                answer = self._sent(method, f"{self._url}/{quote(check_key(key))}", headers or {})
            with contextlib.closing(answer):
                _judge(answer, place)
                yield answer
        except httpx.TransportError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise bad_certificate(place, f": {str(error).rpartition(': ')[2]}") from error
            remedy = "check the URL, the server and the network"
            raise failed(place, str(error) or type(error).__name__, remedy) from error

    def _sent(self, method: str, url: str, headers: dict[str, str]) -> httpx.Response:
        client = self._client.http
        request = client.build_request(method, url, headers=headers)
        for pause in _PAUSES:
            with contextlib.suppress(httpx.TransportError):
                answer = client.send(request, stream=True)
                if answer.status_code not in _PASSING:
                    return answer
                answer.close()
            time.sleep(pause * random.SystemRandom().uniform(0.8, 1.2))
        return client.send(request, stream=True)


def _judge(answer: httpx.Response, place: str) -> None:
    code = answer.status_code
    if code in _GOOD or (code == 416 and "Range" in answer.request.headers):
        return
    if code in (404, 410):
        raise NotFound.at(place)
    if code in (401, 403, 407):
        remedy = f"set {TOKEN}, or {USER} and {PASSWORD}, in the environment; check their rights"
        raise denied(place, remedy)
    if answer.is_redirect:
        remedy = "give the URL that it redirects to; redirects are not followed"
        raise failed(place, f"redirected ({code})", remedy, lasting=True)
    reason = f"the server answered {code} {answer.reason_phrase}"
    raise failed(place, reason, "check the server and its log")


def _tag(answer: httpx.Response) -> str:
    return str(answer.headers.get("ETag", ""))


def _time(answer: httpx.Response, header: str) -> datetime | None:
    with contextlib.suppress(ValueError):
        return parsedate_to_datetime(answer.headers.get(header, ""))
    return None


def _is_settled(answer: httpx.Response) -> bool:
    written, now = _time(answer, "Last-Modified"), _time(answer, "Date")
    return written is None or (now is not None and (now - written).total_seconds() >= _SETTLED_SECONDS)

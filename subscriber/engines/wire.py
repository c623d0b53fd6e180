"""HTTP to an engine: keys, deadlines, capped replies, and what a failure proves about the request.

Every call has a connection of its own: an idle one, just dropped by the engine, would look like a reload
that was cut off. Replies are read by httpx's transport alone: its client would look into what an engine says
of redirects and cookies, and fail on what it cannot parse.

Keys: SGLang takes `--api-key` for its user and info routes and `--admin-api-key`, where it has one, for its
control routes. As far as adapters call them, its info routes are GET and its control routes POST.
"""

from __future__ import annotations

import errno
import socket
import ssl
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from weightcast.shared.base.errors import DamagedFile, EngineFailed
from weightcast.shared.daemon.environment import port_of
from weightcast.shared.daemon.timing import Deadline
from weightcast.shared.daemon.tls import BadTls, client_context
from weightcast.shared.files.strict_json import parse_object
from weightcast.subscriber.engines.base import (
    NO_ROUTE,
    QUOTED,
    BadEngineOption,
    EngineFacts,
    EngineSpec,
    Intact,
    KeyRefused,
    Kind,
    NobodyListens,
    NoReply,
    NotSent,
    Suspect,
    Timeouts,
    Unhandled,
    address_of,
    unreachable,
    without_query,
)

DENIED = frozenset({401, 403, 407})
"""The request was refused for its credentials, in front of the handler: it had no effect."""
ADMIN_LOOK, READ_LOOK = "/get_weights_by_name", "/get_weights_by_name?"
"""A control route of SGLang by GET, with either key; without a name it says only whether the key fits."""
_PROXY = "use the engine's own address, or let the proxy pass this host"
_GIVE = "give it by api_key_env=VARIABLE"
_GIVE_TWO = f"{_GIVE}, and that of --admin-api-key by admin_api_key_env=VARIABLE"
_WANTED: Mapping[Kind, str] = {
    "sglang": "the server's --api-key",
    "vllm": "the server's --api-key",
    "webhook": "the token that the receiver accepts",
}


@dataclass(frozen=True)
class Key:
    """`value`: empty where no key is given; `place`: where it comes from; `remedy`: when it is refused."""

    value: str = ""
    place: str = ""
    remedy: str = _GIVE


@dataclass(frozen=True)
class Keys:
    read: Key = Key()
    control: Key = Key()

    def of(self, method: str, path: str) -> Key:
        return self.control if method == "POST" or path == ADMIN_LOOK else self.read


def keys_of(spec: EngineSpec, environ: Mapping[str, str]) -> Keys:
    """Raises BadEngineOption for a variable that is not set to a key."""
    api = _key(spec, "api_key_env", spec.api_key_env, _WANTED[spec.kind], environ)
    admin = _key(spec, "admin_api_key_env", spec.admin_api_key_env, "the server's --admin-api-key", environ)
    if spec.kind != "sglang":
        return Keys(api, api)
    if api.value and admin.value:
        swapped = "; check that the two are not swapped"
        return Keys(replace(api, remedy=api.remedy + swapped), replace(admin, remedy=admin.remedy + swapped))
    if admin.value:
        remedy = "info routes take the server's --api-key: give it by api_key_env=VARIABLE"
        return Keys(replace(admin, remedy=remedy), admin)
    if api.value:
        remedy = f"{api.remedy}; if it has an --admin-api-key, give that by admin_api_key_env=VARIABLE"
        return Keys(api, replace(api, remedy=remedy))
    return Keys(api, Key(remedy=_GIVE_TWO))


def _key(spec: EngineSpec, option: str, variable: str | None, wanted: str, environ: Mapping[str, str]) -> Key:
    if variable is None:
        return Key()
    value = environ.get(variable, "")
    if not value or not value.isascii() or not value.isprintable() or value != value.strip():
        fault = (
            "holds line breaks, spaces or characters outside ASCII" if value else "is not set to an API key"
        )
        raise BadEngineOption(
            f"engine {spec.name}: {option}: the variable {variable} {fault}", remedy=f"set it to {wanted}"
        )
    return Key(value, f"{variable} ({option}=)", f"set {variable} to {wanted}")


def refusal(url: str, response: httpx.Response, key: Key) -> KeyRefused | None:
    """What an answer says about the request's key; None: nothing. `url`: as it may be shown."""
    status = response.status_code
    if status not in DENIED:
        return None
    scheme = response.headers.get("WWW-Authenticate", "").partition(" ")[0].lower()
    fault, remedy = f"it refused the key in {key.place}", key.remedy
    if status == httpx.codes.PROXY_AUTHENTICATION_REQUIRED:
        fault, remedy = "a proxy wants credentials of its own", _PROXY
    elif scheme.isalpha() and scheme != "bearer":
        fault = f"a proxy wants {scheme[:20].title()} credentials, not an engine's key"
        remedy = _PROXY
    elif not key.value:
        fault = "it wants a key and got none"
    return KeyRefused(f"{url} answered {status}: {fault}", remedy=remedy)


REPLY_LIMIT = 4 << 20
"""bytes; the largest honest reply is a page of metrics"""

NEVER_HANDLED = DENIED | NO_ROUTE
"""An HTTP server answers these in front of the handler: the request had no effect."""


@dataclass(frozen=True)
class Reply:
    """`url`: as it may be shown. `refusal`: what the answer says about the request's key."""

    url: str
    status: int
    body: bytes
    refusal: KeyRefused | None = None

    def fields(self) -> Mapping[str, object]:
        """The JSON object of the body; empty where it is none: success must be said, never guessed."""
        try:
            return parse_object(self.body, self.url)
        except DamagedFile:
            return {}

    def text_field(self, key: str) -> str | None:
        value = self.fields().get(key)
        return value if isinstance(value, str) and len(value) <= QUOTED else None

    def told(self) -> Mapping[str, object]:
        """As `fields`, of an answer that says by its status that it is one."""
        return self.fields() if self.status == httpx.codes.OK else {}

    def told_text(self, key: str) -> str | None:
        return self.text_field(key) if self.status == httpx.codes.OK else None

    def describe(self) -> str:
        if self.refusal is not None:
            return str(self.refusal)
        quoted = self.body[:QUOTED].decode("utf-8", "replace")
        return f"{self.url} answered {self.status}: {''.join(c if c.isprintable() else ' ' for c in quoted)}"

    def require_key(self) -> Reply:
        if self.refusal is not None:
            raise self.refusal
        return self

    def require_route(self, remedy: str) -> Reply:
        if self.status in NO_ROUTE:
            raise Unhandled(self.describe(), remedy=remedy)
        return self

    def require_ok(self, remedy: str) -> Reply:
        self.require_key()
        if self.status != httpx.codes.OK:
            raise EngineFailed(self.describe(), remedy=remedy)
        return self


class Wire:
    """Calls to one engine. Raises NotSent (NobodyListens), NoReply; a reply of any status is returned."""

    def __init__(self, url: str, timeouts: Timeouts, keys: Keys, trust: ssl.SSLContext | None = None) -> None:
        """`trust`: None: as `trusted` has it by default."""
        self._url, self._shown_url = url, without_query(url)
        self.timeouts, self.keys = timeouts, keys
        # No proxy: one from the environment must not stand between a host and its own engine.
        self._transport = httpx.HTTPTransport(
            verify=trusted(url) if trust is None else trust,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    def close(self) -> None:
        self._transport.close()

    def get(self, path: str, seconds: float) -> Reply:
        return self._send("GET", path, None, seconds, again=True)

    def post(self, path: str, body: Mapping[str, object], seconds: float, *, again: bool = True) -> Reply:
        """`again`: for calls that may be repeated: sent once more if the connection is lost."""
        return self._send("POST", path, body, seconds, again=again)

    def order(
        self, path: str, body: Mapping[str, object], seconds: float, remedy: str = ""
    ) -> Reply | Intact | Suspect:
        """A reload, sent once: a reply of its handler, or what the lack of one proves. `remedy`: where no
        handler is there."""
        try:
            reply = self.post(path, body, seconds, again=False)
        except NotSent as failure:
            return Intact(str(failure))
        except NoReply as failure:
            return Suspect(str(failure))
        if reply.refusal is not None:
            return Intact(str(reply.refusal), untried=True)
        if reply.status in NEVER_HANDLED:
            return Intact(f"{reply.describe()} ({remedy})" if remedy else reply.describe())
        return reply

    def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None,
        seconds: float,
        *,
        again: bool = False,
    ) -> Reply:
        ends = time.monotonic() + seconds
        url, shown, deadline = self._url + path, self._shown_url + path, Deadline(seconds)
        timeout = httpx.Timeout(seconds, connect=min(seconds, self.timeouts.connect))
        extensions = {"timeout": timeout.as_dict(), "trace": deadline.trace}
        try:
            key = self.keys.of(method, path)
            request = httpx.Request(method, url, headers=_headers(key), json=body, extensions=extensions)
        except httpx.InvalidURL as error:
            raise NotSent(_unreached(shown, error), remedy=_START) from error
        try:
            return self._exchange(request, shown, deadline, key)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            absent = nobody_listens(url, error, self.timeouts.connect)
            kind = NobodyListens if absent else NotSent
            raise kind(_unreached(shown, error), remedy=_START) from error
        except httpx.HTTPError as error:
            if deadline.passed or isinstance(error, httpx.TimeoutException):
                raise NoReply(
                    f"{shown} did not answer within {round(seconds, 2):g} s", remedy=_LOOK
                ) from error
            left = ends - time.monotonic()
            if not again or left <= 0:
                raise NoReply(f"{shown} broke the connection: {error}", remedy=_LOOK) from error
        return self._send(method, path, body, left)

    def _exchange(self, request: httpx.Request, shown: str, deadline: Deadline, key: Key) -> Reply:
        received = bytearray()
        with deadline, closing(self._transport.handle_request(request)) as response:
            for piece in response.iter_raw():
                received += piece
                if len(received) > REPLY_LIMIT:
                    raise NoReply(f"{shown} answered with more than {REPLY_LIMIT} bytes", remedy=_LOOK)
            if deadline.passed:
                raise httpx.ReadTimeout("the reply was cut short")
            refused = refusal(shown, response, key)
            return Reply(shown, response.status_code, bytes(received), refused)


def _headers(key: Key) -> dict[str, str]:
    sent = {"Authorization": f"Bearer {key.value}"} if key.value else {}
    return {"Accept": "*/*", "Accept-Encoding": "identity", **sent}


def _unreached(url: str, error: Exception) -> str:
    return f"{url} cannot be reached: {error}"


_START = "start the engine or correct its URL"
_LOOK = "see the engine's log; restart it if it hangs"


def trusted(url: str, ca: Path | None = None, *, verify: bool = True) -> ssl.SSLContext:
    """Raises BadEngineOption for certificates that cannot be read."""
    try:
        context = client_context(url, ca)
    except BadTls as error:
        raise BadEngineOption(f"--engine {url}: ca={ca} cannot be read: {error.message}") from error
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def not_an_engine(reply: Reply) -> EngineFacts:
    """`reply`: any of those that say nothing of an engine."""
    if reply.refusal is not None:
        return unreachable(reply.refusal)
    return EngineFacts(
        reachable=False,
        hindrance=f"no engine is heard behind it: {reply.describe()}",
        remedy="check kind and address of --engine, and the proxy before it",
    )


def start_time(metrics: Reply) -> str | None:
    """The start time of the process that a Prometheus page speaks of, as text; None where the page lacks
    it."""
    if metrics.status != httpx.codes.OK:
        return None
    for line in metrics.body.splitlines():
        name, _, value = line.partition(b" ")
        if name == b"process_start_time_seconds":
            return value.strip()[:QUOTED].decode("ascii", "replace")
    return None


def nobody_listens(url: str, error: BaseException, seconds: float) -> bool:
    """`error`: of a connection to `url`; it tells of one of its addresses only. `seconds`: to ask each."""
    if not _is_refusal(error):
        return False
    parts, is_loopback = urlsplit(url), address_of(url)[0] == "localhost"
    try:
        socket.create_connection((parts.hostname, port_of(parts)), seconds, all_errors=True).close()
    except ExceptionGroup as failed:
        lacking = is_loopback and _is_missing("::1")
        absent = {errno.ECONNREFUSED, errno.EAFNOSUPPORT, *([errno.EADDRNOTAVAIL] if lacking else ())}
        return all(isinstance(each, OSError) and each.errno in absent for each in failed.exceptions)
    except OSError:  # the resolver's
        pass
    return False


def _is_refusal(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ConnectionRefusedError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_missing(address: str) -> bool:
    """Whether this machine lacks it, as containers without IPv6 lack `::1`. That a connection gets no address
    of its own may also mean that all ports are in use."""
    try:
        with socket.socket(socket.AF_INET6) as asked:
            asked.bind((address, 0))
    except OSError as error:
        return error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return False

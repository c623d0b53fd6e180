"""Whether a failed connection proves that no process listens: only a refusal does, of every address.

All else, a handshake that fails, a queue that is full, a name that does not resolve, says nothing of the
engine: it may be serving.
"""

from __future__ import annotations

import errno
import socket
import time
from ipaddress import ip_address
from urllib.parse import urlsplit

from weightcast.shared.service.addresses import port_of


def nobody_listens(url: str, error: BaseException, seconds: float) -> bool:
    """`error`: of a connection to `url`; it tells of one of its addresses only. `seconds`: to ask all."""
    if not _is_refusal(error):
        return False
    parts, ends = urlsplit(url), time.monotonic() + seconds
    try:
        found = socket.getaddrinfo(parts.hostname, port_of(parts), type=socket.SOCK_STREAM)
    except OSError:
        return False
    return len(found) == 1 or all(
        _refuses(family, address, ends - time.monotonic()) for family, _, _, _, address in found
    )


def _is_refusal(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ConnectionRefusedError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _refuses(family: int, address: tuple[object, ...], seconds: float) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as asked:
            asked.settimeout(max(seconds, 0.001))
            asked.connect(address)
    except ConnectionRefusedError:
        return True
    except OSError as error:
        return error.errno == errno.EAFNOSUPPORT or _is_missing_loopback(family, str(address[0]))
    return False


def _is_missing_loopback(family: int, host: str) -> bool:
    """Whether this machine lacks the address, as containers without IPv6 lack `::1`: nobody listens there.
    That a connection gets no address of its own may also mean that all ports are in use."""
    if not ip_address(host.partition("%")[0]).is_loopback:
        return False
    try:
        with socket.socket(family, socket.SOCK_STREAM) as asked:
            asked.bind((host, 0))
    except OSError as error:
        return error.errno == errno.EADDRNOTAVAIL
    return False

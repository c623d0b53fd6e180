"""Hosts and URLs as settings name them. What no resolver can be asked for raises an error of a text codec
there, at every call; so it is refused where it is read."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import SplitResult, urlsplit

URL_LIMIT = 2048
_LABEL = r"(?!-)[A-Za-z0-9_-]{1,63}"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")
_NAME_LIMIT = 253


def is_host(text: str) -> bool:
    """Whether it is an address or a name in ASCII (`xn--...` for others)."""
    return _is_address(text) or (
        len(text) <= _NAME_LIMIT and _NAME.fullmatch(text) is not None and _is_encoded(text)
    )


def http_parts(url: str) -> SplitResult | None:
    """The parts of an http or https URL that a client can ask; None: it is none."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return None
    is_fit = _is_address(host) if "[" in parts.netloc else is_host(host)
    is_plain = len(url) <= URL_LIMIT and url.isprintable() and not re.search(r"\s", url)
    return parts if parts.scheme in ("http", "https") and is_fit and is_plain and port != 0 else None


def port_of(parts: SplitResult) -> int:
    """Of an http or https URL, also where it names none."""
    return parts.port or (443 if parts.scheme == "https" else 80)


def _is_address(text: str) -> bool:
    try:
        return bool(ipaddress.ip_address(text))
    except ValueError:
        return False


def _is_encoded(name: str) -> bool:
    try:
        return bool(name.encode("ascii").decode("idna"))
    except UnicodeError:
        return False

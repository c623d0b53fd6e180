"""What surrounds this process: variables of the environment, addresses, cores and memory for threads. Light
to import: `publish` and `sync` are called for every version.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from urllib.parse import SplitResult, urlsplit

PREFIX = "WEIGHTCAST_"
# All names that are read, of both sides: one settings file may serve both. Tests hold them to the settings
# and to the options of all commands, which take too long to import.
_SETTINGS = (
    "ADAPTERS", "ADAPTERS_KEPT", "ADAPTERS_PLAIN_NAMES", "ALIAS", "ALLOW", "ALLOW_BASE_DRIFT", "ANCHOR_EVERY",
    "ANCHOR_SECONDS", "ANCHOR_SHARE", "BASE", "BASE_VERSION", "CA", "CALLER_TOKEN", "CARRY_CONFIG", "CAST",
    "CHANNEL", "CONSUME", "DRAFT", "DROP", "ENCODING", "ENGINE", "ENGINE_ATTEMPTS", "ENGINE_CHECK_SECONDS",
    "ENGINE_DEADLINE", "EVERY", "EXISTING", "FETCH_RATE", "FROM", "FROZEN", "GATE", "GATES", "GATE_DRAIN",
    "GATE_HOLD", "GATE_PATTERN", "GATE_REQUESTS", "GATE_TOKEN", "GATE_UPDATES", "GATE_URL", "GROUP_DEADLINE",
    "GROUP_FOLLOWER", "GROUP_LEASE", "GROUP_MEMBER", "GROUP_PATCH", "GROUP_TOKEN", "HAND_OVER",
    "HISTORY_SHARE", "HOLD", "HOOK_SECONDS", "HOST", "HOST_VERSIONS", "KEEP_BYTES", "KEEP_HOURS",
    "KEEP_VERSIONS", "LAYOUT", "LOCAL", "LOG_FORMAT", "LOG_LEVEL", "LOOK_SECONDS", "LOST_SECONDS", "MARKER",
    "MEMORY_BUDGET", "NON_FINITE", "ON_ENGINE_FAILED", "POLL_SECONDS", "PORT", "PORT_FILE", "POST_WRITE",
    "PRE_READ", "PUBLISHER", "PUBLISHER_TOKEN", "PUBLISH_RATE", "PUBLISH_SECONDS", "QUANTISE", "READABLE_BY",
    "RELOAD", "RENAME", "REPORT", "REPORT_SECONDS", "REPORT_TO", "REPORT_TOKEN", "REQUESTS", "SERVE",
    "SETTLE_SECONDS", "SIGN_KEY", "SKIP_SPAN", "STALE_SECONDS", "STOP_SECONDS", "TAKE_OVER", "TARGET",
    "THREADS", "TLS_CERT", "TLS_CLIENT_CA", "TLS_KEY", "TO", "TOKEN", "TRANSFER_PATCH", "TRUSTED_KEY",
    "UNFENCED", "VERIFIED_WITHIN", "VERIFY_ENGINE_EVERY", "VERIFY_RATE", "VISIBLE_DEADLINE", "WATCH",
    "WATCH_PATTERN",
)  # fmt: skip
_OTHERS = (
    "CACHE",  # of compiled kernels
    "CHANNEL_TOKEN", "CHANNEL_USER", "CHANNEL_PASSWORD",  # of channels over HTTP
    "PATCH_DIR", "PATCH_LIMIT",  # of weightcast-engine, in an engine's process
    "VERSION", "DIR", "PHASE", "DEADLINE", "ENGINE_NAME", "ENGINE_URL", "ENGINE_REASON",  # set for hooks
    "ENGINES_FULL", "ENGINE_VENV", "SGLANG_VENV", "SGLANG_SERVER_VENV", "CHROMIUM", "PICTURES",  # of tests
)  # fmt: skip
SETTINGS = frozenset(PREFIX + name for name in _SETTINGS)
KNOWN = SETTINGS | {PREFIX + name for name in _OTHERS}
_OF_TESTS = PREFIX + "TEST_"
# what Kubernetes sets for a service whose name begins with "weightcast"
_OF_SERVICES = re.compile(r".*(_SERVICE_(HOST|PORT(_\w+)?)|_PORT(_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)?)")


def unknown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Names with our prefix that nothing reads, and the nearest one that is read (empty: nothing similar)."""
    # settings are read in any case
    names = {name: name.upper() for name in environment if name.upper().startswith(PREFIX)}
    strange = {name: upper for name, upper in names.items() if upper not in KNOWN and not _is_foreign(upper)}
    return {name: _nearest(upper) for name, upper in sorted(strange.items())}


def _is_foreign(name: str) -> bool:
    return name.startswith(_OF_TESTS) or bool(_OF_SERVICES.fullmatch(name.removeprefix(PREFIX[:-1])))


def _nearest(name: str) -> str:
    # most commands find nothing, and start without it
    from difflib import get_close_matches

    settings = {setting.removeprefix(PREFIX): setting for setting in sorted(SETTINGS)}
    found = get_close_matches(name.removeprefix(PREFIX), settings, 1, 0.7)
    return settings[found[0]] if found else ""


_SECRET = re.compile(r"token(?!iz)|secret|password|authorization|api_?key", re.IGNORECASE)
_OPTION_BEHIND = rf",(?!\w*(?:{_SECRET.pattern}))[a-z_]+="
_QUERY = re.compile(rf"\?(?:[^\s,'\"]|(?!{_OPTION_BEHIND}),)+", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    return _SECRET.search(name) is not None


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """What a command that we start inherits: no secret of either daemon's settings, which read names in any
    case; one settings file may serve both. Tests hold the settings' secrets to this rule."""
    return {
        name: value
        for name, value in environment.items()
        if not (name.upper().startswith(PREFIX) and is_secret_name(name))
    }


def hide_queries(text: str) -> str:
    """Of all addresses in it: receivers take tokens there. A query ends before what looks like an engine's
    next option."""
    return _QUERY.sub("?...", text)


def is_token(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


URL_LIMIT = 2048
_LABEL = r"(?!-)[A-Za-z0-9_-]{1,63}"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")
_NAME_LIMIT = 253


def is_host(text: str) -> bool:
    """Whether it is an address or a name in ASCII (`xn--...` for others)."""
    is_name = len(text) <= _NAME_LIMIT and _NAME.fullmatch(text) is not None and _is_encoded(text)
    return is_name or address_of(text) is not None


def http_parts(url: str) -> SplitResult | None:
    """The parts of an http or https URL that a client can ask; None: it is none."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return None
    is_fit = address_of(host) is not None if "[" in parts.netloc else is_host(host)
    is_plain = len(url) <= URL_LIMIT and url.isprintable() and not re.search(r"\s", url)
    return parts if parts.scheme in ("http", "https") and is_fit and is_plain and port != 0 else None


def is_server_url(url: str) -> bool:
    """Whether it is `http(s)://host[:port]` and nothing more."""
    at = http_parts(url)
    return at is not None and not any((at.path.strip("/"), at.query, at.fragment, at.username, at.password))


def port_of(parts: SplitResult) -> int:
    """Of an http or https URL, also where it names none."""
    return parts.port or (443 if parts.scheme == "https" else 80)


def address_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None: a name."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _is_encoded(name: str) -> bool:
    try:
        return bool(name.encode("ascii").decode("idna"))
    except UnicodeError:
        return False


MEMORY_BUDGET = 256 << 20
SCRATCH_BYTES = 128 << 20
"""of working buffers per thread: a chunk of 4 Mi words as old and new words, changes and code"""

DAEMON_BYTES = 512 << 20
"""that a daemon's own memory grows by at most (tests/publisher/test_core_memory.py)"""


def working_threads(
    threads: int | None, memory_budget: int = MEMORY_BUDGET, *, default: int | None = None
) -> int:
    """Threads asked for (else `default`, else every core), as many as the budget has buffers for."""
    cores = usable_cores()
    wanted = threads if threads is not None else cores if default is None else min(cores, default)
    return max(1, min(wanted, memory_budget // SCRATCH_BYTES))


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))

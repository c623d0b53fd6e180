"""The gates of a fleet as servers of a load balancer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightcast.shared.daemon.fleet import Fleet

FORMATS = ("haproxy", "nginx", "json")
# reports are anyone's text: nothing but an address may get into a configuration
_URL = re.compile(r"(https?)://((?:[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\]):\d{1,5})/?")
_HAPROXY = """\
backend {name}
    http-check send meth GET uri {check} ver HTTP/1.1 hdr Host localhost hdr Authorization "Bearer ${{WEIGHTCAST_GATE_TOKEN}}"
{servers}"""  # noqa: E501
_TLS = ' ssl verify required ca-file "${WEIGHTCAST_CA}"'
_NONE = "    server 127.0.0.1:1 down;\n"
"""nginx refuses a list without servers"""

Gates = Sequence[tuple[str, str, str]]
"""of each: the name of its host's report, http or https, host and port"""


def gates_of(fleet: Fleet) -> Gates:
    """Of hosts that neither stopped nor are lost."""
    running = (host for host in fleet.hosts if host.standing not in ("stopped", "lost"))
    found = ((host.key, _URL.fullmatch(host.gate)) for host in running)
    return sorted((re.sub(r"[^A-Za-z0-9._-]", "-", key), url[1], url[2]) for key, url in found if url)


def shown(gates: Gates, form: str) -> str:
    if form == "json":
        listed = [{"name": name, "scheme": scheme, "address": address} for name, scheme, address in gates]
        return json.dumps({"gates": listed}) + "\n"
    if form == "nginx":
        # a location passes to one scheme
        return "".join(_upstream(name, scheme, gates) for name, scheme in _UPSTREAMS)
    servers = "".join(
        f"    server {name} {address} check{_TLS if scheme == 'https' else ''}\n"
        for name, scheme, address in gates
    )
    # of gates that are open, and of all that hold requests until they are open again
    checks = (("gates", "/readyz"), ("gates_held", "/health"))
    return "\n".join(_HAPROXY.format(name=name, check=check, servers=servers) for name, check in checks)


_UPSTREAMS = (("gates", "http"), ("gates_tls", "https"))


def _upstream(title: str, scheme: str, gates: Gates) -> str:
    servers = "".join(f"    server {address};  # {name}\n" for name, has, address in gates if has == scheme)
    return f"upstream {title} {{\n    least_conn;\n{servers or _NONE}}}\n"

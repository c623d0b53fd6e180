"""The gates of a fleet as servers of a load balancer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from weightcast.shared.daemon.fleet import Fleet

FORMATS = ("haproxy", "nginx", "json")
# reports are anyone's text: nothing but an address may get into a configuration
_URL = re.compile(r"http://((?:[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\]):\d{1,5})/?")
_HAPROXY = """\
backend {name}
    http-check send meth GET uri {check} ver HTTP/1.1 hdr Host localhost hdr Authorization "Bearer ${{WEIGHTCAST_GATE_TOKEN}}"
{servers}"""  # noqa: E501
_NONE = "    server 127.0.0.1:1 down;\n"
"""nginx refuses a list without servers"""

Gates = Sequence[tuple[str, str]]
"""of each: the name of its host's report, host and port"""


def gates_of(fleet: Fleet) -> Gates:
    """Of hosts that have a gate without TLS, and neither stopped nor are lost."""
    running = (host for host in fleet.hosts if host.standing not in ("stopped", "lost"))
    found = ((host.key, _URL.fullmatch(host.gate)) for host in running)
    return sorted((re.sub(r"[^A-Za-z0-9._-]", "-", key), url[1]) for key, url in found if url is not None)


def shown(gates: Gates, form: str) -> str:
    if form == "json":
        return json.dumps({"gates": [{"name": name, "address": address} for name, address in gates]}) + "\n"
    if form == "nginx":
        servers = "".join(f"    server {address};  # {name}\n" for name, address in gates)
        return f"upstream gates {{\n    least_conn;\n{servers or _NONE}}}\n"
    servers = "".join(f"    server {name} {address} check\n" for name, address in gates)
    # of gates that are open, and of all that hold requests until they are open again
    checks = (("gates", "/readyz"), ("gates_held", "/health"))
    return "\n".join(_HAPROXY.format(name=name, check=check, servers=servers) for name, check in checks)

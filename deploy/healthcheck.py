"""Exit status 0 if a GET of the URL is answered with 200, else 1: for images that have no curl.

On this machine it shows WEIGHTCAST_TOKEN, which a prober of a cluster cannot do.
"""

import http.client
import os
import sys
from urllib.parse import urlsplit

SECONDS = 4.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def is_healthy(url: str) -> bool:
    parts = urlsplit(url)
    # Not urllib.request: a proxy from the environment must not answer for the daemon.
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=SECONDS)
    token = os.environ.get("WEIGHTCAST_TOKEN") if parts.hostname in LOOPBACK else None
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        connection.request("GET", parts.path, headers=headers)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(0 if is_healthy(sys.argv[1]) else 1)

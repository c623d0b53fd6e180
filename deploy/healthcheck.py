"""Exit status 0 if a GET of the URL is answered with 200, else 1: for images that have no curl."""

import http.client
import sys
from urllib.parse import urlsplit

SECONDS = 4.0


def is_healthy(url: str) -> bool:
    parts = urlsplit(url)
    # Not urllib.request: a proxy from the environment must not answer for the daemon.
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=SECONDS)
    try:
        connection.request("GET", parts.path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(0 if is_healthy(sys.argv[1]) else 1)

"""Object stores on loopback that are not the real ones: they prove the client, not the store.

`make test-stores` installs them into `.venv-stores`.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path

import httpx
import pytest
from ports import free_port
from waiting import wait_until

HOME = Path(__file__).parents[1] / ".venv-stores"
_ACCOUNT, _KEY = "weightcast", base64.b64encode(bytes(range(64))).decode()


@dataclass(frozen=True)
class Emulator:
    """`environment`: what clients read; `make`: a bucket of this name."""

    scheme: str
    endpoint: str
    environment: dict[str, str]
    make: Callable[[str, str], httpx.Response]

    @property
    def origin(self) -> str:
        """Scheme, host and port."""
        return "/".join(self.endpoint.split("/")[:3])

    def make_bucket(self) -> str:
        """Its URL."""
        name = f"bucket-{uuid.uuid4().hex}"
        self.make(self.endpoint, name).raise_for_status()
        return f"{self.scheme}://{name}"


def _make_container(endpoint: str, name: str) -> httpx.Response:
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    signed = "".join(f"{name}:{value}\n" for name, value in headers.items())
    text = f"PUT{12 * chr(10)}{signed}/{_ACCOUNT}/{_ACCOUNT}/{name}\nrestype:container"
    mark = base64.b64encode(hmac.digest(base64.b64decode(_KEY), text.encode(), hashlib.sha256)).decode()
    headers["authorization"] = f"SharedKey {_ACCOUNT}:{mark}"
    return httpx.put(f"{endpoint}/{name}", params={"restype": "container"}, headers=headers, timeout=60)


@contextlib.contextmanager
def azure(root: Path) -> Iterator[Emulator]:
    """Microsoft's own emulator, azurite."""
    port = free_port()
    command = [
        str(HOME / "node_modules/.bin/azurite-blob"),
        "--blobHost",
        "127.0.0.1",
        "--blobPort",
        str(port),
    ]
    command += ["--location", str(root), "--silent", "--disableTelemetry"]
    endpoint = f"http://127.0.0.1:{port}/{_ACCOUNT}"
    environment = {
        "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
        "AZURE_STORAGE_ENDPOINT": endpoint,
    }
    with _served(root, command, endpoint, AZURITE_ACCOUNTS=f"{_ACCOUNT}:{_KEY}"):
        yield Emulator("az", endpoint, environment, _make_container)


@contextlib.contextmanager
def moto(root: Path) -> Iterator[Emulator]:
    """A mock of S3."""
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    environment = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "emulated-access",
        "AWS_SECRET_ACCESS_KEY": "emulated-secret",
        "AWS_REGION": "us-east-1",
    }
    with _served(root, [str(HOME / "bin/moto_server"), "-H", "127.0.0.1", "-p", str(port)], endpoint):
        yield Emulator("s3", endpoint, environment, lambda at, name: httpx.put(f"{at}/{name}", timeout=60))


EMULATORS = {"azure": azure, "moto": moto}
S3 = pytest.param("s3", marks=pytest.mark.s3)
AZURE, MOTO = (pytest.param(name, marks=pytest.mark.stores) for name in EMULATORS)
"""parameters of tests that run in a bucket, for the fixture `make_bucket`"""


@contextlib.contextmanager
def _served(root: Path, command: list[str], endpoint: str, **environment: str) -> Iterator[None]:
    with (root / "log").open("wb") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=root, env={**os.environ, **environment}
        )
    try:
        wait_until(
            lambda: server.poll() is not None or httpx.get(endpoint, timeout=10),
            what=endpoint,
            passing=(httpx.TransportError,),
        )
        assert server.poll() is None, (root / "log").read_text()
        yield
    finally:
        server.kill()
        server.wait()

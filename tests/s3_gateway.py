"""A Ceph object gateway on loopback, from Debian's packages: a real S3 server for tests.

`python tests/s3_gateway.py DIR` serves until it is interrupted; DIR/environment has what clients need. When
it stops answering it is restarted, and DIR/outages gets a line.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from ports import free_port

PACKAGES = "radosgw ceph-mon ceph-osd ceph-mgr ceph-common"
START_SECONDS = 120.0
LOOK_SECONDS, PROBE_SECONDS = 5.0, 60.0
"""between two looks at whether it answers, and how long it may take on a busy machine"""

_CONFIG = """\
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon_port}]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = {root}/keyring
run dir = {root}
log file = {root}/$name.log
admin socket = {root}/$name.sock
pid file =
mon data = {root}/mon
mgr data = {root}/mgr
osd data = {root}/osd
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd objectstore = bluestore
osd class load list = *
osd class default list = *
bluestore block size = 12884901888
osd memory target = 1073741824
mon allow pool size one = true
mon warn on pool no redundancy = false
mon data avail crit = 1
mon data avail warn = 2

[client.rgw.a]
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw gc obj min wait = 10
rgw gc processor period = 10
rgw gc processor max time = 10
"""


@dataclass(frozen=True)
class Gateway:
    endpoint: str
    access_key: str
    secret_key: str
    root: Path = Path()
    """for `user`: of the one that this module serves"""
    daemons: Daemons | None = None
    """of the process that started them"""

    def environment(self) -> dict[str, str]:
        """What S3 clients read."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
        }

    def make_bucket(self, name: str = "") -> str:
        """Its name."""
        name = name or f"bucket-{uuid.uuid4().hex}"
        self.ask("PUT", name).raise_for_status()
        return name

    @contextlib.contextmanager
    def user(self) -> Iterator[tuple[str, Gateway]]:
        """One who has no rights, by name, and the gateway with the keys."""
        name = f"user-{uuid.uuid4().hex}"
        made = _run(self.root, "radosgw-admin", "user", "create", f"--uid={name}", f"--display-name={name}")
        key = json.loads(made)["keys"][0]
        try:
            yield name, replace(self, access_key=key["access_key"], secret_key=key["secret_key"])
        finally:
            _run(self.root, "radosgw-admin", "user", "rm", f"--uid={name}")

    def allow(self, bucket: str, statements: list[dict[str, Any]]) -> None:
        """Replaces the bucket's policy."""
        body = json.dumps({"Version": "2012-10-17", "Statement": statements}).encode()
        self.ask("PUT", f"{bucket}?policy", content=body).raise_for_status()

    def ask(
        self,
        method: str,
        path: str,
        client: httpx.Client | None = None,
        content: bytes = b"",
        timeout: float = 300,
        **query: str,
    ) -> httpx.Response:
        """A signed request (version 2) for `bucket`, `bucket?policy` or `bucket/key`, without a thread of its
        own."""
        date, path = formatdate(usegmt=True), quote(f"/{path}", safe="/?")
        text = f"{method}\n\n\n{date}\n{path}".encode()
        mark = base64.b64encode(hmac.digest(self.secret_key.encode(), text, hashlib.sha1)).decode()
        headers = {"date": date, "authorization": f"AWS {self.access_key}:{mark}"}
        send = httpx.request if client is None else client.request
        params = query or None
        return send(
            method, self.endpoint + path, headers=headers, params=params, content=content, timeout=timeout
        )

    def answers(self) -> bool:
        """Whether it lists buckets, which all of its daemons have to do with."""
        with contextlib.suppress(httpx.HTTPError):
            return self.ask("GET", "", timeout=PROBE_SECONDS).is_success
        return False


class Away(RuntimeError):
    """The gateway does not answer, and nobody restarts it."""


class Daemons:
    """Processes of Ceph that serve from `root`, in the order in which they need each other."""

    def __init__(self, root: Path) -> None:
        self._root, self._running = root, dict[tuple[str, ...], subprocess.Popen[bytes]]()

    def start(self, *command: str) -> None:
        with (self._root / f"{Path(command[0]).name}.out").open("ab") as log:
            arguments = [*command, "-f", "-c", str(self._root / "ceph.conf")]
            self._running[command] = subprocess.Popen(arguments, stdout=log, stderr=log)

    @property
    def have_ended(self) -> bool:
        return any(daemon.poll() is not None for daemon in self._running.values())

    def stop(self) -> None:
        for daemon in reversed(self._running.values()):
            daemon.kill()
        for daemon in self._running.values():
            daemon.wait()

    def restart(self) -> None:
        self.stop()
        for command in list(self._running):
            self.start(*command)


def _run(root: Path, *command: str) -> str:
    done = subprocess.run(
        [*command, "-c", str(root / "ceph.conf")], check=False, capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


def _tool(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


@contextlib.contextmanager
def gateway(root: Path) -> Iterator[Gateway]:
    """Raises RuntimeError, with the reason, where it does not start."""
    missing = [name for name in ("ceph-mon", "ceph-osd", "ceph-mgr", "radosgw") if shutil.which(name) is None]
    if missing:
        raise RuntimeError(f"{', '.join(missing)} not found: apt-get install {PACKAGES}")
    root.mkdir(parents=True, exist_ok=True)
    daemons = Daemons(root)
    try:
        port, mon_port, fsid = free_port(), free_port(), str(uuid.uuid4())
        (root / "ceph.conf").write_text(_CONFIG.format(root=root, port=port, mon_port=mon_port, fsid=fsid))
        for name in ("mon", "mgr", "osd"):
            (root / name).mkdir()
        keyring, monmap = str(root / "keyring"), str(root / "monmap")
        caps = ["--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *"]
        _tool(
            "ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *"
        )
        for name in ("client.admin", "osd.0", "mgr.a", "client.rgw.a"):
            _tool("ceph-authtool", keyring, "--gen-key", "-n", name, *caps)
        address = f"[v2:127.0.0.1:{mon_port}]"
        _tool("monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, monmap)
        _run(root, "ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        daemons.start("ceph-mon", "-i", "a")
        osd = str(uuid.uuid4())
        _run(root, "ceph", "osd", "new", osd, "0")
        _run(root, "ceph-osd", "--mkfs", "--no-mon-config", "-i", "0", "--osd-uuid", osd, "--monmap", monmap)
        daemons.start("ceph-osd", "-i", "0")
        daemons.start("ceph-mgr", "-i", "a")
        daemons.start("radosgw", "-n", "client.rgw.a")
        user = _run(root, "radosgw-admin", "user", "create", "--uid=test", "--display-name=test")
        key = json.loads(user)["keys"][0]
        found = Gateway(f"http://127.0.0.1:{port}", key["access_key"], key["secret_key"], root, daemons)
        _wait_until_it_answers(found)
        yield found
    finally:
        daemons.stop()


def running_gateway(root: Path) -> Gateway:
    """The one that this module serves in `root`."""
    lines = (root / "environment").read_text().splitlines()
    values = dict(line.removeprefix("export ").split("=", 1) for line in lines)
    keys = values["AWS_ACCESS_KEY_ID"], values["AWS_SECRET_ACCESS_KEY"]
    return Gateway(values["AWS_ENDPOINT_URL"], *keys, root)


def _wait_until_it_answers(gateway: Gateway) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not gateway.answers():
        if gateway.daemons is not None and gateway.daemons.have_ended:
            raise RuntimeError("a Ceph daemon ended while the gateway started")
        if time.monotonic() > deadline:
            raise Away(f"the object store at {gateway.endpoint} does not answer")
        time.sleep(0.1)


def keep(gateway: Gateway, daemons: Daemons) -> None:
    """Starts it again whenever it does not answer, until this process is interrupted."""
    while True:
        time.sleep(LOOK_SECONDS)
        if daemons.have_ended or not gateway.answers():
            with (gateway.root / "outages").open("a") as file:
                file.write(f"{time.ctime()}\n")
            daemons.restart()
            with contextlib.suppress(RuntimeError):  # it is tried again
                _wait_until_it_answers(gateway)


def outages() -> int:
    """Of the gateway in WEIGHTCAST_TEST_S3, since it began. A gateway that does not answer is waited for.
    Raises Away."""
    served = os.environ.get("WEIGHTCAST_TEST_S3")
    if served is None:
        return 0
    if not (found := running_gateway(Path(served))).answers():
        time.sleep(LOOK_SECONDS + PROBE_SECONDS)  # until its keeper has noticed
        _wait_until_it_answers(found)
    file = Path(served) / "outages"
    return len(file.read_text().splitlines()) if file.exists() else 0


@contextlib.contextmanager
def bucket_at(channel: str, root: Path) -> Iterator[str]:
    """URL of a bucket, with its credentials in this process's environment: of `channel` itself, or for `s3` a
    new one, in the gateway of WEIGHTCAST_TEST_S3 or in one of its own, below `root`."""
    if channel != "s3":
        yield channel
        return
    with contextlib.ExitStack() as stack:
        if "WEIGHTCAST_TEST_S3" not in os.environ:
            stack.enter_context(_kept(root))
            os.environ["WEIGHTCAST_TEST_S3"] = str(root)
        made = running_gateway(Path(os.environ["WEIGHTCAST_TEST_S3"]))
        os.environ.update(made.environment())
        yield f"s3://{made.make_bucket()}"


@contextlib.contextmanager
def _kept(root: Path) -> Iterator[None]:
    """A process that serves and keeps one."""
    keeper = subprocess.Popen([sys.executable, __file__, str(root)], stdout=subprocess.DEVNULL)
    try:
        while not (root / "environment").exists():
            if keeper.poll() is not None:
                raise RuntimeError("the gateway does not start")
            time.sleep(0.1)
        yield
    finally:
        keeper.terminate()
        keeper.wait()


def gateway_of_environment() -> Gateway:
    """The one that AWS_* name."""
    names = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    return Gateway(*(os.environ[name] for name in names))


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with gateway(Path(sys.argv[1]).resolve()) as made:
        made.make_bucket("weightcast")
        lines = "".join(f"export {name}={value}\n" for name, value in made.environment().items())
        unfinished = Path(sys.argv[1]) / "environment.new"
        unfinished.write_text(lines)
        unfinished.rename(unfinished.with_suffix(""))
        print(made.endpoint, flush=True)
        assert made.daemons is not None
        with contextlib.suppress(KeyboardInterrupt):
            keep(made, made.daemons)

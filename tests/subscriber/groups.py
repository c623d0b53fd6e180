"""An engine group: subscribers with local checkpoints of their own, a network between them that can be cut,
and an engine that reads all their directories, slowly if a test wants it."""

from __future__ import annotations

import shutil
import ssl
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from doubles import Answer, Call, Double, Drop, SGLangDouble, WebhookDouble, serve
from forked import weightcast
from hosts import Run, Site, on_disk
from waiting import wait_until

from weightcast.subscriber.daemon.daemon import Subscriber
from weightcast.subscriber.daemon.settings import SubscriberSettings

LEASE = 20.0
SECONDS = 90.0


class _ReadsAll(Double):
    """Copies the weights of every directory, one after the other, the first one twice."""

    dirs: tuple[Path, ...] = ()

    def setup(self) -> None:
        self.reads: list[str] = []
        """the digest of each load; `mixed` when the directories were not of one version all the time"""
        self.served: list[str] = []
        """what it held whenever it was resumed"""
        self.gate = threading.Event()
        self.gate.set()
        self.reading = threading.Event()
        self.one_at_a_time = threading.Lock()
        self.loads_of_adapters: list[set[str]] = []
        """what each load of one found in all directories; empty where one had no such file"""

    def load_adapter(self, name: str, path: str) -> str:
        files = [each / "adapters" / Path(path).name / "adapter_model.safetensors" for each in self.dirs]
        self.loads_of_adapters.append({self.digest_of(each) if each.exists() else "" for each in files})
        return super().load_adapter(name, path)

    def shut(self) -> None:
        """The next load stops between the first directory and the others."""
        self.reading.clear()
        self.gate.clear()

    def await_reading(self) -> None:
        assert self.reading.wait(20), "no load came so far"

    def load(self, directory: str) -> bool:
        with self.one_at_a_time:
            return self.read_all()

    def read_all(self) -> bool:
        first = on_disk(self.dirs[0])
        self.reading.set()
        assert self.gate.wait(30)
        found = {first, *(on_disk(each) for each in self.dirs), on_disk(self.dirs[0])}
        self.held = found.pop() if len(found) == 1 else "mixed"
        self.reads.append(self.held)
        self.broken = False
        return True

    def resume(self) -> None:
        self.served.append(self.held)
        super().resume()

    def release(self) -> None:
        self.gate.set()
        super().release()


class Copies(_ReadsAll, SGLangDouble):
    def __init__(self) -> None:
        super().__init__()
        self.setup()


class Maps(_ReadsAll, WebhookDouble):
    """Never to be patched under: what is on disk when it is paused or resumed is what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.setup()
        self.patched_under = False

    def behave(self, call: Call) -> Answer:
        phase = call.body["phase"] if call.method == "POST" and self.reads else ""
        if (phase == "pause" and not self.paused) or (phase == "resume" and self.paused):
            self.patched_under |= {on_disk(each) for each in self.dirs} != {self.held}
        return super().behave(call)


class Network(Double):
    """Between a leader and one member. `cut`: nothing goes through."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self.target = target
        # the system's certificates take a tenth of a second to load
        self.client = httpx.Client(trust_env=False, verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        self.cut = False
        self.replies: list[tuple[str, int]] = []

    def behave(self, call: Call) -> Answer:
        raise NotImplementedError

    def respond(self, call: Call) -> Answer | Drop:
        self.calls.append(call)
        if self.cut:
            return Drop()
        headers = {key: call.headers[key] for key in ("authorization",) if key in call.headers}
        try:
            reply = self.client.request(call.method, self.target + call.path, json=call.body, headers=headers)
        except httpx.HTTPError:
            return Drop()
        return Drop() if self.cut else Answer(reply.status_code, reply.content)


class Host:
    """One subscriber as a daemon in a thread of this process."""

    def __init__(self, run: Run, local: Path, stack: ExitStack, **settings: Any) -> None:
        self.run, self.local = run, local
        self.port = 0
        self._settings = settings
        self._thread: threading.Thread | None = None
        stack.callback(self.stop)

    def start(self, **more: Any) -> Host:
        self._settings |= more
        port_file = self.local.with_suffix(".port")
        port_file.unlink(missing_ok=True)
        settings = SubscriberSettings(
            channel=self.run.channel,
            local=self.local,
            **({"base": self.run.base_dir, "poll_seconds": 0.2, "threads": 1, "visible_deadline": 0.5}
            | {"port": self.port, "port_file": port_file, "report": False, "stop_seconds": 30}
            | {"group_lease": LEASE, "group_deadline": 20.0} | self._settings),
        )  # fmt: skip
        self.daemon = Subscriber(settings)
        self._thread = threading.Thread(target=self.daemon.run, name="daemon")
        self._thread.start()
        wait_until(lambda: port_file.exists() or not self._thread.is_alive())
        self.port = int(port_file.read_text())
        return self

    def stop(self) -> None:
        if self._thread is not None:
            self.daemon.stop.set()
            self.daemon.wakeup.set()
            self._thread.join(40)
            assert not self._thread.is_alive()
            self._thread = None

    def replaced(self) -> None:
        """The same address, another disk."""
        self.stop()
        shutil.rmtree(self.local)
        self.start()

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(self._settings.get("group_member", ()))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def status(self) -> Any:
        return self.daemon.status()

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        return httpx.request(method, self.url + path, trust_env=False, timeout=10, **options)

    @property
    def is_free(self) -> bool:
        return bool(self.status.group.state == "free")

    @property
    def version(self) -> int | None:
        return self.status.local_version


class Group:
    """A leader with an engine, and members behind networks."""

    def __init__(self, site: Site, run: Run, engine: Double, members: int = 1, **settings: Any) -> None:
        self.run, self.engine, self.site = run, engine, site
        self.members = [
            Host(run, site.root / f"member{number}", site.stack, group_follower=True).start()
            for number in range(members)
        ]
        self.networks = [Network(member.url) for member in self.members]
        for network in self.networks:
            site.stack.callback(network.client.close)
        urls = tuple(site.stack.enter_context(serve(network)) for network in self.networks)
        self.option = site.option(engine)
        self.leader = Host(
            run, site.root / "leader", site.stack, group_member=urls, engine=(self.option,), **settings
        )
        engine.dirs = tuple(host.local for host in (self.leader, *self.members))
        site.stack.callback(engine.release)

    def start(self) -> Group:
        self.leader.start()
        return self

    @property
    def member(self) -> Host:
        return self.members[0]

    @property
    def network(self) -> Network:
        return self.networks[0]

    def serves(self, version: int) -> bool:
        status = self.leader.status
        return bool(
            status.served_version == version
            and status.ready
            and self.engine.held == self.run.digest(version)
            and not self.engine.paused
        )

    def await_served(self, version: int) -> None:
        """Everywhere on disk and in the engine, the members free again; nothing mixed was ever read."""
        wait_until(lambda: self.serves(version), SECONDS)
        wait_until(lambda: all(m.version == version and m.is_free for m in self.members), SECONDS)
        for host in (self.leader, *self.members):
            assert on_disk(host.local) == self.run.digest(version)
        self.never_mixed()

    def never_mixed(self) -> None:
        assert "mixed" not in self.engine.reads
        assert "mixed" not in self.engine.served


def journals(local: Path) -> list[Path]:
    return list((local / ".weightcast" / "journal").iterdir())


class Process:
    """A subscriber as a process of its own, to be killed."""

    def __init__(self, host: Host, *arguments: str) -> None:
        self.host = host
        self._port_file = host.local.with_suffix(".process-port")
        self._port_file.unlink(missing_ok=True)
        self._log = host.local.with_suffix(".log").open("ab")
        self._process = weightcast(
            *("subscriber", "run", "--channel", host.run.channel, "--base", host.run.base_dir),
            *("--local", host.local, "--port", host.port, "--port-file", self._port_file),
            *("--poll-seconds", "0.2", "--threads", "1", "--no-report", *arguments),
            stderr=self._log,
        )
        wait_until(lambda: self._port_file.exists() or self._process.poll() is not None, SECONDS)
        host.port = int(self._port_file.read_text())

    def status(self) -> Any:
        return self.host.call("GET", "/v1/status").json()

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._log.close()

"""A publisher and hosts as processes: who is heard from, who is not, in HTTP, channel and command."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forked
import pytest
from daemonkit import Daemon, Places, base_tensors, changed, rename_in
from in_process import Command
from waiting import wait_until

from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.reports import read_reports
from weightcast.shared.daemon.wait import wait_for_hosts


@dataclass
class Fleet:
    places: Places
    publisher: Daemon
    hosts: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return str(self.publisher.client.base_url)

    def local(self, name: str) -> Path:
        return self.places.root / name

    def start(self, name: str, *flags: str) -> None:
        """A subscriber with a local checkpoint of this name."""
        with (self.places.root / f"{name}.log").open("ab") as log:
            self.hosts[name] = forked.weightcast(
                *("subscriber", "run", "--channel", self.places.channel),
                *("--base", self.places.base, "--local", self.local(name), "--port", "0"),
                *("--poll-seconds", "0.2", "--threads", "1", "--report-seconds", "0.5", *flags),
                stderr=log,
            )

    def kill(self, name: str) -> None:
        self.hosts[name].kill()
        self.hosts[name].wait(30)

    def shown(self, name: str) -> dict[str, Any]:
        hosts = self.publisher.get("/v1/fleet").json()["hosts"]
        return next((host for host in hosts if host["local"] == str(self.local(name))), {})

    def publish(self, step: int) -> None:
        rename_in(self.places.watch / f"step_{step}", changed(base_tensors(), step))
        wait_until(lambda: self.publisher.status()["publications"][:1] and self.published_step() == step)

    def published_step(self) -> int:
        return int(self.publisher.status()["publications"][0]["step"])


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    places = Places.made(tmp_path)
    publisher = Daemon.start(places, "--stale-seconds", "3", "--lost-seconds", "6")
    found = Fleet(places, publisher)
    try:
        publisher.ready()
        yield found
    finally:
        for host in found.hosts.values():
            host.kill()
            host.wait(30)
        publisher.kill()


def test_hosts_appear_stop_and_recover(fleet: Fleet, weightcast: Command) -> None:
    fleet.publish(1)
    fleet.start("one")
    fleet.start("posts", "--report-to", fleet.url)
    for name in ("one", "posts"):
        wait_until(lambda name=name: fleet.shown(name).get("served_version") == 1)
    # its clock is compared with the reply to its first report, and told in the next
    wait_until(lambda: fleet.shown("posts")["clock_offset_seconds"] == 0.0)
    host = wait_until(lambda: host if (host := fleet.shown("posts"))["standing"] == "ready" else None)
    assert (host["lag"], host["presence"]) == (0, "live")
    assert host["bytes"]["step"] > 0 and {update["kind"] for update in host["updates"]} == {"seed", "patch"}
    assert {"fetch", "stage", "patch", "total"} <= set(host["updates"][0]["seconds"])
    # of one machine: their local checkpoints tell them apart
    arrived = wait_for_hosts(fleet.places.channel, 1, min_hosts=2, timeout=20)
    assert sorted(arrived) == sorted(f"{host['host']}:{fleet.shown(one)['local']}" for one in fleet.hosts)

    fleet.kill("one")
    fleet.publish(2)
    lost = wait_until(lambda: host if (host := fleet.shown("one"))["presence"] == "lost" else None)
    assert (lost["served_version"], lost["lag"], lost["standing"]) == (1, 1, "lost")
    wait_until(lambda: fleet.shown("posts")["lag"] == 0)

    code, out, _ = weightcast("fleet", "--url", fleet.url, "--json")
    said = json.loads(out)
    assert code == 0 and said["latest"] == 2
    assert said["counts"] == {"ready": 1, "behind": 0, "stale": 0, "lost": 1, "failed": 0, "stopped": 0}
    assert {host["key"]: (host["served_version"], host["lag"]) for host in said["hosts"]} == {
        host["key"]: (host["served_version"], host["lag"])
        for host in fleet.publisher.get("/v1/fleet").json()["hosts"]
    }
    code, out, _ = weightcast("fleet", "--channel", fleet.places.channel)
    assert code == 0 and "latest 2 (" in out and "; 2 hosts" in out and "patch 2 in" in out
    assert "publisher alive, heard" in out
    watching = forked.weightcast(
        *("fleet", "--channel", fleet.places.channel, "--watch", "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert watching.stdout is not None and json.loads(watching.stdout.readline())["latest"] == 2
    watching.send_signal(signal.SIGINT)
    assert (watching.communicate(timeout=60)[1], watching.returncode) == (b"", 0), "it is meant to end so"
    # the one that is gone is not waited for
    code, out, _ = weightcast("wait", "--url", fleet.url, "--version", 2, "--fraction", 1.0, "--json")
    assert code == 0 and json.loads(out) == {"version": 2, "hosts": [host["host"]]}
    code, _, err = weightcast("wait", "--url", fleet.url, "--version", 2, "--min-hosts", 2, "--timeout", 0)
    assert code == 4 and "1 of 1 host ready" in err
    code, _, err = weightcast("wait", "--channel", fleet.places.channel, "--version", 3, "--timeout", 0.1)
    assert code == 4 and "version 2" in err

    fleet.start("one")
    wait_until(lambda: fleet.shown("one")["standing"] == "ready")
    assert fleet.shown("one")["lag"] == 0

    name = f"{fleet.shown('one')['host']}:one"
    code, _, err = weightcast("fleet", "--url", fleet.url, "--forget", name)
    assert code == 3 and "only a stopped or lost host" in err
    fleet.kill("one")
    wait_until(lambda: fleet.shown("one")["standing"] == "lost")
    code, out, _ = weightcast("fleet", "--url", fleet.url, "--forget", name)
    assert code == 0 and out.startswith("forgot ")
    wait_until(lambda: fleet.shown("one") == {})
    assert fleet.publisher.client.delete("/v1/hosts/nobody").status_code == 404
    assert fleet.publisher.client.delete(f"/v1/hosts/{fleet.shown('posts')['key']}").status_code == 422


def test_a_publisher_that_refuses_checkpoints_says_so(fleet: Fleet, weightcast: Command) -> None:
    fleet.publish(1)
    code, out, _ = weightcast("status", fleet.url)
    assert code == 0 and out.startswith("publisher is ready: version 1 (step 1, published ")
    assert len(out.splitlines()) < 14
    # weights that nobody will publish are named, not waited for in silence
    (fleet.places.watch / "step_pickle").mkdir()
    (fleet.places.watch / "step_pickle" / "pytorch_model.bin").touch()
    wait_until(lambda: "step_pickle is not published" in weightcast("fleet", "--url", fleet.url)[1])
    broken = rename_in(fleet.places.watch / "step_2", dict(list(changed(base_tensors(), 2).items())[1:]))
    wait_until(lambda: fleet.publisher.status()["last_refused"])
    _, out, _ = weightcast("status", fleet.url)
    assert "; step_2 was refused " in out.splitlines()[0] and out.splitlines()[1].startswith("remedy: ")

    def line() -> Any:
        found = fleet.publisher.get("/v1/fleet").json()
        is_refusing = found["publisher"] is not None and found["publisher"]["refused_since_version"]
        return found if is_refusing else None

    found = wait_until(line)
    assert found["publisher"]["last_refused"]["source"] == broken.name
    assert found["publisher"]["inbox"]["refused"] == 1 and found["verdict"]["level"] == "bad"
    code, out, _ = weightcast("fleet", "--url", fleet.url)
    assert code == 0 and "step_2 refused: " in out.splitlines()[0]
    fleet.publish(3)
    wait_until(lambda: line() is None)
    assert weightcast("status", fleet.url, "--verbose")[1].startswith("role ")


def test_a_host_that_ends_says_so_and_one_that_reports_to_nobody_writes_nothing(fleet: Fleet) -> None:
    fleet.start("ends")
    wait_until(lambda: fleet.shown("ends").get("standing") == "ready")
    fleet.hosts["ends"].terminate()
    assert fleet.hosts["ends"].wait(30) == 0
    wait_until(lambda: fleet.shown("ends")["standing"] == "stopped")
    assert fleet.shown("ends")["ready"] is False
    # posted a moment after another report, which the publisher takes no second one after
    fleet.start("posts", "--report-to", fleet.url)
    wait_until(lambda: fleet.shown("posts").get("standing") == "ready")
    fleet.hosts["posts"].terminate()
    assert fleet.hosts["posts"].wait(30) == 0
    wait_until(lambda: fleet.shown("posts")["standing"] == "stopped")

    port_file = fleet.places.root / "far.port"
    fleet.start("far", "--report-to", "http://127.0.0.1:9", "--port-file", str(port_file))
    wait_until(port_file.exists)

    def report_error() -> str:
        code = fleet.publisher.client.get(f"http://127.0.0.1:{int(port_file.read_text())}/v1/status")
        return str(code.json()["report_error"])

    wait_until(lambda: "127.0.0.1:9" in report_error())
    reported = {report.local for report in read_reports(open_store(fleet.places.channel))}
    assert reported == {str(fleet.local("ends")), str(fleet.local("posts"))}

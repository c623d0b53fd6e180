"""Gates behind the load balancers of deploy/: hosts join, update and leave, and no request fails. Real
programs, with `weightcast fleet --format` as their list of servers."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from gate_kit import LONG, Engine, Host
from hosts import Run, Site
from in_process import Command
from ports import free_port
from tls import Authority
from waiting import wait_until

DEPLOY = Path(__file__).parents[2] / "deploy"


@contextmanager
def haproxy(root: Path, list_gates: Callable[[str], str]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Its address, and what makes it read the list again."""
    port, gates = free_port(), root / "gates.cfg"
    main = (DEPLOY / "haproxy" / "haproxy.cfg").read_text().replace("bind :8300", f"bind 127.0.0.1:{port}")
    (root / "haproxy.cfg").write_text(main)
    gates.write_text(list_gates("haproxy"))
    started = ["haproxy", "-W", "-f", str(root / "haproxy.cfg"), "-f", str(gates)]
    with subprocess.Popen(started, start_new_session=True) as program:
        try:
            yield f"http://127.0.0.1:{port}", _reload(gates, "haproxy", list_gates, program, signal.SIGUSR2)
        finally:
            program.terminate()


@contextmanager
def nginx(root: Path, list_gates: Callable[[str], str]) -> Iterator[tuple[str, Callable[[], None]]]:
    port, gates = free_port(), root / "gates.list"
    part = (DEPLOY / "nginx" / "gates.conf").read_text().replace("listen 8300", f"listen 127.0.0.1:{port}")
    if authority := os.environ.get("WEIGHTCAST_CA"):
        trusted = f"proxy_ssl_trusted_certificate {authority}; proxy_ssl_name gates.example;"
        part = part.replace(
            "proxy_pass http://gates;", f"proxy_pass https://gates_tls; proxy_ssl_verify on; {trusted}"
        )
    (root / "gates.conf").write_text(part.replace("/etc/nginx/gates.list", str(gates)))
    gates.write_text(list_gates("nginx"))
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = " ".join(f"{kind}_temp_path {root}/{kind};" for kind in kinds)
    (root / "nginx.conf").write_text(
        f"daemon off; user root; pid {root}/pid; error_log {root}/error.log;\n"
        f"events {{ worker_connections 1024; }}\nhttp {{ access_log off; {temporary}\n"
        f"include {root}/gates.conf; }}\n"
    )
    with subprocess.Popen(["nginx", "-c", str(root / "nginx.conf")]) as program:
        try:
            yield f"http://127.0.0.1:{port}", _reload(gates, "nginx", list_gates, program, signal.SIGHUP)
        finally:
            program.terminate()


def _reload(
    file: Path,
    form: str,
    list_gates: Callable[[str], str],
    program: subprocess.Popen[bytes],
    how: signal.Signals,
) -> Callable[[], None]:
    def reload() -> None:
        file.write_text(list_gates(form))
        program.send_signal(how)

    return reload


class Callers:
    """Ask all the while. `statuses` of all answers; `wrong`: what was no whole answer."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        self._url, self.statuses, self._done = url, Counter[int | str](), threading.Event()
        self._pool = stack.enter_context(ThreadPoolExecutor(4))
        stack.callback(self._done.set)
        self._running = [self._pool.submit(self._ask) for _ in range(4)]

    def _ask(self) -> None:
        with httpx.Client(trust_env=False, timeout=LONG) as client:
            while not self._done.is_set():
                body = {"prompt": "p", "seconds": 0.02}
                answer = client.post(f"{self._url}/v1/completions", json=body)
                self.statuses[answer.status_code] += 1
                if answer.status_code == 200:
                    assert answer.json()["weightcast"]["version"] >= 0

    def more(self, count: int = 8) -> None:
        """Waits for so many more answers."""
        before = self.statuses.total()
        wait_until(lambda: self.statuses.total() >= before + count)

    def end(self) -> Counter[int | str]:
        self._done.set()
        for running in self._running:
            running.result()
        return self.statuses


@pytest.mark.parametrize(
    "balancer",
    [pytest.param(haproxy, marks=pytest.mark.haproxy), pytest.param(nginx, marks=pytest.mark.nginx)],
)
def test_hosts_join_update_and_leave_and_no_request_fails(
    site: Site,
    run: Run,
    weightcast: Command,
    balancer: Callable[..., Iterator[tuple[str, Callable[[], None]]]],
) -> None:
    def list_gates(form: str) -> str:
        return weightcast("fleet", "--channel", run.channel, "--format", form).out

    def listed() -> int:
        return list_gates("json").count('"address"')

    engines = [Engine(site, f"engine{number}") for number in range(2)]
    first = Host(site, run, engines[0], name="first")
    first.publish()
    wait_until(lambda: listed() == 1)
    with ExitStack() as stack:
        url, reload = stack.enter_context(balancer(site.root, list_gates))  # type: ignore[arg-type]

        def answers() -> bool:
            return (
                httpx.post(f"{url}/v1/completions", json={"prompt": "p"}, trust_env=False).status_code == 200
            )

        wait_until(answers, passing=(httpx.TransportError,))
        callers = Callers(url, stack)
        callers.more()
        second = Host(site, run, engines[1], name="second")
        wait_until(lambda: listed() == 2)
        reload()
        wait_until(lambda: engines[1].get("/requests"))
        for _ in range(3):
            version = second.publish()
            first.wait_open(version)
            callers.more()
        first.process.terminate()
        first.process.wait()
        wait_until(lambda: listed() == 1)
        reload()
        callers.more()
        assert set(callers.end()) == {200}


@pytest.mark.parametrize(
    "balancer",
    [pytest.param(haproxy, marks=pytest.mark.haproxy), pytest.param(nginx, marks=pytest.mark.nginx)],
)
def test_gates_with_tls_are_asked_over_tls(
    site: Site,
    run: Run,
    weightcast: Command,
    monkeypatch: pytest.MonkeyPatch,
    balancer: Callable[..., Any],
) -> None:
    authority = Authority(site.root)
    monkeypatch.setenv("WEIGHTCAST_CA", str(authority.file))
    Host(site, run, Engine(site), options=("--tls-cert", str(authority.issue("host"))))
    run.publish()

    def list_gates(form: str) -> str:
        return weightcast("fleet", "--channel", run.channel, "--format", form).out

    wait_until(lambda: '"scheme": "https"' in list_gates("json"))
    with balancer(site.root, list_gates) as (url, _):
        asked = partial(httpx.post, f"{url}/v1/completions", json={"prompt": "p"}, trust_env=False)
        wait_until(lambda: asked().status_code == 200, passing=(httpx.TransportError,))


def test_a_report_cannot_write_into_a_configuration(site: Site, run: Run, weightcast: Command) -> None:
    host = Host(site, run, Engine(site), options=("--gate-url", "http://gates.example:8350"))
    host.publish()
    fleet = ("fleet", "--channel", run.channel, "--format")
    wait_until(lambda: "gates.example:8350" in weightcast(*fleet, "json").out)
    assert "server gates.example:8350;" in weightcast(*fleet, "nginx").out
    assert weightcast(*fleet, "haproxy").out.count(" gates.example:8350 check\n") == 2
    host.kill()
    [report] = (run.channel / "hosts").glob("*.json")
    for evil in ("http://h:1 check\\nbackend x", "http://h:1;}", "http://u@h:1", "ftp://h:1", "http://h"):
        report.write_text(report.read_text().replace("http://gates.example:8350", evil))
        assert '"address"' not in weightcast(*fleet, "json").out
        report.write_text(report.read_text().replace(evil, "http://gates.example:8350"))

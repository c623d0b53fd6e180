"""deploy/Dockerfile, read without Docker."""

from __future__ import annotations

import fnmatch
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from compose_stack import DOCKERFILE, REPOSITORY, Stage, read_dockerfile, read_services

IMAGES = ("subscriber", "publisher", "demo")
TOKEN = "a-token-of-this-test"


@pytest.fixture(scope="module")
def stages() -> dict[str, Stage]:
    return read_dockerfile()


def copied(stages: dict[str, Stage]) -> set[str]:
    return {
        source
        for stage in stages.values()
        for given, files, _ in stage.copies
        if given is None
        for source in files
    }


def test_what_is_copied_exists(stages: dict[str, Stage]) -> None:
    assert sorted(source for source in copied(stages) if not (REPOSITORY / source).exists()) == []
    for stage in stages.values():
        assert {given for given, _, _ in stage.copies if given is not None} <= set(stages)


def test_the_build_context_holds_what_is_copied(stages: dict[str, Stage]) -> None:
    lines = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    assert lines[0] == "*"
    kept = [line[1:] for line in lines if line.startswith("!")]
    assert {source.rstrip("/") for source in copied(stages)} == set(kept)


def test_the_wheel_is_built_from_all_packages(stages: dict[str, Stage]) -> None:
    assert {"shared/", "publisher/", "subscriber/", "pyproject.toml", "deploy/package.md"} <= copied(stages)


def test_images_do_not_run_as_root_and_compile_where_they_may_write(stages: dict[str, Stage]) -> None:
    text = DOCKERFILE.read_text()
    runtime = text[text.index(" AS runtime") :]
    assert "USER 10001:10001" in runtime.split("FROM ")[0]
    assert "USER" not in runtime.split("FROM ", 1)[1]
    for name in IMAGES:
        place = stages[name].environment["WEIGHTCAST_CACHE"]
        assert place in runtime.split("FROM ")[0].split("ENV")[0]


def test_daemon_images_start_their_daemon_and_ask_for_its_health(stages: dict[str, Stage]) -> None:
    for name, port in (("publisher", "8340"), ("subscriber", "8341")):
        assert [*stages[name].entrypoint, *stages[name].command] == ["weightcast", name, "run"]
        assert stages[name].environment["WEIGHTCAST_PORT"] == port
        assert stages[name].healthcheck[-1] == f"http://127.0.0.1:{port}/healthz"


def test_what_images_run_while_they_are_built_exists() -> None:
    programs = set(re.findall(r'RUN python -c "([^"]+)"', DOCKERFILE.read_text()))
    assert programs
    for program in programs:
        imports, _, call = program.partition("; ")
        _, module, _, name = imports.split()
        assert call == f"{name}()"
        assert callable(getattr(importlib.import_module(module), name))


def test_torch_comes_only_where_it_is_asked_for() -> None:
    text = DOCKERFILE.read_text()
    assert "ARG INSTALL_TORCH=no" in text
    build = text[text.index(" AS build\n") : text.index("AS build-publisher")]
    assert not fnmatch.fnmatch(build, "*[[]trainer]*")
    assert not fnmatch.fnmatch(build, "*[[]demo]*")


def test_every_service_has_an_image(stages: dict[str, Stage]) -> None:
    services = read_services({"WEIGHTCAST_TOKEN": "x"})
    assert {service.image.name for service in services.values()} == set(IMAGES)
    for service in services.values():
        assert Path(service.facts["build"]["dockerfile"]) == DOCKERFILE.relative_to(REPOSITORY)


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        opened = self.path == "/guarded" and self.headers["Authorization"] == f"Bearer {TOKEN}"
        self.send_response(200 if opened or self.path == "/healthz" else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def healthcheck(url: str) -> int:
    script = REPOSITORY / "deploy" / "healthcheck.py"
    return subprocess.run([sys.executable, "-I", script, url], check=False, timeout=30).returncode


def test_healthcheck_tells_200_from_all_else(url: str) -> None:
    assert healthcheck(f"{url}/healthz") == 0
    assert healthcheck(f"{url}/readyz") == 1


def test_healthcheck_shows_the_token_of_the_daemon_beside_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert healthcheck(f"{url}/guarded") == 1
    monkeypatch.setenv("WEIGHTCAST_TOKEN", TOKEN)
    assert healthcheck(f"{url}/guarded") == 0


def test_healthcheck_of_nobody(unused_port: int) -> None:
    assert healthcheck(f"http://127.0.0.1:{unused_port}/healthz") == 1


@pytest.fixture
def unused_port() -> int:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        return server.server_port

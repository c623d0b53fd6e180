"""docker-compose.yml without Docker: its services as local processes, with mounts, hosts and ports mapped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from weightcast.shared.kernels.compiler import CACHE

REPOSITORY = Path(__file__).resolve().parents[2]
COMPOSE = REPOSITORY / "docker-compose.yml"
DOCKERFILE = REPOSITORY / "deploy" / "Dockerfile"
_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")
_HOST_AND_PORT = re.compile(r"http://([\w.-]+):(\d+)")
START_SECONDS = 240.0
_POLL_SECONDS = 0.2


@dataclass
class Stage:
    """What an image of a Dockerfile is run with."""

    name: str
    parent: str
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    directory: str = "/"
    healthcheck: list[str] = field(default_factory=list)
    copies: list[tuple[str | None, list[str], str]] = field(default_factory=list)
    """stage (None: the build context), sources, place"""


def read_dockerfile(path: Path = DOCKERFILE) -> dict[str, Stage]:
    """Stages by name; each begins with what its parent stage has."""
    stages: dict[str, Stage] = {}
    stage = Stage("", "")
    for word, rest in _instructions(path.read_text()):
        if word == "FROM":
            parent, _, name = rest.split()
            stage = _child(stages.get(parent), name, parent)
            stages[name] = stage
        elif word == "ENTRYPOINT":
            # As in Docker: an entrypoint of its own discards the command of the parent.
            stage.entrypoint, stage.command = json.loads(rest), []
        elif word == "CMD":
            stage.command = json.loads(rest)
        elif word == "ENV":
            stage.environment |= {pair.partition("=")[0]: pair.partition("=")[2] for pair in rest.split()}
        elif word == "WORKDIR":
            stage.directory = rest
        elif word == "HEALTHCHECK":
            stage.healthcheck = json.loads(rest[rest.index("CMD ") + 4 :])
        elif word == "COPY":
            source, *files, place = rest.split()
            given = source.removeprefix("--from=") if source.startswith("--from=") else None
            stage.copies.append((given, files if given is not None else [source, *files], place))
    return stages


def _child(parent: Stage | None, name: str, parent_name: str) -> Stage:
    if parent is None:
        return Stage(name, parent_name)
    return Stage(
        name,
        parent_name,
        list(parent.entrypoint),
        list(parent.command),
        dict(parent.environment),
        parent.directory,
        list(parent.healthcheck),
        list(parent.copies),
    )


def _instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


@dataclass(frozen=True)
class Service:
    name: str
    image: Stage
    command: tuple[str, ...]
    environment: Mapping[str, str]
    healthcheck: tuple[str, ...]
    health_seconds: float
    """interval times retries"""
    after: dict[str, str]
    """condition by service"""
    mounts: Mapping[str, str]
    """volume by place; a place alone, an anonymous volume, has the name ''"""
    facts: Mapping[str, Any]
    network: str = ""
    """whose loopback it shares; its own where none is named"""


def read_services(variables: Mapping[str, str], path: Path = COMPOSE) -> dict[str, Service]:
    """Raises KeyError for a variable that is required and not given."""
    found = _interpolated(yaml.safe_load(path.read_text()), variables)
    images = read_dockerfile()
    return {name: _service(name, facts, images) for name, facts in found["services"].items()}


def _interpolated(value: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _interpolated(each, variables) for key, each in value.items()}
    if isinstance(value, list):
        return [_interpolated(each, variables) for each in value]
    if not isinstance(value, str):
        return value
    return _VARIABLE.sub(lambda match: _value(match, variables), value)


def _value(match: re.Match[str], variables: Mapping[str, str]) -> str:
    name, operator, text = match.groups()
    if variables.get(name):
        return variables[name]
    if operator == "-":
        return text or ""
    raise KeyError(f"{name}: {text}")


def _service(name: str, facts: dict[str, Any], images: Mapping[str, Stage]) -> Service:
    image = images[facts["build"]["target"]]
    entrypoint = facts.get("entrypoint", image.entrypoint)
    fallback = [] if "entrypoint" in facts else image.command
    check = facts.get("healthcheck", {})
    mode, *test = check.get("test", ["CMD"])
    assert mode == "CMD"
    return Service(
        name,
        image,
        (*entrypoint, *facts.get("command", fallback)),
        image.environment | facts.get("environment", {}),
        tuple(test),
        float(str(check.get("interval", "0s")).removesuffix("s")) * check.get("retries", 0),
        {other: each["condition"] for other, each in facts.get("depends_on", {}).items()},
        dict(_mount(text) for text in facts.get("volumes", [])),
        facts,
    )


def _mount(text: str) -> tuple[str, str]:
    volume, colon, place = text.removesuffix(":ro").partition(":")
    return (place, volume) if colon else (volume, "")


class Stack:
    """Runs services in a directory of its own. `free_port` gives a port nobody listens on."""

    def __init__(self, services: Mapping[str, Service], root: Path, free_port: Callable[[], int]) -> None:
        self.services = services
        self.root = root
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.order: list[str] = []
        self._free_port = free_port
        self._started: dict[str, float] = {}
        self._healthy: set[str] = set()
        self.ports: dict[tuple[str, str], int] = {}
        """here, by network and by port there"""
        for service in services.values():
            for volume in service.mounts.values():
                (root / "volumes" / volume).mkdir(parents=True, exist_ok=True)

    def up(self) -> None:
        """Starts every service as soon as its conditions hold, and returns when all are healthy."""
        self.wait(self._all_are_up, "all services up", START_SECONDS)

    def _all_are_up(self) -> bool:
        for name, service in self.services.items():
            if name not in self.processes and all(self._holds(*each) for each in service.after.items()):
                self._start(name)
        checked = [name for name, service in self.services.items() if service.healthcheck]
        return len(self.processes) == len(self.services) and all(map(self.is_healthy, checked))

    def _holds(self, name: str, condition: str) -> bool:
        if name not in self.processes:
            return False
        return self.is_healthy(name) if condition == "service_healthy" else self.is_done(name)

    def port(self, network: str, inside: str | int) -> int:
        key = (network, str(inside))
        if key not in self.ports:
            self.ports[key] = self._free_port()
        return self.ports[key]

    def volume(self, name: str) -> Path:
        return self.root / "volumes" / name

    def is_healthy(self, name: str) -> bool:
        """Whether the service's own check was ever passed. Fails when it ended or is late."""
        if name in self._healthy:
            return True
        assert self.processes[name].poll() is None, self.log(name)
        service = self.services[name]
        late = time.monotonic() - self._started[name] > service.health_seconds
        if self.passes(name, service.healthcheck):
            self._healthy.add(name)
            return True
        assert not late, f"{name} is not healthy within {service.health_seconds:g} s\n{self.log(name)}"
        return False

    def passes(self, name: str, check: Sequence[str]) -> bool:
        """Whether a command, run in the service, ends well now."""
        words = [self._local(name, word) for word in check]
        return subprocess.run(words, env=self._environment(name), check=False).returncode == 0

    def is_done(self, name: str) -> bool:
        """Fails unless it ended well."""
        code = self.processes[name].poll()
        assert code in (None, 0), self.log(name)
        return code == 0

    def wait_done(self, name: str, seconds: float) -> None:
        self.wait(lambda: self.is_done(name), f"{name} ended", seconds)

    def wait(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s\n{self.logs()}"
            time.sleep(_POLL_SECONDS)

    def stop(self, seconds: float = 30.0) -> dict[str, int]:
        """SIGTERM for all that runs, dependents first. Returns the exit codes of those."""
        running = [name for name in reversed(self.order) if self.processes[name].poll() is None]
        for name in running:
            self.processes[name].send_signal(signal.SIGTERM)
        return {name: self.processes[name].wait(seconds) for name in running}

    def kill(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def log(self, name: str) -> str:
        path = self.root / f"{name}.log"
        return f"--- {name}\n{path.read_text(errors='replace')[-3000:]}" if path.exists() else f"--- {name}"

    def logs(self) -> str:
        return "\n".join(map(self.log, self.order))

    def _start(self, name: str) -> None:
        service = self.services[name]
        with (self.root / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [self._local(name, word) for word in service.command],
                cwd=self._directory(service),
                env=self._environment(name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.order.append(name)
        self._started[name] = time.monotonic()

    def _directory(self, service: Service) -> Path:
        """Where the image has the repository's files, the repository; else a place without any."""
        copied = {PurePosixPath(place).parent for _, _, place in service.image.copies}
        return REPOSITORY if PurePosixPath(service.image.directory) in copied else self.root

    def _environment(self, name: str) -> dict[str, str]:
        service = self.services[name]
        mapped = {key: self._local(name, value) for key, value in service.environment.items()}
        # Programs of this installation, and its kernels.
        mapped["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        assert CACHE is not None
        return mapped | {"WEIGHTCAST_CACHE": str(CACHE.parent), "HOME": str(self.root)}

    def _local(self, name: str, word: str) -> str:
        service = self.services[name]
        for place in sorted(service.mounts, key=len, reverse=True):
            word = re.sub(rf"{re.escape(place)}(?=/|\s|$)", str(self.volume(service.mounts[place])), word)
        for _, files, place in service.image.copies:
            if len(files) == 1 and word == place:
                word = str(REPOSITORY / files[0])
        word = _HOST_AND_PORT.sub(lambda match: self._address(name, *match.groups()), word)
        flag, _, value = word.partition("=")
        if flag in ("--port", "--gate"):
            return f"{flag}={self.port(self._network(name), value)}"
        return word.replace("0.0.0.0", "127.0.0.1")

    def _address(self, name: str, host: str, port: str) -> str:
        network = self._network(name) if host == "127.0.0.1" else host
        assert network in map(self._network, self.services), f"{name} speaks to {host}, which is nobody"
        return f"http://127.0.0.1:{self.port(network, port)}"

    def _network(self, name: str) -> str:
        return self.services[name].network or name

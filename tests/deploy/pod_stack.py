"""deploy/kubernetes without Kubernetes: the containers of its pods as services of a `Stack`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from compose_stack import REPOSITORY, Service, Stage, read_dockerfile

DIRECTORY = REPOSITORY / "deploy" / "kubernetes"
Facts = Mapping[str, Any]


def read_objects() -> list[dict[str, Any]]:
    """What is applied, in the order of its files."""
    kustomization = yaml.safe_load((DIRECTORY / "kustomization.yaml").read_text())
    texts = [(DIRECTORY / name).read_text() for name in kustomization["resources"]]
    return [found for text in texts for found in yaml.safe_load_all(text)]


def pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Specs of pods by the name of what makes them."""
    return {
        found["metadata"]["name"]: found["spec"]["template"]["spec"]
        for found in objects
        if "template" in found.get("spec", {})
    }


def containers(pod: Facts) -> list[dict[str, Any]]:
    """In the order of their start."""
    return [*pod.get("initContainers", []), *pod["containers"]]


def is_sidecar(container: Facts) -> bool:
    return container.get("restartPolicy") == "Always"


def services_of(
    name: str, pod: Facts, secrets: Mapping[str, str], instead: Mapping[str, tuple[str, list[str]]]
) -> Iterator[Service]:
    """A pod's containers as services called `pod` or `pod-container`. `instead`: images and commands in the
    place of a container's own."""
    images, after = read_dockerfile(), dict[str, str]()
    many = len(containers(pod)) > 1
    for container in containers(pod):
        own = f"{name}-{container['name']}" if many else name
        command = instead.get(container["name"])
        image = (
            images[container["image"].removeprefix("weightcast-")] if command is None else images[command[0]]
        )
        given = [*image.entrypoint, *container["args"]] if command is None else command[1]
        probe = container.get("startupProbe", {})
        yield Service(
            own,
            image,
            tuple(given),
            image.environment | dict(_variables(container, secrets)),
            check_of(container, "startupProbe"),
            float(probe.get("periodSeconds", 0) * probe.get("failureThreshold", 0)),
            dict(after),
            dict(_mounts(name, pod, container)),
            container,
            network=name,
        )
        runs_on = is_sidecar(container) or container in pod["containers"]
        after[own] = "service_healthy" if runs_on else "service_completed_successfully"


def _variables(container: Facts, secrets: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for one in container.get("env", []):
        if "value" in one:
            yield one["name"], one["value"]
        else:
            yield one["name"], secrets[one["valueFrom"]["secretKeyRef"]["key"]]


def check_of(container: Facts, name: str) -> tuple[str, ...]:
    """A probe as a command; none: no words."""
    probe = container.get(name, {})
    if "httpGet" not in probe:
        return tuple(probe.get("exec", {}).get("command", ()))
    asked = probe["httpGet"]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    url = f"http://127.0.0.1:{ports[asked['port']]}{asked['path']}"
    return "python", "-I", "/opt/healthcheck.py", url


def _mounts(name: str, pod: Facts, container: Facts) -> Iterator[tuple[str, str]]:
    claims = {
        one["name"]: one["persistentVolumeClaim"]["claimName"]
        for one in pod["volumes"]
        if "persistentVolumeClaim" in one
    }
    for mount in container["volumeMounts"]:
        volume = claims.get(mount["name"], f"{name}-{mount['name']}")
        if mount["mountPath"].startswith("/srv"):
            yield mount["mountPath"], str(Path(volume, mount.get("subPath", "")))


def trainer(stage: Stage, verb: str, *arguments: str, after: dict[str, str], token: str = "") -> Service:
    """The demo's, with the volumes of the publisher's pod. `token`: of the gates."""
    place = "/srv/weightcast"
    mounts = {
        f"{place}/trainer": "trainer",
        f"{place}/exports": "trainer/exports",
    }
    command = ("python", "-m", "examples.trainer", verb, f"--dir={place}/trainer", *arguments)
    environment = stage.environment | {"WEIGHTCAST_TOKEN": token}
    return Service(f"trainer-{verb}", stage, command, environment, (), 0.0, after, mounts, {})

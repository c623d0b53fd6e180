"""deploy/kubernetes: its objects against the schemas of Kubernetes, its containers run here as processes."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml
from compose_stack import Service, Stack, read_dockerfile
from pod_stack import DIRECTORY, check_of, containers, is_sidecar, pods, read_objects, services_of, trainer
from ports import free_port

from weightcast.publisher.daemon.settings import PublisherSettings
from weightcast.shared.daemon.settings import ServiceSettings
from weightcast.subscriber.daemon.settings import SubscriberSettings

SECRETS = {"token": "the-publishers-token", "host-token": "the-hosts-token", "report-token": "a-third-token"}
ROLES: dict[str, type[ServiceSettings]] = {"publisher": PublisherSettings, "subscriber": SubscriberSettings}
LONG = 240.0
"""seconds that a loaded machine may take"""


@pytest.fixture(scope="module")
def objects() -> list[dict[str, Any]]:
    return read_objects()


@pytest.fixture(scope="module")
def all_pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return pods(objects)


def ours(all_pods: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Each container that runs weightcast, behind its pod."""
    for pod in all_pods.values():
        for container in containers(pod):
            if container["image"].startswith("weightcast-"):
                yield pod, container


@pytest.mark.parametrize("release", ["1.29", "1.33", kubernetes_validate.latest_version()])
def test_every_object_is_one_of_the_schema(objects: list[dict[str, Any]], release: str) -> None:
    assert objects
    for found in objects:
        kubernetes_validate.validate(found, release, strict=True)


def test_every_file_and_image_is_named(all_pods: dict[str, dict[str, Any]]) -> None:
    kustomization = yaml.safe_load((DIRECTORY / "kustomization.yaml").read_text())
    files = {path.name for path in DIRECTORY.iterdir()} - {"kustomization.yaml"}
    assert files == set(kustomization["resources"])
    images = {container["image"] for pod in all_pods.values() for container in containers(pod)}
    assert images == {image["name"] for image in kustomization["images"]}


def test_selectors_find_the_pods_and_ports_are_listened_on(objects: list[dict[str, Any]]) -> None:
    templates = [found["spec"]["template"] for found in objects if "template" in found.get("spec", {})]
    by_name = {template["metadata"]["labels"]["app.kubernetes.io/name"]: template for template in templates}
    for found in objects:
        spec = found["spec"]
        wanted = {"Service": ["selector"], "StatefulSet": ["selector", "matchLabels"]}
        path = wanted.get(found["kind"], ["podSelector", "matchLabels"] if "podSelector" in spec else [])
        for key in path:
            spec = spec[key]
        if not path:
            continue
        template = by_name[spec["app.kubernetes.io/name"]]
        assert spec.items() <= template["metadata"]["labels"].items()
        listening = {
            port["containerPort"] for each in containers(template["spec"]) for port in each.get("ports", [])
        }
        asked = {int(port) for port in re.findall(r"'port': (\d+)", str(found["spec"]))}
        assert asked <= listening, found["metadata"]
    claims = {found["metadata"]["name"] for found in objects if found["kind"] == "PersistentVolumeClaim"}
    services = {found["metadata"]["name"] for found in objects if found["kind"] == "Service"}
    for found in objects:
        if found["kind"] == "StatefulSet":
            assert found["spec"]["serviceName"] in services
            assert set(re.findall(r"'claimName': '(\w+)'", str(found))) <= claims
            volumes = found["spec"]["template"]["spec"]["volumes"] + [
                one["metadata"] for one in found["spec"].get("volumeClaimTemplates", [])
            ]
            mounted = re.findall(r"'name': '([\w-]+)', 'mountPath'", str(found))
            assert set(mounted) == {volume["name"] for volume in volumes}


def test_containers_of_weightcast_are_hardened(all_pods: dict[str, dict[str, Any]]) -> None:
    found = list(ours(all_pods))
    assert len(found) == 3
    for pod, container in found:
        context = pod.get("securityContext", {}) | container["securityContext"]
        assert (context["runAsNonRoot"], context["runAsUser"], context["fsGroup"]) == (True, 10001, 10001)
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert not pod["automountServiceAccountToken"]


def test_no_service_sets_a_setting(all_pods: dict[str, dict[str, Any]]) -> None:
    assert all(pod["enableServiceLinks"] is False for pod in all_pods.values())


def test_hosts_cannot_write_to_the_channel(all_pods: dict[str, dict[str, Any]]) -> None:
    for container in containers(all_pods["rollout"]):
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert mounts.get("/srv/weightcast/channel", {"readOnly": True})["readOnly"]
        local = mounts["/srv/weightcast/local"]
        assert local.get("readOnly", False) is (container["name"] == "engine")


def test_hosts_do_not_hold_the_publishers_token(all_pods: dict[str, dict[str, Any]]) -> None:
    keys = {
        name: set(re.findall(r"'secretKeyRef': {'name': 'weightcast', 'key': '([\w-]+)'", str(pod)))
        for name, pod in all_pods.items()
    }
    assert keys == {"publisher": {"token", "report-token"}, "rollout": {"host-token", "report-token"}}
    told = (DIRECTORY / "kustomization.yaml").read_text()
    assert set(re.findall(r"--from-literal=([\w-]+)=", told)) == set(SECRETS)


def test_daemons_have_time_to_end_their_step(all_pods: dict[str, dict[str, Any]]) -> None:
    assert all_pods["publisher"]["terminationGracePeriodSeconds"] > 60
    assert all_pods["rollout"]["terminationGracePeriodSeconds"] > 300
    assert [each["name"] for each in containers(all_pods["rollout"]) if is_sidecar(each)] == ["subscriber"]


def test_what_daemons_are_told_are_settings(all_pods: dict[str, dict[str, Any]]) -> None:
    for _, container in ours(all_pods):
        settings = ROLES.get(container["args"][0])
        if settings is None:
            continue
        known = {f"WEIGHTCAST_{name}".upper() for name in settings.model_fields} | {"WEIGHTCAST_CACHE"}
        assert {one["name"] for one in container["env"]} <= known
        others = {one["name"]: one for one in container["env"]}
        assert others["WEIGHTCAST_HOST"]["value"] == "0.0.0.0" and "valueFrom" in others["WEIGHTCAST_TOKEN"]


@pytest.fixture
def stack(all_pods: dict[str, dict[str, Any]], tmp_path: Path) -> Iterator[Stack]:
    """The demo's engine in the place of the real one, the demo's trainer before and beside it."""
    demo = read_dockerfile()["demo"]
    (model,) = [
        word for word in containers(all_pods["rollout"])[-1]["args"] if word.startswith("--model-path=")
    ]
    engine = ["python", "-m", "examples.engine", model.replace("-path", ""), "--host=0.0.0.0", "--port=30000"]
    services = [
        trainer(demo, "prepare", "--warm-steps=2", after={}),
        *services_of("publisher", all_pods["publisher"], SECRETS, {}),
        *services_of("rollout", all_pods["rollout"], SECRETS, {"engine": ("demo", engine)}),
        trainer(
            demo,
            "run",
            *("--watch=/srv/weightcast/exports", "--url=http://rollout:8350", "--steps=2"),
            after={"rollout-engine": "service_healthy"},
            token=SECRETS["host-token"],
        ),
    ]
    running = Stack(by_name(services), tmp_path, free_port)
    try:
        yield running
    finally:
        running.kill()


def by_name(services: list[Service]) -> dict[str, Service]:
    """A publisher without a base ends, and is begun again in a cluster; here it waits."""
    found = {service.name: service for service in services}
    found["publisher"].after["trainer-prepare"] = "service_completed_successfully"
    return found


def ask(stack: Stack, network: str, port: int, path: str) -> httpx.Response:
    url = f"http://127.0.0.1:{stack.ports[network, str(port)]}{path}"
    token = SECRETS["token" if network == "publisher" else "host-token"]
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.get(url, headers=headers, trust_env=False, timeout=60)


def is_ready(stack: Stack, name: str) -> bool:
    return stack.passes(name, check_of(stack.services[name].facts, "readinessProbe"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_pod_is_seeded_follows_and_is_ready_when_its_engine_serves(stack: Stack) -> None:
    stack.up()
    stack.wait_done("trainer-run", LONG)
    stack.wait(
        lambda: ask(stack, "rollout", 8341, "/v1/status").json()["served_version"] == 2, "version 2", LONG
    )
    assert ask(stack, "rollout", 30000, "/model_info").json()["weight_version"] == "2"
    stack.wait(lambda: is_ready(stack, "rollout-subscriber"), "the pod is ready", LONG)
    assert is_ready(stack, "publisher")
    stack.wait(
        lambda: (
            [host["served_version"] for host in ask(stack, "publisher", 8340, "/v1/fleet").json()["hosts"]]
            == [2]
        ),
        "the host's report with the publisher",
        LONG,
    )

    stack.processes["rollout-engine"].send_signal(signal.SIGTERM)
    # its gate notices before the process is gone
    stack.wait(lambda: stack.processes["rollout-engine"].poll() is not None, "the engine's end", LONG)
    stack.wait(lambda: not is_ready(stack, "rollout-subscriber"), "no longer ready", LONG)
    ended = stack.stop()
    assert {name: code for name, code in ended.items() if code} == {}, stack.logs()

"""docker-compose.yml: its services run here as processes, with the command lines that it gives them."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from compose_stack import Service, Stack, read_services
from ports import free_port

TOKEN = "a-token-of-this-test"
VARIABLES = {"WEIGHTCAST_TOKEN": TOKEN, "WARM_STEPS": "2", "STEPS": "2"}
SUBSCRIBERS = ("subscriber-a", "subscriber-b")
ENGINES = ("engine-a", "engine-b")
DAEMONS = ("publisher", *SUBSCRIBERS, "gateway")


@pytest.fixture(scope="module")
def services() -> dict[str, Service]:
    return read_services(VARIABLES)


@pytest.fixture
def stack(services: dict[str, Service], tmp_path: Path) -> Iterator[Stack]:
    running = Stack(services, tmp_path, free_port)
    try:
        yield running
    finally:
        running.kill()


LONG = 240.0
"""seconds that a loaded machine may take"""


def status(stack: Stack, name: str) -> dict[str, object]:
    inside = "8340" if name == "publisher" else "8341"
    url = f"http://127.0.0.1:{stack.port(name, inside)}/v1/status"
    assert httpx.get(url, trust_env=False, timeout=60).status_code == 401
    answer = httpx.get(url, headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False, timeout=60)
    return dict(answer.raise_for_status().json())


def label(stack: Stack, engine: str) -> str:
    url = f"http://127.0.0.1:{stack.port(engine, '30000')}/model_info"
    return str(httpx.get(url, trust_env=False, timeout=60).json()["weight_version"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_trains_serves_on_both_hosts_and_stops_cleanly(stack: Stack) -> None:
    stack.up()
    stack.wait_done("trainer", LONG)
    published = int(VARIABLES["STEPS"])
    stack.wait(lambda: status(stack, "publisher")["version"] == published, "all versions published", LONG)
    stack.wait(
        lambda: all(status(stack, name)["served_version"] == published for name in SUBSCRIBERS),
        "the last version served on both hosts",
        LONG,
    )
    assert [label(stack, name) for name in ENGINES] == [str(published)] * 2
    assert {status(stack, name)["host"] for name in SUBSCRIBERS} != {None}
    assert not list(stack.volume("exports").iterdir())

    ended = stack.stop()
    assert {name: ended.pop(name) for name in DAEMONS} == dict.fromkeys(DAEMONS, 0), stack.logs()
    # uvicorn, which the example engine runs in, ends by the signal it was stopped with.
    assert {name: code for name, code in ended.items() if code != -signal.SIGTERM} == {}
    assert set(ended) == set(ENGINES)


def test_the_token_has_no_default() -> None:
    with pytest.raises(KeyError, match="WEIGHTCAST_TOKEN"):
        read_services({})


def test_ports_are_published_on_loopback_only(services: dict[str, Service]) -> None:
    published = [port for each in services.values() for port in each.facts.get("ports", [])]
    assert published
    assert all(str(port).startswith("127.0.0.1:") for port in published)
    assert len({str(port).rsplit(":", 1)[0] for port in published}) == len(published)


def test_daemons_that_others_reach_have_a_token(services: dict[str, Service]) -> None:
    for name in DAEMONS:
        assert services[name].environment["WEIGHTCAST_HOST"] == "0.0.0.0"
        assert services[name].environment["WEIGHTCAST_TOKEN"] == TOKEN


def test_every_path_of_a_command_lies_in_a_volume(services: dict[str, Service]) -> None:
    for service in services.values():
        text = " ".join(service.command)
        for path in re.findall(r"/srv/[^\s,]+", text):
            assert any(path == place or path.startswith(place + "/") for place in service.mounts), path


def test_engine_and_subscriber_of_a_host_share_its_local_checkpoint(services: dict[str, Service]) -> None:
    for subscriber, engine in zip(SUBSCRIBERS, ENGINES, strict=True):
        local = next(word for word in services[subscriber].command if word.startswith("--local="))
        model = next(word for word in services[engine].command if word.startswith("--model="))
        assert local.partition("=")[2] == model.partition("=")[2]
        place = "/srv/weightcast/local"
        assert services[subscriber].mounts[place] == services[engine].mounts[place]
        assert f"{services[engine].mounts[place]}:{place}:ro" in services[engine].facts["volumes"]
    assert services["subscriber-a"].mounts[place] != services["subscriber-b"].mounts[place]


def test_all_services_are_hardened(services: dict[str, Service]) -> None:
    for service in services.values():
        assert service.facts["read_only"] is True
        assert service.facts["cap_drop"] == ["ALL"]
        assert service.facts["security_opt"] == ["no-new-privileges:true"]


def test_daemons_have_time_to_end_their_step(services: dict[str, Service]) -> None:
    for name in DAEMONS:
        longest = 300 if name.startswith("subscriber") else 60
        assert int(str(services[name].facts["stop_grace_period"]).removesuffix("s")) > longest
        assert services[name].facts["hostname"]

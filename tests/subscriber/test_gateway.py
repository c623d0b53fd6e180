"""The gateway in front of hosts with gates: which host answers, what is tried again, what crosses sides."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import forked
import httpx
import pytest
from gate_kit import LONG, Engine, Gateway, Host, events, gates_of
from hosts import Run, Site
from in_process import Command
from ports import free_port
from waiting import wait_until

from weightcast.client import Client, RequestRefused
from weightcast.subscriber.gate.conditions import Conditions
from weightcast.subscriber.gate.traffic import NotAdmitted
from weightcast.subscriber.gateway.hosts import Host as Known
from weightcast.subscriber.gateway.hosts import Hosts


@pytest.fixture
def host(site: Site, run: Run) -> Host:
    host = Host(site, run, Engine(site))
    host.publish()
    return host


def test_answers_pass_through_unchanged_with_the_labels_of_the_gate(site: Site, host: Host) -> None:
    gateway = Gateway(site, *gates_of(host))
    gateway.wait_for(1)
    direct, through = host.complete(), gateway.complete()
    assert through.status_code == 200
    assert through.json() == direct.json()
    own = {"weightcast-host", "date"}
    assert {n: v for n, v in through.headers.items() if n not in own} == {
        n: v for n, v in direct.headers.items() if n not in own
    }
    with gateway.client.stream("POST", "/v1/completions", json={"prompt": "p", "stream": True}) as response:
        text, label = events(response.iter_lines())
    assert host.version_of(text) == [1] * 3
    assert label == {"version": 1, "last_version": 1}
    assert gateway.client.get("/nothing").status_code == 404
    assert gateway.client.post("/pause").status_code == 403


def test_a_refusal_is_the_one_of_a_gate(site: Site, host: Host) -> None:
    gateway = Gateway(site, *gates_of(host))
    gateway.wait_for(1)
    headers = {"Weightcast-Min-Version": "2"}
    direct, through = host.complete(headers=headers), gateway.complete(headers=headers)
    assert (through.status_code, through.headers["retry-after"]) == (409, direct.headers["retry-after"])
    assert through.json() | {"error": ""} == direct.json() | {"error": ""}
    assert gateway.complete(headers={"Weightcast-Min-Version": "new"}).status_code == 400
    assert gateway.client.post("/abort", content=b"[]").status_code == 400


def test_bodies_have_one_limit(site: Site, host: Host) -> None:
    gateway = Gateway(site, *gates_of(host))
    gateway.wait_for(1)
    assert gateway.complete(prompt="x" * (20 << 20)).status_code == 200
    refused = [each.complete(prompt="x" * (32 << 20)) for each in (host, gateway)]
    assert [answer.status_code for answer in refused] == [413, 413]
    assert refused[0].json() == refused[1].json()


def test_a_request_waits_for_its_version(site: Site, host: Host) -> None:
    gateway = Gateway(site, *gates_of(host))
    gateway.wait_for(1)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(gateway.complete, weightcast={"min_version": 2, "wait": LONG})
        wait_until(lambda: gateway.client.get("/v1/status").json()["waiting"])
        host.publish()
        assert host.version_of(answer.result().json()["choices"][0]["text"]) == [2] * 3


def test_hosts_are_found_in_their_reports_and_chosen_by_version(site: Site, run: Run) -> None:
    first = Host(site, run, Engine(site, "e0"), name="host0")
    first.publish()
    second = Host(site, run, Engine(site, "e1"), name="host1", options=("--target", "1"))
    gateway = Gateway(site, "--channel", run.channel)
    gateway.wait_for(1, 1)
    assert gateway.client.get("/readyz").status_code == gateway.client.get("/health").status_code == 200
    first.publish()
    gateway.wait_for(1, 2)
    names = {host["url"]: host["name"] for host in gateway.hosts().values()}
    for asked, host in ({"min_version": 2}, first), ({"exact_version": 1}, second), ({"max_lag": 0}, first):
        answer = gateway.complete(weightcast=asked)
        assert answer.headers["weightcast-host"] == names[host.gate]
    refused = gateway.complete(weightcast={"min_version": 3})
    assert (refused.status_code, refused.json()["error"]) == (
        409,
        "hosts serve up to 2, asked for at least 3",
    )
    first.process.terminate()
    first.process.wait()
    wait_until(lambda: gateway.hosts().keys() == {second.gate})


def test_hosts_that_a_publisher_knows_join_and_stop_under_requests(
    site: Site, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.close()
    port_file, watch = site.root / "publisher.port", site.root / "watch"
    watch.mkdir()
    monkeypatch.setenv("WEIGHTCAST_PUBLISHER_TOKEN", "publishers-token")
    publisher = forked.weightcast(
        *("publisher", "run", "--channel", run.channel, "--local", run.root / "publisher"),
        *("--base", run.base_dir, "--watch", watch, "--poll-seconds", "0.1", "--threads", "1"),
        *("--port", "0", "--port-file", port_file),
        env={**os.environ, "WEIGHTCAST_TOKEN": "publishers-token"},
    )
    site.stack.callback(publisher.wait)
    site.stack.callback(publisher.kill)
    wait_until(port_file.exists)
    url, token = (
        f"http://127.0.0.1:{port_file.read_text().strip()}",
        {"Authorization": "Bearer publishers-token"},
    )
    gateway = Gateway(site, "--publisher", url)

    def save() -> None:
        number = len(run.versions)
        run.versions.append(run.versions[-1].changed(number))
        run.versions[-1].write(site.root / "unfinished").rename(watch / f"step_{number}")

    def join(number: int, *options: str) -> Host:
        return Host(site, run, Engine(site, f"e{number}", "sglang"), name=f"host{number}", options=options)

    done = Event()

    def ask() -> list[httpx.Response]:
        body = {"text": "p", "weightcast": {"min_version": 1}}
        answers = [gateway.client.post("/generate", json=body)]
        while not done.is_set():
            answers.append(gateway.client.post("/generate", json=body))
        return answers

    save()
    first = join(0, "--target", "1")
    gateway.wait_for(1)
    with ThreadPoolExecutor(4) as pool:
        callers = [pool.submit(ask) for _ in range(4)]
        try:
            save()
            second = join(1)
            gateway.wait_for(1, 2)
            # of the host that is behind, as others serve its version or a later one
            oldest = gateway.client.get("/model_info")
            first.process.terminate()
            assert first.process.wait(LONG) == 0
            wait_until(lambda: gateway.hosts().keys() == {second.gate})
            newest = gateway.client.get("/model_info")
            # its last words, for the fleet page
            fleet = httpx.get(f"{url}/v1/fleet", headers=token, trust_env=False).json()
            [stopped] = [each for each in fleet["hosts"] if each["standing"] == "stopped"]
            # hosts that are known are kept
            publisher.kill()
            publisher.wait()
            third = join(2)
            third.wait_open(2)
        finally:
            done.set()
        answers = [answer for caller in callers for answer in caller.result()]
    assert [one.json()["weight_version"] for one in (oldest, newest)] == ["1", "2"]
    assert {answer.status_code for answer in answers} == {200}
    assert stopped["requests"]["answered"] > 0 < stopped["tokens"]["1"]
    served = {answer.headers["weightcast-host"]: answer.json()["weightcast"] for answer in answers}
    assert {label["version"] for label in served.values()} == {1, 2}
    for answer in answers:
        assert set(first.version_of(answer.json()["text"])) == {answer.json()["weightcast"]["version"]}
    assert gateway.hosts().keys() == {second.gate}


def test_a_session_keeps_its_host_while_that_is_ready(site: Site, run: Run) -> None:
    hosts = [Host(site, run, Engine(site, f"e{number}"), name=f"host{number}") for number in range(2)]
    hosts[0].publish()
    gateways = [Gateway(site, *gates_of(*hosts), name=f"gateway{number}") for number in range(2)]
    for gateway in gateways:
        gateway.wait_for(1, 1)
    used: dict[str, set[str]] = {}
    for session in "abcdefgh":
        answers = [gateway.complete(headers={"Weightcast-Session": session}) for gateway in gateways]
        used[session] = {answer.headers["weightcast-host"] for answer in answers}
        assert not [answer for answer in answers if "weightcast-session-moved" in answer.headers]
    assert all(len(hosts) == 1 for hosts in used.values())
    hosts[0].kill()
    gone = hosts[0].gate.removeprefix("http://")
    for session, [usual] in used.items():
        # in the body it may be any text
        answer = gateways[0].complete(weightcast={"session": session})
        assert answer.status_code == 200
        assert answer.headers["weightcast-host"] != gone
        assert answer.headers.get("weightcast-session-moved") == ("true" if usual == gone else None)


def test_a_request_is_refused_when_no_host_came_in_time(site: Site) -> None:
    gateway = Gateway(site, "--publisher", f"http://127.0.0.1:{free_port()}", options=("--hold", "0.5"))
    answer = gateway.complete()
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert gateway.client.get("/readyz").json()["reasons"] == ["no gate is known"]


def test_what_was_not_streamed_yet_is_sent_to_another_host(site: Site, run: Run) -> None:
    engines = [Engine(site, f"e{number}") for number in range(2)]
    hosts = [Host(site, run, engine, name=f"host{number}") for number, engine in enumerate(engines)]
    hosts[0].publish()
    gateway = Gateway(site, *gates_of(*hosts))
    gateway.wait_for(1, 1)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(gateway.complete, max_tokens=40, seconds=0.05) for _ in range(4)]
        wait_until(lambda: all(engine.get("/under_way") == 2 for engine in engines))
        hosts[0].kill()
        found = [answer.result() for answer in answers]
    assert [answer.status_code for answer in found] == [200] * 4
    assert {answer.headers["weightcast-host"] for answer in found} == {hosts[1].gate.removeprefix("http://")}
    gateway.wait_for(0, 1)
    hosts[0].start()
    gateway.wait_for(1, 1)


def test_a_body_that_breaks_the_engine_is_refused_at_once(site: Site, host: Host) -> None:
    gateway = Gateway(site, *gates_of(host))
    gateway.wait_for(1)
    json_type = {"content-type": "application/json"}
    broken = gateway.client.post("/v1/completions", content=b'{"crash": true, "prompt":', headers=json_type)
    assert broken.status_code == 400 and "the body is not JSON" in broken.json()["error"]
    given_up = gateway.complete(crash=True)
    assert given_up.status_code == 503
    assert "16 engines in a row" in given_up.json()["error"] and "e0" in given_up.json()["error"]
    assert "engine did not answer a request" in host.log()
    assert gateway.complete().status_code == 200


def test_why_a_gate_cannot_be_asked_is_logged_once(site: Site, host: Host) -> None:
    gateway = Gateway(site, "--gates", f"http://127.0.0.1:{free_port()}", *gates_of(host))
    gateway.wait_for(0, 1)
    wait_until(lambda: "gate not usable" in gateway.log())
    assert gateway.log().count("gate not usable") == 1


def test_what_was_streamed_is_cut_and_cannot_pass_for_a_whole_answer(site: Site, host: Host) -> None:
    gateway = Gateway(site, *gates_of(host))
    gateway.wait_for(1)
    body = {"prompt": "p", "stream": True, "max_tokens": 10**6, "seconds": 0.05}
    with (
        gateway.client.stream("POST", "/v1/completions", json=body) as response,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        for number, _ in enumerate(response.iter_lines()):
            if number == 1:
                host.kill()


def test_closing_and_aborting_end_requests_on_the_engine(site: Site, host: Host) -> None:
    engine, gateway = host.engines[0], Gateway(site, *gates_of(host))
    gateway.wait_for(1)
    body = {"prompt": "p", "stream": True, "max_tokens": 10**6, "seconds": 0.05}
    with gateway.client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    wait_until(lambda: engine.get("/under_way") == 0)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(gateway.complete, max_tokens=10**6, seconds=0.05)
        waiting = pool.submit(gateway.complete, weightcast={"min_version": 9, "wait": LONG, "session": "s"})
        wait_until(lambda: gateway.client.get("/v1/status").json()["waiting"])
        wait_until(lambda: engine.get("/under_way") == 1)
        assert gateway.client.post("/abort", json={"session": "s"}).json()["aborted"] == 0
        assert waiting.result().json()["ended_by"] == "abort"
        assert gateway.client.post("/abort").json() == {"aborted": 1, "unreached": []}
        # not sent to another host, or again to this one
        assert (running.result().status_code, running.result().json()["ended_by"]) == (503, "abort")


def test_no_more_requests_than_it_may_have(site: Site, host: Host) -> None:
    gateway = Gateway(site, *gates_of(host), options=("--requests", "1"))
    gateway.wait_for(1)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(gateway.complete, max_tokens=10**6, seconds=0.05)
        wait_until(lambda: host.engines[0].get("/under_way") == 1)
        refused = gateway.complete()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        gateway.client.post("/abort")
        running.result()


def test_a_slow_reader_holds_the_engine_back(site: Site, host: Host) -> None:
    gateway = Gateway(site, *gates_of(host))
    gateway.wait_for(1)
    engine = host.engines[0]
    # a pause of any length lets the engine answer others between two tokens
    body = b'{"prompt": "p", "stream": true, "max_tokens": 1000000, "seconds": 1e-6}'
    with socket.create_connection(("127.0.0.1", gateway.port)) as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        reader.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        seen = [-1]

        def is_still() -> bool:
            seen.append(engine.get("/streamed"))
            return seen[-1] == seen[-2] > 0

        wait_until(is_still, every=1.0)
        # what the sockets on the way hold, tens of megabytes of 250 bytes each, and no more
        assert seen[-1] < 5 * 10**5
        assert engine.get("/under_way") == 1
    wait_until(lambda: engine.get("/under_way") == 0)


def test_credentials_and_headers_of_a_hop_stay_on_their_side(
    site: Site, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTCAST_GATE_TOKEN", "gates-token")
    engine = Engine(site)
    host = Host(site, run, engine)
    host.client.headers["Authorization"] = "Bearer gates-token"
    host.publish()
    monkeypatch.setenv("WEIGHTCAST_TOKEN", "callers-token")
    gateway = Gateway(site, *gates_of(host))
    for path in ("/v1/status", "/readyz", "/v1/models", "/abort", "/health", "/metrics"):
        assert gateway.client.get(path).status_code == 401
    assert gateway.complete(headers={"Authorization": "Bearer gates-token"}).status_code == 401
    assert gateway.client.get("/healthz").status_code == 200
    gateway.client.headers["Authorization"] = "Bearer callers-token"
    gateway.wait_for(1)
    sent = {"Connection": "x-inner", "X-Inner": "1", "Proxy-Authorization": "Basic eDp5", "Te": "trailers"}
    answer = gateway.complete(headers={**sent, "X-Outer": "1", "Cookie": "a=b"})
    assert answer.status_code == 200
    [request] = engine.get("/requests")
    assert request["headers"]["x-outer"] == "1"
    assert not {"authorization", "x-inner", "proxy-authorization", "te"} & set(request["headers"])
    assert "gates-token" not in str(answer.headers) + answer.text
    assert "gates-token" not in str(gateway.hosts())


def test_a_gate_gets_its_own_token_alone_and_a_redirect_is_not_followed(site: Site) -> None:
    """A listener in place of a gate shows what a gateway sends."""
    seen: list[bytes] = []
    ready = b'{"version": 1, "target": 1, "requests": {}, "waiting": 0}'
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        received = connection.recv(1 << 16)
                        seen.append(received)
                        status = "200 OK" if b"/readyz" in received else "302 Found\r\nlocation: /elsewhere"
                        body = ready if b"/readyz" in received else b""
                        head = (
                            f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
                        )
                        connection.sendall(head.encode() + body)

        Thread(target=serve, daemon=True).start()
        environment = pytest.MonkeyPatch()
        environment.setenv("WEIGHTCAST_GATE_TOKEN", "gates-token")
        environment.setenv("WEIGHTCAST_TOKEN", "callers-token")
        gateway = Gateway(site, "--gates", f"http://127.0.0.1:{listener.getsockname()[1]}")
        environment.undo()
        gateway.client.headers["Authorization"] = "Bearer callers-token"
        gateway.wait_for(1)
        assert gateway.client.get("/v1/models", headers={"X-Api": "1"}).status_code == 302
        listener.close()
    assert b"authorization: bearer gates-token" in seen[0].lower()
    assert not [request for request in seen if b"callers-token" in request or b"elsewhere" in request]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_routes_that_speak_for_all_hosts(site: Site, run: Run, kind: str) -> None:
    """One serves version 1, one version 2, one is down."""
    engines = [Engine(site, f"e{number}", kind) for number in range(3)]
    old, new = (
        Host(site, run, engine, name=f"host{number}", options=options)
        for number, (engine, options) in enumerate(zip(engines, (("--target", "1"), ()), strict=False))
    )
    new.publish()
    down = Host(site, run, engines[2], name="host2")
    down.wait_open(1)
    gateway = Gateway(site, *gates_of(old, new, down))
    gateway.wait_for(1, 1, 1)
    new.publish()
    down.wait_open(2)
    down.kill()
    gateway.wait_for(0, 1, 2)
    assert gateway.client.get("/health").json() == {"ready_hosts": 2}
    assert gateway.client.get("/readyz").status_code == 200
    # of any host that answers
    assert [card["id"] for card in gateway.client.get("/v1/models").json()["data"]] == ["m"]

    def are_of_the_oldest() -> bool:
        """All of many. On a loaded machine a host may be out for a moment, and the next older one answers."""
        for path in 20 * (("/model_info", "/get_model_info") if kind == "sglang" else ("/weight_info",)):
            answer = gateway.client.get(path)
            assert answer.json()["weight_version"] == answer.headers["weightcast-version"]
            if answer.headers["weightcast-host"] != old.gate.removeprefix("http://"):
                return False
            assert answer.json()["weight_version"] == "1"
        return True

    wait_until(are_of_the_oldest)

    def lines() -> dict[str, tuple[int | None, bool]]:
        hosts = gateway.client.get("/v1/status").json()["hosts"]
        return {host["url"]: (host["version"], bool(host["reason"])) for host in hosts}

    wait_until(lambda: lines() == {old.gate: (1, False), new.gate: (2, False), down.gate: (None, True)})
    status = gateway.client.get("/v1/status").json()
    assert (status["ready"], status["served_version"], status["target_version"]) == (True, 2, 2)
    old.kill()
    gateway.wait_for(0, 0, 2)
    asked = gateway.client.get("/model_info" if kind == "sglang" else "/weight_info").json()
    assert asked["weight_version"] == "2"
    new.kill()
    wait_until(lambda: gateway.client.get("/health").status_code == 503)
    assert len(gateway.client.get("/readyz").json()["reasons"]) == 3


def test_one_source_of_gates_is_required(weightcast: Command) -> None:
    for source in ((), ("--gates", "http://127.0.0.1:1", "--publisher", "127.0.0.1:2"), ("--gates", "here")):
        assert weightcast("gateway", "run", *source).code == 2


class TestClient:
    """`weightcast.client` through a gateway."""

    @pytest.fixture
    def gateway(self, site: Site, run: Run) -> Iterator[Gateway]:
        self.host = Host(site, run, Engine(site), options=("--gate-updates", "partial"))
        self.host.publish()
        gateway = Gateway(site, *gates_of(self.host))
        gateway.wait_for(1)
        yield gateway

    def test_an_answer_that_an_update_ends_goes_on_on_the_new_weights(self, gateway: Gateway) -> None:
        async def generate() -> Any:
            async with Client(gateway.url) as client:
                body = {"prompt": "p ", "max_tokens": 60, "seconds": 0.05}
                answer = asyncio.create_task(client.generate(body, session="a"))
                engine = self.host.engines[0]
                await asyncio.to_thread(wait_until, lambda: engine.get("/streamed") > 2)
                await asyncio.to_thread(self.host.publish)
                return await answer

        answer = asyncio.run(generate())
        versions = self.host.version_of(answer.text)
        assert (len(versions), set(versions), answer.partial) == (60, {1, 2}, False)
        assert [(piece.version, piece.last_version) for piece in answer.pieces] == [(1, 1), (2, 2)]
        assert [piece.tokens for piece in answer.pieces] == [versions.count(1), versions.count(2)]
        asked = self.host.engines[0].get("/requests")[-1]
        assert asked["prompt"] == "p " + answer.pieces[0].text
        assert asked["max_tokens"] == versions.count(2)

    def test_what_cannot_be_answered_says_why(self, gateway: Gateway, tmp_path: Path) -> None:
        async def ask(url: str, body: dict[str, Any], **asked: Any) -> None:
            async with Client(url, seconds=0.0) as client:
                await client.generate(body, **asked)

        with pytest.raises(ValueError, match="one of input_ids, text, messages, prompt"):
            asyncio.run(ask(gateway.url, {"foo": 1}))
        with pytest.raises(RequestRefused, match="exact_version 3 is below min_version 5") as refused:
            asyncio.run(ask(gateway.url, {"prompt": "p"}, min_version=5, exact_version=3))
        assert refused.value.status == 400
        nobody = f"http://127.0.0.1:{free_port()}"
        with pytest.raises(httpx.ConnectError, match=nobody):
            asyncio.run(ask(nobody, {"prompt": "p"}))
        with pytest.raises(FileNotFoundError, match=r"ca\.pem"):
            Client("https://127.0.0.1:1", ca=str(tmp_path / "ca.pem"))

    def test_refusals_are_tried_again_until_the_version_is_there(self, gateway: Gateway) -> None:
        async def generate() -> Any:
            async with Client(gateway.url) as client:
                answer = asyncio.create_task(client.generate({"prompt": "p"}, min_version=2))
                await asyncio.to_thread(self.host.publish)
                return await answer

        assert self.host.version_of(asyncio.run(generate()).text) == [2] * 3

        async def refused() -> None:
            async with Client(gateway.url, seconds=0.0) as client:
                await client.generate({"prompt": "p"}, exact_version=1)

        with pytest.raises(RequestRefused) as error:
            asyncio.run(refused())
        assert (error.value.status, error.value.facts["served"]) == (409, 2)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_adapter_is_asked_for_by_its_versions(site: Site, run: Run, kind: str) -> None:
    """The main weights stay at version 0, and one host follows no adapter."""
    host = Host(site, run, Engine(site, "e0", kind), name="host0")
    other = Host(site, run, Engine(site, "e1", kind), name="host1", options=("--adapters", "none"))
    gateway = Gateway(site, *gates_of(host, other))
    gateway.wait_for(0, 0)
    bodies: list[dict[str, Any]] = [{"text": "p", "lora_path": "math"}]
    if kind == "vllm":
        bodies = [{"prompt": "p", "model": "math", "n": n} for n in (1, 2)]

    async def generate(version: int) -> set[str]:
        # the gateway alone finds and awaits the host
        async with Client(gateway.url, seconds=0.0) as client:
            asked = (client.generate(body, min_version=version, wait=LONG) for body in bodies * 4)
            answers = await asyncio.gather(*asked)
        assert {answer.version for answer in answers} == {0}
        return {piece.adapter for answer in answers for piece in answer.pieces}

    first = run.publish_adapter()
    wait_until(lambda: gateway.hosts()[host.gate]["adapters"] == {"math": [1]})
    assert asyncio.run(generate(1)) == {first}
    second = run.publish_adapter()
    assert asyncio.run(generate(2)) == {second}
    assert gateway.hosts()[other.gate]["adapters"] == {"math": []}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(asyncio.run, generate(3))
        wait_until(lambda: gateway.client.get("/v1/status").json()["waiting"])
        assert {run.publish_adapter()} == waiting.result()


class TestClientRoutes:
    """Each route of both engines."""

    @pytest.fixture(params=["vllm", "sglang"])
    def gateway(self, site: Site, run: Run, request: pytest.FixtureRequest) -> Gateway:
        engine = Engine(site, kind=request.param)
        self.host = Host(site, run, engine, options=("--gate-updates", "partial"))
        self.host.publish()
        gateway = Gateway(site, *gates_of(self.host))
        gateway.wait_for(1)
        return gateway

    def bodies(self, tokens: int) -> list[dict[str, Any]]:
        sampling = {"max_new_tokens": tokens}
        of_openai: list[dict[str, Any]] = [{"prompt": "p"}, {"messages": [{"role": "user", "content": "p"}]}]
        found = [body | {"max_tokens": tokens} for body in of_openai]
        if self.host.engines[0].kind == "sglang":
            found += [
                {"text": "p ", "sampling_params": sampling, "stream": stream} for stream in (False, True)
            ]
        return found

    def test_answers_have_their_text_tokens_and_versions(self, gateway: Gateway) -> None:
        async def generate() -> None:
            async with Client(gateway.url) as client:
                for body in self.bodies(4):
                    answer = await client.generate(body, min_version=1)
                    assert self.host.version_of(answer.text) == [1] * 4
                    assert (answer.version, answer.last_version, answer.partial) == (1, 1, False)
                    [piece] = answer.pieces
                    assert (piece.tokens, piece.ended_by) == (4, "")
                    assert piece.ids == (list(range(4)) if "text" in body else [])
                    if "text" not in body:
                        # several are not streamed
                        both = await client.generate(body | {"n": 2})
                        assert self.host.version_of(both.text) == [1] * 8
                    if "prompt" in body:
                        batch = await client.generate(body | {"prompt": ["p", "q"]})
                        assert isinstance(batch.pieces[0].raw, dict)

        asyncio.run(generate())

    def test_an_answer_that_an_update_ends_goes_on(self, gateway: Gateway) -> None:
        engine = self.host.engines[0]

        async def generate() -> None:
            async with Client(gateway.url) as client:
                # each until an update meets its answer: on a loaded machine one may come after it
                left = [*self.bodies(40)]
                while left:
                    [body, *rest] = left
                    version, before = self.host.status()["gate"]["version"], engine.get("/streamed")
                    asked = asyncio.create_task(client.generate(body | {"seconds": 0.05}))
                    await asyncio.to_thread(wait_until, lambda: engine.get("/streamed") > before + 2)  # noqa: B023
                    await asyncio.to_thread(self.host.publish)
                    answer = await asked
                    made_by = self.host.version_of(answer.text)
                    assert (len(made_by), answer.partial) == (40, False)
                    assert made_by == sorted(made_by) and set(made_by) <= {version, version + 1}
                    counts = [made_by.count(each) for each in sorted({*made_by})]
                    assert [piece.tokens for piece in answer.pieces] == counts
                    left = rest if len(counts) == 2 else left

        asyncio.run(generate())

    def test_cancelling_ends_the_request_and_a_deadline_the_retries(self, gateway: Gateway) -> None:
        def under_way() -> int:
            return sum(self.host.client.get("/readyz").json()["requests"].values())

        async def run() -> None:
            async with Client(gateway.url, seconds=0.3) as client:
                for body in self.bodies(10**6):
                    asked = asyncio.create_task(client.generate(body | {"seconds": 0.05}))
                    await asyncio.to_thread(wait_until, lambda: under_way() == 1)
                    asked.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await asked
                    await asyncio.to_thread(wait_until, lambda: under_way() == 0)
                with pytest.raises(RequestRefused) as error:
                    await client.generate(self.bodies(3)[0], min_version=9)
                assert error.value.facts["served"] == 1
                gateway.kill()
                with pytest.raises(httpx.TransportError):
                    await client.generate(self.bodies(3)[0])

        asyncio.run(run())


class TestChoice:
    """Rules without IO."""

    @pytest.fixture
    def hosts(self) -> Hosts:
        self.now = 100.0
        hosts = Hosts(lambda: self.now)
        for number in range(5):
            url = f"http://h{number}"
            hosts.by_url[url] = Known(f"h{number}", url)
            hosts.looked(
                hosts.by_url[url], {"version": 7, "target": 8, "requests": {"e": number}, "waiting": 0}
            )
        return hosts

    def test_the_host_with_the_fewest_requests(self, hosts: Hosts) -> None:
        first = hosts.choose(Conditions(), ())
        assert isinstance(first, Known)
        assert first.name == "h0"
        second = hosts.choose(Conditions(), {first})
        assert isinstance(second, Known)
        assert second.name == "h1"

    def test_sessions_are_spread_and_move_alone_with_their_host(self, hosts: Hosts) -> None:
        sessions = [Conditions(session=f"session {number}") for number in range(1000)]
        before = [hosts.choose(each, ()) for each in sessions]
        counts = [before.count(host) for host in hosts.by_url.values()]
        assert min(counts) > 130
        gone = hosts.by_url.pop("http://h2")
        after = [hosts.choose(each, ()) for each in sessions]
        assert all(a is b for a, b in zip(after, before, strict=True) if b is not gone)

    def test_conditions_of_a_request_for_an_adapter_are_about_its_versions(self, hosts: Hosts) -> None:
        first, second, third = list(hosts.by_url.values())[:3]
        for host, versions in (first, [1, 2]), (second, [2, 3]), (third, []):
            hosts.looked(host, {"version": 7, "adapters": {"math": {"loaded": versions, "target": 3}}})
        assert hosts.adapters == {"math"} and hosts.target_of(("math", None)) == 3
        asked = hosts.adapter_of(["policy", "math"])
        assert hosts.choose(Conditions(min_version=3), (), asked) is second
        assert hosts.choose(Conditions(max_lag=0), (), asked) is second
        assert hosts.choose(Conditions(exact_version=1), (), asked) is first
        assert hosts.choose(Conditions(), (), hosts.adapter_of(["math@3"])) is second
        assert hosts.choose(Conditions(min_version=7), ()) in (first, second, third, *hosts.by_url.values())
        refusal = hosts.choose(Conditions(min_version=4), (), asked)
        assert isinstance(refusal, NotAdmitted) and refusal.status == 409 and "math@3" in refusal.error
        assert hosts.newest(asked) is second
        before = hosts.changes
        for host in first, second:
            hosts.looked(host, {"version": 7, "adapters": {"math": {"loaded": [], "target": 3}}})
        assert hosts.changes == before + 2
        refusal = hosts.choose(Conditions(), (), asked)
        assert isinstance(refusal, NotAdmitted) and refusal.status == 503
        hosts.refused(first, 503, {"error": "of math this host serves none now", "served": 7, "target": 7})
        assert first.version == 7, "it serves the model itself"

    def test_a_host_that_fails_is_left_out_for_a_bounded_time(self, hosts: Hosts) -> None:
        host = hosts.by_url["http://h0"]
        for _ in range(100):
            hosts.failed(host, "gone")
            assert 0 < host.out_until - self.now <= 18
        assert hosts.choose(Conditions(), ()) is not host
        hosts.looked(host, {"version": 7, "target": 8})
        assert hosts.choose(Conditions(), ()) is host

    @pytest.mark.parametrize(
        ("status", "facts", "expected"),
        [
            (409, {"served": 8, "target": 8}, 409),
            (429, {}, 429),
            (503, {}, 503),
            (503, {"retryable": True}, None),
            (401, {}, 503),
        ],
    )
    def test_a_refusal_says_what_its_host_can_take(
        self, hosts: Hosts, status: int, facts: dict[str, object], expected: int | None
    ) -> None:
        for host in hosts.by_url.values():
            hosts.refused(host, status, facts)
        found = hosts.choose(Conditions(exact_version=7), ())
        assert (found.status if isinstance(found, NotAdmitted) else None) == expected

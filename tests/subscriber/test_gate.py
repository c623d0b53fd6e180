"""The gate of a subscriber: which version answers, what an update does with answers that are under way."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from gate_kit import LONG, Engine, Host, events
from hosts import Run, Site
from in_process import Command
from waiting import wait_until

from weightcast.subscriber.gate.conditions import Conditions
from weightcast.subscriber.gate.traffic import Call, Traffic


def test_an_answer_says_its_version(site: Site, run: Run) -> None:
    engine = Engine(site)
    host = Host(site, run, engine)
    version = host.publish()
    answer = host.complete()
    assert answer.status_code == 200
    assert answer.headers["weightcast-version"] == answer.headers["weightcast-last-version"] == str(version)
    assert answer.json()["weightcast"] == {"version": version, "last_version": version}
    assert host.version_of(answer.json()["choices"][0]["text"]) == [version] * 3
    with host.client.stream("POST", "/v1/completions", json={"prompt": "p", "stream": True}) as response:
        assert response.headers["weightcast-version"] == str(version)
        text, label = events(response.iter_lines())
    assert host.version_of(text) == [version] * 3
    assert label == {"version": version, "last_version": version}


def test_unmet_conditions_are_refused_with_what_is_there(site: Site, run: Run) -> None:
    host = Host(site, run, Engine(site))
    version = host.publish()
    for headers, body in (
        ({"Weightcast-Min-Version": str(version + 1)}, {}),
        ({"Weightcast-Exact-Version": "0"}, {}),
        ({}, {"weightcast": {"min_version": version + 1}}),
    ):
        answer = host.complete(headers=headers, **body)
        assert answer.status_code == 409
        assert answer.headers["retry-after"]
        assert (answer.json()["served"], answer.json()["target"]) == (version, version)
        assert answer.json()["asked"]
    for headers, body in (
        ({"Weightcast-Min-Version": "new"}, {}),
        ({"Weightcast-Least": "1"}, {}),
        ({"Weightcast-Min-Version": "1"}, {"weightcast": {"min_version": 2}}),
        ({}, {"weightcast": 5}),
    ):
        assert host.complete(headers=headers, **body).status_code == 400
    answer = host.complete(headers={"Weightcast-Adapter": "math"})
    assert answer.status_code == 400 and "'adapter' is not a condition" in answer.json()["error"]


def test_status_of_a_gate(site: Site, run: Run, weightcast: Command) -> None:
    engine = Engine(site)
    host = Host(site, run, engine)
    version = host.publish()
    said = weightcast("status", host.gate)
    assert said.code == 0 and said.out.startswith(f"gate is ready: serves version {version}\n")
    engine.kill()
    wait_until(lambda: host.client.get("/readyz").status_code == 503)
    said = weightcast("status", host.gate)
    assert said.code == 0 and "gate is not ready: serves no version; no engine takes requests" in said.out


def test_requests_are_counted_by_outcome_and_their_tokens_by_version(site: Site, run: Run) -> None:
    host = Host(site, run, Engine(site, kind="sglang"))
    host.publish()
    assert host.generate(4).status_code == 200
    with host.client.stream("POST", "/generate", json={"text": "p", "stream": True}) as response:
        assert events(response.iter_lines())[0]
    assert host.generate(headers={"Weightcast-Min-Version": "2"}).status_code == 409
    host.publish()
    assert host.generate(5).status_code == 200

    def counts() -> tuple[dict[str, int], dict[str, int]]:
        gate = host.status()["gate"]
        return {name: count for name, count in gate["outcomes"].items() if count}, gate["tokens"]

    # counted after the last byte was sent
    wait_until(lambda: counts() == ({"answered": 3, "unmet": 1}, {"1": 7, "2": 5}))


def test_conditions_that_are_met_do_not_reach_the_engine(site: Site, run: Run) -> None:
    engine = Engine(site)
    host = Host(site, run, engine)
    version = host.publish()
    for headers, body in (
        ({"Weightcast-Min-Version": str(version), "Weightcast-Session": "a"}, {}),
        ({"Weightcast-Max-Lag": "0"}, {"weightcast": {"exact_version": version}}),
    ):
        assert host.complete(headers=headers, **body).status_code == 200
    for request in engine.get("/requests"):
        assert "weightcast" not in request
        assert not [name for name in request["headers"] if name.startswith("weightcast")]


def test_a_request_waits_for_the_version_that_it_asks_for(site: Site, run: Run) -> None:
    host = Host(site, run, Engine(site))
    version = host.publish()
    with ThreadPoolExecutor(1) as pool:
        headers = {"Weightcast-Min-Version": str(version + 1), "Weightcast-Wait": str(LONG)}
        answer = pool.submit(host.complete, headers=headers)
        wait_until(lambda: host.status()["gate"]["waiting"])
        host.publish()
        assert host.version_of(answer.result().json()["choices"][0]["text"]) == [version + 1] * 3


@pytest.mark.parametrize(
    ("updates", "exact", "versions", "partial"),
    [
        ("pass", False, {1, 2}, False),
        ("pass", True, {1}, False),
        ("drain", False, {1}, False),
        ("partial", False, {1}, True),
    ],
)
def test_an_update_while_an_answer_streams(
    site: Site, run: Run, updates: str, exact: bool, versions: set[int], partial: bool
) -> None:
    engine = Engine(site)
    host = Host(site, run, engine, options=("--gate-updates", updates))
    assert host.publish() == 1
    headers = {"Weightcast-Exact-Version": "1"} if exact else {}
    # without an end where the update lets it go on: it is closed once it has seen the new version
    count = 10**6 if versions == {1, 2} else 1000 if partial else 40
    body = {"prompt": "p", "stream": True, "max_tokens": count, "seconds": 0.05}
    with host.client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        text, label, published = "", {}, False
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
            elif line.startswith(": weightcast "):
                label = json.loads(line.removeprefix(": weightcast "))
            if text and not published:
                published = bool(run.publish())
            if count == 10**6 and published and host.version_of(text)[-1] == 2:
                break
    assert set(host.version_of(text)) == versions
    if count < 10**6:
        assert (label["version"], label["last_version"]) == (1, 1)
        assert label.get("partial", False) is partial
        assert not partial or label["tokens"] == len(text.split())
    wait_until(lambda: host.status()["gate"]["version"] == 2)
    assert engine.get("/under_way") == 0


def test_the_answer_that_an_update_passed_through_says_so(site: Site, run: Run) -> None:
    host = Host(site, run, Engine(site))
    host.publish()
    engine = host.engines[0]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(host.complete, max_tokens=100, seconds=0.05)
        wait_until(lambda: engine.get("/streamed") > 1)
        host.publish()
        found = answer.result().json()
    assert set(host.version_of(found["choices"][0]["text"])) == {1, 2}
    assert found["weightcast"] == {"version": 1, "last_version": 2}


def test_what_is_surplus_ends_on_the_engine(site: Site, run: Run) -> None:
    engine = Engine(site)
    host = Host(site, run, engine)
    host.publish()
    body = {"prompt": "p", "stream": True, "max_tokens": 10**6, "seconds": 0.05}
    with ThreadPoolExecutor(2) as pool:

        def stream(session: str) -> dict[str, Any]:
            headers = {"Weightcast-Session": session}
            with host.client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                return events(response.iter_lines())[1]

        answers = [pool.submit(stream, session) for session in ("a", "b")]
        wait_until(lambda: engine.get("/under_way") == 2)
        assert host.client.post("/abort", json={"session": "a"}).json() == {"aborted": 1}
        assert answers[0].result()["ended_by"] == "abort"
        wait_until(lambda: engine.get("/under_way") == 1)
        assert host.client.post("/abort").json() == {"aborted": 1}
        assert answers[1].result()["partial"] is True
    with host.client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    wait_until(lambda: engine.get("/under_way") == 0)
    assert host.status()["gate"]["requests"] == {"e0": 0}


def test_no_cached_prefix_of_another_version_is_used(site: Site, run: Run) -> None:
    host = Host(site, run, Engine(site))
    for _ in range(3):
        version = host.publish()
        for salt in ({}, {"cache_salt": "mine"}):
            assert host.version_of(host.complete(**salt).json()["cached_by"]) == [version]


def test_credentials_stay_on_their_side(site: Site, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTCAST_GATE_TOKEN", "callers-token")
    engine = Engine(site)
    host = Host(site, run, engine)
    assert host.complete().status_code == 401
    assert host.client.get("/readyz").status_code == 401
    assert host.client.get("/healthz").status_code == 200
    host.client.headers["Authorization"] = "Bearer callers-token"
    host.publish()
    assert host.complete(headers={"Connection": "x-inner", "X-Inner": "1"}).status_code == 200
    [request] = engine.get("/requests")
    assert not {"authorization", "x-inner"} & set(request["headers"])
    for path in ("/pause?mode=abort", "/collective_rpc", "/update_weight_version", "/%72esume"):
        assert host.client.post(path, json={}).status_code == 403
    assert engine.get("/is_paused") == {"is_paused": False}
    # where there is no other token, it opens everything
    assert host.client.post("/abort").json() == {"aborted": 0}


def test_web_pages_are_kept_out(site: Site, run: Run) -> None:
    host = Host(site, run, Engine(site))
    host.publish()
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
        assert host.complete(headers=headers).status_code == 403
        assert host.client.post("/abort", headers=headers).status_code == 403
    assert host.complete(headers={"Origin": str(host.client.base_url)}).status_code == 200


def test_another_process_behind_the_address_answers_once_it_is_loaded(site: Site, run: Run) -> None:
    engine = Engine(site)
    # only the broken connection tells it
    host = Host(site, run, engine, options=("--engine-check-seconds", "600"))
    version = host.publish()
    for _ in range(3):
        assert host.version_of(host.complete().json()["choices"][0]["text"]) == [version] * 3
        engine.restart()
        # it holds what it was started with until the subscriber has loaded it
        assert host.version_of(host.complete().json()["choices"][0]["text"]) == [version] * 3


def test_no_more_requests_than_it_may_hold(site: Site, run: Run) -> None:
    engine = Engine(site)
    host = Host(site, run, engine, options=("--gate-requests", "1"))
    host.publish()
    with ThreadPoolExecutor(2) as pool:
        session = {"Weightcast-Session": "a"}
        running = pool.submit(host.complete, headers=session, max_tokens=10**6, seconds=0.05)
        wait_until(lambda: host.status()["gate"]["requests"] == {"e0": 1})
        waiting = pool.submit(host.complete)
        wait_until(lambda: host.status()["gate"]["waiting"] == 1)
        refused = host.complete()
        assert refused.status_code == 429
        assert refused.headers["retry-after"]
        host.client.post("/abort", json={"session": "a"})
        assert running.result().status_code == 503
        assert waiting.result().status_code == 200


def test_sessions_are_spread_evenly_over_the_engines_of_a_host() -> None:
    traffic = Traffic("abc", policy="pass", drain_seconds=1, hold_seconds=1, most=1000)
    traffic.name_adapters({})
    for name in "abc":
        traffic.doubt(name, 0.0)
        traffic.open(name, 1, "process", 1.0)

    async def admit_all() -> list[tuple[str, str]]:
        calls = [Call(Conditions(session=f"session {number % 300}")) for number in range(600)]
        for call in calls:
            await traffic.admit(call)
        return [(call.conditions.session, call.engine) for call in calls]

    used = asyncio.run(admit_all())
    assert len(set(used)) == 300
    assert min(len(door.calls) for door in traffic.doors.values()) > 140


def test_a_webhook_has_no_gate(site: Site, run: Run, weightcast: Command) -> None:
    done = weightcast(
        *("subscriber", "run", "--channel", run.channel, "--base", run.base_dir, "--gate", "0"),
        *("--local", site.root / "host", "--engine", "webhook=http://127.0.0.1:9"),
    )
    assert done.code == 3
    assert "a webhook answers no requests" in done.err

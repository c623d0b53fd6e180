"""Who may do what at gate and gateway, and that no secret crosses to another side."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from gate_kit import Engine, Gateway, Host, gates_of
from hosts import Run, Site
from in_process import Command
from waiting import wait_until

TOKEN, CALLERS, ENGINES, EDGE, EDGE_CALLERS = (
    f"token-of-{who}" for who in ("hosts", "callers", "engines", "edge", "edges-callers")
)
ROUTES = (
    "/v1/completions", "/generate", "/v1/models", "/server_info", "/get_server_info", "/model_info",
    "/get_model_info", "/metrics", "/version", "/readyz", "/health", "/healthz", "/wake", "/nothing",
    "/pause", "/v1/status",
)  # fmt: skip
ENDLESS = {"max_tokens": 10**6, "sampling_params": {"max_new_tokens": 10**6}, "seconds": 0.05}


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture(params=["vllm", "sglang"])
def host(site: Site, run: Run, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Host:
    monkeypatch.setenv("WEIGHTCAST_TEST_ENGINE_KEY", ENGINES)
    monkeypatch.setenv("WEIGHTCAST_TOKEN", TOKEN)
    monkeypatch.setenv("WEIGHTCAST_GATE_TOKEN", CALLERS)
    key = ",api_key_env=WEIGHTCAST_TEST_ENGINE_KEY"
    host = Host(site, run, Engine(site, kind=request.param), of_engines=key)
    host.publish()
    monkeypatch.delenv("WEIGHTCAST_GATE_TOKEN")
    return host


@pytest.fixture
def gateway(site: Site, host: Host, monkeypatch: pytest.MonkeyPatch) -> Gateway:
    """Its token of the gates is the one that opens everything there."""
    monkeypatch.setenv("WEIGHTCAST_GATE_TOKEN", TOKEN)
    monkeypatch.setenv("WEIGHTCAST_TOKEN", EDGE)
    monkeypatch.setenv("WEIGHTCAST_CALLER_TOKEN", EDGE_CALLERS)
    gateway = Gateway(site, *gates_of(host))
    gateway.client.headers.update(bearer(EDGE))
    gateway.wait_for(1)
    monkeypatch.setenv("WEIGHTCAST_TOKEN", TOKEN)
    return gateway


def ask_all(client: httpx.Client, token: str) -> str:
    """All that comes back."""
    inner = {
        "Connection": "x-inner",
        "X-Inner": "1",
        "Proxy-Authorization": f"Basic {token}",
        "Te": "trailers",
    }
    said = ""
    for path in ROUTES:
        for method in ("GET", "POST"):
            for stream in (False, True):
                body = {"prompt": "p", "text": "p", "stream": stream}
                answer = client.request(method, path, json=body, headers={**bearer(token), **inner})
                assert "x-hop" not in answer.headers
                said += f"{answer.headers}{answer.text}"
    return said


def test_no_credential_or_header_of_a_hop_crosses(host: Host, gateway: Gateway) -> None:
    for client, token in (host.client, CALLERS), (gateway.client, EDGE_CALLERS):
        said = ask_all(client, token)
        assert "choices" in said or "output_ids" in said
        assert not [secret for secret in (TOKEN, CALLERS, ENGINES, EDGE) if secret in said]
    seen: list[dict[str, str]] = httpx.get(f"{host.engines[0].url}/headers", trust_env=False).json()
    assert len(seen) > 2 * len(ROUTES)
    for headers in seen:
        assert headers.get("authorization") in (None, f"Bearer {ENGINES}")
        assert not {"x-inner", "proxy-authorization", "te"} & set(headers)
        assert not [secret for secret in (TOKEN, CALLERS, EDGE, EDGE_CALLERS) if secret in str(headers)]


def test_callers_end_their_own_requests_alone(host: Host, gateway: Gateway) -> None:
    path, edges = "/generate" if host.engines[0].kind == "sglang" else "/v1/completions", bearer(EDGE_CALLERS)
    sides: list[tuple[httpx.Client, str, str]] = [
        (host.client, CALLERS, TOKEN),
        (gateway.client, EDGE_CALLERS, EDGE),
    ]

    def under_way() -> int:
        return sum(host.client.get("/readyz", headers=bearer(TOKEN)).json()["requests"].values())

    for client, caller, full in sides:
        with ThreadPoolExecutor(3) as pool:

            def begin(client: httpx.Client = client, caller: str = caller, **more: object) -> Any:
                body = {"prompt": "p", "text": "p", **ENDLESS, **more}
                return pool.submit(client.post, path, json=body, headers=bearer(caller))

            mine = begin(weightcast={"session": "mine"}, rid="mine")
            other, named = begin(rid="other"), begin(rid="named")
            wait_until(lambda: under_way() == 3)

            def abort(
                token: str, path: str = "/abort", client: httpx.Client = client, **which: object
            ) -> Any:
                answer = client.post(path, json=which, headers=bearer(token))
                return answer.json().get("aborted", answer.status_code)

            for refused in ({}, {"version": 1}, {"session": ""}, {"session": None, "version": 1}):
                assert abort(caller, **refused) == 403
            for refused in ({"abort_all": True}, {"rid": ""}, {}):
                assert abort(caller, "/abort_request", **refused) == 403
            assert client.get("/abort", headers=bearer(full)).status_code in (404, 405)
            assert client.post("/abort", content=b"x" * (33 << 20), headers=bearer(full)).status_code == 413
            assert under_way() == 3
            assert abort(caller, session="mine") == 1
            assert abort(caller, "/abort_request", rid="named") == 1
            assert {mine.result().status_code, named.result().status_code} <= {200, 503}
            assert under_way() == 1
            assert abort(full) == 1
            other.result()
    assert gateway.client.get("/v1/status", headers=edges).status_code == 401


def test_callers_have_a_token_of_their_own_next_to_another_one_alone(
    weightcast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTCAST_CALLER_TOKEN", EDGE_CALLERS)
    done = weightcast("gateway", "run", "--gates", "http://127.0.0.1:1")
    assert done.code == 2
    assert "WEIGHTCAST_TOKEN" in done.err


def test_an_abort_needs_no_rid_of_one_length(host: Host) -> None:
    """SGLang ends every request whose name begins with the given one."""
    if host.engines[0].kind != "sglang":
        pytest.skip("of SGLang")
    host.client.headers.update(bearer(CALLERS))
    with ThreadPoolExecutor(2) as pool:
        others = pool.submit(host.client.post, "/generate", json={"text": "p", "rid": "name-1", **ENDLESS})
        mine = pool.submit(host.client.post, "/generate", json={"text": "p", "rid": "name", **ENDLESS})
        wait_until(lambda: host.engines[0].get("/under_way") == 2)
        assert host.client.post("/abort_request", json={"rid": "name"}).json() == {"aborted": 1}
        assert mine.result().status_code == 503
        assert not others.done()
        assert host.client.post("/abort_request", json={"rid": "name-1"}).json() == {"aborted": 1}
        assert others.result().json()["weightcast"]["ended_by"] == "abort"


def test_a_report_attracts_no_requests_to_an_address_that_no_pattern_has(site: Site, run: Run) -> None:
    host = Host(site, run, Engine(site))
    host.publish()
    cases: list[tuple[str, Callable[[Gateway], bool]]] = [
        ("127.0.0.1:*", lambda gateway: host.gate in gateway.hosts()),
        ("gates.example:*", lambda gateway: not gateway.hosts()),
    ]
    for number, (pattern, expected) in enumerate(cases):
        options = ("--gate-pattern", pattern)
        gateway = Gateway(site, "--channel", run.channel, options=options, name=f"gateway{number}")
        wait_until(lambda: gateway.client.get("/v1/status").json()["loop"]["steps"] > 2)  # noqa: B023
        wait_until(lambda: expected(gateway))  # noqa: B023

"""Adapters behind the gate: which version of an adapter answers a request that names it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from gate_kit import Engine, Host
from hosts import Run, Site
from waiting import wait_until


def serving(host: Host, *versions: int) -> bool:
    """Whether every engine has these versions of the one adapter, newest first."""
    found = host.status()["adapters"]
    return bool(found) and found[0]["loaded"] == list(versions)


def publish(host: Host, *kept: int) -> str:
    """`kept`: what is loaded besides it then."""
    label = host.run.publish_adapter()
    wait_until(lambda: serving(host, int(label.partition("@")[2]), *kept))
    return label


def ask(host: Host, name: str, *, tokens: int = 3, seconds: float = 0.0, **headers: str) -> httpx.Response:
    """`headers`: conditions, `Min_Version` for `Weightcast-Min-Version`."""
    named = {f"Weightcast-{key.replace('_', '-')}": value for key, value in headers.items()}
    if host.engines[0].kind == "vllm":
        return host.complete(model=name, max_tokens=tokens, seconds=seconds, headers=named)
    return host.generate(tokens, lora_path=name, seconds=seconds, headers=named)


def said(host: Host, answer: httpx.Response) -> set[str]:
    """Weights that made its tokens: main's version, and the adapter's name."""
    assert answer.status_code == 200, answer.text
    known = {host.run.digest(number): str(number) for number in range(len(host.run.versions))}
    known |= {held: label for label, held in host.run.adapters.items()}
    body = answer.json()
    text = body["text"] if "text" in body else body["choices"][0]["text"]
    return {"+".join(known[part] for part in token.split("+")) for token in text.split()}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_plain_name_goes_to_the_newest_version_that_is_allowed(site: Site, run: Run, kind: str) -> None:
    """No name gets an older answer than its request allows, nor one from another version than it says."""
    host = Host(site, run, Engine(site, kind=kind))
    publish(host)
    publish(host, 1)
    answer = ask(host, "math")
    assert said(host, answer) == {"0+math@2"}
    assert answer.headers["weightcast-adapter"] == "math@2" and answer.headers["weightcast-version"] == "0"
    assert answer.json()["weightcast"] == {"version": 0, "last_version": 0, "adapter": "math@2"}
    for number in (1, 2):
        answer = ask(host, f"math@{number}")
        assert said(host, answer) == {f"0+math@{number}"}
        assert answer.headers["weightcast-adapter"] == f"math@{number}"
    assert said(host, ask(host, "math", Exact_Version="1")) == {"0+math@1"}
    assert said(host, ask(host, "math", Max_Lag="0")) == {"0+math@2"}
    answer = ask(host, "math", Min_Version="3")
    assert answer.status_code == 409 and "math@1, math@2" in answer.json()["error"]
    assert ask(host, "math@3").status_code == 409
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, host, "math", Min_Version="3", Wait="30")
        wait_until(lambda: host.status()["gate"]["waiting"] == 1)
        publish(host, 2)
        assert said(host, waiting.result()) == {"0+math@3"}
    assert ask(host, "math@1").status_code == 409


def test_the_model_itself_is_asked_as_before(site: Site, run: Run) -> None:
    host = Host(site, run, Engine(site))
    publish(host)
    answer = ask(host, "policy")
    assert said(host, answer) == {"0"} and "weightcast-adapter" not in answer.headers
    answer = host.complete()
    assert said(host, answer) == {"0"} and "adapter" not in answer.json()["weightcast"]
    assert ask(host, "other@1").status_code == 404


def test_a_version_is_kept_while_a_request_uses_it(site: Site, run: Run) -> None:
    engine = Engine(site)
    host = Host(site, run, engine, options=("--adapters-kept", "1"))
    publish(host)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(ask, host, "math", tokens=60, seconds=0.05)
        wait_until(lambda: engine.get("/under_way") == 1)
        publish(host)
        assert said(host, ask(host, "math")) == {"0+math@2"}
        assert {card["id"] for card in engine.get("/v1/models")["data"]} == {"m", "math@1", "math@2"}
        assert said(host, slow.result()) == {"0+math@1"}
    wait_until(lambda: {card["id"] for card in engine.get("/v1/models")["data"]} == {"m", "math@2"})


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_no_answer_is_of_an_adapter_over_other_main_weights(site: Site, run: Run, kind: str) -> None:
    host = Host(site, run, Engine(site, kind=kind), options=("--gate-drain", "20"))
    publish(host)
    with ThreadPoolExecutor(4) as pool:
        slow = pool.submit(ask, host, "math", tokens=30, seconds=0.05)
        wait_until(lambda: host.engines[0].get("/under_way") == 1)
        run.publish()
        assert said(host, slow.result()) == {"0+math@1"}
        host.wait_open(1)
        held = pool.submit(ask, host, "math")
        wait_until(lambda: host.status()["gate"]["waiting"] == 1)
        assert said(host, ask(host, "policy")) == {"1"}
        publish(host)
        answer = held.result()
        assert said(host, answer) == {"1+math@2"} and answer.headers["weightcast-version"] == "1"


def test_an_engine_that_restarted_gets_no_request_before_its_adapters(site: Site, run: Run) -> None:
    engine = Engine(site)
    host = Host(site, run, engine)
    publish(host)
    engine.restart()
    for _ in range(5):
        assert said(host, ask(host, "math")) == {"0+math@1"}

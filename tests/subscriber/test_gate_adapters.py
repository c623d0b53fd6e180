"""Adapters behind the gate: which version of an adapter answers a request that names it."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest
from gate_kit import Engine, Gateway, Host, gates_of
from hosts import Run, Site
from in_process import Command
from waiting import wait_until

SEEDS = [int(seed) for seed in os.environ.get("GATE_ADAPTER_SEEDS", "1 2").split()]
MOVES = 10


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
    assert answer.status_code == 409 and "math@1 and math@2" in answer.json()["error"]
    assert answer.json()["adapter"] == {"name": "math", "loaded": [1, 2], "target": 2}
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
    answer = ask(host, "m")
    assert said(host, answer) == {"0"} and "weightcast-adapter" not in answer.headers
    answer = host.complete()
    assert said(host, answer) == {"0"} and "adapter" not in answer.json()["weightcast"]
    assert said(host, ask(host, "adapter/math")) == said(host, ask(host, "adapter/math@1")) == {"0+math@1"}
    gateway = Gateway(site, *gates_of(host))
    gateway.wait_for(0)
    for port in host, gateway:
        for name in ("maths", "other@1", "adapter/maths", "m:math"):
            answer = port.complete(model=name)
            assert answer.status_code == 409 and f"{name} here (adapters: math)" in answer.json()["error"]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("followed", ["*", "none"])
def test_an_unknown_name_is_not_answered_by_the_model(site: Site, run: Run, kind: str, followed: str) -> None:
    """Once the run has an adapter, whether or not this host follows it."""
    host = Host(site, run, Engine(site, kind=kind), options=("--adapters", followed))
    host.wait_open(0)
    known = "m", *(("default",) if kind == "sglang" else ())
    assert all(said(host, host.complete(model=name)) == {"0"} for name in (*known, "anything"))
    run.publish_adapter()
    wait_until(lambda: ask(host, "maths").status_code == 409)
    assert host.complete(model="anything").status_code == 409
    if followed == "none":
        assert ask(host, "math").json()["error"] == "adapter math is not followed by this host (--adapters)"
    assert all(said(host, host.complete(model=name)) == {"0"} for name in known)
    assert said(host, host.complete()) == {"0"}


def test_a_wait_bounds_the_time_for_an_adapter(site: Site, run: Run) -> None:
    """Of an adapter that is not loaded; a request that does not say how long waits for the gate's hold."""
    host = Host(site, run, Engine(site))
    gateway = Gateway(site, *gates_of(host))
    publish(host)
    run.publish()
    host.wait_open(1)
    wait_until(lambda: gateway.hosts()[host.gate]["adapters"] == {"math": []})
    for port in host, gateway:
        for wait in "0", "0.5":
            answer = port.complete(model="math", headers={"Weightcast-Wait": wait})
            assert answer.status_code == 503 and "no version of math" in answer.json()["error"]
    with ThreadPoolExecutor(2) as pool:
        held = [pool.submit(port.complete, model="math") for port in (host, gateway)]
        wait_until(lambda: host.status()["gate"]["waiting"] == 1)
        publish(host)
        assert [said(host, each.result()) for each in held] == [{"1+math@2"}] * 2


def test_a_gateway_says_at_once_that_an_adapter_is_retired(site: Site, run: Run) -> None:
    hosts = [Host(site, run, Engine(site, f"e{n}"), name=f"host{n}") for n in range(2)]
    gateway = Gateway(site, *gates_of(*hosts))
    publish(hosts[0])
    run.publish_adapter("code")
    wait_until(lambda: all("code" in gateway.hosts()[host.gate]["adapters"] for host in hosts))
    run.retire("code")
    wait_until(lambda: all("code" not in (h["name"] for h in host.status()["adapters"]) for host in hosts))
    wait_until(lambda: gateway.complete(model="code", headers={"Weightcast-Wait": "0"}).status_code == 409)
    answer = gateway.complete(model="code")
    assert answer.status_code == 409 and "retired" in answer.json()["error"]


def test_adapters_come_back_after_their_files_were_deleted(site: Site, run: Run) -> None:
    host = Host(site, run, Engine(site))
    publish(host)
    publish(host, 1)
    shutil.rmtree(site.root / "host")
    wait_until((site.root / "host" / "adapters" / "math-v000002").exists)
    assert said(host, ask(host, "math")) == {"0+math@2"}


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
        assert said(host, ask(host, "m")) == {"1"}
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


def test_the_fleet_knows_what_is_loaded(site: Site, run: Run, weightcast: Command) -> None:
    host = Host(site, run, Engine(site))
    publish(host)
    waiting = (
        "wait",
        "--version",
        "1",
        "--component",
        "adapter/math",
        "--channel",
        run.channel,
        "--timeout",
        "60",
    )
    assert weightcast(*waiting).code == 0
    shown = weightcast("fleet", "--channel", run.channel, "--json").json["hosts"][0]["adapters"]
    assert [(one["name"], one["version"], one["state"]) for one in shown] == [("adapter/math", 1, "ready")]
    assert "math@1" in weightcast("fleet", "--channel", run.channel).out
    wait_until(lambda: 'weightcast_adapter_version{adapter="math"} 1.0' in host.metrics())
    assert ask(host, "math").status_code == 200
    run.publish()
    wait_until(
        lambda: "publish the adapter over version" in weightcast("fleet", "--channel", run.channel).out
    )
    done = weightcast("fleet", "--channel", run.channel)
    assert "adapter/math: version 1 belongs to main version 0" in done.out.splitlines()[0]
    shown = weightcast("fleet", "--channel", run.channel, "--json").json["hosts"][0]
    assert (shown["standing"], shown["adapters"][0]["state"]) == ("behind", "waiting")
    late = weightcast("wait", "--version", "1", "--channel", run.channel, "--timeout", "0")
    assert late.code == 4 and "adapter/math" in late.err and "publish the adapter over version" in late.err
    refused = weightcast("wait", "--version", "1", "--component", "math", "--channel", run.channel)
    assert refused.code == 3 and "did you mean adapter/math?" in refused.err
    publish(host)
    run.retire("math")
    wait_until(lambda: ask(host, "math").status_code == 409)
    assert ask(host, "math@1").json()["error"] == "adapter math is retired"
    wait_until(lambda: "adapter math is retired" in host.log())
    wait_until(lambda: "weightcast_adapter_version{" not in host.metrics())
    wait_until(lambda: not (site.root / "host" / "adapters" / "math-v000001").exists())


@pytest.mark.parametrize("seed", SEEDS)
def test_no_answer_breaks_its_label_through_moves_and_kills(site: Site, run: Run, seed: int) -> None:
    """Requests for a plain name, a version and the model, while main and adapter move, and the engine and the
    subscriber are killed. What an answer says made it is what made it, and they belong together."""
    chance = random.Random(seed)
    engine = Engine(site, kind=chance.choice(["vllm", "sglang"]))
    host = Host(site, run, engine, options=("--gate-hold", "1", "--adapters-kept", "2"))
    belongs = {publish(host): 0}
    answers, stop = list[tuple[str, httpx.Response]](), threading.Event()

    def traffic(number: int) -> None:
        names = random.Random(number)
        while not stop.is_set():
            latest = f"math@{max(1, len(belongs) - names.randrange(2))}"
            name = names.choice(["math", "math", latest, "m"])
            with contextlib.suppress(httpx.HTTPError):
                answers.append((name, ask(host, name, seconds=0.01)))

    def more(than: int) -> bool:
        return len(answers) > than

    def move(event: str) -> None:
        if event == "adapter":
            belongs[run.publish_adapter()] = len(run.versions) - 1
        elif event == "main":
            run.publish()
        elif event == "engine":
            engine.restart()
        else:
            host.restart()

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(traffic, number) for number in range(4)]
        try:
            for _ in range(MOVES):
                before = len(answers)
                move(chance.choices(["adapter", "main", "engine", "subscriber"], [4, 2, 1, 1])[0])
                wait_until(partial(more, before + 3))
            belongs[run.publish_adapter()] = len(run.versions) - 1
            wait_until(lambda: serving_newest(host, len(belongs)))
        finally:
            stop.set()
        for each in asking:
            each.result()
    good = [(name, answer) for name, answer in answers if answer.status_code == 200]
    for name, answer in good:
        main, label = answer.headers["weightcast-version"], answer.headers.get("weightcast-adapter", "")
        if label:
            assert name in ("math", label) and said(host, answer) == {f"{main}+{label}"}
            assert belongs[label] == int(main)
        else:
            assert name == "m"
    assert {answer.status_code for _, answer in answers} <= {200, 409, 503}
    assert any("weightcast-adapter" in answer.headers for _, answer in good)


def serving_newest(host: Host, version: int) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        found = host.status()["adapters"]
        return bool(found) and found[0]["loaded"][:1] == [version]
    return False

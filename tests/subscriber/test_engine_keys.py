"""Refusals of keys: what is said about them, and that nothing is changed by them."""

from __future__ import annotations

import json

import pytest
from doubles import Answer, Call, Double, VLLMDouble, WebhookDouble, guarded_as_sglang, serve
from forked import run_weightcast
from hosts import VLLM, SGLang, Site
from in_process import Command

KEYS = {"API": "k-api", "ADMIN": "k-admin"}
BOTH = ",api_key_env=API,admin_api_key_env=ADMIN"
SWAPPED = ",api_key_env=ADMIN,admin_api_key_env=API"


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API", KEYS["API"])
    monkeypatch.setenv("ADMIN", KEYS["ADMIN"])


@pytest.mark.parametrize(
    ("api", "admin", "options"),
    [
        ("k-api", "k-admin", BOTH),
        ("k-api", None, ",api_key_env=API"),
        (None, "k-admin", ",admin_api_key_env=ADMIN"),
        (None, "k-admin", ",api_key_env=ADMIN"),
        (None, "k-admin", BOTH),
        (None, None, BOTH),
    ],
)
def test_sglang_gets_the_key_that_each_route_wants(
    site: Site, api: str | None, admin: str | None, options: str
) -> None:
    run, engine = site.run(), SGLang()
    engine.in_front = guarded_as_sglang(api, admin)
    host = site.host(run, site.option(engine) + options)
    run.publish()
    assert host.step().ready and engine.held == run.digest(1)


@pytest.mark.parametrize(
    ("api", "admin", "options", "names"),
    [
        ("k-api", "k-admin", SWAPPED, ["ADMIN (api_key_env=)", "swapped"]),
        ("k-api", "k-admin", ",api_key_env=API", ["/pause_generation", "admin_api_key_env="]),
        ("k-api", "k-admin", "", ["wants a key and got none", "api_key_env="]),
        (None, "k-admin", "", ["wants a key and got none", "admin_api_key_env="]),
        ("other", "k-admin", BOTH, ["API (api_key_env=)", "--api-key"]),
        ("k-api", "other", BOTH, ["ADMIN (admin_api_key_env=)", "--admin-api-key"]),
    ],
)
def test_a_wrong_key_of_sglang_is_named_and_nothing_is_in_doubt(
    site: Site, api: str | None, admin: str | None, options: str, names: list[str]
) -> None:
    run, engine = site.run(), SGLang()
    engine.in_front = guarded_as_sglang(api, admin)
    host = site.host(run, site.option(engine) + options)
    assert not host.step().ready
    [reason] = host.status.not_ready_reasons
    assert all(name in reason for name in names) and "401" in reason
    assert "upgrade" not in reason and "k-a" not in reason
    assert host.state.engines == {} and host.state.blocked == ()
    engine.in_front = lambda call: None
    assert host.retry().ready and engine.held == run.digest(0)


@pytest.mark.parametrize("option", [",admin_api_key_env=ADMIN", ",api_key_env=ADMIN"])
def test_with_the_admin_key_alone_versions_are_loaded_and_not_read_back(
    site: Site, option: str, weightcast: Command
) -> None:
    run, engine = site.run(), SGLang()
    engine.in_front = guarded_as_sglang("k-api", "k-admin")
    host = site.host(run, site.option(engine) + option + ",name=e")
    run.publish()
    assert host.step().ready and engine.held == run.digest(1)
    [shown] = host.status.engines
    assert shown.confirmed_by == "status-only" and shown.mark == "served"
    _, out, _ = weightcast("doctor", "--engine", site.option(engine) + option + ",name=e", "--json")
    assert any("/model_info answered 401" in finding["remedy"] for finding in json.loads(out)["findings"])


CONTROL = {"vllm": "/is_paused", "webhook": "/", "sglang": "/model_info"}


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Answer(401, {"error": "Unauthorized"}), "api_key_env="),
        (Answer(403, b"<html>"), "api_key_env="),
        (Answer(401, {}, {"WWW-Authenticate": "Bearer realm=x"}), "api_key_env="),
        (Answer(401, {}, {"WWW-Authenticate": "Basic realm=x"}), "a proxy wants Basic credentials"),
        (Answer(403, {}, {"WWW-Authenticate": "Negotiate"}), "a proxy wants Negotiate credentials"),
        (Answer(407, {}, {"Proxy-Authenticate": "Basic"}), "a proxy wants credentials of its own"),
    ],
)
@pytest.mark.parametrize("kind", sorted(CONTROL))
def test_every_refusal_is_about_the_key(
    site: Site, kind: str, answer: Answer, says: str, weightcast: Command
) -> None:
    """In front of all routes, as a proxy refuses; and for orders alone."""
    doubles: dict[str, Double] = {"vllm": VLLM(), "sglang": SGLang(), "webhook": WebhookDouble()}
    run, engine = site.run(), doubles[kind]
    option = f"{kind}={site.serve(engine)},name=e"
    host = site.host(run, option)
    for refused in ("any", "POST"):
        engine.in_front = lambda call, refused=refused: (  # type: ignore[misc]
            answer if refused in ("any", call.method) else None
        )
        assert not host.step().ready
        [reason] = host.status.not_ready_reasons
        assert says in reason and str(answer.status) in reason, refused
        assert "DEV_MODE" not in reason and "upgrade" not in reason
        assert host.state.blocked == () and not engine.paused
    engine.in_front = lambda call: answer
    if (kind, answer.status) != ("webhook", 403):  # it may take no GET
        code, out, _ = weightcast("doctor", "--engine", option, "--json")
        found = [f for f in json.loads(out)["findings"] if f["place"] == "e"]
        assert code == 5 and [f["level"] for f in found] == ["failure"]
        assert str(answer.status) in found[0]["says"] and "start the engine" not in found[0]["remedy"]


def test_a_key_that_only_the_reload_wants_blocks_no_version(site: Site) -> None:
    run, engine = site.run(), VLLM()
    host = site.host(run, site.option(engine))
    assert host.step().ready
    run.publish()
    engine.in_front = lambda call: Answer(401) if call.path == "/collective_rpc" else None
    assert not host.step().ready
    assert "wants a key" in host.status.not_ready_reasons[0]
    assert host.at(run, 1) and host.state.blocked == () and not engine.paused
    engine.in_front = lambda call: None
    assert host.retry().ready and engine.held == run.digest(1)


def test_metrics_behind_another_key_cost_the_process_alone(site: Site, weightcast: Command) -> None:
    run, engine = site.run(), VLLM()
    engine.in_front = lambda call: Answer(403) if call.path == "/metrics" else None
    option = site.option(engine) + ",name=e"
    assert site.host(run, option).step().ready
    found = json.loads(weightcast("doctor", "--engine", option, "--json")[1])["findings"]
    [restarts] = [f for f in found if (f["place"], f["check"]) == ("e", "restarts")]
    assert "/metrics answered 403" in restarts["remedy"]


@pytest.mark.parametrize(
    ("api", "admin", "code"), [("k-api", "k-admin", 0), ("k-api", "other", 5), ("other", "k-admin", 5)]
)
def test_doctor_tries_both_keys(weightcast: Command, api: str, admin: str, code: int) -> None:
    engine = SGLang()
    engine.in_front = guarded_as_sglang(api, admin)
    with serve(engine) as url:
        assert weightcast("doctor", "--engine", f"sglang={url}{BOTH}", "--json")[0] == code
    assert engine.paths() == [], "nothing was told"


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("sglan=http://h", "did you mean sglang?"),
        ("VLLM=http://h", "did you mean vllm?"),
        ("sglang=http://h,api_key=K", "did you mean api_key_env?"),
        ("vllm=http://h,admin_api_key_env=ADMIN", "admin_api_key_env= is for sglang"),
        ("sglang=https://h,verify=false,admin_api_key_env=ADMIN", "verify=false"),
        ("vllm=http://h,api_key_env=FROM_FILE", "the variable FROM_FILE holds line breaks"),
        ("sglang=http://h,admin_api_key_env=UNSET_KEY", "the variable UNSET_KEY is not set"),
    ],
)
def test_options_that_are_mistyped(
    weightcast: Command, option: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FROM_FILE", "k-api\n")
    code, _, err = weightcast("doctor", "--engine", option)
    assert code == 2 and says in err


def test_run_engine_says_why_an_engine_does_not_count_as_loaded(site: Site) -> None:
    run = site.run()
    engine, seen = VLLMDouble(), []

    def refuse(call: Call) -> Answer:
        seen.append(call)
        return Answer(401)

    engine.in_front = refuse
    host = site.host(run)
    host.step()
    host.sync.close()
    url = site.serve(engine)
    for asked in (("--engine", f"vllm={url}"), ("--ready-url", f"{url}/health")):
        ran = run_weightcast(
            "run-engine", "--local", host.local, *asked, "--load-deadline", "3", "--", "sleep", "4"
        )
        assert "wants a key and got none" in ran.stderr and seen

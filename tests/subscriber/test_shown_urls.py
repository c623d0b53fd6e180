"""A token in the query of a receiver's URL goes to the receiver, and is shown to nobody."""

from __future__ import annotations

import json
import logging

import pytest
from doubles import Answer, Drop, Hang, WebhookDouble
from hosts import Host, Mapping_, Site
from pydantic import TypeAdapter

from weightcast.shared.base.errors import WeightcastError
from weightcast.shared.cli import main
from weightcast.subscriber.engines.base import BadEngineOption, Timeouts, parse_engines
from weightcast.subscriber.engines.inspect import judge_engines
from weightcast.subscriber.status import HostStatus

SECRET = "s3cret"
SHORT = Timeouts(connect=5, probe=0.2, control=0.2, drain=0.2, reload=0.2)


def shown(host: Host) -> str:
    return TypeAdapter(HostStatus).dump_json(host.status).decode()


def option(site: Site, engine: WebhookDouble) -> str:
    return f"webhook={site.serve(engine)}/hook?token={SECRET}&x=1"


def test_every_call_has_the_query_and_the_status_has_not(site: Site) -> None:
    run = site.run()
    engine = Mapping_(site.root / "host")
    host = site.host(run, option(site, engine))
    run.publish()
    assert host.step().ready and host.at(run, 1)
    assert engine.calls and all(call.query == {"token": SECRET, "x": "1"} for call in engine.calls)
    assert SECRET not in shown(host) and host.status.engines[0].url.endswith("/hook?...")


@pytest.mark.parametrize("act", [Answer(500), Answer(200, {"label": "7"}), Drop(), Hang()])
def test_no_failure_tells_it(site: Site, act: Answer | Drop | Hang, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    run = site.run()
    engine = Mapping_(site.root / "host")
    site.stack.callback(engine.release)
    text = option(site, engine)
    host = site.host(run, text, timeouts=SHORT)
    host.step()
    engine.script("/hook", *[act] * 40)
    run.publish()
    for _ in range(3):
        try:
            host.retry()
        except WeightcastError as error:
            assert SECRET not in str(error)
        assert SECRET not in shown(host)
    assert not host.status.ready and "/hook" in shown(host)
    assert SECRET not in caplog.text
    assert all(SECRET not in str(finding) for finding in judge_engines([text], host.local, 0.2, None))


def test_an_engine_that_is_gone_is_named_without_it(site: Site) -> None:
    run = site.run()
    host = site.host(run, f"webhook=http://127.0.0.1:9/hook?token={SECRET}")
    host.step()
    assert "127.0.0.1:9/hook?... does not answer" in shown(host) and SECRET not in shown(host)


def test_two_of_one_address_are_named_without_it(site: Site) -> None:
    with pytest.raises(BadEngineOption) as refused:
        parse_engines([f"webhook=http://h/x?{SECRET}", f"webhook=http://h//x?{SECRET},name=b"], site.root)
    assert SECRET not in str(refused.value)
    with pytest.raises(BadEngineOption) as refused:
        parse_engines([f"webhook=http://h/x?token={SECRET},policy=none"], site.root)
    assert SECRET not in str(refused.value) and "policy" in str(refused.value)
    assert len(parse_engines(["webhook=http://h/x?1", "webhook=http://h/x?2,name=b"], site.root)) == 2


def test_the_settings_are_shown_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    hook = f"curl http://h/x?key=a,{SECRET},auth_token={SECRET} -d ?"
    options = ["--engine", f"webhook=http://h:1/hook?token={SECRET},copies=false", "--pre-read", hook]
    options += ["--channel", "/c", "--local", "/l", "--json"]
    assert main.run(["config", "show", "subscriber", *options]) == 0
    told = {one["name"]: one["value"] for one in json.loads(capsys.readouterr().out)["settings"]}
    assert told["engine"] == ["webhook=http://h:1/hook?...,copies=false"]
    assert told["pre_read"] == "curl http://h/x?... -d ?"

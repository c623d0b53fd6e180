"""Engines with a draft model that a reload leaves at its old weights."""

from __future__ import annotations

import json
from typing import Any

import pytest
from doubles import Answer, Call, Hang
from hosts import VLLM, Host, SGLang, Site
from in_process import Command
from plugin_double import PluginDouble

from weightcast.subscriber.engines.base import Timeouts

MTP = {"method": "mtp", "model": "/model", "num_speculative_tokens": 1}


class Drafting(SGLang):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = {"version": "0.5.23", "model_path": "/model", **settings}

    def behave(self, call: Call) -> Answer:
        return Answer(200, self.settings) if call.path == "/server_info" else super().behave(call)


def drafter(host: Host) -> str:
    [engine] = host.status.engines
    return engine.drafter


@pytest.mark.parametrize(
    "method",
    ["mtp", "deepseek_mtp", "eagle", "eagle3", "draft_model", "medusa", "dflash", "new-method", None],
)
def test_vllm_with_a_draft_model_is_refused_by_name(
    site: Site, method: str | None, weightcast: Command
) -> None:
    run, engine = site.run(), VLLM()
    engine.speculative = MTP | {"method": method}
    option = f"{site.option(engine)},name=e"
    host = site.host(run, option)
    assert not host.step().ready
    [reason] = host.status.not_ready_reasons
    assert f"draft model ({method or 'draft_model'})" in reason and "without --speculative-config" in reason
    assert [one.state for one in host.status.engines] == ["failed"] and engine.paths() == []
    code, out, _ = weightcast("doctor", "--engine", option, "--json")
    [found] = [f for f in json.loads(out)["findings"] if f["place"] == "e"]
    assert code == 5 and "draft model" in found["says"] and "--speculative-config" in found["remedy"]


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix"])
def test_drafts_without_a_model_are_none(site: Site, method: str) -> None:
    run, engine = site.run(), VLLM()
    engine.speculative = {"method": method, "model": "ngram"}
    host = site.host(run, engine)
    assert host.step().ready and engine.held == run.digest(0) and drafter(host) == "none"


@pytest.mark.parametrize("config", [{"device_config": "cuda"}, "something else", None])
def test_other_forms_of_the_answer(site: Site, config: object) -> None:
    run, engine = site.run(), VLLM()
    engine.script("/server_info", *[Answer(200, {"vllm_config": config})] * 4)
    host = site.host(run, engine)
    assert host.step().ready and drafter(host) == "unknown"


def test_a_draft_model_that_is_kept_is_said_to_be(site: Site, weightcast: Command) -> None:
    run, engine = site.run(), VLLM()
    engine.speculative = MTP
    option = f"{site.option(engine)},name=e,drafter=keep"
    host = site.host(run, option)
    assert host.step().ready and drafter(host) == "mtp"
    found = json.loads(weightcast("doctor", "--engine", option, "--json")[1])["findings"]
    [kept] = [f for f in found if (f["place"], f["check"]) == ("e", "drafter")]
    assert kept["level"] == "warning" and "mtp" in kept["says"]


def test_an_engine_that_comes_back_with_a_draft_model_is_refused(site: Site) -> None:
    run, engine = site.run(), VLLM()
    host = site.host(run, engine)
    assert host.step().ready
    engine.restart()
    engine.speculative = MTP
    run.publish()
    assert not host.step().ready and "(mtp)" in host.status.not_ready_reasons[0]
    engine.restart()
    engine.speculative = None
    assert host.retry().ready and engine.held == run.digest(1)


def test_what_cannot_be_known_is_said(site: Site, weightcast: Command) -> None:
    run, engine = site.run(), VLLM()
    engine.missing.add("/server_info")
    option = f"{site.option(engine)},name=e"
    host = site.host(run, option)
    assert host.step().ready and drafter(host) == "unknown"
    found = json.loads(weightcast("doctor", "--engine", option, "--json")[1])["findings"]
    [note] = [f for f in found if (f["place"], f["check"]) == ("e", "drafter")]
    assert note["level"] == "note" and "cannot tell whether a draft model is loaded" in note["says"]


@pytest.mark.parametrize("double", [VLLM, Drafting])
def test_an_engine_that_does_not_answer_about_it_is_not_loaded_yet(
    site: Site, double: type[VLLM] | type[Drafting]
) -> None:
    run, engine = site.run(), double()
    engine.script("/server_info", *[Hang()] * 3)
    host = site.host(run, site.option(engine), timeouts=Timeouts(probe=0.3, control=0.3))
    assert not host.step().ready and host.state.blocked == ()
    assert (
        "/server_info" in host.status.not_ready_reasons[0]
        and "did not answer" in host.status.not_ready_reasons[0]
    )
    assert engine.paths() == [], "requests do not wait for what it says about itself"
    engine.release()
    assert host.retry().ready and engine.held == run.digest(0)


def test_an_engine_that_no_reload_can_bring_to_a_version_is_not_paused(site: Site) -> None:
    """Its model has no head of its own."""
    run, engine = site.run(), VLLM()
    engine.device = "cpu"
    host = site.host(run, engine)
    for version in (0, 1):
        assert not host.step().ready and host.status.local_version == version and not host.state.blocked
        [reason] = host.status.not_ready_reasons
        assert "use via=live" in reason and "a restart does not help" in reason
        assert engine.paths() == []
        run.publish()
    assert [one.state for one in host.status.engines] == ["failed"]


def test_a_vllm_outside_dev_mode_is_named_alone(site: Site) -> None:
    """It was not paused, and is not resumed."""
    run, engine = site.run(), VLLM()
    engine.missing |= {"/pause", "/resume", "/collective_rpc", "/is_paused"}
    host = site.host(run, engine)
    assert not host.step().ready
    [reason] = host.status.not_ready_reasons
    assert "DEV_MODE" in reason and reason.count("answered 404") == 1 and "/resume" not in engine.paths()


def test_the_plugin_tells_its_draft_model(site: Site) -> None:
    run, engine = site.run(), PluginDouble(site.root / "host")
    engine.drafter = "eagle3"
    host = site.host(run, f"vllm={site.serve(engine)},via=live")
    assert not host.step().ready and "(eagle3)" in host.status.not_ready_reasons[0]
    engine.drafter = "ngram"
    assert host.step().ready and drafter(host) == "none"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"speculative_algorithm": None}, ""),
        ({"speculative_algorithm": "NGRAM"}, ""),
        ({"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "/model"}, ""),
        ({"speculative_algorithm": "NEXTN", "speculative_draft_model_path": None}, ""),
        ({"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "/model/"}, ""),
        ({"speculative_algorithm": "EAGLE", "version": "0.5.11"}, ""),
        ({"speculative_algorithm": "EAGLE", "version": "main"}, ""),
        ({"speculative_algorithm": "EAGLE", "version": "0.5.10.post1"}, "upgrade SGLang to 0.5.11"),
        ({"speculative_algorithm": "EAGLE", "version": "0.5.9"}, "SGLang 0.5.9 would leave"),
        (
            {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "/drafts/e3"},
            "of another checkpoint, /drafts/e3",
        ),
        ({"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "o/small"}, "o/small"),
    ],
)
def test_sglang_reloads_its_draft_model_where_the_release_does(
    site: Site, settings: dict[str, Any], says: str
) -> None:
    run, engine = site.run(), Drafting(**settings)
    host = site.host(run, engine)
    assert host.step().ready is (says == "")
    if says:
        assert says in host.status.not_ready_reasons[0] and engine.paths() == []
    else:
        assert engine.held == run.digest(0)
        kept = site.host(run, f"{site.option(engine)},drafter=keep", name="kept")
        assert kept.step().ready

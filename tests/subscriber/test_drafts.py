"""A draft model of its own on a host: it moves with the main weights, and nothing waits for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from crashes import killed, killed_at, started
from doubles import Answer
from hosts import CONFIG, VLLM, Host, Run, Site, Weights, on_disk
from in_process import Command
from plugin_double import PluginDouble

from weightcast.shared.base.errors import Refused
from weightcast.subscriber.engines.base import BadEngineOption, parse_engine
from weightcast.subscriber.status import AdapterStatus

MOST_KILLS = 80


def drafting(site: Site, run: Run, **options: object) -> tuple[PluginDouble, Host]:
    """An engine that was started on what a sync had made, as both directories are needed for that."""
    draft = site.root / "drafter"
    run.publish_draft()
    first = site.host(run, draft=draft, **options)
    assert first.step().ready
    first.sync.close()
    engine = PluginDouble(site.root / "host")
    engine.drafter, engine.draft, engine.patchable = "draft_model", draft, False
    engine.restart()
    host = site.host(run, f"vllm={site.serve(engine)},via=live", draft=draft, **options)
    assert host.step().ready
    engine.calls.clear()
    return engine, host


def of(host: Host) -> AdapterStatus:
    assert host.status.draft is not None
    return host.status.draft


def is_drafted(host: Host, run: Run, engine: PluginDouble, version: int) -> bool:
    wanted = run.drafts[version].digest()
    return (of(host).loaded, of(host).state, engine.drafts) == ((version,), "loaded", wanted)


def test_a_directory_is_made_from_which_an_engine_can_start(site: Site, run: Run) -> None:
    run.publish_draft()
    host = site.host(run, draft=site.root / "drafter")
    assert host.step().ready and of(host).loaded == (1,)
    assert on_disk(site.root / "drafter") == run.drafts[1].digest()
    assert (site.root / "drafter" / "config.json").read_bytes() == CONFIG


def test_it_moves_in_the_pause_of_the_main_weights_or_alone(site: Site, run: Run) -> None:
    engine, host = drafting(site, run)
    assert is_drafted(host, run, engine, 1)
    run.publish()
    run.publish_draft()
    assert host.step().ready and is_drafted(host, run, engine, 2) and engine.held == run.digest(1)
    assert engine.routes() == ["pause", "reload", "holds", "draft", "resume"]
    engine.calls.clear()
    run.publish_draft()
    assert host.step().ready and is_drafted(host, run, engine, 3)
    assert engine.routes() == ["draft"]
    engine.calls.clear()
    assert host.step().ready and engine.routes() == []


def test_main_weights_do_not_wait_for_it(site: Site, run: Run) -> None:
    engine, host = drafting(site, run)
    run.publish()
    assert host.step().ready and host.at(run, 1) and is_drafted(host, run, engine, 1)
    run.publish_draft()
    run.publish()
    # trained on the main weights before the newest: better than an older one
    assert host.step().ready and is_drafted(host, run, engine, 2) and of(host).main_version == 1


def test_it_waits_for_the_main_weights_that_it_was_trained_on(site: Site, run: Run) -> None:
    engine, host = drafting(site, run, target="0")
    run.publish_draft()
    run.publish()
    run.publish_draft()
    assert host.step().ready and engine.drafts == run.drafts[2].digest()
    assert (of(host).loaded, of(host).target, of(host).state) == ((2,), 3, "behind")
    later = site.host(run, *host.urls, draft=host.options.draft)
    host.sync.close()
    assert later.step().ready and is_drafted(later, run, engine, 3)


def test_an_engine_that_restarted_loads_it_again(site: Site, run: Run) -> None:
    engine, host = drafting(site, run)
    engine.restart()
    engine.drafts = "torn while it was read"
    assert host.step().ready and is_drafted(host, run, engine, 1)


def test_what_goes_wrong_with_it_keeps_nothing_back(site: Site, run: Run) -> None:
    engine, host = drafting(site, run)
    engine.script("/v1/weightcast/draft", Answer(500, {"error": "no memory"}))
    run.publish()
    run.publish_draft()
    assert host.step().ready and host.at(run, 1) and engine.held == run.digest(1)
    assert of(host).state == "failed" and "no memory" in of(host).error
    assert any("draft: " in reason for reason in host.status.degraded)
    assert host.retry().ready and is_drafted(host, run, engine, 2) and host.status.degraded == ()
    # the files that it is loaded from are proven first
    [weights] = (site.root / "drafter").glob("*.safetensors")
    with weights.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    host.clock.at += 10_000
    engine.restart()
    host.restart()
    host.step()
    host.retry()
    assert host.retry().ready and is_drafted(host, run, engine, 2)


def test_a_run_without_a_draft_model_is_named(site: Site, run: Run, weightcast: Command) -> None:
    host = site.host(run, draft=site.root / "drafter")
    assert not host.step().ready
    [reason] = host.status.not_ready_reasons
    assert "has no component draft" in reason
    like = Weights.make(100).write(site.root / "like")
    assert (
        weightcast("channel", "component", "add", "draft", "--like", like, "--channel", run.channel)[0] == 0
    )
    assert not host.retry().ready and of(host).error == "" and of(host).target == 0
    run.publish_draft()
    assert host.retry().ready and of(host).loaded == (1,)


def test_a_host_that_does_not_follow_it_ignores_it(site: Site, run: Run) -> None:
    run.publish_draft()
    host = site.host(run, VLLM())
    assert host.step().ready and host.status.adapters == () and host.status.draft is None


@pytest.mark.parametrize(
    "failpoint",
    [
        *("draft.patched", "draft.loaded", "draft.recorded", "patch.begun", "engine.paused"),
        *("engine.reloaded", "engine.resumed"),
    ],
)
@pytest.mark.parametrize("with_main", [True, False])
def test_killed_around_its_patch_and_load(site: Site, run: Run, failpoint: str, with_main: bool) -> None:
    engine, host = drafting(site, run)
    if with_main:
        run.publish()
    run.publish_draft()
    host.sync.close()
    died = killed_at(lambda: started(host), failpoint)
    assert died or (failpoint.startswith("engine.") and not with_main)
    host.start()
    assert host.step().ready and is_drafted(host, run, engine, 2) and not engine.paused
    assert host.at(run, int(with_main)) and engine.held == run.digest(int(with_main))


@pytest.mark.parametrize("event", ["os.rename", "socket.connect"])
def test_killed_at_every_step(site: Site, run: Run, event: str) -> None:
    engine, host = drafting(site, run)
    host.sync.close()
    for number in range(1, MOST_KILLS):
        main, draft = run.publish(), run.publish_draft()
        died = killed(lambda: started(host), event, number)
        host.start()
        assert host.step().ready and is_drafted(host, run, engine, draft) and not engine.paused
        assert host.at(run, main) and engine.held == run.digest(main)
        host.sync.close()
        if not died:
            return
    raise AssertionError("never ended")


@pytest.mark.parametrize("text", ["vllm=http://h", "sglang=http://h,via=live", "webhook=http://h/x"])
def test_engines_that_cannot_load_it_are_refused_at_the_start(text: str, tmp_path: Path) -> None:
    local, draft = tmp_path / "local", tmp_path / "draft"
    with pytest.raises(BadEngineOption, match="give vllm with via=live"):
        parse_engine(text, local, draft)
    assert parse_engine(f"{text},drafter=keep", local, draft).draft == ""
    with pytest.raises(BadEngineOption, match="draft= needs --draft"):
        parse_engine("vllm=http://h,via=live,draft=/d", local)
    assert parse_engine("vllm=http://h,via=live,draft=/d", local, draft).draft == "/d"


@pytest.mark.parametrize(("drafter", "directory"), [("draft_model", "elsewhere"), ("none", None)])
def test_an_engine_that_drafts_otherwise_is_refused(
    site: Site, run: Run, drafter: str, directory: str | None
) -> None:
    engine, host = drafting(site, run)
    engine.drafter, engine.draft = drafter, None if directory is None else site.root / directory
    run.publish()
    assert not host.step().ready
    [reason] = host.status.not_ready_reasons
    assert f"expected {site.root / 'drafter'}" in reason and "--speculative-config" in reason


def test_commands_bring_it_and_tell_of_it(site: Site, run: Run, weightcast: Command) -> None:
    run.publish_draft()
    local, draft = site.root / "local", site.root / "drafter"
    where = ("--channel", run.channel, "--local", local, "--base", run.base_dir, "--draft", draft)
    code, out, err = weightcast("sync", *where, "--json")
    assert code == 0 and json.loads(out)["draft"]["loaded"] == [1], err
    assert on_disk(draft) == run.drafts[1].digest()
    code, _, err = weightcast("sync", *where[:-1], run.channel / "inside")
    assert code != 0 and "--draft" in err
    engine = PluginDouble(local)
    engine.drafter, engine.draft = "draft_model", draft
    option = ("--engine", f"vllm={site.serve(engine)},via=live,name=e", "--json")
    assert "give drafter=keep" in weightcast("doctor", *option)[1]
    found = json.loads(weightcast("doctor", *option, "--draft", draft)[1])["findings"]
    assert [(f["level"], f["place"]) for f in found if f["check"] == "drafter"] == [("ok", "e")]


def test_it_is_not_brought_into_another_directory(site: Site, run: Run) -> None:
    run.publish_draft()
    with pytest.raises(Refused, match="--draft"):
        site.host(run, draft=site.root / "host")

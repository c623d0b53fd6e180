"""Several engines of a host over time: who is reloaded when, who holds up whom, what is told of them."""

from __future__ import annotations

import os
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from doubles import TRICKLES, Answer, Call, Drop, Hang, WebhookDouble
from hosts import QUICK, VLLM, Host, Mapping_, Run, SGLang, Site
from waiting import wait_until

from weightcast.shared.checkpoint.state.state import Mark
from weightcast.subscriber.daemon.settings import SubscriberSettings
from weightcast.subscriber.daemon.wiring import open_engines
from weightcast.subscriber.engines.base import BadEngineOption, EngineFacts
from weightcast.subscriber.status import EngineStatus

ROLLING = {"order": "rolling"}


class Floor:
    """Sees which of its engines are paused at the same time, and in which order they take versions."""

    def __init__(self) -> None:
        self.most_paused = 0
        self.order: list[str] = []
        self.engines: list[Watched] = []
        self._lock = threading.Lock()

    def engine(self, name: str) -> Watched:
        self.engines.append(Watched(self, name))
        return self.engines[-1]

    def note(self) -> None:
        with self._lock:
            self.most_paused = max(self.most_paused, sum(one.paused for one in self.engines))


class Watched(SGLang):
    def __init__(self, floor: Floor, name: str) -> None:
        super().__init__()
        self.floor, self.name = floor, name

    def behave(self, call: Call) -> Answer:
        answer = super().behave(call)
        self.floor.note()
        if call.method == "POST":
            self.floor.order.append(f"{self.name}{call.path}")
        return answer


def named(site: Site, engine: Watched) -> str:
    return f"{site.option(engine)},name={engine.name}"


def condition(host: Host) -> dict[str, str]:
    return {engine.name: engine.state for engine in host.status.engines}


def test_a_rolling_reload_pauses_one_engine_and_goes_on_when_it_is_confirmed(site: Site, run: Run) -> None:
    floor = Floor()
    host = site.host(run, *(named(site, floor.engine(name)) for name in "abc"), conduct=ROLLING)
    host.step()
    floor.order.clear()
    run.publish()
    assert host.step().ready and floor.most_paused == 1
    calls = ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
    assert floor.order == [name + call for name in "abc" for call in calls]
    assert {engine.held for engine in floor.engines} == {run.digest(1)}


def test_together_pauses_all(site: Site, run: Run) -> None:
    floor = Floor()
    meet = threading.Barrier(2)

    def pause(call: Call) -> Answer:
        meet.wait(10)
        return Answer(200, {"status": "ok"})

    engines = [floor.engine(name) for name in "ab"]
    host = site.host(run, *(named(site, engine) for engine in engines))
    for engine in engines:
        engine.script("/pause_generation", pause)
    assert host.step().ready


def test_a_roll_ends_at_an_engine_that_breaks_and_the_others_have_their_turn(site: Site, run: Run) -> None:
    floor = Floor()
    a, b, c = (floor.engine(name) for name in "abc")
    host = site.host(run, *(named(site, engine) for engine in (a, b, c)), conduct=ROLLING)
    host.step()
    a.script("/update_weights_from_disk", *[Drop()] * 100)
    floor.order.clear()
    run.publish()
    assert not host.step().ready
    assert (b.held, c.held) == (run.digest(1),) * 2 and a.paused
    assert condition(host) == {"a": "suspect", "b": "serving", "c": "serving"}
    assert host.state.position.version == 1 and host.state.blocked == ()

    floor.order.clear()
    run.publish()
    assert not host.step().ready
    assert (b.held, c.held) == (run.digest(2),) * 2
    first = [entry[0] for entry in floor.order]
    assert first.index("c") < first.index("a"), "an engine in doubt comes last"
    a._scripts.clear()
    assert host.retry().ready and a.held == run.digest(2) and not a.paused


def test_a_bad_version_breaks_two_engines_of_a_roll_at_most(site: Site, run: Run) -> None:
    floor = Floor()
    engines = [floor.engine(name) for name in "abcd"]
    host = site.host(run, *(named(site, engine) for engine in engines), conduct=ROLLING)
    host.step()

    def update(engine: Watched, call: Call) -> Answer:
        return engine.half_loaded(call) if call.body["weight_version"] == "1" else engine.behave(call)

    for engine in engines:
        engine.calls.clear()
        engine.script("/update_weights_from_disk", *[partial(update, engine)] * 20)
    run.publish()
    host.step()
    assert host.at(run, 0) and [one.version for one in host.status.blocked] == [1]
    loads = [
        [call.body["weight_version"] for call in engine.of("/update_weights_from_disk")] for engine in engines
    ]
    assert loads == [["1", "1", "0"], ["1", "1", "0"], ["0"], ["0"]]
    assert host.step().ready and {engine.held for engine in engines} == {run.digest(0)}
    assert not any(engine.paused or engine.resumed_broken for engine in engines)


def test_engines_that_map_the_same_files_cannot_roll(tmp_path: Path) -> None:
    texts = ("webhook=http://a,name=a", "webhook=http://b,name=b", "sglang=http://c")
    settings = SubscriberSettings(channel=tmp_path, local=tmp_path / "l", engine=texts, reload="rolling")
    with pytest.raises(BadEngineOption, match="a, b map the same files"):
        open_engines(settings)
    open_engines(settings.model_copy(update={"engine": texts[1:]})).close()


def test_patches_go_to_a_framework_or_to_engines_of_the_subscriber(tmp_path: Path) -> None:
    settings = SubscriberSettings(
        channel=tmp_path / "channel",
        local=tmp_path / "local",
        engine=("vllm=http://127.0.0.1:9,name=one,via=live",),
        transfer_patch=True,
    )
    with pytest.raises(BadEngineOption, match="one takes patches by via=live"):
        open_engines(settings)


def test_one_that_maps_the_files_is_patched_in_its_pause_before_the_roll(site: Site, run: Run) -> None:
    floor = Floor()
    mapping, copying = Mapping_(site.root / "host"), floor.engine("a")
    host = site.host(run, mapping, named(site, copying), conduct=ROLLING)
    host.step()
    mapping.seen.clear()
    run.publish()
    assert host.step().ready
    old, new = run.digest(0), run.digest(1)
    assert mapping.seen == [("pause", old), ("reload", new), ("resume", new)] and copying.held == new


def test_an_engine_that_hangs_keeps_no_other_from_serving(site: Site, run: Run) -> None:
    floor = Floor()
    slow, quick = floor.engine("slow"), floor.engine("quick")
    host = site.host(run, *(named(site, engine) for engine in (slow, quick)))
    host.step()
    slow.script("/update_weights_from_disk", Drop(), Hang())
    run.publish()

    def of(name: str) -> EngineStatus:
        return next(engine for engine in host.status.engines if engine.name == name)

    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(host.step)
        slow.wait_until_hanging()
        wait_until(lambda: of("quick").ready)
        assert quick.held == run.digest(1) and not quick.paused
        assert (of("slow").mark, of("slow").ready, host.status.ready) == ("suspect", False, False)
        slow.release()
        assert step.result().ready
    assert of("slow").ready and host.status.ready


def test_an_engine_has_a_deadline_of_its_own(site: Site, run: Run) -> None:
    floor = Floor()
    slow = floor.engine("slow")
    host = site.host(run, named(site, slow) + ",deadline=0.2")
    slow.script("/update_weights_from_disk", Hang(), Hang())
    outcome = host.step()
    assert not outcome.ready and "within 0.2 s" in outcome.not_ready_reasons[0]


def test_how_long_an_engine_may_be_silent_is_its_own_too(site: Site, run: Run) -> None:
    floor = Floor()
    patient, hasty = floor.engine("patient"), floor.engine("hasty")
    options = named(site, patient), named(site, hasty) + ",deadline=20"
    host = site.host(run, *options, timeouts=replace(QUICK, probe=0.5))
    # on a loaded machine any answer may take longer than that
    wait_until(lambda: host.retry().ready)
    for engine in (patient, hasty):
        engine.script("/metrics", *[Hang()] * 99)
    for _ in range(2):
        host.retry()
    assert condition(host) == {"patient": "silent", "hasty": "failed"}
    for engine in (patient, hasty):
        engine.release()


def test_an_engine_whose_answer_never_ends_holds_up_nobody(site: Site, run: Run) -> None:
    floor = Floor()
    endless, quick = floor.engine("endless"), floor.engine("quick")
    later = 0.0
    # the deadline is of the time that passes here
    pace = {"clock": lambda: later + time.monotonic()}
    host = site.host(run, named(site, endless) + ",deadline=2", named(site, quick), pace=pace)
    host.step()
    endless.script("/update_weights_from_disk", TRICKLES["interim"])
    run.publish()
    outcome = host.step()
    assert (quick.held, quick.paused, endless.paused) == (run.digest(1), False, True)
    assert condition(host) == {"endless": "suspect", "quick": "serving"} and not outcome.ready
    later = 60.0
    assert host.step().ready and endless.held == run.digest(1)


def fail(host: Host, engine: SGLang, rounds: int) -> None:
    engine.script("/update_weights_from_disk", *[Drop()] * 100)
    for _ in range(rounds):
        host.retry()


def test_rounds_in_vain_end_in_failed_until_the_engine_restarts(site: Site, run: Run) -> None:
    engine = SGLang()
    host = site.host(run, engine, pace={"rounds": 3})
    fail(host, engine, 2)
    assert host.status.engines[0].state == "suspect" and host.status.engines[0].failures == 2
    outcome = host.retry()
    [shown] = host.status.engines
    assert shown.state == "failed" and not shown.ready and "failed: " in outcome.not_ready_reasons[0]
    assert host.state.engines[shown.name].mark is Mark.SUSPECT

    # it is left alone, also when a version comes, but for a try now and then
    engine.calls.clear()
    run.publish()
    host.retry()
    assert host.at(run, 1) and engine.paths() == []
    host.clock.at += 600
    host.step()
    assert len(engine.of("/update_weights_from_disk")) == 2

    engine._scripts.clear()
    engine.restart()
    assert host.step().ready and engine.held == run.digest(1)
    assert host.status.engines[0].state == "serving" and host.status.engines[0].failures == 0


class Unseen(WebhookDouble):
    """A receiver that tells no process, and for a while does not say `ok`."""

    broken_receiver = True

    def behave(self, call: Call) -> Answer:
        if call.method == "GET":
            return Answer(405)
        return Answer(200, {"success": True}) if self.broken_receiver else super().behave(call)


def test_a_failed_engine_whose_restarts_are_not_seen_is_retried_within_30_s(site: Site, run: Run) -> None:
    receiver = Unseen()
    option = f"{site.option(receiver)},copies=true"
    host = site.host(run, option, pace={"rounds": 3, "jitter": lambda: 0.999})
    for _ in range(6):
        assert not host.retry().ready
    [engine] = host.status.engines
    assert engine.state == "failed"
    assert "retried every 15 to 30 s" in engine.reason
    receiver.broken_receiver = False
    receiver.calls.clear()
    host.clock.at += 15
    host.step()
    assert receiver.phases() == [], "not before its time"
    host.clock.at += 15
    assert host.step().ready and receiver.phases() == ["pause", "reload", "resume"]


def test_waking_retries_a_failed_engine_at_once(site: Site, run: Run) -> None:
    engine = SGLang()
    engine.script("/update_weights_from_disk", *[Answer(500)] * 2)
    host = site.host(run, engine, pace={"rounds": 1})
    assert not host.step().ready and host.status.engines[0].state == "failed"
    assert "retried every 5 to 10 min" in host.status.engines[0].reason
    assert not host.step().ready
    host.sync.engines.wake()
    assert host.step().ready and engine.held == run.digest(0)


def test_a_failed_engine_that_was_gone_for_a_moment_is_another_one(site: Site, run: Run) -> None:
    engine = SGLang()
    engine.missing.add("/metrics")
    host = site.host(run, engine, pace={"rounds": 1})
    fail(host, engine, 1)
    assert host.status.engines[0].state == "failed"
    [known] = host.sync.engines.engines
    known.see(EngineFacts(reachable=False, absent=True))
    assert not known.failed


def test_waits_between_rounds_have_jitter(site: Site, run: Run) -> None:
    engine = SGLang()
    host = site.host(run, engine, pace={"jitter": lambda: 0.0})
    engine.script("/update_weights_from_disk", *[Drop()] * 4)
    host.step()
    host.clock.at += 0.49
    host.step()
    assert len(engine.of("/update_weights_from_disk")) == 2
    host.clock.at += 0.02
    host.step()
    assert len(engine.of("/update_weights_from_disk")) == 4


def take(engine: SGLang) -> None:
    """As a second subscriber would, of another local checkpoint."""
    engine.source, engine.held = "/somewhere/else", "other weights"


def test_an_engine_that_two_want_is_not_fought_over(site: Site, run: Run) -> None:
    engine = SGLang()
    host = site.host(run, engine, pace={"jitter": lambda: 1.0})
    for _ in range(3):
        host.step()
        take(engine)
        assert host.step().ready and engine.held == run.digest(0), "at once, three times"
    take(engine)
    engine.calls.clear()
    outcome = host.step()
    [shown] = host.status.engines
    assert not outcome.ready and not shown.ready and engine.of("/pause_generation") == []
    assert "one engine has one subscriber" in outcome.not_ready_reasons[0] and "3 times" in shown.reason
    host.clock.at += 61
    assert host.step().ready and engine.held == run.digest(0)
    take(engine)
    host.clock.at += 61
    assert not host.step().ready, "it waits longer each time"

    # a version waits for nobody
    run.publish()
    assert host.step().ready and engine.held == run.digest(1)
    take(engine)
    assert host.step().ready, "once, at once, after a version"
    take(engine)
    assert not host.step().ready
    # nor does a process that nobody has loaded
    engine.restart()
    assert host.step().ready and engine.held == run.digest(1)


def test_an_engine_behind_two_addresses_is_asked_by_one(site: Site, run: Run) -> None:
    engine = SGLang()
    host = site.host(run, f"{site.option(engine)},name=a", f"{site.option(engine)},name=b")
    for version in (0, 1):
        outcome = host.step()
        assert not outcome.ready and "it is the engine a, given twice" in outcome.not_ready_reasons[0]
        assert condition(host) == {"a": "serving", "b": "silent"} and engine.held == run.digest(version)
        assert len(engine.of("/update_weights_from_disk")) == version + 1
        run.publish()


def test_an_engine_that_was_left_alone_for_long_is_brought_back_at_once(site: Site, run: Run) -> None:
    engine = SGLang()
    host = site.host(run, engine)
    host.step()
    for _ in range(6):
        take(engine)
        assert host.step().ready and engine.held == run.digest(0)
        host.clock.at += 1201


def test_an_engine_reloaded_from_elsewhere_is_noticed_by_the_directory_it_names(site: Site, run: Run) -> None:
    engine = SGLang()
    host = site.host(run, engine)
    run.publish()
    host.step()
    engine.source, engine.held = "/somewhere/else", "other weights"
    assert engine.label == "1", "the label was not moved"
    assert host.step().ready and engine.held == run.digest(1)
    engine.calls.clear()
    host.step()
    assert engine.paths() == []


def test_an_engine_that_somebody_else_paused_takes_versions_and_stays_paused(site: Site, run: Run) -> None:
    engine = VLLM()
    host = site.host(run, engine)
    host.step()
    engine.paused = True
    outcome = host.step()
    [shown] = host.status.engines
    assert (
        "not by this subscriber" in outcome.not_ready_reasons[0]
        and shown.reason in outcome.not_ready_reasons[0]
    )
    assert (shown.state, shown.ready, shown.aligned) == ("paused", False, True)
    run.publish()
    outcome = host.step()
    assert not outcome.ready and engine.paused and engine.held == run.digest(1)
    host.restart()
    assert not host.step().ready and engine.paused and host.status.engines[0].state == "paused"
    engine.paused = False
    assert host.step().ready and host.status.engines[0].state == "serving"


@pytest.mark.parametrize("restarted", [False, True])
def test_a_pause_of_ours_that_comes_late_is_made_up_for(site: Site, run: Run, restarted: bool) -> None:
    engine = VLLM()
    host = site.host(run, engine)
    host.step()
    engine.script("/pause", Drop(), Drop())
    run.publish()
    assert not host.step().ready and engine.held == run.digest(0)
    assert host.retry().ready and engine.held == run.digest(1)
    if restarted:
        host.restart()
    engine.paused = True
    assert host.step().ready and not engine.paused, "it was sent once, and may come once"
    engine.paused = True
    assert not host.step().ready and engine.paused, "this is somebody else's"


def test_a_late_pause_of_another_process_is_none(site: Site, run: Run) -> None:
    engine = VLLM()
    host = site.host(run, engine)
    host.step()
    engine.script("/pause", Drop(), Drop())
    run.publish()
    host.step()
    engine.restart()
    assert host.retry().ready and engine.held == run.digest(1)
    engine.paused = True
    assert not host.step().ready and engine.paused


def test_a_late_pause_before_the_next_reload_ends_with_it(site: Site, run: Run) -> None:
    engine = VLLM()
    host = site.host(run, engine)
    host.step()
    engine.script("/pause", Drop(), Drop())
    run.publish()
    host.step()
    engine.paused = True
    assert host.retry().ready and engine.held == run.digest(1) and not engine.paused


def test_engines_that_serve_are_looked_at_now_and_then(site: Site, run: Run) -> None:
    engine = SGLang()
    host = site.host(run, engine, conduct={"look_seconds": 10.0})
    host.step()
    engine.calls.clear()
    host.step()
    assert engine.calls == []
    engine.restart()
    host.clock.at += 12
    assert host.step().ready and len(engine.of("/update_weights_from_disk")) == 1


def test_the_parts_of_a_pause_are_told(site: Site, run: Run) -> None:
    engine = SGLang()
    host = site.host(run, engine)
    host.step()
    run.publish()
    host.step()
    [shown] = host.status.engines
    assert set(shown.seconds) == {"pause", "patch", "reload", "read_back", "resume"}
    assert shown.pause_seconds is not None
    spent = sum(shown.seconds[part] for part in ("pause", "reload", "read_back", "resume"))
    assert spent - 1e-5 <= shown.pause_seconds < spent + 0.05, "nothing else happens in the pause"
    parts = {"plan", "fetch", "stage", "patch", "pause", "reload", "read_back", "resume"}
    assert parts <= set(host.status.updates[-1].seconds)


@pytest.mark.parametrize(("readers", "file", "room"), [("group", 0o640, 0o750), ("all", 0o644, 0o755)])
def test_who_may_read_does_not_hang_on_the_umask(
    site: Site, run: Run, readers: Any, file: int, room: int
) -> None:
    before = os.umask(0o077)
    try:
        host = site.host(run, readable_by=readers)
        host.step()
        run.publish()
        host.step()
    finally:
        os.umask(before)
    assert host.at(run, 1)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in host.local.iterdir() if path.is_file()}
    assert set(modes.values()) == {file} and "config.json" in modes
    assert stat.S_IMODE(host.local.stat().st_mode) == room

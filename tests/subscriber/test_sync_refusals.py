"""Engines that refuse, hang, lie or break: what lies on disk after, and how it goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_errors import watched
from doubles import Act, Answer, Drop, Hang
from hosts import QUICK, Host, Mapping_, Run, SGLang, Site, on_disk

from weightcast.shared.checkpoint.state.state import Mark
from weightcast.subscriber.sync.apply import MOST_UNDO_STEPS

UPDATE = "/update_weights_from_disk"
REFUSAL = Answer(400, SGLang.reply(False, "Failed to get weights iterator: no."))
IMPATIENT = dataclasses.replace(QUICK, reload=0.3)


def following(site: Site, *engines: SGLang, **options: object) -> tuple[Run, Host]:
    """A host at version 1 with a version 2 to come."""
    run = site.run()
    host = site.host(run, *engines, **options)  # type: ignore[arg-type]
    run.publish()
    assert host.step().ready
    for engine in engines:
        engine.calls.clear()
    run.publish()
    return run, host


def test_a_version_that_every_engine_refuses_is_undone_and_blocked(site: Site) -> None:
    engine = SGLang()
    run, host = following(site, engine)
    engine.script(UPDATE, REFUSAL)
    outcome = host.step()
    assert host.at(run, 1) and host.journals == []
    assert (engine.held, engine.label, engine.paused) == (run.digest(1), "1", False)
    assert len(engine.of(UPDATE)) == 2, "after an undo every engine is reloaded"
    assert outcome.ready and "the engines refused version 2" in outcome.degraded[0]
    assert [(b.version, b.attempts) for b in host.state.blocked] == [(2, 1)]
    assert [u.kind for u in host.status.updates[-2:]] == ["patch", "undo"]

    engine.calls.clear()
    outcome = host.step()
    assert outcome.ready and outcome.degraded and outcome.local_version == 1
    assert engine.paths() == [] and host.status.ready and host.status.degraded

    run.publish()
    assert host.step().ready
    assert host.at(run, 3) and engine.held == run.digest(3)
    assert host.status.degraded == ()


def test_a_blocked_version_survives_a_restart_and_is_tried_again_later(site: Site) -> None:
    engine = SGLang()
    run, host = following(site, engine)
    engine.script(UPDATE, REFUSAL)
    host.step()
    host.restart()
    engine.calls.clear()
    assert host.step().local_version == 1
    assert engine.of(UPDATE) == []
    engine.script(UPDATE, REFUSAL)
    assert host.retry().local_version == 1
    assert [(b.version, b.attempts) for b in host.state.blocked] == [(2, 2)]
    assert host.retry().local_version == 1, "the second wait is longer"
    host.clock.at += 240
    assert host.step().local_version == 2
    assert host.at(run, 2) and engine.held == run.digest(2) and host.state.blocked == ()


def test_a_version_that_is_taken_after_all_is_not_blocked_any_more(site: Site) -> None:
    """The host dies when it has blocked the version, before it goes back."""
    engine = SGLang()
    run, host = following(site, engine)
    engine.script(UPDATE, REFUSAL)

    def die(name: str, where: Path | None) -> None:
        if name == "refused.blocked":
            raise ZeroDivisionError

    with watched(die), pytest.raises(ZeroDivisionError):
        host.step()
    assert [b.version for b in host.state.blocked] == [2]
    host.restart()
    outcome = host.step()
    assert outcome.ready and outcome.degraded == () and outcome.blocked == ()
    assert host.at(run, 2) and engine.held == run.digest(2) and host.state.blocked == ()


def test_a_refused_fold_goes_back_to_the_served_version(site: Site) -> None:
    engine = SGLang()
    run, host = following(site, engine)
    run.publish()
    run.publish()
    engine.script(UPDATE, REFUSAL)
    host.step()
    assert host.at(run, 1) and [b.version for b in host.state.blocked] == [4]


def test_the_version_stays_when_one_engine_took_it(site: Site) -> None:
    willing, unwilling = SGLang(), SGLang()
    run, host = following(site, willing, unwilling)
    unwilling.script(UPDATE, REFUSAL)
    outcome = host.step()
    assert not outcome.ready and len(outcome.not_ready_reasons) == 1
    assert host.at(run, 2) and host.journals == [] and host.state.blocked == ()
    assert (willing.held, unwilling.held) == (run.digest(2), run.digest(1))
    assert not unwilling.paused, "it has the old weights and goes on with them"
    assert host.status.served_version == 1
    willing.calls.clear()
    assert host.retry().ready
    assert unwilling.held == run.digest(2) and willing.paths() == []


FAULTS: dict[str, Callable[[SGLang], Act]] = {
    "500": lambda engine: Answer(500),
    "success false with 200": lambda engine: Answer(200, SGLang.reply(False, "no")),
    "400 although updated": lambda engine: engine.updated_but_not_flushed,
    "half loaded": lambda engine: engine.half_loaded,
    "label stays": lambda engine: engine.label_stays,
    "dropped": lambda engine: Drop(),
    "dropped after": lambda engine: Drop(after=True),
    "no JSON": lambda engine: Answer(200, b"<html>"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_engine_in_doubt_stays_paused_until_a_good_reload(site: Site, fault: str) -> None:
    engine = SGLang()
    run, host = following(site, engine)
    engine.script(UPDATE, *[FAULTS[fault](engine)] * 2)
    outcome = host.step()
    assert not outcome.ready and engine.paused
    assert host.at(run, 2), "the local checkpoint is right, the engine is not"
    assert len(host.journals) == 1, "the way back is kept"
    [record] = host.state.engines.values()
    assert record.mark is Mark.SUSPECT and host.status.served_version is None
    assert host.retry().ready
    assert (engine.held, engine.label, engine.paused) == (run.digest(2), "2", False)
    assert not engine.resumed_broken and host.journals == []


def test_an_engine_that_never_loads_a_version_makes_it_go_back(site: Site) -> None:
    engine = SGLang()
    run, host = following(site, engine)
    engine.script(UPDATE, *[Answer(500)] * 6)
    assert not host.step().ready
    assert not host.retry().ready
    assert host.retry().ready
    assert host.at(run, 1) and (engine.held, engine.paused) == (run.digest(1), False)
    assert [b.version for b in host.state.blocked] == [2]


def test_a_late_answer_counts_for_nothing(site: Site) -> None:
    engine, other = SGLang(), SGLang()
    run, host = following(site, engine, other, timeouts=IMPATIENT)
    engine.script(UPDATE, Hang(), Hang())
    outcome = host.step()
    assert len(outcome.not_ready_reasons) == 1 and other.held == run.digest(2)
    engine.release()
    assert host.retry().ready
    assert (engine.held, engine.label, engine.paused) == (run.digest(2), "2", False)


def test_a_failed_engine_is_not_asked_at_every_poll(site: Site) -> None:
    engine, other = SGLang(), SGLang()
    run, host = following(site, engine, other)
    engine.script(UPDATE, *[Answer(500)] * 2)
    host.step()
    engine.calls.clear()
    host.step()
    assert engine.paths() == []
    run.publish()
    assert host.step().ready, "a new version is a new chance"
    assert engine.held == run.digest(3)


def test_an_engine_that_does_not_pause_keeps_its_weights(site: Site) -> None:
    engine = SGLang()
    run, host = following(site, engine)
    engine.script("/pause_generation", Answer(500))
    assert not host.step().ready
    assert host.at(run, 2) and engine.of(UPDATE) == [] and not engine.paused
    assert host.status.served_version == 1 and len(host.journals) == 1
    assert host.retry().ready and engine.held == run.digest(2)


def test_an_engine_that_does_not_resume_is_resumed_later(site: Site) -> None:
    engine = SGLang()
    run, host = following(site, engine)
    engine.script("/continue_generation", Answer(500), Answer(500))
    assert not host.step().ready
    assert engine.paused
    host.restart()
    assert host.step().ready
    assert not engine.paused and engine.held == run.digest(2)


def test_engines_that_map_the_files_go_back_inside_their_pause(site: Site) -> None:
    run = site.run()
    engine = Mapping_(site.root / "host")
    host = site.host(run, engine)
    host.step()
    run.publish()
    engine.loads = False
    for _ in range(3):
        engine.seen.clear()
        host.retry()
    assert host.at(run, 0) and [b.version for b in host.state.blocked] == [1]
    engine.loads = True
    engine.calls.clear()
    assert host.retry().ready
    assert on_disk(host.local) in (run.digest(0), run.digest(1)) and not engine.paused


def test_an_engine_that_dies_in_its_reload_is_no_reason_to_go_back(site: Site) -> None:
    engine = SGLang()
    run, host = following(site, engine)
    engine.script(UPDATE, Drop(), Drop())
    host.step()
    engine.restart()
    assert host.at(run, 2)
    assert host.retry().ready and engine.held == run.digest(2) and host.state.blocked == ()


def test_the_way_back_has_an_end_where_an_engine_stays_in_doubt(site: Site) -> None:
    run, engine = site.run(), SGLang()
    host = site.host(run, engine, pace={"rounds": 99})
    host.step()
    engine.script(UPDATE, *[Drop()] * 99)
    kept = []
    for _ in range(MOST_UNDO_STEPS + 2):
        run.publish()
        host.step()
        kept.append(len(host.state.undo))
    assert max(kept) == MOST_UNDO_STEPS and kept[-1] < MOST_UNDO_STEPS

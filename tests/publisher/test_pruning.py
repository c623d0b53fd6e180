"""Versions taken out of a channel, versions brought back: real channels, and hosts that go on following."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_cases import Model, bytes_of, read_checkpoint, rot, snapshot, some_changed, tensor, write_checkpoint
from in_process import Command
from publisher_cases import Place, make_place, trash
from waiting import wait_until

from weightcast.publisher import Publisher
from weightcast.publisher.maintenance.orders import order_rollback
from weightcast.publisher.maintenance.prune import ACTIVE_SECONDS, ActiveHosts, Uptime, empty_trash
from weightcast.publisher.maintenance.retention import Retention
from weightcast.publisher.maintenance.upkeep import UpkeepOptions
from weightcast.shared.base.errors import DamagedFile, Refused, RetryLater
from weightcast.shared.channel import pins
from weightcast.shared.channel.chain import verify
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.reports import Report, write_report
from weightcast.shared.checkpoint.local_updater import LocalUpdater

INDEX = "model.safetensors.index.json"
KEEP_TWO = UpkeepOptions(skip_span=4, history_share=1000.0, retention=Retention(2, host_versions=3))


def grow(publisher: Publisher, place: Place, models: list[Model], versions: int) -> None:
    rng = np.random.default_rng(len(models))
    for _ in range(versions):
        models.append(some_changed(models[-1], rng))
        publisher.publish_checkpoint(place.new(models[-1]))


def left(place: Place) -> list[int]:
    return sorted(int(path.parent.name[8:]) for path in place.channel.glob(f"weight_v*/{INDEX}"))


def report(place: Place, version: int, counter: int = 1) -> Report:
    return Report(
        run_id="run-under-test",
        state="idle",
        served_version=version,
        target="latest",
        lag=0,
        host="host-1",
        local=str(place.host),
        local_version=version,
        last_error="",
        engines=(),
        counter=counter,
        software="",
    )


@contextlib.contextmanager
def host(place: Place, name: str, version: int, base: bool = True) -> Iterator[LocalUpdater]:
    updater = place.follow(place.root / name)
    if not base:
        updater.base_dir = None
    try:
        updater.update_to(Channel.open(open_store(place.channel)), version)
        yield updater
    finally:
        updater.close()


def catches_up(updater: LocalUpdater, model: Model) -> None:
    updater.update_to(Channel.open(updater.store))
    assert read_checkpoint(updater.paths.directory) == bytes_of(model)


def test_a_publisher_prunes_and_everybody_arrives(place: Place) -> None:
    models = [place.model]
    with place.publisher(upkeep=KEEP_TWO) as publisher, contextlib.ExitStack() as stack:
        grow(publisher, place, models, 4)
        hosts = [stack.enter_context(host(place, f"at-{version}", version)) for version in (0, 3)]
        publisher.make_due()
        assert left(place) == [1, 2, 3, 4], "there were no full weights before version 3"
        pins.keep(open_store(place.channel), 1)
        grow(publisher, place, models, 2)
        assert "3 versions pruned" not in publisher.make_due()
        grow(publisher, place, models, 3)
        made = publisher.make_due()
        assert any(text.endswith("versions pruned") for text in made), made
        channel = Channel.open(open_store(place.channel))
        assert channel.file is not None
        horizon = channel.file.horizon
        assert 4 <= horizon <= 8 and left(place) == [1, *range(horizon, 10)]
        assert verify(channel) == []
        assert publisher.make_due() == []
        for updater in hosts:
            catches_up(updater, models[9])
        with host(place, "new", 9) as new, host(place, "without a base", 9, base=False) as bare:
            catches_up(new, models[9])
            catches_up(bare, models[9])
        with host(place, "the kept one", 1) as old:
            assert read_checkpoint(old.paths.directory) == bytes_of(models[1])
        grow(publisher, place, models, 1)
    place.arrives(models[10], 10)


def test_pruned_versions_stay_in_the_trash_for_a_while(place: Place) -> None:
    models = [place.model]
    with place.publisher(upkeep=KEEP_TWO) as publisher:
        grow(publisher, place, models, 5)
        publisher.make_due()
        grow(publisher, place, models, 3)
        publisher.make_due()
        grow(publisher, place, models, 1)
        trash = sorted(path.name for path in (place.channel / ".trash").iterdir())
        assert trash and all(name.endswith(".pruned") for name in trash)
        store = open_store(place.channel)
        assert empty_trash(store, 3600.0) == 0
        here = Uptime.here()
        for other in (Uptime("another boot", here.seconds), Uptime("another boot", here.seconds + 3599.0)):
            assert empty_trash(store, 3600.0, other) == 0, "counted anew"
        for note in (place.channel / ".trash").glob("*/pruned.json"):
            note.write_text("{")
        assert empty_trash(store, 3600.0, replace(here, seconds=here.seconds + 9999.0)) == 0
        assert empty_trash(store, 3600.0, replace(here, seconds=here.seconds + 9998.0)) == 0, "went back"
        assert empty_trash(store, 3600.0, replace(here, seconds=here.seconds + 13599.0)) == len(trash)
        assert list((place.channel / ".trash").iterdir()) == []


def test_a_reader_that_loses_the_race_plans_again(place: Place) -> None:
    models = [place.model]
    with place.publisher(upkeep=KEEP_TWO) as publisher:
        grow(publisher, place, models, 5)
        with host(place, "racing", 0) as updater:
            channel = Channel.open(open_store(place.channel))
            pointer = channel.pointer()
            assert pointer is not None
            route = updater.route(channel, pointer, 5, exact=False)
            publisher.make_due()
            grow(publisher, place, models, 4)
            publisher.make_due()
            assert 1 not in left(place)
            legs = route.plan.legs  # type: ignore[union-attr]
            with pytest.raises(RetryLater, match="is missing"):
                updater.prepare(route, legs[0])
            catches_up(updater, models[9])


def test_reports_count_while_they_change() -> None:
    now = [0.0]
    living = ActiveHosts(lambda: now[0])
    place = Place(Path("/x"), {})
    assert living.versions([report(place, 4)]) == [4]
    now[0] = ACTIVE_SECONDS + 1
    assert living.versions([report(place, 4)]) == []
    assert living.versions([report(place, 4, counter=2)]) == [4]


Verb = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def verb(weightcast: Command) -> Verb:
    """The command in this process: exit code, what it says as JSON."""

    def call(*words: object) -> tuple[int, dict[str, Any]]:
        code, said, _ = weightcast(*words, "--json")
        return code, json.loads(said) if said.startswith("{") else {}

    return call


@pytest.fixture
def pruned(place: Place) -> Place:
    models = [place.model]
    with place.publisher() as publisher:
        grow(publisher, place, models, 3)
        publisher.write_anchor()
        grow(publisher, place, models, 3)
    return place


def test_the_verb_says_what_and_why(pruned: Place, verb: Verb) -> None:
    words = ("channel", "prune", "--channel", pruned.channel, "--keep-versions", 2)
    before = snapshot(pruned.channel)
    code, said = verb(*words, "--dry-run")
    assert code == 0 and [row["version"] for row in said["removals"]] == [1, 2]
    assert all("version 3 has full weights" in row["why"] for row in said["removals"])
    assert snapshot(pruned.channel) == before
    # a host that is behind holds them back
    write_report(open_store(pruned.channel), report(pruned, 1))
    assert verb(*words, "--dry-run")[1]["removals"] == []
    assert len(verb(*words, "--host-versions", 0, "--dry-run")[1]["removals"]) == 2
    code, said = verb(*words, "--host-versions", 0)
    assert (code, said["horizon"]) == (0, 3) and left(pruned) == [3, 4, 5, 6]
    assert verb(*words)[1]["why_not"]
    assert verb("channel", "prune", "--channel", pruned.channel)[0] == 2


def test_the_verb_deletes_what_it_took_away_before(pruned: Place, verb: Verb) -> None:
    words = ("channel", "prune", "--channel", pruned.channel, "--keep-versions", 2)
    assert verb(*words)[1]["deleted"] == 0 and len(trash(pruned)) == 2
    before = snapshot(pruned.channel)
    assert verb(*words, "--dry-run", "--grace-seconds", 0)[1]["deleted"] == 0
    assert snapshot(pruned.channel) == before
    code, said = verb(*words, "--grace-seconds", 0)
    assert (code, said["removals"], said["deleted"], trash(pruned)) == (0, [], 2, [])
    assert left(pruned) == [3, 4, 5, 6]


def test_a_publisher_that_makes_nothing_beside_its_versions_empties_the_trash_too(
    pruned: Place, verb: Verb
) -> None:
    """As `weightcast publish` without skip deltas does."""
    verb("channel", "prune", "--channel", pruned.channel, "--keep-versions", 2)
    with pruned.publisher(upkeep=UpkeepOptions(grace_seconds=3600.0)) as publisher:
        publisher.make_due()
        assert len(trash(pruned)) == 2
    with pruned.publisher(upkeep=UpkeepOptions(grace_seconds=0.0)) as publisher:
        assert publisher.make_due() == []
    assert trash(pruned) == []


def stick(grave: Path) -> None:
    """Its index cannot be deleted: it is of another kind than it was, and not empty."""
    (grave / INDEX).unlink()
    (grave / INDEX / "entry").mkdir(parents=True)


def test_what_cannot_be_deleted_is_told_after_the_rest(pruned: Place, verb: Verb) -> None:
    verb("channel", "prune", "--channel", pruned.channel, "--keep-versions", 2)
    store, stuck = open_store(pruned.channel), pruned.channel / ".trash" / trash(pruned)[0]
    stick(stuck)
    with pytest.raises(RetryLater, match=rf"cannot delete {stuck}"):
        empty_trash(store, 0.0)
    assert trash(pruned) == [stuck.name]


def test_trash_that_cannot_be_deleted_costs_no_publication(
    pruned: Place, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    verb("channel", "prune", "--channel", pruned.channel, "--keep-versions", 2)
    clock = time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda which: clock(which) + 9999.0)
    for grave in (pruned.channel / ".trash").iterdir():
        stick(grave)
    new = pruned.new(some_changed(pruned.model, np.random.default_rng(77)))
    places = ("--channel", pruned.channel, "--local", pruned.pub, "--base", pruned.base)
    code, said = verb("publish", new, *places, "--skip-span", 0, "--anchor")
    assert (code, said["version"]) == (0, 7)
    assert (pruned.channel / "weight_v000007" / "anchor").is_dir()


def test_what_kept_upkeep_from_its_work_is_told_until_it_is_gone(pruned: Place, verb: Verb) -> None:
    verb("channel", "prune", "--channel", pruned.channel, "--keep-versions", 2)
    stuck = pruned.channel / ".trash" / trash(pruned)[0]
    stick(stuck)
    with pruned.publisher(upkeep=UpkeepOptions(grace_seconds=0.0)) as publisher:
        background = publisher.work_in_background()
        assert background is not None
        wait_until(lambda: "cannot delete" in background.problem)
        (stuck / INDEX / "entry").rmdir()
        background.wake()
        wait_until(lambda: background.problem == "")
    assert trash(pruned) == []


def test_a_living_publisher_empties_the_trash_itself(pruned: Place, verb: Verb) -> None:
    words = ("channel", "prune", "--channel", pruned.channel, "--keep-versions")
    verb(*words, 2)
    with pruned.publisher():
        code, said = verb(*words, 5, "--grace-seconds", 0)
    assert (code, said["removals"], said["deleted"], len(trash(pruned))) == (0, [], 0, 2)


DAY = 86400


def test_reports_of_hosts_that_are_no_more_are_deleted(place: Place) -> None:
    for name in ("gone", "away", "alive"):
        write_report(open_store(place.channel), replace(report(place, 0), host=name))
    ages = {"gone": 31 * DAY, "away": 29 * DAY, "alive": 0}
    write_ages(place, ages)
    with place.publisher() as publisher:
        publisher.make_due()
    assert reporting(place) == ["alive", "away"]


@pytest.mark.parametrize("ages", [{"gone": 31, "alive": 31}, {"alive": 0, "future": -4000}])
def test_a_clock_that_is_wrong_deletes_no_report(place: Place, ages: dict[str, int]) -> None:
    """The publisher's own, or that of a machine that wrote a report."""
    for name in ages:
        write_report(open_store(place.channel), replace(report(place, 0), host=name))
    write_ages(place, {name: days * DAY for name, days in ages.items()})
    with place.publisher() as publisher:
        publisher.make_due()
    assert reporting(place) == sorted(ages)


def test_of_old_files_beside_reports_none_is_deleted(place: Place, tmp_path: Path) -> None:
    """What is no report by its name, and reports of another place."""
    for name in ("gone", "alive"):
        write_report(open_store(place.channel), replace(report(place, 0), host=name))
    write_ages(place, {"gone": 31 * DAY, "alive": 0})
    hosts, elsewhere = place.channel / "hosts", tmp_path / "elsewhere"
    hosts.rename(elsewhere)
    hosts.symlink_to(elsewhere)
    with place.publisher() as publisher:
        publisher.make_due()
    assert reporting(place) == ["alive", "gone"]
    hosts.unlink()
    elsewhere.rename(hosts)
    (hosts / "notes.json").write_text("{}")
    os.utime(hosts / "notes.json", (time.time() - 31 * DAY,) * 2)
    with place.publisher() as publisher:
        publisher.make_due()
    assert reporting(place) == ["alive", "notes.json"]


def write_ages(place: Place, ages: dict[str, int]) -> None:
    for name, seconds in ages.items():
        (file,) = (place.channel / "hosts").glob(f"{name}-*.json")
        os.utime(file, (time.time() - seconds,) * 2)


def reporting(place: Place) -> list[str]:
    return sorted(file.name.partition("-")[0] for file in (place.channel / "hosts").iterdir())


def test_a_living_publisher_is_not_pruned_under(pruned: Place, verb: Verb) -> None:
    with pruned.publisher():
        code, said = verb("channel", "prune", "--channel", pruned.channel, "--keep-versions", 1)
    assert code == 3 and "--keep-versions" in said["remedy"] and left(pruned)[0] == 1


def test_marks(pruned: Place, verb: Verb) -> None:
    at = ("--channel", pruned.channel)
    assert verb("channel", "keep", 1, *at)[1] == {"kept": [1]}
    assert verb("channel", "tag", "best", 2, *at)[1] == {"tags": {"best": 2}}
    assert (pruned.channel / "tags" / "best").read_text() == "000002"
    assert verb("channel", "prune", *at, "--keep-versions", 2)[1]["removals"] == []
    assert verb("channel", "unkeep", 1, *at)[1] == {"kept": []}
    assert verb("channel", "tag", "best", "--delete", *at)[1] == {"tags": {}}
    assert verb("channel", "unkeep", 1, *at)[0] == verb("channel", "keep", 99, *at)[0] == 3
    for name in ("latest", "12", ".hidden", "a/b", "../x"):
        code, answer = verb("channel", "tag", name, 2, *at)
        assert code == 3 and "cannot be a tag" in answer["message"] and "give a name" in answer["remedy"]
    assert (
        verb("channel", "tag", "best", *at)[0] == verb("channel", "tag", "best", 2, "--delete", *at)[0] == 2
    )
    assert not (pruned.channel / "x").exists()


def test_a_tag_that_says_nothing_stops_pruning(pruned: Place, verb: Verb) -> None:
    pins.set_tag(open_store(pruned.channel), "best", 2)
    (pruned.channel / "tags" / "best").write_text("two")
    code, said = verb("channel", "prune", "--channel", pruned.channel, "--keep-versions", 2)
    assert code == DamagedFile.exit_code and "best" in str(said["message"]) and left(pruned)[0] == 1


# rollback


@pytest.mark.parametrize("history", [True, False], ids=["kept journals", "a copy"])
def test_a_rollback_is_a_new_version_and_holds_publishing(place: Place, history: bool, verb: Verb) -> None:
    models = [place.model]
    upkeep = UpkeepOptions(skip_span=4, history_share=1000.0) if history else None
    with place.publisher(upkeep=upkeep) as publisher:
        grow(publisher, place, models, 4)
        with host(place, "on 2", 2) as stayed, host(place, "on 4", 4) as went:
            assert verb("channel", "rollback", "--to", 2, "--channel", place.channel)[1]["held"]
            with pytest.raises(Refused, match="on hold since the rollback to version 2"):
                publisher.publish_checkpoint(place.new(models[4]))
            assert publisher.version == 5 and publisher.obey_orders() is not None
            assert publisher.version == 5
            before = stayed.state
            assert before is not None
            catches_up(stayed, models[2])
            catches_up(went, models[2])
            assert stayed.state is not None and stayed.state.position.version == 5
        assert verb("channel", "resume", "--channel", place.channel)[1] == {"held": False, "waiting": []}
        models.append(models[2])
        grow(publisher, place, models, 1)
    place.arrives(models[6], 6)
    assert not (place.pub / ".weightcast" / "rollback").exists()
    assert verify(Channel.open(open_store(place.channel))) == []


@pytest.mark.parametrize("history", [True, False], ids=["kept journals", "a copy"])
def test_a_run_that_stores_both_of_two_tied_tensors_is_rolled_back(tmp_path: Path, history: bool) -> None:
    rng, config = np.random.default_rng(4), json.dumps({"tie_word_embeddings": True})
    models: list[Model] = []
    for _ in range(4):
        # of more words than are compared at a time
        words = tensor(rng, "BF16", 5, 1 << 20)
        models.append({"lm_head.weight": words, "model.embed_tokens.weight": words})
    place = make_place(tmp_path, models[0], config=config)
    upkeep = UpkeepOptions(skip_span=4, history_share=1000.0) if history else None
    with place.publisher(upkeep=upkeep) as publisher:
        for model in models[1:]:
            publisher.publish_checkpoint(write_checkpoint(place.root / "new", model, config=config))
        order_rollback(open_store(place.channel), 1)
        assert publisher.obey_orders() is not None and publisher.version == 4
    place.arrives(models[1], 4)


@pytest.mark.parametrize("history", [True, False], ids=["kept journals", "a copy"])
def test_a_rollback_goes_on_where_the_local_checkpoint_drifted(place: Place, history: bool) -> None:
    models = [place.model]
    upkeep = UpkeepOptions(skip_span=4, history_share=1000.0) if history else None
    with place.publisher(upkeep=upkeep) as publisher:
        grow(publisher, place, models, 4)
        rot(place.pub, max(place.model, key=lambda name: len(place.model[name].data)), 0)
        order_rollback(open_store(place.channel), 2)
        assert publisher.obey_orders() is not None and publisher.version == 5
    place.arrives(models[2], 5)


def test_an_order_is_carried_out_by_the_next_publisher(place: Place) -> None:
    models = [place.model]
    with place.publisher() as publisher:
        grow(publisher, place, models, 2)
    order_rollback(open_store(place.channel), 0)
    with place.publisher() as publisher:
        assert publisher.obey_orders() is not None and publisher.version == 3
    place.arrives(models[0], 3)
    with place.publisher() as publisher, pytest.raises(Refused, match="on hold"):
        publisher.publish_checkpoint(place.new(models[2]))
    assert left(place) == [1, 2, 3]


def test_orders_that_cannot_be(pruned: Place, verb: Verb) -> None:
    at = ("--channel", pruned.channel)
    assert (
        verb("channel", "rollback", "--to", 6, *at)[0] == verb("channel", "rollback", "--to", 9, *at)[0] == 3
    )
    assert verb("channel", "resume", *at)[0] == 3
    verb("channel", "prune", *at, "--keep-versions", 2)
    assert verb("channel", "rollback", "--to", 1, *at)[0] == 3
    assert verb("channel", "rollback", "--to", 4, *at)[0] == 0
    assert verb("channel", "rollback", "--to", 5, *at)[0] == 3
    order = json.loads((pruned.channel / "orders" / "rollback.json").read_text())
    (pruned.channel / "orders" / "rollback.json").write_text(json.dumps(order | {"run_id": "other"}))
    with pruned.publisher() as publisher, pytest.raises(Refused, match="is for run other"):
        publisher.obey_orders()


def test_an_order_whose_bytes_are_not_there_publishes_nothing(place: Place) -> None:
    models = [place.model]
    with place.publisher() as publisher:
        grow(publisher, place, models, 2)
        order_rollback(open_store(place.channel), 1)
        path = place.channel / "orders" / "rollback.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"root": "0" * 64}))
        with pytest.raises((RetryLater, DamagedFile)):
            publisher.obey_orders()
        assert publisher.version == 2

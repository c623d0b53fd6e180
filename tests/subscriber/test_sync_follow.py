"""A host that follows its channel: seeded, patched, folded, engines reloaded once each."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from core_cases import pack
from disk_errors import watched
from doubles import Answer
from hosts import VLLM, Mapping_, Run, SGLang, Site, on_disk

from weightcast.publisher.maintenance.upkeep import UpkeepOptions
from weightcast.shared.base import failpoints
from weightcast.shared.base.errors import DamagedFile, EngineFailed, RetryLater
from weightcast.shared.checkpoint.state.state import Mark
from weightcast.subscriber.sync.options import BadTarget, parse_target


def test_before_the_first_version_a_host_is_seeded_and_ready(site: Site) -> None:
    run, engine = site.run(), SGLang()
    host = site.host(run, engine)
    outcome = host.step()
    assert outcome.ready and outcome.local_version == 0
    assert host.at(run, 0)
    assert (engine.held, engine.label, engine.paused) == (run.digest(0), "0", False)
    assert (host.status.served_version, host.status.confirmed_by, host.status.ready) == (0, "label", True)


def test_who_waits_for_another_writer_says_so_until_that_has_ended(site: Site) -> None:
    """Also while it asks again: reports are the writer's."""
    run = site.run()
    writer, waiting = site.host(run), site.host(run)
    writer.step()
    seen, ended = set[str](), threading.Event()

    def look() -> None:
        while not ended.is_set():
            seen.add(type(waiting.sync.host.error).__name__)

    with pytest.raises(RetryLater, match="already has a writer"):
        waiting.step()
    watching = threading.Thread(target=look)
    watching.start()
    try:
        for _ in range(300):
            with pytest.raises(RetryLater, match="already has a writer"):
                waiting.step()
    finally:
        ended.set()
        watching.join()
    assert seen == {"HasWriter"}
    writer.sync.close()
    assert waiting.step().ready and waiting.status.last_error is None


def test_three_versions_are_followed_one_by_one(site: Site) -> None:
    run, engine = site.run(), SGLang()
    host = site.host(run, engine)
    host.step()
    for version in (1, 2, 3):
        run.publish()
        engine.calls.clear()
        outcome = host.step()
        assert outcome.ready and outcome.updates[-1].kind == "patch"
        assert host.at(run, version)
        assert (engine.held, engine.label) == (run.digest(version), str(version))
        assert engine.paths() == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
        assert host.journals == []
    assert [(u.kind, u.version, u.folded) for u in host.status.updates if u.kind == "patch"] == [
        ("patch", 1, 1),
        ("patch", 2, 1),
        ("patch", 3, 1),
    ]
    newest = host.status.updates[-1]
    assert {"plan", "fetch", "stage", "lock", "patch", "pause", "reload", "resume", "total"} <= set(
        newest.seconds
    )
    assert newest.bytes > 0 and host.status.bytes_read >= newest.bytes and newest.pause_seconds


@pytest.mark.parametrize(("engines", "named"), [((), 0), ((SGLang,), 1)])
def test_a_way_back_is_noted_only_where_an_engine_may_refuse(
    site: Site, engines: tuple[type[SGLang], ...], named: int
) -> None:
    run = site.run()
    host = site.host(run, *(engine() for engine in engines))
    host.step()
    run.publish()
    noted = []

    def look(name: str, where: Path | None) -> None:
        if name == "patch.recorded":
            noted.append(len(host.state.undo))

    failpoints.watch(look)
    try:
        host.step()
    finally:
        failpoints.watch(None)
    assert noted == [named] and host.at(run, 1) and host.journals == []


def test_a_host_several_versions_behind_reloads_once(site: Site) -> None:
    run, engine = site.run(), SGLang()
    host = site.host(run, engine)
    host.step()
    engine.calls.clear()
    for _ in range(3):
        run.publish()
    assert host.step().ready
    assert host.at(run, 3)
    assert len(engine.of("/update_weights_from_disk")) == 1
    assert host.status.updates[-1].folded == 3


def test_a_late_host_is_seeded_and_patched_with_one_reload(site: Site) -> None:
    run, engine = site.run(), SGLang()
    run.publish()
    run.publish()
    host = site.host(run, engine)
    assert host.step().ready
    assert host.at(run, 2)
    assert len(engine.of("/update_weights_from_disk")) == 1


def test_nothing_new_touches_no_engine(site: Site) -> None:
    run, engine = site.run(), SGLang()
    run.publish()
    host = site.host(run, engine)
    host.step()
    engine.calls.clear()
    before, moves = host.state, host.status.updates
    outcome = host.step()
    assert outcome.ready and outcome.updates == moves
    assert engine.paths() == [] and host.state == before


def test_a_version_without_changes_is_a_new_label_and_no_reload(site: Site) -> None:
    run, engine = site.run(), SGLang()
    host = site.host(run, engine)
    run.publish()
    host.step()
    engine.calls.clear()
    run.publish(run.versions[1])
    assert host.step().ready
    assert engine.paths() == ["/update_weight_version"]
    assert (engine.label, host.status.served_version) == ("2", 2)
    assert host.at(run, 2)
    engine.calls.clear()
    run.publish()
    assert host.step().ready
    assert host.at(run, 3) and engine.held == run.digest(3)


def test_a_failing_relabel_ends_in_a_reload(site: Site) -> None:
    run, engine = site.run(), SGLang()
    host = site.host(run, engine)
    run.publish()
    host.step()
    run.publish(run.versions[1])
    engine.script("/update_weight_version", Answer(500))
    assert host.step().ready
    assert (engine.label, engine.paths()[-1]) == ("2", "/continue_generation")


@pytest.mark.parametrize(("label", "missing"), [("other", set()), ("1", {"/metrics"})])
def test_an_engine_that_may_hold_something_else_gets_no_new_label(
    site: Site, label: str, missing: set[str]
) -> None:
    """Somebody else loaded it, or it may have been restarted unseen."""
    run, engine = site.run(), SGLang()
    engine.missing = missing
    host = site.host(run, engine)
    run.publish()
    host.step()
    engine.label, engine.held = label, "other weights"
    run.publish(run.versions[1])
    assert host.step().ready and engine.of("/update_weight_version") == []
    assert (engine.held, engine.label, host.status.served_version) == (run.digest(2), "2", 2)


@pytest.mark.parametrize("kind", [SGLang, VLLM])
def test_a_proxy_before_an_engine_that_is_gone_serves_nothing(site: Site, kind: type[SGLang | VLLM]) -> None:
    run, engine = site.run(), kind()
    host = site.host(run, engine)
    assert host.step().ready
    engine.behave = lambda call: Answer(502, b"Bad Gateway")
    outcome = host.step()
    [shown] = host.status.engines
    assert not outcome.ready and "502" in outcome.not_ready_reasons[0]
    assert (shown.state, shown.reachable, shown.ready) == ("silent", False, False)
    run.publish()
    engine.calls.clear()
    assert not host.step().ready and engine.paths() == []
    del engine.behave
    assert host.retry().ready and engine.held == run.digest(1)


def test_without_engines_served_is_what_lies_here(site: Site) -> None:
    run = site.run()
    run.publish()
    host = site.host(run)
    assert host.step().ready
    assert (host.status.served_version, host.status.local_version, host.journals) == (1, 1, [])


@pytest.mark.parametrize("encoding", ["small", "xor", "overwrite"])
def test_other_encodings_are_followed_too(site: Site, encoding: str) -> None:
    run, engine = site.run(encoding=encoding), SGLang()
    host = site.host(run, engine)
    for version in (1, 2):
        run.publish()
        assert host.step().ready
        assert host.at(run, version) and engine.held == run.digest(version)


def test_an_engine_that_comes_later_is_reloaded_then(site: Site) -> None:
    run, engine = site.run(), SGLang()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    host = site.host(run, f"sglang=http://127.0.0.1:{port}")
    run.publish()
    outcome = host.step()
    assert (
        outcome.local_version == 1 and not outcome.ready and "does not answer" in outcome.not_ready_reasons[0]
    )
    assert host.at(run, 1) and host.status.served_version is None
    site.serve(engine, port)
    assert host.step().ready
    assert (engine.held, engine.label) == (run.digest(1), "1")


def test_a_restarted_engine_is_reloaded_whatever_it_says(site: Site) -> None:
    run, engine = site.run(), SGLang()
    host = site.host(run, engine)
    run.publish()
    host.step()
    engine.restart()
    engine.label, engine.held = "1", "a mix"
    engine.calls.clear()
    assert host.step().ready
    assert engine.held == run.digest(1) and len(engine.of("/update_weights_from_disk")) == 1


def test_an_engine_without_identity_is_reloaded_once_per_process_of_ours(site: Site) -> None:
    run, engine = site.run(), SGLang()
    engine.missing.add("/metrics")
    host = site.host(run, engine)
    host.step()
    engine.calls.clear()
    host.step()
    assert engine.paths() == []
    host.restart()
    host.step()
    assert len(engine.of("/update_weights_from_disk")) == 1
    host.step()
    assert len(engine.of("/update_weights_from_disk")) == 1


def test_a_restarted_daemon_leaves_a_known_engine_alone(site: Site) -> None:
    run, engine = site.run(), SGLang()
    host = site.host(run, engine)
    run.publish()
    host.step()
    engine.calls.clear()
    host.restart()
    assert host.step().ready and engine.paths() == []


def test_an_engine_that_maps_the_files_is_patched_inside_its_pause(site: Site) -> None:
    run = site.run()
    engine, copying = Mapping_(site.root / "host"), SGLang()
    host = site.host(run, engine, copying)
    host.step()
    engine.seen.clear()
    run.publish()
    run.publish()
    assert host.step().ready
    old, new = run.digest(0), run.digest(2)
    assert engine.seen == [("pause", old), ("reload", new), ("resume", new)]
    assert copying.held == new


def test_an_engine_that_maps_the_files_serves_on_where_something_else_lies_beside_them(site: Site) -> None:
    run, engine = site.run(), Mapping_(site.root / "host")
    host = site.host(run, engine)
    host.step()
    run.publish()
    stray = host.local / "optimizer.safetensors"
    stray.write_bytes(pack({"x": ("F32", (1,), b"1234")}))
    for _ in range(3):
        with pytest.raises(RetryLater, match=r"optimizer\.safetensors"):
            host.retry()
        assert not engine.paused and on_disk(host.local) == run.digest(0)
    stray.unlink()
    assert host.retry().ready and engine.held == run.digest(1)


def test_what_was_fetched_ahead_and_is_gone_around_does_not_stay(site: Site) -> None:
    """The next version is fetched beside a patch; then a delta over several leads farther."""
    run = Run(site.root / "run", site.stack, upkeep=UpkeepOptions(skip_span=64))
    host = site.host(run, fetch_ahead=True)
    host.step()
    due = [4, 4]

    def publish(versions: int) -> None:
        for _ in range(versions):
            run.publish()
            while run.make_due():
                pass

    def publish_meanwhile(name: str, path: Path | None) -> None:
        if name == "journal.complete" and path is not None and path.is_relative_to(host.local) and due:
            publish(due.pop())

    publish(4)
    with watched(publish_meanwhile):
        while host.step().local_version != len(run.versions) - 1:
            pass
    assert not due and host.at(run, 12)


def test_an_engine_that_maps_the_files_and_does_not_pause_is_not_patched_under(site: Site) -> None:
    run = site.run()
    engine = Mapping_(site.root / "host")
    host = site.host(run, engine)
    host.step()
    run.publish()
    engine.pauses = False
    with pytest.raises(EngineFailed, match="not patched in"):
        host.step()
    assert on_disk(host.local) == run.digest(0) and not engine.paused
    engine.pauses = True
    assert host.retry().ready
    assert host.at(run, 1)


def test_nobody_is_asked_for_a_version_when_an_engine_that_maps_the_files_does_not_pause(site: Site) -> None:
    run, copying = site.run(), SGLang()
    willing, unwilling = Mapping_(site.root / "host"), Mapping_(site.root / "host")
    host = site.host(run, willing, unwilling, copying)
    host.step()
    run.publish()
    unwilling.pauses = False
    copying.calls.clear()
    with pytest.raises(EngineFailed, match="not patched in"):
        host.step()
    assert copying.of("/pause_generation") == copying.of("/update_weights_from_disk") == []
    assert not willing.paused and willing.seen[-1] == ("resume", run.digest(0))
    assert all(one.mark is Mark.SERVED for one in host.state.engines.values())
    unwilling.pauses = True
    assert host.retry().ready and host.at(run, 1)


def test_engines_with_copies_serve_while_files_are_patched_under_one_that_maps_them(site: Site) -> None:
    run, copying, mapping = site.run(), SGLang(), Mapping_(site.root / "host")
    host = site.host(run, copying, mapping)
    host.step()
    run.publish()
    paused = {}

    def see(name: str, path: Path | None) -> None:
        if path is not None and path.is_relative_to(host.local):
            paused.setdefault(name, (copying.paused, mapping.paused))

    with watched(see):
        assert host.step().ready
    assert paused["patch.begun"] == (False, True)


def test_a_target_by_number_goes_back_too(site: Site) -> None:
    run, engine = site.run(), SGLang()
    for _ in range(3):
        run.publish()
    host = site.host(run, engine)
    host.step()
    assert host.at(run, 3)
    host.sync.close()
    back = site.host(run, site.option(engine), target="1")
    assert back.step().ready
    assert back.at(run, 1) and engine.held == run.digest(1)


def test_a_tag_stands_for_a_version(site: Site) -> None:
    run = site.run()
    for _ in range(3):
        run.publish()
    host = site.host(run, target="evaluated")
    with pytest.raises(RetryLater, match="no such tag"):
        host.step()
    (run.channel / "tags").mkdir()
    (run.channel / "tags" / "evaluated").write_text("000002")
    assert host.step().ready and host.at(run, 2)
    (run.channel / "tags" / "evaluated").write_text("two")
    with pytest.raises(DamagedFile):
        host.step()
    assert host.at(run, 2)


@pytest.mark.parametrize("text", ["", ".", "..", "../x", "a/b", ".hidden", "a\nb"])
def test_targets_that_are_none(text: str) -> None:
    with pytest.raises(BadTarget):
        parse_target(text)


def test_versions_of_another_split_are_patched_in_turn_with_one_reload(site: Site) -> None:
    """Two ranks write other parts than one: their versions do not fold onto each other."""
    run, engine, mapping = site.run(), SGLang(), Mapping_(site.root / "host")
    host = site.host(run, engine, mapping)
    host.step()
    engine.calls.clear()
    mapping.seen.clear()
    run.publish()
    run.publish_by_two()
    assert host.step().ready
    assert host.at(run, 2) and engine.held == run.digest(2) == mapping.held
    assert len(engine.of("/update_weights_from_disk")) == 1
    assert [seen for phase, seen in mapping.seen if phase == "pause"] == [run.digest(0), run.digest(1)]
    assert host.status.updates[-1].folded == 2


def test_a_host_short_of_disk_reloads_on_the_way(tmp_path: Path) -> None:
    """Journals are kept until the engine confirms a version: their space is needed for the next ones."""
    child, mount = Path(__file__).with_name("little_room_child.py"), tmp_path / "mount"
    mount.mkdir()
    command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, child, tmp_path, mount]
    environment = {**os.environ, "PYTHONPATH": str(child.parents[1])}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    ready, version, held, reloads, journals = json.loads(done.stdout.splitlines()[-1])
    assert (ready, version, held, journals) == (True, 7, [7], 0)
    assert 1 < reloads < 7

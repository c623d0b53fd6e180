"""Killed at named places, rebooted, disturbed: the next start ends where an undisturbed host would be."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
from crashes import killed, started
from disk_errors import watched
from doubles import Answer, Drop
from hosts import Clock, Host, Mapping_, Run, SGLang, Site, on_disk

from weightcast.shared.base.errors import EngineFailed, NeedsReseed, RetryLater
from weightcast.shared.base.failpoints import watch
from weightcast.shared.checkpoint.state.state import Mark
from weightcast.shared.checkpoint.verify.hashing import Scrub

UPDATE = "/update_weights_from_disk"
MOST_KILLS = 40


def recovered(run: Run, host: Host, engine: SGLang, version: int) -> None:
    host.restart()
    outcome = host.step()
    assert outcome.ready and outcome.local_version == version
    assert host.at(run, version) and host.journals == []
    assert (engine.held, engine.label) == (run.digest(version), str(version))
    assert not engine.paused and not engine.resumed_broken
    assert host.status.served_version == version


@pytest.mark.parametrize(
    ("event", "part"),
    [("os.rename", "state.json"), ("socket.connect", ""), ("os.remove", ""), ("open", "owner")],
)
def test_killed_at_every_durable_step_of_a_version(site: Site, event: str, part: str) -> None:
    """Before each replacement of the state, each call to the engine, each removal of a file."""
    run, engine = site.run(), SGLang()
    host = site.host(run, engine)
    host.step()
    kills = 0
    for number in range(1, MOST_KILLS):
        version = run.publish()
        host.sync.close()
        if not killed(lambda: started(host), event, number, part):
            break
        kills += 1
        recovered(run, host, engine, version)
    else:
        pytest.fail("never came to an end")
    assert kills >= 1
    recovered(run, host, engine, len(run.versions) - 1)


@pytest.mark.parametrize("number", range(1, 6))
def test_killed_while_going_back(site: Site, number: int) -> None:
    run, engine = site.run(), SGLang()
    host = site.host(run, engine)
    host.step()
    run.publish()
    engine.script(UPDATE, Answer(400, SGLang.reply(False, "Failed to get weights iterator: no.")))
    host.sync.close()
    # patching, patched, pausing, refused, then: blocked, undoing, undone, pausing, served
    assert killed(lambda: started(host), "os.rename", 4 + number, "state.json")
    engine._scripts.clear()
    engine.calls.clear()
    host.start()
    outcome = host.step()
    assert outcome.ready and engine.of(UPDATE), "aligned only by a reload"
    assert host.at(run, 0 if number > 2 else 1), "before the undo began, the engine is asked again"
    assert engine.held == on_disk(host.local) and not engine.paused


@pytest.mark.parametrize("number", [1, 2, 3])
def test_killed_while_seeding(site: Site, number: int) -> None:
    run, engine = site.run(), SGLang()
    run.publish()
    host = site.host(run, engine)
    host.sync.close()
    assert killed(lambda: started(host), "os.rename", number, ".json")
    recovered(run, host, engine, 1)


def test_killed_in_a_reload_of_the_version_that_the_label_names_already(site: Site) -> None:
    """The engine tells no process, so that each start reloads it; this reload fails half way."""
    run, engine = site.run(), SGLang()
    engine.missing.add("/metrics")
    host = site.host(run, engine)
    assert host.step().ready and engine.label == "0"
    host.sync.close()
    engine.script(UPDATE, engine.half_loaded)
    assert killed(lambda: _step_until(host, "engine.reloaded"), "none", 1)
    assert engine.broken and engine.paused
    engine.calls.clear()
    recovered(run, host, engine, 0)
    assert engine.paths()[:2] == ["/pause_generation", UPDATE], "no resume before the reload"


def test_killed_after_files_were_repaired_under_an_engine_that_maps_them(site: Site) -> None:
    """Its label names the version all along."""
    run, engine = site.run(), Mapping_(site.root / "host")
    host = site.host(run, engine)
    assert host.step().ready and engine.label == "0"
    _flip(host.local)
    host.sync.close()
    assert killed(lambda: _step_until(host, "repair.written", "lock.wanted", rehash=True), "none", 1)
    assert host.at(run, 0) and engine.paused
    engine.seen.clear()
    host.start()
    assert host.step().ready and host.at(run, 0) and not engine.paused
    assert [phase for phase, _ in engine.seen] == ["pause", "reload", "resume"], "no resume before the reload"


def _step_until(host: Host, *failpoints: str, rehash: bool = False) -> None:
    """Dies at the last of the failpoints, once it has passed the others in this order."""
    left = list(failpoints)

    def die(passed: str, _: Path | None) -> None:
        if passed == left[0] and len(left) > 1:
            del left[0]
        elif passed == left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    watch(die)
    host.start()
    if rehash:
        host.sync.rehash()
    else:
        host.step()


def test_a_paused_engine_goes_on_although_the_channel_is_gone(site: Site) -> None:
    run, engine = site.run(), SGLang()
    host = site.host(run, engine)
    host.step()
    run.publish()
    engine.script("/continue_generation", Drop(), Drop(), Drop(), Drop())
    assert not host.step().ready and engine.paused
    run.channel.rename(run.root / "unmounted")
    host.restart()
    with pytest.raises(RetryLater):
        host.step()
    assert not engine.paused and engine.held == run.digest(1)
    assert host.status.ready and host.status.last_error is not None
    assert host.status.last_error.error == "NoChannel"


def test_an_engine_killed_over_before_its_reload_is_not_resumed_on_what_it_has(site: Site) -> None:
    run, engine = site.run(), SGLang()
    host = site.host(run, engine)
    host.step()
    run.publish()
    host.sync.close()
    number = 1
    while killed(lambda: started(host), "socket.connect", number) and not engine.paused:
        number += 1
    assert engine.paused and [e.mark for e in host.state.engines.values()] == [Mark.PAUSING]
    engine.calls.clear()
    recovered(run, host, engine, 1)
    assert engine.paths()[:2] == ["/pause_generation", UPDATE], "no resume before the reload"


def test_after_a_reboot_every_byte_is_read(site: Site) -> None:
    run, engine = site.run(), SGLang()
    run.publish()
    host = site.host(run, engine)
    host.step()
    hashed = host.state.last_full_hash
    host.sync.close()
    _other_boot(host.local)
    recovered(run, host, engine, 1)
    assert host.state.last_full_hash != hashed


def test_after_a_reboot_no_journal_is_replayed_under_engines_that_map_the_files(site: Site) -> None:
    run, engine = site.run(), Mapping_(site.root / "host")
    host = site.host(run, engine)
    host.step()
    run.publish()
    host.sync.close()
    assert killed(lambda: _step_until(host, "patch.begun"), "none", 1)
    _other_boot(host.local)
    passed: list[str] = []
    host.start()
    with watched(lambda name, path: passed.append(name)):
        host.step()
    assert "replay.written" not in passed and host.at(run, 1) and engine.held == run.digest(1)


def test_after_a_reboot_lost_pages_are_repaired(site: Site) -> None:
    run, engine = site.run(), SGLang()
    run.publish()
    host = site.host(run, engine)
    host.step()
    host.sync.close()
    _other_boot(host.local)
    _flip(host.local)
    recovered(run, host, engine, 1)
    moves = [update for update in host.status.updates if update.kind != "reload"]
    assert [(move.kind, move.changes) for move in moves] == [("repair", 1)]


def _other_boot(local: Path) -> None:
    path = local / ".weightcast" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"boot_id": "another"}))


def _flip(local: Path) -> None:
    path = min(local.glob("model-*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    with path.open("r+b") as file:
        file.write(data)


def test_a_rehash_finds_what_no_patch_touches(site: Site) -> None:
    run, engine = site.run(), SGLang()
    host = site.host(run, engine)
    host.step()
    _flip(host.local)
    engine.calls.clear()
    assert host.sync.rehash().ready
    assert host.at(run, 0) and host.status.updates[-2].kind == "repair"
    assert len(engine.of(UPDATE)) == 1, "what it loaded before may have been damaged"


def test_files_are_not_repaired_under_an_engine_that_maps_them(site: Site) -> None:
    run = site.run()
    engine = Mapping_(site.root / "host")
    host = site.host(run, engine)
    host.step()
    _flip(host.local)
    damaged = on_disk(host.local)
    engine.seen.clear()
    engine.pauses = False
    with pytest.raises(EngineFailed):
        host.sync.rehash()
    assert on_disk(host.local) == damaged
    engine.pauses = True
    assert host.retry().ready
    right = run.digest(0)
    assert engine.seen[0] == ("pause", damaged)
    assert engine.seen[-2:] == [("reload", right), ("resume", right)] and not engine.paused


def test_a_file_that_was_replaced_is_never_patched_or_loaded(site: Site) -> None:
    run, engine = site.run(), SGLang()
    host = site.host(run, engine)
    host.step()
    path = min(host.local.glob("model-*.safetensors"))
    shutil.copy(path, host.local / "copy")
    (host.local / "copy").rename(path)
    run.publish()
    with pytest.raises(NeedsReseed, match="replaced"):
        host.step()
    assert engine.held == run.digest(0) and on_disk(host.local) == run.digest(0)
    assert host.step().ready
    assert host.at(run, 1) and engine.held == run.digest(1)


def test_a_file_that_was_replaced_is_not_given_to_an_engine_that_restarts(site: Site) -> None:
    run, engine = site.run(), SGLang()
    host = site.host(run, engine)
    host.step()
    path = min(host.local.glob("model-*.safetensors"))
    shutil.copy(path, host.local / "copy")
    (host.local / "copy").rename(path)
    engine.restart()
    engine.calls.clear()
    with pytest.raises(NeedsReseed, match="replaced"):
        host.step()
    assert engine.paths() == [] and not host.status.ready
    assert host.step().ready and host.at(run, 0)


def test_a_word_that_is_not_the_expected_one_ends_in_a_new_seed(site: Site) -> None:
    run, engine = site.run(), SGLang()
    host = site.host(run, engine)
    host.step()
    run.publish()
    for path in host.local.glob("model-*.safetensors"):
        size = int.from_bytes(path.read_bytes()[:8], "little") + 8
        with path.open("r+b") as file:
            file.seek(size)
            file.write(bytes(path.stat().st_size - size))
    with pytest.raises(Exception, match=r"."):
        host.step()
    assert engine.held == run.digest(0), "no engine loads what was not proven"
    while not host.step().ready:
        pass
    assert host.at(run, 1) and engine.held == run.digest(1)


def test_a_full_disk_changes_nothing(site: Site) -> None:
    run, engine = site.run(), SGLang()
    host = site.host(run, engine)
    host.step()
    before = host.state
    run.publish()
    host.sync.close()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        try:
            started(host)
        except RetryLater:
            os._exit(75)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WEXITSTATUS(status) == 75
    assert on_disk(host.local) == run.digest(0) and host.state == before
    assert (engine.held, engine.paused) == (run.digest(0), False)
    recovered(run, host, engine, 1)


def test_a_full_disk_at_the_end_of_a_background_pass(site: Site) -> None:
    run, engine = site.run(), SGLang()
    host = site.host(run, engine)
    host.step()
    host.sync.close()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = _scrubbed_on_a_full_disk(host)
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WEXITSTATUS(status) == 75
    recovered(run, host, engine, 0)


def _scrubbed_on_a_full_disk(host: Host) -> int:
    """Exit code: 75 when status tells of it, and the next step finds the host ready."""
    clock = Clock()
    scrub = Scrub(1 << 20, clock=clock)
    host.start()
    host.step()
    clock.at += 10
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        host.sync.verify_some(scrub)
    except RetryLater:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        told = host.status.last_error is not None
        return 75 if told and host.step().ready and host.status.last_error is None else 2
    return 3


def test_rot_that_the_background_verify_finds_is_repaired_and_reloaded(site: Site) -> None:
    run, engine = site.run(), SGLang()
    run.publish()
    host = site.host(run, engine)
    host.step()
    engine.calls.clear()
    _flip(host.local)
    clock = Clock()
    scrub = Scrub(1 << 20, clock=clock)
    clock.at += 10
    host.sync.verify_some(scrub)
    assert host.at(run, 1) and engine.held == run.digest(1)
    assert len(engine.of(UPDATE)) == 1, "what it loaded before may have been damaged"
    assert [update.kind for update in host.status.updates][-2:] == ["repair", "reload"]
    found = host.status.verify
    assert found is not None and found.faults == 1 and "no longer that of version 1" in found.last_fault
    assert host.status.ready

"""The publisher's daemon as a process, over real HTTP."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemonkit import (
    INDEX,
    Daemon,
    Places,
    base_tensors,
    changed,
    files_of,
    local_bytes,
    plain,
    rename_in,
    snapshot,
    wait_until,
    write,
)

from weightcast.publisher.channel_init import init_channel

Starting = Callable[..., Daemon]


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places.made(tmp_path)


@pytest.fixture
def started(places: Places) -> Iterator[Starting]:
    daemons: list[Daemon] = []

    def start(*flags: str) -> Daemon:
        daemon = Daemon.start(places, *flags)
        daemons.append(daemon)
        return daemon.ready()

    yield start
    for daemon in daemons:
        daemon.kill()


def test_publishes_what_comes_in_and_ends_on_sigterm(places: Places, started: Starting) -> None:
    rename_in(places.watch / "step_7", changed(base_tensors(), 7))
    # A rename is published at once: neither poll nor settling would come in time.
    daemon = started("--poll-seconds", "600", "--settle-seconds", "600")
    write(places.watch / ".step_1.unfinished", changed(base_tensors(), 1)).rename(places.watch / "step_1")
    status = daemon.wait_for_version(1)
    assert status["ready"] and status["publications"][0]["step"] == 1 and status["epoch"] == 1
    assert status["publications"][0]["delta_bytes"] > 0 and status["publications"][0]["full_bytes"] > 0
    assert status["inbox"]["refused"] == [] and status["last_error"] is None and status["hosts"] == []
    assert local_bytes(places.local, base_tensors()) == plain(changed(base_tensors(), 1))
    assert 'weightcast_publications_total{outcome="done"} 1.0' in daemon.get("/metrics").text
    assert "/v1/publish" in daemon.get("/openapi.json").json()["paths"]
    assert daemon.stop() == 0
    assert not (places.root / "port").exists()


def test_slow_writing_killed_and_started_again(places: Places, started: Starting) -> None:
    daemon = started()
    new = changed(base_tensors(), 1)
    directory = places.watch / "step_1"
    directory.mkdir()
    for name, data in files_of(new, 3).items():
        steps = daemon.status()["loop"]["steps"]
        (directory / name).write_bytes(data[: len(data) // 2])
        wait_until(lambda before=steps: daemon.status()["loop"]["steps"] > before + 1)
        assert places.latest() == ""
        (directory / name).write_bytes(data)
    assert daemon.wait_for_version(1)["publications"][0]["source"] == "step_1"
    assert local_bytes(places.local, new) == plain(new)
    daemon.kill()
    rename_in(places.watch / "step_2", changed(new, 2))
    again = started()
    assert again.wait_for_version(2)["epoch"] == 2
    assert [each["version"] for each in again.status()["publications"]] == [2]


def test_killed_around_the_pointer_no_checkpoint_is_lost_or_doubled(
    places: Places, started: Starting
) -> None:
    hook = places.root / "hook"
    order = places.root / "kill_at"
    hook.write_text(
        f'#!/bin/sh\n[ "$(cat {order})" = "$WEIGHTCAST_PHASE" ] || exit 0\nrm {order}\nkill -9 $PPID\n'
    )
    hook.chmod(0o755)
    tensors = base_tensors()
    daemon = started("--post-write", str(hook))
    for step, phase in enumerate(("version", "pointer"), start=1):
        order.write_text(phase)
        tensors = changed(tensors, step)
        rename_in(places.watch / f"step_{step}", tensors)
        wait_until(lambda one=daemon: one.process.poll() is not None)
        assert not order.exists()
        daemon = started("--post-write", str(hook))
        daemon.wait_for_version(step)
        wait_until(lambda one=daemon: one.status()["loop"]["steps"] > 5)
        assert places.latest() == f"{step:06}"
        assert local_bytes(places.local, tensors) == plain(tensors)


def test_publications_over_http(places: Places, started: Starting) -> None:
    daemon = started()
    inside = str(write(places.watch / ".kept", changed(base_tensors(), 1)))
    body = {"checkpoint": inside, "step": 4}
    first = daemon.post("/v1/publish", body, **{"Idempotency-Key": "one"})
    assert first.status_code == 202
    url = f"/v1/publications/{first.json()['id']}"
    wait_until(lambda: daemon.get(url).json()["state"] == "done")
    assert daemon.get(url).json()["report"]["version"] == 1
    assert daemon.post("/v1/publish", {**body, "key": "one"}).json()["id"] == first.json()["id"]
    other = daemon.post("/v1/publish", {**body, "step": 5, "key": "one"})
    assert other.status_code == 409 and "key" in other.json()["message"]
    assert daemon.get("/v1/publications/0000").status_code == 404

    outside = write(places.root / "outside", base_tensors())
    (places.watch / ".link").symlink_to(outside)
    for path in (
        str(outside),
        str(places.watch / ".link"),
        str(places.watch),
        f"{places.watch}/../outside",
        "watch/.kept",
        "/nowhere/at/all",
        "/etc/passwd",
    ):
        refused = daemon.post("/v1/publish", {"checkpoint": path})
        assert refused.status_code == 422 and refused.json()["error"] == "Refused", path
    for bad in ({}, {"checkpoint": 3}, {"checkpoint": inside, "step": -1}, {"checkpoint": inside, "more": 1}):
        assert daemon.post("/v1/publish", bad).status_code == 422
    assert places.latest() == "000001"
    shutil.rmtree(inside)
    assert daemon.post("/v1/publish", {**body, "key": "one"}).json() == daemon.get(url).json()


def test_the_queue_is_bounded_and_survives_a_restart(places: Places, started: Starting) -> None:
    hook = places.root / "hook"
    hook.write_text("#!/bin/sh\nexit 75\n")
    hook.chmod(0o755)
    daemon = started("--post-write", str(hook), "--allow", str(places.root))
    inside = str(write(places.root / "kept", changed(base_tensors(), 1)))
    answers = [daemon.post("/v1/publish", {"checkpoint": inside, "key": str(n)}) for n in range(17)]
    assert [answer.status_code for answer in answers] == [202] * 16 + [429]
    assert answers[-1].headers["retry-after"] and len(daemon.status()["queue"]) == 16
    daemon.kill()
    again = started("--allow", str(places.root))
    wait_until(lambda: again.status()["queue"] == [])
    ended = [again.get(f"/v1/publications/{answer.json()['id']}").json() for answer in answers[:16]]
    assert [each["report"]["version"] for each in ended] == list(range(1, 17))
    assert again.post("/v1/publish", {"checkpoint": inside, "key": "3"}).json() == ended[3]


def test_bad_checkpoints_leave_the_channel_as_it_is(places: Places, started: Starting) -> None:
    daemon = started()
    before = snapshot(places.channel)
    bad = base_tensors()
    bad["layer.9"] = bad.pop("layer.0.up")
    rename_in(places.watch / "step_1", bad)
    [refused] = wait_until(lambda: daemon.status()["inbox"]["refused"])
    assert "layer.9" in refused["error"]["message"] and "layer.0.up" in refused["error"]["message"]
    incomplete = write(places.watch / ".step_2", changed(base_tensors(), 2))
    (incomplete / "model-00002-of-00002.safetensors").unlink()
    incomplete.rename(places.watch / "step_2")
    wait_until(lambda: len(daemon.status()["inbox"]["refused"]) == 2)
    assert daemon.status()["ready"] and daemon.status()["last_error"]["at"] > 0
    assert snapshot(places.channel) == before
    good = files_of(changed(base_tensors(), 3))
    for name in sorted(good, key=lambda name: name == INDEX):
        (places.watch / "step_2" / name).write_bytes(good[name])
    assert daemon.wait_for_version(1)["publications"][0]["source"] == "step_2"


def test_a_wrong_base_ends_the_daemon(places: Places) -> None:
    init_channel(places.channel, places.base)
    write(places.base, changed(base_tensors(), 1))
    daemon = Daemon.start(places)
    assert daemon.process.wait(30) == 3
    daemon.kill()
    assert "another base" in daemon.log.read_text() and "remedy" in daemon.log.read_text()

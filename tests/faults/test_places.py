"""File systems that lack what weightcast needs, under doctor, the first start, and daemons that run."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from failing_calls import failing
from faultkit import Faulty, Place, until
from hosts import Run, Site
from in_process import Command

from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.reports import read_reports

FLAT = {"path": "*", "action": "flat"}
"""as bucket mounts are, which rename files alone"""


@pytest.fixture
def run(site: Site) -> Run:
    run = site.run()
    run.close()
    return run


@pytest.fixture
def bucket(place: Place, run: Run) -> Faulty:
    """The run's channel, seen through a mount that cannot rename directories."""
    faulty = place.faulty(run.channel, place.root / "mounted")
    faulty.rules(FLAT)
    return faulty


def test_directories_that_cannot_be_renamed(place: Place, run: Run, bucket: Faulty) -> None:
    places = ("--channel", bucket.mount, "--local", place.root / "own")
    code, told = place.verb("doctor", *places, "--role", "publisher", "--json")
    [found] = [one for one in json.loads(told.splitlines()[-1])["findings"] if one["level"] == "failure"]
    assert code == 3 and found["check"] == "directory rename" and "Directory not empty" in found["says"]
    before = sorted(run.channel.rglob("*"))
    for verb in (("publish", run.base_dir), ("publish", run.base_dir), ("publisher", "run", "--port", "0")):
        code, told = place.verb(*verb, *places, "--base", run.base_dir)
        assert code == 3 and "directory rename: Directory not empty" in told, told
        assert found["remedy"] in told and "[Errno" not in told and "Traceback" not in told
    assert sorted(run.channel.rglob("*")) == before and not (place.root / "own").exists()


def test_no_channel_is_made_there(place: Place, run: Run) -> None:
    (place.root / "bucket").mkdir()
    faulty = place.faulty(place.root / "bucket", place.root / "mounted")
    faulty.rules(FLAT)
    code, told = place.verb("channel", "init", "--channel", faulty.mount / "new", "--base", run.base_dir)
    assert code == 3 and "directory rename" in told and "remedy: " in told
    assert list((place.root / "bucket").iterdir()) == []


def test_a_mount_that_becomes_one_under_a_publisher(place: Place, run: Run, bucket: Faulty) -> None:
    bucket.rules()
    inbox = place.root / "inbox"
    inbox.mkdir()
    publisher = place.daemon(
        *("publisher", "run", "--channel", bucket.mount, "--base", run.base_dir, "--threads", "1"),
        *("--local", place.root / "own", "--watch", inbox, "--marker", "complete", "--poll-seconds", "0.05"),
    )
    until(lambda: publisher.status["ready"], f"ready: {publisher.words()}")
    bucket.rules(FLAT)
    new = run.base.changed(7).write(place.root / "unfinished")
    (new / "complete").touch()
    new.rename(inbox / "step_1")
    until(lambda: publisher.told("Directory not empty"), f"told: {publisher.words()}")
    error = publisher.status["last_error"]
    assert "doctor" in error["remedy"] and "[Errno" not in publisher.words(), (error, publisher.words())
    bucket.rules()
    until(lambda: publisher.wake() or publisher.status["version"] == 1, f"published: {publisher.words()}")


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_local_disk_without_locks(run: Run, site: Site, weightcast: Command, code: int) -> None:
    local = site.root / "host"
    places = ("--channel", run.channel, "--local", local, "--base", run.base_dir)
    for verb in (("sync",), ("subscriber", "run", "--port", "0"), ("publish", run.base_dir)):
        with failing("flock", site.root, code):
            ended, _, told = weightcast(*verb, *places)
        assert ended == 3 and "lock: flock failed: " in told and "put --local on a local disk" in told
    with failing("flock", site.root, code):
        ended, told, _ = weightcast("doctor", "--local", local, "--json")
    assert ended == 3 and "flock failed" in told
    assert not local.exists() and read_reports(open_store(run.channel)) == []


def test_a_watched_directory_that_cannot_be_emptied(
    run: Run, site: Site, weightcast: Command, tmp_path: Path
) -> None:
    inbox = site.root / "inbox"
    inbox.mkdir()
    places = ("--channel", run.channel, "--local", site.root / "own", "--base", run.base_dir)
    with failing("rename", inbox, errno.EPERM):
        ended, _, told = weightcast("publisher", "run", "--port", "0", *places, "--watch", inbox, "--consume")
    assert ended == 3 and f"--watch {inbox}: directory rename" in told and "remedy: " in told
    assert not (site.root / "own").exists()

"""What a subscriber cannot start with ends it at once, with an exit code, and leaves no host in the fleet."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hosts import Run, Site, Weights
from in_process import Command

from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.reports import read_reports
from weightcast.shared.channel.signing import PrivateKey
from weightcast.shared.checkpoint.local_checkpoint import LocalPaths, own
from weightcast.shared.files.paths import exists

Start = Callable[..., tuple[int, str]]


@pytest.fixture
def run(site: Site) -> Run:
    run = site.run()
    run.publish()
    run.close()
    return run


@pytest.fixture
def start(site: Site, run: Run, weightcast: Command) -> Start:
    """A daemon of which nothing but its end is expected: exit code, and what it said."""

    def call(*more: object, **places: Path | None) -> tuple[int, str]:
        where = {"channel": run.channel, "local": site.root / "host", "base": run.base_dir, **places}
        flags = [part for name, path in where.items() if path for part in (f"--{name}", path)]
        words = ("subscriber", "run", *flags, "--port", "0", "--poll-seconds", "0.1", *more)
        code, _, text = weightcast(*words)
        assert "Traceback" not in text and "remedy: " in text
        return code, text

    return call


def quiet(site: Site, run: Run) -> bool:
    """Nothing was made here, and nobody was told of this host."""
    return not exists(site.root / "host") and read_reports(open_store(run.channel)) == []


def test_another_s_directory(site: Site, run: Run, start: Start) -> None:
    local = site.root / "foreign"
    local.mkdir()
    (local / "notes.txt").touch()
    code, text = start(local=local)
    assert code == 3 and "not a weightcast local checkpoint" in text
    assert os.listdir(local) == ["notes.txt"] and quiet(site, run)


def test_no_base_where_one_is_needed(site: Site, run: Run, start: Start) -> None:
    code, text = start(base=None)
    assert code == 3 and "remedy: give --base" in text
    assert read_reports(open_store(run.channel)) == []


def test_a_base_that_is_not_there_or_is_no_checkpoint(site: Site, run: Run, start: Start) -> None:
    code, text = start(base=site.root / "nowhere")
    assert code == 3 and "nowhere is missing" in text
    (site.root / "damaged").mkdir()
    (site.root / "damaged" / "model.safetensors").write_bytes(b"no header")
    code, text = start(base=site.root / "damaged")
    assert code == 3 and "model.safetensors" in text
    assert quiet(site, run)


def test_the_base_of_another_run(site: Site, run: Run, start: Start) -> None:
    other = Run(site.root / "other", site.stack, base=Weights.make(9))
    other.close()
    code, text = start(base=other.base_dir)
    assert code == 3 and "give the checkpoint that the channel was made from" in text
    assert read_reports(open_store(run.channel)) == []


def test_a_channel_that_is_none(site: Site, run: Run, start: Start) -> None:
    (site.root / "file").touch()
    (site.root / "junk").mkdir()
    (site.root / "junk" / "notes.txt").touch()
    for channel in ("file", "junk"):
        code, text = start(channel=site.root / channel)
        assert code == 3 and str(site.root / channel) in text
    assert quiet(site, run)


def test_a_key_that_did_not_sign(site: Site, run: Run, start: Start) -> None:
    code, text = start("--trusted-key", str(PrivateKey.generate().public))
    assert code == 3 and "base.json" in text
    assert read_reports(open_store(run.channel)) == []


def test_a_local_checkpoint_of_another_run(site: Site, run: Run, start: Start, weightcast: Command) -> None:
    other = Run(site.root / "other", site.stack, base=Weights.make(9))
    other.close()
    local = site.root / "host"
    places = ("--channel", other.channel, "--base", other.base_dir, "--local", local)
    assert weightcast("sync", *places)[0] == 0
    state = LocalPaths(local).state.read_bytes()
    code, text = start()
    assert code == 3 and "belongs to run" in text
    assert read_reports(open_store(run.channel)) == [] and LocalPaths(local).state.read_bytes() == state


def test_a_local_checkpoint_in_use(site: Site, run: Run, start: Start) -> None:
    lock = own(LocalPaths(site.root / "host"))
    code, text = start()
    assert code == 75 and "already has a writer (this process)" in text
    assert read_reports(open_store(run.channel)) == []
    lock.release()


def test_a_local_directory_that_may_not_be_written(site: Site, run: Run, start: Start) -> None:
    """As a file in its way, for tests that run as root."""
    (site.root / "file").touch()
    code, text = start(local=site.root / "file" / "host")
    assert code == 3 and "Not a directory" in text and "[Errno" not in text
    assert quiet(site, run)

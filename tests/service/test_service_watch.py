from __future__ import annotations

import io
from pathlib import Path

import pytest
from waiting import wait_until

from weightcast.shared.daemon.loop import Wakeup, Watcher


def settle(wakeup: Wakeup) -> None:
    while wakeup.take(0.3):
        pass


def test_a_write_and_a_replacing_rename_wake(tmp_path: Path) -> None:
    wakeup = Wakeup()
    with Watcher(tmp_path, wakeup):
        (tmp_path / "latest.tmp").write_bytes(b"000001")
        assert wakeup.take(20)
        settle(wakeup)
        (tmp_path / "latest.tmp").replace(tmp_path / "latest")
        assert wakeup.take(20)


def test_reading_does_not_wake(tmp_path: Path) -> None:
    wakeup = Wakeup()
    (tmp_path / "latest").write_bytes(b"000001")
    with Watcher(tmp_path, wakeup):
        settle(wakeup)
        assert (tmp_path / "latest").read_bytes() == b"000001"
        assert [path.name for path in tmp_path.iterdir()] == ["latest"]
        assert not wakeup.take(0.5)


def test_a_directory_is_watched_once_it_is_made(tmp_path: Path, quiet: io.StringIO) -> None:
    wakeup, folder = Wakeup(), tmp_path / "missing"
    with Watcher(folder, wakeup):
        assert not wakeup.take(0)
        folder.mkdir()

        def woken() -> bool:
            (folder / "latest").write_bytes(b"000001")
            return wakeup.take(0.1)

        wait_until(woken)
    assert "cannot be watched" not in quiet.getvalue()


def test_a_directory_that_cannot_be_watched_is_logged_once(
    tmp_path: Path, quiet: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "no watches left")

    monkeypatch.setattr("watchdog.observers.api.BaseObserver.schedule", refuse)
    with Watcher(tmp_path, Wakeup()):
        pass
    assert quiet.getvalue().count("cannot be watched") == 1


def test_a_directory_that_vanishes_does_no_harm(tmp_path: Path) -> None:
    wakeup = Wakeup()
    folder = tmp_path / "channel"
    folder.mkdir()
    with Watcher(folder, wakeup):
        folder.rmdir()
        wakeup.take(0.2)
    assert not folder.exists()

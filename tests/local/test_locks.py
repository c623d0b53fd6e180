from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightcast.shared.base.errors import RetryLater
from weightcast.shared.checkpoint.local_checkpoint import LocalPaths, own
from weightcast.shared.checkpoint.state.locks import FileLock, holder, owner_text

CHILD = Path(__file__).with_name("lock_child.py")
FORKING = Path(__file__).with_name("forking_child.py")


@contextlib.contextmanager
def held_elsewhere(path: Path, kind: str = "exclusive") -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(CHILD), str(path), kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "held\n"
        try:
            yield child
        finally:
            child.kill()


def test_a_lock_held_by_another_process_names_it(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "owner")
    with held_elsewhere(lock.path) as child, pytest.raises(RetryLater, match=f"pid {child.pid} on"):
        lock.acquire()
    assert not lock.held


def test_a_dead_holder_holds_nothing(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "owner")
    with held_elsewhere(lock.path) as child:
        child.kill()
        child.wait()
        lock.acquire(seconds=5.0, text=owner_text())
    assert lock.held and holder(lock.path) == owner_text()
    lock.release()


def test_readers_share_and_writers_do_not(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "patch")
    with held_elsewhere(lock.path, "shared"):
        with lock.holding(shared=True):
            assert lock.held
        with pytest.raises(RetryLater), lock.holding(seconds=0.05):
            pass
    with lock.holding(seconds=5.0), pytest.raises(RetryLater):
        FileLock(lock.path).acquire(shared=True)


def test_waiting_ends_when_the_holder_does(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "patch")
    with held_elsewhere(lock.path) as child:
        assert child.stdin is not None
        child.stdin.close()
        lock.acquire(seconds=20.0)
    lock.release()
    assert not lock.held


@contextlib.contextmanager
def forked(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A holder with a fork that outlives it."""
    command = [sys.executable, str(FORKING), str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holding:
        assert holding.stdout is not None
        fork = int(holding.stdout.readline())
        try:
            yield holding
        finally:
            os.kill(fork, signal.SIGKILL)
            holding.kill()


@pytest.mark.parametrize("end", ["released", "killed"])
def test_a_fork_of_the_holder_neither_holds_nor_releases(tmp_path: Path, end: str) -> None:
    """As trainers have them: workers of a data loader."""
    lock = FileLock(tmp_path / "owner")
    with forked(lock.path) as holding:
        with pytest.raises(RetryLater, match=f"pid {holding.pid} on"):
            lock.acquire()
        if end == "released":
            assert holding.stdin is not None and holding.stdout is not None
            holding.stdin.write("\n")
            holding.stdin.flush()
            assert holding.stdout.readline() == "released\n"
        else:
            holding.kill()
            holding.wait()
        lock.acquire()
        lock.release()


def test_the_lock_file_stays(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "patch")
    with lock.holding():
        inode = lock.path.stat().st_ino
    with lock.holding():
        assert lock.path.stat().st_ino == inode


def test_a_link_in_the_lock_s_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "patch").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        FileLock(tmp_path / "patch").acquire()
    assert not (tmp_path / "elsewhere").exists()


def test_a_local_checkpoint_has_one_writer(tmp_path: Path) -> None:
    paths = LocalPaths(tmp_path / "local")
    lock = own(paths)
    try:
        with pytest.raises(RetryLater, match="already has a writer"):
            own(paths)
    finally:
        lock.release()
    own(paths).release()

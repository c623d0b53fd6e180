from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from failing_calls import failing

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


def test_a_lock_is_released_by_another_thread(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "owner")
    taking = threading.Thread(target=lock.acquire)
    taking.start()
    taking.join()
    assert lock.held
    with pytest.raises(RetryLater):
        FileLock(lock.path).acquire()
    lock.release()
    assert not lock.held
    FileLock(lock.path).acquire()


@pytest.mark.parametrize("shared", [False, True])
def test_a_lock_is_not_reentrant(tmp_path: Path, shared: bool) -> None:
    lock = FileLock(tmp_path / "owner")
    with lock.holding(shared=shared), pytest.raises(RetryLater):
        lock.acquire(shared=shared)
    assert not lock.held
    FileLock(lock.path).acquire()


def test_a_shared_holder_takes_its_text_away(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "patch")
    lock.acquire(shared=True, text=owner_text())
    assert holder(lock.path) == owner_text()
    lock.release()
    assert holder(lock.path) == ""


class Stopped(Exception):
    pass


def stop(seconds: float) -> None:
    raise Stopped


@pytest.mark.parametrize("shared", [False, True])
def test_a_stop_ends_the_wait(tmp_path: Path, shared: bool) -> None:
    lock = FileLock(tmp_path / "patch")
    with held_elsewhere(lock.path), pytest.raises(Stopped):
        lock.acquire(shared=shared, seconds=60.0, wait=stop)
    assert not lock.held


@pytest.mark.parametrize("shared", [False, True])
def test_an_interrupt_right_after_the_flock_leaves_nothing_locked(
    tmp_path: Path, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str, path: Path | None = None) -> None:
        if name == "lock.taken":
            raise KeyboardInterrupt

    lock = FileLock(tmp_path / "patch")
    with monkeypatch.context() as patched:
        patched.setattr("weightcast.shared.checkpoint.state.locks.failpoint", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lock.acquire(shared=shared)
    assert not lock.held
    lock.acquire()
    lock.release()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_an_error_that_names_the_call(
    tmp_path: Path, code: int, shared: bool
) -> None:
    lock = FileLock(tmp_path / "patch")
    with failing("flock", tmp_path, code), pytest.raises(OSError, match=os.strerror(code)) as caught:
        lock.acquire(shared=shared, seconds=5.0)
    assert caught.value.errno == code and caught.value.filename == str(lock.path)
    assert caught.value.__notes__ == ["flock"] and not lock.held
    lock.acquire()
    lock.release()


def test_a_missing_directory_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FileLock(tmp_path / "none" / "patch").acquire()
    assert not (tmp_path / "none").exists()


def test_a_reader_needs_no_right_to_write(tmp_path: Path) -> None:
    path = tmp_path / "patch"
    path.write_bytes(b"")
    real = os.open

    def open_(name: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "denied", name)
        return real(name, flags, mode)

    with (
        mock.patch.object(os, "open", open_),
        FileLock(path).holding(shared=True),
        pytest.raises(PermissionError),
    ):
        FileLock(path).acquire()


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

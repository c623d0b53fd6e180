from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from weightcast.shared.base import failpoints
from weightcast.shared.base.errors import DamagedFile, RetryLater
from weightcast.shared.files import durable


def test_replace_puts_the_bytes_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "latest"
    durable.replace(path, b"000001")
    durable.replace(path, b"000002")
    assert path.read_bytes() == b"000002"
    assert os.listdir(tmp_path) == ["latest"]


def test_files_are_readable_by_other_users(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        durable.replace(tmp_path / "a", b"")
        durable.create(tmp_path / "b", b"")
    finally:
        os.umask(umask)
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "ab"} == {0o644}


def test_replace_that_fails_keeps_the_old_content(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        durable.replace(tmp_path / "taken", b"x")
    assert os.listdir(tmp_path) == ["taken"]


def test_an_error_of_a_write_names_the_file(tmp_path: Path) -> None:
    def fill(name: str, where: Path | None) -> None:
        if name == "file.written":
            raise OSError(errno.ENOSPC, "by design")

    failpoints.watch(fill)
    try:
        with pytest.raises(OSError, match="by design") as caught:
            durable.replace(tmp_path / "latest", b"000001")
    finally:
        failpoints.watch(None)
    assert caught.value.filename == str(tmp_path / "latest") and list(tmp_path.iterdir()) == []


def test_create_is_exclusive(tmp_path: Path) -> None:
    path = tmp_path / "index"
    durable.create(path, b"first")
    with pytest.raises(FileExistsError):
        durable.create(path, b"second")
    assert path.read_bytes() == b"first"
    assert path.stat().st_nlink == 1
    assert os.listdir(tmp_path) == ["index"]


def test_create_does_not_write_through_a_dangling_link(tmp_path: Path) -> None:
    (tmp_path / "index").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        durable.create(tmp_path / "index", b"x")
    assert not (tmp_path / "elsewhere").exists()


def test_of_many_processes_that_create_one_wins(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from weightcast.shared.files.durable import create\n"
        "sys.stdin.read()\n"
        "try: create(Path(sys.argv[1]), sys.argv[2].encode()); print(sys.argv[2])\n"
        "except FileExistsError: pass\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "index")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    runs = [subprocess.Popen([*command, str(n)], **pipes) for n in range(4)]  # type: ignore[call-overload]
    winners = "".join(run.communicate("")[0] for run in runs).split()
    assert winners == [(tmp_path / "index").read_text()]


def test_what_a_kill_leaves_is_recognised(tmp_path: Path) -> None:
    script = (
        "import os, signal; from pathlib import Path; from weightcast.shared.files import durable\n"
        "with durable._temporary(Path('.'), b'x'): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=False)
    (left,) = os.listdir(tmp_path)
    assert durable.is_temporary(left)
    assert not durable.is_temporary("model.safetensors")


@pytest.mark.parametrize("size", [0, 1, 100, 3_000_000])
def test_read_file_reads_all_of_it(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "f").write_bytes(data)
    assert durable.read_file(tmp_path / "f", size) == data


def test_read_file_refuses_more_than_the_limit(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abcd")
    with pytest.raises(DamagedFile, match="exceeds the 3-byte"):
        durable.read_file(tmp_path / "f", 3)


def test_read_file_takes_regular_files_only(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("real")
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo", "."):
        with pytest.raises(DamagedFile, match="not a regular file"):
            durable.read_file(tmp_path / name, 10)
    with pytest.raises(FileNotFoundError):
        durable.read_file(tmp_path / "absent", 10)
    assert durable.read_file(tmp_path / "link", 10, follow_links=True) == b"abc"


def test_a_file_of_another_size_than_it_says_is_read_again_and_refused() -> None:
    """As on a network file system with stale attributes; /proc says 0 bytes of all its files."""
    with pytest.raises(RetryLater, match="changes while it is read"):
        durable.read_file(Path("/proc/self/stat"), 1 << 20)

"""What is asked of a file system before anything is made on it, and what a probe leaves behind."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from failing_calls import failing

from weightcast.shared.base.errors import Refused
from weightcast.shared.checkpoint.local_checkpoint import LocalPaths, ensure_room, own
from weightcast.shared.files.disk_errors import DiskError, disk_remedy
from weightcast.shared.files.probes import CHANNEL_NEEDS, LOCAL_NEEDS, Need, require, scratch_in

REFUSED_CALLS = [
    ("rename", errno.ENOSYS, "rename", CHANNEL_NEEDS),
    ("rename", errno.ENOTEMPTY, "rename", LOCAL_NEEDS),
    ("link", errno.EPERM, "exclusive create: the file system has no hard links", CHANNEL_NEEDS),
    ("link", errno.EOPNOTSUPP, "exclusive create: the file system has no hard links", CHANNEL_NEEDS),
    ("fsync", errno.EINVAL, "rename: fsync failed", LOCAL_NEEDS),
    ("flock", errno.ENOLCK, "lock: flock failed: No locks available", LOCAL_NEEDS),
    ("flock", errno.ENOSYS, "lock: flock failed: Function not implemented", LOCAL_NEEDS),
    ("mmap", errno.ENODEV, "mmap: mmap failed: No such device", LOCAL_NEEDS),
    ("posix_fallocate", errno.EOPNOTSUPP, "allocation: fallocate failed", LOCAL_NEEDS),
    ("truncate", errno.EINVAL, "mmap: mmap failed", LOCAL_NEEDS),
    ("listdir", errno.ENOSYS, "Function not implemented", CHANNEL_NEEDS),
]


@pytest.mark.parametrize(("call", "code", "said", "needs"), REFUSED_CALLS)
def test_an_operation_that_is_lacking_is_named(
    tmp_path: Path, call: str, code: int, said: str, needs: tuple[Need, ...]
) -> None:
    with failing(call, tmp_path, code), pytest.raises(Refused) as refused:
        require("--local", tmp_path / "new", needs)
    assert said in refused.value.message and refused.value.remedy
    assert refused.value.exit_code == 3
    # what cannot be listed cannot be removed
    assert call == "listdir" or not (tmp_path / "new").exists()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ESTALE])
def test_what_may_pass_is_no_refusal(tmp_path: Path, code: int) -> None:
    with failing("fsync", tmp_path, code), pytest.raises(DiskError) as later:
        require("--channel", tmp_path, CHANNEL_NEEDS)
    assert later.value.exit_code == 75 and str(tmp_path) in later.value.message
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    with failing("mkdir", tmp_path, errno.EACCES), pytest.raises(DiskError) as denied:
        require("--local", tmp_path / "host", LOCAL_NEEDS)
    assert denied.value.exit_code == 3 and f"user {os.geteuid()}" in denied.value.remedy


@pytest.mark.parametrize(("call", "code"), [("rename", errno.EACCES), ("open", errno.EROFS)])
def test_missing_rights_are_not_blamed_on_the_file_system_s_kind(
    tmp_path: Path, call: str, code: int
) -> None:
    with failing(call, tmp_path, code), pytest.raises(DiskError) as denied:
        require("--channel", tmp_path, CHANNEL_NEEDS)
    assert denied.value.exit_code == 3 and denied.value.remedy == disk_remedy(OSError(code, ""))


def test_files_that_cannot_be_removed_again(tmp_path: Path) -> None:
    with failing("rmdir", tmp_path, errno.EPERM), pytest.raises(Refused, match="cannot be removed again"):
        require("--channel", tmp_path, CHANNEL_NEEDS)


def test_what_a_kill_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    with scratch_in(tmp_path) as scratch:
        (scratch.directory / "0").mkdir()
        (scratch.directory / "0" / "latest").touch()
        old, young = tmp_path / scratch.directory.name[:-1], tmp_path / f"{scratch.directory.name[:-1]}_"
        shutil.copytree(scratch.directory, old)
        shutil.copytree(scratch.directory, young)
    os.utime(old, (0, 0))
    require("--local", tmp_path, LOCAL_NEEDS)
    assert os.listdir(tmp_path) == [young.name]
    own(LocalPaths(tmp_path)).release()


def test_a_new_disk_is_no_foreign_directory(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    own(LocalPaths(tmp_path)).release()
    assert (tmp_path / ".weightcast").is_dir()


def test_a_seeded_local_checkpoint_is_not_probed_again(tmp_path: Path) -> None:
    paths = LocalPaths(tmp_path)
    own(paths).release()
    paths.state.touch()
    with failing("rename", tmp_path, errno.ENOSYS) as failure:
        ensure_room(paths)
    assert failure.met == 0

"""`weightcast keygen`, through the command's own entry."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from disk_errors import Disk, watched
from in_process import Command

from weightcast.shared.channel.signing import load_private_key, trusted_keys


def test_a_key_for_the_publisher_and_one_for_the_hosts(tmp_path: Path, weightcast: Command) -> None:
    code, out, err = weightcast("keygen", "--out", tmp_path / "run.key")
    assert code == 0 and out.startswith("ed25519:") and out.count("\n") == 1
    assert f"private key in {tmp_path / 'run.key'}, public key in" in err
    private, public = tmp_path / "run.key", tmp_path / "run.key.pub"
    assert private.stat().st_mode & 0o777 == 0o600 and public.read_text() == out
    assert trusted_keys(public) == trusted_keys(out.strip()) == (load_private_key(private).public,)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.key", "run.key.pub"]


def test_a_directory_gets_both_files(tmp_path: Path, weightcast: Command) -> None:
    code, out, _ = weightcast("keygen", "--out", tmp_path, "--json")
    facts = json.loads(out)
    key = load_private_key(Path(facts["sign_key"]))
    assert code == 0 and facts["key_id"] == key.public.id and facts["public_key"] == str(key.public)
    assert Path(facts["trusted_key"]).read_text() == f"{key.public}\n"
    assert "PRIVATE" not in out


def test_the_public_key_signs_nothing(tmp_path: Path, weightcast: Command) -> None:
    assert weightcast("keygen", "--out", tmp_path / "k.key")[0] == 0
    code, _, err = weightcast("channel", "sign", "--channel", tmp_path, "--sign-key", tmp_path / "k.key.pub")
    assert code == 3 and "k.key.pub is the public key" in err and "without .pub" in err
    code, _, err = weightcast("channel", "log", "--channel", tmp_path, "--trusted-key", tmp_path / "k.key")
    assert code == 3 and "k.key is the private key" in err and f"remedy: give {tmp_path / 'k.key.pub'}" in err


@pytest.mark.parametrize("present", ["run.key", "run.key.pub"])
def test_nothing_is_overwritten(tmp_path: Path, weightcast: Command, present: str) -> None:
    (tmp_path / present).write_text("precious")
    code, out, err = weightcast("keygen", "--out", tmp_path / "run.key")
    assert code == 3 and out == "" and "is there already" in err and "remedy: choose another --out" in err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(present, "precious")]


def test_a_directory_that_is_not_there(tmp_path: Path, weightcast: Command) -> None:
    code, _, err = weightcast("keygen", "--out", tmp_path / "nowhere" / "run.key")
    assert code == 3 and f"mkdir -p {tmp_path / 'nowhere'}" in err
    code, _, err = weightcast("keygen", "--out", f"{tmp_path}/new/")
    assert code == 3 and f"mkdir -p {tmp_path / 'new'}" in err and list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_no_half_of_a_pair(tmp_path: Path, weightcast: Command) -> None:
    """The next try is not to find a private key without its public one in its way."""
    disk = Disk(2, 0, ("file.written", "file.synced", "file.linked", "directory."), errno.ENOSPC)
    with watched(disk):
        code, out, err = weightcast("keygen", "--out", tmp_path / "run.key")
    assert disk.failed_at == ["file.begun run.key.pub"]
    assert code == 3 and out == "" and "check the directory and its space" in err
    assert list(tmp_path.iterdir()) == []
    assert weightcast("keygen", "--out", tmp_path / "run.key")[0] == 0


def test_a_disk_that_fails_last_leaves_no_half_of_a_pair(tmp_path: Path, weightcast: Command) -> None:
    disk = Disk(2, 0, ("file.begun", "file.written", "file.synced", "directory."), errno.EIO)
    with watched(disk):
        code, out, _ = weightcast("keygen", "--out", tmp_path / "run.key")
    assert disk.failed_at == ["file.linked run.key.pub"]
    assert code == 3 and out == ""
    assert list(tmp_path.iterdir()) == []
    assert weightcast("keygen", "--out", tmp_path / "run.key")[0] == 0

"""What only a directory can have: links, special files, a mount that is gone, leftovers of killed writers."""

import os
from pathlib import Path

import pytest

from weightcast.shared.base.errors import DamagedFile
from weightcast.shared.channel.directory_store import DirectoryStore
from weightcast.shared.channel.store import NotFound, Unavailable
from weightcast.shared.files.disk_errors import DiskError, lacks_room


def test_links_below_the_root_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/secret").write_bytes(b"secret")
    (tmp_path / "channel").mkdir()
    (tmp_path / "channel/directory").symlink_to(tmp_path / "real")
    (tmp_path / "channel/file").symlink_to(tmp_path / "real/secret")
    store = DirectoryStore(tmp_path / "channel")
    for key in ("directory/secret", "file"):
        with pytest.raises(DamagedFile, match=r"link|regular"):
            store.read(key, 100)
        with pytest.raises(DamagedFile, match=r"link|regular"):
            next(store.pieces(key))
    assert store.stat("file") is None
    assert {entry.name: entry.kind for entry in store.list()} == {"directory": "other", "file": "other"}
    assert store.within("directory").read("secret", 100) == b"secret"


def test_special_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "latest")
    store = DirectoryStore(tmp_path)
    assert store.stat("latest") is None
    with pytest.raises(DamagedFile):
        store.read("latest", 100)


def test_nothing_is_written_below_an_unmounted_channel(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "mount")
    assert not store.present() and store.names() == []
    for write in (
        lambda: store.create("latest", b""),
        lambda: store.replace("hosts/a.json", b""),
        lambda: store.within("hosts").replace("a.json", b"", sync=False),
        lambda: store.begin("weight_v000001.parts/1-a"),
        lambda: store.write("shard"),
    ):
        with pytest.raises(NotFound):
            write()
    assert not (tmp_path / "mount").exists()


def test_unfinished_files_are_not_listed(tmp_path: Path) -> None:
    (tmp_path / ".weightcast-tmp-0011223344556677").touch()
    store = DirectoryStore(tmp_path)
    assert store.names() == [] and list(store.list()) == []


def test_errors_of_the_file_system_name_the_file_and_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Unavailable) as raised:
        DirectoryStore(tmp_path).replace("latest", b"000001")
    error = raised.value
    assert error.message == f"{tmp_path}/latest: fsync failed: No space left on device"
    assert error.remedy == "free space on its file system" and error.errno == 28
    assert isinstance(error, DiskError) and lacks_room(error)
    assert list(tmp_path.iterdir()) == []

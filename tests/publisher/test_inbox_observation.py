from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from daemonkit import INDEX, base_tensors, files_of, rename_in, unprivileged, write, write_after
from disk_errors import watched
from numpy.typing import NDArray
from waiting import wait_until

from weightcast.publisher.daemon.sources.inbox import Candidate
from weightcast.publisher.daemon.sources.observation import look, marks, sample, was_moved_in
from weightcast.publisher.daemon.sources.watched import consume, consume_aside, delete_leftovers, set_aside
from weightcast.shared.base.errors import Refused, RetryLater


def candidates(watch: Path, marker: str | None = None, arrived: bool = False) -> dict[str, Candidate]:
    found = look(watch, marker, lambda name, files: False, lambda name, files: arrived)
    return {each.name: each for each in found.unknown}


@pytest.mark.parametrize("shards", [1, 2])
def test_a_complete_checkpoint_is_known_by_its_weights(tmp_path: Path, shards: int) -> None:
    write(tmp_path / "step_1", base_tensors(), shards)
    seen = candidates(tmp_path)["step_1"]
    names = {mark.name for mark in seen.weights}
    assert names == set(files_of(base_tensors(), shards)) - {"config.json"}
    assert seen.problem is None and seen.completed_ns > 0


def test_hidden_and_temporary_directories_and_files_are_never_complete(tmp_path: Path) -> None:
    for name in (".step_1", "step_2.tmp"):
        write(tmp_path / name, base_tensors())
    (tmp_path / "step_3").write_bytes(b"a file")
    (tmp_path / "step_4").mkdir()
    found = look(tmp_path, None, lambda name, files: False, lambda name, files: False)
    assert [(each.name, each.temporary, each.weights) for each in found.unknown] == [
        (".step_1", True, frozenset()),
        ("step_2.tmp", True, frozenset()),
    ]
    assert found.names == {".step_1", "step_2.tmp", "step_4"}


@pytest.mark.parametrize("shards", [1, 2])
def test_written_shard_by_shard_it_is_complete_only_at_the_end(tmp_path: Path, shards: int) -> None:
    directory = tmp_path / "step_1"
    directory.mkdir()
    files = files_of(base_tensors(), shards)
    pieces = [(name, data[:cut]) for name, data in files.items() for cut in (0, 5, len(data) // 2, len(data))]
    for name, data in pieces:
        assert not candidates(tmp_path, arrived=True).get("step_1", _NOTHING).weights
        (directory / name).write_bytes(data)
    assert candidates(tmp_path)["step_1"].weights


def test_an_index_written_first_waits_for_its_shards(tmp_path: Path) -> None:
    files = files_of(base_tensors(), 2)
    directory = tmp_path / "step_1"
    directory.mkdir()
    for name in (INDEX, *(name for name in files if name != INDEX)):
        assert not candidates(tmp_path).get("step_1", _NOTHING).weights
        (directory / name).write_bytes(files[name])
    assert candidates(tmp_path)["step_1"].weights


def test_a_rename_is_told_from_writing_in_place(tmp_path: Path) -> None:
    assert was_moved_in(tmp_path, rename_in(tmp_path / "step_1", base_tensors()).name)
    assert not was_moved_in(tmp_path, write(tmp_path / "step_2", base_tensors()).name)
    touched = tmp_path / "step_1" / "config.json"
    wait_until(lambda: (os.utime(touched), not was_moved_in(tmp_path, "step_1"))[1])


def test_a_marker_is_what_counts(tmp_path: Path) -> None:
    rename_in(tmp_path / "step_1", base_tensors())
    assert not candidates(tmp_path, "DONE")["step_1"].finished
    (tmp_path / "step_1" / "DONE").touch()
    assert candidates(tmp_path, "DONE")["step_1"].finished


def test_a_marker_of_the_save_before_does_not_count(tmp_path: Path) -> None:
    directory = write(tmp_path / "policy", base_tensors())
    (directory / "DONE").touch()
    assert candidates(tmp_path, "DONE")["policy"].finished
    for name, data in files_of(base_tensors(1)).items():
        if name != "config.json":
            write_after(directory / "DONE", directory / name, data)
            assert not candidates(tmp_path, "DONE")["policy"].finished
    (directory / "config.json").write_bytes(b"{ }")
    (directory / "DONE").touch()
    assert candidates(tmp_path, "DONE")["policy"].finished


def test_links_are_followed(tmp_path: Path) -> None:
    store = write(tmp_path / "store" / "blobs", base_tensors())
    watch = tmp_path / "watch"
    (watch / "step_1").mkdir(parents=True)
    for path in store.iterdir():
        (watch / "step_1" / path.name).symlink_to(path)
    (watch / "newest").symlink_to(store, target_is_directory=True)
    (watch / "lost").symlink_to(tmp_path / "nowhere")
    seen = candidates(watch)
    assert seen["step_1"].weights == seen["newest"].weights and len(seen) == 2


def test_files_whose_names_the_memory_cannot_hold_are_no_marks(tmp_path: Path) -> None:
    (tmp_path / "a\nb").touch()
    (tmp_path / os.fsdecode(b"\xff")).touch()
    (tmp_path / "config.json").touch()
    assert [mark.name for mark in marks(tmp_path)] == ["config.json"]


def test_what_cannot_be_read_keeps_no_other_from_being_seen() -> None:
    with unprivileged() as watch:
        (watch / "lost+found").mkdir(mode=0)
        (watch / "loop").symlink_to("loop")
        rename_in(watch / "locked", base_tensors())
        (watch / "locked" / INDEX).chmod(0)
        rename_in(watch / "step_1", base_tensors())
        found = look(watch, None, lambda name, files: False, lambda name, files: False)
        assert [each.name for each in found.unknown] == ["step_1"]
        assert found.names == {"lost+found", "loop", "locked", "step_1"}
        reasons = {each.name: each.reason for each in found.unreadable}
        assert reasons.keys() == {"lost+found", "loop", "locked"}
        assert "Permission denied" in reasons["lost+found"] and INDEX in reasons["locked"]
        (watch / "locked" / INDEX).chmod(0o600)
        assert set(candidates(watch)) == {"locked", "step_1"}


def test_known_directories_are_not_opened(tmp_path: Path) -> None:
    write(tmp_path / "step_1", base_tensors())
    (tmp_path / "step_1" / INDEX).write_bytes(b"not JSON")
    found = look(tmp_path, None, lambda name, files: True, lambda name, files: False)
    assert found.unknown == () and found.names == {"step_1"}


def test_a_missing_directory_may_come(tmp_path: Path) -> None:
    with pytest.raises(RetryLater, match="not a directory"):
        candidates(tmp_path / "nowhere")


def test_consuming_deletes_the_directory(tmp_path: Path) -> None:
    directory = write(tmp_path / "step_1", base_tensors())
    (directory / ".metadata").touch()
    seen = candidates(tmp_path)["step_1"]
    consume(tmp_path, "step_1", seen.files | seen.hidden)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["optimizer.pt", ".metadata", "a\nb"])
def test_what_was_added_after_the_choice_is_not_deleted(tmp_path: Path, name: str) -> None:
    directory = write(tmp_path / "step_1", base_tensors())
    known = marks(directory)
    (directory / name).touch()
    with pytest.raises(Refused, match="it was changed"):
        consume(tmp_path, "step_1", known)
    assert {path.name for path in directory.iterdir()} == {*files_of(base_tensors()), name}


def test_what_took_the_name_before_it_was_renamed_gets_it_back(tmp_path: Path) -> None:
    directory = write(tmp_path / "policy", base_tensors())
    known = marks(directory)
    new = write(tmp_path / "new", base_tensors(1))

    def replaced(name: str, where: Path | None) -> None:
        (tmp_path / ".weightcast-consuming-policy").rename(tmp_path / ".away")
        new.rename(tmp_path / ".weightcast-consuming-policy")

    with watched(replaced), pytest.raises(Refused, match="it was changed"):
        consume(tmp_path, "policy", known)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == files_of(base_tensors(1))
    assert not was_moved_in(tmp_path, "policy"), "its writer may be at it"
    assert not (tmp_path / ".weightcast-consuming-policy").exists()


def test_what_is_set_aside_is_never_put_over_something(tmp_path: Path) -> None:
    directory = write(tmp_path / "policy", base_tensors())
    known = marks(directory)
    aside = tmp_path / ".weightcast-consuming-policy"

    def goes_on_writing(name: str, where: Path | None) -> None:
        (aside / "optimizer.pt").touch()
        directory.mkdir()

    with watched(goes_on_writing), pytest.raises(Refused, match="its name is in use again") as refused:
        consume(tmp_path, "policy", known)
    assert str(aside) in refused.value.remedy and (aside / "optimizer.pt").exists()
    assert list(directory.iterdir()) == []
    directory.rmdir()
    with pytest.raises(Refused, match="it was changed"):
        consume_aside(tmp_path, *set_aside(tmp_path), known)
    assert (directory / "optimizer.pt").exists() and set_aside(tmp_path) == []


def test_consuming_never_follows_links_or_deletes_other_things(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", base_tensors())
    watch = tmp_path / "watch"
    watch.mkdir()
    (watch / "link").symlink_to(outside, target_is_directory=True)
    inner = write(watch / "inner", base_tensors())
    (inner / "notes").symlink_to(outside / "config.json")
    deep = write(watch / "deep", base_tensors())
    (deep / "optimizer").mkdir()
    changed = write(watch / "changed", base_tensors())
    before = marks(changed)
    write(changed, base_tensors(3))
    cases = {
        "link": marks(outside),
        "inner": marks(inner),
        "deep": marks(deep),
        "changed": before,
    }
    everything = sorted(tmp_path.rglob("*"))
    for name, known in cases.items():
        with pytest.raises(Refused, match="not consumed"):
            consume(watch, name, known)
    assert sorted(tmp_path.rglob("*")) == everything


def test_a_kill_while_consuming_leaves_nothing_for_ever(tmp_path: Path) -> None:
    write(tmp_path / ".weightcast-consumed-0123456789abcdef", base_tensors())
    write(tmp_path / ".mine", base_tensors())
    delete_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".mine"]


_NOTHING = Candidate("", frozenset(), frozenset(), 0, False)


@pytest.mark.parametrize("nbytes", [1000, 33 << 20])
def test_a_sample_is_of_the_tensors_in_whatever_files(tmp_path: Path, nbytes: int) -> None:
    """Small checkpoints are read in full, of large ones blocks spread over all tensors."""
    tensors = {"a": of(nbytes), "b": of(nbytes), "c": of(3)}
    known = sample(write(tmp_path / "one", tensors, 1))
    assert sample(write(tmp_path / "two", dict(reversed(tensors.items())), 2)) == known
    some_changed = {name: of(data.size, every=997) for name, (_, _, data) in tensors.items()}
    assert sample(write(tmp_path / "other", some_changed, 1)) != known


def test_a_small_checkpoint_with_one_other_bit_has_another_sample(tmp_path: Path) -> None:
    tensors = base_tensors()
    known = sample(write(tmp_path / "one", tensors))
    tensors["layer.1.up"][2][77] ^= 1
    assert sample(write(tmp_path / "two", tensors)) != known


def of(nbytes: int, every: int = 0) -> tuple[str, tuple[int, ...], NDArray[np.uint8]]:
    data = np.zeros(nbytes, np.uint8)
    if every:
        data[::every] = 1
    return "U8", (nbytes,), data

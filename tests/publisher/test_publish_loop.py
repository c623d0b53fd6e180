"""The daemon's step, called directly: real publisher, channel and files, no processes."""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from adapters import adapter, save_adapter
from core_cases import Model, bytes_of, pack, read_checkpoint, snapshot
from daemonkit import (
    INDEX,
    Places,
    base_tensors,
    changed,
    files_of,
    rename_in,
    request_for,
    unprivileged,
    write,
    write_after,
)
from disk_errors import watched
from prometheus_client import generate_latest
from structlog.testing import capture_logs
from waiting import wait_until

from weightcast.publisher import PublisherOptions
from weightcast.publisher.daemon.publish_loop import PublishLoop
from weightcast.publisher.daemon.settings import PublisherSettings
from weightcast.publisher.daemon.sources.watched import REFUSED_SHOWN, WatchedJob
from weightcast.publisher.maintenance.orders import order_rollback
from weightcast.publisher.run_publisher import RunPublisher
from weightcast.shared.base import failpoints
from weightcast.shared.base.errors import DamagedFile, Refused, RetryLater, WrongRun
from weightcast.shared.channel import pins
from weightcast.shared.channel.claims import claim, this_process
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.daemon.loop import Stop, Wakeup
from weightcast.shared.daemon.metrics import Metrics


class Office:
    """A desk with its places."""

    def __init__(self, places: Places, **settings: Any) -> None:
        self.places, self.stop, self.renamed = places, Stop(), deque[str]()
        self.registry = Metrics()
        values: dict[str, Any] = {
            "channel": places.channel,
            "base": places.base,
            "local": places.local,
            "watch": places.watch,
            "threads": 1,
            "settle_seconds": 0.0,
            **settings,
        }
        self.publish_loop = PublishLoop(
            PublisherSettings(**values), self.registry, Wakeup(), self.stop, self.renamed
        )

    def step(self) -> None:
        self.publish_loop.step(self.stop)

    def settle(self) -> None:
        """Steps until two looks have seen nothing new."""
        for _ in range(2):
            before = ""
            while before != self.places.latest() or not before:
                before = self.places.latest() or "none"
                self.step()
                if before == "none" and not self.places.latest():
                    break

    def published(self) -> list[tuple[int, int | None]]:
        """(version, step), oldest first."""
        return [(each.version, each.step) for each in reversed(self.publish_loop.status().publications)]


Opening = Callable[..., Office]


@pytest.fixture
def opened(places: Places) -> Iterator[Opening]:
    offices: list[Office] = []

    def start(**settings: Any) -> Office:
        office = Office(places, **settings)
        offices.append(office)
        office.publish_loop.start()
        return office

    yield start
    for office in offices:
        office.publish_loop.close()


@contextmanager
def interrupted_at(failpoint: str) -> Iterator[None]:
    """What is done in the block ends at the failpoint."""

    def end(name: str, where: Path | None) -> None:
        if name == failpoint:
            raise KeyboardInterrupt

    with watched(end), pytest.raises(KeyboardInterrupt):
        yield


def weights(step: int) -> Model:
    return changed(base_tensors(), step)


def test_a_renamed_checkpoint_is_a_version_and_the_local_checkpoint_follows(
    places: Places, opened: Opening
) -> None:
    office = opened()
    office.step()
    assert places.latest() == "" and office.publish_loop.status().ready
    for step in (1, 2):
        rename_in(places.watch / f"step_{step}", weights(step), shards=step)
        office.step()
        assert places.latest() == f"00000{step}"
        wait_until(lambda step=step: read_checkpoint(places.local) == bytes_of(weights(step)))
    assert office.published() == [(1, 1), (2, 2)]


def test_a_rename_that_was_seen_needs_no_second_look(places: Places, opened: Opening) -> None:
    office = opened(settle_seconds=3600.0)
    write(places.watch / "step_1", weights(1))
    office.step()
    assert places.latest() == ""
    office.renamed.append("step_1")
    office.step()
    assert places.latest() == "000001"


def test_an_arrival_counts_until_the_directory_changes(places: Places, opened: Opening) -> None:
    office = opened(settle_seconds=3600.0, marker=None)
    (places.watch / "step_1").mkdir()
    office.renamed.append("step_1")
    office.step()
    write(places.watch / "step_1", weights(1))
    office.step()
    assert places.latest() == ""
    assert "second look" in office.publish_loop.status().inbox.waiting[0].reason  # type: ignore[union-attr]


def test_nothing_changed_is_published_once(places: Places, opened: Opening) -> None:
    office = opened()
    rename_in(places.watch / "step_1", base_tensors())
    office.settle()
    assert places.latest() == "000001"
    assert office.publish_loop.status().publications[0].changed_elements == 0


def test_written_in_place_with_pauses_it_is_never_torn(places: Places, opened: Opening) -> None:
    office = opened()
    directory = places.watch / "step_1"
    directory.mkdir()
    for name, data in files_of(weights(1), 3).items():
        for cut in (len(data) // 2, len(data)):
            (directory / name).write_bytes(data[:cut])
            if name != INDEX or cut != len(data):
                office.settle()
                assert places.latest() == ""
    office.settle()
    assert places.latest() == "000001"
    assert read_checkpoint(places.local) == bytes_of(weights(1))


def test_a_file_with_a_hole_waits_and_is_published_with_a_warning_on_request(
    places: Places, opened: Opening
) -> None:
    """A writer that sets the length first makes files whole by their headers all the while."""
    office = opened(settle_seconds=3600.0)
    file = write(places.watch / "step_1", weights(1), 1) / "model.safetensors"
    data = file.read_bytes()
    with file.open("wb", buffering=0) as writer:
        writer.truncate(len(data))
        writer.write(data[:4096])
        hole = os.lseek(writer.fileno(), 0, os.SEEK_HOLE)
    if hole == len(data):
        pytest.skip("this file system has no holes")
    for _ in range(2):
        office.step()
    inbox, queue = office.publish_loop.status().inbox, office.publish_loop.queue
    assert inbox is not None and queue is not None and places.latest() == ""
    [waiting] = inbox.waiting
    assert waiting.reason.startswith(f"model.safetensors has a hole at byte {hole:,}: still being written")
    with capture_logs() as logs:
        queue.ask(request_for(str(file.parent), 1, None))
        office.step()
    notes = [(each["log_level"], each["note"]) for each in logs if each["event"] == "publication note"]
    assert places.latest() == "000001" and [level for level, _ in notes] == ["warning"]
    assert f"has a hole at byte {hole:,}" in notes[0][1]


def test_the_marker_alone_decides(places: Places, opened: Opening) -> None:
    office = opened(marker="DONE")
    rename_in(places.watch / "step_1", weights(1))
    office.settle()
    assert places.latest() == ""
    (places.watch / "step_1" / "DONE").touch()
    office.step()
    assert places.latest() == "000001"


def test_saved_over_shard_by_shard_beside_an_old_marker_it_is_never_torn(
    places: Places, opened: Opening
) -> None:
    office = opened(marker="DONE", settle_seconds=3600.0)
    marker = write(places.watch / "policy", weights(1)) / "DONE"
    marker.touch()
    office.step()
    assert places.latest() == "000001"
    for name, data in files_of(weights(2)).items():
        write_after(marker, marker.parent / name, data)
        office.settle()
        assert places.latest() == "000001"
    marker.touch()
    office.step()
    assert places.latest() == "000002"
    assert read_checkpoint(places.local) == bytes_of(weights(2))


def test_saved_over_between_the_look_and_the_reading_it_is_looked_at_again(
    places: Places, opened: Opening
) -> None:
    office = opened()
    directory = rename_in(places.watch / "policy", weights(1))
    new = {name: data for name, data in files_of(weights(2)).items() if name.endswith(".safetensors")}
    first, second = sorted(new)

    def save_a_shard(name: str, where: Path | None) -> None:
        if name == "inbox.chosen":
            (directory / first).write_bytes(new[first])

    with watched(save_a_shard):
        office.step()
    assert places.latest() == ""
    (directory / second).write_bytes(new[second])
    office.settle()
    assert places.latest() == "000001"
    assert read_checkpoint(places.local) == bytes_of(weights(2))


def test_what_cannot_be_read_waits_and_the_others_are_published(places: Places, opened: Opening) -> None:
    (places.watch / "loop").symlink_to("loop")
    office = opened()
    rename_in(places.watch / "step_1", weights(1))
    office.settle()
    assert office.published() == [(1, 1)]
    waiting = office.publish_loop.status().inbox.waiting  # type: ignore[union-attr]
    assert [each.name for each in waiting] == ["loop"] and "symbolic links" in waiting[0].reason


def test_newest_only(places: Places, opened: Opening) -> None:
    office = opened()
    for step in (1, 2, 3):
        rename_in(places.watch / f"step_{step}", weights(step))
    office.settle()
    assert office.published() == [(1, 3)]
    assert read_checkpoint(places.local) == bytes_of(weights(3))


def test_every_one_in_order_of_completion(places: Places, opened: Opening) -> None:
    office = opened(every=True)
    for step in (3, 1, 2):
        rename_in(places.watch / f"step_{step}", weights(step))
    office.settle()
    assert office.published() == [(1, 3), (2, 1), (3, 2)]


def test_another_watched_directory_is_met_for_the_first_time(places: Places, opened: Opening) -> None:
    """Also with the memory of a local checkpoint whose publisher watched another one before."""
    write(places.watch / "step_1", weights(1))
    opened().publish_loop.close()
    second = places.root / "second"
    write(second / "step_1", weights(2))
    write(second / "step_2", weights(3))
    office = opened(watch=second)
    office.settle()
    assert places.latest() == ""
    rename_in(second / "step_3", weights(4))
    office.settle()
    assert [version for version, _ in office.published()] == [1]
    office.publish_loop.close()
    office = opened(watch=second)
    office.settle()
    assert places.latest() == "000001"


@pytest.mark.parametrize(("existing", "expected"), [(False, []), (True, [(1, 2)])])
def test_what_lay_there_before(
    places: Places, opened: Opening, existing: bool, expected: list[tuple[int, int]]
) -> None:
    for step in (1, 2):
        rename_in(places.watch / f"step_{step}", weights(step))
    office = opened(existing=existing)
    office.settle()
    assert office.published() == expected


def test_what_comes_while_a_first_start_fails_is_new_at_the_next(places: Places, opened: Opening) -> None:
    rename_in(places.watch / "before", weights(9))

    office = Office(places)
    with interrupted_at("seed.copied"):
        office.publish_loop.start()
    office.publish_loop.close()
    rename_in(places.watch / "step_1", weights(1))
    later = opened()
    later.settle()
    assert later.published() == [(1, 1)]


def test_a_restart_publishes_nothing_again(places: Places, opened: Opening) -> None:
    office = opened()
    rename_in(places.watch / "step_1", weights(1))
    office.settle()
    office.publish_loop.close()
    rename_in(places.watch / "step_2", weights(2))
    later = opened()
    later.settle()
    assert later.published() == [(2, 2)]


def test_the_same_name_with_new_content_is_a_new_checkpoint(places: Places, opened: Opening) -> None:
    office = opened()
    rename_in(places.watch / "step_1", weights(1))
    office.settle()
    shutil.rmtree(places.watch / "step_1")
    rename_in(places.watch / "step_1", weights(5))
    office.settle()
    assert office.published() == [(1, 1), (2, 1)]
    assert read_checkpoint(places.local) == bytes_of(weights(5))


def test_renamed_after_publishing_it_is_the_same(places: Places, opened: Opening) -> None:
    office = opened()
    rename_in(places.watch / "step_1", weights(1))
    office.settle()
    (places.watch / "step_1").rename(places.watch / "best_1")
    (places.watch / "newest").symlink_to(places.watch / "best_1")
    office.settle()
    assert office.published() == [(1, 1)]


def test_consume_deletes_what_was_published_and_nothing_else(places: Places, opened: Opening) -> None:
    rename_in(places.watch / "before", weights(9))
    office = opened(consume=True)
    rename_in(places.watch / "step_1", weights(1))
    (places.watch / "notes").mkdir()
    office.settle()
    assert sorted(path.name for path in places.watch.iterdir() if path.name != ".probe") == [
        "before",
        "notes",
    ]
    assert office.published() == [(1, 1)]


def test_a_link_to_the_newest_takes_nothing_from_it(places: Places, opened: Opening) -> None:
    office = opened(consume=True)
    (places.watch / "latest").symlink_to("checkpoint-100")
    rename_in(places.watch / "checkpoint-100", weights(1))
    office.settle()
    assert office.published() == [(1, 100)]
    assert office.publish_loop.status().publications[0].source == "checkpoint-100"
    assert not (places.watch / "checkpoint-100").exists()


def test_what_was_added_to_a_checkpoint_while_it_was_published_stays(places: Places, opened: Opening) -> None:
    office = opened(consume=True)
    directory = rename_in(places.watch / "step_1", weights(1))

    def save_more(name: str, where: Path | None) -> None:
        if name == "pointer.moved":
            (directory / "optimizer.pt").write_bytes(b"the trainer's state")

    with watched(save_more):
        office.settle()
    office.settle()
    assert office.published() == [(1, 1)]
    assert {path.name for path in directory.iterdir()} == {*files_of(weights(1)), "optimizer.pt"}


def test_a_checkpoint_that_takes_the_name_of_one_being_deleted_is_published(
    places: Places, opened: Opening
) -> None:
    office = opened(consume=True)
    aside = places.watch / ".weightcast-consuming-policy"
    new = rename_in(places.watch / ".new", weights(2))

    def replace(name: str, where: Path | None) -> None:
        if name == "inbox.aside" and new.exists():
            aside.rename(places.root / "away")
            new.rename(aside)

    rename_in(places.watch / "policy", weights(1))
    with watched(replace):
        office.settle()
    office.settle()
    assert places.latest() == "000002"
    assert read_checkpoint(places.local) == bytes_of(weights(2))
    assert [path.name for path in places.watch.iterdir() if path.name != ".probe"] == []


def test_put_back_while_it_is_saved_over_is_no_arrival(places: Places, opened: Opening) -> None:
    office = opened(consume=True, settle_seconds=3600.0)
    aside = places.watch / ".weightcast-consuming-policy"
    new = files_of(weights(2))
    shards = [name for name in new if name.endswith(".safetensors")]

    def save_over(name: str, where: Path | None) -> None:
        if name == "inbox.aside":
            (aside / shards[0]).write_bytes(new[shards[0]])

    rename_in(places.watch / "policy", weights(1))
    with watched(save_over):
        office.step()
    office.renamed.append("policy")
    office.step()
    assert places.latest() == "000001"
    assert (places.watch / "policy" / shards[0]).read_bytes() == new[shards[0]]


@pytest.mark.parametrize("added", [False, True])
def test_a_kill_between_setting_aside_and_comparing_deletes_only_what_was_published(
    places: Places, opened: Opening, added: bool
) -> None:
    office = opened(consume=True)
    directory = rename_in(places.watch / "step_1", weights(1))
    aside = places.watch / ".weightcast-consuming-step_1"

    with interrupted_at("inbox.aside"):
        office.settle()
    office.publish_loop.close()
    assert aside.is_dir() and not directory.exists()
    if added:
        (aside / "optimizer.pt").write_bytes(b"the trainer's state")
    later = opened(consume=True)
    later.settle()
    assert places.latest() == "000001" and not aside.exists()
    left = {path.name for path in directory.iterdir()} if directory.exists() else set()
    assert left == ({*files_of(weights(1)), "optimizer.pt"} if added else set())


def test_what_a_disk_error_left_of_a_consumed_checkpoint_goes_with_the_next_look(
    places: Places, opened: Opening
) -> None:
    office = opened(consume=True)
    errors = iter([OSError(28, "No space left on device")])

    def fail_once(name: str, where: Path | None) -> None:
        if name == "inbox.buried":
            for error in errors:
                raise error

    with watched(fail_once):
        rename_in(places.watch / "step_1", weights(1))
        office.settle()
    office.step()
    assert [path.name for path in places.watch.iterdir() if path.name != ".probe"] == []
    assert next(errors, None) is None and office.published() == [(1, 1)]


def test_where_consuming_is_not_permitted_the_log_hears_of_each_checkpoint_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with unprivileged() as root:
        places = Places.made(root)
        office = Office(places, consume=True, every=True)
        office.publish_loop.start()
        for step in (1, 2):
            rename_in(places.watch / f"step_{step}", weights(step))
        places.watch.chmod(0o500)
        for _ in range(20):
            office.step()
        assert office.published() == [(1, 1), (2, 2)]
        logged = capfd.readouterr()
        told = (logged.out + logged.err).count("checkpoint not consumed yet")
        assert told == 2
        places.watch.chmod(0o700)
        wait_until(lambda: (office.step(), _is_empty(places.watch))[1])
        office.publish_loop.close()


def _is_empty(watch: Path) -> bool:
    return [path for path in watch.iterdir() if path.name != ".probe"] == []


def test_a_kill_between_version_and_memory_publishes_nothing_twice(places: Places, opened: Opening) -> None:
    office = opened()
    rename_in(places.watch / "step_1", weights(1))
    rename_in(places.watch / "step_2", weights(2))
    memory = places.local / ".weightcast" / "inbox.json"
    writes: list[bytes] = []
    begin = WatchedJob.begin

    def spy(job: WatchedJob, version: int) -> str:
        request = begin(job, version)
        writes.append(memory.read_bytes())
        return request

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WatchedJob, "begin", spy)
        office.settle()
    office.publish_loop.close()
    memory.write_bytes(writes[0])
    later = opened()
    later.settle()
    assert later.published() == [] and places.latest() == "000001"


def odd(name: str) -> Model:
    tensors = base_tensors()
    match name:
        case "missing and extra":
            tensors["other.weight"] = tensors.pop("layer.0.up")
        case "retyped":
            dtype, shape, data = tensors["layer.0.up"]
            tensors["layer.0.up"] = ("F16", shape, data)
        case "reshaped":
            dtype, shape, data = tensors["layer.1.up"]
            tensors["layer.1.up"] = (dtype, shape[::-1], data)
    return tensors


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("missing and extra", ["layer.0.up", "other.weight"]),
        ("retyped", ["layer.0.up"]),
        ("reshaped", ["layer.1.up"]),
    ],
)
def test_tensors_that_do_not_fit_are_all_listed_and_change_nothing(
    places: Places, opened: Opening, kind: str, names: list[str]
) -> None:
    office = opened()
    office.settle()
    channel, local = snapshot(places.channel), read_checkpoint(places.local)
    rename_in(places.watch / "step_1", odd(kind))
    office.settle()
    refused = office.publish_loop.status().inbox.refused  # type: ignore[union-attr]
    assert [each.name for each in refused] == ["step_1"]
    assert all(name in refused[0].error.message for name in names)
    assert snapshot(places.channel) == channel
    assert read_checkpoint(places.local) == local
    assert office.publish_loop.status().totals.failures == 1
    shutil.rmtree(places.watch / "step_1")
    rename_in(places.watch / "step_1", weights(1))
    office.settle()
    assert places.latest() == "000001"


@pytest.mark.parametrize("damage", ["header", "shard", "index", "config"])
def test_damaged_checkpoints_change_nothing(places: Places, opened: Opening, damage: str) -> None:
    office = opened()
    office.settle()
    channel = snapshot(places.channel)
    hidden = write(places.watch / ".step_1", weights(1))
    first = hidden / "model-00001-of-00002.safetensors"
    match damage:
        case "header":
            first.write_bytes(first.read_bytes()[:40])
        case "shard":
            first.unlink()
        case "index":
            (hidden / INDEX).write_bytes(b'{"weight_map": {"a": "../../etc/passwd"}}')
        case "config":
            (hidden / "config.json").write_bytes(b'{"hidden_size": ')
    hidden.rename(places.watch / "step_1")
    office.renamed.append("step_1")
    office.settle()
    assert snapshot(places.channel) == channel
    assert [each.name for each in office.publish_loop.status().inbox.refused] == ["step_1"]  # type: ignore[union-attr]
    assert office.publish_loop.status().last_error is not None


def test_a_checkpoint_rewritten_while_it_is_read_is_tried_again(places: Places, opened: Opening) -> None:
    office = opened()
    rename_in(places.watch / "step_1", weights(1))
    shown: list[str] = []
    phase = office.publish_loop._meter.phase

    def rewrite_once(name: str) -> None:
        phase(name)
        if name == "diff" and not shown:
            shown.append(name)
            for file, data in files_of(weights(2)).items():
                _write_later(places.watch / "step_1" / file, data)

    office.publish_loop._meter.phase = rewrite_once  # type: ignore[method-assign]
    office.step()
    assert shown and places.latest() == ""
    assert office.publish_loop.status().inbox.refused == ()  # type: ignore[union-attr]
    office.settle()
    assert places.latest() == "000001"
    assert read_checkpoint(places.local) == bytes_of(weights(2))


def _write_later(path: Path, data: bytes) -> None:
    """Until the file system's clock shows it."""
    before = path.stat().st_mtime_ns

    def written() -> bool:
        path.write_bytes(data)
        return path.stat().st_mtime_ns > before

    wait_until(written)


def test_a_job_and_its_key(places: Places, opened: Opening, tmp_path: Path) -> None:
    elsewhere = write(tmp_path / "elsewhere", weights(4))
    office = opened(allow=[tmp_path])
    queue = office.publish_loop.queue
    assert queue is not None
    job = queue.ask(request_for(str(elsewhere), 4, "key"))
    assert queue.ask(request_for(str(elsewhere), 4, "key")) == job
    office.step()
    ended = queue.get(job.id)
    assert ended is not None and ended.state == "done" and ended.report is not None
    assert (ended.report.version, ended.report.step) == (1, 4)
    office.publish_loop.close()
    later = opened(allow=[tmp_path])
    assert later.publish_loop.queue is not None
    assert later.publish_loop.queue.ask(request_for(str(elsewhere), 4, "key")).state == "queued"
    later.step()
    again = later.publish_loop.queue.get(job.id)
    assert again is not None and (again.state, again.report) == ("done", ended.report)
    assert again.note == "unchanged: the checkpoint has the content of version 1"
    assert places.latest() == "000001" and later.published() == []


def test_a_job_that_fails_says_why_and_the_next_one_runs(
    places: Places, opened: Opening, tmp_path: Path
) -> None:
    office = opened(allow=[tmp_path])
    queue = office.publish_loop.queue
    assert queue is not None
    bad = queue.ask(request_for(str(write(tmp_path / "bad", odd("retyped"))), None, None))
    gone = queue.ask(request_for(str(tmp_path / "gone"), None, None))
    good = queue.ask(request_for(str(write(tmp_path / "good", weights(1))), 1, None))
    for _ in range(3):
        office.step()
    states = [queue.get(job.id).state for job in (bad, gone, good)]  # type: ignore[union-attr]
    assert states == ["failed", "failed", "done"]
    assert "layer.0.up" in queue.get(bad.id).error.message  # type: ignore[union-attr]


@pytest.mark.parametrize("closed", ["", INDEX, "model-00001-of-00002.safetensors"])
def test_an_unreadable_checkpoint_that_was_asked_for_holds_up_nothing(closed: str) -> None:
    with unprivileged() as root:
        places = Places.made(root)
        office = Office(places, allow=[root])
        office.publish_loop.start()
        queue = office.publish_loop.queue
        assert queue is not None
        bad = queue.ask(request_for(str(write(root / "bad", weights(1))), None, None))
        good = queue.ask(request_for(str(write(root / "good", weights(2))), 2, None))
        (root / "bad" / closed).chmod(0)
        rename_in(places.watch / "step_3", weights(3))
        for _ in range(3):
            office.step()
        assert office.published() == [(1, 2), (2, 3)]
        failure = queue.get(bad.id).error  # type: ignore[union-attr]
        assert failure is not None and failure.error == "Refused" and "user" in failure.remedy
        assert str(root / "bad" / closed) in failure.message and "Permission denied" in failure.message
        assert queue.get(good.id).state == "done"  # type: ignore[union-attr]
        office.publish_loop.close()
        (root / "bad" / closed).chmod(0o700)


@pytest.mark.parametrize(("moved", "state"), [(True, "done"), (False, "queued")])
def test_a_job_cut_off_by_a_kill(
    places: Places, opened: Opening, tmp_path: Path, moved: bool, state: str
) -> None:
    office = opened(allow=[tmp_path])
    queue = office.publish_loop.queue
    assert queue is not None
    job = queue.change(queue.ask(request_for(str(tmp_path / "c"), None, None)), state="running", before=0)
    publisher = office.publish_loop._publisher
    assert publisher is not None
    directory = write(tmp_path / "c", weights(1))
    request = job.id if moved else "0123456789abcdef"
    # newer versions are not the job's, nor is one that somebody else asked for
    publisher.publish_weights(lambda: publisher.open_checkpoint(directory), request=request)
    publisher.publish_checkpoint(write(tmp_path / "d", weights(2)))
    office.publish_loop.close()
    later = opened()
    found = later.publish_loop.queue.get(job.id)  # type: ignore[union-attr]
    assert found is not None and found.state == state
    assert (None if found.report is None else found.report.version) == (1 if moved else None)


def test_what_somebody_else_published_is_not_this_checkpoint(places: Places, opened: Opening) -> None:
    """Killed while it compared; an operator publishes by hand; it starts again."""
    office = opened(consume=True)
    left = rename_in(places.watch / "step_1", weights(1))

    with interrupted_at("publish.recovered"):
        office.settle()
    office.publish_loop.close()
    with RunPublisher.open(places.channel, local=places.local, base=places.base) as by_hand:
        by_hand.publish_checkpoint(write(places.root / "by-hand", weights(7)))
    later = opened(consume=True)
    assert left.is_dir() and later.published() == []
    later.settle()
    assert later.published() == [(2, 1)] and not left.exists()
    assert read_checkpoint(places.local) == bytes_of(weights(1))


def test_a_publisher_that_lost_the_channel_says_so_and_keeps_what_it_did_not_publish(
    places: Places, opened: Opening
) -> None:
    """Taken over while it compared; the new owner publishes, and clears its parts away."""
    office = opened(consume=True)
    left = rename_in(places.watch / "step_1", weights(1))
    with ExitStack() as stack:

        def take_over(name: str, where: Path | None) -> None:
            if name == "shard.written" and not office.places.latest():
                failpoints.watch(None)
                local = places.root / "new-owner"
                new = RunPublisher.open(
                    places.channel, local=local, base=places.base, options=PublisherOptions(take_over=True)
                )
                stack.enter_context(new)
                new.publish_checkpoint(write(places.root / "other", weights(7)))

        with watched(take_over), pytest.raises((Refused, RetryLater)):
            office.settle()
    assert places.latest() == "000001" and office.published() == []
    assert office.publish_loop.superseded is not None and office.stop.is_set()
    assert left.is_dir()
    memory = (places.local / ".weightcast" / "inbox.json").read_text()
    assert '"published"' not in memory


def test_an_idle_publisher_that_lost_the_channel_ends(places: Places, opened: Opening) -> None:
    office = opened()
    office.step()
    with RunPublisher.open(
        places.channel, local=places.root / "new", base=places.base, options=PublisherOptions(take_over=True)
    ):
        pass
    office.publish_loop._owner_due.at_once()
    with pytest.raises(Refused, match="now belongs to"):
        office.step()
    assert office.publish_loop.superseded is not None and office.stop.is_set()


def test_an_order_that_comes_while_a_checkpoint_begins_costs_no_checkpoint(
    places: Places, opened: Opening
) -> None:
    """What the rollback publishes is not the checkpoint; it is published when the order is withdrawn."""
    office = opened(consume=True)
    rename_in(places.watch / "step_1", weights(1))
    office.settle()
    left = rename_in(places.watch / "step_2", weights(2))

    def order(name: str, where: Path | None) -> None:
        if name == "inbox.chosen":
            failpoints.watch(None)
            order_rollback(open_store(places.channel), 0)

    with watched(order), pytest.raises(RetryLater, match="on hold"):
        office.settle()
    office.step()
    assert places.latest() == "000002" and left.is_dir()
    assert [step for _, step in office.published()] == [1]
    pins.resume(open_store(places.channel))
    office.settle()
    assert office.published()[-1] == (3, 2) and not left.exists()


@pytest.mark.parametrize("every", [False, True])
def test_what_waits_for_the_end_of_a_rollback_is_named_once_and_in_order(
    places: Places, opened: Opening, every: bool
) -> None:
    """Of requests, watched checkpoints and adapters."""
    office, store = opened(every=every), open_store(places.channel)
    rename_in(places.watch / "step_1", weights(1))
    office.settle()
    order_rollback(store, 0)
    office.step()
    asked = str(rename_in(places.watch / "step_2", weights(2)))
    for step in (3, 4):
        rename_in(places.watch / f"step_{step}", weights(step))
    for name in ("left", "right"):
        save_adapter(places.watch / "step_4" / name, adapter(1))
    assert office.publish_loop.queue is not None
    office.publish_loop.queue.ask(request_for(asked, 2, None))
    for _ in range(2):
        office.step()
    steps = [3, 4] if every else [4]
    adapters = ["step_4/left", "step_4/right"]
    assert pins.waiting(store) == [asked, *(f"step_{step}" for step in steps), *adapters]
    pins.resume(store)
    for _ in range(8):
        office.step()
    assert [step for _, step in office.published()] == [1, 2, *steps, 4, 4]


def test_what_was_refused_under_other_options_waits_for_a_request(places: Places, opened: Opening) -> None:
    office = opened()
    rename_in(places.watch / "step_1", odd("retyped"))
    for cast in (False, True):
        office.publish_loop.close()
        office = opened(cast=cast)
        office.settle()
        [refused] = office.publish_loop.status().inbox.refused  # type: ignore[union-attr]
        assert refused.error.remedy.startswith("refused under earlier options") is cast
    assert office.publish_loop.queue is not None and places.latest() == ""
    office.publish_loop.queue.ask(request_for(str(places.watch / "step_1"), 1, None))
    office.settle()
    assert places.latest() == "000001" and office.publish_loop.status().inbox.refused == ()  # type: ignore[union-attr]


def test_a_job_that_crashes_is_not_tried_again(places: Places, opened: Opening, tmp_path: Path) -> None:
    office = opened(allow=[tmp_path])
    queue = office.publish_loop.queue
    assert queue is not None
    job = queue.ask(request_for(str(write(tmp_path / "c", weights(1))), None, None))
    phase, crashed = office.publish_loop._meter.phase, []

    def crash_once(name: str) -> None:
        phase(name)
        if not crashed:
            crashed.append(name)
            raise ZeroDivisionError("a bug")

    office.publish_loop._meter.phase = crash_once  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        office.step()
    assert not office.publish_loop.status().ready
    office.step()
    ended = queue.get(job.id)
    assert ended is not None and ended.state == "failed" and ended.error is not None
    assert ended.error.error == "ZeroDivisionError"
    assert office.publish_loop.status().ready and places.latest() == ""


def test_asked_for_and_watched_it_is_one_version(places: Places, opened: Opening) -> None:
    office = opened()
    rename_in(places.watch / "step_1", weights(1))
    assert office.publish_loop.queue is not None
    office.publish_loop.queue.ask(request_for(str(places.watch / "step_1"), 1, None))
    office.settle()
    assert office.published() == [(1, 1)]


def test_a_hook_that_asks_for_a_retry_delays_and_does_not_repeat(
    places: Places, opened: Opening, tmp_path: Path
) -> None:
    gate, calls = tmp_path / "gate", tmp_path / "calls"
    hook = tmp_path / "hook.sh"
    hook.write_text(
        f'#!/bin/sh\necho "$WEIGHTCAST_PHASE $WEIGHTCAST_VERSION" >> {calls}\n[ -e {gate} ] || exit 1\n'
    )
    hook.chmod(0o755)
    office = opened(post_write=str(hook))
    rename_in(places.watch / "step_1", weights(1))
    with pytest.raises(Refused, match="hook"):
        office.step()
    assert not office.publish_loop.status().ready and places.latest() == ""
    gate.touch()
    office.settle()
    assert places.latest() == "000001"
    assert calls.read_text().splitlines()[-1] == "pointer 1"


def test_a_hook_that_fails_after_the_commit_delays_a_job_and_its_report_is_whole(
    places: Places, opened: Opening, tmp_path: Path
) -> None:
    gate, hook = tmp_path / "gate", tmp_path / "hook.sh"
    hook.write_text(f"#!/bin/sh\n[ -e {gate} ]\n")
    hook.chmod(0o755)
    office = opened(post_write=str(hook), allow=[tmp_path])
    queue = office.publish_loop.queue
    assert queue is not None
    job = queue.ask(request_for(str(write(tmp_path / "c", weights(1))), 3, None))
    with pytest.raises(Refused, match="hook"):
        office.step()
    assert queue.get(job.id).state == "running"  # type: ignore[union-attr]
    gate.touch()
    office.step()
    ended = queue.get(job.id)
    assert ended is not None and ended.state == "done" and ended.report is not None
    assert (ended.report.version, ended.report.step, ended.report.kind) == (1, 3, "delta")
    assert ended.report.changed_elements > 0 and ended.report.delta_bytes > 0 and ended.error is None


def test_another_base_is_refused(places: Places, opened: Opening) -> None:
    opened().publish_loop.close()
    places.local.rename(places.root / "elsewhere")
    write(places.base, base_tensors(7))
    channel = snapshot(places.channel)
    with pytest.raises(WrongRun, match="base"):
        opened()
    assert snapshot(places.channel) == channel
    files = [name for name, what in snapshot(places.local).items() if what != "directory"]
    assert files == [".weightcast/inbox.json"], "nothing is seeded"


def test_another_table_is_refused_without_reading_weights(places: Places, opened: Opening) -> None:
    opened().publish_loop.close()
    write(places.base, odd("reshaped"))
    with pytest.raises(WrongRun, match=r"layer\.1\.up"):
        opened()


def test_two_publishers_of_one_local_checkpoint(places: Places, opened: Opening) -> None:
    opened()
    with pytest.raises(RetryLater, match="already has a writer"):
        opened()


def test_a_publisher_whose_channel_was_taken_stops(places: Places, opened: Opening) -> None:
    office = opened()
    claim(open_store(places.channel), this_process(), take_over=True)
    rename_in(places.watch / "step_1", weights(1))
    with pytest.raises(Refused, match="belongs to"):
        office.step()
    assert office.stop.is_set() and office.publish_loop.superseded is not None and places.latest() == ""
    memory = (places.local / ".weightcast" / "inbox.json").read_bytes()
    assert b'"refused"' not in memory


def test_a_damaged_memory_says_what_to_do(places: Places, opened: Opening) -> None:
    opened().publish_loop.close()
    for name in ("inbox.json", "publications.json"):
        path = places.local / ".weightcast" / name
        kept = path.read_bytes() if path.exists() else None
        path.write_bytes(b'{"format":1')
        with pytest.raises(DamagedFile, match=name) as caught:
            opened()
        assert "remove" in caught.value.remedy
        path.unlink()
        if kept is not None:
            path.write_bytes(kept)


def test_a_watched_directory_that_comes_later(places: Places, opened: Opening) -> None:
    places.watch.rmdir()
    office = opened()
    with pytest.raises(RetryLater, match="not a directory"):
        office.step()
    assert not office.publish_loop.status().ready
    rename_in(places.watch / "step_1", weights(1))
    office.settle()
    assert places.latest() == "000001"


def test_metrics(places: Places, opened: Opening) -> None:
    office = opened()
    rename_in(places.watch / "step_1", weights(1))
    office.settle()
    text = generate_latest(office.registry).decode()
    assert 'weightcast_publications_total{outcome="done"} 1.0' in text
    assert "weightcast_version 1.0" in text and "weightcast_publish_seconds_count 1.0" in text


def test_all_refused_checkpoints_are_counted_as_long_as_they_lie_there(
    places: Places, opened: Opening
) -> None:
    office = opened()
    for number in range(REFUSED_SHOWN + 5):
        directory = places.watch / f"step_{number}"
        write(places.watch / ".damaged", weights(1))
        (places.watch / ".damaged" / INDEX).write_bytes(b"junk")
        (places.watch / ".damaged").rename(directory)
        office.renamed.append(directory.name)
    (places.watch / "growing").mkdir()
    (places.watch / "growing" / INDEX).write_bytes(b"{")
    for _ in range(REFUSED_SHOWN + 5):
        office.step()

    def counts() -> tuple[str, ...]:
        lines = generate_latest(office.registry).decode().splitlines()
        return tuple(line for line in lines if line.startswith("weightcast_inbox_"))

    inbox = office.publish_loop.status().inbox
    assert inbox is not None and len(inbox.refused) == REFUSED_SHOWN
    assert counts() == ("weightcast_inbox_waiting 1.0", f"weightcast_inbox_refused {REFUSED_SHOWN + 5}.0")
    failed = f'weightcast_publications_total{{outcome="failed"}} {REFUSED_SHOWN + 5}.0'
    assert failed in generate_latest(office.registry).decode(), "what the alert counts"
    assert office.publish_loop.status().totals.failures == REFUSED_SHOWN + 5
    for number in range(REFUSED_SHOWN):
        shutil.rmtree(places.watch / f"step_{number}")
    office.step()
    inbox = office.publish_loop.status().inbox
    assert inbox is not None and len(inbox.refused) == 5
    assert counts() == ("weightcast_inbox_waiting 1.0", "weightcast_inbox_refused 5.0")


def test_shards_of_another_split_are_the_same_weights(places: Places, opened: Opening) -> None:
    office = opened()
    rename_in(places.watch / "step_1", weights(1), shards=3)
    office.settle()
    assert read_checkpoint(places.local) == bytes_of(weights(1))
    assert len(pack({})) == 16

"""A publication is known by its content: not by key, path, name, time stamp or inode."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_cases import bytes_of, read_checkpoint
from daemonkit import INDEX, Daemon, Places, base_tensors, files_of, rename_in, request_for, write
from disk_errors import watched
from structlog.testing import capture_logs
from test_publish_loop import Office, Opening, opened, weights
from waiting import wait_until

from weightcast.publisher import Publisher
from weightcast.publisher.daemon.sources.queue import Job

__all__ = ["opened"]  # fixtures

Change = Callable[[Path], None]


def ask(office: Office, checkpoint: Path, step: int = 12, key: str = "step-12") -> Job:
    """As POST /v1/publish does; the job when it has ended."""
    queue = office.publish_loop.queue
    assert queue is not None
    job = queue.ask(request_for(str(checkpoint), step, key))
    while (now := queue.get(job.id)) is not None and not now.has_ended:
        office.step()
    assert now is not None
    return now


def version_of(job: Job) -> int | None:
    return None if job.report is None else job.report.version


def reopened(opened: Opening, office: Office, **settings: Any) -> Office:
    office.publish_loop.close()
    return opened(**settings)


def settled(office: Office, steps: int = 4) -> list[tuple[int, int | None]]:
    for _ in range(steps):
        office.step()
    return office.published()


def skipped(office: Office) -> dict[str, str]:
    inbox = office.publish_loop.status().inbox
    assert inbox is not None and inbox.skipped_count >= len(inbox.skipped)
    return {each.name: each.reason for each in inbox.skipped}


def rewritten_in_place(directory: Path, step: int = 5) -> None:
    """Same names, sizes, inodes and mtimes."""
    for name, data in files_of(weights(step)).items():
        before = (directory / name).stat()
        with (directory / name).open("r+b") as file:
            file.write(data)
        os.utime(directory / name, ns=(before.st_atime_ns, before.st_mtime_ns))
        after = (directory / name).stat()
        assert (before.st_ino, before.st_size, before.st_mtime_ns) == (
            after.st_ino,
            after.st_size,
            after.st_mtime_ns,
        )


def replaced(directory: Path) -> None:
    shutil.rmtree(directory)
    rename_in(directory, weights(5))


def one_byte(directory: Path) -> None:
    [path] = directory.glob("model-00001-*")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    before = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


REWRITTEN = [(rewritten_in_place, False), (rewritten_in_place, True), (replaced, False), (one_byte, False)]
"""and whether the daemon is started anew"""


@pytest.mark.parametrize("carry", [False, True])
def test_a_rewritten_tokenizer_of_a_watched_checkpoint_is_compared(
    places: Places, opened: Opening, carry: bool
) -> None:
    """Same name, size, inode and mtime; the weights stay as they are."""
    office = opened(carry_config=carry)
    directory = write(places.watch / "step_1", weights(1))
    tokenizer = directory / "tokenizer.json"
    tokenizer.write_text('{"a": 1}')
    assert settled(office) == [(1, 1)]
    before = tokenizer.stat()
    with tokenizer.open("r+") as file:
        file.write('{"a": 2}')
    os.utime(tokenizer, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert settled(office) == ([(1, 1), (2, 1)] if carry else [(1, 1)])
    reason = "only its files changed, not the content of version 1"
    assert skipped(office) == ({} if carry else {"step_1": reason})
    carried = [path.read_text() for path in places.channel.glob("weight_v000002/carried/*tokenizer.json")]
    assert carried == (['{"a": 2}'] if carry else [])
    [note] = office.publish_loop.status().line(0.0).notes
    assert note.startswith("carried to hosts: tokenizer.json" if carry else "changed: tokenizer.json")
    later = reopened(opened, office, carry_config=carry)
    assert settled(later) == [] and skipped(later) == {}


@pytest.mark.parametrize(("change", "restart"), REWRITTEN)
def test_a_key_over_rewritten_bytes_is_a_new_publication(
    places: Places, opened: Opening, tmp_path: Path, change: Change, restart: bool
) -> None:
    checkpoint = write(tmp_path / "step_12", weights(1))
    office = opened(allow=[tmp_path])
    first = ask(office, checkpoint)
    change(checkpoint)
    if restart:
        office = reopened(opened, office, allow=[tmp_path])
    second = ask(office, checkpoint)
    assert (second.id, version_of(first), version_of(second)) == (first.id, 1, 2)
    assert second.earlier == first.report and "content changed since version 1" in second.note
    found = read(checkpoint)
    assert places.latest() == "000002" and read_checkpoint(places.local) == found
    again = ask(office, checkpoint)
    assert (again.state, again.report) == ("done", second.report) and "unchanged" in again.note
    assert places.latest() == "000002"


def test_a_retry_that_goes_back_to_an_older_step_is_named_by_its_key(
    places: Places, opened: Opening, tmp_path: Path
) -> None:
    office = opened(allow=[tmp_path])
    checkpoint = write(tmp_path / "step_12", weights(1))
    ask(office, checkpoint)
    ask(office, write(tmp_path / "step_13", weights(2)), 13, "step-13")
    rewritten_in_place(checkpoint)
    with capture_logs() as logs:
        ask(office, checkpoint)
    [line] = [each for each in logs if each["event"].startswith("step went back")]
    assert "an HTTP request published an older step" in line["event"]
    assert (line["key"], line["step"], line["previous_step"]) == ("step-12", 12, 13)


def read(checkpoint: Path) -> dict[str, bytes]:
    return read_checkpoint(checkpoint)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_retry_with_the_same_content_gives_the_same_answer(
    places: Places, opened: Opening, tmp_path: Path, shards: int
) -> None:
    """Also when the fleet has moved on, and the tensors lie in other files by now."""
    checkpoint = write(tmp_path / "step_12", weights(1))
    office = opened(allow=[tmp_path])
    first = ask(office, checkpoint)
    assert version_of(ask(office, write(tmp_path / "step_13", weights(2)), 13, "step-13")) == 2
    shutil.rmtree(checkpoint)
    write(checkpoint, weights(1), shards)
    again = ask(office, checkpoint)
    assert (again.state, again.report, places.latest()) == ("done", first.report, "000002")
    assert first.report is not None and len(first.report.root) == 64


def test_a_failed_publication_is_tried_again_with_the_same_key(
    places: Places, opened: Opening, tmp_path: Path
) -> None:
    checkpoint = write(tmp_path / "step_12", {"other": base_tensors()["layer.0.up"]})
    office = opened(allow=[tmp_path])
    assert ask(office, checkpoint).state == "failed"
    shutil.rmtree(checkpoint)
    write(checkpoint, weights(1))
    fixed = ask(office, checkpoint)
    assert (fixed.state, fixed.error, version_of(fixed)) == ("done", None, 1)
    (checkpoint / "model-00001-of-00002.safetensors").unlink()
    torn = ask(office, checkpoint)
    assert (torn.state, torn.report) == ("failed", None) and torn.error is not None
    write(checkpoint, weights(1))
    assert version_of(ask(office, checkpoint)) == 1 and places.latest() == "000001"


@pytest.mark.parametrize("moment", ["publish.recovered", "pointer.moved"])
def test_rewritten_and_asked_for_again_while_it_is_published(
    places: Places, opened: Opening, tmp_path: Path, moment: str
) -> None:
    """Before and after it was read."""
    checkpoint = write(tmp_path / "step_12", weights(1))
    office, asked = opened(allow=[tmp_path]), list[Job]()

    def rewrite_once(name: str, where: Path | None) -> None:
        if name == moment and not asked and office.publish_loop.queue is not None:
            asked.append(office.publish_loop.queue.open()[0])
            replaced(checkpoint)
            assert (
                office.publish_loop.queue.ask(request_for(str(checkpoint), 12, "step-12")).state == "running"
            )

    with watched(rewrite_once):
        ended = ask(office, checkpoint)
    assert asked and version_of(ended) == (2 if moment == "pointer.moved" else 1)
    assert read_checkpoint(places.local) == bytes_of(weights(5))


def test_a_checkpoint_that_is_gone_is_answered_from_memory_by_name(
    places: Places, opened: Opening, tmp_path: Path
) -> None:
    checkpoint = write(tmp_path / "step_12", weights(1))
    office = opened(allow=[tmp_path])
    first = ask(office, checkpoint)
    queue = office.publish_loop.queue
    assert queue is not None and first.report is not None
    job = queue.ask(request_for(str(checkpoint), 12, "step-12"))
    shutil.rmtree(checkpoint)
    office.step()
    found = queue.get(job.id)
    assert found is not None and (found.state, found.report) == ("done", first.report)
    assert "not compared" in found.note and f"version 1, root {first.report.root}" in found.note


def test_keys_over_http(places: Places) -> None:
    daemon = Daemon.start(places, "--allow", str(places.root), "--consume").ready()
    try:
        checkpoint = write(places.root / "step_12", weights(1))
        body = {"checkpoint": str(checkpoint), "step": 12, "key": "step-12"}

        def post() -> dict[str, Any]:
            answer = daemon.post("/v1/publish", body)
            assert answer.status_code == 202
            url = f"/v1/publications/{answer.json()['id']}"
            found: dict[str, Any] = wait_until(
                lambda: job if (job := daemon.get(url).json())["state"] in ("done", "failed") else None
            )
            return found

        first = post()
        assert post()["report"] == first["report"]
        rewritten_in_place(checkpoint)
        second = post()
        assert (second["state"], second["report"]["version"]) == ("done", 2)
        assert second["report"]["root"] != first["report"]["root"] == second["earlier"]["root"]
        shutil.rmtree(checkpoint)
        gone = daemon.post("/v1/publish", body).json()
        assert (gone["state"], gone["report"]) == ("done", second["report"])
        assert f"version 2, root {second['report']['root']}" in gone["note"]
        assert daemon.get(f"/v1/publications/{gone['id']}").json() == gone
        other = daemon.post("/v1/publish", {**body, "checkpoint": str(places.root / "step_13")})
        assert other.status_code == 409 and daemon.status()["version"] == 2
        assert other.json()["message"] == f"this key was used with checkpoint {checkpoint}"
        assert daemon.stop() == 0
    finally:
        daemon.kill()


def touched(directory: Path) -> None:
    for path in directory.iterdir():
        os.utime(path)


def touched_in_part(directory: Path) -> None:
    os.utime(directory / "model-00001-of-00002.safetensors")


def chmodded(directory: Path) -> None:
    for path in directory.iterdir():
        path.chmod(0o640)


def restored(directory: Path) -> None:
    """From a backup: other inodes, the same times."""
    backup = directory.with_name(".backup")
    shutil.copytree(directory, backup)
    shutil.rmtree(directory)
    backup.rename(directory)


def copied_over(directory: Path) -> None:
    """As `cp -r` over it, or rsync without times."""
    for path in directory.iterdir():
        path.write_bytes(path.read_bytes())


def split_anew(directory: Path) -> None:
    tensors = weights(int(directory.name.removeprefix("step_")))
    shutil.rmtree(directory)
    write(directory, tensors, 3)


STATS = [touched, touched_in_part, chmodded, restored, copied_over, split_anew]


@pytest.mark.parametrize(("change", "restart"), [*((change, False) for change in STATS), (restored, True)])
def test_a_changed_stat_is_no_version(places: Places, opened: Opening, change: Change, restart: bool) -> None:
    """And takes no fleet back."""
    office = opened()
    for step in (1, 2):
        rename_in(places.watch / f"step_{step}", weights(step))
        office.settle()
    if restart:
        office.publish_loop.close()
    change(places.watch / "step_1")
    if restart:
        office = opened()
    settled(office)
    assert places.latest() == "000002"
    assert skipped(office) == {"step_1": "only its files changed, not the content of version 1"}
    settled(office)
    assert office.publish_loop.status().inbox.skipped_count == 1  # type: ignore[union-attr]
    rename_in(places.watch / "step_3", weights(3))
    assert settled(office)[-1] == (3, 3)


@pytest.mark.parametrize(("change", "passed_over"), list(zip(STATS, [False, True] * 3, strict=True)))
def test_what_was_never_published_stays_so_when_its_stat_changes(
    places: Places, opened: Opening, change: Change, passed_over: bool
) -> None:
    """It lay there at the first start, or newer ones were published in its place."""
    if passed_over:
        office = opened()
    rename_in(places.watch / "step_1", weights(1))
    if not passed_over:
        office = opened()
    rename_in(places.watch / "step_2", weights(2))
    assert settled(office) == [(1, 2)]
    change(places.watch / "step_1")
    assert settled(office) == [(1, 2)]
    assert list(skipped(office)) == ["step_1"] and "left alone" in skipped(office)["step_1"]
    office = reopened(opened, office)
    touched(places.watch / "step_1")
    assert settled(office) == [] and list(skipped(office)) == ["step_1"]
    one_byte(places.watch / "step_1")
    assert settled(office) == [(2, 1)]
    assert read_checkpoint(places.local) == read(places.watch / "step_1")


@pytest.mark.parametrize(("change", "restart"), REWRITTEN)
def test_other_content_under_the_same_name_and_stat_is_a_version(
    places: Places, opened: Opening, change: Change, restart: bool
) -> None:
    office = opened()
    rename_in(places.watch / "step_1", weights(1))
    office.settle()
    if restart:
        office.publish_loop.close()
    change(places.watch / "step_1")
    if restart:
        office = opened()
    settled(office)
    assert places.latest() == "000002" and skipped(office) == {}
    assert read_checkpoint(places.local) == read(places.watch / "step_1")


def test_a_name_that_holds_earlier_content_again_is_a_version(places: Places, opened: Opening) -> None:
    """Its content changed twice, whoever did that."""
    office = opened()
    for step in (1, 2, 1):
        shutil.rmtree(places.watch / "policy", ignore_errors=True)
        rename_in(places.watch / "policy", weights(step))
        office.settle()
    assert [version for version, _ in office.published()] == [1, 2, 3]
    assert read_checkpoint(places.local) == bytes_of(weights(1))


def test_a_copy_of_an_older_checkpoint_under_a_new_name_is_named_as_going_back(
    places: Places, opened: Opening, capfd: pytest.CaptureFixture[str]
) -> None:
    office = opened()
    for step in (1, 2):
        rename_in(places.watch / f"step_{step}", weights(step))
        office.settle()
    shutil.copytree(places.watch / "step_2", places.watch / "again")
    office.settle()
    assert not office.publish_loop.status().publications[0].notes
    shutil.copytree(places.watch / "step_1", places.watch / "best")
    office.settle()
    assert office.publish_loop.status().publications[0].notes == ("goes back to the content of version 1",)
    logged = "".join(capfd.readouterr())
    assert logged.count("content equals an earlier version") == 2
    assert logged.count("keep copies out of --watch") == 1


def test_a_consumed_checkpoint_that_comes_back_is_consumed_again(places: Places, opened: Opening) -> None:
    office = opened(consume=True)
    for step in (1, 2):
        rename_in(places.watch / f"step_{step}", weights(step))
        office.settle()
    office = reopened(opened, office, consume=True)
    for step in (1, 2):
        again = rename_in(places.watch / f"step_{step}", weights(step))
        settled(office)
        assert not again.exists() and "only its files" in skipped(office)[again.name]
    assert places.latest() == "000002"


def test_a_changed_stat_deletes_nothing(places: Places, opened: Opening) -> None:
    """What was published before `--consume`, or on request, stays."""
    office = opened()
    rename_in(places.watch / "step_1", weights(1))
    office.settle()
    office = reopened(opened, office, consume=True)
    assert version_of(ask(office, rename_in(places.watch / "step_2", weights(2)), 2)) == 2
    for step in (1, 2):
        touched(places.watch / f"step_{step}")
    settled(office)
    assert set(skipped(office)) == {"step_1", "step_2"} and places.latest() == "000002"
    assert all((places.watch / f"step_{step}" / INDEX).exists() for step in (1, 2))


def test_files_with_the_inodes_and_times_of_consumed_ones_are_new(places: Places, opened: Opening) -> None:
    """As an archive with fixed times is unpacked on a file system that uses inode numbers again."""
    office = opened(consume=True)
    seen: list[set[int]] = []
    for version, step in enumerate((1, 2, 3, 1), start=1):
        unfinished = write(places.watch / ".unfinished", weights(step))
        for path in unfinished.iterdir():
            os.utime(path, ns=(10**18, 10**18))
        seen.append({path.stat().st_ino for path in unfinished.iterdir()})
        unfinished.rename(places.watch / "policy")
        settled(office)
        assert places.latest() == f"{version:06}" and not (places.watch / "policy").exists()
        assert read_checkpoint(places.local) == bytes_of(weights(step))


@pytest.mark.parametrize("existing", [False, True])
def test_a_moved_watched_directory_offers_nothing_again(
    places: Places, opened: Opening, existing: bool
) -> None:
    office = opened(every=True)
    for step in (1, 2):
        rename_in(places.watch / f"step_{step}", weights(step))
        office.settle()
    office.publish_loop.close()
    moved = places.watch.rename(places.root / "moved")
    office = opened(watch=moved, existing=existing, every=True)
    assert settled(office) == [] and places.latest() == "000002"
    touched(moved / "step_1")
    assert settled(office) == [] and places.latest() == "000002"
    rename_in(moved / "step_3", weights(3))
    assert settled(office) == [(3, 3)]


def test_a_renamed_checkpoint_is_known_when_its_stat_changes(places: Places, opened: Opening) -> None:
    office = opened()
    for step in (1, 2):
        rename_in(places.watch / f"step_{step}", weights(step))
        office.settle()
    (places.watch / "step_1").rename(places.watch / "best")
    settled(office)
    touched(places.watch / "best")
    assert settled(office) == [(1, 1), (2, 2)] and list(skipped(office)) == ["best"]


def test_hard_links_to_a_checkpoint_are_the_same_checkpoint(places: Places, opened: Opening) -> None:
    """Making them changes the ctime of all its files."""
    rename_in(places.watch / "before", weights(9))
    office = opened()
    for step in (1, 2):
        rename_in(places.watch / f"step_{step}", weights(step))
        office.settle()
    for name in ("before", "step_1"):
        shutil.copytree(places.watch / name, places.watch / f"{name}_kept", copy_function=os.link)
    assert settled(office, 6) == [(1, 1), (2, 2)]
    rewritten_in_place(places.watch / "step_1")
    assert settled(office, 6)[-1][0] == 3
    assert read_checkpoint(places.local) == bytes_of(weights(5))


def test_a_stat_that_changes_before_it_is_read_costs_no_memory(places: Places, opened: Opening) -> None:
    office = opened()
    directory = rename_in(places.watch / "step_1", weights(1))
    office.settle()
    rewritten_in_place(directory)
    touching = []

    def touch_once(name: str, where: Path | None) -> None:
        if name == "inbox.chosen" and not touching:
            touching.append(name)
            rewritten_in_place(directory, 1)

    with watched(touch_once):
        settled(office)
    assert touching and places.latest() == "000001"
    assert skipped(office) == {"step_1": "only its files changed, not the content of version 1"}


def test_a_lower_step_with_new_content_is_published_and_named(places: Places, opened: Opening) -> None:
    office = opened()
    rename_in(places.watch / "step_10", weights(10))
    office.settle()
    office = reopened(opened, office)
    with capture_logs() as logs:
        for step in (4, 5):
            rename_in(places.watch / f"step_{step}", weights(step))
            settled(office)
    shown = [(p.version, p.step, p.resumed_from_step) for p in office.publish_loop.status().publications]
    assert shown == [(3, 5, None), (2, 4, 10)]
    assert sum("resumed from an earlier step" in each["event"] for each in logs) == 1
    office.publish_loop.close()
    with Publisher.open(places.channel, local=places.local, base=places.base) as publisher:
        report = publisher.publish_checkpoint(write(places.root / "by-hand", weights(3)), step=3)
        assert report.resumed_from_step == 5


def test_what_became_nan_is_published_with_a_warning(places: Places, opened: Opening) -> None:
    office, model = opened(), weights(1)
    scale = np.frombuffer(model["layer.0.scale"].data, np.float32).copy()
    scale[1:3] = np.nan
    model["layer.0.scale"] = model["layer.0.scale"]._replace(data=scale.view(np.uint8))
    with capture_logs() as logs:
        rename_in(places.watch / "step_1", model)
        settled(office)
    warned = [each["elements"] for each in logs if each["event"] == "elements became NaN or infinite"]
    assert places.latest() == "000001" and warned == [2]
    office.publish_loop.close()

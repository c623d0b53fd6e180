"""What trainers of all kinds leave in a watched directory: published, or named with what to do."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_cases import Model, bytes_of, pack, read_checkpoint
from daemonkit import INDEX, Places, base_tensors, changed, rename_in, write
from test_publish_loop import Office, interrupted_at
from waiting import wait_until

from weightcast.publisher.daemon.settings import PublisherSettings
from weightcast.publisher.daemon.sources import observation

Opening = Callable[..., Office]


@pytest.fixture
def opened(places: Places) -> Iterator[Opening]:
    offices: list[Office] = []

    def start(**settings: Any) -> Office:
        offices.append(Office(places, **settings))
        offices[-1].publish_loop.start()
        return offices[-1]

    yield start
    for office in offices:
        office.publish_loop.close()


def weights(step: int) -> Model:
    return changed(base_tensors(), step)


def critic() -> Model:
    """Another head than the base's."""
    tensors = base_tensors()
    tensors["value_head"] = ("BF16", (1, 8), np.zeros(16, np.uint8))
    del tensors["layer.1.up"]
    return tensors


def sources(office: Office) -> list[str]:
    return [each.source for each in reversed(office.publish_loop.status().publications)]


def inbox(office: Office) -> Any:
    return office.publish_loop.status().inbox


def pickles(directory: Path, *names: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        (directory / name).write_bytes(b"PK\x03\x04")
    return directory


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("run/epoch_1/step_20", "run/epoch_2/step_40"),
        ("global_step_20/actor/huggingface", "global_step_40/actor/huggingface"),
        ("step_20/policy/weights", "step_40/policy/weights"),
        ("iter_0000020/hf", "iter_0000040/hf"),
    ],
)
def test_checkpoints_at_any_depth_are_published(
    places: Places, opened: Opening, first: str, second: str
) -> None:
    office = opened(every=True)
    for step, name in ((1, first), (2, second)):
        write(places.watch / name, weights(step))
        pickles(places.watch / name.split("/")[0], "optimizer.pt", "rng_state_0.pth")
        office.settle()
        assert read_checkpoint(places.local) == bytes_of(weights(step))
    assert office.published() == [(1, 20), (2, 40)] and sources(office) == [first, second]
    office.publish_loop.close()
    later = opened(every=True)
    later.settle()
    assert later.published() == [] and inbox(later).waiting == inbox(later).left_alone == ()


def test_a_save_into_the_watched_directory_itself_is_published_each_time(
    places: Places, opened: Opening
) -> None:
    office = opened()
    rename_in(places.watch / "checkpoint-100", weights(1))
    office.settle()
    pickles(places.watch, "training_args.bin")
    write(places.watch, weights(2))
    for line in range(5):
        (places.watch / "train.log").write_text("line\n" * line)
        office.step()
    write(places.watch, weights(3))
    office.settle()
    assert sources(office) == ["checkpoint-100", ".", "."]
    assert read_checkpoint(places.local) == bytes_of(weights(3))


def test_one_that_is_renamed_with_the_directory_around_it_needs_no_second_look(
    places: Places, opened: Opening
) -> None:
    office = opened(settle_seconds=3600.0)
    write(places.root / "unfinished" / "actor" / "hf", weights(1))
    (places.root / "unfinished").rename(places.watch / "global_step_1")
    office.renamed.append("global_step_1")
    office.step()
    assert sources(office) == ["global_step_1/actor/hf"]
    write(places.watch / "global_step_1" / "actor" / "hf", weights(2))
    office.settle()
    assert places.latest() == "000001", "written again in its place it has to settle"


def test_a_marker_may_lie_in_the_directory_around_it(places: Places, opened: Opening) -> None:
    office = opened(marker="DONE")
    write(places.watch / "global_step_1" / "actor" / "hf", weights(1))
    office.settle()
    (waiting,) = inbox(office).waiting
    assert waiting.reason == "DONE is not there" and "write DONE" in waiting.remedy
    (places.watch / "global_step_1" / "DONE").touch()
    office.step()
    assert office.published() == [(1, 1)]


def test_the_one_that_fits_the_base_is_published_and_the_other_is_named_once(
    places: Places, opened: Opening, capfd: pytest.CaptureFixture[str]
) -> None:
    office = opened(every=True)
    for step in (1, 2, 3):
        write(places.watch / f"global_step_{step}" / "critic" / "hf", critic())
        write(places.watch / f"global_step_{step}" / "actor" / "hf", weights(step))
        office.settle()
    assert sources(office) == [f"global_step_{step}/actor/hf" for step in (1, 2, 3)]
    (left,) = inbox(office).left_alone
    assert left.name == "global_step_*/critic/hf" and "--watch-pattern" in left.remedy
    assert inbox(office).refused == () and "".join(capfd.readouterr()).count("critic/hf ") == 1


@pytest.mark.parametrize("pattern", [None, "global_step_*/ref/hf"])
def test_of_two_that_fit_the_pattern_chooses(places: Places, opened: Opening, pattern: str | None) -> None:
    office = opened(watch_pattern=pattern)
    write(places.watch / "global_step_1" / "actor" / "hf", weights(1))
    write(places.watch / "global_step_1" / "ref" / "hf", weights(2))
    office.settle()
    (left,) = inbox(office).left_alone
    assert "global_step_*/actor/hf" in left.name and "--watch-pattern" in left.reason + left.remedy
    assert sources(office) == ([] if pattern is None else ["global_step_1/ref/hf"])


def test_a_copy_of_an_old_checkpoint_elsewhere_takes_nobody_back(places: Places, opened: Opening) -> None:
    office = opened()
    for step in (1, 2):
        write(places.watch / "run" / f"step_{step}", weights(step))
        office.settle()
    write(places.watch / "archive" / "kept" / "step_1", weights(1))
    office.settle()
    assert office.published() == [(1, 1), (2, 2)]
    (left,) = inbox(office).left_alone
    assert left.name == "archive/kept/step_*" and "run/step_*" in left.reason


WITHOUT_SAFETENSORS = {
    "bin": (["step_1/pytorch_model.bin", "step_1/optimizer.pt"], "step_1", "pytorch_model.bin"),
    "sharded bin": (["step_1/pytorch_model-00001-of-00002.bin"], "step_1", "PyTorch"),
    "verl": (
        ["global_step_1/actor/model_rank_0.pt", "global_step_1/critic/m.pt"],
        "global_step_1/actor",
        ".pt",
    ),
    "dcp": (["step_1/__0_0.distcp", "step_1/.metadata"], "step_1", "PyTorch distributed checkpoint"),
    "gguf": (["deep/step_1/q4.gguf"], "deep/step_1", "GGUF"),
    "root": (["pytorch_model.bin"], ".", "pytorch_model.bin"),
}


@pytest.mark.parametrize("kind", WITHOUT_SAFETENSORS)
def test_weights_in_another_format_are_named_once_with_what_to_do(
    places: Places, opened: Opening, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    files, name, seen = WITHOUT_SAFETENSORS[kind]
    office = opened()
    for file in files:
        pickles((places.watch / file).parent, Path(file).name)
    (places.watch / "logs").mkdir()
    (places.watch / "logs" / "events").touch()
    for _ in range(5):
        office.step()
    (waiting,) = [each for each in inbox(office).waiting if each.name != "logs"]
    assert waiting.name == name and seen in waiting.reason and "safe_serialization=True" in waiting.remedy
    logged = "".join(capfd.readouterr())
    assert logged.count("not published yet") == 1 and seen in logged and "/logs" not in logged


def test_partial_saves_are_named_with_what_is_missing(
    places: Places, opened: Opening, capfd: pytest.CaptureFixture[str]
) -> None:
    office = opened()
    first = write(places.watch / "run" / "step_1", weights(1))
    (first / "model-00002-of-00002.safetensors").unlink()
    (write(places.watch / "run" / "step_2", weights(2)) / INDEX).unlink()
    (places.watch / "step_3").mkdir()
    (places.watch / "step_3" / "config.json").write_text("{}")
    (places.watch / "step_4").mkdir()
    (places.watch / "step_4" / "model.safetensors").symlink_to("not-fetched-yet")
    for _ in range(5):
        office.step()
    reasons = {each.name: each.reason for each in inbox(office).waiting}
    assert "model-00002-of-00002.safetensors is missing" in reasons["run/step_1"]
    assert f"no {INDEX}" in reasons["run/step_2"] and "no safetensors" in reasons["step_3"]
    assert "link to nothing" in reasons["step_4"]
    assert "".join(capfd.readouterr()).count("not published yet") == 4


def test_what_cannot_be_read_is_named_without_an_error_number(places: Places, opened: Opening) -> None:
    (places.watch / "circle").symlink_to("circle")
    office = opened()
    write(places.watch / "run" / "step_1", weights(1))
    office.settle()
    (waiting,) = inbox(office).waiting
    assert waiting.name == "circle" and "Errno" not in waiting.reason and waiting.remedy
    assert sources(office) == ["run/step_1"]


@pytest.mark.parametrize("option", ["watch", "hand_over"])
@pytest.mark.parametrize("place", ["base/config.json", "channel", "channel/weight_v000001", "local/spool"])
def test_places_in_which_no_trainer_can_save_are_refused(places: Places, option: str, place: str) -> None:
    wrong = places.root / place
    settings = {"channel": places.channel, "local": places.local, "base": places.base, option: wrong}
    (problem,) = PublisherSettings.model_validate(settings).missing()
    assert str(wrong) in problem and "give" in problem


def test_a_temporary_name_that_is_never_renamed_is_reported(
    places: Places, opened: Opening, capfd: pytest.CaptureFixture[str]
) -> None:
    office = opened()
    names = {".step_1", "step_2.tmp", ".new/global_step_3/actor"}
    for name in names:
        write(places.watch / name, weights(1))
    for _ in range(5):
        office.step()
    assert {each.name for each in inbox(office).waiting} == names
    assert all("rename it" in each.remedy for each in inbox(office).waiting)
    assert "".join(capfd.readouterr()).count("temporary name") == 3 and places.latest() == ""


def test_links_add_nothing_and_are_not_followed_in_circles(places: Places, opened: Opening) -> None:
    office = opened(every=True)
    write(places.watch / "global_step_1" / "actor", weights(1))
    (places.watch / "latest").symlink_to("global_step_1")
    (places.watch / "global_step_1" / "policy").symlink_to("actor")
    (places.watch / "global_step_1" / "up").symlink_to("..")
    office.settle()
    (places.watch / "newest").symlink_to(write(places.root / "store", weights(2)))
    office.settle()
    assert sources(office) == ["global_step_1/actor", "newest"]


def test_own_directories_of_the_run_are_no_checkpoints(places: Places, opened: Opening) -> None:
    office = opened(watch=places.root)
    write(places.root / "host" / ".weightcast", {})
    write(places.root / "host", weights(7))
    write(places.root / "exports" / "step_1", weights(1))
    office.settle()
    write(places.root / "exports" / "step_2", weights(2))
    office.settle()
    assert sources(office) == ["exports/step_1", "exports/step_2"]
    assert inbox(office).waiting == inbox(office).refused == ()
    assert [each.name for each in inbox(office).left_alone] == ["base"], "as any checkpoint of before"


@pytest.mark.parametrize("channel_has_a_version", [False, True])
def test_what_comes_between_the_start_and_the_first_look(
    places: Places, opened: Opening, channel_has_a_version: bool
) -> None:
    """Is new for a channel without a version; else it is left alone, as what was there before the start."""
    if channel_has_a_version:
        first = opened()
        write(places.watch / "step_0", weights(9))
        first.settle()
        first.publish_loop.close()
        shutil.rmtree(places.local)
        shutil.rmtree(places.watch / "step_0")
    write(places.watch / "before", weights(8))
    office = Office(places)
    wait_until(lambda: time.time() > office.publish_loop._began + 0.05)
    write(places.watch / "run" / "step_1", weights(1))
    office.publish_loop.start()
    try:
        office.settle()
        left = {each.name: each.remedy for each in inbox(office).left_alone}
        # with a version, what is older would be published over it
        assert ("--existing" in left["before"]) is not channel_has_a_version
        assert "POST /v1/publish" in left["before"]
        assert sources(office) == ([] if channel_has_a_version else ["run/step_1"])
        assert ("run/step_1" in left) is channel_has_a_version
    finally:
        office.publish_loop.close()


def test_existing_checkpoints_are_published_by_a_restart_with_that_option(
    places: Places, opened: Opening
) -> None:
    write(places.watch / "run" / "step_1", weights(1))
    office = opened()
    office.settle()
    assert [each.name for each in inbox(office).left_alone] == ["run/step_1"] and places.latest() == ""
    office.publish_loop.close()
    later = opened(existing=True)
    later.settle()
    assert later.published() == [(1, 1)] and inbox(later).left_alone == ()
    later.publish_loop.close()
    write(places.watch / "step_2", weights(2))
    last = opened(existing=True)
    last.settle()
    assert last.published() == [(2, 2)]


def test_consuming_deletes_the_checkpoint_alone(
    places: Places, opened: Opening, capfd: pytest.CaptureFixture[str]
) -> None:
    office = opened(consume=True)
    state = pickles(places.watch / "global_step_1" / "actor", "optim.pt") / "optim.pt"
    write(places.watch / "global_step_1" / "actor" / "hf", weights(1))
    office.settle()
    assert office.published() == [(1, 1)] and [path.name for path in state.parent.iterdir()] == ["optim.pt"]
    write(places.watch, weights(2))
    office.settle()
    assert places.latest() == "000002" and (places.watch / INDEX).exists()
    assert "it is the watched directory itself" in "".join(capfd.readouterr())


def test_a_kill_while_a_nested_checkpoint_is_consumed_leaves_nothing(places: Places, opened: Opening) -> None:
    office = opened(consume=True)
    write(places.watch / "run" / "step_1", weights(1))
    with interrupted_at("inbox.aside"):
        office.settle()
    office.publish_loop.close()
    assert [path.name for path in (places.watch / "run").iterdir()] == [".weightcast-consuming-step_1"]
    later = opened(consume=True)
    later.settle()
    assert list((places.watch / "run").iterdir()) == [] and places.latest() == "000001"


def test_one_refused_checkpoint_is_one_warning(
    places: Places, opened: Opening, capfd: pytest.CaptureFixture[str]
) -> None:
    office = opened()
    rename_in(places.watch / "step_1", critic())
    office.settle()
    warnings = [line for line in "".join(capfd.readouterr()).splitlines() if "warning" in line]
    assert len(warnings) == 1 and "checkpoint refused" in warnings[0] and "value_head" in warnings[0]


@pytest.mark.parametrize("glob", ["/abs/*", "a/../b", "", "//"])
def test_patterns_that_lead_out_of_the_watched_directory_are_refused(places: Places, glob: str) -> None:
    with pytest.raises(ValueError, match="relative to the watched directory"):
        PublisherSettings(
            channel=places.channel,
            base=places.base,
            local=places.local,
            watch=places.watch,
            watch_pattern=glob,
        )


def test_other_safetensors_in_the_watched_directory_are_no_checkpoint(
    places: Places, opened: Opening, capfd: pytest.CaptureFixture[str]
) -> None:
    office = opened()
    for size in range(4):
        shard_of = {"replay": ("U8", (size,), np.zeros(size, np.uint8))}
        (places.watch / "replay_buffer.safetensors").write_bytes(pack(shard_of))
        office.step()
        office.step()
    rename_in(places.watch / "step_1", weights(1))
    office.settle()
    assert office.published() == [(1, 1)] and inbox(office).refused == ()
    (waiting,) = inbox(office).waiting
    assert waiting.name == "." and "none of its tensors" in waiting.reason
    assert "".join(capfd.readouterr()).count("none of its tensors") == 1


def test_many_files_elsewhere_hide_no_checkpoint(
    places: Places, opened: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observation, "_MOST_ENTRIES", 50)
    office = opened()
    pickles(places.watch / "a_dataset" / "part", *(f"{n}.jsonl" for n in range(100)))
    (places.watch / "a_dataset" / "part" / "more").mkdir()
    rename_in(places.watch / "step_1", weights(1))
    office.settle()
    assert office.published() == [(1, 1)]
    assert any("more than 50 files" in each.reason for each in inbox(office).waiting)

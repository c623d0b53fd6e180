"""The first calls of somebody who stays in Python: paths as text, a handle where a version is expected."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from core_cases import tensor, write_checkpoint

import weightcast.publisher
from weightcast.publisher import (
    NotInTime,
    OwnerAlive,
    Publisher,
    PublisherOptions,
    Refused,
    RetryLater,
    WeightcastError,
    WrongRun,
    init_channel,
)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "base", {"w": tensor(np.random.default_rng(0), "F32", 9, 5)})
    return "base"


def test_every_path_may_be_text(base: str) -> None:
    made = init_channel("channel", base)
    assert init_channel(Path("channel"), Path(base)) == made
    with Publisher.open("channel", local="local", base=base) as publisher:
        write_checkpoint(Path("export"), {"w": tensor(np.random.default_rng(1), "F32", 9, 5)})
        assert publisher.publish_checkpoint("export").version == 1


def test_a_handle_stands_for_its_version(base: str) -> None:
    init_channel("channel", base)
    with Publisher.open("channel", local="local", base=base) as publisher:
        handle = publisher.submit({"w": np.ones((9, 5), np.float32)})
        handle.result()  # a loaded machine takes longer than the timeout below
        with pytest.raises(NotInTime, match="version 1 or later"):
            publisher.wait(handle, timeout=0.1)
        with pytest.raises(Refused, match="not str"):
            publisher.wait("1", timeout=0.1)  # type: ignore[arg-type]


def test_a_prompt_shows_what_trainers_call(base: str) -> None:
    init_channel("channel", base)
    with Publisher.open("channel", local="local", base=base) as publisher:
        assert {"publish", "submit", "wait"} <= set(dir(publisher)) and "make_due" not in dir(publisher)
        assert all(hasattr(publisher, name) for name in dir(publisher))
        new = {"w": np.random.default_rng(1).random((9, 5), np.float32)}
        report = publisher.publish(new)
        assert f"{publisher.run_id} in " in repr(publisher) and "version 1" in repr(publisher)
        assert report.ratio == report.full_bytes / report.delta_bytes


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("non_finite", "refused", 'give "refuse" or "allow"'),
        ("until", "soon", 'give "patched" or "out"'),
        ("threads", "4", "give an integer >= 1"),
        ("threads", 0, "give an integer >= 1"),
        ("anchor_every", -1, "give an integer >= 0"),
        ("deadline_seconds", -1, "give a number >= 0"),
        ("deadline_seconds", float("nan"), "give a number >= 0"),
        ("publish_rate", 60000, "give a Rate"),
        ("take_over", "no", "give True or False"),
        ("trusted_keys", "a.pub", "give a Sequence"),
        ("upkeep", {}, "give a UpkeepOptions or None"),
        ("layout", None, 'give "plain" or "stitch"'),
    ],
)
def test_a_mistyped_option_is_refused_where_it_is_given(name: str, value: object, remedy: str) -> None:
    with pytest.raises(Refused, match=re.escape(f"{name} is {value!r} ({remedy})")):
        PublisherOptions(**{name: value})  # type: ignore[arg-type]


def test_options_may_be_numpy_s(base: str) -> None:
    options = PublisherOptions(threads=np.int64(2), deadline_seconds=np.float32(5))  # type: ignore[arg-type]
    init_channel("channel", base)
    with Publisher.open("channel", local="local", base=base, options=options) as publisher:
        assert publisher.publish({"w": np.ones((9, 5), np.float32)}).version == 1


def test_a_mistyped_encoding_is_refused_before_anything_is_made(base: str) -> None:
    init_channel("channel", base)
    with pytest.raises(Refused, match=r'encoding is .fst. .give "fast", "small", "xor"'):
        Publisher.open("channel", local="local", base=base, encoding="fst")  # type: ignore[arg-type]
    assert not Path("local").exists()


def test_a_start_that_is_refused_leaves_no_directory(base: str) -> None:
    init_channel("channel", base)
    write_checkpoint(Path("other"), {"w": tensor(np.random.default_rng(7), "F32", 9, 5)})
    with pytest.raises(WrongRun, match="other bytes than version 0"):
        Publisher.open("channel", local="local", base="other")
    assert not Path("local").exists()


def test_a_channel_that_goes_away_is_to_be_mounted_again(base: str) -> None:
    init_channel("channel", base)
    with Publisher.open("channel", local="local", base=base, options=None) as publisher:
        Path("channel").rename("away")
        again = "mount it again; do not make a new channel"
        with pytest.raises(RetryLater, match=again):
            publisher.publish({"w": np.ones((9, 5), np.float32)})
        with pytest.raises(WeightcastError, match=again):
            publisher.wait(1, timeout=0.1)
        Path("away").rename("channel")
        assert publisher.publish({"w": np.ones((9, 5), np.float32)}).version == 1


def test_a_publisher_that_this_process_has_open_is_said_to_be_its_own(base: str) -> None:
    init_channel("channel", base)
    with Publisher.open("channel", local="local", base=base):
        with pytest.raises(RetryLater, match=r"a writer \(this process\).*call close\(\)"):
            Publisher.open("channel", local="local", base=base)
        with pytest.raises(OwnerAlive, match=r"this process has .* open already .*call close\(\)"):
            Publisher.open("channel", local="other", base=base)
    assert not Path("other").exists() and Path("local").exists()


def test_errors_are_importable_from_where_the_publisher_is() -> None:
    for name in ("WeightcastError", "Refused", "RetryLater", "NotInTime", "WrongRun", "Forked", "OwnerAlive"):
        assert name in dir(weightcast.publisher) and issubclass(
            getattr(weightcast.publisher, name), Exception
        )


@pytest.mark.parametrize(
    ("given", "wanted", "remedy"),
    [
        ("actor.{}", "{}", "drop the prefix actor. from all names"),
        ("{}", "actor.{}", "put actor. in front of all names"),
    ],
)
def test_names_that_differ_by_a_prefix_are_one_problem(
    tmp_path: Path, given: str, wanted: str, remedy: str
) -> None:
    names, word = [f"layers.{number}.weight" for number in range(12)], np.zeros(4, np.float32)
    tensors = {wanted.format(name): tensor(np.random.default_rng(0), "F32", 4) for name in names}
    write_checkpoint(tmp_path / "base", tensors)
    init_channel(tmp_path / "channel", tmp_path / "base")
    with Publisher.open(tmp_path / "channel", local=tmp_path / "local", base=tmp_path / "base") as publisher:
        with pytest.raises(Refused, match="all 12 names differ: ") as refused:
            publisher.publish({given.format(name): word for name in names})
        assert given.format(names[0]) in refused.value.message and refused.value.remedy.startswith(remedy)

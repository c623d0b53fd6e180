"""Bad input changes nothing, byte for byte: not the channel, not the publisher's local checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_cases import Model, Tensor, all_changed, header_of, snapshot, some_changed, tensor, write_checkpoint
from publisher_cases import ENCODINGS, Place, as_numpy, make_place

from weightcast.publisher import Publisher, RawTensor, init_channel
from weightcast.shared.base.errors import DamagedFile, Refused, RetryLater, WeightcastError, WrongRun
from weightcast.shared.channel.chain import verify
from weightcast.shared.channel.channel import Channel, NoChannel
from weightcast.shared.channel.directory_store import open_store


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(77)


@pytest.fixture
def place(tmp_path: Path, rng: np.random.Generator) -> Place:
    place = make_place(tmp_path)
    place.publish(some_changed(place.model, rng))
    return place


def refuses(place: Place, new: Path, kind: type[WeightcastError], *texts: str) -> None:
    """`new` is refused with every text in one message, and changes nothing; good weights pass afterwards."""
    before = snapshot(place.channel), snapshot(place.pub)
    with place.publisher() as publisher:
        with pytest.raises(kind) as caught:
            publisher.publish_checkpoint(new)
        assert (snapshot(place.channel), snapshot(place.pub)) == before
        assert caught.value.remedy
        for text in texts:
            assert text in str(caught.value)
        good = all_changed(place.model, np.random.default_rng(0))
        assert publisher.publish_checkpoint(place.new(good)).version == 2
    place.arrives(good, 2)


def test_everything_that_does_not_fit_is_listed_at_once(place: Place, rng: np.random.Generator) -> None:
    model = dict(place.model)
    del model["long"]
    model["renamed"] = model.pop("scalar")
    model["bf16.matrix"] = tensor(rng, "F16", 23, 17)
    model["f32.matrix"] = tensor(rng, "F32", 17, 23)
    refuses(
        place,
        place.new(model),
        Refused,
        "long is missing",
        "scalar is missing",
        "renamed is not part of the run",
        "bf16.matrix is F16 [23, 17], expected BF16 [23, 17]",
        "f32.matrix is F32 [17, 23], expected F32 [23, 17]",
        "round with --cast",
        "made with --frozen",
    )


def test_a_whole_model_in_another_precision_is_one_problem(tmp_path: Path, rng: np.random.Generator) -> None:
    place = make_place(tmp_path, {f"layer.{n:03}": tensor(rng, "BF16", 4, 4) for n in range(291)})
    wide = {name: tensor(rng, "F32", 4, 4) for name in place.model}
    with place.publisher() as publisher:
        with pytest.raises(Refused) as caught:
            publisher.publish_checkpoint(place.new(wide))
        assert "run: all 291 tensors are F32, the base has BF16 (" in str(caught.value)
        assert "round with --cast" in caught.value.remedy and "layer." not in str(caught.value)
        with pytest.raises(Refused) as caught:
            publisher.publish_checkpoint(place.new({**wide, "layer.000": place.model["layer.000"]}))
        assert "run: 290 tensors are F32, the base has BF16 (" in str(caught.value)
        few = {name: one for name, one in place.model.items() if name > "layer.100"}
        with pytest.raises(Refused, match=r"layer\.009 is missing; and 91 more \("):
            publisher.publish_checkpoint(place.new(few))


@pytest.mark.parametrize("world_size", [1, 2])
def test_many_renamed_tensors_are_one_problem(
    tmp_path: Path, rng: np.random.Generator, world_size: int
) -> None:
    """As experts that a trainer names otherwise."""
    place = make_place(tmp_path, {f"mlp.experts.{n}.gate.w": tensor(rng, "F32", 4) for n in range(48)})
    given = {f"mlp.experts.w1.{n}": as_numpy(one) for n, one in enumerate(place.model.values())}
    with place.publisher(world_size=world_size) as publisher, pytest.raises(Refused) as caught:
        publisher.publish(given, step=1)
    said = str(caught.value)
    assert "run: 48 tensors are not part of the run, as mlp.experts.w1.0; the run has mlp.experts." in said
    assert ("which is missing (48) (map names: give ((new_name(" in said) == (world_size == 1)


def cut_tail(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def cut_header(path: Path) -> None:
    os.truncate(path, 40)


def no_bytes(path: Path) -> None:
    path.write_bytes(b"")


def longer_header(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes((1 << 60).to_bytes(8, "little") + data[8:])


def overlap(path: Path) -> None:
    data = path.read_bytes()
    header, start = header_of(data)
    header["f32.matrix"]["data_offsets"] = header["i32.matrix"]["data_offsets"]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[start:])


def other_shape(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"dtype": "F32", "shape": [23, 17]', b'"dtype": "F32", "shape": [23, 18]'))


def twice(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"f32.matrix"', b'"i32.matrix"'))


@pytest.mark.parametrize("step", [np.int64(9), np.uint8(9), np.array(9)], ids=repr)
def test_a_step_may_be_numpy_s(place: Place, step: Any) -> None:
    model = {name: RawTensor(one.dtype, one.shape, one.data) for name, one in place.model.items()}
    with place.publisher() as publisher:
        first, second = publisher.publish(model, step=step), publisher.submit(model, step=step).result()
    assert (first.step, second.step) == (9, 9) and type(first.step) is int


@pytest.mark.parametrize("step", [True, np.True_, -1, 9.0, "9", 1 << 63, np.array([9, 9])], ids=repr)
def test_what_is_no_step_is_refused_before_anything_is_read(place: Place, step: Any) -> None:
    before = snapshot(place.channel)
    with place.publisher() as publisher:
        for publish in (publisher.publish, publisher.submit):
            with pytest.raises(Refused, match="is not a step number"):
                publish((pytest.fail("read") for _ in range(1)), step=step)  # type: ignore[operator]
    assert snapshot(place.channel) == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scalar": 3.0}, "scalar: expected a tensor, got float"),
        ({"scalar": torch.empty((), device="meta")}, "scalar is on the meta device"),
        (torch.nn.Linear(2, 2), "pairs, got Linear"),
        (None, "pairs, got NoneType"),
        (["scalar"], "pairs, got str"),
        ({3: np.float32(1)}, "pairs, got tuple"),
    ],
    ids=["a number", "meta", "a module", "none", "names", "numbers"],
)
def test_what_is_no_tensor_is_named(place: Place, given: Any, message: str) -> None:
    before = snapshot(place.channel)
    with place.publisher() as publisher, pytest.raises(Refused, match=message) as caught:
        publisher.publish(given)
    assert caught.value.remedy and snapshot(place.channel) == before


@pytest.mark.parametrize(
    "damage", [cut_tail, cut_header, no_bytes, longer_header, overlap, other_shape, twice]
)
def test_lying_safetensors_files(place: Place, damage: Callable[[Path], None]) -> None:
    new = place.new(all_changed(place.model, np.random.default_rng(1)))
    damage(new / "model.safetensors")
    refuses(place, new, DamagedFile, "model.safetensors")


def test_an_index_that_names_a_missing_shard(place: Place, tmp_path: Path) -> None:
    new = write_checkpoint(tmp_path / "split", place.model, files=3)
    (new / "model-00002-of-00003.safetensors").unlink()
    refuses(place, new, DamagedFile, "model-00002-of-00003.safetensors")


def test_an_index_that_names_a_short_shard(place: Place, tmp_path: Path) -> None:
    new = write_checkpoint(tmp_path / "split", place.model, files=3)
    cut_tail(new / "model-00003-of-00003.safetensors")
    refuses(place, new, DamagedFile, "model-00003-of-00003.safetensors")


def test_an_index_that_places_a_tensor_wrongly_is_read_as_engines_read_it(
    place: Place, tmp_path: Path, rng: np.random.Generator
) -> None:
    model = all_changed(place.model, rng)
    new = write_checkpoint(tmp_path / "split", model, files=2)
    index = new / "model.safetensors.index.json"
    text = index.read_text()
    found = json.loads(text)["weight_map"]["long"]
    other = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"} - {found}
    index.write_text(text.replace(f'"long": "{found}"', f'"long": "{other.pop()}"'))
    with place.publisher() as publisher:
        report = publisher.publish_checkpoint(new)
    assert any("names another file for tensors: long" in note for note in report.notes)
    place.arrives(model, 2)


def test_a_checkpoint_without_config_is_taken(place: Place, rng: np.random.Generator) -> None:
    model = all_changed(place.model, rng)
    new = place.new(model)
    (new / "config.json").unlink()
    (new / "tokenizer.json").unlink()
    with place.publisher() as publisher:
        assert publisher.publish_checkpoint(new).version == 2
    place.arrives(model, 2)


@pytest.mark.parametrize("what", ["nothing there", "an empty directory", "a file", "a delta"])
def test_what_is_no_checkpoint(place: Place, tmp_path: Path, what: str) -> None:
    new = tmp_path / "thing"
    if what == "an empty directory":
        new.mkdir()
    elif what == "a file":
        new.write_text("weights")
    elif what == "a delta":
        new = place.channel / "weight_v000001"
    refuses(place, new, WeightcastError)


@pytest.mark.parametrize("how", ["in place", "cut short", "by rename", "removed", "config"])
def test_a_checkpoint_that_changes_while_it_is_read(place: Place, rng: np.random.Generator, how: str) -> None:
    model = all_changed(place.model, rng)
    new = place.new(model)
    file = new / "model.safetensors"
    other = place.new(all_changed(model, rng)) / "model.safetensors"

    def change(phase: str) -> None:
        if phase != "diff":
            return
        if how == "in place":
            file.write_bytes(other.read_bytes())
        elif how == "cut short":
            os.truncate(file, 200)
        elif how == "by rename":
            other.rename(file)
        elif how == "removed":
            file.unlink()
        else:
            (new / "config.json").write_text('{"a": 1}')

    before = snapshot(place.channel), snapshot(place.pub)
    with place.publisher() as publisher:
        with pytest.raises(Refused, match="changed while it was read"):
            publisher.publish_checkpoint(new, watching=change)
        after = snapshot(place.channel, leave_out=("publishers", ".trash", "weight_v000002.parts"))
        assert (after, snapshot(place.pub)) == before
        assert publisher.publish_checkpoint(place.new(model)).version == 2
    place.arrives(model, 2)


# opening


def test_a_local_directory_of_another_run(place: Place, tmp_path: Path) -> None:
    other = make_place(tmp_path / "other", {"w": tensor(np.random.default_rng(0), "F32", 3)})
    for name in ("channel.json", "base.json"):
        path = other.channel / name
        path.write_text(path.read_text().replace("run-under-test", "another-run"))
    before = snapshot(place.pub), snapshot(other.channel)
    with pytest.raises(WrongRun, match="run-under-test"), other.publisher(local=place.pub):
        pass
    assert (snapshot(place.pub), snapshot(other.channel)) == before


def test_a_local_directory_with_somebody_s_files(place: Place, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "mine", place.model)
    before = snapshot(tmp_path / "mine")
    with pytest.raises(Refused, match="not empty"), place.publisher(local=tmp_path / "mine"):
        pass
    assert snapshot(tmp_path / "mine") == before


def test_another_base(place: Place, tmp_path: Path, rng: np.random.Generator) -> None:
    base = write_checkpoint(tmp_path / "wrong", all_changed(place.model, rng))
    with (
        pytest.raises(WrongRun, match="with other bytes than"),
        place.publisher(local=tmp_path / "pub2", base=base),
    ):
        pass


def test_no_channel(tmp_path: Path, place: Place) -> None:
    with pytest.raises(RetryLater), Publisher.open(tmp_path / "nowhere", local=tmp_path / "l"):
        pass
    (tmp_path / "plain").mkdir()
    with (
        pytest.raises(Refused, match="channel init"),
        Publisher.open(tmp_path / "plain", local=tmp_path / "l"),
    ):
        pass


def test_an_option_given_as_an_argument_names_where_it_belongs(place: Place) -> None:
    with pytest.raises(TypeError, match=r"no argument threads, until: .*PublisherOptions\(threads=.*until="):
        Publisher.open(place.channel, local=place.pub, threads=2, until="out")  # type: ignore[arg-type]


def test_a_publisher_in_the_same_local_directory(place: Place) -> None:
    with place.publisher(), pytest.raises(RetryLater, match="already has a writer"), place.publisher():
        pass


# making channels


def test_a_channel_that_is_made_after_a_look_at_it_is_nobody_elses(place: Place, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    early = Channel.open(open_store(tmp_path / "made"))
    assert early.foreign and early.pointer() is None
    shutil.copytree(place.channel, tmp_path / "made", dirs_exist_ok=True)
    with pytest.raises(NoChannel):
        early.pointer()
    assert Channel.open(open_store(tmp_path / "made")).pointed() == 1


def test_a_channel_is_made_once(place: Place, tmp_path: Path, rng: np.random.Generator) -> None:
    before = snapshot(place.channel)
    assert init_channel(place.channel, place.base).run_id == "run-under-test"
    other = write_checkpoint(tmp_path / "other", all_changed(place.model, rng))
    with pytest.raises(WrongRun):
        init_channel(place.channel, other)
    assert snapshot(place.channel) == before


def test_a_channel_is_not_made_over_another_system_s(tmp_path: Path, place: Place) -> None:
    channel = tmp_path / "theirs"
    (channel / "weight_v000001").mkdir(parents=True)
    (channel / "latest").write_text("000001")
    before = snapshot(channel)
    with pytest.raises(Refused, match="another system"):
        init_channel(channel, place.base)
    assert snapshot(channel) == before


@pytest.mark.parametrize("aliases", [{"a": "nowhere"}, {"a": "long", "long": "scalar"}])
def test_aliases_lead_to_tensors(tmp_path: Path, place: Place, aliases: dict[str, str]) -> None:
    with pytest.raises(Refused, match="alias"):
        init_channel(tmp_path / "new", place.base, aliases=aliases)
    assert not (tmp_path / "new" / "channel.json").exists()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_an_error_while_writing_leaves_no_file_open(
    place: Place, rng: np.random.Generator, encoding: str
) -> None:
    """Refused in the middle of the diff: half-written shards go away."""
    model: Model = all_changed(place.model, rng, 200)
    new = place.new(model)

    def change(phase: str) -> None:
        if phase == "diff":
            os.truncate(new / "model.safetensors", (new / "model.safetensors").stat().st_size - 9000)

    with place.publisher(encoding=encoding) as publisher:
        with pytest.raises(Refused):
            publisher.publish_checkpoint(new, watching=change)
        assert not list(place.channel.rglob("*.safetensors"))[2:]
        assert publisher.publish_checkpoint(place.new(model)).version == 2


# two that make a channel at once


def test_two_make_one_channel_at_once(place: Place, tmp_path: Path) -> None:
    """The second is slow: the channel is made, and used, while it hashes the base."""
    channel = tmp_path / "new"
    made: list[str] = []

    def make(nbytes: int) -> None:
        if not made:
            made.append("")
            made[0] = init_channel(channel, place.base).run_id
            with Publisher.open(channel, local=tmp_path / "local", base=place.base) as publisher:
                publisher.publish_checkpoint(place.new(place.model))

    assert init_channel(channel, place.base, advance=make).run_id == made[0]
    assert verify(Channel.open(open_store(channel))) == []
    with Publisher.open(channel, local=tmp_path / "local", base=place.base) as publisher:
        assert publisher.publish_checkpoint(place.new(place.model)).version == 2


def test_a_base_of_an_init_that_came_to_nothing_is_taken_over(place: Place, tmp_path: Path) -> None:
    channel = tmp_path / "new"
    run_id = init_channel(channel, place.base).run_id
    (channel / "channel.json").unlink()
    assert init_channel(channel, place.base).run_id == run_id
    (channel / "channel.json").unlink()
    other = write_checkpoint(tmp_path / "other", {**place.model, "more": place.model["long"]})
    with pytest.raises(WrongRun, match="is not a channel yet"):
        init_channel(channel, other)
    with pytest.raises(WrongRun, match="is not a channel yet"):
        init_channel(channel, place.base, run_id="another-run")


def test_a_closed_publisher_publishes_nothing(place: Place, rng: np.random.Generator) -> None:
    model = all_changed(place.model, rng)
    with place.publisher() as publisher:
        pass
    before = snapshot(place.channel)
    with pytest.raises(Refused, match="this publisher is closed"):
        publisher.publish_checkpoint(place.new(model))
    for change in (
        partial(publisher.submit, {}),
        publisher.recover,
        publisher.write_anchor,
        publisher.obey_orders,
        publisher.make_due,
        publisher.work_in_background,
    ):
        with pytest.raises(Refused, match="this publisher is closed"):
            change()
    assert snapshot(place.channel) == before


def test_weights_that_somebody_writes_while_they_are_published(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """Nothing wrong goes out, and the local checkpoint, which is right, is not seeded again for it."""
    place = make_place(tmp_path, {"w": tensor(rng, "F32", 1 << 21)})
    words, ended, refused = place.model["w"].data.view(np.uint32).copy(), threading.Event(), 0
    places = np.arange(0, len(words), 64)

    def train() -> None:
        while not ended.is_set():
            words[places] ^= 1

    trainer = threading.Thread(target=train)
    with place.publisher() as publisher:
        publisher.publish({"w": words.view(np.float32)})
        seeded = (place.pub / "model.safetensors").stat().st_ino
        trainer.start()
        try:
            deadline = time.monotonic() + 240
            while not refused and time.monotonic() < deadline:
                try:
                    publisher.publish({"w": words.view(np.float32)})
                except RetryLater as error:
                    assert "w changed while it was published" in error.message and error.remedy
                    refused += 1
        finally:
            ended.set()
            trainer.join()
        assert refused, "the writer was never in time"
        version = publisher.publish({"w": words.view(np.float32)}).version
    assert (place.pub / "model.safetensors").stat().st_ino == seeded
    place.arrives({"w": Tensor("F32", (len(words),), words.view(np.uint8))}, version)

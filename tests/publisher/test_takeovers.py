"""A publisher that lost the channel and wakes at a bad moment: what the new owner wrote stays."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from core_cases import Model, all_changed
from disk_errors import watched
from publisher_cases import Place, make_place, numpy_model

from weightcast.publisher import Publisher
from weightcast.publisher.maintenance.upkeep import UpkeepOptions
from weightcast.publisher.run_publisher import RunPublisher
from weightcast.shared.base.errors import Forked, Refused, RetryLater
from weightcast.shared.channel.chain import verify
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store

INDEX = "model.safetensors.index.json"
SPANS = UpkeepOptions(skip_span=64, history_share=1000.0)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(99)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return make_place(tmp_path, numpy_model(np.random.default_rng(3)))


def once(moment: str, then: Callable[[], object]) -> Callable[[str, Path | None], None]:
    """Does something at a failpoint, when it is passed for the first time."""
    left = [then]

    def look(name: str, where: Path | None) -> None:
        if name == moment and left:
            left.pop()()

    return look


def whole(place: Place) -> None:
    assert verify(Channel.open(open_store(place.channel))) == []


@pytest.mark.parametrize("moment", ["publish.assembled", "version.begun", "publish.proven", "index.allowed"])
def test_the_new_owner_s_version_is_not_cleared_away(
    place: Place, rng: np.random.Generator, moment: str
) -> None:
    """Both write the version of one number; the new owner is about to commit when the old one goes on."""
    model = all_changed(place.model, rng)
    with ExitStack() as stack:
        old = stack.enter_context(place.publisher())
        taken: list[Publisher] = []

        def publish() -> None:
            taken.append(stack.enter_context(place.publisher(local=place.root / "pub2", take_over=True)))
            assert taken[0].publish_checkpoint(place.new(model)).version == 1

        with watched(once(moment, publish)), pytest.raises((Refused, RetryLater)):
            old.publish_checkpoint(place.new(all_changed(model, rng)))
        place.arrives(model, 1)
        whole(place)
        assert taken[0].publish_checkpoint(place.new(place.model)).version == 2
    place.arrives(place.model, 2)
    whole(place)


@pytest.mark.parametrize("moment", ["publish.assembled", "version.begun", "publish.proven", "index.allowed"])
def test_a_version_that_the_old_owner_commits_meanwhile_is_whole(
    place: Place, rng: np.random.Generator, moment: str
) -> None:
    """It passed its last look at the claims before it was suspended: the number is its own, or nobody's."""
    models = [all_changed(place.model, rng), all_changed(place.model, rng)]
    with place.publisher() as old:
        steps: list[str] = []

        def overtake() -> None:
            with place.publisher(local=place.root / "pub2", take_over=True) as new:
                steps.append("taken")
                with watched(once(moment, lambda: steps.append("old goes on"))):
                    steps.append(str(new.publish_checkpoint(place.new(models[1])).version))

        with watched(once("index.allowed", overtake)), pytest.raises((Forked, RetryLater)):
            old.publish_checkpoint(place.new(models[0]))
    assert steps == ["taken", "old goes on", "1"]
    place.arrives(models[1], 1)
    whole(place)


def overtaken(place: Place, stack: ExitStack, model: Model) -> Publisher:
    """Another publisher has the channel and three versions more."""
    new = stack.enter_context(place.publisher(local=place.root / "pub2", take_over=True))
    for _ in range(3):
        new.publish_checkpoint(place.new(model))
    return new


@pytest.mark.parametrize("entry", ["obey_orders", "recover", "publish"])
def test_a_pointer_that_the_old_owner_puts_back_is_put_right(
    place: Place, rng: np.random.Generator, entry: str
) -> None:
    """It was suspended between its last look at the claims and the rename, and is told afterwards."""
    model = all_changed(place.model, rng)
    with ExitStack() as stack:
        old = stack.enter_context(place.publisher())
        taken: list[Publisher] = []
        with (
            watched(once("pointer.allowed", lambda: taken.append(overtaken(place, stack, model)))),
            pytest.raises(Refused, match="now belongs to"),
        ):
            old.publish_checkpoint(place.new(all_changed(model, rng)))
        latest, new = place.channel / "latest", taken[0]
        assert latest.read_text() == "000001"
        if entry == "publish":
            model = all_changed(model, rng)
            assert new.publish_checkpoint(place.new(model)).version == 5
        else:
            getattr(new, entry)()
            assert latest.read_text() == "000004"
        place.arrives(model, new.version)
        whole(place)


@pytest.mark.parametrize("moment", ["file.written", "file.synced"])
def test_an_old_owner_looks_again_before_it_renames_the_pointer(
    place: Place, rng: np.random.Generator, moment: str
) -> None:
    model = all_changed(place.model, rng)
    with ExitStack() as stack:
        old = stack.enter_context(place.publisher())
        latest = place.channel / "latest"

        def look(name: str, where: Path | None) -> None:
            if name == moment and where == latest and not taken:
                taken.append("begun")
                overtaken(place, stack, model)

        taken: list[str] = []
        with watched(look), pytest.raises(Refused, match="now belongs to"):
            old.publish_checkpoint(place.new(all_changed(model, rng)))
        assert taken and latest.read_text() == "000004"
        place.arrives(model, 4)
        whole(place)


def test_a_pointer_is_not_put_to_a_version_that_is_gone(place: Place, rng: np.random.Generator) -> None:
    """The channel was restored as it was before, beside its publisher."""
    with place.publisher() as publisher:
        for _ in range(2):
            publisher.publish_checkpoint(place.new(all_changed(place.model, rng)))
        (place.channel / "weight_v000002").rename(place.root / "gone")
        (place.channel / "latest").write_text("000001")
        assert publisher.obey_orders() is None
        assert publisher.version == 1


def test_the_new_owner_s_parts_stay(place: Place, rng: np.random.Generator) -> None:
    """The old one finishes what it left, once more, before it looks at the claims."""
    model = all_changed(place.model, rng)
    with (
        place.publisher() as old,
        place.publisher(local=place.root / "pub2", take_over=True) as new,
        watched(once("publish.assembled", old.recover)),
    ):
        assert new.publish_checkpoint(place.new(model)).version == 1
    assert not list(place.channel.glob("*.parts"))
    place.arrives(model, 1)


def test_a_directory_without_an_index_is_nobody_s(place: Place, rng: np.random.Generator) -> None:
    left = place.channel / "weight_v000001"
    left.mkdir()
    (left / "model-00000-of-00001.safetensors").write_bytes(b"half")
    model = all_changed(place.model, rng)
    assert place.publish(model) == 1
    place.arrives(model, 1)
    whole(place)


@pytest.mark.parametrize("beside", ["anchor", "from_v000000"])
def test_the_new_owner_s_upkeep_stays(place: Place, rng: np.random.Generator, beside: str) -> None:
    moment = "anchor.written" if beside == "anchor" else "skip.written"
    options = {"upkeep": None if beside == "anchor" else SPANS}

    def make(publisher: RunPublisher) -> None:
        if beside == "anchor":
            assert publisher.write_anchor()
        else:
            assert publisher.make_due()

    with ExitStack() as stack:
        old = stack.enter_context(place.publisher(**options))
        for seed in range(2):
            old.publish_checkpoint(place.new(all_changed(place.model, np.random.default_rng(seed))))

        def take_over() -> None:
            if beside != "anchor":
                # the history that it is made from lies in the old one's local checkpoint
                old._updater.close()
            local = place.root / "pub2" if beside == "anchor" else place.pub
            make(stack.enter_context(place.publisher(local=local, take_over=True, **options)))

        with watched(once(moment, take_over)), pytest.raises((Refused, RetryLater, OSError)):
            make(old)
        assert (place.channel / "weight_v000002" / beside / INDEX).exists()
        assert sorted(
            path.name for path in (place.channel / "weight_v000002").iterdir() if path.is_dir()
        ) == [beside]
    whole(place)


def test_an_anchor_that_is_made_twice_at_once_is_there_once(place: Place, rng: np.random.Generator) -> None:
    with place.publisher() as publisher:
        publisher.publish_checkpoint(place.new(all_changed(place.model, rng)))
        made: list[bool] = []
        with watched(once("anchor.written", lambda: made.append(publisher.write_anchor()))):
            made.append(publisher.write_anchor())
    assert made == [True, False]
    assert [path.name for path in (place.channel / "weight_v000001").iterdir() if path.is_dir()] == ["anchor"]
    whole(place)

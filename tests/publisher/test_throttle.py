"""What is made beside the versions while one is published."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
from core_cases import some_changed
from publisher_cases import make_place
from waiting import wait_until

from weightcast.publisher.maintenance.upkeep import Throttle, UpkeepOptions


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_work_rests_until_a_publication_ends() -> None:
    """For up to an hour, were it not to end."""
    clock, begun, rested = Clock(), threading.Event(), threading.Event()
    way = Throttle(most=3600.0, clock=clock)

    def work() -> None:
        way.begin()
        clock.now += 1000.0
        begun.set()
        way.rest()
        rested.set()

    worker = threading.Thread(target=work, daemon=True)
    with way.publishing():
        worker.start()
        assert begun.wait(60.0) and not rested.wait(0.1)
    assert rested.wait(60.0)


def test_work_goes_on_under_a_publication_that_does_not_end() -> None:
    clock = Clock()
    way = Throttle(most=0.01, clock=clock)
    with way.publishing():
        way.begin()
        clock.now += 1e9
        way.rest()


def test_time_in_which_nothing_was_to_do_is_not_rested_for() -> None:
    """It would rest for an hour."""
    clock = Clock()
    way = Throttle(most=3600.0, clock=clock)
    clock.now += 1e9
    with way.publishing():
        way.begin()
        way.rest()


def test_what_is_due_is_made_while_a_version_is_published(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    models, rng = [place.model], np.random.default_rng(5)
    with place.publisher(upkeep=UpkeepOptions(skip_span=2, history_share=1000.0)) as publisher:
        for _ in range(3):
            models.append(some_changed(models[-1], rng))
        for model in models[1:3]:
            publisher.publish_checkpoint(place.new(model))
        worker = publisher.work_in_background()
        assert worker is not None
        made: list[bool] = []

        def watching(phase: str) -> None:
            if phase == "stage":
                wait_until(lambda: not worker.busy, what="the delta is made")
                made.append((place.channel / "weight_v000002" / "from_v000000").is_dir())

        publisher.publish_checkpoint(place.new(models[3]), watching=watching)
        assert made == [True] and worker.problem == ""

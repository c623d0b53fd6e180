"""Stores that ignore conditions of writes: nothing in them keeps two publishers apart."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_cases import some_changed, write_checkpoint
from memory_store import MemoryStore
from publisher_cases import Place, StorePlace, numpy_model

from weightcast.publisher import init_channel
from weightcast.publisher.api import PublisherOptions
from weightcast.publisher.channel_repair import repair_channel
from weightcast.shared.base.errors import Refused
from weightcast.shared.doctor.observe import RunFacts, observe_bucket
from weightcast.shared.doctor.rules import judge_bucket


class Unfenced(MemoryStore):
    """Without the condition `ignored_here` of a put."""

    def __init__(self, ignored: str) -> None:
        super().__init__()
        # a process tries each channel once
        self._url, self.ignored_here = f"memory://{uuid.uuid4()}", ignored

    def _put(self, key: str, data: bytes, mode: Any = "overwrite") -> None:
        is_ignored = self.ignored_here == ("if-none-match" if mode == "create" else "if-match")
        super()._put(key, data, "overwrite" if is_ignored else mode)


@pytest.fixture(params=["if-none-match", "if-match"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    store = Unfenced(request.param)
    model = numpy_model(np.random.default_rng(3))
    made = StorePlace(tmp_path, model, store)
    write_checkpoint(made.base, model)
    init_channel(store, made.base, run_id=f"run-{request.param}", unfenced=True)
    return made


def test_a_publisher_refuses_it_and_changes_nothing(place: StorePlace) -> None:
    before = sorted(place.store.names())
    with pytest.raises(Refused, match="ignores if-") as raised:
        place.publish(place.model)
    assert "--unfenced" in raised.value.remedy and sorted(place.store.names()) == before
    assert not place.pub.exists()


def test_one_publisher_may_use_it_and_is_told(place: StorePlace, caplog: pytest.LogCaptureFixture) -> None:
    model = some_changed(place.model, np.random.default_rng(5))
    with caplog.at_level(logging.WARNING):
        assert place.publish(model, unfenced=True) == 1
    assert "never run two publishers" in caplog.text
    place.arrives(model, 1)


def test_init_and_repair_refuse_it_and_change_nothing(place: StorePlace) -> None:
    place.store.create("latest", b"000009")
    before = sorted(place.store.names())
    with pytest.raises(Refused, match="ignores if-") as raised:
        repair_channel(place.store)
    assert "--unfenced" in raised.value.remedy and sorted(place.store.names()) == before
    repair_channel(place.store, None, PublisherOptions(unfenced=True))
    other = Unfenced("if-match")
    with pytest.raises(Refused, match="ignores if-"):
        init_channel(other, place.base)
    assert other.names() == []


def test_doctor_recognises_it(place: StorePlace) -> None:
    facts = observe_bucket(place.store)
    assert facts is not None and facts.ignored
    [found] = [one for one in judge_bucket(facts, RunFacts(), None) if one.check == "conditional writes"]
    assert found.level == "failure" and facts.ignored in found.says


def test_a_store_with_conditions_ignores_none() -> None:
    store = MemoryStore()
    assert store.ignored() == "" and store.names() == []

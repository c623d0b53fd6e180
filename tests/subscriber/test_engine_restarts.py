"""Rules over the engines of a host."""

from __future__ import annotations

import pytest

from weightcast.subscriber.engines.base import EngineFacts
from weightcast.subscriber.engines.rules import needs_reload


@pytest.mark.parametrize(
    ("facts", "wanted"),
    [
        (EngineFacts(True, label="8", process="p"), False),
        (EngineFacts(True, label="8", process="q"), True),
        (EngineFacts(True, label="default", process="p"), True),
        (EngineFacts(True, label="default"), True),
        (EngineFacts(True, label="8"), False),
        (EngineFacts(True), False),
        (EngineFacts(False), False),
    ],
)
def test_a_restart_is_seen_in_process_or_label(facts: EngineFacts, wanted: bool) -> None:
    assert needs_reload(facts, "p", "8") is wanted


def test_nothing_to_compare_with_is_no_restart() -> None:
    assert not needs_reload(EngineFacts(True, label="8", process="p"), None, None)

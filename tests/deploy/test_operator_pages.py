"""The operator's pages against the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from weightcast.publisher.daemon import status as publisher_status
from weightcast.publisher.publish.publish_job import Publication
from weightcast.shared.base import errors
from weightcast.shared.daemon.status import Facts, Failure, LoopStatus
from weightcast.subscriber import status as host_status
from weightcast.subscriber.engines.base import KINDS, OPTIONS, POLICIES

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = (
    "operations.md", "publishing.md", "channel.md", "deploying.md", "monitoring.md", "runbook.md",
    "status.md", "hooks.md", "live-patch.md", "engine-groups.md",
)  # fmt: skip
OPERATIONS = "\n".join((DOCS / page).read_text() for page in PAGES)
SHOWN: tuple[type[BaseModel | Facts], ...] = (
    host_status.HostStatus,
    host_status.EngineStatus,
    host_status.LiveStatus,
    host_status.EngineVerifyStatus,
    host_status.UpdateStatus,
    host_status.Blocked,
    host_status.LastError,
    Failure,
    publisher_status.PublisherStatus,
    publisher_status.Progress,
    publisher_status.ReportedHost,
    publisher_status.InboxStatus,
    publisher_status.Totals,
    Publication,
    LoopStatus,
)


@pytest.mark.parametrize("model", SHOWN, ids=lambda model: model.__qualname__)
def test_every_field_of_the_status_is_explained(model: type[BaseModel | Facts]) -> None:
    names = model.__annotations__
    assert names and [name for name in names if f"`{name}`" not in OPERATIONS] == []


def error_classes(root: type[errors.WeightcastError]) -> list[type[errors.WeightcastError]]:
    here = [each for each in root.__subclasses__() if each.__module__ == errors.__name__]
    return [*here, *(below for each in here for below in error_classes(each))]


def test_every_error_and_exit_code_has_a_line() -> None:
    for error in error_classes(errors.WeightcastError):
        assert f"\n| `{error.__name__}` |" in OPERATIONS
        assert re.search(rf"\n\| {error.exit_code} \| .*{error.http_status}", OPERATIONS)


def test_every_engine_option_has_a_line() -> None:
    text = (DOCS / "engines.md").read_text()
    assert [option for option in OPTIONS if f"\n| `{option}` |" not in text] == []
    assert [word for word in (*KINDS, *POLICIES) if f"`{word}`" not in text] == []

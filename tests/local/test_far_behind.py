"""A host that is many versions behind: bounded by nothing but time and disk."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import pytest
from core_cases import bytes_of, read_checkpoint
from local_cases import Run, catch_up, following, make_run, step_to

VERSIONS = 20


@pytest.fixture
def few_files() -> Iterator[None]:
    """Fewer files may be open than there are versions."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(name) for name in os.listdir("/proc/self/fd")}
    free = (number for number in count() if number not in taken)
    last = next(islice(free, VERSIONS // 2, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (last, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("encoding", ["fast", "xor"])
def test_more_versions_than_open_files(tmp_path: Path, encoding: str, request: pytest.FixtureRequest) -> None:
    run: Run = make_run(tmp_path, VERSIONS, encoding=encoding)
    local = tmp_path / "local"
    with following(run, local) as updater:
        step_to(updater, 0)
        request.getfixturevalue("few_files")
        catch_up(updater)
    assert read_checkpoint(local) == bytes_of(run.latest)

"""Real engines: every start takes a quarter of a minute and three gigabytes."""

from __future__ import annotations

import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path
from statistics import median

import pytest
from vllm_world import (
    HERE,
    LOGS,
    START_SECONDS,
    TIMES,
    FreshLoad,
    Starts,
    World,
    engine_python,
    tail_of,
)

LOGS_SHOWN = 3


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What shares an engine comes together."""
    items.sort(key=_variant)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows what engine and daemon said last."""
    report = yield
    if report.failed:
        for log in [log for log in LOGS if log.exists()][-LOGS_SHOWN:]:
            report.sections.append((f"end of {log.parent.name}/{log.name}", tail_of(log)))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for engine, policy in sorted({(engine, policy) for engine, policy, *_ in TIMES}):
        pauses = [pause for *named, pause, _ in TIMES if named == [engine, policy]]
        reloads = [reload for *named, _, reload in TIMES if named == [engine, policy]]
        terminalreporter.write_line(
            f"{engine}, {policy}: {len(pauses)} versions, pause p50 {1000 * median(pauses):.0f} ms, max "
            f"{1000 * max(pauses):.0f} ms, reload p50 {1000 * median(reloads):.0f} ms"
        )


def _variant(item: pytest.Item) -> str:
    call = getattr(item, "callspec", None)
    return "" if call is None or "world" not in item.fixturenames else str(call.params.get("variant", ""))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    command = [engine_python(), HERE / "make_models.py", directory]
    subprocess.run(command, check=True, capture_output=True, timeout=START_SECONDS)
    return directory


@pytest.fixture(scope="session")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FreshLoad]:
    with FreshLoad(tmp_path_factory.mktemp("judge") / "log") as judge:
        yield judge


@pytest.fixture(scope="session")
def starts(models: Path, judge: FreshLoad, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starts]:
    with Starts(models, judge, tmp_path_factory.mktemp("starts")) as starts:
        yield starts


@pytest.fixture
def world(starts: Starts, variant: str) -> World:
    return starts.world(variant)

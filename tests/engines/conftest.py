"""Real engines: every start takes a quarter of a minute and three gigabytes."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from statistics import median

import pytest
from live_world import install
from vllm_world import HERE, LOGS, TIMES, FreshLoad, Starts, World, make_models, tail_of

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
    return make_models("make_models.py", tmp_path_factory.mktemp("models"))


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


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with weightcast-engine, and with `live_faults.py` for those who name it in VLLM_PLUGINS."""
    site = install(tmp_path_factory.mktemp("plugin"))
    (site / "live_faults.py").write_bytes((HERE / "live_faults.py").read_bytes())
    found = site / "live_faults-1.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: live-faults\nVersion: 1\n")
    (found / "entry_points.txt").write_text("[vllm.general_plugins]\nlive_faults = live_faults:register\n")
    return site

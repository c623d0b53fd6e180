"""The benchmark run on the smallest models: real daemons and commands, chunks, and its command line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.chunks import Masters, measure_case, measure_floor, simulated, unrelated
from benchmarks.files import (
    Block,
    ContenderFailed,
    Model,
    Scenario,
    anon_bytes,
    contender,
    cpu_seconds,
    digests_in,
    forget_pages,
    machine,
    measure_files,
    read_all,
)
from benchmarks.results import load
from benchmarks.run import Plan, check, full, measure, quick
from weightcast.shared.base.errors import Refused, RetryLater
from weightcast.shared.cli.main import run

SMALLEST = 4_000_000


def plan(**more: object) -> Plan:
    facts: dict[str, object] = {
        "quick": True,
        "densities": (0.014,),
        "rates": (),
        "threads": (1,),
        "rounds": 1,
        "scenarios": (),
        "empty_cache": False,
    }
    return Plan(**(facts | more))  # type: ignore[arg-type]


def test_a_model_on_disk_has_the_bytes_it_says_and_takes_steps(tmp_path: Path) -> None:
    model = Model(SMALLEST, seed=1)
    first = model.digests()
    assert digests_in(model.write(tmp_path / "a")) == first
    assert 0.8 * SMALLEST < model.nbytes < 1.05 * SMALLEST
    model.step(0.014)
    second = model.digests()
    assert digests_in(model.write(tmp_path / "b")) == second
    still = {name for name in first if first[name] == second[name]}
    assert still == {name for name in first if "norm" in name}
    assert read_all(sorted((tmp_path / "a").glob("*.safetensors")), 2) >= model.nbytes
    forget_pages(tmp_path)


@pytest.mark.parametrize("density", [0.003, 0.014, 0.18, 0.5])
def test_steps_change_the_share_that_was_asked_for(density: float) -> None:
    masters = Masters(1 << 18, seed=3)
    before = masters.words.copy()
    masters.step(density)
    assert np.count_nonzero(before != masters.words) / len(before) == pytest.approx(density, rel=0.1)
    case = simulated(1 << 18, density, seed=3)
    assert case.density == pytest.approx(density, rel=0.05)


@pytest.mark.parametrize("density", [0.0, 0.014, 1.0])
def test_chunks_of_every_density_are_measured(density: float) -> None:
    rows = list(measure_case(simulated(1 << 16, density, seed=0), "simulated", threads=2, rounds=1))
    assert [row.encoding for row in rows] == ["fast", "small", "field"]
    assert len({row.changed for row in rows}) == 1
    for row in rows:
        assert row.publish.low > 0 and row.apply.low > 0
        assert row.payload_bytes <= row.raw_bytes + 64 * row.chunks
        assert (row.bits is None) == (density == 0.0)


def test_unrelated_chunks_and_floors() -> None:
    rows = list(measure_case(unrelated(1 << 16, seed=0), "unrelated", threads=1, rounds=1))
    assert all(row.payload_bytes <= row.raw_bytes + 64 for row in rows)
    assert set(measure_floor(1, 1).seconds) >= {"memcpy", "read"}


def test_plans_cover_the_densities_sizes_and_threads() -> None:
    whole = full(2)
    assert {0.003, 0.014, 0.04, 0.08, 0.18, 0.5} <= set(whole.densities)
    sizes = [scenario.nbytes for scenario in whole.scenarios]
    assert min(sizes) == 20_000_000 and max(sizes) == 4_000_000_000
    assert whole.threads == (1, 2) and whole.rates[0] == 2e-7 and whole.rates[-1] == 1e-5
    assert max(scenario.nbytes for scenario in quick(2).scenarios) <= 100_000_000
    assert full(1).threads == (1,)


@pytest.mark.slow
def test_daemons_and_commands_end_to_end(tmp_path: Path) -> None:
    blocks = (Block(1), Block(1, 0.18), Block(1, doors="commands", cache="cold"))
    said: list[str] = []
    root = tmp_path / "room"
    root.mkdir()
    done = measure_files(Scenario(SMALLEST, 1, blocks, ("fast", "field")), root, seed=0, say=said.append)
    assert list(root.iterdir()) == []
    assert [(row.doors, row.encoding, row.rounds) for row in done.rows] == [
        (doors, name, 1) for doors in ("daemons", "daemons", "commands") for name in ("fast", "field")
    ]
    for row in done.rows:
        assert row.density == pytest.approx(row.asked_density, rel=0.2)
        for work in (row.publish, row.sync):
            assert work.seconds.median > 0 and work.cpu.median >= 0 and work.anon_bytes >= 0
    fast, field = done.rows[:2]
    assert fast.changed == field.changed and fast.version_bytes < field.version_bytes
    assert {"diff", "stage", "commit", "patch"} <= set(fast.publish.phases)
    assert {"xor", "zstd", "digest", "write", "baseline"} <= set(field.publish.phases)
    assert len(said) == 2 * 2 * 4 and {row.cache for row in done.reads} == {"cold", "warm"}


def test_a_contender_that_fails_says_what_its_log_says(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    broken = contender("field", tmp_path, tmp_path / "nowhere", 1)
    with pytest.raises(ContenderFailed, match="nowhere"):
        broken.start_host()
    broken.stop()
    with pytest.raises(ContenderFailed, match="no daemon"):
        broken.sync(1)


@pytest.mark.slow
def test_a_run_writes_results_and_pages(tmp_path: Path) -> None:
    room = tmp_path / "room"
    room.mkdir()
    tiny = plan(densities=(0.014,), rounds=1)
    made = measure(tiny, ("first-use",), room, tmp_path / "out" / "results.json", tmp_path / "docs")
    assert list(room.iterdir()) == []
    assert [use.what for use in made.first_use][-1] == "field's path"
    assert load(tmp_path / "out" / "results.json").first_use[0].seconds > 0
    assert "First use" in (tmp_path / "docs" / "benchmarks.md").read_text()


def test_what_cannot_be_run_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="nowhere"):
        check(plan(), ("files",), tmp_path / "nowhere")
    with pytest.raises(RetryLater, match="GB free"):
        check(plan(scenarios=(Scenario(1 << 60, 1, ()),)), ("files",), tmp_path)
    check(plan(scenarios=(Scenario(1 << 60, 1, ()),)), ("codec",), tmp_path)


def test_missing_torch_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [path for path in sys.path if "site-packages" not in path])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(Refused) as caught:
        check(plan(rates=(1e-6,)), ("codec",), None)
    assert "weightcast[bench]" in caught.value.remedy and "--untrained" in caught.value.remedy
    check(plan(), ("codec",), None)


def test_the_command_line_refuses_unknown_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--part", "nothing"]) == 2
    assert "codec, files, first-use" in capsys.readouterr().err


def test_the_command_line_reports_errors_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--quick", "--dir", str(tmp_path / "no"), "--json"]) == 3
    assert "no directory" in json.loads(capsys.readouterr().out)["message"]


def test_the_machine_is_described(tmp_path: Path) -> None:
    here = machine(tmp_path)
    assert here.cores >= 1 and here.memory_bytes > 1 << 28 and here.file_system != "unknown"
    assert anon_bytes(os.getpid()) > 1 << 20 and cpu_seconds(os.getpid()) > 0
    assert anon_bytes(1 << 30) == 0

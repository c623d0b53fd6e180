"""Results of the benchmark: their schema, what they say about the goals, and the pages made of them."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks.report import (
    FIGURES,
    PAGE,
    Chart,
    Series,
    figures,
    in_tree,
    of_machine,
    render,
    svg,
    with_figures,
)
from benchmarks.results import (
    ChunkRow,
    FileRow,
    FloorRow,
    Machine,
    ReadRow,
    Results,
    Spread,
    Work,
    dump,
    goals,
    load,
)

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


def spread(seconds: float) -> Spread:
    return Spread(median=seconds, low=0.9 * seconds, high=1.1 * seconds)


def chunk(encoding: str, density: float, seconds: float, bits: float, bound: float | None) -> ChunkRow:
    changed = round(density * 1_000_000)
    return ChunkRow(
        trace="simulated",
        case=f"{density:.1%}",
        threads=2,
        encoding=encoding,
        modes="1",
        raw_bytes=2_000_000,
        chunks=1,
        words=1_000_000,
        changed=changed,
        payload_bytes=round(changed * bits / 8),
        bound_bits=bound,
        publish=spread(seconds),
        apply=spread(seconds / 2),
    )


def work(seconds: float, anon_bytes: int = MIB) -> Work:
    return Work(
        seconds=spread(seconds), cpu=spread(2 * seconds), anon_bytes=anon_bytes, phases={"diff": seconds}
    )


def file_row(encoding: str, publishing: float, syncing: float, version_bytes: int, **more: object) -> FileRow:
    facts: dict[str, object] = {
        "doors": "daemons",
        "cache": "warm",
        "model_bytes": 4_000_000_000,
        "asked_density": 0.014,
        "threads": 2,
        "encoding": encoding,
        "rounds": 5,
        "elements": 2_000_000_000,
        "changed": 28_000_000,
        "version_bytes": version_bytes,
        "publish": work(publishing),
        "sync": work(syncing),
    }
    return FileRow.model_validate(facts | more)


def results(**more: object) -> Results:
    facts: dict[str, object] = {
        "quick": False,
        "seed": 0,
        "seconds": 90.0,
        "machine": Machine(
            cpu="a cpu",
            cores=2,
            memory_bytes=24 << 30,
            system="Linux",
            file_system="ext4",
            versions={"numpy": "2"},
        ),
        "chunks": (
            chunk("fast", 0.014, 0.1, 9.0, 8.9),
            chunk("small", 0.014, 0.2, 7.0, 6.5),
            chunk("field", 0.014, 0.6, 21.0, None),
            chunk("fast", 0.5, 0.9, 4.6, 4.5),
            chunk("field", 0.5, 0.3, 9.0, None),
            chunk("fast", 0.0, 0.1, 0.0, None),
            chunk("field", 0.0, 0.1, 0.0, None),
        ),
        "floors": (FloorRow(threads=2, nbytes=2_000_000, seconds={"memcpy": spread(0.01)}),),
        "files": (
            file_row("fast", 1.0, 0.5, 30_000_000),
            file_row("small", 1.5, 0.9, 22_000_000),
            file_row("field", 3.5, 1.5, 75_000_000),
            file_row("fast", 9.0, 5.0, 30_000_000, doors="commands"),
            file_row("field", 20.0, 20.0, 75_000_000, doors="commands"),
        ),
        "reads": (ReadRow(model_bytes=4_000_000_000, cache="warm", threads=2, seconds=spread(0.2)),),
    }
    return Results.model_validate(facts | more)


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(dump(results()))
    back = load(tmp_path / "results.json")
    assert dump(back) == dump(results()) and back.files[0].elements == 2_000_000_000


@pytest.mark.parametrize(
    "change", [{"format": 2}, {"unknown": 1}, {"chunks": [{"trace": "dreamt"}]}, {"machine": None}]
)
def test_other_files_are_refused_by_name(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({**json.loads(dump(results())), **change}))
    with pytest.raises(ValueError, match=re.escape(str(path))):
        load(path)


def found(given: Results) -> dict[str, tuple[float | None, bool | None]]:
    return {goal.text: (goal.found, goal.held) for goal in goals(given)}


def test_goals_take_the_worst_point_and_judge_it() -> None:
    judged = found(results())
    assert judged["`fast`, 0.3 to 4%: bits over entropy bound"] == (pytest.approx(9.0 / 8.9), True)
    assert judged["`small`, 0.3 to 4%: bits over entropy bound"] == (pytest.approx(7.0 / 6.5), False)
    assert judged["`fast`, 1 to 4%: bytes over `field`"] == (pytest.approx(0.4), True)
    assert judged["`small`, 1 to 4%: bytes over `field`"] == (pytest.approx(22 / 75), True)
    assert judged["`fast` in memory, 1.4%: publish, times `field`"] == (pytest.approx(6.0), True)
    assert judged["`fast` in memory, any density: apply, times `field`"] == (pytest.approx(1 / 3), False)
    assert judged["daemons, 4 GB, 1.4%: publish, times `field`"] == (pytest.approx(3.5), True)
    assert judged["daemons, 4 GB, 1.4%: sync, times `field`"] == (pytest.approx(3.0), False)
    assert judged["commands, 4 GB, 1.4%: sync, times `field`"] == (pytest.approx(4.0), True)
    assert judged["daemons: growth of anonymous memory, MiB"] == (1.0, True)


def test_goals_of_what_was_not_measured_are_neither_held_nor_missed() -> None:
    empty = goals(results(chunks=(), files=(), floors=(), reads=()))
    assert {(goal.found, goal.held) for goal in empty} == {(None, None)}


def test_a_contender_without_the_field_beside_it_is_not_judged() -> None:
    alone = results(files=(file_row("fast", 1.0, 0.5, 30_000_000),), chunks=())
    assert found(alone)["daemons, 4 GB, 1.4%: publish, times `field`"] == (None, None)


def test_spreads_of_ratios_are_of_the_least_and_the_most() -> None:
    (goal,) = (goal for goal in goals(results()) if goal.text.startswith("daemons, 4 GB, 1.4%: publish"))
    assert (goal.low, goal.high) == (pytest.approx(3.5 * 0.9 / 1.1), pytest.approx(3.5 * 1.1 / 0.9))


def test_too_much_memory_or_too_long_chunks_show() -> None:
    fat = file_row("fast", 1.0, 0.5, 30_000_000, publish=work(1.0, 600 * MIB))
    long = chunk("fast", 0.9, 0.1, 18.0, None)
    judged = found(results(files=(fat,), chunks=(long,)))
    assert judged["daemons: growth of anonymous memory, MiB"] == (600.0, False)
    assert judged["any input: bytes above raw per chunk"] == (25_000.0, False)


def test_pages_have_every_part_and_are_the_same_each_time() -> None:
    pages = render({"a": results()})
    assert pages == render({"a": results()})
    assert set(pages) == {PAGE, "benchmarks/bits.svg", "benchmarks/chunks.svg", "benchmarks/sizes.svg"}
    for plot in re.findall(r"\]\((benchmarks/\w+\.svg)\)", pages[PAGE]):
        assert plot in pages
    assert "| `fast`, 1 to 4%: bytes over `field` | <= 0.45 | 0.4 |" in pages[PAGE]
    assert "| **3** (2.45 to 3.67) |" in pages[PAGE] and "memcpy" in pages[PAGE]


def test_a_kernel_is_named_by_its_version_alone() -> None:
    found = results()
    machine = found.machine.model_copy(update={"system": "Linux 6.18.44-ours-7, Python 3.11.7"})
    page = render({"a": found.model_copy(update={"machine": machine})})[PAGE]
    assert "| Linux 6.18, Python 3.11.7 |" in page


def test_pages_of_an_empty_run() -> None:
    bare = results(chunks=(), files=(), floors=(), reads=())
    assert list(render({"a": bare})) == [PAGE]
    assert figures({"a": bare}) == "Not measured.\n"


def test_figures_replace_their_block_alone() -> None:
    begin, end = FIGURES
    made = with_figures(f"before\n{begin}\nold\n{end}\nafter\n", {"a": results()})
    assert made.startswith(f"before\n{begin}\n") and made.endswith(f"{end}\nafter\n") and "old" not in made
    assert "| `fast` | 8.57 | 0.4 | 4.00 GB/s | 8.00 GB/s |" in made and "| publish | 3.5 |" in made
    assert with_figures(made, {"a": results()}) == made
    with pytest.raises(ValueError, match="no block"):
        with_figures("nothing", {"a": results()})


def test_plots_are_xml_with_every_drawable_point_inside() -> None:
    series = (Series("fast", ((0.0, 1.0), (0.01, 0.5), (1.0, 40.0))), Series("none", ((0.0, 0.0),)))
    drawn = ElementTree.fromstring(svg(Chart("a < b", "x", "y", series)))
    space = "{http://www.w3.org/2000/svg}"
    dots = [(float(dot.get("cx", 0)), float(dot.get("cy", 0))) for dot in drawn.iter(f"{space}circle")]
    width, height = (float(size) for size in drawn.get("viewBox", "").split()[2:])
    assert len(dots) == 2 and all(0 < x < width and 0 < y < height for x, y in dots)
    assert dots[0][0] < dots[1][0] and dots[0][1] > dots[1][1]
    assert ElementTree.fromstring(svg(Chart("empty", "x", "y", ()))) is not None


def test_another_machine_is_a_column() -> None:
    other = results(chunks=results().chunks[:2])
    other = other.model_copy(update={"machine": other.machine.model_copy(update={"cpu": "A CPU (zen9)"})})
    machines = {**of_machine(results()), **of_machine(other)}
    page = render(machines)[PAGE]
    assert list(machines) == ["a cpu", "zen9"] and "| goal | bound | a cpu | zen9 |" in page
    assert "| publish | 3.5 | 3.5 |" in figures(machines)
    assert "| simulated | 1.40% | `field` | 21 |  | 1.84% | 0.00333 / 0.00667 |  |" in page


def test_the_page_in_the_tree_is_that_of_its_results() -> None:
    machines = in_tree(ROOT)
    for name, text in render(machines).items():
        written = (ROOT / "docs" / "measurements" / name).read_text()
        assert written == text, "run python -m benchmarks.report"
    readme = (ROOT / "README.md").read_text()
    assert all(mark in readme for mark in FIGURES)
    if not next(iter(machines.values())).quick:
        assert with_figures(readme, machines) == readme, "run python -m benchmarks.report"

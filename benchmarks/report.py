"""Results as one page with a column per machine, plots, and the README's figures: a function of results.

`python -m benchmarks.report` writes them from benchmarks/results*.json. The machine of results.json comes
first; plots and README show it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TypeVar

from .results import TYPICAL, ChunkRow, FileRow, Goal, Results, Spread, goals, load

PAGE = "benchmarks.md"
FIGURES = ("<!-- figures: python -m benchmarks.report -->", "<!-- end of figures -->")
_ENCODINGS = ("fast", "small", "field")

Machines = Mapping[str, Results]
"""by column head"""


def in_tree(root: Path) -> dict[str, Results]:
    """Of benchmarks/results.json, then of each benchmarks/results-*.json."""
    paths = [root / "benchmarks" / "results.json", *sorted((root / "benchmarks").glob("results-*.json"))]
    return {name: found for path in paths for name, found in of_machine(load(path)).items()}


def of_machine(results: Results) -> dict[str, Results]:
    """Under the name of its processor."""
    return {_processor(results): results}


def _processor(results: Results) -> str:
    """LLVM's name, which tells generations apart, where it has one: `AMD EPYC (znver5)` is znver5."""
    cpu = results.machine.cpu
    named = re.search(r"\((\w+)\)$", cpu)
    return named[1] if named else re.sub(r"\(R\)|\(TM\)| Processor", "", cpu).strip()


def render(machines: Machines) -> dict[str, str]:
    """Path below the page's directory to text. Plots, of the first machine, are in benchmarks/."""
    first = next(iter(machines.values()))
    charts = {f"benchmarks/{name}.svg": svg(chart) for name, chart in _charts(first).items()}
    parts = [
        "# Benchmarks",
        _INTRODUCTION,
        _by_machine("", _MACHINE_FACTS.items(), machines),
        "## Goals",
        "The worst point measured, with its spread for ratios of times. **Bold**: missed.",
        _goals_table(machines),
        *_chunk_parts(machines),
        *_file_parts(machines),
        *_first_use_parts(machines),
        *(f"![{name}]({name})" for name in charts),
        _METHOD,
    ]
    return {PAGE: "\n\n".join(part.strip("\n") for part in parts if part) + "\n", **charts}


def write(machines: Machines, directory: Path) -> None:
    for name, text in render(machines).items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


# -- the README


def with_figures(readme: str, machines: Machines) -> str:
    """The README with its block of figures replaced. Raises ValueError if it has none."""
    begin, end = FIGURES
    before, found, rest = readme.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"there is no block {begin} ... {end}")
    return f"{before}{begin}\n{figures(machines)}{end}{after}"


def figures(machines: Machines) -> str:
    """The largest model at 1.4% through the daemons: a table of the first machine, a line for all."""
    first = next(iter(machines.values()))
    rows = {row.encoding: row for row in _largest(first)}
    if not rows:
        return "Not measured.\n"
    mine, field = rows["fast"], rows["field"]
    about = (
        f"A bf16 model of {_gb(mine.model_bytes)} that takes simulated Adam steps, {mine.density:.1%} of the "
        f"elements changed, {mine.threads} threads, running daemons, warm page cache, every check, journal "
        f"and fsync included; medians of {mine.rounds} interleaved rounds on {first.machine.cpu}. `field` is "
        "slime's format, xor and zstd-1."
    )
    cells = (
        (
            f"`{name}`",
            _number(row.bits),
            _number(row.version_bytes / field.version_bytes),
            *(f"{row.model_bytes / work.seconds.median / 1e9:.2f} GB/s" for work in (row.publish, row.sync)),
        )
        for name, row in rows.items()
    )
    speeds = [_table(("`fast`, times the speed of `field`", *machines), _speed_rows(machines))]
    table = _table(("", "bits per changed element", "bytes", "publish", "sync"), cells)
    return "\n\n".join(["\n".join(_wrapped(about)), table, *speeds]) + "\n"


def _speed_rows(machines: Machines) -> Iterator[Sequence[str]]:
    pairs = [{row.encoding: row for row in _largest(one)} for one in machines.values()]
    times: dict[str, Callable[[FileRow], Spread | None]] = {
        "publish": lambda row: row.publish.seconds,
        "publish, until hosts see the version": lambda row: row.publish.pointer,
        "sync": lambda row: row.sync.seconds,
    }
    for text, of in times.items():
        yield (text, *(_times_field(of(rows["fast"]), of(rows["field"])) if rows else "" for rows in pairs))


def _times_field(mine: Spread | None, theirs: Spread | None) -> str:
    return "" if mine is None or theirs is None else f"{theirs.median / mine.median:.1f}"


def _wrapped(text: str, width: int = 118) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


# -- the page


_INTRODUCTION = """
Generated by `make bench` from `benchmarks/results*.json`; do not edit. Those files also hold spreads, CPU
time and memory of each row. GB are 10^9 bytes of model; speeds are medians of interleaved rounds.

`field` is slime's format, xor with the previous bytes and one zstd-1 frame per tensor, built with the same
care (threads, mapped files, contexts and buffers kept, everything durable): `benchmarks/field_path.py`.
"""

_MACHINE_FACTS: dict[str, Callable[[Results], str]] = {
    "processor": lambda one: f"{one.machine.cores} cores, {one.machine.cpu}",
    "memory": lambda one: f"{one.machine.memory_bytes / (1 << 30):.0f} GiB",
    "files on": lambda one: one.machine.file_system,
    "system": lambda one: _system(one.machine.system),
    "packages": lambda one: ", ".join(
        f"{name} {version}" for name, version in one.machine.versions.items() if name != "weightcast"
    ),
    "run": lambda one: f"{one.seconds / 60:.0f} minutes" + (", quick: few rounds, small models" * one.quick),
}

_METHOD = """
## Method

- **Traces.** *trained*: a transformer of 5 million parameters, fp32 masters under AdamW, bf16 weights before
  and after a step at each learning rate. *simulated*: weights from N(0, 0.02) that move by N(0, 0.3 lr), lr
  chosen for the density. *unrelated*: random bits. Seeds are fixed.
- **Chunks** are in memory, more than caches hold, checksums included. Contenders take turns within a round;
  the first round does not count. Chunks are applied forth and back in turns.
- **Bound**: entropy of positions, signs and lengths of steps, given what the encoding knows.
- **Daemons** are `weightcast publisher run`, asked over HTTP, and `weightcast subscriber run` without
  engines, woken over HTTP. They report their seconds themselves.
- **To the pointer**: until hosts see the version. **Publish**: until the next publication can begin.
  weightcast updates its local checkpoint after the pointer, `field` during the comparison.
- **Commands** are `weightcast publish` and `weightcast sync`, from start to end of the process.
- **Rounds**: contenders take turns, another one begins each version. Between turns dirty pages are flushed
  and multi-step deltas finish. Cold: checkpoint and version are dropped from the page cache. At the end every
  host's bytes are compared with the last checkpoint.
- **Bytes** are all files that a host one version behind reads. **Memory** is the growth of RssAnon during a
  round, sampled every 20 ms.
"""


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _by_machine(head: str, rows: Iterable[tuple[str, Callable[[Results], str]]], machines: Machines) -> str:
    cells = ((text, *(of(one) for one in machines.values())) for text, of in rows)
    return _table((head, *machines), cells)


def _goals_table(machines: Machines) -> str:
    columns = zip(*(goals(one) for one in machines.values()), strict=True)
    rows = (
        (
            column[0].text,
            f"{'>=' if column[0].at_least else '<='} {column[0].bound:g}",
            *map(_goal_cell, column),
        )
        for column in columns
    )
    return _table(("goal", "bound", *machines), rows)


def _goal_cell(goal: Goal) -> str:
    if goal.found is None:
        return "not measured"
    found = f"**{_number(goal.found)}**" if not goal.held else _number(goal.found)
    return found + (f" ({_number(goal.low)} to {_number(goal.high)})" if goal.low is not None else "")


_Row = TypeVar("_Row", ChunkRow, FileRow)


def _joined(
    rows: Sequence[Sequence[_Row]], same: Callable[[_Row], object]
) -> Iterator[tuple[_Row, list[_Row | None]]]:
    """Rows of the first machine, each with those of all machines from the same experiment."""
    by_machine = [{same(row): row for row in mine} for mine in rows]
    for row in rows[0]:
        yield row, [mine.get(same(row)) for mine in by_machine]


# -- chunks


def _chunk_parts(machines: Machines) -> Iterator[str]:
    rows = [one.chunks for one in machines.values()]
    if not rows[0]:
        return
    most = max(row.threads for row in rows[0])
    yield "## Chunks in memory"
    yield f"{most} threads. Columns of machines: GB/s, publish / apply."
    heads = ("trace", "changed", "", "bits per change", "bound", "of raw", *machines)
    yield _table(heads, _chunk_rows(rows, lambda row: row.threads == most))
    yield "By threads, at 1.4%:"
    typical = _chunk_rows(
        rows, lambda row: row.trace == "simulated" and is_typical(row.density), threads=True
    )
    yield _table(("threads", "", *machines), typical)
    floors = [one.floors for one in machines.values()]
    if floors[0]:
        yield "Floors, GB/s: one pass over the memory of one side."
        yield _table(
            ("threads", "", *machines),
            (
                (str(row.threads), name, *(_rate(mine[n].nbytes, mine[n].seconds[name]) for mine in floors))
                for n, row in enumerate(floors[0])
                for name in row.seconds
            ),
        )


def _chunk_rows(
    rows: Sequence[Sequence[ChunkRow]], chosen: Callable[[ChunkRow], bool], *, threads: bool = False
) -> Iterator[Sequence[str]]:
    chosen_rows = [list(filter(chosen, mine)) for mine in rows]
    for row, each in _joined(chosen_rows, lambda row: (row.trace, row.case, row.threads, row.encoding)):
        speeds = map(_chunk_cell, each)
        if threads:
            yield (str(row.threads), f"`{row.encoding}`", *speeds)
            continue
        yield (
            row.trace + (f", {row.case.partition(', ')[2]}" if row.trace == "trained" else ""),
            f"{row.density:.2%}",
            f"`{row.encoding}`",
            _number(row.bits),
            _number(row.bound_bits) if row.bound_bits else "",
            f"{row.payload_bytes / row.raw_bytes:.2%}",
            *speeds,
        )


def _chunk_cell(row: ChunkRow | None) -> str:
    """Publish, apply."""
    return "" if row is None else " / ".join(_rate(row.raw_bytes, one) for one in (row.publish, row.apply))


# -- files


def _file_parts(machines: Machines) -> Iterator[str]:
    rows = [one.files for one in machines.values()]
    if not rows[0]:
        return
    yield "## Files, end to end"
    yield "Running daemons. Columns of machines: GB/s, to the pointer / publish / sync."
    heads = ("model", "threads", "changed", "", "bits per change", "bytes of a version", *machines)
    yield _table(heads, _file_rows(rows, "daemons"))
    yield "One-shot commands, start to end of the process, GB/s, publish / sync:"
    yield _table(("model", "cache", "changed", "", *heads[4:]), _file_rows(rows, "commands"))
    yield "Models of many tensors, running daemons, seconds, to the pointer / publish / sync:"
    yield _table(("model", "tensors", "changed", "", *heads[4:]), _file_rows(rows, "daemons", experts=True))
    reads = [{(r.model_bytes, r.threads, r.cache): r.seconds for r in one.reads} for one in machines.values()]
    yield "The floor, GB/s: read the checkpoint's files and do nothing with them."
    yield _table(
        ("model", "threads", "cache", *machines),
        (
            (_gb(key[0]), str(key[1]), key[2], *(_rate(key[0], mine[key]) for mine in reads))
            for key in reads[0]
            if all(key in mine for mine in reads)
        ),
    )
    yield from _phase_parts(machines)


def _file_rows(
    rows: Sequence[Sequence[FileRow]], doors: str, *, experts: bool = False
) -> Iterator[Sequence[str]]:
    chosen = [[row for row in mine if row.doors == doors and bool(row.experts) == experts] for mine in rows]
    same = ("model_bytes", "threads", "cache", "asked_density", "encoding")
    for row, each in _joined(chosen, lambda row: tuple(getattr(row, name) for name in same)):
        yield (
            _gb(row.model_bytes),
            f"{row.experts:,}" if experts else str(row.threads) if doors == "daemons" else row.cache,
            f"{row.density:.2%}",
            f"`{row.encoding}`",
            _number(row.bits),
            f"{row.version_bytes / 1e6:,.2f} MB",
            *(_file_cell(one, seconds=experts) for one in each),
        )


def _file_cell(row: FileRow | None, *, seconds: bool) -> str:
    if row is None:
        return ""
    times = [row.publish.pointer, row.publish.seconds, row.sync.seconds]
    known = [one.median for one in times if one is not None]
    return " / ".join(f"{one:.2f}" if seconds else _number(row.model_bytes / one / 1e9) for one in known)


def _phase_parts(machines: Machines) -> Iterator[str]:
    """Where the time goes, at the largest model."""
    rows = [_largest(one) for one in machines.values()]
    if not rows[0]:
        return
    yield (
        f"Where the time goes at {_gb(rows[0][0].model_bytes)}, 1.4%, in seconds. weightcast's phases follow "
        "each other; `field`'s are sums over its threads."
    )
    cells = []
    for row, each in _joined(rows, lambda row: row.encoding):
        for verb in ("publish", "sync"):
            cells.append((f"`{row.encoding}`", verb, *(_phases(one, verb) for one in each)))
    yield _table(("", "", *machines), cells)


def _phases(row: FileRow | None, verb: str) -> str:
    if row is None:
        return ""
    work = getattr(row, verb)
    phases = sorted(work.phases.items(), key=lambda phase: -phase[1])
    parts = ", ".join(f"{name} {seconds:.3g}" for name, seconds in phases if seconds >= 0.005)
    return f"{work.seconds.median:.3g}: {parts}"


def _largest(results: Results) -> list[FileRow]:
    """Rows of the largest model: daemons, warm, at 1.4%."""
    rows = _usual(results)
    most = max(((row.model_bytes, row.threads) for row in rows), default=None)
    return [row for row in rows if (row.model_bytes, row.threads) == most]


def _usual(results: Results) -> list[FileRow]:
    return [
        row
        for row in results.files
        if (row.doors, row.cache, row.experts) == ("daemons", "warm", 0) and is_typical(row.asked_density)
    ]


def _first_use_parts(machines: Machines) -> Iterator[str]:
    uses = [{use.what: use.seconds for use in one.first_use} for one in machines.values()]
    if uses[0]:
        yield "## First use"
        yield "Seconds until a fresh interpreter can publish and apply:"
        yield _table(
            ("", *machines),
            ((what, *(f"{mine[what]:.2f}" if what in mine else "" for mine in uses)) for what in uses[0]),
        )


# -- numbers


def is_typical(density: float) -> bool:
    return 0.8 < density / TYPICAL < 1.25


def _system(text: str) -> str:
    """The kernel by major and minor number: the rest names somebody's own build."""
    return re.sub(r"^(\S+ \d+\.\d+)[^,\s]*", r"\1", text)


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"


def _number(value: float | None) -> str:
    """Three significant digits, no decimals for large numbers."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _rate(nbytes: int, seconds: Spread) -> str:
    return _number(nbytes / seconds.median / 1e9)


# -- plots


_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 36, 48
_COLOURS = {"fast": "#0b6e4f", "small": "#1f4e9c", "field": "#b3401f"}
_OTHER = "#666666"


@dataclass(frozen=True)
class Series:
    """`points`: (x, y), both above 0; others cannot be drawn on these axes and are left out."""

    name: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False

    @property
    def colour(self) -> str:
        return _COLOURS.get(self.name.split()[0], _OTHER)


@dataclass(frozen=True)
class Chart:
    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    x_text: Callable[[float], str] = "{:g}".format


class _Axis:
    """Values to pixels, logarithmically."""

    def __init__(self, values: Iterable[float], start: float, end: float) -> None:
        known = list(values) or [1.0]
        self._low = math.log10(min(known)) - 0.05
        self._high = max(math.log10(max(known)) + 0.05, self._low + 0.3)
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        share = (math.log10(value) - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        decades = range(math.floor(self._low), math.ceil(self._high) + 1)
        found = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
        return [tick for tick in found if self._low <= math.log10(tick) <= self._high]


def svg(chart: Chart) -> str:
    shown = [Series(one.name, tuple(p for p in one.points if min(p) > 0), one.dashed) for one in chart.series]
    points = [point for one in shown for point in one.points]
    x = _Axis((point[0] for point in points), _LEFT, _WIDTH - _RIGHT)
    y = _Axis((point[1] for point in points), _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 20, chart.title, weight="bold"),
        *_grid(x, y, chart),
        *(_line(one, x, y) for one in shown if one.points),
        *_legend(shown),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _grid(x: _Axis, y: _Axis, chart: Chart) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for tick in x.ticks():
        parts.append(_rule(x.at(tick), _TOP, x.at(tick), bottom))
        parts.append(_text(x.at(tick), bottom + 16, chart.x_text(tick), anchor="middle"))
    for tick in y.ticks():
        parts.append(_rule(_LEFT, y.at(tick), right, y.at(tick)))
        parts.append(_text(_LEFT - 6, y.at(tick) + 4, f"{tick:g}", anchor="end"))
    parts.append(_text((_LEFT + right) / 2, _HEIGHT - 10, chart.x, anchor="middle"))
    middle = (_TOP + bottom) / 2
    turned = f'transform="rotate(-90 14 {middle:.0f})"'
    parts.append(_text(14, middle, chart.y, anchor="middle", more=turned))
    return parts


def _line(one: Series, x: _Axis, y: _Axis) -> str:
    places = [f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in one.points]
    dash = ' stroke-dasharray="5 4"' if one.dashed else ""
    line = f'<polyline points="{" ".join(places)}" fill="none" stroke="{one.colour}" stroke-width="2"{dash}/>'
    dots = (
        f'<circle cx="{place.split(",")[0]}" cy="{place.split(",")[1]}" r="3" fill="{one.colour}"/>'
        for place in places
    )
    return "\n".join([line, *dots])


def _legend(shown: Sequence[Series]) -> list[str]:
    parts = []
    for number, one in enumerate(shown):
        at = _TOP + 12 + 18 * number
        left = _WIDTH - _RIGHT + 12
        dash = ' stroke-dasharray="5 4"' if one.dashed else ""
        parts.append(
            f'<line x1="{left}" y1="{at}" x2="{left + 22}" y2="{at}" stroke="{one.colour}" '
            f'stroke-width="2"{dash}/>'
        )
        parts.append(_text(left + 28, at + 4, one.name))
    return parts


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal", more: str = ""
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}"'
    return f"<text {place}{' ' + more if more else ''}>{escape(text)}</text>"


def _charts(results: Results) -> dict[str, Chart]:
    charts = {}
    simulated = [row for row in results.chunks if row.trace == "simulated" and row.changed]
    if simulated:
        most = max(row.threads for row in simulated)
        rows = [row for row in simulated if row.threads == most]
        charts["bits"] = _bits_chart(rows)
        charts["chunks"] = _speed_chart(rows)
    if _usual(results):
        charts["sizes"] = _size_chart(_usual(results))
    return charts


def _percent(share: float) -> str:
    return f"{100 * share:g}%"


def _bits_chart(rows: Sequence[ChunkRow]) -> Chart:
    series = [_series(name, rows, name, lambda row: row.bits or 0.0) for name in _ENCODINGS]
    series += [
        _series(f"{name} bound", rows, name, lambda row: row.bound_bits or 0.0, dashed=True)
        for name in ("fast", "small")
    ]
    return Chart("Bits per changed word", "words changed", "bits", tuple(series), _percent)


def _speed_chart(rows: Sequence[ChunkRow]) -> Chart:
    series = [
        _series(f"{name} publish", rows, name, lambda row: row.raw_bytes / row.publish.median / 1e9)
        for name in _ENCODINGS
    ]
    series += [
        _series(f"{name} apply", rows, name, lambda row: row.raw_bytes / row.apply.median / 1e9, dashed=True)
        for name in _ENCODINGS
    ]
    return Chart("Chunks in memory, digests included", "words changed", "GB/s", tuple(series), _percent)


def _series(
    title: str,
    rows: Iterable[ChunkRow],
    name: str,
    of: Callable[[ChunkRow], float],
    *,
    dashed: bool = False,
) -> Series:
    points = sorted((row.density, of(row)) for row in rows if row.encoding == name)
    return Series(title, tuple(points), dashed)


def _size_chart(rows: Sequence[FileRow]) -> Chart:
    most = max(row.threads for row in rows)
    series = []
    for dashed, verb in ((False, "publish"), (True, "sync")):
        for name in _ENCODINGS:
            points = sorted(
                (row.model_bytes / 1e9, getattr(row, verb).seconds.median)
                for row in rows
                if row.encoding == name and row.threads == most
            )
            series.append(Series(f"{name} {verb}", tuple(points), dashed))
    title = "Files, daemons, page cache warm, 1.4% changed"
    return Chart(title, "model, GB", "seconds", tuple(series))


def main() -> None:
    root = Path(__file__).parents[1]
    machines = in_tree(root)
    write(machines, root / "docs" / "measurements")
    readme = root / "README.md"
    if not next(iter(machines.values())).quick:
        readme.write_text(with_figures(readme.read_text(), machines))


if __name__ == "__main__":
    main()

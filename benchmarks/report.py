"""Results as pages: docs/benchmarks.md with plots, the README's figures. A function of results alone.

`python -m benchmarks.report` writes them anew from benchmarks/results.json, and a page like it for each other
machine from benchmarks/results-MACHINE.json; the README keeps the figures of the last full run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from .plots import Chart, Series, svg
from .reach import Goal, goals
from .results import ChunkRow, FileRow, Results, Spread, load

PAGE = "benchmarks.md"
FIGURES = ("<!-- figures: python -m benchmarks.report -->", "<!-- end of figures -->")
_ENCODINGS = ("fast", "small", "field")
_TYPICAL = 0.014


def render(results: Results, page: str = PAGE) -> dict[str, str]:
    """Path below the documents' directory to text. Plots lie in a directory with the page's name."""
    plots = page.removesuffix(".md")
    charts = {f"{plots}/{name}.svg": svg(chart) for name, chart in _charts(results).items()}
    return {page: _page(results, plots), **charts}


def write(results: Results, directory: Path, page: str = PAGE) -> None:
    for name, text in render(results, page).items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def of_other_machines(root: Path) -> dict[str, Results]:
    """Page to results, of those beside benchmarks/results.json."""
    found = sorted((root / "benchmarks").glob("results-*.json"))
    return {path.name.replace("results", "benchmarks").replace(".json", ".md"): load(path) for path in found}


def with_figures(readme: str, results: Results, others: Mapping[str, Results] | None = None) -> str:
    """The README with its block of figures replaced. `others`: of other machines, by page. Raises ValueError
    when it has none."""
    begin, end = FIGURES
    before, found, rest = readme.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"there is no block {begin} ... {end}")
    told = "".join(_elsewhere(page, other) for page, other in (others or {}).items())
    return f"{before}{begin}\n{figures(results)}{told}{end}{after}"


def figures(results: Results) -> str:
    """The largest model's rows at 1.4% through the daemons."""
    rows = _largest(_usual(results))
    if not rows:
        return "Not measured.\n"
    first, field = rows[0], next((row for row in rows if row.encoding == "field"), None)
    about = (
        f"A bf16 model of {_gb(first.model_bytes)} that takes simulated Adam steps, "
        f"{first.density:.1%} of the elements changed, {first.threads} threads, running daemons, page cache "
        f"warm, every check, journal and fsync included; medians of {first.rounds} interleaved rounds on "
        f"{_machine(results)}. {_quickly(results)}"
    )
    lines = ["| | bits per changed element | bytes | publish | sync |", "|---|---|---|---|---|"]
    for row in rows:
        share = _number(row.version_bytes / field.version_bytes) if field else "-"
        speeds = [
            f"{row.model_bytes / work.seconds.median / 1e9:.2f} GB/s{_times(work.seconds, other)}"
            for work, other in (
                (row.publish, field.publish.seconds if field and field is not row else None),
                (row.sync, field.sync.seconds if field and field is not row else None),
            )
        ]
        lines.append(f"| {_name(row.encoding)} | {_number(row.bits)} | {share} | {' | '.join(speeds)} |")
    return "\n".join([*_wrapped(about), "", *lines]) + "\n"


def _elsewhere(page: str, results: Results) -> str:
    """The same rows of another machine in a sentence."""
    rows = {row.encoding: row for row in _largest(_usual(results))}
    mine, field = rows["fast"], rows["field"]
    pairs = (
        ("publishes at", mine.publish.seconds, field.publish.seconds),
        ("has the pointer out at", mine.publish.pointer, field.publish.pointer),
        ("syncs at", mine.sync.seconds, field.sync.seconds),
    )
    at = results.machine
    speeds = [f"{verb} {theirs.median / own.median:.1f} x" for verb, own, theirs in pairs if own and theirs]
    about = (
        f"On {at.cores} cores ({at.cpu}), {at.memory_bytes / (1 << 30):.0f} GiB, `fast` "
        f"{', '.join(speeds)} the field's speed ([all of it](docs/{page}))."
    )
    return "\n" + "\n".join(_wrapped(about)) + "\n"


def _times(mine: Spread, theirs: Spread | None) -> str:
    return "" if theirs is None else f", {theirs.median / mine.median:.1f} x"


def _wrapped(text: str, width: int = 118) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


# -- the page


def _page(results: Results, plots: str) -> str:
    parts = [
        "# Benchmarks",
        "\n".join(_wrapped(_introduction(results, plots))),
        "## What is meant to be reached",
        _reach_table(goals(results)),
        *_chunk_parts(results, plots),
        *_file_parts(results, plots),
        *_first_use_parts(results),
        _METHOD,
    ]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _introduction(results: Results, plots: str) -> str:
    source = f"benchmarks/{plots.replace('benchmarks', 'results')}.json"
    return (
        f"Made by `make bench` from `{source}`; do not edit. {_quickly(results)} Measured on "
        f"{_machine(results)}, in {results.seconds / 60:.0f} minutes. `field` is the field's path, xor with "
        "the last bytes and one zstd-1 frame per tensor, built with the same care (threads, mapped files, "
        "contexts and buffers kept, everything durable): `benchmarks/field_path.py`. Spreads are the least "
        "and the most of all measured rounds. GB are 10^9 bytes of model."
    )


def _quickly(results: Results) -> str:
    return "A quick run: few rounds, small models." if results.quick else ""


def _machine(results: Results) -> str:
    at = results.machine
    versions = ", ".join(f"{name} {version}" for name, version in at.versions.items() if name != "weightcast")
    return (
        f"{at.cores} cores ({at.cpu}), {at.memory_bytes / (1 << 30):.0f} GiB of memory, files on "
        f"{at.file_system}, {_system(at.system)}, {versions}"
    )


_METHOD = """
## How it is measured

- **Traces.** *trained*: a transformer of 5 million parameters, fp32 masters under AdamW, its bf16 weights
  before and after a step at each learning rate. *simulated*: weights from N(0, 0.02) that move by N(0, 0.3
  lr), lr chosen for the density. *unrelated*: random bits before and after. Seeds are fixed.
- **Chunks** lie in memory, more of them than caches hold, digests included; contenders take turns within a
  round, the first round is not counted. They are applied to the words that they are decoded with, forth and
  back in turns.
- **Bounds** are the entropy of positions, signs and lengths of steps with the knowledge that an encoding
  uses.
- **Files**: checkpoints in shards of a GiB. Daemons are the real processes (`weightcast publisher run`,
  asked over HTTP; `weightcast subscriber run` without engines, woken over HTTP); their seconds are those
  that they tell, `field`'s likewise. *To the pointer*: until hosts see the version; *publish*: until the next
  one can begin, which is what a trainer that never waits gets. weightcast's own local checkpoint follows
  behind the pointer, `field`'s while it compares. Commands are `weightcast publish` and `weightcast sync`,
  and count from their start to their end, interpreter and imports included. Contenders take turns, who
  begins changes from version to version. Between turns everything written is flushed, and deltas from older
  versions, which weightcast makes beside the newest one, are waited for. Bytes are of all files that a host
  one version behind reads. Cold: the page cache drops the checkpoint's and the version's files before each
  turn.
  At the end every host's bytes are compared with the last checkpoint's.
- **Memory** is the growth of RssAnon during a round, sampled every 20 ms; of a command, all of its RssAnon.
  **CPU** is user and system time of the process.
"""


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _reach_table(found: Iterable[Goal]) -> str:
    held = {True: "yes", False: "**no**", None: "not measured"}
    rows = []
    for goal in found:
        bound = f"{'>=' if goal.at_least else '<='} {goal.bound:g}"
        spread = f" ({_number(goal.low)} to {_number(goal.high)})" if goal.low is not None else ""
        rows.append((goal.text, bound, _number(goal.found) + spread, held[goal.held], goal.where))
    return _table(("goal", "bound", "worst found (spread)", "reached", "where"), rows)


# -- chunks


def _chunk_parts(results: Results, plots: str) -> Iterator[str]:
    if not results.chunks:
        return
    most = max(row.threads for row in results.chunks)
    yield "## Chunks in memory"
    yield f"With {most} threads, GB/s of model: median (least to most)."
    yield _table(_CHUNK_HEADS, (_chunk_cells(row) for row in results.chunks if row.threads == most))
    yield f"![bits per changed word]({plots}/bits.svg)"
    yield f"![speed of chunks]({plots}/chunks.svg)"
    yield from _thread_parts(results)
    if results.floors:
        yield "Floors, GB/s: a pass over the memory of one side."
        names = list(results.floors[0].seconds)
        rows = (
            [str(row.threads), *(_rate(row.nbytes, row.seconds[name]) for name in names)]
            for row in results.floors
        )
        yield _table(["threads", *names], rows)


_CHUNK_HEADS = ("trace", "changed", "", "bits per change", "bound", "over", "of raw", "publish", "apply")


def _chunk_cells(row: ChunkRow) -> Sequence[str]:
    over = f"{row.bits / row.bound_bits - 1:.1%}" if row.bits and row.bound_bits else ""
    return (
        row.trace + (f", {row.case.partition(', ')[2]}" if row.trace == "trained" else ""),
        f"{row.density:.2%}",
        _name(row.encoding),
        _number(row.bits),
        _number(row.bound_bits) if row.bound_bits else "",
        over,
        f"{row.payload_bytes / row.raw_bytes:.2%}",
        _rate(row.raw_bytes, row.publish),
        _rate(row.raw_bytes, row.apply),
    )


def _thread_parts(results: Results) -> Iterator[str]:
    rows = [row for row in results.chunks if _is_typical(row.density) and row.trace == "simulated"]
    if len({row.threads for row in rows}) > 1:
        yield "By threads, at 1.4%:"
        cells = (
            (
                _name(row.encoding),
                str(row.threads),
                _rate(row.raw_bytes, row.publish),
                _rate(row.raw_bytes, row.apply),
            )
            for name in _ENCODINGS
            for row in rows
            if row.encoding == name
        )
        yield _table(("", "threads", "publish", "apply"), cells)


# -- files


def _file_parts(results: Results, plots: str) -> Iterator[str]:
    if not results.files:
        return
    yield "## Files, end to end"
    yield "Publications and syncs by running daemons, GB/s of model: median (least to most)."
    yield _table(_FILE_HEADS, map(_file_cells, _of_doors(results, "daemons")))
    yield f"![seconds by size]({plots}/sizes.svg)"
    yield "One-shot commands, from start to end of the process:"
    yield _table(_FILE_HEADS, map(_file_cells, _of_doors(results, "commands")))
    if results.reads:
        yield "The floor: reading the checkpoint's files and doing nothing with it."
        rows = (
            (_gb(row.model_bytes), str(row.threads), row.cache, _rate(row.model_bytes, row.seconds))
            for row in results.reads
        )
        yield _table(("model", "threads", "cache", "GB/s"), rows)
    yield from _phase_parts(results)
    yield from _expert_parts(results)


def _expert_parts(results: Results) -> Iterator[str]:
    rows = [row for row in results.files if row.experts]
    if rows:
        yield "Models of many tensors, by running daemons, in seconds: what tensors cost beside bytes."
        cells = (
            (
                f"{row.experts:,}",
                _gb(row.model_bytes),
                f"{row.density:.2%}",
                _name(row.encoding),
                f"{row.version_bytes / 1e6:,.2f} MB",
                _seconds(row.publish.pointer),
                _seconds(row.publish.seconds),
                _seconds(row.sync.seconds),
                f"{row.publish.anon_bytes >> 20}, {row.sync.anon_bytes >> 20} MiB",
            )
            for row in rows
        )
        yield _table(_EXPERT_HEADS, cells)


_EXPERT_HEADS = (
    "tensors", "model", "changed", "", "bytes of a version", "to the pointer", "publish", "sync",
    "memory publish, sync",
)  # fmt: skip


_FILE_HEADS = (
    "model", "threads", "cache", "changed", "", "bits per change", "bytes of a version", "to the pointer",
    "publish", "sync",
    "CPU publish, sync", "memory publish, sync",
)  # fmt: skip


def _of_doors(results: Results, doors: str) -> list[FileRow]:
    return [row for row in results.files if row.doors == doors and not row.experts]


def _file_cells(row: FileRow) -> Sequence[str]:
    return (
        _gb(row.model_bytes),
        str(row.threads),
        row.cache,
        f"{row.density:.2%}",
        _name(row.encoding),
        _number(row.bits),
        f"{row.version_bytes / 1e6:,.2f} MB",
        "" if row.publish.pointer is None else _rate(row.model_bytes, row.publish.pointer),
        _rate(row.model_bytes, row.publish.seconds),
        _rate(row.model_bytes, row.sync.seconds),
        f"{row.publish.cpu.median:.2f} s, {row.sync.cpu.median:.2f} s",
        f"{row.publish.anon_bytes >> 20}, {row.sync.anon_bytes >> 20} MiB",
    )


def _phase_parts(results: Results) -> Iterator[str]:
    """Where the time goes, at the largest model."""
    rows = _largest(_usual(results))
    if not rows:
        return
    yield (
        f"Where the time goes at {_gb(rows[0].model_bytes)}, {rows[0].density:.1%}, in seconds. Phases of "
        "weightcast's follow each other; those of `field` are summed over its threads."
    )
    cells = []
    for row in rows:
        for verb, work in (("publish", row.publish), ("sync", row.sync)):
            phases = sorted(work.phases.items(), key=lambda phase: -phase[1])
            told = ", ".join(f"{name} {seconds:.3g}" for name, seconds in phases if seconds >= 0.0005)
            cells.append((_name(row.encoding), verb, f"{work.seconds.median:.3g}", told))
    yield _table(("", "", "in all", "phases"), cells)


def _usual(results: Results) -> list[FileRow]:
    """Daemons, warm, at 1.4%."""
    found = [row for row in _of_doors(results, "daemons") if row.cache == "warm"]
    return [row for row in found if _is_typical(row.asked_density)]


def _largest(rows: Sequence[FileRow]) -> list[FileRow]:
    most = max(((row.model_bytes, row.threads) for row in rows), default=None)
    return [row for row in rows if (row.model_bytes, row.threads) == most]


def _first_use_parts(results: Results) -> Iterator[str]:
    if results.first_use:
        yield "## First use"
        yield "A fresh interpreter until it can publish and apply:"
        yield _table(("", "seconds"), ((row.what, f"{row.seconds:.2f}") for row in results.first_use))


# -- plots


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


# -- numbers


def _is_typical(density: float) -> bool:
    return 0.8 < density / _TYPICAL < 1.25


def _name(encoding: str) -> str:
    return f"`{encoding}`"


def _system(text: str) -> str:
    """A kernel by its major and minor number: what comes after them names builds of somebody's own."""
    return re.sub(r"^(\S+ \d+\.\d+)[^,\s]*", r"\1", text)


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"


def _number(value: float | None) -> str:
    """Three significant digits, none behind the point of large numbers."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _rate(nbytes: int, seconds: Spread) -> str:
    rates = [nbytes / value / 1e9 for value in (seconds.median, seconds.high, seconds.low)]
    middle, least, most = map(_number, rates)
    return f"{middle} ({least} to {most})"


def _seconds(found: Spread | None) -> str:
    return "" if found is None else f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})"


def main() -> None:
    root = Path(__file__).parents[1]
    results = load(root / "benchmarks" / "results.json")
    write(results, root / "docs")
    others = of_other_machines(root)
    for page, other in others.items():
        write(other, root / "docs", page)
    readme = root / "README.md"
    if not results.quick:
        readme.write_text(with_figures(readme.read_text(), results, others))


if __name__ == "__main__":
    main()

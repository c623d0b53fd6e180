"""A plan as tables: for people, and for docs/sizing.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from weightcast.shared.base.errors import counted
from weightcast.shared.daemon.threads import SCRATCH_BYTES
from weightcast.shared.doctor.findings import size_text
from weightcast.shared.doctor.sizing import CHANGES_PER_SECOND, Sizing, Weights, Workload, journals

DENSITIES = (0.01, 0.05, 0.2)
Row = tuple[str, str]


def plan_facts(weights: Weights, asked: Workload, found: Sizing) -> dict[str, Any]:
    """All of it for JSON."""
    by_density = {f"{density:g}": size for density, size in journals(weights, DENSITIES).items()}
    return {"asked": asdict(asked), **asdict(found), "journals": by_density}


def show_plan(console: Console, weights: Weights, asked: Workload, found: Sizing) -> None:
    console.print(
        f"{size_text(weights.nbytes)} of weights, {asked.density:.3g} of the elements changed every"
        f" {asked.interval:g} s, encoding {asked.encoding}, {counted(asked.hosts, 'host')}"
    )
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in plan_rows(weights, asked, found):
        table.add_row(name, value)
    console.print(table)
    memory = Table(box=None, pad_edge=False)
    for title in ("role", "memory", "page cache", "disk"):
        memory.add_column(title, justify="left" if title == "role" else "right")
    for role in found.roles:
        memory.add_row(
            role.name, size_text(role.memory_bytes), size_text(role.cache_bytes), size_text(role.disk_bytes)
        )
    console.print(memory)
    console.print(
        f"Seconds are guesses, with {asked.threads} threads of {CHANGES_PER_SECOND / 1e6:g} million changes a"
        " second each, measured on shared virtual cores."
    )


def plan_rows(weights: Weights, asked: Workload, found: Sizing) -> Iterator[Row]:
    one, late = found.per_version, found.catch_up
    less = f"{found.ratio:,.0f} times less than" if found.ratio >= 1.5 else "no less than"
    yield "a version", f"{size_text(one.delta_bytes)}, {less} the weights"
    sizes = (f"{size} at {density:.0%}" for density, size in _journal_texts(weights))
    yield "journal of a step", f"{size_text(one.journal_bytes)} ({', '.join(sizes)})"
    yield (
        "channel, per hour",
        f"{size_text(found.channel_bytes_per_hour)}; an anchor {size_text(found.full_bytes)}",
    )
    yield "publisher writes", rate_text(found.publisher_link)
    fresh = rate_text(found.host_link_fresh)
    yield "a host reads", f"{rate_text(found.host_link)}; {fresh} to have it in a tenth of the interval"
    yield "all hosts read", rate_text(found.server_link)
    yield (
        f"after {asked.away:g} s away",
        f"{counted(late.versions, 'version')}, {size_text(late.bytes)}, about {late.seconds:.2g} s"
        f" on a link of {rate_text(asked.link)}",
    )
    yield "a new host", f"{size_text(late.new_host_bytes)}, about {late.new_host_seconds:.2g} s"
    if found.behind:
        more = f"--threads, each with {SCRATCH_BYTES >> 20} MiB of --memory-budget"
        yield (
            "too much",
            f"a host takes longer than the interval for a version: publish less often, or {more}",
        )


def _journal_texts(weights: Weights) -> Iterator[tuple[float, str]]:
    for density, size in journals(weights, DENSITIES).items():
        yield density, size_text(size)


def rate_text(bits_per_second: float) -> str:
    for unit in ("bit/s", "kbit/s", "Mbit/s", "Gbit/s"):
        if bits_per_second < 999.5:
            return f"{bits_per_second:.3g} {unit}"
        bits_per_second /= 1000
    return f"{bits_per_second:.3g} Tbit/s"

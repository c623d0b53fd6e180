"""Prints the tables of docs/sizing.md from the code: python docs/make_sizing.py"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from weightcast.shared.daemon.logs import size_text
from weightcast.shared.doctor.sizing import (
    DENSITIES,
    ROLES,
    Amount,
    Weights,
    Workload,
    apply_seconds,
    change_bits,
    sizing,
)

INTERVAL = 30.0
AWAY = 600.0
THREADS = 16
MODELS = {"8 B": 8.03e9, "70 B": 70.6e9, "671 B": 671e9}
"""parameters, bf16"""
FLEETS = (10, 100, 1_000, 10_000)
MIRRORS = 4
TENSOR_WORDS = 24e6
NAME_BYTES = 42


def weights(parameters: float) -> Weights:
    """As large language models are cut: a tensor for each 24 million elements."""
    tensors = max(1, round(parameters / TENSOR_WORDS))
    return Weights(int(2 * parameters), {2: int(parameters)}, tensors, tensors * NAME_BYTES)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def by_density() -> str:
    one = weights(MODELS["8 B"])

    def row(density: float) -> list[str]:
        found = sizing(one, Workload(density, INTERVAL))
        small = sizing(one, Workload(density, INTERVAL, "small"))
        journal = found.per_version.journal_bytes
        return [
            f"{density:.0%}",
            f"{change_bits(density):.1f}, {change_bits(density, encoding='small'):.1f}",
            f"{share(found.per_version.delta_bytes, one)}, {share(small.per_version.delta_bytes, one)}",
            share(found.channel_bytes_per_hour * INTERVAL / 3600, one),
            share(journal, one),
        ]

    head = [
        "changed",
        "bits per change, `fast` and `small`",
        "a version",
        "in the channel, per version",
        "journal",
    ]
    return table(head, map(row, DENSITIES))


def share(nbytes: float, of: Weights) -> str:
    return f"{nbytes / of.nbytes:.2%}"


def by_role() -> str:
    rows = ([name, *map(need, amounts)] for name, amounts in ROLES.items())
    return table(["role", "memory", "page cache", "disk"], rows)


def need(amount: Amount) -> str:
    copies = f"{amount.copies} x weights" if amount.copies else ""
    buffers = f"{amount.fixed_bytes >> 20} MiB" if amount.fixed_bytes else ""
    return " + ".join(part for part in (copies, buffers, "a step" * amount.steps) if part)


def by_model() -> str:
    def row(name: str, density: float) -> list[str]:
        asked = Workload(density, INTERVAL, away=AWAY, threads=THREADS)
        found = sizing(weights(MODELS[name]), asked)
        return [
            name,
            f"{density:.0%}",
            size_text(found.per_version.delta_bytes),
            size_text(found.channel_bytes_per_hour),
            size_text(found.host_link, "bit/s"),
            size_text(found.host_link_fresh, "bit/s"),
            size_text(found.catch_up.bytes),
            f"{math.ceil(apply_seconds(found.per_version, found.per_version.delta_bytes, THREADS))} s",
        ]

    head = [
        "model",
        "changed",
        "a version",
        "channel, per hour",
        "a host reads",
        "to have it in 3 s",
        "after 10 minutes away",
        f"staged and patched by {THREADS} threads",
    ]
    return table(head, (row(name, density) for name in MODELS for density in DENSITIES))


def by_fleet() -> str:
    """Requests and bytes of an hour, counted for each reader of a store."""
    one = weights(MODELS["8 B"])

    def load(readers: float) -> tuple[str, str, str]:
        found = sizing(one, Workload(DENSITIES[0], INTERVAL, hosts=math.ceil(readers)))
        requests = sum(each.gets + each.puts for each in found.requests.values()) / 3600
        nbytes = found.per_version.delta_bytes * 3600 / INTERVAL * readers
        return f"{requests:,.0f}", size_text(nbytes), f"${found.dollars:,.2f}"

    def row(hosts: int) -> list[str]:
        alone, shared, region = load(hosts), load(MIRRORS), load(hosts / MIRRORS)
        return [f"{hosts:,}", *alone, *shared[:2], *region[:2], f"{hosts * 3600 / INTERVAL:,.0f}"]

    head = [
        "hosts",
        "one bucket: requests/s",
        "bytes/h",
        "price/h",
        f"{MIRRORS} mirrors or caches: requests/s at the publisher's bucket",
        "bytes/h",
        "requests/s at each mirror's bucket",
        "bytes/h",
        "versions applied/h",
    ]
    return table(head, map(row, FLEETS))


def tables() -> str:
    return "\n".join((by_density(), by_role(), by_model(), by_fleet()))


if __name__ == "__main__":
    print(tables(), end="")

"""What a tensor costs: python -m benchmarks.many_tensors [--tensors 150000 18750] [--megabytes 1200] [--json]

The same bytes as many tensors and as one, in turns: published by daemons and in process, and synced. CPU time
says the same on a busy machine. With --scales every weight has a tensor of scales of a 4096th of its bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from weightcast.publisher import Publisher, PublisherOptions, RawTensor, init_channel

from .files import Block, Model, Scenario, form, measure_files

INDEX = "model.safetensors.index.json"
Row = dict[str, float]


def by_daemons(room: Path, nbytes: int, tensors: int, scales: bool, density: float, rounds: int) -> Row:
    scenario = Scenario(nbytes, 2, (Block(rounds, density),), ("fast",), tensors, scales)
    [row] = measure_files(scenario, room, 0, lambda text: None).rows
    pointer = row.publish.seconds if row.publish.pointer is None else row.publish.pointer
    return {
        "publish": row.publish.seconds.median,
        "publish, to the pointer": pointer.median,
        "publish, CPU": row.publish.cpu.median,
        "sync": row.sync.seconds.median,
        "sync, CPU": row.sync.cpu.median,
        "version, MB": row.version_bytes / 1e6,
        "publisher, anonymous MB": row.publish.anon_bytes / 1e6,
        "subscriber, anonymous MB": row.sync.anon_bytes / 1e6,
    }


def in_process(room: Path, nbytes: int, tensors: int, scales: bool, density: float, rounds: int) -> Row:
    model = Model(nbytes, 0, tensors, scales)
    base = model.write(room / "base")
    init_channel(room / "channel", base)
    wall, cpu, index = [], [], []
    options = PublisherOptions(threads=2)
    with Publisher.open(room / "channel", local=room / "local", base=base, options=options) as publisher:
        for _ in range(rounds + 1):
            model.step(density)
            given = {
                one.name: RawTensor(*form(one.name, one.shape), np.concatenate([*model.pieces(one)]))
                for one in model.tensors
            }
            began, used = time.perf_counter(), time.process_time()
            report = publisher.publish(given)
            wall.append(time.perf_counter() - began)
            cpu.append(time.process_time() - used)
            path = room / "channel" / f"weight_v{report.version:06d}" / INDEX
            index.append(path.stat().st_size)
    return {
        "publish in process": median(wall[1:]),
        "publish in process, CPU": median(cpu[1:]),
        "index, MB": median(index[1:]) / 1e6,
    }


def measure(nbytes: int, tensors: int, scales: bool, density: float, rounds: int) -> Row:
    found: Row = {}
    for part in (by_daemons, in_process):
        with tempfile.TemporaryDirectory() as directory:
            found |= part(Path(directory), nbytes, tensors, scales, density, rounds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Publishes and syncs the same bytes as many tensors and as one."
    )
    parser.add_argument("--tensors", type=int, nargs="+", default=[150_000])
    parser.add_argument("--scales", action="store_true", help="half of the tensors are small, in F32")
    parser.add_argument("--megabytes", type=int, default=1200)
    parser.add_argument("--density", type=float, default=0.014)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=1, help="of both, in turns; medians are shown")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    nbytes = options.megabytes * 10**6
    found: dict[int, list[Row]] = {tensors: [] for tensors in (1, *options.tensors)}
    for _ in range(options.repeats):
        for tensors, rows in found.items():
            scales = options.scales and tensors > 1
            rows.append(measure(nbytes, tensors, scales, options.density, options.rounds))
    if options.json:
        print(json.dumps(found))
        return
    print("| | one tensor |", " | ".join(f"{tensors:,} tensors" for tensors in options.tensors), "|")
    print("|---" * (len(found) + 1) + "|")
    for name in found[1][0]:
        one, *many = (median(row[name] for row in rows) for rows in found.values())
        cells = [f"{one:.3g}", *(f"{each:.3g} ({each / one:.2f} x)" for each in many)]
        print(f"| {name} | {' | '.join(cells)} |")
    print("load average", *os.getloadavg())


if __name__ == "__main__":
    main()

"""What a fleet of simulated hosts costs: python -m benchmarks.fleet_load [--hosts N] [--seconds S]

A real publisher's daemon over a channel in which this process writes the reports of N hosts: all of them at
once, as when a version comes out, and then each every 30 seconds. Measured are the answers of `/v1/fleet` and
`/v1/status`, what the event stream carries, the publisher's CPU time beside an idle one, what a report costs
its host, and how long `weightcast fleet` takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.reports import Report, Update, pack_report, write_report

from .files import cpu_seconds

_EVERY_SECONDS = 30.0
_COMMAND = (sys.executable, "-m", "weightcast.shared.cli.main")
_SECONDS = {"plan": 0.01, "fetch": 1.1, "stage": 0.4, "lock": 0.0, "patch": 0.3, "pause": 0.02, "reload": 2.1,
            "read_back": 0.1, "resume": 0.02, "total": 4.05}  # fmt: skip


@dataclass(frozen=True)
class Load:
    """Milliseconds unless the name says otherwise."""

    hosts: int
    report_bytes: int
    write_report: float
    """median, of one host's report"""
    all_write_seconds: float
    """all hosts one after another, by one process"""
    shown_seconds: float
    """from then until the publisher shows the last of them"""
    fleet_median: float
    fleet_highest: float
    fleet_bytes: int
    status_median: float
    events_bytes_per_second: float
    publisher_cpu_share: float
    """of a core, watched by one page, reports coming in"""
    idle_cpu_share: float
    """of a core, before there are hosts"""
    command_url_seconds: float
    command_channel_seconds: float


def report_of(number: int, counter: int, run_id: str) -> Report:
    """As long as reports become: 20 updates, two engines."""
    updates = tuple(
        Update(counter + at, "patch", 1.7e9 + at, _SECONDS, 31_000_000, "done") for at in range(20)
    )
    engine = {"name": "sglang", "kind": "sglang", "state": "serving", "mark": "served", "version": counter,
              "confirmed_by": "label", "aligned": True}  # fmt: skip
    return Report(
        f"rollout-{number:04}.cluster.example", "/nvme/weightcast/host", run_id, "ready", counter, counter,
        "latest", 0, "", (engine, engine), counter, "weightcast 0.1.0", "idle", counter, "", 0,
        {"step": 31_000_000 * counter, "skip": 0, "anchor": 0, "repair": 0}, 0.001, updates,
    )  # fmt: skip


@contextmanager
def _publisher(root: Path) -> Iterator[tuple[httpx.Client, int]]:
    base, port_file = root / "base", root / "port"
    base.mkdir()
    header = json.dumps({"w": {"dtype": "BF16", "shape": [64], "data_offsets": [0, 128]}}).encode()
    (base / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(128))
    (base / "config.json").write_text("{}")
    process = subprocess.Popen(
        [
            *(*_COMMAND, "publisher", "run", "--channel", str(root / "channel"), "--base", str(base)),
            *("--local", str(root / "local"), "--port", "0", "--port-file", str(port_file)),
            *("--log-level", "warning"),
        ],
        env={**os.environ, "WEIGHTCAST_TOKEN": ""},
    )
    try:
        while not port_file.exists():
            time.sleep(0.1)
        url = f"http://127.0.0.1:{int(port_file.read_text())}"
        with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
            while client.get("/readyz").status_code != 200:
                time.sleep(0.1)
            yield client, process.pid
    finally:
        process.terminate()
        process.wait(60)


class _Beats:
    """Reports of all hosts, one after another, each every 30 seconds."""

    def __init__(self, channel: Path, reports: Sequence[Report]) -> None:
        self._channel, self._reports = channel, list(reports)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        at = 0
        while not self._ending.wait(_EVERY_SECONDS / len(self._reports)):
            report = replace(self._reports[at], counter=self._reports[at].counter + 1)
            self._reports[at] = report
            write_report(open_store(self._channel), report)
            at = (at + 1) % len(self._reports)


def _milliseconds(client: httpx.Client, path: str, seconds: float) -> tuple[list[float], int]:
    """Of answers, ten a second; and how long the last was."""
    took, end, size = [], time.monotonic() + seconds, 0
    while time.monotonic() < end:
        began = time.perf_counter()
        size = len(client.get(path).content)
        took.append(1e3 * (time.perf_counter() - began))
        time.sleep(max(0.0, 0.1 - took[-1] / 1e3))
    return took, size


def _stream_bytes(client: httpx.Client, seconds: float) -> int:
    end, size = time.monotonic() + seconds, 0
    with client.stream("GET", "/v1/events") as response:
        for piece in response.iter_raw():
            size += len(piece)
            if time.monotonic() >= end:
                break
    return size


def _share(process: int, seconds: float) -> float:
    before = cpu_seconds(process)
    time.sleep(seconds)
    return (cpu_seconds(process) - before) / seconds


def _command(*words: str) -> float:
    began = time.perf_counter()
    subprocess.run([*_COMMAND, *words], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def measure(hosts: int, seconds: float, root: Path) -> Load:
    channel = root / "channel"
    with _publisher(root) as (client, process):
        # kernels are compiled meanwhile
        _share(process, seconds)
        idle = _share(process, seconds)
        run_id = str(client.get("/v1/status").json()["run_id"])
        reports = [report_of(number, 1, run_id) for number in range(hosts)]
        took, began = [], time.perf_counter()
        for report in reports:
            before = time.perf_counter()
            write_report(open_store(channel), report)
            took.append(1e3 * (time.perf_counter() - before))
        written = time.perf_counter()
        while len(client.get("/v1/fleet").json()["hosts"]) < hosts:
            time.sleep(0.05)
        shown = time.perf_counter()
        with _Beats(channel, reports):
            cpu = cpu_seconds(process)
            watched = time.monotonic()
            streamed = _stream_bytes(client, seconds)
            share = (cpu_seconds(process) - cpu) / (time.monotonic() - watched)
            answers, size = _milliseconds(client, "/v1/fleet", seconds)
            statuses, _ = _milliseconds(client, "/v1/status", seconds / 2)
            url = str(client.base_url)
            by_url = _command("fleet", "--url", url)
            by_channel = _command("fleet", "--channel", str(channel))
    return Load(
        hosts=hosts,
        report_bytes=len(pack_report(reports[0])),
        write_report=statistics.median(took),
        all_write_seconds=written - began,
        shown_seconds=shown - written,
        fleet_median=statistics.median(answers),
        fleet_highest=max(answers),
        fleet_bytes=size,
        status_median=statistics.median(statuses),
        events_bytes_per_second=streamed / seconds,
        publisher_cpu_share=share,
        idle_cpu_share=idle,
        command_url_seconds=by_url,
        command_channel_seconds=by_channel,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fleet-load-") as root:
        load = measure(chosen.hosts, chosen.seconds, Path(root))
    if chosen.json:
        print(json.dumps(asdict(load)))
        return
    table = Table(show_header=False, box=None)
    for name, value in asdict(load).items():
        table.add_row(name.replace("_", " "), f"{value:,.3f}" if isinstance(value, float) else f"{value:,}")
    Console().print(table)


if __name__ == "__main__":
    main()

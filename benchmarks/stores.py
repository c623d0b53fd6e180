"""An object store next to a directory: python -m benchmarks.stores s3://BUCKET/PREFIX [--part P]

In turns, with daemons of their own: a publication of each checkpoint to both, a sync of both hosts eight
versions later. An anchor's upload and download next to obstore's own put and get of the same bytes. The lag
of hosts that follow, with and without another one that joins through an anchor. Everything below the prefix,
which must be empty, is deleted at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles

import obstore
from obstore.store import ObjectStore as Client
from obstore.store import from_url
from rich.console import Console
from rich.table import Table

from weightcast.publisher.channel_init import init_channel
from weightcast.publisher.run_publisher import RunPublisher
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.layout import anchor_key
from weightcast.shared.channel.store import Store, joined

from .files import (
    DEFAULT,
    ContenderFailed,
    Done,
    Model,
    Places,
    Weightcast,
    anon_bytes,
    cores,
    highest_anon,
)

_BEHIND = 8
"""versions that a host takes at once"""
_FOLLOWERS = 7
_VERSIONS = 8
"""per round of joins: half of them while a host joins"""
_PIECE = 8 << 20
_Figures = dict[str, float]


class _Side:
    """A publisher and a host of one channel, at a URL or in a directory."""

    def __init__(self, name: str, root: Path, base: Path, url: str) -> None:
        self.url = url or str(root / "channel")
        places = Places(root / f"{name}-publisher", base)
        # without deltas over many versions, which may or may not be there in time
        self.publisher = Weightcast("fast", places, cores(), self.url, ("--skip-span", 0))
        self.host = Weightcast("fast", Places(root / f"{name}-host", base), cores(), self.url)
        self.published: list[Done] = []
        self.synced: list[Done] = []

    def __enter__(self) -> _Side:
        self.publisher.start_publisher()
        self.catch_up(0)
        return self

    def __exit__(self, *error: object) -> None:
        self.host.stop()
        self.publisher.stop()

    def catch_up(self, version: int) -> Done:
        """Of a host that starts now: one that runs, or was suspended, may have seen a version on the way.
        Raises ContenderFailed unless it came in one step."""
        self.host.start_host()
        done = self.host.sync(version)
        self.host.stop()
        if done.moves != 1:
            raise ContenderFailed(f"{self.url}: {done.moves} steps to version {version}")
        return done

    @property
    def local(self) -> Path:
        return self.publisher.places.publisher


def _turns(model: Model, root: Path, sides: Sequence[_Side], rounds: int) -> None:
    version = 0
    for _ in range(rounds):
        for _ in range(_BEHIND):
            version += 1
            model.step(DEFAULT)
            checkpoint = model.write(root / f"new{version}")
            for side in sides if version % 2 else sides[::-1]:
                for one in sides:
                    one.publisher.settle()
                os.sync()
                side.published.append(side.publisher.publish(checkpoint))
            shutil.rmtree(checkpoint)
        for side in sides if version // _BEHIND % 2 else sides[::-1]:
            for one in sides:
                one.publisher.settle()
            os.sync()
            side.synced.append(done := side.catch_up(version))
            phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in done.phases.items())
            text = f"{done.seconds:.2f} s: {phases}; {done.disk_bytes / 2**20:.0f} MiB from disk"
            print(f"round {version // _BEHIND}: sync {side.url} {text}", flush=True)


def deltas(root: Path, base: Path, model: Model, url: str, rounds: int) -> _Figures:
    (root / "directory").mkdir()
    (root / "store").mkdir()
    directory, store = (
        _Side("directory", root / "directory", base, ""),
        _Side("store", root / "store", base, url),
    )
    with directory, store:
        _turns(model, root, (directory, store), rounds)
    figures: _Figures = {}
    for name, side in (("directory", directory), ("store", store)):
        # the first publication compiles, opens and reads what later ones have at hand
        figures[f"{name}: publish, to the pointer, s"] = median(
            done.pointer or 0.0 for done in side.published[1:]
        )
        figures[f"{name}: sync of {_BEHIND} versions, s"] = median(done.seconds for done in side.synced)
        for phase in side.published[-1].phases:
            figures[f"{name}: publish, {phase}, s"] = median(
                done.phases.get(phase, 0.0) for done in side.published[1:]
            )
        for phase in side.synced[-1].phases:
            figures[f"{name}: sync, {phase}, s"] = median(done.phases.get(phase, 0.0) for done in side.synced)
        figures[f"{name}: growth of the publisher, MiB"] = (
            max(done.anon_bytes for done in side.published) / 2**20
        )
        figures[f"{name}: growth of the host, MiB"] = max(done.anon_bytes for done in side.synced) / 2**20
    figures["publish: store / directory"] = _ratio(figures, "publish, to the pointer, s")
    figures["sync: store / directory"] = _ratio(figures, f"sync of {_BEHIND} versions, s")
    return figures


def _ratio(figures: _Figures, what: str) -> float:
    return figures[f"store: {what}"] / figures[f"directory: {what}"]


def _seconds(work: Callable[[], object]) -> float:
    os.sync()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def anchors(root: Path, base: Path, url: str, rounds: int) -> _Figures:
    """Of the base's bytes. A download ends in a file."""
    store, client = open_store(url), from_url(url, client_options={"allow_http": True})
    model = max(base.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    took: dict[str, list[float]] = {name: [] for name in ("put", "upload", "get", "download", "join")}
    grown: dict[str, float] = {}
    target = root / "downloaded"
    init_channel(open_store(url), base)
    with RunPublisher.open(url, local=root / "anchors", base=base) as publisher:
        publisher.publish_checkpoint(base)
        key = anchor_key(publisher.version)
        publisher.write_anchor()
        for _ in range(rounds):
            store.discard(key)
            took["put"].append(_seconds(lambda: obstore.put(client, "plain", model)))
            with _growth(grown, "upload"):
                took["upload"].append(_seconds(publisher.write_anchor))
            took["get"].append(_seconds(lambda: _plain_get(client, target)))
            with _growth(grown, "download"):
                took["download"].append(_seconds(lambda: _download(store.within(key), target)))
            took["join"].append(_seconds(lambda: _join(url, root / "joined")))
            shutil.rmtree(root / "joined")
    figures = {
        f"{name} of {model.stat().st_size / 1e6:.0f} MB, s": median(all_) for name, all_ in took.items()
    }
    figures["upload: anchor / put, throughput"] = median(took["put"]) / median(took["upload"])
    figures["download: anchor / get, throughput"] = median(took["get"]) / median(took["download"])
    return figures | {f"{name}: growth, MiB": nbytes / 2**20 for name, nbytes in grown.items()}


def _plain_get(client: Client, target: Path) -> None:
    with target.open("wb") as file:
        for piece in obstore.get(client, "plain").stream(min_chunk_size=_PIECE):
            file.write(piece)


def _download(files: Store, target: Path) -> None:
    name = next(name for name in files.names() if name.endswith(".safetensors"))
    with target.open("wb") as file:
        for piece in files.pieces(name):
            file.write(piece)


def _join(url: str, local: Path) -> None:
    command = (sys.executable, "-m", "weightcast.shared.cli.main", "sync", "--channel", url, "--local", local)
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)


@contextmanager
def _growth(grown: dict[str, float], name: str) -> Iterator[None]:
    """Of this process, in bytes: the most of all times."""
    before = anon_bytes(os.getpid())
    with highest_anon(os.getpid()) as highest:
        yield
    grown[name] = max(grown.get(name, 0.0), highest.nbytes - before)


def _pointer_moved(url: str) -> float:
    """Unix time by the store's clock, which is this machine's. A listing has fractions of a second."""
    listed = obstore.list_with_delimiter(from_url(url, client_options={"allow_http": True}))
    return next(
        meta["last_modified"].timestamp() for meta in listed["objects"] if meta["path"].endswith("latest")
    )


def joins(root: Path, base: Path, model: Model, url: str, rounds: int) -> _Figures:
    """Seconds from the move of the pointer until each of the hosts has the version, by their own clocks."""
    publisher = Weightcast("fast", Places(root / "publisher", base), 1, url, ("--anchor-every", 4))
    hosts = [Weightcast("fast", Places(root / f"host{number}", base), 1, url) for number in range(_FOLLOWERS)]
    lags: dict[bool, list[float]] = {False: [], True: []}
    took: list[float] = []
    with ExitStack() as stack:
        stack.callback(publisher.stop)
        publisher.start_publisher()
        for host in hosts:
            stack.callback(host.stop)
            host.start_host()
        for version in range(1, _VERSIONS * rounds + 1):
            joining = (version - 1) // 4 % 2 == 1
            publisher.settle()
            model.step(DEFAULT)
            checkpoint = model.write(root / f"new{version}")
            with ThreadPoolExecutor(1) as pool:
                joined = pool.submit(_seconds, lambda: _join(url, root / "joined")) if joining else None
                publisher.publish(checkpoint)
                moved = _pointer_moved(url)
                lags[joining] += [host.ended(version) - moved for host in hosts]
                if joined is not None:
                    took.append(joined.result())
                    shutil.rmtree(root / "joined")
            shutil.rmtree(checkpoint)
    p95 = {joining: quantiles(all_, n=20)[-1] for joining, all_ in lags.items()}
    return {
        "lag, p95, s": p95[False],
        "lag while another host joins, p95, s": p95[True],
        "lag, median, s": median(lags[False]),
        "lag while another host joins, median, s": median(lags[True]),
        "join, median, s": median(took),
        "lag p95: with / without a join": p95[True] / p95[False],
    }


_PARTS = ("deltas", "anchors", "joins")


def measure(url: str, megabytes: int, rounds: int, parts: Sequence[str], root: Path) -> _Figures:
    model = Model(megabytes * 10**6, 0)
    base = model.write(root / "base")
    found: _Figures = {}
    for part in parts:
        there, below = root / part, joined(url.rstrip("/"), part)
        there.mkdir()
        try:
            if part == "deltas":
                found |= deltas(there, base, model, below, rounds)
            elif part == "anchors":
                found |= anchors(there, base, below, rounds)
            else:
                found |= joins(there, base, model, below, rounds)
        finally:
            open_store(below).discard("")
            shutil.rmtree(there)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", help="s3://BUCKET/PREFIX, with credentials in the environment")
    parser.add_argument("--megabytes", type=int, default=1000, help="of the model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", action="append", choices=_PARTS, help="only this; repeatable")
    parser.add_argument("--dir", type=Path, help="for temporary files: ten times the model")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weightcast-stores-", dir=chosen.dir) as root:
        parts = chosen.part or _PARTS
        found = measure(chosen.url, chosen.megabytes, chosen.rounds, parts, Path(root))
    if chosen.json:
        print(json.dumps(found))
        return
    table = Table(show_header=False, box=None)
    for name, value in found.items():
        table.add_row(name, f"{value:,.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()

"""Tools that compare any files, on one step of training: python -m benchmarks.generic_tools [--megabytes N]

A safetensors file of bf16 words before and after a simulated Adam step, or with --trained a step of a small
transformer. Each tool makes a patch and applies it, from warm files to files, with one thread, in turns; what
it makes of the old file must equal the new one. weightcast does what its daemons do: it checks, hashes,
journals and syncs to the disk, which the others do not. Tools that are not installed are left out.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import zstandard
from rich.console import Console
from rich.table import Table

from weightcast.publisher.api import Publisher, PublisherOptions
from weightcast.publisher.channel_init import init_channel
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.checkpoint.local_updater import LocalUpdater, UpdaterOptions
from weightcast.shared.codec.warm_up import warm_up
from weightcast.shared.files.safetensors import Entry, pack_header

from .chunks import Case, Words, simulated, trained

_TENSOR_WORDS = 8_000_000
_TRAINED_RATE = 2e-6
"""a learning rate at which about 1.4% of the words change"""
_MODEL = "model.safetensors"


@dataclass(frozen=True)
class Row:
    """`nbytes` of the patch; seconds are medians."""

    tool: str
    nbytes: int
    bits_per_changed: float
    make_seconds: float
    apply_seconds: float


class Tool:
    """`make` returns the bytes of the patch, `apply` the file that it gives; `prepare` is not timed."""

    def __init__(self, name: str, old: Path, new: Path, room: Path) -> None:
        self.name, self.old, self.new = name, old, new
        self.patch, self.made = room / "patch", room / "made"

    def prepare(self) -> None:
        self.patch.unlink(missing_ok=True)
        self.made.unlink(missing_ok=True)

    def make(self) -> int:
        raise NotImplementedError

    def apply(self) -> Path:
        raise NotImplementedError


class Program(Tool):
    """A program with two command lines, in which {old}, {new}, {patch} and {made} are files."""

    def __init__(self, name: str, make: str, apply: str, *files: Path) -> None:
        super().__init__(name, *files)
        self._lines = make, apply

    def _run(self, line: str) -> None:
        files = {name: str(getattr(self, name)) for name in ("old", "new", "patch", "made")}
        subprocess.run([part.format(**files) for part in line.split()], check=True, capture_output=True)

    def make(self) -> int:
        self._run(self._lines[0])
        return self.patch.stat().st_size

    def apply(self) -> Path:
        self._run(self._lines[1])
        return self.made


class Rsync(Program):
    """Its receiver's file is patched in place."""

    def prepare(self) -> None:
        super().prepare()
        shutil.copy(self.old, self.made)


class XorZstd(Tool):
    """What slime, miles and Stitch ship, in one frame."""

    def make(self) -> int:
        change = np.fromfile(self.old, np.uint8) ^ np.fromfile(self.new, np.uint8)
        return self.patch.write_bytes(zstandard.ZstdCompressor(level=1).compress(change.data))

    def apply(self) -> Path:
        change = zstandard.ZstdDecompressor().decompress(self.patch.read_bytes())
        (np.fromfile(self.old, np.uint8) ^ np.frombuffer(change, np.uint8)).tofile(self.made)
        return self.made


class Weightcast(Tool):
    """A channel whose versions are the new file and the old one in turns: only steps forth are timed."""

    def __init__(self, encoding: str, stack: ExitStack, *files: Path) -> None:
        super().__init__(f"weightcast {encoding}", *files)
        place = files[2] / encoding
        init_channel(place / "channel", self.old.parent)
        options = PublisherOptions(threads=1, upkeep_thread=False)
        self._publisher = stack.enter_context(
            Publisher.open(
                place / "channel",
                local=place / "publisher",
                base=self.old.parent,
                encoding=encoding,  # type: ignore[arg-type]
                options=options,
            )
        )
        self._store = open_store(place / "channel")
        self._host = LocalUpdater(self._store, place / "host", self.old.parent, UpdaterOptions(threads=1))
        stack.callback(self._host.close)
        self._made = place / "host" / _MODEL
        self.apply()

    def prepare(self) -> None:
        if not filecmp.cmp(self._made, self.old, shallow=False):
            self._publisher.publish_checkpoint(self.old.parent)
            self.apply()

    def make(self) -> int:
        return self._publisher.publish_checkpoint(self.new.parent).delta_bytes

    def apply(self) -> Path:
        self._host.update_to(Channel.open(self._store))
        return self._made


_LONG = "zstd -q -f --single-thread --long=31 --patch-from={old}"
_RSYNC = "rsync --no-whole-file --ignore-times --inplace"
PROGRAMS = {
    "rsync --only-write-batch": (
        f"{_RSYNC} --only-write-batch={{patch}} {{new}} {{made}}",
        f"{_RSYNC} --read-batch={{patch}} {{made}}",
    ),
    "zstd -1 --patch-from": (f"{_LONG} -1 {{new}} -o {{patch}}", f"{_LONG} -d {{patch}} -o {{made}}"),
    "zstd -3 --patch-from": (f"{_LONG} -3 {{new}} -o {{patch}}", f"{_LONG} -d {{patch}} -o {{made}}"),
    "xdelta3": (
        "xdelta3 -e -f -B 1073741824 -s {old} {new} {patch}",
        "xdelta3 -d -f -B 1073741824 -s {old} {patch} {made}",
    ),
}


def tools(stack: ExitStack, *files: Path) -> Iterator[Tool]:
    for name, lines in PROGRAMS.items():
        if shutil.which(name.split()[0]):
            yield (Rsync if name.startswith("rsync") else Program)(name, *lines, *files)
    yield XorZstd("xor, zstd -1", *files)
    for encoding in ("fast", "small"):
        yield Weightcast(encoding, stack, *files)


def measure(case: Case, rounds: int, directory: Path) -> list[Row]:
    changed = int(np.count_nonzero(case.old != case.new))
    old, new = (_written(directory / name, words) for name, words in (("old", case.old), ("new", case.new)))
    warm_up()
    with ExitStack() as stack:
        room = directory / "room"
        room.mkdir()
        found = {tool: list[tuple[int, float, float]]() for tool in tools(stack, old, new, room)}
        # the first round warms caches
        for number in range(rounds + 1):
            for tool, results in found.items():
                result = _measured(tool)
                if number:
                    results.append(result)
    return [
        Row(
            tool.name,
            results[0][0],
            8 * results[0][0] / changed,
            *(median(result[at] for result in results) for at in (1, 2)),
        )
        for tool, results in found.items()
    ]


def _written(directory: Path, words: Words) -> Path:
    """A checkpoint with tensors as long as those of a model."""
    spans = [(at, min(len(words), at + _TENSOR_WORDS)) for at in range(0, len(words), _TENSOR_WORDS)]
    entries = [
        Entry(f"layers.{number}.weight", "BF16", (stop - start,), 2 * start, 2 * stop)
        for number, (start, stop) in enumerate(spans)
    ]
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    path = directory / _MODEL
    path.write_bytes(pack_header(entries, {}) + words.tobytes())
    return path


def _measured(tool: Tool) -> tuple[int, float, float]:
    tool.prepare()
    times = [perf_counter()]
    nbytes = tool.make()
    times.append(perf_counter())
    made = tool.apply()
    times.append(perf_counter())
    if not filecmp.cmp(made, tool.new, shallow=False):
        raise SystemExit(f"{tool.name}: what it makes of the old file is not the new one")
    return nbytes, times[1] - times[0], times[2] - times[1]


def table(case: Case, rows: Sequence[Row]) -> Table:
    title = f"{case.old.nbytes / 1e6:.0f} MB of bf16, {case.density:.2%} of the words changed ({case.name})"
    shown = Table("tool", "bytes", "of the file", "bits per changed word", "make", "apply", title=title)
    for row in rows:
        figures = (f"{row.nbytes:,}", f"{row.nbytes / case.old.nbytes:.2%}", f"{row.bits_per_changed:.1f}")
        shown.add_row(row.tool, *figures, f"{row.make_seconds:.3f} s", f"{row.apply_seconds:.3f} s")
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="generic_tools", description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=float, default=192.0)
    parser.add_argument("--density", type=float, default=0.014)
    parser.add_argument("--trained", action="store_true", help="a step of a model that trains (needs torch)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="directory for temporary files: eight times the model")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    if given.trained:
        (case,) = trained((_TRAINED_RATE,))
    else:
        case = simulated(round(given.megabytes * 500_000), given.density, seed=0)
    with tempfile.TemporaryDirectory(dir=given.dir) as directory:
        rows = measure(case, given.rounds, Path(directory))
    if given.json:
        facts = {
            "megabytes": case.old.nbytes / 1e6,
            "density": case.density,
            "rows": [asdict(row) for row in rows],
        }
        print(json.dumps(facts))
    else:
        Console().print(table(case, rows))


if __name__ == "__main__":
    main(sys.argv[1:])

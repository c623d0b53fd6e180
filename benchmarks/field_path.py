"""slime's format, built with care: xor with the last bytes, one zstd-1 frame per tensor.

    python -m benchmarks.field_path publish CHECKPOINT --channel DIR --local DIR --base DIR
    python -m benchmarks.field_path sync --channel DIR --local DIR --base DIR
    python -m benchmarks.field_path serve publisher|host --channel DIR --local DIR --base DIR

It shares no code with weightcast's pipeline and has its care: files mapped once and held, tensors shared out
over threads largest first, contexts and buffers kept per thread, work in pieces that stay in the cache, each
thread streaming into a shard of its own, shards and index and pointer durable before they are named. The
format: docs/FORMAT.md, The slime format. A crash between first and last byte of a round costs it the local
copy (`state.json` says `unfinished`), because the slime format has no journal.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Item = TypeVar("Item")

PIECE = 512 << 10
"""bytes worked on at once: old, new and difference fit into a core's cache together"""
INDEX = "model.safetensors.index.json"
_HEADER_LIMIT = 100_000_000
_STATE = Path(".weight_sync") / "state.json"


class FieldPathError(RuntimeError):
    """A file has an unexpected form."""


@dataclass(frozen=True)
class Round:
    """One publication or one sync: `seconds` of wall clock, `profile` in seconds summed over threads,
    `nbytes` of the files written or read."""

    version: int
    seconds: float
    profile: Mapping[str, float]
    nbytes: int
    pointed: float = 0.0
    """seconds until the pointer named the version; 0 of a sync"""


class Profile:
    """Seconds by kind of work, summed over threads."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, spent: Mapping[str, float]) -> None:
        with self._lock:
            for name, seconds in spent.items():
                self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add({name: time.perf_counter() - began})


@dataclass
class _Lap:
    """A stopwatch whose laps cost less than a microsecond each."""

    spent: dict[str, float] = field(default_factory=dict)
    at: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.spent[name] = self.spent.get(name, 0.0) + now - self.at
        self.at = now


# -- files


def _header(path: Path) -> tuple[dict[str, Any], int, int]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _HEADER_LIMIT:
            raise FieldPathError(f"{path}: header of {length} bytes")
        return json.loads(file.read(length)), 8 + length, path.stat().st_size


def _places(header: Mapping[str, Any], start: int, size: int) -> dict[str, tuple[int, int]]:
    places = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end <= size - start:
                raise FieldPathError(f"{name} is outside its file")
            places[name] = (start + begin, end - begin)
    return places


class Mapped:
    """Every tensor of a checkpoint directory as bytes over mapped files; they live as long as this."""

    def __init__(self, directory: Path, *, writable: bool = False) -> None:
        self.tensors: dict[str, Bytes] = {}
        for path in sorted(directory.glob("*.safetensors")):
            whole: Bytes = np.asarray(np.memmap(path, np.uint8, "r+" if writable else "r"))
            for name, (offset, length) in _places(*_header(path)).items():
                self.tensors[name] = whole[offset : offset + length]


def copy_checkpoint(base: Path, local: Path) -> None:
    """What `local` starts from, durable. Nothing happens where there is a state already."""
    if (local / _STATE).exists():
        return
    (local / _STATE.parent).mkdir(parents=True, exist_ok=True)
    for path in sorted(base.iterdir()):
        if path.is_file():
            shutil.copyfile(path, local / path.name)
            _sync(local / path.name)
    save_state(local, 0)


def load_state(local: Path) -> int:
    """The complete version in the directory. Raises FieldPathError after an interrupted round."""
    state = json.loads((local / _STATE).read_text())
    if state.get("unfinished"):
        raise FieldPathError(f"{local} was left unfinished: remove it and start from a full version")
    return int(state["version"])


def save_state(local: Path, version: int, *, unfinished: bool = False) -> None:
    state: dict[str, object] = {"version": f"{version:06d}"}
    put(local / _STATE, json.dumps(state | ({"unfinished": True} if unfinished else {})).encode())


def put(path: Path, data: bytes) -> None:
    """Whole and durable: temporary file, fsync, rename, fsync of the directory."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(data)
    _sync(temporary)
    temporary.rename(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def version_directory(channel: Path, version: int) -> Path:
    return channel / f"weight_v{version:06d}"


def pointed(channel: Path) -> int:
    pointer = channel / "latest"
    return int(pointer.read_text()) if pointer.exists() else 0


# -- threads


class Crew:
    """Threads that share out items, each with tools of its own that it keeps from round to round."""

    def __init__(self, threads: int, tools: Callable[[], Tools]) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads)
        self._tools = [tools() for _ in range(threads)]

    def work(self, items: Sequence[Item], do: Callable[[Tools, int, Iterable[Item]], None]) -> None:
        """`do(tools, number, items)` on each thread, taking the next item when one is done."""
        queue, lock = iter(items), threading.Lock()

        def taken() -> Iterator[Item]:
            while True:
                with lock:
                    item = next(queue, None)
                if item is None:
                    return
                yield item

        running = [self._pool.submit(do, tools, number, taken()) for number, tools in enumerate(self._tools)]
        for one in running:
            one.result()

    def close(self) -> None:
        self._pool.shutdown()


class Tools:
    """What a thread reuses."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor()
        self.buffer = np.empty(PIECE, np.uint8)


def pieces(nbytes: int) -> Iterator[slice]:
    for start in range(0, nbytes, PIECE):
        yield slice(start, min(start + PIECE, nbytes))


# -- publishing


class _Shard:
    """A safetensors file that frames are streamed into; its header has its place kept free in front."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self.path = path
        self.entries: dict[str, dict[str, object]] = {}
        self.digests: dict[str, str] = {}
        # An upper bound: a name is quoted twice, with offsets of at most 20 digits and a digest of 32.
        self._start = 8 + 64 + sum(2 * len(json.dumps(name)) + 160 for name in names)
        self._file: BinaryIO = path.open("wb", buffering=0)
        self._file.seek(self._start)
        self.at = 0

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = self._file.write(view)
            view = view[written:]
            self.at += written

    def keep(self, name: str, begin: int, digest: str) -> None:
        length = self.at - begin
        self.entries[name] = {"dtype": "U8", "shape": [length], "data_offsets": [begin, self.at]}
        self.digests[name] = digest

    def drop(self, begin: int) -> None:
        """Forgets what was written since `begin`."""
        self.at = begin
        self._file.seek(self._start + begin)

    def close(self) -> None:
        self._file.truncate(self._start + self.at)
        text = json.dumps({"__metadata__": self.digests, **self.entries}).encode()
        head = (self._start - 8).to_bytes(8, "little") + text.ljust(self._start - 8)
        self._file.seek(0)
        self._file.write(head)
        os.fsync(self._file.fileno())
        self._file.close()


class FieldPublisher:
    """Holds the last published bytes mapped. One at a time per `local`."""

    def __init__(self, channel: Path, local: Path, base: Path, threads: int) -> None:
        copy_checkpoint(base, local)
        channel.mkdir(parents=True, exist_ok=True)
        self._channel, self._local = channel, local
        self.version = load_state(local)
        self._old = Mapped(local, writable=True)
        self._crew = Crew(threads, Tools)

    def publish(self, checkpoint: Path) -> Round:
        """Raises FieldPathError when the checkpoint has other tensors than the base."""
        began, profile, version = time.perf_counter(), Profile(), self.version + 1
        new = Mapped(checkpoint)
        self._check(checkpoint, new)
        directory = version_directory(self._channel, version)
        directory.mkdir()
        save_state(self._local, self.version, unfinished=True)
        shards = self._write(new, directory, profile)
        with profile.timed("commit"):
            self._commit(version, directory, shards)
        pointed = time.perf_counter() - began
        self.version = version
        save_state(self._local, version)
        written = sum(path.stat().st_size for path in directory.iterdir())
        return Round(version, time.perf_counter() - began, profile.seconds, written, pointed)

    def _check(self, checkpoint: Path, new: Mapped) -> None:
        old = {name: len(data) for name, data in self._old.tensors.items()}
        if {name: len(data) for name, data in new.tensors.items()} != old:
            raise FieldPathError(f"{checkpoint} has other tensors than the base")

    def _write(self, new: Mapped, directory: Path, profile: Profile) -> list[_Shard]:
        shards: list[_Shard] = []
        names = sorted(new.tensors, key=lambda name: -len(new.tensors[name]))

        def do(tools: Tools, number: int, taken: Iterable[str]) -> None:
            shard = _Shard(directory / f"shard-{number}.tmp", names)
            shards.append(shard)
            for name in taken:
                profile.add(_write_tensor(tools, shard, name, self._old.tensors[name], new.tensors[name]))
            with profile.timed("commit"):
                shard.close()

        self._crew.work(names, do)
        for shard in shards:
            if not shard.entries:
                shard.path.unlink()
        return [shard for shard in shards if shard.entries]

    def _commit(self, version: int, directory: Path, shards: Sequence[_Shard]) -> None:
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            shard.path.rename(directory / name)
            weight_map |= dict.fromkeys(shard.entries, name)
        metadata = {
            "version": f"{version:06d}",
            "base_version": f"{version - 1:06d}",
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": "xxh3-128",
        }
        put(directory / INDEX, json.dumps({"metadata": metadata, "weight_map": weight_map}).encode())
        _sync(self._channel)
        put(self._channel / "latest", f"{version:06d}".encode())

    def close(self) -> None:
        self._crew.close()


def _write_tensor(tools: Tools, shard: _Shard, name: str, old: Bytes, new: Bytes) -> dict[str, float]:
    """Streams one frame into the shard and brings `old` to `new`, piece by piece while both are in cache."""
    lap, begin, changed = _Lap(), shard.at, False
    frame, digest = tools.compressor.compressobj(size=len(new)), xxhash.xxh3_128()
    for piece in pieces(len(new)):
        different = np.bitwise_xor(old[piece], new[piece], out=tools.buffer[: piece.stop - piece.start])
        touched = bool(different.any())
        changed |= touched
        lap.lap("xor")
        data = frame.compress(different.data)
        lap.lap("zstd")
        digest.update(new[piece].data)
        lap.lap("digest")
        shard.write(data)
        lap.lap("write")
        if touched:
            old[piece] = new[piece]
        lap.lap("baseline")
    if changed:
        shard.write(frame.flush())
        shard.keep(name, begin, digest.hexdigest())
    else:
        shard.drop(begin)
    lap.lap("write")
    return lap.spent


# -- following


@dataclass(frozen=True)
class _Payload:
    name: str
    frame: memoryview
    digest: str


class FieldHost:
    """A local checkpoint that is patched in place, mapped as long as this lives."""

    def __init__(self, channel: Path, local: Path, base: Path, threads: int) -> None:
        copy_checkpoint(base, local)
        self._channel, self._local = channel, local
        self.version = load_state(local)
        self._mapped = Mapped(local, writable=True)
        self._crew = Crew(threads, Tools)

    def sync(self) -> Round:
        """To the pointer, version by version. Raises FieldPathError when bytes are not what a digest says;
        the local checkpoint is lost then."""
        began, profile, read = time.perf_counter(), Profile(), 0
        for version in range(self.version + 1, pointed(self._channel) + 1):
            read += self._apply(version, profile)
        return Round(self.version, time.perf_counter() - began, profile.seconds, read)

    def _apply(self, version: int, profile: Profile) -> int:
        directory = version_directory(self._channel, version)
        with profile.timed("read"):
            payloads = self._payloads(directory, version)
        save_state(self._local, self.version, unfinished=True)
        payloads.sort(key=lambda payload: -len(self._mapped.tensors[payload.name]))

        def do(tools: Tools, number: int, taken: Iterable[_Payload]) -> None:
            for payload in taken:
                profile.add(_apply_tensor(tools, payload, self._mapped.tensors[payload.name]))

        self._crew.work(payloads, do)
        save_state(self._local, version)
        self.version = version
        return sum(path.stat().st_size for path in directory.iterdir())

    def _payloads(self, directory: Path, version: int) -> list[_Payload]:
        index = json.loads((directory / INDEX).read_text())
        if index["metadata"]["base_version"] != f"{version - 1:06d}":
            raise FieldPathError(f"{directory} does not continue version {version - 1}")
        found: list[_Payload] = []
        for file in sorted(set(index["weight_map"].values())):
            if Path(file).name != file:
                raise FieldPathError(f"{directory}: {file} is not a name")
            found += _payloads_in(directory / file)
        if sorted(payload.name for payload in found) != sorted(index["weight_map"]):
            raise FieldPathError(f"{directory}: index and shards disagree")
        return found

    def close(self) -> None:
        self._crew.close()


def _payloads_in(path: Path) -> Iterator[_Payload]:
    header, start, size = _header(path)
    whole = np.asarray(np.memmap(path, np.uint8, "r")).data
    for name, (offset, length) in _places(header, start, size).items():
        yield _Payload(name, whole[offset : offset + length], header["__metadata__"][name])


def _apply_tensor(tools: Tools, payload: _Payload, words: Bytes) -> dict[str, float]:
    lap, digest = _Lap(), xxhash.xxh3_128()
    if zstandard.get_frame_parameters(payload.frame).content_size != len(words):
        raise FieldPathError(f"{payload.name}: a frame of another length")
    with tools.decompressor.stream_reader(payload.frame) as frame:
        for piece in pieces(len(words)):
            different = tools.buffer[: piece.stop - piece.start]
            _fill(frame, different.data, payload.name)
            lap.lap("zstd")
            there = words[piece]
            np.bitwise_xor(there, different, out=there)
            lap.lap("xor")
            digest.update(there.data)
            lap.lap("digest")
    if digest.hexdigest() != payload.digest:
        raise FieldPathError(f"{payload.name}: other bytes than its digest says")
    return lap.spent


def _fill(frame: zstandard.ZstdDecompressionReader, target: memoryview, name: str) -> None:
    while target:
        count = frame.readinto(target)
        if not count:
            raise FieldPathError(f"{name}: its frame ends early")
        target = target[count:]


# -- chunks in memory


class FieldChunks(threading.local):
    """The same work on words in memory, for the side by side of codecs: digest of the new bytes included."""

    def __init__(self) -> None:
        self._tools = Tools()
        self._buffer = np.empty(0, np.uint8)

    def encode(self, old: Bytes, new: Bytes) -> tuple[bytes, str]:
        """Payload, empty where nothing changed, and digest."""
        if len(self._buffer) < len(new):
            self._buffer = np.empty(len(new), np.uint8)
        different = np.bitwise_xor(old, new, out=self._buffer[: len(new)])
        digest = xxhash.xxh3_128_hexdigest(new.data)
        return self._tools.compressor.compress(different.data) if different.any() else b"", digest

    def decode(self, blob: bytes, words: Bytes) -> str:
        """Brings `words` to the new bytes in place; their digest."""
        if not blob:
            return xxhash.xxh3_128_hexdigest(words.data)
        digest = xxhash.xxh3_128()
        with self._tools.decompressor.stream_reader(blob) as frame:
            for piece in pieces(len(words)):
                different = self._tools.buffer[: piece.stop - piece.start]
                _fill(frame, different.data, "chunk")
                there = words[piece]
                np.bitwise_xor(there, different, out=there)
                digest.update(there.data)
        return digest.hexdigest()


# -- commands


def main(arguments: Sequence[str] | None = None) -> None:
    asked = _parser().parse_args(arguments)
    places = (asked.channel, asked.local, asked.base, asked.threads)
    if asked.verb == "publish":
        _tell(FieldPublisher(*places).publish(asked.checkpoint))
    elif asked.verb == "sync":
        _tell(FieldHost(*places).sync())
    elif asked.side == "publisher":
        publisher = FieldPublisher(*places)
        _serve(lambda line: publisher.publish(Path(line)))
    else:
        host = FieldHost(*places)
        _serve(lambda line: host.sync())


def _serve(answer: Callable[[str], Round]) -> None:
    """Says `ready`, then does a round for every line of input."""
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        _tell(answer(line.rstrip("\n")))


def _tell(done: Round) -> None:
    print(json.dumps(asdict(done)), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    publish, sync, serve = (verbs.add_parser(name) for name in ("publish", "sync", "serve"))
    publish.add_argument("checkpoint", type=Path)
    serve.add_argument("side", choices=("publisher", "host"))
    for verb in (publish, sync, serve):
        for name in ("--channel", "--local", "--base"):
            verb.add_argument(name, type=Path, required=True)
        verb.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser


if __name__ == "__main__":
    main()

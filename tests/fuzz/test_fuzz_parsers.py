"""Whatever lies in a file of a channel or a local checkpoint: a value comes of it, or one of our errors."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from journal_cases import packed

from weightcast.shared.base.elements import ChunkKey, Part, Segment, TensorSpec, TensorTable
from weightcast.shared.base.errors import WeightcastError
from weightcast.shared.channel.claims import Claimant, ClaimRecord, parse_claim, write_claim
from weightcast.shared.channel.components import Component, parse_registry, write_registry
from weightcast.shared.channel.index import (
    ChunkRecord,
    Index,
    VersionTotals,
    parse_foreign,
    parse_index,
    write_index,
)
from weightcast.shared.channel.layout import parse_pointer
from weightcast.shared.channel.reports import Report, pack_report, parse_report
from weightcast.shared.channel.run_files import (
    Base,
    FileRecord,
    TensorRecords,
    parse_base,
    parse_channel_file,
    write_base,
)
from weightcast.shared.channel.skyrl import parse_manifest
from weightcast.shared.checkpoint.state.state import (
    Blocked,
    EngineState,
    LocalState,
    Mark,
    Phase,
    Position,
    Step,
    read_state,
    write_state,
)
from weightcast.shared.checkpoint.update.journal import (
    JournalHeader,
    JournalReader,
    JournalWriter,
    Packed,
    Record,
)
from weightcast.shared.digest.checksums import Lanes, root
from weightcast.shared.files.safetensors import parse_header

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))
"""per property; `make fuzz` asks for more"""
QUICK = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
TABLE = TensorTable.of(
    [
        TensorSpec("a", "BF16", (3, 100), 600),
        TensorSpec("b", "F32", (7,), 28),
        TensorSpec("c", "I64", (0,), 0),
        TensorSpec("d", "F8_E4M3", (), 1),
    ]
)
LANES = np.array([(1, 2), (3, 4), (0, 0), (5, 6)], np.uint64)
BASE = write_base(
    Base(
        "run",
        TABLE,
        LANES,
        root(TABLE, LANES),
        (FileRecord("config.json", 2, "0" * 64),),
    )
)
CHANNEL_FILE = (
    b'{"format":1,"run_id":"run","component":"main","created":1.5,"frozen":["x.*"],"aliases":{"y":"a"},'
    b'"horizon":0}'
)
PARTS = (Part(0, (Segment(0, 0, 128), Segment(1, 0, 7))), Part(1, (Segment(0, 128, 300), Segment(3, 0, 1))))
INDEX = write_index(
    Index(
        run_id="run",
        version=2,
        kind="delta",
        base_version=1,
        base_root="1" * 64,
        root="2" * 64,
        parent="3" * 64,
        epoch=1,
        encoding="fast",
        step=5,
        created=1.5,
        files=(FileRecord("s", 100, "4" * 64),),
        tensors=TensorRecords(("a",), np.array([[9, 9]], np.uint64), np.array([2]), np.array([0])),
        parts=PARTS,
        chunks=(ChunkRecord(ChunkKey(1, "BF16", 0), "s", 10, 20, 2, Lanes(1, 1), Lanes(2, 2)),),
        totals=VersionTotals(2, 308, 629, 100),
    ),
    TABLE,
)
FOREIGN = (
    b'{"metadata":{"version":"000002","base_version":"000001","delta_encoding":"xor",'
    b'"compression_format":"zstd","checksum_format":"adler32"},"weight_map":{"a":"s.safetensors"}}'
)
MANIFEST = (
    b'{"version":2,"base_version":1,"tensors":[{"name":"a","dtype":"bfloat16","shape":[3,100],'
    b'"uncompressed_num_bytes":600,"compressed_num_bytes":9,"payload_file":"s","payload_key":"a",'
    b'"checksum":"abababababababababababababababab","checksum_algorithm":"xxh3-128"}],'
    b'"total_uncompressed_num_bytes":600,"total_compressed_num_bytes":9,"payload_files":["s"]}'
)
CLAIM = write_claim(ClaimRecord(Claimant("h", 7, "b", "n", "12"), 1.0))
REPORT = pack_report(
    Report("h", "/l", "run", "idle", 1, None, "latest", 0, "", ({"name": "e"},), 3, "weightcast 1")
)
HEADER = b'{"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[3],"data_offsets":[0,6]}}'
SAFETENSORS = len(HEADER).to_bytes(8, "little") + HEADER
STATE = LocalState(
    "run",
    Position(3, "d", "r", 1, bytes(64)),
    Phase.PATCHING,
    active=Step("ab12", Position(3, "d", "r", 1, bytes(64)), Position(4, "e", "s", 1, bytes(64))),
    engines={"e": EngineState(Mark.SERVED, 3, "label", "p")},
    blocked=(Blocked(2, "x", "why"),),
    last_full_hash=1.0,
)

REGISTRY = write_registry(
    "run", (Component("adapter/code", "retired", 1.5, 2.5), Component("adapter/math", "active", 1.5))
)
PARSERS: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
    "base": (BASE, parse_base),
    "channel.json": (CHANNEL_FILE, parse_channel_file),
    "index": (INDEX, lambda data: parse_index(data, TABLE)),
    "foreign index": (FOREIGN, parse_foreign),
    "manifest": (MANIFEST, parse_manifest),
    "claim": (CLAIM, lambda data: parse_claim(data, "claim")),
    "report": (REPORT, lambda data: parse_report(data, "report")),
    "header": (SAFETENSORS, lambda data: parse_header(data, len(SAFETENSORS) + 6)),
    "registry": (REGISTRY, lambda data: parse_registry(data, "run")),
    "pointer": (b"weights/weight_v000007", lambda data: parse_pointer(data, "latest")),
}
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 300),
    st.sampled_from([1 << 31, 1 << 63, -(1 << 70), 10**400, 0.5, 1e308, -0.0]),
    st.text(max_size=4),
    st.sampled_from(["main", "..", "a/b", "\x00", "\ud800", "0" * 64, "ab" * 16]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=5,
)
TOKENS = st.sampled_from([b"1e999", b"-1", b"[" * 5000, b"NaN", b"\\ud800", b"9" * 5000, b"{}", b"\xff", b""])


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found.append((value, key))
        found += places(inner)
    return found


@st.composite
def damaged_json(draw: st.DrawFn, good: bytes) -> bytes:
    """Well formed, with some values replaced, removed or doubled."""
    value = json.loads(good)
    for _ in range(draw(st.integers(1, 3))):
        all_places = places(value)
        if not all_places:
            break
        holder, key = all_places[draw(st.integers(0, len(all_places) - 1))]
        kind = draw(st.sampled_from(["replace", "remove", "double"]))
        if kind == "replace":
            holder[key] = draw(VALUES)
        elif kind == "remove":
            del holder[key]
        elif isinstance(holder, list):
            holder.append(holder[key])
    return json.dumps(value).encode()


@st.composite
def damaged_bytes(draw: st.DrawFn, good: bytes) -> bytes:
    """Cut, with bytes replaced, with tokens put in."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        kind = draw(st.sampled_from(["byte", "cut", "token"]))
        if kind == "cut":
            del data[at:]
        elif kind == "token":
            data[at : at + draw(st.integers(0, 9))] = draw(TOKENS)
        elif data:
            data[at] = draw(st.integers(0, 255))
    return bytes(data)


def damaged(data: st.DataObject, good: bytes) -> bytes:
    kinds = [damaged_bytes(good)]
    if good.startswith(b"{"):
        kinds.append(damaged_json(good))
    return data.draw(st.one_of(kinds))


def tolerates(parse: Callable[[bytes], object], data: bytes) -> None:
    try:
        parse(data)
    except WeightcastError as error:
        assert all(line.isprintable() for line in error.message.split("\n"))


@pytest.mark.parametrize("name", PARSERS)
def test_the_examples_are_right(name: str) -> None:
    good, parse = PARSERS[name]
    assert parse(good) is not None


@pytest.mark.parametrize("name", PARSERS)
@QUICK
@given(data=st.data())
def test_files_of_the_channel(name: str, data: st.DataObject) -> None:
    good, parse = PARSERS[name]
    tolerates(parse, damaged(data, good))


@QUICK
@given(data=st.data())
def test_a_state(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "state.json"
    write_state(path, STATE)
    path.write_bytes(damaged(data, path.read_bytes()))
    tolerates(lambda _: read_state(path), b"")


def masked_record() -> Packed:
    """Every second of 300 words, as it stands in docs/FORMAT.md."""
    bits = sum(1 << place for place in range(0, 300, 2)).to_bytes(40, "little")
    payload = bits + bytes(300) + b"\1" * 300
    head = struct.pack("<IIQII", 0, 2, 0, 150, (3 << 30) + 300)
    checksum = xxhash.xxh3_64_intdigest(payload) ^ xxhash.xxh3_64_intdigest(head)
    return Packed([head, checksum.to_bytes(8, "little"), payload], 1, 150)


@QUICK
@given(data=st.data())
def test_a_journal(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "ab12.journal"
    path.unlink(missing_ok=True)
    writer = JournalWriter(path, JournalHeader("run", "ab12", 1, "r", 1, 2, "s", "d"))
    words = np.arange(2, dtype=np.uint16)
    writer.write(packed(Record(0, np.array([3, 299], np.uint64), words, words + 1)))
    writer.write(packed(Record(1, np.array([6], np.uint64), np.zeros(1, np.uint32), np.ones(1, np.uint32))))
    writer.write(masked_record())
    writer.close()

    def read(_: bytes) -> object:
        with JournalReader(path, TABLE) as journal:
            return [(r.tensor, int(r.index.max()) < TABLE[r.tensor].words) for r in journal.records()]

    assert read(b"") == [(0, True), (1, True), (0, True)]
    path.write_bytes(data.draw(damaged_bytes(path.read_bytes())))
    tolerates(read, b"")

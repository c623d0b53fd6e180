from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from weightcast.shared.base.elements import (
    ChunkKey,
    Part,
    Segment,
    TensorSpec,
    TensorTable,
)
from weightcast.shared.base.errors import DamagedFile, Refused, UnknownFormat
from weightcast.shared.channel.index import (
    ChunkRecord,
    FileRecord,
    ForeignIndex,
    Index,
    VersionTotals,
    describe,
    parse_foreign,
    parse_index,
    write_index,
)
from weightcast.shared.channel.run_files import TensorRecord, TensorRecords
from weightcast.shared.digest.checksums import Lanes, root

TABLE = TensorTable.of(
    [
        TensorSpec("a", "BF16", (2, 100), 400),
        TensorSpec("b", "F32", (), 4),
        TensorSpec("c", "BF16", (0, 4), 0),
        TensorSpec("d", "F64", (3,), 24),
        TensorSpec("e", "F4_UNKNOWN", (7,), 4),
    ]
)


def records(**each: TensorRecord) -> TensorRecords:
    lanes = np.array([record.lanes for record in each.values()], np.uint64).reshape(-1, 2)
    changed = np.array([record.changed for record in each.values()], np.int64)
    return TensorRecords(tuple(each), lanes, changed, np.zeros(len(each), np.int64))


SHARD = "model-00000-of-00001.safetensors"
FILES = (FileRecord(SHARD, 1000, "ab" * 32), FileRecord("extra.safetensors", 5, "cd" * 32))
DELTA = Index(
    run_id="run",
    version=7,
    kind="delta",
    base_version=6,
    base_root="1" * 64,
    root="2" * 64,
    parent="3" * 64,
    epoch=2,
    encoding="fast",
    step=None,
    created=1.5,
    files=FILES,
    tensors=records(a=TensorRecord(Lanes(1, (1 << 64) - 1), 3), b=TensorRecord(Lanes(0xAB, 2), 1)),
    parts=(TABLE.whole,),
    chunks=(
        ChunkRecord(ChunkKey(0, "BF16", 0), SHARD, 500, 100, 3, Lanes(5, 6), Lanes(7, 8)),
        ChunkRecord(ChunkKey(0, "F32", 0), SHARD, 600, 40, 1, Lanes(9, 10), Lanes(11, 12)),
    ),
    totals=VersionTotals(4, 211, 432, 1005),
)
FIELD = replace(
    DELTA,
    encoding="xor",
    checksums={"a": "0" * 32, "b": "f" * 32},
    chunks=tuple(chunk._replace(offset=0, length=0) for chunk in DELTA.chunks),
)
ANCHOR = replace(
    DELTA,
    kind="anchor",
    base_version=-1,
    base_root="",
    parent="",
    encoding=None,
    root=root(TABLE, np.zeros((len(TABLE), 2), np.uint64)),
    tensors=records(**{spec.name: TensorRecord(Lanes(), 0) for spec in TABLE}),
    parts=(),
    chunks=(),
)
EMPTY = replace(DELTA, tensors=records(), chunks=(), files=(), totals=VersionTotals(0, 211, 432, 0))
PIECES = replace(
    DELTA,
    parts=(
        Part(0, (Segment(0, 0, 64), Segment(1, 0, 1))),
        Part(1, (Segment(0, 64, 200), Segment(2, 0, 0), Segment(3, 0, 24), Segment(4, 0, 4))),
    ),
)

GOLDEN = (
    '{"metadata":{"version":"000007","base_version":"000006","delta_encoding":"step"},'
    f'"weight_map":{{"a":"{SHARD}","b":"{SHARD}"}},'
    '"weightcast":{"format":1,"run_id":"run","component":"main","kind":"delta","version":7,"epoch":2,'
    f'"base_version":6,"base_root":"{"1" * 64}","root":"{"2" * 64}","parent":"{"3" * 64}",'
    '"step":null,"created":1.5,"totals":[4,211,432,1005],'
    f'"files":[["{SHARD}",1000,"{"ab" * 32}"],["extra.safetensors",5,"{"cd" * 32}"]],'
    '"parts":[[[0,0,64],[1,1]],[[0,64,200],[2,4]]],'
    '"tensors":{"a":["0000000000000001ffffffffffffffff",3],"b":["00000000000000ab0000000000000002",1]},'
    '"chunks":[[0,"BF16",0,0,500,100,3,"00000000000000050000000000000006","00000000000000070000000000000008"],'
    '[0,"F32",0,0,600,40,1,"0000000000000009000000000000000a","000000000000000b000000000000000c"]]}}'
).encode()


def test_golden_bytes() -> None:
    assert write_index(PIECES, TABLE) == GOLDEN
    assert parse_index(GOLDEN, TABLE) == replace(PIECES, digest=blake3(GOLDEN).hexdigest())


@pytest.mark.parametrize(
    "index",
    [
        *(DELTA, FIELD, ANCHOR, EMPTY, PIECES),
        replace(DELTA, encoding="small"),
        replace(DELTA, step=0, version=1_000_000),
    ],
)
def test_an_index_comes_back(index: Index) -> None:
    data = write_index(index, TABLE)
    assert parse_index(data, TABLE) == replace(index, digest=blake3(data).hexdigest())
    assert describe(data) == "ours"


def test_what_readers_of_the_field_see() -> None:
    delta = json.loads(write_index(FIELD, TABLE))
    assert delta["metadata"] == {
        "version": "000007",
        "base_version": "000006",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    }
    assert delta["weight_map"] == FIELD.weight_map
    assert json.loads(write_index(DELTA, TABLE))["metadata"]["delta_encoding"] == "step"
    small = json.loads(write_index(replace(DELTA, encoding="small"), TABLE))
    assert (small["metadata"]["delta_encoding"], small["weightcast"]["encoding"]) == ("step", "small")
    assert json.loads(write_index(ANCHOR, TABLE))["metadata"] == {"version": "000007"}


def test_one_part_of_everything_is_null() -> None:
    facts = json.loads(write_index(DELTA, TABLE))["weightcast"]
    assert facts["parts"] is None
    facts = json.loads(write_index(replace(ANCHOR, parts=()), TABLE))["weightcast"]
    assert facts["parts"] == []


def test_unknown_members_are_ignored() -> None:
    top = json.loads(write_index(DELTA, TABLE))
    top["later"], top["weightcast"]["later"], top["metadata"]["later"] = 1, {}, "x"
    assert replace(parse_index(json.dumps(top).encode(), TABLE), digest="") == DELTA


def edited(index: Index, edit: Callable[[Any], object]) -> bytes:
    top = json.loads(write_index(index, TABLE))
    edit(top)
    return json.dumps(top).encode()


def facts(**values: object) -> Callable[[Any], object]:
    return lambda top: top["weightcast"].update(values)


def chunk(number: int, *cells: tuple[int, object]) -> Callable[[Any], object]:
    def edit(top: Any) -> None:
        for at, value in cells:
            top["weightcast"]["chunks"][number][at] = value

    return edit


BAD_EDITS: dict[str, Callable[[Any], object]] = {
    "no member": lambda top: top.pop("weightcast"),
    "no weight_map": lambda top: top.pop("weight_map"),
    "no metadata": lambda top: top.pop("metadata"),
    "weight_map names a file not listed": lambda top: top["weight_map"].update(a="other.safetensors"),
    "weight_map without record": lambda top: top["weight_map"].update(d=SHARD),
    "record without weight_map": lambda top: top["weight_map"].pop("a"),
    "metadata version": lambda top: top["metadata"].update(version="000008"),
    "metadata base": lambda top: top["metadata"].update(base_version="6"),
    "metadata no encoding": lambda top: top["metadata"].pop("delta_encoding"),
    "version": facts(version=6),
    "version text": facts(version="000007"),
    "version true": facts(version=True),
    "base ahead": facts(base_version=7),
    "base negative": facts(base_version=-1),
    "root": facts(root="2" * 63),
    "root upper": facts(root="A" * 64),
    "base root": facts(base_root=""),
    "parent": facts(parent=None),
    "epoch": facts(epoch=-1),
    "step": facts(step=1.5),
    "created": facts(created="now"),
    "run": facts(run_id=""),
    "totals": facts(totals=[1, 2, 3]),
    "totals negative": facts(totals=[1, 2, 3, -1]),
    "file path": facts(files=[["../x", 1, "ab" * 32]]),
    "file absolute": facts(files=[["/etc/passwd", 1, "ab" * 32]]),
    "file twice": facts(files=[[SHARD, 1000, "ab" * 32]] * 2),
    "file size": facts(files=[[SHARD, -1, "ab" * 32]]),
    "file size huge": facts(files=[[SHARD, 1 << 63, "ab" * 32]]),
    "file digest": facts(files=[[SHARD, 1000, "ab" * 31]]),
    "file row": facts(files=[[SHARD, 1000]]),
    "unknown tensor": lambda top: (
        top["weight_map"].update(q=SHARD),
        top["weightcast"]["tensors"].update(q=["0" * 32, 1]),
    ),
    "tensor lanes": lambda top: top["weightcast"]["tensors"].update(a=["0" * 31, 1]),
    "tensor lanes hex": lambda top: top["weightcast"]["tensors"].update(a=["g" * 32, 1]),
    "tensor lanes unicode": lambda top: top["weightcast"]["tensors"].update(a=["٣" * 32, 1]),
    "tensor changed": lambda top: top["weightcast"]["tensors"].update(a=["0" * 32, 401]),
    "tensor changed negative": lambda top: top["weightcast"]["tensors"].update(a=["0" * 32, -1]),
    "tensor row": lambda top: top["weightcast"]["tensors"].update(a=[]),
    "checksum beside fast": lambda top: top["weightcast"]["tensors"].update(a=["0" * 32, 1, "0" * 32]),
    "chunk row": lambda top: top["weightcast"]["chunks"][0].pop(),
    "chunk part": chunk(0, (0, 1)),
    "chunk dtype": chunk(0, (1, "F16")),
    "chunk number": chunk(0, (2, -1)),
    "chunk file": chunk(0, (3, 2)),
    "chunk twice": chunk(1, (1, "BF16")),
    "chunk outside": chunk(1, (4, 961)),
    "chunk overlaps": chunk(1, (4, 599)),
    "chunk empty": chunk(1, (5, 0)),
    "chunk huge": chunk(1, (5, 1 << 62)),
    "chunk changed none": chunk(0, (6, 0)),
    "chunk changed": chunk(0, (6, (4 << 20) + 1)),
    "chunk float": chunk(0, (6, 1.0)),
    "chunk sums": chunk(0, (7, "0" * 33)),
    "parts overlap": facts(parts=[[[0, 0, 128]], [[0, 64, 200]]]),
    "parts overlap whole": facts(parts=[[[0, 4]], [[0, 64, 200]]]),
    "parts whole twice": facts(parts=[[[0, 4]], [[0, 4]]]),
    "parts empty tensor twice": facts(parts=[[[2, 2]], [[2, 2]]]),
    "parts twice in one": facts(parts=[[[0, 1], [1, 1]]]),
    "parts backwards": facts(parts=[[[1, 1], [0, 0]]]),
    "parts border": facts(parts=[[[0, 0, 65], [0, 65, 200]]]),
    "parts outside tensor": facts(parts=[[[0, 0, 201]]]),
    "parts outside table": facts(parts=[[[0, 5]]]),
    "parts tensor outside table": facts(parts=[[[5, 0, 1]]]),
    "parts empty segment": facts(parts=[[[0, 64, 64]]]),
    "parts run backwards": facts(parts=[[[3, 1]]]),
    "parts row": facts(parts=[[[0]]]),
    "parts row text": facts(parts=[["all"]]),
    "parts object": facts(parts={}),
    "parts flat": facts(parts=[1]),
}


@pytest.mark.parametrize("case", BAD_EDITS)
def test_damaged_indexes_are_refused(case: str) -> None:
    data = edited(DELTA, BAD_EDITS[case])
    with pytest.raises(DamagedFile):
        parse_index(data, TABLE)


def test_many_parts_of_everything_are_refused_before_they_fill_memory() -> None:
    table = TensorTable.of([TensorSpec(f"{n:06}", "U8", (1,), 1) for n in range(2000)])
    index = replace(EMPTY, parts=(table.whole,))
    top = json.loads(write_index(index, table))
    top["weightcast"]["parts"] = [[[0, 1999]] * 100_000]
    with pytest.raises(DamagedFile, match="twice"):
        parse_index(json.dumps(top).encode(), table)
    top["weightcast"]["parts"] = [[[0, 1999]]] * 100_000
    with pytest.raises(DamagedFile, match="twice"):
        parse_index(json.dumps(top).encode(), table)


@pytest.mark.parametrize(
    "edit",
    [
        facts(format=2),
        facts(kind="fold"),
        facts(encoding="smaller"),
        lambda top: top["metadata"].update(delta_encoding="small2"),
        lambda top: top["metadata"].update(delta_encoding=["step"]),
    ],
)
def test_later_formats_are_named(edit: Callable[[Any], object]) -> None:
    with pytest.raises(UnknownFormat, match=r"2|fold|smaller|small2|step"):
        parse_index(edited(DELTA, edit), TABLE)


def test_other_components_are_refused_by_name() -> None:
    with pytest.raises(Refused, match="'draft'"):
        parse_index(edited(DELTA, facts(component="draft")), TABLE)


def test_duplicate_keys_are_refused() -> None:
    data = write_index(DELTA, TABLE).replace(b'"weight_map":{', b'"weight_map":{"b":"x",', 1)
    with pytest.raises(DamagedFile, match="duplicate key"):
        parse_index(data, TABLE)
    with pytest.raises(DamagedFile):
        describe(data)


@pytest.mark.parametrize(
    "index",
    [
        replace(ANCHOR, tensors=records()),
        replace(ANCHOR, chunks=DELTA.chunks),
        replace(ANCHOR, base_version=0),
        replace(FIELD, checksums={}),
        replace(FIELD, chunks=DELTA.chunks),
        replace(DELTA, parts=(Part(1, ()),)),
        replace(DELTA, chunks=(DELTA.chunks[0]._replace(file="other"),)),
        replace(DELTA, base_version=8),
        replace(DELTA, base_version=-1),
        replace(DELTA, root=""),
    ],
)
def test_the_writer_obeys_the_readers_rules(index: Index) -> None:
    with pytest.raises(DamagedFile):
        write_index(index, TABLE)


@given(st.data())
def test_damage_gives_an_index_or_our_error(data: st.DataObject) -> None:
    damaged = bytearray(GOLDEN)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0x20, 0x7E))
    try:
        index = parse_index(bytes(damaged), TABLE)
    except Refused:
        return
    assert write_index(index, TABLE)


segments_of = st.sets(st.integers(0, 4), max_size=5)


@given(segments_of, st.integers(0, 3), st.booleans())
def test_any_split_into_parts_comes_back(first: set[int], cut: int, reverse: bool) -> None:
    words = [spec.words for spec in TABLE]
    parts = [[Segment(n, 0, words[n]) for n in range(5) if (n in first) != other] for other in (False, True)]
    for part in parts:
        if cut and part and part[0].tensor == 0:
            part[0] = Segment(0, 0, 64 * cut)
    split = tuple(Part(n, tuple(part)) for n, part in enumerate(reversed(parts) if reverse else parts))
    index = replace(EMPTY, parts=split)
    assert parse_index(write_index(index, TABLE), TABLE).parts == split


FOREIGN = {
    "metadata": {
        "version": "000001",
        "base_version": "000000",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
        "note": "unknown keys are ignored",
    },
    "weight_map": {"model.a.weight": SHARD, "model.c.scale": SHARD},
}


def test_an_index_of_the_field() -> None:
    data = json.dumps(FOREIGN).encode()
    weight_map = {"model.a.weight": SHARD, "model.c.scale": SHARD}
    digest = blake3(data).hexdigest()
    assert parse_foreign(data) == ForeignIndex(1, 0, "xor", "xxh3-128", weight_map, digest)
    assert describe(data) == "foreign delta"


def test_a_full_version_of_the_field() -> None:
    assert describe(b'{"metadata":{"total_size":1},"weight_map":{}}') == "full"
    assert describe(b'{"weight_map":{"weightcast":"delta_encoding"}}') == "full"
    with pytest.raises(DamagedFile):
        describe(b"")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("version", "1"),
        ("version", "00000\uff11"),
        ("version", 1),
        ("base_version", "000001"),
        ("base_version", "-00001"),
        ("checksum_format", None),
        ("delta_encoding", 3),
    ],
)
def test_bad_foreign_metadata(key: str, value: object) -> None:
    with pytest.raises(DamagedFile):
        parse_foreign(json.dumps({**FOREIGN, "metadata": {**FOREIGN["metadata"], key: value}}).encode())


@pytest.mark.parametrize(
    ("key", "value"),
    [("delta_encoding", "step"), ("compression_format", "lz4"), ("checksum_format", "crc32")],
)
def test_foreign_formats_that_nobody_knows(key: str, value: str) -> None:
    with pytest.raises(UnknownFormat, match=value):
        parse_foreign(json.dumps({**FOREIGN, "metadata": {**FOREIGN["metadata"], key: value}}).encode())


@pytest.mark.parametrize(
    "weight_map", [{"a": "../x"}, {"a": "/x"}, {"a": ""}, {"a": 1}, {"": "x"}, {"a\n": "x"}, []]
)
def test_bad_foreign_weight_maps(weight_map: object) -> None:
    with pytest.raises(DamagedFile):
        parse_foreign(json.dumps({**FOREIGN, "weight_map": weight_map}).encode())


MANY = TensorTable.of([TensorSpec(f'layer.{n}.\u00e4"}}', "BF16", (64,), 128) for n in range(20_000)])


def many(kept: int) -> Index:
    numbers = np.flatnonzero(np.arange(len(MANY)) % kept == 0)
    lanes = np.random.default_rng(4).integers(0, 1 << 64, (len(numbers), 2), np.uint64)
    found = TensorRecords.numbered(MANY, numbers, lanes, numbers % 65, np.arange(len(numbers)) % 2)
    files = (FileRecord(SHARD, 9, "ab" * 32), FileRecord(f"2{SHARD}", 9, "ab" * 32))
    return replace(DELTA, tensors=found, files=files, chunks=(), parts=(MANY.whole,))


@pytest.mark.parametrize("kept", [1, 2])
def test_rows_of_many_tensors_are_read_alike_however_they_are_written(kept: int) -> None:
    data = write_index(many(kept), MANY)
    assert len(data) > 1 << 20
    top = json.loads(data)
    other = json.dumps(top, indent=1).encode()
    turned = {**top, "weight_map": dict(reversed(top["weight_map"].items()))}
    for text in (data, other, json.dumps(turned, separators=(",", ":")).encode()):
        found = parse_index(text, MANY)
        assert found.weight_map == many(kept).weight_map
        assert dict(found.tensors) == dict(many(kept).tensors)
    assert write_index(parse_index(other, MANY), MANY) == data


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'",3],', b'",03],'),
        (b'",3],', b'",-3],'),
        (b'",3],', b'",3,],'),
        (b'",3],', b'",129],'),
        (b'["', b'["A'),
        (b'"layer.0', b'"layer.x'),
        (b'":{"layer.0', b'":{"layer.1'),
        (b',"weight_map":{', b',"weight_map":{},"weight_map":{'),
        (b'"metadata":{', b'"metadata":{"a":{"b":"c","weight_map":{}},'),
        (SHARD.encode() + b'",', b'x",'),
    ],
)
def test_damaged_rows_of_many_tensors(old: bytes, new: bytes) -> None:
    data = write_index(many(1), MANY)
    assert old in data
    with pytest.raises(DamagedFile):
        parse_index(data.replace(old, new, 1), MANY)

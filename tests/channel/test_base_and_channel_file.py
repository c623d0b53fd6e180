from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from weightcast.shared.base.elements import TensorSpec, TensorTable
from weightcast.shared.base.errors import DamagedFile, Refused, UnknownFormat
from weightcast.shared.channel.index import FileRecord
from weightcast.shared.channel.run_files import (
    Base,
    ChannelFile,
    parse_base,
    parse_channel_file,
    write_base,
    write_channel_file,
)
from weightcast.shared.digest.checksums import root

TABLE = TensorTable.of(
    [
        TensorSpec("model.b", "BF16", (2, 3), 12),
        TensorSpec("model.a", "F32", (), 4),
        TensorSpec("ä", "F8_E4M3", (0,), 0),
        TensorSpec("x", "F4_UNKNOWN", (7,), 4),
    ]
)
LANES = np.array([(1, 2), (3, 4), (5, 6), (0, 0)], np.uint64)
NOTHING = np.zeros((0, 2), np.uint64)
BASE = Base("run", TABLE, LANES, root(TABLE, LANES), (FileRecord("config.json", 2, "ab" * 32),))


def edited(edit: Callable[[Any], object]) -> bytes:
    members = json.loads(write_base(BASE))
    edit(members)
    return json.dumps(members).encode()


def test_a_base_comes_back() -> None:
    data = write_base(BASE)
    found = parse_base(data)
    assert (found.run_id, found.table, found.root, found.files) == ("run", TABLE, BASE.root, BASE.files)
    assert np.array_equal(found.lanes, LANES) and found.digest == blake3(data).hexdigest()
    empty = Base("run", TensorTable(()), NOTHING, root(TensorTable(()), NOTHING), ())
    assert parse_base(write_base(empty)).table == empty.table


def test_golden_base() -> None:
    table = TensorTable.of([TensorSpec("a", "BF16", (1, 2), 4)])
    base = Base(
        "run", table, np.array([(1, 2)], np.uint64), "r" * 64, (FileRecord("config.json", 2, "ab" * 32),)
    )
    assert (
        write_base(base)
        == (
            f'{{"format":1,"run_id":"run","component":"main","root":"{"r" * 64}",'
            f'"files":[["config.json",2,"{"ab" * 32}"]],'
            '"tensors":[["a","BF16",[1,2],4,"00000000000000010000000000000002"]]}'
        ).encode()
    )


BAD_EDITS: dict[str, Callable[[Any], object]] = {
    "lanes of another tensor": lambda base: base["tensors"][0].__setitem__(4, "0" * 32),
    "shape": lambda base: base["tensors"][1].__setitem__(2, [3, 2]),
    "name": lambda base: base["tensors"][1].__setitem__(0, "model.c"),
    "bytes": lambda base: base["tensors"][1].__setitem__(3, 13),
    "dtype": lambda base: base["tensors"][1].__setitem__(1, 5),
    "negative": lambda base: base["tensors"][1].__setitem__(2, [-2, -3]),
    "name with a line": lambda base: base["tensors"][1].__setitem__(0, "a\nb"),
    "order": lambda base: base["tensors"].reverse(),
    "twice": lambda base: base["tensors"].insert(0, base["tensors"][0]),
    "row": lambda base: base["tensors"].append([]),
    "left out": lambda base: base["tensors"].pop(),
    "root": lambda base: base.update(root="0" * 64),
    "file": lambda base: base["files"].append(["../x", 1, "ab" * 32]),
    "run": lambda base: base.pop("run_id"),
}


@pytest.mark.parametrize("case", BAD_EDITS)
def test_damaged_bases_are_refused(case: str) -> None:
    with pytest.raises(DamagedFile):
        parse_base(edited(BAD_EDITS[case]))


@pytest.mark.parametrize("names", [("a", "a"), ("b", "a")])
def test_a_right_root_does_not_excuse_a_wrong_order(names: tuple[str, str]) -> None:
    table = TensorTable(tuple(TensorSpec(name, "U8", (1,), 1) for name in names))
    lanes = np.array([(1, 2), (1, 2)], np.uint64)
    with pytest.raises(DamagedFile, match="sorted"):
        parse_base(write_base(Base("run", table, lanes, root(table, lanes), ())))


def test_bases_of_later_releases_are_named() -> None:
    with pytest.raises(UnknownFormat, match="format 2"):
        parse_base(edited(lambda base: base.update(format=2)))
    with pytest.raises(Refused, match="'lora'"):
        parse_base(edited(lambda base: base.update(component="lora")))


CHANNEL = ChannelFile("run", 1.5, ("*.rotary_emb.*",), {"lm_head.weight": "model.embed_tokens.weight"}, 8)


def test_channel_file_comes_back() -> None:
    assert parse_channel_file(write_channel_file(CHANNEL)) == CHANNEL
    assert parse_channel_file(write_channel_file(ChannelFile("r", 0))) == ChannelFile("r", 0)


def test_golden_channel_file() -> None:
    assert write_channel_file(CHANNEL) == (
        b'{"format":1,"run_id":"run","created":1.5,"frozen":["*.rotary_emb.*"],'
        b'"aliases":{"lm_head.weight":"model.embed_tokens.weight"},"horizon":8}'
    )


@pytest.mark.parametrize(
    "change",
    [
        {"run_id": ""},
        {"run_id": "a\n"},
        {"created": "x"},
        {"frozen": [1]},
        {"frozen": None},
        {"aliases": {"a": "b", "b": "c"}},
        {"aliases": {"a": "a"}},
        {"aliases": {"a": 1}},
        {"horizon": -1},
        {"format": "1"},
    ],
)
def test_damaged_channel_files_are_refused(change: dict[str, object]) -> None:
    members = json.loads(write_channel_file(CHANNEL)) | change
    with pytest.raises(DamagedFile):
        parse_channel_file(json.dumps(members).encode())
    with pytest.raises(UnknownFormat):
        parse_channel_file(json.dumps({**members, "format": 9}).encode())

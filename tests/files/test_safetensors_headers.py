from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from weightcast.shared.base.elements import DTYPES, TensorSpec
from weightcast.shared.base.errors import DamagedFile
from weightcast.shared.files.safetensors import Entry, pack_header, parse_header, read_header_of, tensor_spec

TENSORS = {
    "w": torch.arange(15, dtype=torch.float32).to(torch.bfloat16).reshape(3, 5),
    "scalar": torch.tensor(1.5),
    "empty": torch.zeros(0, 4, dtype=torch.float16),
    "fp8": torch.arange(3, dtype=torch.float32).to(torch.float8_e4m3fn),
    "long": torch.tensor([1 << 40]),
    "mask": torch.tensor([True, False, True]),
}


def file_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_reads_what_the_library_writes() -> None:
    data = save(TENSORS, {"format": "pt"})
    header = parse_header(data, len(data))
    assert header.metadata == {"format": "pt"}
    assert tensor_spec(header.entries["w"]) == TensorSpec("w", "BF16", (3, 5), 30)
    assert tensor_spec(header.entries["scalar"]) == TensorSpec("scalar", "F32", (), 4)
    assert tensor_spec(header.entries["empty"]) == TensorSpec("empty", "F16", (0, 4), 0)
    place = header.entries["long"]
    at = header.data_start + place.begin
    assert data[at : at + 8] == (1 << 40).to_bytes(8, "little")


@pytest.mark.parametrize("reserve", [0, 1000, 4097])
def test_the_library_reads_what_we_write(reserve: int) -> None:
    data = save(TENSORS)
    header = parse_header(data, len(data))
    packed = pack_header(header.entries.values(), {"origin": "test"}, reserve)
    assert len(packed) % 8 == 0 and len(packed) >= reserve
    read = load(packed + data[header.data_start :])
    assert read.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert torch.equal(
            read[name].view(torch.uint8) if value.dim() else read[name],
            value.view(torch.uint8) if value.dim() else value,
        )


def test_golden_header() -> None:
    packed = pack_header([Entry("a", "BF16", (1, 2), 0, 4), Entry("b", "U8", (), 4, 5)], {"k": "v"})
    text = (
        b'{"__metadata__":{"k":"v"},"a":{"dtype":"BF16","shape":[1,2],"data_offsets":[0,4]},'
        b'"b":{"dtype":"U8","shape":[],"data_offsets":[4,5]}}'
    )
    assert packed == (136).to_bytes(8, "little") + text.ljust(136)


def test_links_are_refused_unless_followed(tmp_path: Path) -> None:
    path, link = tmp_path / "model.safetensors", tmp_path / "link"
    path.write_bytes(save(TENSORS))
    link.symlink_to(path)
    with pytest.raises(DamagedFile, match="regular file"):
        read_header_of(link)
    assert read_header_of(link, follow_links=True) == read_header_of(path)


@pytest.mark.parametrize("cut", [0, 7, 8, 20, -1])
def test_a_cut_file_is_refused_with_its_name(tmp_path: Path, cut: int) -> None:
    data = save(TENSORS)
    path = tmp_path / "short.safetensors"
    path.write_bytes(data[:cut])
    with pytest.raises(DamagedFile, match=r"short\.safetensors"):
        read_header_of(path)


BAD = {
    "no object": file_of(b"[]"),
    "not JSON": file_of(b"{,}"),
    "not UTF-8": file_of(b'{"\xff":1}'),
    "leading space": file_of(b' {"a":1}'),
    "duplicate": file_of(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}'),
    "unknown member": file_of({"a": tensor("U8", [1], 0, 1) | {"crc": 1}}, b"x"),
    "missing member": file_of({"a": {"dtype": "U8", "shape": [1]}}, b"x"),
    "huge header": (1 << 40).to_bytes(8, "little") + b"{}",
    "header above 100 MB": (100_000_001).to_bytes(8, "little") + b"{}",
    "empty header": (0).to_bytes(8, "little"),
    "outside": file_of({"a": tensor("U8", [2], 0, 2)}, b"x"),
    "trailing": file_of({"a": tensor("U8", [1], 0, 1)}, b"xy"),
    "data without tensors": file_of({}, b"x"),
    "hole": file_of({"a": tensor("U8", [1], 0, 1), "b": tensor("U8", [1], 2, 3)}, b"xyz"),
    "hole at start": file_of({"a": tensor("U8", [1], 1, 2)}, b"xy"),
    "overlap": file_of({"a": tensor("U8", [2], 0, 2), "b": tensor("U8", [2], 1, 3)}, b"xyz"),
    "same place": file_of({"a": tensor("U8", [1], 0, 1), "b": tensor("U8", [1], 0, 1)}, b"x"),
    "wrong size": file_of({"a": tensor("BF16", [3], 0, 5)}, b"x" * 5),
    "negative": file_of({"a": tensor("U8", [-1], 0, 1)}, b"x"),
    "negative offset": file_of({"a": tensor("U8", [1], -1, 0)}),
    "backwards": file_of({"a": tensor("U8", [1], 1, 0)}, b"x"),
    "float": file_of({"a": tensor("U8", [1], 0, 1) | {"shape": [1.0]}}, b"x"),
    "true": file_of({"a": tensor("U8", [1], 0, 1) | {"shape": [True]}}, b"x"),
    "huge dimension": file_of({"a": tensor("U8", [1 << 63, 0], 0, 0)}),
    "rank": file_of({"a": tensor("U8", [1] * 65, 0, 1)}, b"x"),
    "three offsets": file_of({"a": tensor("U8", [1], 0, 1) | {"data_offsets": [0, 1, 1]}}, b"x"),
    "dtype": file_of({"a": tensor("", [1], 0, 1)}, b"x"),
    "dtype list": file_of({"a": tensor("U8", [1], 0, 1) | {"dtype": ["U8"]}}, b"x"),
    "metadata": file_of({"__metadata__": {"a": 1}}),
    "metadata list": file_of({"__metadata__": []}),
    "entry": file_of({"a": []}),
    "no name": file_of({"": tensor("U8", [0], 0, 0)}),
    "name": file_of({"a\n": tensor("U8", [0], 0, 0)}),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_headers_are_refused(case: str) -> None:
    with pytest.raises(DamagedFile):
        parse_header(BAD[case], len(BAD[case]))


ENTRY = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
TOLERATED = {
    "null metadata": (file_of({"__metadata__": None, "a": tensor("U8", [1], 0, 1)}, b"x"), "is null"),
    "unknown member": (file_of({"a": tensor("U8", [1], 0, 1) | {"crc": [1]}}, b"x"), "members: crc"),
    "the same entry twice": (file_of(f'{{"a":{ENTRY},"a":{ENTRY}}}'.encode(), b"x"), "'a' is given twice"),
    "metadata twice": (file_of(f'{{"__metadata__":{{"k":"1","k":"2"}},"a":{ENTRY}}}'.encode(), b"x"), "'k'"),
    "leading space": (file_of(f' \n{{"a":{ENTRY}}}'.encode(), b"x"), ""),
    "odd length": (file_of(f'{{"a":{ENTRY}}} \n'.encode(), b"x"), ""),
}


@pytest.mark.parametrize("case", TOLERATED)
def test_what_the_library_takes_is_taken_of_others_with_a_note(case: str) -> None:
    data, note = TOLERATED[case]
    assert load(data).keys() == {"a"}
    header = parse_header(data, len(data), tolerant=True)
    assert header.entries == {"a": Entry("a", "U8", (1,), 0, 1)}
    assert [note in each for each in header.notes] == ([True] if note else [])


@pytest.mark.parametrize("case", sorted(BAD.keys() - {"leading space", "unknown member"}))
def test_what_the_library_refuses_is_refused_of_others_too(case: str) -> None:
    with pytest.raises(DamagedFile):
        parse_header(BAD[case], len(BAD[case]), tolerant=True)


def test_unknown_dtypes_are_bytes() -> None:
    data = file_of({"a": tensor("F4", [7], 0, 4)}, b"wxyz")
    spec = tensor_spec(parse_header(data, len(data)).entries["a"])
    assert (spec.nbytes, spec.words, spec.kind.width) == (4, 4, 1)


@st.composite
def entry_lists(draw: st.DrawFn) -> list[Entry]:
    names = draw(st.lists(st.text('abcä.😀"\\', min_size=1, max_size=6), unique=True, max_size=6))
    entries, end = [], 0
    for name in names:
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        nbytes = DTYPES[dtype][0]
        for dimension in shape:
            nbytes *= dimension
        entries.append(Entry(name, dtype, shape, end, end + nbytes))
        end += nbytes
    return entries


@given(entry_lists(), st.dictionaries(st.text(), st.text(), max_size=3), st.integers(0, 600))
def test_headers_come_back(entries: list[Entry], metadata: dict[str, str], reserve: int) -> None:
    packed = pack_header(entries, metadata, reserve)
    header = parse_header(packed, len(packed) + (entries[-1].end if entries else 0))
    assert list(header.entries.values()) == entries
    assert header.metadata == metadata
    assert header.data_start == len(packed)


@settings(max_examples=300)
@given(st.data())
def test_damage_gives_our_error_or_a_consistent_header(data: st.DataObject) -> None:
    packed = bytearray(
        pack_header([Entry("a", "BF16", (2, 2), 0, 8), Entry("b", "F32", (), 8, 12)], {"k": "v"})
    )
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        header = parse_header(bytes(packed), len(packed) + 12)
    except DamagedFile:
        return
    assert sum(entry.nbytes for entry in header.entries.values()) == 12 + len(packed) - header.data_start

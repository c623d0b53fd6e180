"""The examples in docs/FORMAT.md are what the code does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy_kernels import finalise

import weightcast.shared
from weightcast.shared.base.elements import DTYPES, TensorSpec, TensorTable, grid
from weightcast.shared.channel.components import Component, write_registry
from weightcast.shared.codec.changes import compare
from weightcast.shared.codec.container import encode_chunk
from weightcast.shared.digest.checksums import hash_bytes, root

DOCUMENT = (Path(weightcast.shared.__path__[0]).resolve().parent / "docs" / "FORMAT.md").read_text()


def test_the_example_of_lanes_and_root() -> None:
    table = TensorTable.of([TensorSpec("model.a", "BF16", (5,), 10), TensorSpec("model.b", "F32", (), 4)])
    data = ["803f80bf0000c07f0080", "00002040"]
    lanes = [hash_bytes(np.frombuffer(bytes.fromhex(text), np.uint8)) for text in data]
    for text, spec, found in zip(data, table, lanes, strict=True):
        assert f"| `{text}` | `{found.hex()}` | `{finalise(found, spec.nbytes).hex()}` |" in DOCUMENT
    assert f"Root: `{root(table, lanes)}`." in DOCUMENT


def test_the_example_of_a_registry() -> None:
    listed = (Component("adapter/math", "active", 1700000000.5),)
    assert f"```\n{write_registry('run-1', listed).decode()}\n```" in DOCUMENT


def test_the_example_of_a_blob() -> None:
    table = TensorTable.of([TensorSpec("w", "BF16", (64,), 128)])
    (chunk,) = grid(table, table.whole)
    old = np.full(64, 0x3F80, "<u2")
    new = old.copy()
    new[[3, 10, 40]] = 0x3F81, 0x3F7F, 0x3F83
    example = DOCUMENT.split("word 40 three up.\n```\n")[1].split("```")[0]
    stated = "".join(line.split("    ")[0] for line in example.splitlines())
    assert encode_chunk(chunk, old, new, compare(old, new)).hex() == stated.replace(" ", "")


def test_every_dtype_is_listed() -> None:
    section = DOCUMENT.split("\n## Words\n")[1].split("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    listed = {name.strip("`"): (row[2].strip(), row[3].strip()) for row in rows for name in row[1].split()}
    assert listed.keys() == DTYPES.keys()
    for name, (size, kind) in DTYPES.items():
        assert listed[name] == (str(size), f"{kind.width} byte{'s' * (kind.width > 1)}")

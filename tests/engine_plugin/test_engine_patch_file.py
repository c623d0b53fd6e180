"""The patch file: golden bytes, and every way in which one can be wrong."""

from __future__ import annotations

import copy
import hashlib
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from patch_writer import header_and_payload, lanes, name_of, packed, root, write_patch
from weightcast_engine.update.patch_file import parse_patch, read_patch
from weightcast_engine.update.refusals import BadPatch

HERE = Path(__file__).resolve().parent
GOLDEN = HERE / "7-00c0ffee.patch"
PLUGIN = HERE.parents[1] / "subscriber" / "engine_plugin"


def models() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What the golden patch leads from and to."""
    base = {
        "a.weight": torch.arange(24, dtype=torch.float32).to(torch.bfloat16).reshape(3, 8),
        "b": torch.tensor(2.5),
        "c.fp8": torch.arange(11, dtype=torch.float32).to(torch.float8_e4m3fn),
        "d.ids": torch.arange(4),
        "same": torch.ones(3),
    }
    target = {name: tensor.clone() for name, tensor in base.items()}
    target["a.weight"][0, 1], target["a.weight"][2, 7] = -1.5, 0.25
    target["b"] = torch.tensor(-2.5)
    target["c.fp8"] = (torch.arange(11) * 2.0).to(torch.float8_e4m3fn)
    target["d.ids"][3] = -9
    return base, target


def test_the_golden_patch_is_read_for_ever() -> None:
    base, target = models()
    patch = read_patch(HERE, GOLDEN.name)
    assert (patch.base.version, patch.base.root, patch.target.version) == (5, root(5), 7)
    assert patch.count == sum(len(change) for change in patch.changes) == 14
    for change in patch.changes:
        new = base[change.name].clone().view(-1)
        new[torch.from_numpy(change.index.astype("int64"))] = change.words.view(new.dtype)
        assert torch.equal(new.view(torch.uint8), target[change.name].view(-1).view(torch.uint8)), change.name
        assert (change.old.hex(), change.new.hex()) == (lanes(base[change.name]), lanes(target[change.name]))


def test_the_tests_writer_still_makes_the_golden_patch() -> None:
    assert packed(*header_and_payload(*models(), 7, step=2)) == GOLDEN.read_bytes()


def good() -> tuple[dict[str, Any], bytes]:
    header, payload = header_and_payload(*models(), 7, step=2)
    return copy.deepcopy(header), payload


def refused(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_patch("x", bytearray(data))


def setting(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        for key in path[:-1]:
            header = header[key]
        header[path[-1]] = to

    return change


WRONG = {
    "format": (setting("format", to=2), "format 2 is not read"),
    "format as a float": (setting("format", to=1.0), "not read"),
    "more members": (setting("more", to=1), "members other"),
    "fewer": (lambda header: header.pop("run_id"), "members other"),
    "a negative version": (setting("base", "version", to=-1), "not an integer"),
    "a true version": (setting("base", "version", to=True), "not an integer"),
    "a root in capitals": (setting("target", "root", to="A" * 64), "hex digits"),
    "tensors as an object": (setting("tensors", to={}), "not an array"),
    "a tensor twice": (setting("tensors", 1, "name", to="a.weight"), "twice"),
    "no name": (setting("tensors", 0, "name", to=""), "no name"),
    "a name with a line": (setting("tensors", 0, "name", to="a\n"), "printable"),
    "an unknown dtype": (setting("tensors", 0, "dtype", to="F4"), "can't be patched"),
    "a dtype of another width": (setting("tensors", 0, "dtype", to="F64"), "padding|elsewhere|do not fit"),
    "a smaller shape": (setting("tensors", 0, "shape", to=[3, 7]), "beyond its 21"),
    "a negative length": (setting("tensors", 0, "shape", to=[-3, -8]), "not an integer"),
    "no changes": (setting("tensors", 0, "changes", to=0), "no changes"),
    "more changes than elements": (setting("tensors", 0, "changes", to=25), "not an integer from 0 to 24"),
    "many changes": (setting("tensors", 3, "changes", to=4), "do not fit|beyond|ascend|padding"),
    "an index of 8 bytes": (setting("tensors", 0, "index_width", to=8), "other than 4"),
    "a gap": (setting("tensors", 1, "offset", to=32), "begin elsewhere"),
    "a huge offset": (setting("tensors", 1, "offset", to=1 << 63), "not an integer"),
    "short lanes": (setting("tensors", 0, "lanes_old", to="0" * 31), "hex digits"),
    "a tensor less": (lambda header: header["tensors"].pop(), "belong to no tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_header_that_is_wrong_anywhere_is_refused(case: str) -> None:
    change, reason = WRONG[case]
    header, payload = good()
    change(header)
    refused(packed(header, payload), reason)


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (0, 100, "ascend|beyond"),
        (0, 24, "ascend|beyond"),
        (0, 23, "ascend"),
        (8, 0x7FC0, "finite"),
        (8, 0x7F80, "finite"),
    ],
)
def test_indices_and_values_are_checked(place: int, value: int, reason: str) -> None:
    header, payload = good()
    width = 4 if place == 0 else 2
    data = payload[:place] + value.to_bytes(width, "little") + payload[place + width :]
    refused(packed(header, data), reason)


def test_padding_must_be_zero() -> None:
    header, payload = good()
    refused(packed(header, payload[:12] + b"\1" + payload[13:]), "padding")
    refused(packed(header, payload + bytes(8)), "belong to no tensor")


def sealed(body: bytes) -> bytes:
    return body + hashlib.sha256(body).digest()


def test_frames_that_do_not_hold_are_refused() -> None:
    data = GOLDEN.read_bytes()
    refused(b"", "not an engine patch")
    refused(data[:-1], "digest")
    refused(b"wcpatch2" + data[8:], "not an engine patch")
    for length in (1 << 63, 1 << 27, len(data)):
        refused(sealed(b"wcpatch1" + struct.pack("<Q", length) + data[16:-32]), "does not fit")
    twice = b'{"format":1,"format":1}'
    refused(sealed((b"wcpatch1" + struct.pack("<Q", len(twice)) + twice).ljust(64, b"\0")), "duplicate key")
    refused(sealed((b"wcpatch1" + struct.pack("<Q", 2) + b"[]").ljust(64, b"\0")), "not a JSON object")


@given(st.integers(0, len(GOLDEN.read_bytes()) - 1), st.integers(1, 255))
def test_a_changed_byte_is_found(place: int, flip: int) -> None:
    data = bytearray(GOLDEN.read_bytes())
    data[place] ^= flip
    refused(bytes(data), "digest|not an engine patch")


@given(st.integers(0, len(GOLDEN.read_bytes()) - 33), st.binary(min_size=1, max_size=8))
def test_sealed_nonsense_is_refused_or_a_patch(place: int, noise: bytes) -> None:
    body = bytearray(GOLDEN.read_bytes()[:-32])
    body[place : place + len(noise)] = noise
    try:
        patch = parse_patch("x", bytearray(sealed(bytes(body))))
    except ValueError:
        return
    for change in patch.changes:
        assert 0 < len(change) <= change.form.elements and int(change.index[-1]) < change.form.elements


@pytest.mark.parametrize(
    "name", ["../7-00c0ffee.patch", "7-00c0ffee.patch\n", "x.patch", "7-00C0FFEE.patch", "", "/etc/passwd"]
)
def test_a_name_is_a_plain_patch_name(name: str) -> None:
    with pytest.raises(BadPatch, match="not the name of a patch"):
        read_patch(HERE, name)


def test_only_regular_files_of_a_bounded_size_are_opened(tmp_path: Path) -> None:
    name = write_patch(tmp_path, *models(), 1)
    assert read_patch(tmp_path, name).target.version == 1
    with pytest.raises(BadPatch, match="WEIGHTCAST_PATCH_LIMIT"):
        read_patch(tmp_path, name, limit=100)
    (tmp_path / name_of(2)).symlink_to(tmp_path / name)
    os.mkfifo(tmp_path / name_of(3))
    (tmp_path / name_of(4)).mkdir()
    for version in (2, 3, 4, 5):
        with pytest.raises(BadPatch, match=re.escape(name_of(version))):
            read_patch(tmp_path, name_of(version))
    with pytest.raises(BadPatch):
        read_patch(tmp_path / "none", name)


def test_the_plugin_needs_torch_and_numpy_alone() -> None:
    """Nothing of the rest of weightcast, and no web library: engines bring their own of all else."""
    code = (
        "import sys; import weightcast_engine.update.front, weightcast_engine.update.routes\n"
        "tops = {name.partition('.')[0] for name in sys.modules}\n"
        "sys.exit(' '.join(tops & {'weightcast', 'fastapi', 'vllm', 'blake3'}) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(PLUGIN)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    sources = [path.read_text() for path in PLUGIN.rglob("*.py")]
    assert not [
        line
        for text in sources
        for line in text.splitlines()
        if re.match(r"\s*(from|import) weightcast\b(?!_)", line)
    ]

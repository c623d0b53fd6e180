from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from weightcast.shared.base.errors import DamagedFile, Refused
from weightcast.shared.checkpoint.update.sources import open_base
from weightcast.shared.files.hf_checkpoint import changed_since, open_checkpoint, side_files

A, B = torch.arange(6, dtype=torch.bfloat16), torch.tensor(2.5)
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def single(directory: Path, name: str = "model.safetensors") -> Path:
    directory.mkdir(exist_ok=True)
    save_file({"b": B, "a": A}, directory / name)
    (directory / "config.json").write_text("{}")
    return directory


def sharded(directory: Path, weight_map: Mapping[str, str] | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    save_file({"z": A}, directory / SHARDS[0])
    save_file({"b": B, "B": A}, directory / SHARDS[1])
    written = {"z": SHARDS[0], "b": SHARDS[1], "B": SHARDS[1]} if weight_map is None else weight_map
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 28}, "weight_map": written}))
    return directory


def test_a_single_file(tmp_path: Path) -> None:
    single(tmp_path)
    for name in ("tokenizer.model", "chat_template.jinja", "modeling.py", "README.md"):
        (tmp_path / name).write_text("x")
    for name in ("pytorch_model.bin", "consolidated.safetensors", "x.gguf", ".gitattributes"):
        (tmp_path / name).write_text("x")
    (tmp_path / ".weightcast").mkdir()
    (tmp_path / "onnx").mkdir()
    checkpoint = open_checkpoint(tmp_path, follow_links=False)
    assert [spec.name for spec in checkpoint.table] == ["a", "b"]
    assert checkpoint.weight_files == (tmp_path / "model.safetensors",)
    assert checkpoint.index_file is None
    others = ["README.md", "chat_template.jinja", "config.json", "modeling.py", "tokenizer.model"]
    assert [path.name for path in checkpoint.other_files] == others


def test_places_are_where_the_bytes_are(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(sharded(tmp_path), follow_links=False)
    assert [spec.name for spec in checkpoint.table] == ["B", "b", "z"]
    expected = [
        A.view(torch.uint8).numpy().tobytes(),
        B.numpy().tobytes(),
        A.view(torch.uint8).numpy().tobytes(),
    ]
    for place, spec, data in zip(checkpoint.places, checkpoint.table, expected, strict=True):
        assert place.nbytes == spec.nbytes == len(data)
        assert place.file.read_bytes()[place.offset : place.offset + place.nbytes] == data
    assert [path.name for path in checkpoint.weight_files] == list(SHARDS)
    assert checkpoint.index_file == tmp_path / INDEX


def test_the_only_safetensors_file_may_have_any_name(tmp_path: Path) -> None:
    single(tmp_path, "policy.safetensors")
    assert open_checkpoint(tmp_path, follow_links=False).weight_files == (tmp_path / "policy.safetensors",)


def test_an_index_may_name_a_single_file(tmp_path: Path) -> None:
    single(tmp_path)
    names = {"a": "model.safetensors", "b": "model.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    assert len(open_checkpoint(tmp_path, follow_links=False).table) == 2


def test_a_hub_cache_snapshot_of_links(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots"
    sharded(blobs)
    (blobs / "config.json").write_text("{}")
    snapshot.mkdir()
    for number, blob in enumerate(sorted(blobs.iterdir())):
        stored = blob.rename(blobs / f"{number:040x}")
        (snapshot / blob.name).symlink_to(f"../blobs/{stored.name}")
    checkpoint = open_checkpoint(snapshot, follow_links=True)
    assert [path.name for path in checkpoint.weight_files] == list(SHARDS)
    assert [path.name for path in checkpoint.other_files] == ["config.json"]
    assert checkpoint.seen[SHARDS[0]].size == (snapshot / SHARDS[0]).stat().st_size
    with pytest.raises(DamagedFile, match="symbolic link"):
        open_checkpoint(snapshot, follow_links=False)
    (blobs / f"{0:040x}").unlink()
    with pytest.raises(DamagedFile, match="link to nothing"):
        open_checkpoint(snapshot, follow_links=True)


def test_a_rewritten_checkpoint_has_changed(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(single(tmp_path), follow_links=False)
    assert not changed_since(checkpoint)
    save_file({"b": B, "a": A}, tmp_path / "new")
    (tmp_path / "new").rename(tmp_path / "model.safetensors")
    assert changed_since(checkpoint)


@pytest.mark.parametrize(
    ("weight_map", "complaint"),
    [
        ({"z": SHARDS[1], "b": SHARDS[1], "B": SHARDS[1]}, f"{SHARDS[0]} is not named"),
        ({"z": SHARDS[0], "b": SHARDS[1], "B": "model-3.safetensors"}, "model-3.safetensors is missing"),
        ({"z": "../model.safetensors"}, "not a plain file name"),
        ({}, "names no file"),
    ],
)
def test_index_and_shards_must_agree(tmp_path: Path, weight_map: Mapping[str, str], complaint: str) -> None:
    with pytest.raises(DamagedFile, match=complaint):
        open_checkpoint(sharded(tmp_path, weight_map), follow_links=False)


WHOLE = {"z": SHARDS[0], "b": SHARDS[1], "B": SHARDS[1]}
INDEXES = {
    "metadata null": ({"metadata": None, "weight_map": WHOLE}, "metadata is null"),
    "metadata a list": ({"metadata": [], "weight_map": WHOLE}, "metadata is []"),
    "no metadata": ({"weight_map": WHOLE}, ""),
    "total_size a text": ({"metadata": {"total_size": "28"}, "weight_map": WHOLE}, ""),
    "total_size not a number": ({"metadata": {"total_size": float("nan")}, "weight_map": WHOLE}, ""),
    "total_size wrong": ({"metadata": {"total_size": 1}, "weight_map": WHOLE}, ""),
    "unlisted tensor": ({"weight_map": {"z": SHARDS[0], "b": SHARDS[1]}}, "a file holds: B"),
    "moved tensor": (
        {"weight_map": {**WHOLE, "z": SHARDS[1], "B": SHARDS[0]}},
        "another file for tensors",
    ),
    "absent tensor": (
        {"weight_map": {**WHOLE, "lm_head.weight": SHARDS[1]}},
        "no file holds: lm_head",
    ),
}


@pytest.mark.parametrize("case", INDEXES)
def test_an_index_is_read_as_engines_read_it(tmp_path: Path, case: str) -> None:
    written, note = INDEXES[case]
    (sharded(tmp_path) / INDEX).write_text(json.dumps(written) + "\n")
    for follow_links in (False, True):
        checkpoint = open_checkpoint(tmp_path, follow_links=follow_links)
        assert [spec.name for spec in checkpoint.table] == ["B", "b", "z"]
        assert [note in each for each in checkpoint.notes] == ([True] if note else [])


def test_a_shard_that_the_index_does_not_name_is_ignored_where_engines_ignore_it(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"z": A}, tmp_path / "model-00003-of-00003.safetensors")
    checkpoint = open_checkpoint(tmp_path, follow_links=True)
    assert [path.name for path in checkpoint.weight_files] == list(SHARDS) and len(checkpoint.table) == 3
    assert side_files(checkpoint).files == {} and "model-00003-of-00003" in checkpoint.notes[0]


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"z": A, "b": B}, tmp_path / SHARDS[0])
    with pytest.raises(DamagedFile, match=f"{SHARDS[0]} and {SHARDS[1]} both hold 'b'"):
        open_checkpoint(tmp_path, follow_links=False)


def foreign(start: bytes) -> bytes:
    return start + bytes(600)


TAR = bytes(257) + b"ustar" + bytes(300)
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4976698672\n"
FOREIGN = {
    "LFS": (LFS, "is a Git LFS pointer", "git lfs pull"),
    "page": (b"\n<!DOCTYPE html><html>" + b"x" * 100, "HTML or XML page", "download it again"),
    "zip": (foreign(b"PK\x03\x04"), "a zip archive, as torch.save writes", "save_pretrained"),
    "pickle": (foreign(b"\x80\x02}q"), "torch or pickle", "save_pretrained"),
    "GGUF": (foreign(b"GGUF\x03"), "a GGUF file", "safetensors checkpoint"),
    "gzip": (foreign(b"\x1f\x8b\x08"), "compressed", "decompress"),
    "tar": (TAR, "tar archive", "unpack"),
    "empty": (b"", "is empty", "again"),
    "zeros": (bytes(4096), "begins with zeros", "again"),
    "JSON": (b'{"error": "Repository not found"}', "not a safetensors file: text", "access token"),
    "git-annex": (b"/annex/objects/MD5E-s42--00.safetensors\n", "a git-annex pointer", "git annex get"),
    "text": (b"Invalid username or password.", "'Invalid username or password.'", "access token"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_other_files_under_a_shards_name_are_named_for_what_they_are(tmp_path: Path, case: str) -> None:
    data, message, remedy = FOREIGN[case]
    (single(tmp_path) / "model.safetensors").write_bytes(data)
    with pytest.raises(DamagedFile, match=message) as refused:
        open_checkpoint(tmp_path, follow_links=True)
    assert remedy in refused.value.remedy and "model.safetensors" in refused.value.message


def test_an_index_that_is_a_pointer_is_named_for_it(tmp_path: Path) -> None:
    (sharded(tmp_path) / INDEX).write_bytes(LFS)
    with pytest.raises(DamagedFile, match=rf"{INDEX} is a Git LFS pointer"):
        open_checkpoint(tmp_path, follow_links=True)


def test_too_long_and_too_short_are_two_faults(tmp_path: Path) -> None:
    path = single(tmp_path) / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data + bytes(8))
    with pytest.raises(DamagedFile, match=f"longer .* {len(data) + 8} bytes, .* ends at {len(data)}"):
        open_checkpoint(tmp_path, follow_links=True)
    for length in (len(data) - 1, 20):
        path.write_bytes(data[:length])
        with pytest.raises(DamagedFile, match=f"cut short: {length} bytes, its header") as refused:
            open_checkpoint(tmp_path, follow_links=True)
        assert "again" in refused.value.remedy


def test_a_short_shard_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    shard = tmp_path / SHARDS[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DamagedFile, match=SHARDS[1]):
        open_checkpoint(tmp_path, follow_links=False)


def test_leftovers_beside_an_index_are_refused(tmp_path: Path) -> None:
    single(sharded(tmp_path))
    with pytest.raises(DamagedFile, match=r"model\.safetensors is not named"):
        open_checkpoint(tmp_path, follow_links=False)


def test_directories_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no safetensors file"):
        open_checkpoint(tmp_path, follow_links=False)
    sharded(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(Refused, match=f"2 safetensors files but no {INDEX}"):
        open_checkpoint(tmp_path, follow_links=False)
    (tmp_path / SHARDS[0]).unlink()
    with pytest.raises(Refused, match="not a checkpoint"):
        open_checkpoint(tmp_path, follow_links=False)
    with pytest.raises(FileNotFoundError):
        open_checkpoint(tmp_path / "absent", follow_links=False)
    with pytest.raises(Refused, match="is not a directory"):
        open_checkpoint(tmp_path / SHARDS[1], follow_links=False)


def test_a_base_of_numbered_shards_needs_no_index(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / INDEX).unlink()
    base = open_base(tmp_path)
    assert [spec.name for spec in base.table] == ["B", "b", "z"] and base.index_file is None
    assert base.notes == (f"{INDEX} is missing; all 2 numbered shards are there",)
    (tmp_path / "consolidated.safetensors").write_bytes((tmp_path / SHARDS[0]).read_bytes())
    with pytest.raises(Refused, match=f"3 safetensors files but no {INDEX}"):
        open_base(tmp_path)
    (tmp_path / "consolidated.safetensors").unlink()
    save_file({"z": A, "b": B}, tmp_path / SHARDS[1])
    with pytest.raises(DamagedFile, match="both hold 'z'"):
        open_base(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    with pytest.raises(Refused, match=f"1 safetensors files but no {INDEX}"):
        open_base(tmp_path)


def test_a_delta_is_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    sharded(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    index["metadata"] = {"version": "000001", "delta_encoding": "xor"}
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(Refused, match="is a delta"):
        open_checkpoint(tmp_path, follow_links=False)


def test_adapters_are_named_as_such(tmp_path: Path) -> None:
    single(tmp_path, "adapter_model.safetensors")
    with pytest.raises(Refused, match=r"is a LoRA adapter, .* adapter_model\.safetensors") as refused:
        open_checkpoint(tmp_path, follow_links=True)
    assert "merge_and_unload" in refused.value.remedy
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(Refused, match="LoRA adapter"):
        open_checkpoint(tmp_path, follow_links=True)
    (tmp_path / "adapter_model.bin").unlink()
    single(tmp_path)
    assert len(open_checkpoint(tmp_path, follow_links=True).table) == 2
    save_file({"base_model.model.q.lora_A.weight": A}, tmp_path / "model.safetensors")
    with pytest.raises(Refused, match="lora_A"):
        open_checkpoint(tmp_path, follow_links=True)


@pytest.mark.parametrize("name", ["", "a\nb", "a" * 5000])
def test_a_tensor_s_name_that_safetensors_takes_is_not_blamed_on_it(tmp_path: Path, name: str) -> None:
    save_file({name: A}, tmp_path / "model.safetensors")
    with pytest.raises(DamagedFile, match="not a usable name") as refused:
        open_checkpoint(tmp_path, follow_links=True)
    assert refused.value.remedy.startswith("rename it")


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "text_encoder/config.json"])
def test_a_page_for_a_file_that_engines_read_is_refused_in_a_base(tmp_path: Path, name: str) -> None:
    path = single(tmp_path) / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"\n<!DOCTYPE html>" + b" " * 4000)
    (tmp_path / "results.json").write_bytes(b"<html>")
    (tmp_path / "vocab.txt").write_bytes(b"<unk>\n")
    with pytest.raises(DamagedFile, match=rf"{name} is an HTML or XML page"):
        open_base(tmp_path)
    path.unlink()
    open_base(tmp_path)


def test_a_pointer_for_a_tokenizer_is_refused_in_a_base(tmp_path: Path) -> None:
    (single(tmp_path) / "tokenizer.json").write_bytes(LFS)
    with pytest.raises(DamagedFile, match=r"tokenizer\.json is a Git LFS pointer"):
        open_base(tmp_path)

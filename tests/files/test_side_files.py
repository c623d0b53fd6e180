"""Which files beside the weights a host gets, and which are listed as left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from weightcast.shared.base.errors import DamagedFile, Refused
from weightcast.shared.files import hf_checkpoint as rules
from weightcast.shared.files.hf_checkpoint import SideFiles, left_text, open_checkpoint, side_files
from weightcast.shared.files.paths import relative_name

COPIED = (
    "1_Dense/pytorch_model.bin", "README.md", "additional_chat_templates/tool_use.jinja", "campplus.onnx",
    "config.json", "deep/er/still/x.txt", "modeling_x.py", "original/params.json", "original/tokenizer.model",
    "runs/ü b.txt", "spk_dict.pt", "stats.npz", "tokenizer.model", "voices.bin", "vqgan.ckpt", "x.tiktoken",
)  # fmt: skip
LEFT = (
    ".env", ".secrets/", "checkpoint-500/", "consolidated.00.pth", "flax_model.msgpack", "global_step12/",
    "metal/model.bin", "model.Q4_K_M.gguf", "model.onnx", "onnx/model_q4.onnx_data", "optimizer.pt",
    "original/consolidated.00.pth", "original/model.safetensors", "pytorch_model-00001-of-00002.bin",
    "pytorch_model.bin.index.json", "rng_state_0.pth", "tf_model.h5", "training_args.bin",
)  # fmt: skip
TRIVIAL = (".gitattributes", ".cache/huggingface/x.lock", ".weightcast/state.json", "deep/.DS_Store")


def make(directory: Path, *names: str) -> Path:
    for name in names:
        path = directory / (f"{name}x" if name.endswith("/") else name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    save_file({"a": torch.zeros(4)}, directory / "model.safetensors")
    return directory


def found(directory: Path, *, follow_links: bool = True) -> SideFiles:
    return side_files(open_checkpoint(directory, follow_links=follow_links))


def test_everything_is_copied_or_listed(tmp_path: Path) -> None:
    files = found(make(tmp_path, *COPIED, *LEFT, *TRIVIAL))
    assert tuple(files.files) == COPIED
    assert files.left == LEFT
    assert all(path == tmp_path / name for name, path in files.files.items())


def test_other_safetensors_are_copied_unless_they_hold_the_model_s_tensors(tmp_path: Path) -> None:
    make(tmp_path, "broken.safetensors", "text_encoder/config.json")
    save_file({"a": torch.ones(4)}, tmp_path / "ema.safetensors")
    save_file({"lora.a": torch.ones(4)}, tmp_path / "adapter_model.safetensors")
    save_file({"a": torch.ones(4)}, tmp_path / "text_encoder" / "model.safetensors")
    files = found(tmp_path)
    assert list(files.files) == [
        "adapter_model.safetensors", "text_encoder/config.json", "text_encoder/model.safetensors"
    ]  # fmt: skip
    assert files.left == ("broken.safetensors", "ema.safetensors")


def test_a_hub_cache_snapshot_with_subdirectories(tmp_path: Path) -> None:
    blobs, snapshot = make(tmp_path / "blobs", "tool.jinja"), tmp_path / "snapshots" / "1"
    (snapshot / "templates").mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/model.safetensors")
    (snapshot / "templates" / "tool.jinja").symlink_to("../../../blobs/tool.jinja")
    assert found(snapshot).files == {"templates/tool.jinja": snapshot / "templates" / "tool.jinja"}
    (blobs / "tool.jinja").unlink()
    with pytest.raises(DamagedFile, match=r"tool\.jinja vanished, or is a link to nothing"):
        found(snapshot)


def test_links_to_nothing_are_left_behind_where_no_engine_reads_the_file(tmp_path: Path) -> None:
    make(tmp_path, "config.json", "onnx/config.json")
    spare = "LICENSE.txt", "README.md", "onnx/model.onnx", "pytorch_model.bin", "training_args.bin"
    for name in spare:
        (tmp_path / name).symlink_to("../blobs/never-fetched")
    files = found(tmp_path)
    assert list(files.files) == ["config.json", "onnx/config.json"] and files.left == spare


@pytest.mark.parametrize("name", ["tokenizer.model", "templates/a.jinja", "vocab.json", "round"])
def test_a_link_to_nothing_that_an_engine_may_read_is_refused(tmp_path: Path, name: str) -> None:
    make(tmp_path, "templates/b.jinja")
    (tmp_path / name).symlink_to(name.rpartition("/")[2])
    with pytest.raises(DamagedFile, match="link to nothing") as refused:
        found(tmp_path)
    assert "remove the link" in refused.value.remedy


def test_links_in_subdirectories_are_refused_where_links_are(tmp_path: Path) -> None:
    make(tmp_path, "templates/a.jinja")
    (tmp_path / "templates" / "b.jinja").symlink_to("a.jinja")
    with pytest.raises(DamagedFile, match=r"b\.jinja is a symbolic link"):
        found(tmp_path, follow_links=False)


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    make(tmp_path, "assets/a.txt")
    (tmp_path / "assets" / "up").symlink_to("..")
    (tmp_path / "again").symlink_to("assets")
    files = found(tmp_path)
    assert list(files.files) == ["again/a.txt", "assets/a.txt"]
    assert files.left == ("again/up/", "assets/up/")


def test_what_is_no_file_and_odd_names_are_listed(tmp_path: Path) -> None:
    make(tmp_path, "\x1b[31mred.pt", "\x1b[32m/x")
    os.mkfifo(tmp_path / "fifo.pt")
    assert found(tmp_path).left == ("\\x1b[31mred.pt", "\\x1b[32m/", "fifo.pt")


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_MOST_FILES", 3)
    make(tmp_path, "a/1", "a/2", "a/3", "a/4")
    with pytest.raises(Refused, match="more than 3 side files"):
        found(tmp_path)


def test_a_list_is_cut_for_people() -> None:
    assert left_text(("a", "b")) == "a, b"
    assert left_text(("a", "b", "c"), most=2) == "a, b and 1 more"


@pytest.mark.parametrize("name", ["a", "a/b.txt", "a/b/c d/ü"])
def test_relative_names(name: str) -> None:
    assert relative_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/a",
        "a/",
        "a//b",
        "../a",
        "a/../b",
        "./a",
        ".weightcast/state.json",
        "a/.b",
        "a/b\n",
        "a/" * 20 + "b",
    ],
)
def test_names_that_lead_elsewhere(name: str) -> None:
    with pytest.raises(DamagedFile):
        relative_name(name)


@pytest.mark.parametrize(("name", "refused"), [("templates/spk.pt", True), ("assets/demo.PNG", False)])
def test_a_git_lfs_pointer_is_named_unless_no_engine_reads_it(
    tmp_path: Path, name: str, refused: bool
) -> None:
    make(tmp_path, name)
    (tmp_path / name).write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"
    )
    checkpoint = open_checkpoint(tmp_path, follow_links=True)
    if not refused:
        return rules.check_pointers(checkpoint)
    with pytest.raises(DamagedFile, match=name):
        rules.check_pointers(checkpoint)

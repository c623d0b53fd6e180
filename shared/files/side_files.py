"""Side files of a checkpoint directory: which of them a host gets, and which are left behind.

A host gets every regular file, subdirectories included, except other formats of the same weights, the
trainer's own state, and hidden files.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weightcast.shared.base.errors import DamagedFile, Refused
from weightcast.shared.files.hf_checkpoint import Checkpoint, dangling, stat_entry
from weightcast.shared.files.paths import is_directory, printable, relative_name
from weightcast.shared.files.safetensors import START, check_kind, read_header_of

_MOST_FILES = 20_000
_SAME_WEIGHTS = re.compile(
    r"(pytorch_model.*\.bin|tf_model.*\.h5|flax_model.*\.msgpack|model.*\.onnx|openvino_model.*\.bin"
    r"|consolidated.*\.(pth|pt|safetensors)|.*\.gguf)(\.index\.json)?"
    r"|model\.safetensors\.index\.json\.sig|model-.*\.safetensors"
)
"""names that libraries give to the model's weights in another format, shards that the index does not name,
and the signature of an anchor"""
_FORMAT_DIRECTORIES = frozenset(("original", "onnx", "openvino", "coreml", "gguf", "ggml", "metal", "mlx"))
"""where repositories keep the model's weights in another format"""
_WEIGHTS = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|gguf|ggml|h5|msgpack|onnx|onnx_data.*|npz|mlmodel)(\.index\.json)?"
)
_TRAINING = re.compile(
    r"(optimizer|scheduler|scaler|rng_state).*\.(pt|pth|bin)|training_args\.bin|checkpoint-\d+|global_step_?\d+"
)
"""state of a trainer, and its own checkpoints in the directory"""
_FOR_PEOPLE = re.compile(r"\.(png|jpe?g|gif|webp|svg|pdf|mp4|mp3|wav|flac)$", re.IGNORECASE)
"""no engine reads them, whatever they hold"""
_READ_AS_JSON = re.compile(
    r"(.*tokenizer.*|.*config.*|.*processor.*|vocab|added_tokens|special_tokens_map|chat_template.*)\.json"
)
_DOCUMENT = re.compile(r"(README|LICEN[CS]E|NOTICE|CHANGELOG|USE_POLICY).*", re.IGNORECASE)
_TRIVIAL = frozenset(
    (".cache", ".git", ".gitattributes", ".gitignore", ".gitkeep", ".DS_Store", ".ipynb_checkpoints")
)
_OURS = ".weightcast"


@dataclass(frozen=True)
class SideFiles:
    """`files`: path by its name relative to the directory, `/` between components; `left`: names of files
    and, ending in `/`, directories that hosts do not get."""

    files: dict[str, Path]
    left: tuple[str, ...]


def side_files(checkpoint: Checkpoint) -> SideFiles:
    """Everything but the weights and their index. Raises DamagedFile for a link where links are refused
    or that leads nowhere, Refused for more files than a model has."""
    index = () if checkpoint.index_file is None else (checkpoint.index_file,)
    own = {path.name for path in (*checkpoint.weight_files, *index)}
    files: dict[str, Path] = {}
    left: list[str] = []
    top = checkpoint.directory.stat()
    for name, path, is_wanted in _walk(
        checkpoint.directory, "", checkpoint.links, ((top.st_dev, top.st_ino),)
    ):
        if name in own:
            continue
        if is_wanted and not _is_left(checkpoint, name, path):
            files[name] = path
        else:
            left.append(printable(name))
        if len(files) + len(left) > _MOST_FILES:
            raise Refused(
                f"{checkpoint.directory} has more than {_MOST_FILES} side files",
                remedy="give a directory that contains this checkpoint alone",
            )
    return SideFiles(files, tuple(left))


def check_pointers(checkpoint: Checkpoint) -> None:
    """Raises DamagedFile where a side file is a Git LFS pointer: a tokenizer, mostly; and where
    a JSON file that engines read is a page, as gated repositories answer."""
    for name, path in side_files(checkpoint).files.items():
        if _FOR_PEOPLE.search(name):
            continue
        with path.open("rb") as file:
            start = file.read(2 * START + 1)
        is_pointer = start.startswith(b"version https://") and len(start) <= 2 * START
        if is_pointer or (_READ_AS_JSON.fullmatch(path.name) and start.lstrip().startswith(b"<")):
            check_kind(start, path)


def _walk(
    directory: Path, prefix: str, links: bool, above: tuple[tuple[int, int], ...]
) -> Iterator[tuple[str, Path, bool]]:
    """Name, path and whether it is a regular file that may be copied; sorted within each directory.
    `above`: device and inode of the directories on the way, so that a loop of links ends."""
    with os.scandir(directory) as scan:
        entries = sorted(scan, key=lambda entry: entry.name)
    for entry in entries:
        name, path = f"{prefix}{entry.name}", directory / entry.name
        if entry.name in _TRIVIAL or entry.name.startswith(_OURS):
            continue
        if entry.name.startswith("."):
            yield f"{name}/" if is_directory(path) else name, path, False
            continue
        found = stat_entry(entry, links)
        if found is None:
            if not _is_spare(name, entry.name):
                raise dangling(path)
            yield name, path, False
            continue
        here = (found.st_dev, found.st_ino)
        if not stat.S_ISDIR(found.st_mode):
            yield name, path, stat.S_ISREG(found.st_mode) and _is_usable(name)
        elif here in above or _TRAINING.fullmatch(entry.name) or not _is_usable(name):
            yield f"{name}/", path, False
        else:
            yield from _walk(path, f"{name}/", links, (*above, here))


def _is_spare(name: str, last: str) -> bool:
    """Whether engines do without it: hosts would not get it, or only people look at it."""
    same = _SAME_WEIGHTS.fullmatch(name) or _TRAINING.fullmatch(last) or _FOR_PEOPLE.search(last)
    weights = name.partition("/")[0] in _FORMAT_DIRECTORIES and _WEIGHTS.fullmatch(last)
    return bool(same or weights or _DOCUMENT.fullmatch(last))


def _is_usable(name: str) -> bool:
    try:
        relative_name(name)
    except DamagedFile:
        return False
    return True


def _is_left(checkpoint: Checkpoint, name: str, path: Path) -> bool:
    first, _, rest = name.partition("/")
    if _TRAINING.fullmatch(path.name):
        return True
    if rest:
        return first in _FORMAT_DIRECTORIES and _WEIGHTS.fullmatch(path.name) is not None
    return _SAME_WEIGHTS.fullmatch(name) is not None or _holds_same_tensors(checkpoint, path)


def _holds_same_tensors(checkpoint: Checkpoint, path: Path) -> bool:
    """Engines read every safetensors file of the directory: another copy of a tensor would hide the patched
    one. An unreadable file may hold one."""
    if path.suffix != ".safetensors":
        return False
    try:
        header = read_header_of(path, follow_links=checkpoint.links)
    except DamagedFile:
        return True
    return not checkpoint.table.numbers.keys().isdisjoint(header.entries)


def left_text(left: tuple[str, ...], most: int = 5) -> str:
    """For a line of output: the first names, and how many more."""
    more = f" and {len(left) - most} more" if len(left) > most else ""
    return ", ".join(left[:most]) + more

"""Checkpoint directories as Hugging Face libraries write them: safetensors, an index, config, tokenizer.

Of its side files a host gets every regular file, subdirectories included, except other formats of the same
weights, the trainer's own state, and hidden files.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from errno import ELOOP, ENOENT, ENOTDIR
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import Chunk, TensorSpec, TensorTable
from weightcast.shared.base.errors import DamagedFile, Refused
from weightcast.shared.files.durable import read_file
from weightcast.shared.files.paths import file_name, is_directory, printable, relative_name
from weightcast.shared.files.safetensors import START, Header, check_kind, read_header_of, tensor_spec
from weightcast.shared.files.strict_json import Members, parse_object

SINGLE = "model.safetensors"
WEIGHT_INDEX = "model.safetensors.index.json"
_SIGNATURE = f"{WEIGHT_INDEX}.sig"
_INDEX_LIMIT = 256 << 20
_OTHER_WEIGHTS = re.compile(r"\.(bin|pt|pth|ckpt|gguf|h5|msgpack|onnx|npz|safetensors)(\.index\.json)?$")
"""Weights in other formats, and safetensors that belong to no `model` (`consolidated.safetensors`)."""


_ADAPTER = re.compile(r"[._](lora_|hada_w|lokr_w|oft_r|ia3_l|vera_lambda)")
_IS_ADAPTER = "{} is a LoRA adapter, not full weights: it holds {}"
MERGE_ADAPTER = (
    "publish it as a component (`--component adapter/NAME`), or merge it (peft: `merge_and_unload`)"
)
ADAPTER_MODEL, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""as peft saves an adapter"""
_SAVE_AGAIN = "safetensors refuses it too: compare it with its source, or save the checkpoint again"


class Place(NamedTuple):
    """A tensor's bytes in a file of the checkpoint directory, which may be a link if links are followed."""

    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class Places:
    """Of each tensor of a table its place, in an array: there may be several 100,000. `rows`: int64[n, 3],
    number of its file, offset, bytes."""

    files: tuple[Path, ...]
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, tensor: int) -> Place:
        file, offset, nbytes = self.rows[tensor].tolist()
        return Place(self.files[file], offset, nbytes)


def run_of(chunk: Chunk, places: Places, tensors: NDArray[np.int64]) -> Place | None:
    """Where the words of a chunk lie in one run of a file, none of them padding; None where they do not.
    `tensors`: of each span the tensor's number among the places, -1 for none. The safetensors library writes
    tensors of a dtype in the order of their names, which is a chunk's."""
    if not chunk.is_full or tensors.min() < 0:
        return None
    rows, width = places.rows[tensors], chunk.kind.width
    begins = rows[:, 1] + width * chunk.shifts
    file, begin = int(rows[0, 0]), int(begins[0])
    if (rows[:, 0] != file).any() or (begins != begin).any():
        return None
    return Place(places.files[file], begin, width * chunk.words)


@dataclass(frozen=True)
class Checkpoint:
    """`places` in table order; files sorted by name. `other_files`: config, tokenizer, code, everything
    regular in the directory itself that has no suffix of weights and is not hidden; `side_files` has all
    that a host gets."""

    directory: Path
    table: TensorTable
    places: Places
    weight_files: tuple[Path, ...]
    other_files: tuple[Path, ...]
    index_file: Path | None
    links: bool
    """whether links were followed"""
    seen: Mapping[str, FileIdentity]
    """by name, its files as they were before anything of them was read"""
    notes: tuple[str, ...] = ()
    """small faults in its files that safetensors and engines tolerate"""

    @property
    def files(self) -> tuple[Path, ...]:
        index = () if self.index_file is None else (self.index_file,)
        return (*self.weight_files, *self.other_files, *index)


@dataclass(frozen=True)
class FileIdentity:
    """Changes whenever a file is replaced or written (short of a forged mtime)."""

    name: str
    device: int
    inode: int
    size: int
    mtime_ns: int


def changed_since(checkpoint: Checkpoint) -> bool:
    """Whether a file, through links, is another one than before it was read, or was written. Raises
    FileNotFoundError."""
    return any(file_identity(path) != checkpoint.seen[path.name] for path in checkpoint.files)


HOLE = "has a hole at byte"


def first_hole(checkpoint: Checkpoint) -> str:
    """The file of its weights with unallocated bytes, in words: a writer that sets the length first is not
    done, or zeros were saved sparsely. Empty if there is none, or the file system does not tell."""
    for path in checkpoint.weight_files:
        with path.open("rb", buffering=0) as file, contextlib.suppress(OSError):
            at = os.lseek(file.fileno(), 0, os.SEEK_HOLE)
            if at < checkpoint.seen[path.name].size:
                return f"{path.name} {HOLE} {at:,}"
    return ""


def file_identity(path: Path) -> FileIdentity:
    """Through links. Raises FileNotFoundError."""
    return _identity(path.name, path.stat())


def _identity(name: str, found: os.stat_result) -> FileIdentity:
    return FileIdentity(name, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def open_checkpoint(
    directory: Path, *, follow_links: bool, need_index: bool = True, adapter: bool = False
) -> Checkpoint:
    """Reads the index and all headers, no weights. Without `need_index` a complete set of numbered shards is
    enough, as for engines; a save that may be under way writes its index last. `adapter`: the adapter in it,
    whatever full weights are next to it. Raises FileNotFoundError for a missing directory, Refused when it is
    not a checkpoint, DamagedFile with the file's name when something in it is wrong."""
    try:
        names = _regular_files(directory, follow_links)
    except NotADirectoryError as error:
        raise Refused(f"{directory} is not a directory", remedy="give a checkpoint directory") from error
    # some bases hold an adapter of peft next to their own weights
    adapters = [name for name in names if name.startswith("adapter_model.") or name == ADAPTER_CONFIG]
    if adapters and not adapter and SINGLE not in names and WEIGHT_INDEX not in names:
        raise Refused(_IS_ADAPTER.format(directory, adapters[0]), remedy=MERGE_ADAPTER)
    try:
        if adapter:
            return _opened(directory, _of_adapter(directory, names), follow_links, need_index)
        opened = _opened(directory, names, follow_links, need_index)
    except DamagedFile as error:
        if error.remedy:
            raise
        raise DamagedFile(error.message, remedy=_SAVE_AGAIN) from error
    if len(opened.table) and all(is_adapter_tensor(spec.name) for spec in opened.table):
        raise Refused(_IS_ADAPTER.format(directory, opened.table[0].name), remedy=MERGE_ADAPTER)
    return opened


def _of_adapter(directory: Path, names: Mapping[str, FileIdentity]) -> Mapping[str, FileIdentity]:
    """All names where none is an adapter as peft saves it: a local checkpoint may come from an anchor."""
    if ADAPTER_MODEL in names:
        return {n: seen for n, seen in names.items() if n == ADAPTER_MODEL or not _OTHER_WEIGHTS.search(n)}
    if "adapter_model.bin" in names:
        raise Refused(
            f"{directory} has adapter_model.bin, not {ADAPTER_MODEL}",
            remedy="save it with safe_serialization=True",
        )
    return names


def _opened(
    directory: Path, names: Mapping[str, FileIdentity], follow_links: bool, need_index: bool
) -> Checkpoint:
    index = _weight_index(directory, names, follow_links)
    unindexed = [] if index is not None or need_index else _numbered(names)
    named = [] if index is None else sorted(set(index.weight_map.values()))
    shards = unindexed or named or [_single(directory, names)]
    notes = _check_present(directory, names, shards, follow_links)
    if unindexed:
        notes.append(f"{WEIGHT_INDEX} is missing; all {len(unindexed)} numbered shards are there")
    headers = tuple(
        read_header_of(directory / name, follow_links=follow_links, tolerant=True) for name in shards
    )
    try:
        notes += _notes(tuple(shards), headers, index)
    except DamagedFile as error:
        raise DamagedFile(f"{directory}{os.sep}{error.message}", remedy=error.remedy) from error
    table, rows = laid_out(headers)
    files = tuple(directory / name for name in shards)
    return Checkpoint(
        directory,
        table,
        Places(files, rows),
        files,
        tuple(
            directory / name
            for name in names
            if name not in shards and name != _SIGNATURE and not _OTHER_WEIGHTS.search(name)
        ),
        directory / WEIGHT_INDEX if WEIGHT_INDEX in names else None,
        follow_links,
        names,
        tuple(notes),
    )


def is_adapter_tensor(name: str) -> bool:
    return _ADAPTER.search(name) is not None


def index_for_copy(checkpoint: Checkpoint) -> bytes | None:
    """The index for a copy of numbered shards where the original has none; None where none is needed."""
    if checkpoint.index_file is not None or not _is_shard(checkpoint.weight_files[0].name):
        return None
    pairs = zip(checkpoint.table, checkpoint.places.rows[:, 0].tolist(), strict=True)
    weight_map = {spec.name: checkpoint.places.files[file].name for spec, file in pairs}
    metadata = {"total_size": checkpoint.table.nbytes}
    return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2).encode()


def _regular_files(directory: Path, follow_links: bool) -> dict[str, FileIdentity]:
    """By sorted names. Hidden files belong to tools, not to the checkpoint; a link to nothing counts as
    missing unless it is one to weights or JSON."""
    names: dict[str, FileIdentity] = {}
    with os.scandir(directory) as scan:
        entries = sorted((entry for entry in scan if not entry.name.startswith(".")), key=lambda e: e.name)
    for entry in entries:
        found = stat_entry(entry, follow_links)
        if found is None and entry.name.endswith((".safetensors", ".json")):
            raise dangling(Path(entry.path))
        if found is not None and stat.S_ISREG(found.st_mode):
            names[entry.name] = _identity(entry.name, found)
    return names


def stat_entry(entry: os.DirEntry[str], follow_links: bool) -> os.stat_result | None:
    """None for a link to nothing, or for what vanished. Raises DamagedFile for a link unless they are
    followed."""
    if entry.is_symlink() and not follow_links:
        raise DamagedFile(
            f"{entry.path} is a symbolic link",
            remedy="links are refused here: copy the files, or give the directory as `--base`",
        )
    try:
        return entry.stat()
    except OSError as error:
        if error.errno not in (ENOENT, ENOTDIR, ELOOP):
            raise
        return None


def dangling(path: Path) -> DamagedFile:
    return DamagedFile(
        f"{printable(str(path))} vanished, or is a link to nothing",
        remedy="download the file that it leads to, or remove the link",
    )


@dataclass(frozen=True, eq=False)
class _WeightIndex:
    weight_map: Mapping[str, str]
    """tensor name to shard"""
    notes: tuple[str, ...]


def _weight_index(directory: Path, names: Collection[str], follow_links: bool) -> _WeightIndex | None:
    """None without an index."""
    if WEIGHT_INDEX not in names:
        return None
    data = read_file(directory / WEIGHT_INDEX, _INDEX_LIMIT, follow_links=follow_links)
    check_kind(data[:START], directory / WEIGHT_INDEX)
    try:
        index = _parsed_index(data)
    except DamagedFile as error:
        raise DamagedFile(f"{directory}{os.sep}{error.message}", remedy=error.remedy) from error
    if index is None:
        raise Refused(f"{directory} is a delta, not a checkpoint", remedy="give one with full weights")
    return index


@lru_cache(maxsize=2)
def _parsed_index(data: bytes) -> _WeightIndex | None:
    """None for a delta's index. Remembered by its bytes, as headers are. Engines read the names of the files
    alone: `metadata` may be anything."""
    twice: list[str] = []
    members = parse_object(data, WEIGHT_INDEX, twice, float)
    metadata = members.get("metadata")
    if isinstance(metadata, dict) and "delta_encoding" in metadata:
        return None
    notes = [f"{name!r} is given twice" for name in twice]
    if "metadata" in members and not isinstance(metadata, dict):
        notes.append(f"metadata is {json.dumps(metadata)[:40]}")
    weight_map = Members(members, WEIGHT_INDEX).text_map("weight_map")
    if not weight_map:
        raise DamagedFile(f"{WEIGHT_INDEX}: weight_map names no file")
    for shard in set(weight_map.values()):
        file_name(shard)
    return _WeightIndex(weight_map, tuple(notes))


def _single(directory: Path, names: Collection[str]) -> str:
    found = [name for name in names if name.endswith(".safetensors")]
    if SINGLE in found and not [name for name in found if _is_shard(name) and name != SINGLE]:
        return SINGLE
    if len(found) == 1 and not _is_shard(found[0]):
        return found[0]
    if not found:
        raise no_checkpoint(directory, names)
    raise Refused(
        f"{directory} is not a checkpoint: {len(found)} safetensors files but no {WEIGHT_INDEX}",
        remedy="wait for the save to end (the index is written last), or save it again",
    )


def _numbered(names: Iterable[str]) -> list[str]:
    """`model-00001-of-0000N.safetensors` to N, sorted; empty where one is missing or another safetensors file
    is there, which engines would load too."""
    found = sorted(name for name in names if name.endswith(".safetensors"))
    count = len(found)
    whole = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    return found if found == whole else []


def _is_shard(name: str) -> bool:
    return name.startswith("model-") and name.endswith(".safetensors")


def _check_present(
    directory: Path, names: Iterable[str], shards: Sequence[str], follow_links: bool
) -> list[str]:
    """Notes on shards that the index does not name: engines ignore them. A local checkpoint has none."""
    missing = sorted(set(shards) - set(names))
    if missing:
        raise DamagedFile(
            f"{directory / printable(missing[0])} is missing; the index names it",
            remedy="copy, download or save that file too; or correct the index",
        )
    surplus = sorted({name for name in names if name == SINGLE or _is_shard(name)} - set(shards))
    if SINGLE in surplus or (surplus and not follow_links):
        raise DamagedFile(
            f"{directory / surplus[0]} is not named by {WEIGHT_INDEX}",
            remedy="remove it or the index: one of them is left over from another checkpoint",
        )
    return [f"{WEIGHT_INDEX}: does not name {name}, which engines ignore" for name in surplus]


def _index_notes(weight_map: Mapping[str, str], held: Mapping[str, str]) -> Iterator[str]:
    """Engines load what the named files hold, whatever the index says of single tensors."""
    if held == weight_map:
        return
    elsewhere = [name for name in held if weight_map.get(name, held[name]) != held[name]]
    for faulty, problem in (
        ([name for name in weight_map if name not in held], "names tensors that no file holds"),
        ([name for name in held if name not in weight_map], "does not name tensors that a file holds"),
        (elsewhere, "names another file for tensors"),
    ):
        if faulty:
            yield f"{problem}: {faulty[0]}" + (f" and {len(faulty) - 1} more" if faulty[1:] else "")


@lru_cache(maxsize=2)
def _notes(
    shards: tuple[str, ...], headers: tuple[Header, ...], index: _WeightIndex | None
) -> tuple[str, ...]:
    """What was tolerated in files and index. Remembered, as is what they are parsed to."""
    held = _held(shards, headers)
    found = () if index is None else (*index.notes, *_index_notes(index.weight_map, held))
    own = (f"{name}: {note}" for name, one in zip(shards, headers, strict=True) for note in one.notes)
    return (*(f"{WEIGHT_INDEX}: {note}" for note in found), *own)


def _held(shards: Sequence[str], headers: Sequence[Header]) -> dict[str, str]:
    """Tensor name to shard. Names within one file are unique already."""
    held: dict[str, str] = {}
    for shard, header in zip(shards, headers, strict=True):
        for name in header.entries:
            other = held.setdefault(name, shard)
            if other != shard:
                raise DamagedFile(
                    f"{other} and {shard} both hold {name!r}",
                    remedy="remove it from one of them: engines may load either",
                )
    return held


@lru_cache(maxsize=2)
def laid_out(headers: tuple[Header, ...]) -> tuple[TensorTable, NDArray[np.int64]]:
    """The tensors of these headers, and where each one is: rows as in `Places`. Names are unique, within a
    header and across shards. Remembered, so that checkpoints with the same headers have one table."""
    specs: list[TensorSpec] = []
    spots: dict[str, tuple[int, int, int]] = {}
    for shard, header in enumerate(headers):
        for entry in header.entries.values():
            specs.append(tensor_spec(entry))
            spots[entry.name] = shard, header.data_start + entry.begin, entry.nbytes
    table = TensorTable.of(specs)
    rows = np.array([spots[spec.name] for spec in table], np.int64).reshape(-1, 3)
    rows.flags.writeable = False
    return table, rows


_FORMATS = {
    "a PyTorch distributed checkpoint": re.compile(r"\.distcp$"),
    "GGUF": re.compile(r"\.gguf$"),
    "PyTorch": re.compile(r"\.(bin|pt|pth|ckpt)$"),
    "another format": re.compile(r"\.(h5|msgpack|onnx|npz)$"),
}
_TRAINING_STATE = re.compile(r"(optimizer|scheduler|scaler|rng_state|random_states|training_args)")
_DEPTH = 4
_MOST_DIRECTORIES = 1000
_REMEDY = "save Hugging Face safetensors: save_pretrained with safe_serialization=True"


def is_other_format(name: str) -> bool:
    """Whether a file of this name holds weights, but no safetensors."""
    return _format_of(name) != ""


def no_checkpoint(directory: Path, names: Collection[str]) -> Refused:
    """`names`: of the files in it."""
    others = sorted(name for name in names if is_other_format(name))
    below = next(_below(directory), None)
    if others:
        more = f" and {len(others) - 1} more" if others[1:] else ""
        found = f"only {_format_of(others[0])} ({printable(others[0])}{more})"
        return Refused(f"{directory} has no safetensors, {found}", remedy=_REMEDY)
    if below is not None:
        return Refused(f"{directory} has no safetensors, but {below} has", remedy=f"give {below}")
    return Refused(
        f"{directory} is not a checkpoint: it has no safetensors file", remedy="check the path and the save"
    )


def _format_of(name: str) -> str:
    if _TRAINING_STATE.match(name):
        return ""
    return next((what for what, pattern in _FORMATS.items() if pattern.search(name)), "")


def _below(directory: Path) -> Iterator[Path]:
    """Directories in it with safetensors, as far as they are found quickly."""
    for number, (path, inner, names) in enumerate(os.walk(directory)):
        at = Path(path)
        deep = len(at.relative_to(directory).parts) >= _DEPTH or number > _MOST_DIRECTORIES
        inner[:] = [] if deep else sorted(name for name in inner if not name.startswith("."))
        if at != directory and any(name.endswith(".safetensors") for name in names):
            yield at


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

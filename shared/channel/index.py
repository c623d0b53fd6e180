"""The index of a version: its manifest and its commit point.

Parsing and writing only; which index may follow which is decided in `weightcast.shared.local.plan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from weightcast.shared.digest.lanes import Lanes
from weightcast.shared.words import ChunkKey, Part

INDEX_NAME = "model.safetensors.index.json"
FORMAT = 1
INDEX_LIMIT = 256 << 20

Kind = Literal["delta", "anchor"]
Encoding = Literal["fast", "xor", "overwrite"]


@dataclass(frozen=True)
class FileRecord:
    """A file of the version's directory, as the transfer must deliver it."""

    name: str
    size: int
    blake3: str


@dataclass(frozen=True)
class TensorRecord:
    """A changed tensor (in an anchor: every tensor): raw lanes of its new bytes, changed elements."""

    lanes: Lanes
    changed: int


@dataclass(frozen=True)
class ChunkRecord:
    """A changed chunk. `file`, `offset`, `length` place its blob (encoding `fast`); in the field's encodings
    payloads lie per tensor and `length` is 0. `changed` counts words."""

    key: ChunkKey
    file: str
    offset: int
    length: int
    changed: int
    old: Lanes
    new: Lanes


@dataclass(frozen=True)
class Totals:
    """Changed elements, elements of the model, bytes of changed elements, bytes of the model."""

    changed: int
    elements: int
    nbytes: int
    delta_bytes: int


@dataclass(frozen=True)
class Index:
    """One version. `digest` is the BLAKE3 of the exact index bytes, hex; `weight_map` names the shard of
    each changed tensor; `parts` is the split the chunk grid is computed from."""

    run_id: str
    version: int
    kind: Kind
    base_version: int
    """-1 for an anchor"""
    base_root: str
    """root of base_version; empty for an anchor"""
    root: str
    parent: str
    """digest of the base version's index (of base.json for base_version 0); empty for an anchor"""
    epoch: int
    encoding: Encoding | None
    """None for an anchor"""
    step: int | None
    """the trainer's step: information only"""
    created: float
    """unix time on the publisher's clock"""
    weight_map: Mapping[str, str]
    files: tuple[FileRecord, ...]
    tensors: Mapping[str, TensorRecord]
    parts: tuple[Part, ...]
    chunks: tuple[ChunkRecord, ...]
    totals: Totals
    checksums: Mapping[str, str] = field(default_factory=dict)
    """field encodings only: xxh3-128 hex of each changed tensor's new bytes, as in the shard's metadata"""
    digest: str = ""


@dataclass(frozen=True)
class ForeignIndex:
    """A delta version in the field's plain format: what can be known of it (docs/FORMAT.md, Foreign channels)."""

    version: int
    base_version: int
    encoding: Literal["xor", "overwrite", "xor_sparse"]
    checksum_format: Literal["xxh3-128", "blake3", "adler32"]
    weight_map: Mapping[str, str]
    digest: str

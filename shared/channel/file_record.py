"""A file as an index names it: size and BLAKE3, from its bytes."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from weightcast.shared.channel.index import FileRecord

_BLOCK = 8 << 20


def file_record(path: Path, name: str = "") -> FileRecord:
    """`name`: relative to the directory that the record is for; unset: the file's own."""
    digest, size = blake3(), 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return FileRecord(name or path.name, size, digest.hexdigest())

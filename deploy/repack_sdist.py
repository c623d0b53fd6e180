"""Writes source distributions again, so that their bytes depend on their files alone.

SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) python deploy/repack_sdist.py dist/*.tar.gz
"""

from __future__ import annotations

import gzip
import io
import os
import sys
import tarfile
from pathlib import Path


def repack(path: Path, epoch: int) -> None:
    """Sorted, of nobody, as old as the commit."""
    tar = io.BytesIO()
    with tarfile.open(path) as old, tarfile.open(fileobj=tar, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old, key=lambda one: one.name):
            plain = tarfile.TarInfo(member.name)
            plain.type, plain.size, plain.linkname = member.type, member.size, member.linkname
            plain.mode, plain.mtime = 0o755 if member.mode & 0o100 else 0o644, epoch
            new.addfile(plain, old.extractfile(member) if member.isfile() else None)
    with path.open("wb") as file, gzip.GzipFile("", "wb", 9, file, epoch) as packed:
        packed.write(tar.getvalue())


if __name__ == "__main__":
    for name in sys.argv[1:]:
        repack(Path(name), int(os.environ["SOURCE_DATE_EPOCH"]))

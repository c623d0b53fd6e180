"""Called by the pickles of a subscriber that feeds this engine from its host's memory (`via=ipc`)."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence

import torch

from weightcast_engine.update.elements import DTYPES

_mapped: weakref.ref[mmap.mmap] | None = None
"""while a load is under way; its tensor holds it"""


def attach(path: str, nbytes: int, *device: int) -> torch.Tensor:
    """The subscriber's buffer. Private: some loaders write into what they load, and all ranks map it."""
    global _mapped
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        mapped = mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)
    _mapped = weakref.ref(mapped)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def entries(rows: Sequence[tuple[str, str, tuple[int, ...], int]]) -> list[dict[str, object]]:
    """Tensors to load, as checkpoint-engine's workers take them; what a loader wrote is read anew."""
    mapped = None if _mapped is None else _mapped()
    if mapped is None:
        raise RuntimeError("no buffer of a weightcast subscriber is mapped")
    mapped.madvise(mmap.MADV_DONTNEED)
    return [
        {"name": name, "shape": tuple(shape), "dtype": DTYPES[dtype], "offset": offset}
        for name, dtype, shape, offset in rows
    ]

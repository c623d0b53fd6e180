"""Headers and stretches of safetensors files in a store."""

from __future__ import annotations

from functools import partial

from weightcast.shared.base.errors import MEND_CHANNEL, DamagedFile
from weightcast.shared.channel.store import NotFound, Store
from weightcast.shared.files.safetensors import Header, header_from


def read_exactly(files: Store, name: str, offset: int, length: int, place: str) -> bytes:
    """Raises DamagedFile, which names `place`, when the file ends before that."""
    data = files.read_range(name, offset, length)
    if len(data) < length:
        raise DamagedFile(f"{place} ends {length - len(data)} bytes early", remedy=MEND_CHANNEL)
    return data


def read_shard_header(files: Store, name: str) -> Header:
    """Raises NotFound and DamagedFile."""
    found, place = files.stat(name), files.place(name)
    if found is None:
        raise NotFound.at(place)
    return header_from(partial(files.read_range, name, 0), found.size, place)

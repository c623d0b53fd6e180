"""Memory that a thread uses again for every chunk. Its size is bounded by the chunk's: some tens of bytes a
word, touched only as far as words change."""

from __future__ import annotations

import sys
import threading
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Scalar = TypeVar("Scalar", bound=np.generic)


class Scratch(threading.local):
    def __init__(self) -> None:
        self._bytes: dict[str, NDArray[np.uint8]] = {}
        self._lent: dict[str, list[NDArray[np.uint8]]] = {}

    def take(self, name: str, dtype: type[Scalar] | np.dtype[Scalar], count: int) -> NDArray[Scalar]:
        """Uninitialised; overwritten by the thread's next `take` of the same name."""
        size = count * np.dtype(dtype).itemsize
        room = self._bytes.get(name)
        if room is None or len(room) < size:
            room = self._bytes[name] = np.empty(size, np.uint8)
        return room[:size].view(dtype)

    def lend(self, name: str, dtype: type[Scalar] | np.dtype[Scalar], count: int) -> NDArray[Scalar]:
        """As `take`, but other memory as long as anyone still holds a view of what was lent."""
        size = count * np.dtype(dtype).itemsize
        return self._free_room(self._lent.setdefault(name, []), size)[:size].view(dtype)

    def _free_room(self, rooms: list[NDArray[np.uint8]], size: int) -> NDArray[np.uint8]:
        for number in range(len(rooms)):
            room = rooms[number]
            if sys.getrefcount(room) <= _REFERENCES_HERE:
                if len(room) < size:
                    room = rooms[number] = np.empty(size, np.uint8)
                return room
        rooms.append(np.empty(size, np.uint8))
        del rooms[:-_MOST_ROOMS]  # who holds those that go keeps them
        return rooms[-1]


_MOST_ROOMS = 3
"""of one name that are kept to be lent again"""
_REFERENCES_HERE = 3
"""to a piece of scratch that nobody holds: the list's, the function's, its argument's"""
_SCRATCH = Scratch()


def scratch() -> Scratch:
    """This thread's."""
    return _SCRATCH

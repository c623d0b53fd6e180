"""Memory that a thread uses again for every chunk. Its size is bounded by the chunk's: some tens of bytes a
word, touched only as far as words change."""

from __future__ import annotations

import threading
import weakref
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Scalar = TypeVar("Scalar", bound=np.generic)


class _Room:
    """Lent through a window: an array that views of it refer to, and that lives as long as one of them. numpy
    would let them refer to another array behind it, but what is there is none."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = np.empty(size, np.uint8).data
        self._window: weakref.ref[NDArray[np.uint8]] | None = None

    @property
    def is_free(self) -> bool:
        return self._window is None or self._window() is None

    def window(self) -> NDArray[np.uint8]:
        window: NDArray[np.uint8] = np.asarray(self._memory)
        self._window = weakref.ref(window)
        return window


class Scratch(threading.local):
    def __init__(self) -> None:
        self._bytes: dict[str, NDArray[np.uint8]] = {}
        self._lent: dict[str, list[_Room]] = {}

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
        return self._free_room(self._lent.setdefault(name, []), size).window()[:size].view(dtype)

    def _free_room(self, rooms: list[_Room], size: int) -> _Room:
        for number, room in enumerate(rooms):
            if room.is_free:
                if room.size < size:
                    rooms[number] = _Room(size)
                return rooms[number]
        rooms.append(_Room(size))
        del rooms[:-_MOST_ROOMS]  # who holds those that go keeps them
        return rooms[-1]


_MOST_ROOMS = 3
"""of one name that are kept to be lent again"""
_SCRATCH = Scratch()


def scratch() -> Scratch:
    """This thread's."""
    return _SCRATCH

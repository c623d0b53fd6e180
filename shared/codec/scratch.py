"""Memory that a thread uses again for every chunk. Its size is bounded by the chunk's: about 25 bytes a word,
touched only as far as words change."""

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

    def take(self, name: str, dtype: type[Scalar] | np.dtype[Scalar], count: int) -> NDArray[Scalar]:
        """Uninitialised; overwritten by the thread's next `take` of the same name."""
        size = count * np.dtype(dtype).itemsize
        room = self._bytes.get(name)
        if room is None or len(room) < size:
            room = self._bytes[name] = np.empty(size, np.uint8)
        return room[:size].view(dtype)

    def lend(self, name: str, dtype: type[Scalar] | np.dtype[Scalar], count: int) -> NDArray[Scalar]:
        """As `take`, but other memory as long as anyone still holds a view of what was lent."""
        room = self._bytes.get(name)
        if room is not None and sys.getrefcount(room) > _REFERENCES_HERE:
            del self._bytes[name]
        return self.take(name, dtype, count)


_REFERENCES_HERE = 3
"""to a piece of scratch that nobody holds: the table's, the function's, its argument's"""
_SCRATCH = Scratch()


def scratch() -> Scratch:
    """This thread's."""
    return _SCRATCH

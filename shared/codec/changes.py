"""What one chunk's step from one version to another is: positions, old and new words."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.codec.kernels import kernels
from weightcast.shared.codec.padding import Counted
from weightcast.shared.codec.places import places_under
from weightcast.shared.words import Words

_LISTED_BITS = 8
"""of a list, for each change: its distance from the one before"""


@dataclass(frozen=True)
class Changes:
    """`places`: uint32[k], strictly increasing positions in the chunk, or, where many words change,
    uint64[words / 64], in which the bits of those words are set. `old` and `new`: word[k], different from
    each other at every position. `whole`: all words after, where somebody had them anyway. `all_shown`: every
    word is in them, those that stay too."""

    places: NDArray[np.uint32] | NDArray[np.uint64]
    old: Words
    new: Words
    whole: Words | None = None
    all_shown: bool = False

    def __len__(self) -> int:
        return len(self.old)

    @cached_property
    def index(self) -> NDArray[np.uint32]:
        """Positions, listed."""
        places = self.places if self.masks is None else places_under(self.masks)
        return places.astype(np.uint32, copy=False)

    @property
    def masks(self) -> NDArray[np.uint64] | None:
        return self.places.astype(np.uint64, copy=False) if self.places.dtype == np.uint64 else None

    def apply(self, words: Words) -> None:
        """`words`: contiguous, of the dtype of those compared, and the old ones where nothing changes."""
        if self.whole is not None and len(self.whole) == len(words):
            np.copyto(words, self.whole)
        else:
            kernels().scatter(words, self.index, self.new)


def worth_masks(changed: int, words: int) -> bool:
    """Whether a bit for each word takes no more than listing those that change."""
    return _LISTED_BITS * changed >= words


def all_of(old: Words, new: Words, counted: Counted) -> Changes:
    """Every word that counts as a change, for where few stay: nothing is listed, what was given is shown."""
    index = counted.with_padding(_numbers(counted.words))
    return Changes(index, counted.pick(old), counted.pick(new), new, all_shown=True)


@lru_cache(maxsize=2)
def _numbers(count: int) -> NDArray[np.uint32]:
    numbers = np.arange(count, dtype=np.uint32)
    numbers.flags.writeable = False
    return numbers


def compare(old: Words, new: Words) -> Changes:
    """Changes between two 1-D arrays of equal length and dtype, by bits."""
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ValueError(f"{old.shape} words of {old.dtype} against {new.shape} of {new.dtype}")
    return Changes(*kernels().compared(np.ascontiguousarray(old), np.ascontiguousarray(new)))

"""Writing a journal's words: compared, written, read back. The door is explained in `plain`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.digest.native import I64, kernel, prefetch, set_word, unwritable, word_at
from weightcast.shared.words import Words

_BLOCK = 1 << 10
"""changes compared before they are written: their lines are still in the nearest caches"""
_AHEAD = 32
"""changes between asking for a cache line and using it"""


@kernel
def _exchange(words: Any, index: Any, before: Any, other: Any, after: Any) -> Any:
    last = index.size - 1
    for start in range(0, index.size, _BLOCK):
        stop = min(index.size, start + _BLOCK)
        for i in range(start, stop):
            prefetch(words, I64(index[min(i + _AHEAD, last)]), after)
            found = word_at(words, I64(index[i]), after)
            if found != before[i] and found != other[i]:
                return i
        for i in range(start, stop):
            set_word(words, I64(index[i]), after[i])
        for i in range(start, stop):
            if word_at(words, I64(index[i]), after) != after[i]:
                return i
    return -1


def exchange(
    words: Words, index: NDArray[np.uint64], before: Words, after: Words, *, again: bool
) -> int | None:
    if not len(index):
        return None
    if index[-1] >= len(words):
        raise IndexError(f"a change of word {index[-1]} in {len(words)} words")
    old, new = unwritable(before), unwritable(after)
    failed = _exchange(words.view(np.uint8), unwritable(index), old, new if again else old, new)
    return None if failed < 0 else int(failed)

"""A byte for the step of every word."""

from __future__ import annotations

from typing import Any

import numpy as np

from weightcast.shared.codec.native_ordinals import HALF, excess, facts, ordinal, step_between, word_of
from weightcast.shared.codec.native_step_bytes import add_steps64, step_bytes64
from weightcast.shared.codec.scratch import scratch
from weightcast.shared.digest.native import (
    U64,
    frozen,
    kernel,
    reaching64,
    set_bits,
    trailing_zeros,
    unwritable,
)
from weightcast.shared.words import ByteArray, WordKind, Words

_LONG = 255


@kernel
def _step_bytes(old: Any, new: Any, kind: Any, out: Any) -> Any:
    longer, whole = 0, old.size & ~63
    for first in range(0, whole, 64):
        longer += set_bits(step_bytes64(old, new, first, kind, out))
    for i in range(whole, old.size):
        step = step_between(old[i], new[i], kind)
        byte = min((step << 1) ^ (step >> 63), _LONG)
        out[i] = byte
        longer += byte == _LONG
    return longer


def step_bytes(old: Words, new: Words, kind: WordKind, out: ByteArray) -> int:
    """Of every word: 2 |step|, less one for a step down, or 255 for all that are longer; how many are."""
    return int(_step_bytes(unwritable(old), unwritable(new), facts(kind), out))


@kernel
def _escaped(steps: Any, new: Any, like: Any, kept: Any) -> None:
    found, whole = 0, steps.size & ~63
    for first in range(0, whole, 64):
        mask = reaching64(steps, first, like, U64(_LONG), U64(_LONG))
        while mask != U64(0):
            kept[found] = new[first + int(trailing_zeros(mask))]
            found += 1
            mask &= mask - U64(1)
    for i in range(whole, steps.size):
        if steps[i] == _LONG:
            kept[found] = new[i]
            found += 1


def escaped(steps: ByteArray, new: Words, count: int) -> Words:
    """The new words whose step byte is 255."""
    kept = np.empty(count, new.dtype)
    _escaped(frozen(steps), unwritable(new), np.empty(0, np.uint8), kept)
    return kept


@kernel
def _add_steps(old: Any, steps: Any, kind: Any, new: Any) -> Any:
    over, beyond, longer, whole = U64(0), U64(0), 0, old.size & ~63
    for first in range(0, whole, 64):
        long64, over64 = add_steps64(old, steps, first, kind, new)
        longer += set_bits(long64)
        beyond |= over64
    for i in range(whole, old.size):
        byte = np.int64(steps[i])
        long = byte == _LONG
        step = 0 if long else (byte >> 1) ^ -(byte & 1)
        moved = ordinal(old[i], kind) + step
        over |= excess(moved, abs(step), kind)
        new[i] = word_of(moved, kind)
        longer += long
    return longer if over < U64(2 * kind[HALF]) and beyond == U64(0) else -1


@kernel
def _put_escaped(steps: Any, like: Any, kept: Any, new: Any) -> None:
    found, whole = 0, steps.size & ~63
    for first in range(0, whole, 64):
        mask = reaching64(steps, first, like, U64(_LONG), U64(_LONG))
        while mask != U64(0):
            new[first + int(trailing_zeros(mask))] = kept[found]
            found += 1
            mask &= mask - U64(1)
    for i in range(whole, steps.size):
        if steps[i] == _LONG:
            new[i] = kept[found]
            found += 1


def add_steps(old: Words, steps: ByteArray, kept: Words, kind: WordKind) -> Words | None:
    """New words after step bytes and the words that `escaped` gave."""
    new = scratch().lend("dense words", old.dtype, len(old))
    if _add_steps(unwritable(old), unwritable(steps), facts(kind), new) != len(kept):
        return None
    if len(kept):
        _put_escaped(frozen(steps), np.empty(0, np.uint8), unwritable(kept), new)
    return new


@kernel
def _split_planes(words: Any, planes: Any) -> None:
    for i in range(words.size):
        planes[0, i] = words[i] & 255
    if planes.shape[0] >= 2:
        for i in range(words.size):
            planes[1, i] = (words[i] >> 8) & 255
    if planes.shape[0] == 4:
        for i in range(words.size):
            planes[2, i] = (words[i] >> 16) & 255
        for i in range(words.size):
            planes[3, i] = words[i] >> 24


def split_planes(words: Words, planes: ByteArray) -> None:
    """`planes`: uint8[width, words], all first bytes, all second bytes and so on."""
    _split_planes(unwritable(words), planes)


@kernel
def _join_planes(planes: Any, words: Any) -> None:
    """A loop per width: with one for all, nothing is done side by side."""
    if planes.shape[0] == 1:
        for i in range(words.size):
            words[i] = planes[0, i]
    elif planes.shape[0] == 2:
        for i in range(words.size):
            words[i] = U64(planes[0, i]) | (U64(planes[1, i]) << U64(8))
    else:
        for i in range(words.size):
            low = U64(planes[0, i]) | (U64(planes[1, i]) << U64(8))
            words[i] = low | (U64(planes[2, i]) << U64(16)) | (U64(planes[3, i]) << U64(24))


def join_planes(planes: ByteArray, kind: WordKind) -> Words:
    words = scratch().lend("dense words", kind.numpy, planes.shape[1])
    _join_planes(unwritable(planes), words)
    return words

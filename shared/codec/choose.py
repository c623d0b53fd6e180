"""Which mode a chunk is written in: from counts, without encoding it twice.

`fast` means quick: where a third of the words change, a byte per word is read twice as quickly as a code per
change, and is a quarter longer. `small` takes what is expected to be smallest. Unrelated words
go as planes with both, or raw where a sample of them says that nothing helps.
Whatever comes out longer than the raw words is written raw instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from weightcast.shared.base.elements import WordKind, Words
from weightcast.shared.codec import dense, magnitudes, positions, sparse, steps
from weightcast.shared.codec.changes import Changes, Counted

StepEncoding = Literal["fast", "small"]
FetchWords = Callable[[], Words]
"""A chunk's words with padding, which may have to come from afar: called where they are needed."""

RAW, FAST, SMALL, STEPS, PLANES = range(5)
"""Mode bytes of a blob."""

_WORTH_FRAMES = 4096
"""words from which tables of a frame pay for themselves"""
_WORTH_CLASSES = 256
"""changes from which headers of classes do"""
_MANY = 1 / 3
"""share of changed words from which step bytes are looked at"""
_SPEED = 1.3
"""how many times the bits quicker step bytes may take then"""
_FEW_LONGER = 1 / 16
"""share of changes that may be too long for a step byte"""
_CLASSES_SAVE = 0.4
"""bits per change that classes save at such shares"""
_UNRELATED = 1 / 2
"""share of the raw size from which planes are looked at"""
_HOPELESS = 0.99
"""share of the raw size from which nothing is tried"""
_DENSE = 1 / 4
"""share of changed words from which payloads that hold every word are looked at"""


def encode(
    changes: Changes, old: Words, new: FetchWords, counted: Counted, kind: WordKind, encoding: StepEncoding
) -> tuple[int, bytes | memoryview]:
    """Mode and payload, never longer than the raw words of the spans; good until the thread encodes again.
    `old`: with padding."""
    mode = None
    if len(changes) > _DENSE * counted.words and counted.words >= _WORTH_FRAMES:
        mode = _dense(changes, old, new, counted, kind, encoding)
    if mode == RAW:
        return RAW, _bytes_of(counted.pick(new()))
    if mode == PLANES:
        found: _Found = (PLANES, dense.encode_planes(counted.pick(new())))
    elif mode == STEPS:
        found = STEPS, dense.encode_steps(counted.pick(old), counted.pick(new()), kind)
    else:
        found = _changewise(changes, old, counted, kind, encoding)
    if found is None or len(found[1]) >= counted.words * kind.width:
        return RAW, _bytes_of(counted.pick(new()))
    return found


def _bytes_of(words: Words) -> memoryview:
    return np.ascontiguousarray(words).view(np.uint8).data


_Found = tuple[int, bytes | memoryview] | None


def _dense(
    changes: Changes, old: Words, new: FetchWords, counted: Counted, kind: WordKind, encoding: StepEncoding
) -> int | None:
    """A mode that holds every word, by a sample of the words; None where changes alone are better."""
    after = dense.sampled(counted.pick(new()))
    if len(changes) >= _MANY * counted.words:
        taken = dense.sample_steps(dense.sampled(counted.pick(old)), after, kind)
        if _steps_pay(taken, len(changes), counted, encoding):
            return STEPS
    expected = positions.expected_gap_bits(len(changes), counted.words)
    expected += len(changes) + _magnitude_bits(changes, kind)
    raw = 8 * counted.words * kind.width
    if expected <= _UNRELATED * raw:
        return None
    planes = dense.plane_bits(after) * counted.words
    if min(planes, expected) >= _HOPELESS * raw:
        return RAW
    return PLANES if planes < expected else None


def _steps_pay(taken: dense.StepSample, changed: int, counted: Counted, encoding: StepEncoding) -> bool:
    share = changed / counted.words  # contexts, which shorten lengths by up to an eighth, are left out
    gap_bits = positions.expected_gap_bits(changed, counted.words) / counted.words
    expected = gap_bits + share * (1 + taken.length_bits)
    expected = expected * _SPEED if encoding == "fast" else expected - share * _CLASSES_SAVE
    return taken.longer <= _FEW_LONGER * share and taken.bits <= expected


def _magnitude_bits(changes: Changes, kind: WordKind) -> float:
    """Of all changes, by a sample of them."""
    before = dense.sampled(changes.old)
    some = Changes(changes.index[: len(before)], before, dense.sampled(changes.new))
    bits = magnitudes.grouped(steps.measure(some, kind), kind).expected_bits
    return bits * len(changes) / len(before)


def _changewise(
    changes: Changes, old: Words, counted: Counted, kind: WordKind, encoding: StepEncoding
) -> _Found:
    most = counted.words * kind.width
    if encoding == "small" and kind.exponent_mask and len(changes) >= _WORTH_CLASSES:
        small = _small(changes, old, counted, kind, most)
        if small is not None:
            return SMALL, small
    fast = sparse.encode_fast(changes, counted, kind, most)
    return None if fast is None else (FAST, fast)


def _small(changes: Changes, old: Words, counted: Counted, kind: WordKind, most: int) -> bytes | None:
    measured = steps.measure(changes, kind)
    grouped = magnitudes.grouped(measured, kind)
    for exact in (False, True):
        classes = positions.classify(measured, old, counted, kind, exact=exact)
        payload = sparse.encode_small(changes.index, old, counted, classes, measured, grouped, kind, most)
        if payload is not None or classes.exact:
            return payload
    return None

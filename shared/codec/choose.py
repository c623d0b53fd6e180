"""Which mode a chunk is written in: from counts, without encoding it twice.

`fast` means quick: where half of the words change, a byte per word is twice as quick as a code per change,
and about as long. `small` takes what is expected to be smallest. Unrelated words go as planes with both.
Whatever comes out longer than the raw words is written raw instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from weightcast.shared.codec import dense, magnitudes, positions, sparse, steps
from weightcast.shared.codec.changes import Changes
from weightcast.shared.codec.padding import Counted
from weightcast.shared.words import WordKind, Words

StepEncoding = Literal["fast", "small"]
FetchWords = Callable[[], Words]
"""A chunk's words with padding, which may have to come from afar: called where they are needed."""

RAW, FAST, SMALL, STEPS, PLANES = range(5)
"""Mode bytes of a blob."""

_WORTH_FRAMES = 4096
"""words from which tables of a frame pay for themselves"""
_WORTH_CLASSES = 256
"""changes from which headers of classes do"""
_MANY = 0.45
"""share of changed words from which step bytes are looked at"""
_FEW_LONGER = 1 / 16
"""share of changes that may be too long for a step byte"""
_CLASSES_SAVE = 0.4
"""bits per change that classes save at such shares"""
_UNRELATED = 1 / 2
"""share of the raw size from which planes are looked at"""


def encode(
    changes: Changes, old: Words, new: FetchWords, counted: Counted, kind: WordKind, encoding: StepEncoding
) -> tuple[int, bytes]:
    """Mode and payload, never longer than the raw words of the spans. `old`: with padding."""
    most = counted.words * kind.width
    many = len(changes) >= _MANY * counted.words and counted.words >= _WORTH_FRAMES
    found = _stepwise(changes, old, new, counted, kind, encoding) if many else None
    if found is None:
        found = _changewise(changes, old, new, counted, kind, encoding)
    if found is None or len(found[1]) >= most:
        return RAW, counted.pick(new()).tobytes()
    return found


_Found = tuple[int, bytes] | None


def _stepwise(
    changes: Changes, old: Words, new: FetchWords, counted: Counted, kind: WordKind, encoding: StepEncoding
) -> _Found:
    after = counted.pick(new())
    taken = dense.step_bytes(counted.pick(old), after, kind)
    share = len(changes) / counted.words  # contexts, which shorten lengths by up to an eighth, are left out
    gap_bits = positions.expected_gap_bits(len(changes), counted.words) / counted.words
    expected = gap_bits + share * (1 + taken.length_bits)
    if encoding == "small":
        expected -= share * _CLASSES_SAVE
    if taken.longer > _FEW_LONGER * len(changes) or taken.bits > expected:
        return None
    return STEPS, dense.encode_steps(taken, after)


def _changewise(
    changes: Changes, old: Words, new: FetchWords, counted: Counted, kind: WordKind, encoding: StepEncoding
) -> _Found:
    measured = steps.measure(changes, kind)
    grouped = magnitudes.grouped(measured, kind)
    if 4 * len(changes) > counted.words and counted.words >= _WORTH_FRAMES:
        expected = positions.expected_gap_bits(len(changes), counted.words)
        expected += len(changes) + grouped.expected_bits
        planes = _planes(expected, new, counted, kind)
        if planes is not None:
            return PLANES, planes
    if encoding == "small" and kind.exponent_mask and len(changes) >= _WORTH_CLASSES:
        small = _small(changes, old, counted, kind, measured, grouped)
        if small is not None:
            return SMALL, small
    most = counted.words * kind.width
    fast = sparse.encode_fast(changes.index, counted, measured, grouped, most)
    return None if fast is None else (FAST, fast)


def _planes(expected: float, new: FetchWords, counted: Counted, kind: WordKind) -> bytes | None:
    if expected <= _UNRELATED * 8 * counted.words * kind.width:
        return None
    after = counted.pick(new())
    return None if dense.expected_plane_bits(after) >= expected else dense.encode_planes(after)


def _small(
    changes: Changes,
    old: Words,
    counted: Counted,
    kind: WordKind,
    measured: steps.Steps,
    grouped: magnitudes.Grouped,
) -> bytes | None:
    most = counted.words * kind.width
    for exact in (False, True):
        classes = positions.classify(measured, old, counted, kind, exact=exact)
        payload = sparse.encode_small(changes.index, old, counted, classes, measured, grouped, kind, most)
        if payload is not None or classes.exact:
            return payload
    return None

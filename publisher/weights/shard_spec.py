"""Rectangular pieces of tensors, and where their words stand: rules without IO."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import TensorSpec, Words


@dataclass(frozen=True, order=True)
class Box:
    """A piece of a tensor: first element and number of elements per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    @lru_cache(4096)
    def whole(shape: tuple[int, ...]) -> Box:
        return Box((0,) * len(shape), shape)

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether it is inside a tensor of this shape."""
        if not len(self.offsets) == len(self.sizes) == len(shape):
            return False
        places = zip(self.offsets, self.sizes, shape, strict=True)
        return all(low >= 0 and size >= 0 and low + size <= whole for low, size, whole in places)


@dataclass(frozen=True)
class Run:
    """`count` stretches of `length` words each, `stride` words apart, the first at word `first` of the
    tensor. In the piece's own row-major memory they follow one another from word `at`."""

    first: int
    stride: int
    count: int
    length: int
    at: int

    @property
    def words(self) -> int:
        return self.count * self.length

    def clip(self, start: int, stop: int) -> Iterator[Run]:
        """What of it is in words [start, stop) of the tensor, ascending: at most three runs."""
        low = max(0, (start - self.first - self.length) // self.stride + 1)
        high = min(self.count, -(-(stop - self.first) // self.stride))
        if low < high and self._begin(low) < start:
            yield self._stretch(low, start, stop)
            low += 1
        cut = low < high and self._begin(high - 1) + self.length > stop
        if low < high - cut:
            yield Run(
                self._begin(low), self.stride, high - cut - low, self.length, self.at + low * self.length
            )
        if cut:
            yield self._stretch(high - 1, start, stop)

    def _begin(self, number: int) -> int:
        return self.first + number * self.stride

    def _stretch(self, number: int, start: int, stop: int) -> Run:
        """Stretch `number` as far as it is in [start, stop)."""
        begin = self._begin(number)
        low, high = max(begin, start), min(begin + self.length, stop)
        return Run(low, high - low, 1, high - low, self.at + number * self.length + low - begin)

    def within(self, words: Words, origin: int) -> NDArray[np.unsignedinteger]:
        """A view [count, length] of its words in `words`, which begin at word `origin` of the tensor."""
        low = self.first - origin
        if self.count == 1:
            return words[low : low + self.length].reshape(1, self.length)
        reach = words[low : low + (self.count - 1) * self.stride + self.length]
        step = reach.itemsize
        return np.lib.stride_tricks.as_strided(
            reach, (self.count, self.length), (self.stride * step, step), writeable=words.flags.writeable
        )


def runs_of(box: Box, spec: TensorSpec) -> tuple[Run, ...]:
    """The words of a box of the tensor, ascending; one run for a box that is cut in one dimension, and for
    most others. No run for a box without elements. Of dtypes whose elements are no whole words, such as those
    of 4 bits, the box is all of the tensor."""
    if box.elements == 0:
        return ()
    if box == Box.whole(spec.shape):
        return (Run(0, spec.words, 1, spec.words, 0),)
    # a word may be less than an element: words of an element are one more dimension
    per_element = spec.words // spec.elements
    shape = (*spec.shape, per_element)
    offsets, sizes = (*box.offsets, 0), (*box.sizes, per_element)
    units = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner = _whole_from(shape, sizes, len(shape))
    # the innermost cut dimension makes the stretches, the next one outwards may still be cut evenly
    cut = max(0, inner - 1)
    length = sizes[cut] * units[cut]
    even = max(0, _whole_from(shape, sizes, cut) - 1)
    count = math.prod(sizes[even:cut])
    first = sum(offset * unit for offset, unit in zip(offsets[even:], units[even:], strict=True))
    stride = units[cut - 1] if count > 1 else length
    outer = [range(low, low + size) for low, size in zip(offsets[:even], sizes[:even], strict=True)]
    return tuple(
        Run(sum(n * unit for n, unit in zip(place, units, strict=False)) + first, stride, count, length, at)
        for at, place in zip(
            range(0, box.elements * per_element, count * length), product(*outer), strict=True
        )
    )


def _whole_from(shape: Sequence[int], sizes: Sequence[int], end: int) -> int:
    """The first dimension from which on, up to `end`, nothing is cut."""
    while end > 0 and sizes[end - 1] == shape[end - 1]:
        end -= 1
    return end

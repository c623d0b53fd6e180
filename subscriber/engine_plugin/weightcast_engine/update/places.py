"""Which elements of a checkpoint's tensor lie where in an engine's storage: arithmetic, no IO, no torch.

A *block* is a run of neighbouring elements, repeated with one step in the checkpoint's tensor and another in
the storage: a row block of a tensor (one run), a column block (a run per row). In the storage the elements of
a run may have a stride: a matrix that is transposed, or a part of one. Everything counts elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from weightcast_engine.update.elements import INTEGERS

MOST_BLOCKS = 4096
"""of one copy: what is more scattered is not patched"""
_MOST_PAIRS = 1 << 16
"""of blocks that are compared to tell whether all are disjoint"""

Key = tuple[int, int, int, int]
"""source, rows, source_step, run: which elements, wherever they lie"""


@dataclass(frozen=True)
class Block:
    source: int
    """the first element in the checkpoint's tensor"""
    target: int
    """the first element in the storage"""
    rows: int
    source_step: int
    target_step: int
    run: int
    stride: int = 1
    """of a run's elements in the storage; other than 1 only where rows are one element apart there"""

    @property
    def key(self) -> Key:
        return _key(self.source, self.rows, self.source_step, self.run)

    @property
    def place(self) -> Key:
        """Its elements in the storage, as `key` gives those of the checkpoint's tensor."""
        if self.stride != 1:
            return _key(self.target, self.run, self.stride, self.rows)
        return _key(self.target, self.rows, self.target_step, self.run)

    @property
    def elements(self) -> int:
        return self.rows * self.run

    @property
    def source_end(self) -> int:
        return self.source + (self.rows - 1) * self.source_step + self.run


def _key(start: int, rows: int, step: int, run: int) -> Key:
    return (start, 1, rows * run, rows * run) if step == run else (start, rows, step, run)


class Scattered(ValueError):
    """A copy of too many blocks in the checkpoint's order."""


@dataclass(frozen=True)
class View:
    """Of a tensor on its storage."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def blocks_of(source: View, target: View) -> tuple[Block, ...]:
    """The blocks of a copy between views of one shape. Raises Scattered for a copy that repeats elements,
    overlaps itself, or has too many blocks."""
    if 0 in source.shape:
        return ()
    dims = [
        (length, near, far)
        for length, near, far in zip(source.shape, source.strides, target.strides, strict=True)
        if length > 1
    ]
    _check_apart(dims)
    dims = _merged(sorted(dims, key=lambda dim: -dim[1]))
    run, stride = 1, 1
    if dims and dims[-1][1] == 1:
        run, _, stride = dims.pop()
    rows, near, far = dims.pop() if dims else (1, run, run)
    if math.prod(length for length, _, _ in dims) > MOST_BLOCKS or run == 1 < rows:
        raise Scattered("is laid out in another order than in the checkpoint")
    if stride != 1 and far != 1 < rows:
        raise Scattered("has its dimensions in another order than in the checkpoint")
    starts = _starts(dims, source.offset, target.offset)
    return tuple(Block(first, place, rows, near, far, run, stride) for first, place in starts)


_Dims = list[tuple[int, int, int]]
"""length, step in the source, step in the target"""


def _check_apart(dims: _Dims) -> None:
    for at in (1, 2):
        reach = 1
        for dim in sorted(dims, key=lambda dim: dim[at]):
            if dim[at] < reach:
                raise Scattered("repeats or overlaps elements")
            reach = dim[at] * (dim[0] - 1) + reach


def _merged(dims: _Dims) -> _Dims:
    """Neighbouring dimensions that are one in both."""
    found: _Dims = []
    for length, near, far in dims:
        if found and found[-1][1:] == (near * length, far * length):
            length *= found.pop()[0]
        found.append((length, near, far))
    return found


def _starts(dims: _Dims, source: int, target: int) -> Iterator[tuple[int, int]]:
    for place in product(*(range(length) for length, _, _ in dims)):
        steps = list(zip(place, dims, strict=True))
        yield (
            source + sum(at * near for at, (_, near, _) in steps),
            target + sum(at * far for at, (_, _, far) in steps),
        )


def on_whole_words(key: Key, per_word: int, elements: int) -> bool:
    """Whether no 8-byte word of the tensor is partly in the block: the last word ends with the tensor."""
    source, rows, step, run = key
    whole_run = run % per_word == 0 or (rows == 1 and _end(key) == elements)
    return source % per_word == 0 and whole_run and (rows == 1 or step % per_word == 0)


def tile(keys: Sequence[Key], elements: int) -> bool:
    """Whether these different blocks hold every element exactly once. False where that takes longer to tell
    than it is worth."""
    ends = all(_end(key) <= elements for key in keys)
    return ends and sum(rows * run for _, rows, _, run in keys) == elements and disjoint(keys)


def disjoint(keys: Iterable[Key]) -> bool:
    """False, too, where that takes longer to tell than it is worth."""
    ordered, pairs = sorted(keys), 0
    for at, one in enumerate(ordered, 1):
        while at < len(ordered) and ordered[at][0] < _end(one):
            pairs += 1
            if pairs > _MOST_PAIRS or not _apart(one, ordered[at]):
                return False
            at += 1
    return True


def _end(key: Key) -> int:
    source, rows, step, run = key
    return source + (rows - 1) * step + run


def _apart(one: Key, other: Key) -> bool:
    """`one` begins first. Blocks of one step are apart when their columns are, or their rows; so is a single
    run between the rows of a block."""
    if _end(one) <= other[0]:
        return True
    steps = {key[2] for key in (one, other) if key[1] > 1}
    if len(steps) != 1:
        return False
    [step] = steps
    left, right = one[0] % step, other[0] % step
    within = left + one[3] <= step and right + other[3] <= step
    return within and (left + one[3] <= right or right + other[3] <= left)


@dataclass(frozen=True)
class Piece:
    """A block of a checkpoint's tensor, and the live storage that holds it."""

    flat: Tensor
    """the whole storage, as integers as wide as an element"""
    block: Block
    order: Tensor | None = None
    """of a storage that is packed in units of one length: where each element of a unit is in it"""

    def places(self, elements: Tensor) -> Tensor:
        """In the storage, of elements of the tensor that are in the block."""
        block = self.block
        far = elements - block.source
        if block.rows > 1 or block.stride != 1:
            row = far // block.source_step
            far.sub_(row * block.source_step).mul_(block.stride).add_(row.mul_(block.target_step))
        return self._packed(far.add_(block.target))

    def runs(self, row: int, end: int, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the runs of rows [row, end), as a matrix."""
        if self.order is None:
            return self._view(row, end, start, stop)
        return self.flat[self._packed_runs(row, end, start, stop)]

    def put(self, row: int, end: int, words: Tensor) -> None:
        """Writes the runs of rows [row, end), given as a matrix."""
        if self.order is None:
            self._view(row, end, 0, self.block.run).copy_(words)
        else:
            places = self._packed_runs(row, end, 0, self.block.run)
            self.flat.scatter_(0, places.reshape(-1), words.reshape(-1).to(self.flat.device))

    def _view(self, row: int, end: int, start: int, stop: int) -> Tensor:
        block = self.block
        first = block.target + row * block.target_step + start * block.stride
        return self.flat.as_strided((end - row, stop - start), (block.target_step, block.stride), first)

    def _packed_runs(self, row: int, end: int, start: int, stop: int) -> Tensor:
        block, shape = self.block, (end - row, stop - start)
        rows, columns = (torch.arange(length, device=self.flat.device) for length in shape)
        first = block.target + row * block.target_step + start * block.stride
        return self._packed(rows.unsqueeze(1) * block.target_step + columns * block.stride + first)

    def _packed(self, places: Tensor) -> Tensor:
        """From the layout before packing to the one after."""
        if self.order is None:
            return places
        unit = places // len(self.order)
        within = self.order[places - unit * len(self.order)]
        return unit.mul_(len(self.order)).add_(within)


def storage(tensor: Tensor) -> int:
    """The same number for all views of one."""
    return int(tensor.untyped_storage()._cdata)


def has_memory(tensor: Tensor) -> bool:
    """Whether its elements are in a storage: not those of sparse tensors, or of placeholders.
    Types are asked, not objects: some of an engine's answer in their own way."""
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.layout is torch.strided and not tensor.is_nested


def tensors_in(value: object, depth: int = 16) -> Iterator[Tensor]:
    """In lists, tuples and dicts, and so many of these in each other."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, list | tuple | dict):
        for item in list(value.values() if isinstance(value, dict) else value):
            yield from tensors_in(item, depth - 1)


def view_of(tensor: Tensor) -> View:
    return View(tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))


def flat_of(tensor: Tensor) -> Tensor:
    """All of a tensor's storage, as integers as wide as its elements."""
    held, width = tensor.untyped_storage(), tensor.element_size()
    flat = torch.empty(0, dtype=INTEGERS[width], device=tensor.device)
    flat.set_(held, 0, (held.nbytes() // width,), (1,))
    return flat

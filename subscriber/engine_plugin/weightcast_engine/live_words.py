"""Words of live tensors: gathered, summed and written through integer views. Nothing is rounded.

Sums are over whole 8-byte words of a checkpoint's tensor; which blocks lie on such is checked by whoever
makes the map (`blocks.on_whole_words`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weightcast_engine.blocks import Block
from weightcast_engine.lanes import PIECE, Lanes, sums
from weightcast_engine.patch_file import Change
from weightcast_engine.trace import Map, Piece
from weightcast_engine.words import Form

CHECKED = 1 << 17
WRITTEN = 1 << 20
"""changes handled at once: what is needed beside patch and undo is bounded by them"""


@dataclass(frozen=True)
class Touched:
    """Sums over 8-byte words that some changes touch, before and after them."""

    changes: int
    old: Lanes
    new: Lanes


def touched(piece: Piece, change: Change) -> Iterator[Touched]:
    """In several parts, which add up."""
    start, end = change.bounds(piece.block.source, piece.block.source_end)
    while start < end:
        stop = _word_border(change, min(start + CHECKED, end))
        yield _touched(piece, change, start, stop)
        start = stop


def _word_border(change: Change, stop: int) -> int:
    """The first change from `stop` on in another 8-byte word than the one before it."""
    per_word = change.form.per_word
    word = int(change.index[stop - 1]) // per_word
    return change.bounds(0, min((word + 1) * per_word, change.form.elements))[1]


def _touched(piece: Piece, change: Change, start: int, stop: int) -> Touched:
    flat, per_word = piece.flat, change.form.per_word
    elements, words = _chosen(piece.block, change, start, stop, flat.device)
    if not len(elements):
        return Touched(stop - start, Lanes(), Lanes())
    numbers, at = torch.unique_consecutive(elements // per_word, return_inverse=True)
    wanted = numbers.unsqueeze(1) * per_word + torch.arange(per_word, device=flat.device)
    beyond = wanted >= change.form.elements
    places = _places(piece.block, wanted.clamp_(max=change.form.elements - 1))
    near = flat.gather(0, places.reshape(-1)).reshape(wanted.shape).masked_fill_(beyond, 0)
    old = sums(near.view(torch.int64).reshape(-1), numbers)
    near.view(-1).scatter_(0, at * per_word + elements % per_word, words)
    return Touched(stop - start, old, sums(near.view(torch.int64).reshape(-1), numbers))


def _chosen(
    block: Block, change: Change, start: int, stop: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Elements and new words of those changes [start, stop) that lie in the block."""
    elements, words = change.elements(start, stop, device), change.words[start:stop].to(device)
    if block.rows == 1:
        return elements, words
    inside = (elements - block.source) % block.source_step < block.run
    return elements[inside], words[inside]


def _places(block: Block, elements: Tensor) -> Tensor:
    """In the storage, of elements that lie in the block."""
    if block.rows == 1:
        return elements + (block.target - block.source)
    far = elements - block.source
    row = far // block.source_step
    return far.sub_(row * block.source_step).add_(row.mul_(block.target_step)).add_(block.target)


@dataclass
class Undo:
    """What lay in the places that an update wrote: as many words as changed."""

    _log: list[tuple[Piece, Change, int, int, Tensor]] = field(default_factory=list)

    def write(self, found: Map, changes: Iterable[Change]) -> None:
        for change in changes:
            for piece in found.pieces[change.name]:
                self._write(piece, change)

    def _write(self, piece: Piece, change: Change) -> None:
        first, end = change.bounds(piece.block.source, piece.block.source_end)
        for start in range(first, end, WRITTEN):
            stop = min(start + WRITTEN, end)
            elements, words = _chosen(piece.block, change, start, stop, piece.flat.device)
            places = _places(piece.block, elements)
            # noted before the write: putting them back is right whether or not it was carried out
            self._log.append((piece, change, start, stop, piece.flat.gather(0, places)))
            piece.flat.scatter_(0, places, words)

    def roll_back(self) -> None:
        """May be repeated."""
        for piece, change, start, stop, old in reversed(self._log):
            elements, _ = _chosen(piece.block, change, start, stop, piece.flat.device)
            piece.flat.scatter_(0, _places(piece.block, elements), old)


def resident(piece: Piece, form: Form) -> Iterator[tuple[int, Lanes]]:
    """8-byte words and sums of all that lies in a piece, in several parts which add up."""
    block, per_word = piece.block, form.per_word
    if block.rows == 1:
        for start in range(0, block.run, PIECE * per_word):
            yield _summed(piece, form, 0, 1, start, min(start + PIECE * per_word, block.run))
        return
    rows = max(1, PIECE * per_word // block.run)
    for row in range(0, block.rows, rows):
        yield _summed(piece, form, row, min(row + rows, block.rows), 0, block.run)


def _summed(piece: Piece, form: Form, row: int, end: int, start: int, stop: int) -> tuple[int, Lanes]:
    """Elements [start, stop) of the runs of rows [row, end)."""
    block, per_word = piece.block, form.per_word
    count = -(-(stop - start) // per_word)
    words = torch.zeros(end - row, count * per_word, dtype=piece.flat.dtype, device=piece.flat.device)
    seen = piece.flat.as_strided(
        (end - row, stop - start), (block.target_step, 1), block.target + row * block.target_step + start
    )
    words[:, : stop - start] = seen
    first = torch.arange(row, end, device=words.device) * block.source_step + (block.source + start)
    numbers = (first // per_word).unsqueeze(1) + torch.arange(count, device=words.device)
    return numbers.numel(), sums(words.view(torch.int64).reshape(-1), numbers.reshape(-1))

"""Words of live tensors: gathered, summed and written through integer views. Nothing is rounded.

Sums are over whole 8-byte words of a checkpoint's tensor; which blocks lie on such is checked by whoever
makes the map (`blocks.on_whole_words`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weightcast_engine.update.checksums import PIECE, Lanes, sums
from weightcast_engine.update.elements import Form
from weightcast_engine.update.patch_file import Change
from weightcast_engine.update.places import Block, Piece

CHECKED = 1 << 17
"""changes handled at once; bounds the memory besides patch and update"""
SHORT = 1 << 14
"""changes from which a part is written on its own"""
PREPARED = 2 << 30
"""bytes on a rank's device that an update may take before the pause; what is beyond is prepared in it"""


@dataclass(frozen=True)
class _Ready:
    """Places in a storage, each once, the words that belong there, and those that lay there."""

    flat: Tensor
    places: Tensor
    words: Tensor
    old: Tensor

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.places, self.words, self.old))

    def write(self) -> None:
        _put(self.flat, self.places, self.words)

    def take_back(self) -> None:
        _put(self.flat, self.places, self.old)


def _put(flat: Tensor, places: Tensor, words: Tensor) -> None:
    """On a processor one thread carries `scatter_` of one dimension out, all of them `index_copy_`, which is
    slower with one."""
    if flat.is_cpu and torch.get_num_threads() > 1:
        flat.index_copy_(0, places, words)
    else:
        flat.scatter_(0, places, words)


def _joined(parts: list[_Ready]) -> _Ready:
    """Parts of one storage, in which they lie apart."""
    columns = zip(*((part.places, part.words, part.old) for part in parts), strict=True)
    return parts[0] if len(parts) == 1 else _Ready(parts[0].flat, *map(torch.cat, columns))


@dataclass(frozen=True)
class _Left:
    """Changes [start, stop) that lie in a piece, not looked up yet."""

    piece: Piece
    change: Change
    start: int
    stop: int

    def ready(self) -> _Ready:
        flat = self.piece.flat
        elements, words = _chosen(self.piece.block, self.change, self.start, self.stop, flat.device)
        places = self.piece.places(elements)
        return _Ready(flat, places, words, flat.gather(0, places))


class LiveUpdate:
    """All that a patch writes on a rank: looked up while the engine serves, so that the pause has little
    left to do but to write it."""

    def __init__(self, budget: int = PREPARED) -> None:
        self._parts: list[_Ready | _Left] = []
        self._short: dict[int, list[_Ready]] = {}
        """by the address of their storage"""
        self._short_changes = Counter[int]()
        self._left = budget
        self._written = 0

    def touched(self, piece: Piece, change: Change) -> Iterator[tuple[int, Sequence[int]]]:
        """How many changes, and the sums over the 8-byte words that they touch, before and after them: in
        several parts, which add up. Nothing is written."""
        start, end = change.bounds(piece.block.source, piece.block.source_end)
        while start < end:
            stop = _word_border(change, min(start + CHECKED, end))
            yield stop - start, self._touched(_Left(piece, change, start, stop))
            start = stop

    def _touched(self, part: _Left) -> Sequence[int]:
        elements, words = _chosen(
            part.piece.block, part.change, part.start, part.stop, part.piece.flat.device
        )
        if not len(elements):
            return (*Lanes(), *Lanes())
        near, numbers, at = _neighbours(part.piece, part.change.form, elements)
        lay = near.view(-1).gather(0, at)
        self._keep(part, _Ready(part.piece.flat, part.piece.places(elements), words, lay))
        old = sums(near.view(torch.int64).reshape(-1), numbers)
        near.view(-1).scatter_(0, at, words)
        return (*old, *sums(near.view(torch.int64).reshape(-1), numbers))

    def _keep(self, part: _Left, ready: _Ready) -> None:
        self._left -= ready.nbytes
        if self._left < 0 or len(ready.places) >= SHORT:
            self._parts.append(ready if self._left >= 0 else part)
            return
        storage = ready.flat.data_ptr()
        self._short.setdefault(storage, []).append(ready)
        self._short_changes[storage] += len(ready.places)
        if self._short_changes[storage] >= CHECKED:
            self._parts.append(_joined(self._short.pop(storage)))
            del self._short_changes[storage]

    def join(self) -> None:
        """Short parts of one storage become one: experts lie side by side in a parameter, and each write of a
        pause costs microseconds, however little it writes."""
        self._parts += map(_joined, self._short.values())
        self._short.clear()
        self._short_changes.clear()

    def write(self) -> None:
        """Once; only while the words are those that `touched` saw."""
        self.join()
        for number, part in enumerate(self._parts):
            ready = self._parts[number] = part.ready() if isinstance(part, _Left) else part
            # counted before the write: taking it back is right whether or not it was carried out
            self._written = number + 1
            ready.write()

    def take_back(self) -> None:
        """What was written. May be repeated."""
        for part in reversed(self._parts[: self._written]):
            if isinstance(part, _Ready):
                part.take_back()


def _word_border(change: Change, stop: int) -> int:
    """The first change from `stop` on in another 8-byte word than the one before it."""
    per_word = change.form.per_word
    word = int(change.index[stop - 1]) // per_word
    return change.bounds(0, min((word + 1) * per_word, change.form.elements))[1]


def _neighbours(piece: Piece, form: Form, elements: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The 8-byte words around these elements as [words, per word], their numbers, and where in all of them
    the elements lie."""
    flat, per_word = piece.flat, form.per_word
    numbers, row = torch.unique_consecutive(elements // per_word, return_inverse=True)
    wanted = numbers.unsqueeze(1) * per_word + torch.arange(per_word, device=flat.device)
    beyond = wanted >= form.elements
    places = piece.places(wanted.clamp_(max=form.elements - 1))
    near = flat.gather(0, places.reshape(-1)).reshape(wanted.shape).masked_fill_(beyond, 0)
    return near, numbers, row * per_word + elements % per_word


def _chosen(
    block: Block, change: Change, start: int, stop: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Elements and new words of those changes [start, stop) that lie in the block."""
    elements, words = change.elements(start, stop, device), change.words[start:stop].to(device)
    if block.key[1] == 1:
        return elements, words
    inside = (elements - block.source) % block.source_step < block.run
    return elements[inside], words[inside]


def resident(piece: Piece, form: Form) -> Iterator[tuple[int, Lanes]]:
    """8-byte words and sums of a whole piece, in several parts which add up."""
    block, per_word = piece.block, form.per_word
    if block.rows == 1:
        for start in range(0, block.run, PIECE * per_word):
            yield _summed(piece, form, 0, 1, start, min(start + PIECE * per_word, block.run))
        return
    # words may be over the end of a row that the next one follows
    rows = max(1, PIECE // block.run) * per_word
    for row in range(0, block.rows, rows):
        yield _summed(piece, form, row, min(row + rows, block.rows), 0, block.run)


def fill(piece: Piece, words: Tensor) -> None:
    """`words`: all elements of the checkpoint's tensor, as integers."""
    block = piece.block
    rows = max(1, PIECE // block.run)
    for row in range(0, block.rows, rows):
        end = min(row + rows, block.rows)
        first = words.storage_offset() + block.source + row * block.source_step
        piece.put(row, end, words.as_strided((end - row, block.run), (block.source_step, 1), first))


def _summed(piece: Piece, form: Form, row: int, end: int, start: int, stop: int) -> tuple[int, Lanes]:
    """Elements [start, stop) of the runs of rows [row, end)."""
    block, per_word = piece.block, form.per_word
    seen = piece.runs(row, end, start, stop)
    if block.source_step == block.run:
        seen = seen.reshape(1, -1)
    count = -(-seen.shape[1] // per_word)
    words = torch.zeros(len(seen), count * per_word, dtype=seen.dtype, device=seen.device)
    words[:, : seen.shape[1]] = seen
    first = torch.arange(row, row + len(seen), device=words.device) * block.source_step
    numbers = (first.add_(block.source + start) // per_word).unsqueeze(1)
    numbers = numbers + torch.arange(count, device=words.device)
    return numbers.numel(), sums(words.view(torch.int64).reshape(-1), numbers.reshape(-1))

"""What a loader makes of loaded weights: copies of them, which the engine computes with too.

Latent attention keeps the parts of `kv_b_proj` turned for its kernels (SGLang: `w_kc`, `w_vc`) and copies
them again after each load. A copy that only rearranges elements is a *mirror*: a patch writes the same
elements there, and both must always be equal. A weight of which anything else is computed can't be patched.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from weightcast_engine.update.places import (
    Block,
    Key,
    Piece,
    Scattered,
    View,
    blocks_of,
    flat_of,
    has_memory,
    storage,
    tile,
    view_of,
)

_EMPTY = frozenset({"empty", "zeros", "ones", "full", "empty_strided"})
"""calls that make memory of nothing; of what else comes from nothing, others may know the memory too"""
_COPIES = frozenset({"contiguous", "clone"})
"""calls that copy a tensor as it is"""


@dataclass(frozen=True)
class Mirror:
    """`live` holds the elements that `source` sees in the storage of `weight`."""

    live: Tensor
    weight: Tensor
    source: View
    loads: int
    """how many copies into weights had come when `source` was read"""

    @property
    def place(self) -> tuple[int, View, int, View]:
        return storage(self.live), view_of(self.live), storage(self.weight), self.source

    @property
    def is_exact(self) -> bool:
        seen = flat_of(self.weight).as_strided(self.source.shape, self.source.strides, self.source.offset)
        held = view_of(self.live)
        kept = flat_of(self.live).as_strided(held.shape, held.strides, held.offset)
        return bool(torch.equal(seen, kept))


class Storages:
    """Of the tensors that a run of a loader makes: which weights each is computed from, and which lack what a
    load would have put there, as a tensor on `meta` always does. `kept`: those of the model, weights and what
    else its modules keep."""

    def __init__(self, kept: Collection[int]) -> None:
        self._kept = kept
        self._made_of: dict[int, frozenset[int]] = {}
        self._copies: dict[int, Mirror] = {}
        """by storage, of the last copy: one is enough, and bounds the memory"""
        self._own: dict[int, StorageWeakRef] = {}
        """the references keep the numbers from being given again"""
        self._unfilled: dict[int, StorageWeakRef] = {}
        self._loads = 0

    def loaded(self) -> int:
        """The number of a copy into a weight, from 1."""
        self._loads += 1
        return self._loads

    def of(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        """The weights behind these."""
        found = frozenset[int]()
        for tensor in tensors:
            key = storage(tensor)
            found |= {key} if key in self._kept else self._made_of.get(key, frozenset())
        return found

    def came(self, call: str, given: Sequence[Tensor], results: Iterable[Tensor]) -> None:
        """`results` were computed from `given`."""
        lie = {storage(tensor) for tensor in given}
        new = {storage(result): result for result in results}
        new = {key: result for key, result in new.items() if key not in lie and key not in self._kept}
        if not new:
            return
        made_of, unfilled = self.of(given), self.is_unfilled(given)
        for key, result in new.items():
            self._come_from(key, made_of)
            if made_of and call in _COPIES and result.is_contiguous():
                self._copies = {key: Mirror(result, given[0], view_of(given[0]), self._loads)}
            if given or call in _EMPTY:
                self._own[key] = StorageWeakRef(result.untyped_storage())
                if unfilled or result.is_meta:
                    self._unfilled[key] = self._own[key]

    def changed(self, tensor: Tensor, others: Iterable[Tensor]) -> None:
        """`tensor`, none of the weights, has something of `others` in it now."""
        self._come_from(storage(tensor), self.of([tensor, *others]))

    def _come_from(self, key: int, made_of: frozenset[int]) -> None:
        self._made_of.pop(key, None)
        self._copies.pop(key, None)
        if made_of:
            self._made_of[key] = made_of

    def takes(self, written: Iterable[Tensor], given: Iterable[Tensor]) -> bool:
        """Whether a call that writes into these may be carried out. What stays unwritten is unfilled."""
        keys = {storage(tensor) for tensor in written}
        if keys <= self._own.keys() and not self.is_unfilled(given):
            return True
        self._unfilled |= {key: self._own[key] for key in keys & self._own.keys()}
        return False

    def is_unfilled(self, tensors: Iterable[Tensor]) -> bool:
        return any(tensor.is_meta or storage(tensor) in self._unfilled for tensor in tensors)

    def unfilled(self) -> list[StorageWeakRef]:
        return list(self._unfilled.values())

    def outlived(self) -> frozenset[int]:
        """Weights with a computed value that outlives the load, in none of the model's storages."""
        self._copies.clear()
        if not self._lasting():
            return frozenset()
        gc.collect()  # what only refers to itself is nobody's
        return frozenset[int]().union(*self._lasting())

    def _lasting(self) -> list[frozenset[int]]:
        if not self._made_of:
            return []
        return [self._made_of[key] for key in map(storage, living_tensors()) if key in self._made_of]

    def mirror(self, live: Tensor, tensor: Tensor) -> Mirror | None:
        """Of a copy of `tensor` into `live`; None where it holds anything but elements of one weight."""
        if storage(tensor) in self._kept:
            return Mirror(live, tensor, view_of(tensor), self._loads)
        copied = self._copies.get(storage(tensor))
        if copied is None or copied.weight.dtype != tensor.dtype:
            return None
        if storage(copied.weight) not in self._kept:
            return None
        found = _through(view_of(tensor), view_of(copied.live), copied.source)
        return None if found is None else replace(copied, live=live, source=found)


def living_tensors() -> list[Tensor]:
    """Of this process. Engines hide what they were started with from the collector."""
    frozen = gc.get_freeze_count()
    if frozen:
        gc.unfreeze()
    try:
        return [one for one in gc.get_objects() if issubclass(type(one), Tensor) and has_memory(one)]
    finally:
        if frozen:
            gc.freeze()


def _through(seen: View, copy: View, original: View) -> View | None:
    """`seen`, of all of a contiguous `copy` with its dimensions in any order, as a view of the `original`'s
    storage."""
    left = [
        (length, step, far)
        for length, step, far in zip(copy.shape, copy.strides, original.strides, strict=True)
        if length > 1
    ]
    strides: list[int] = []
    for length, step in zip(seen.shape, seen.strides, strict=True):
        dim = next((dim for dim in left if dim[:2] == (length, step)), (length, step, 0))
        strides.append(dim[2])
        if dim in left:
            left.remove(dim)
    return None if left else View(original.offset, seen.shape, tuple(strides))


def with_mirrors(pieces: Sequence[Piece], mirrors: Sequence[Mirror]) -> Iterator[tuple[Piece, ...]]:
    """For each of these pieces of one storage, itself, or where it is mirrored, its blocks and their mirrors.
    Raises Scattered for mirrors that hold anything but the elements of these pieces, or not all of one."""
    beside: dict[int, list[Piece]] = {number: [] for number in range(len(pieces))}
    for mirror in mirrors:
        flat = flat_of(mirror.live)
        if any(piece.flat.dtype != flat.dtype for piece in pieces):
            raise Scattered("is copied elsewhere as a tensor of another width")
        if not mirror.is_exact:
            raise Scattered("is not what the model keeps as its copy")
        for block in blocks_of(mirror.source, view_of(mirror.live)):
            number = next((n for n, piece in enumerate(pieces) if _holds(piece.block, block)), None)
            if number is None:
                raise Scattered("is copied elsewhere with other values")
            own = pieces[number].block
            beside[number].append(Piece(flat, replace(block, source=block.source - own.target + own.source)))
    for number, piece in enumerate(pieces):
        yield (piece,) if not beside[number] else (*_cut(piece, beside[number]), *beside[number])


def _holds(block: Block, other: Block) -> bool:
    """Whether the elements of a storage that `other` counts from lie in `block`, and all of it is one run."""
    plain = block.rows == 1 and block.stride == 1
    return plain and block.target <= other.source and other.source_end <= block.target + block.run


def _cut(piece: Piece, beside: Iterable[Piece]) -> Iterator[Piece]:
    """The blocks of a piece that are mirrored, and what is left of it between them."""
    own = piece.block
    keys = _with_gaps(sorted({other.block.key for other in beside}), own.source, own.source + own.run)
    if not tile([(source - own.source, rows, step, run) for source, rows, step, run in keys], own.run):
        raise Scattered("is copied elsewhere in part")
    for source, rows, step, run in keys:
        yield Piece(piece.flat, Block(source, source - own.source + own.target, rows, step, step, run))


def _with_gaps(keys: Sequence[Key], start: int, end: int) -> list[Key]:
    """Between blocks of one run each."""
    found, at = list[Key](), start
    for key in keys:
        source, rows, _, run = key
        if rows > 1:
            return list(keys)
        if at < source:
            found.append((at, 1, source - at, source - at))
        found.append(key)
        at = source + run
    return found if at >= end else [*found, (at, 1, end - at, end - at)]


def is_whole(pieces: Sequence[Piece]) -> bool:
    """Whether mirrors hold every element of their storage exactly once."""
    return tile([piece.block.place for piece in pieces], pieces[0].flat.numel())

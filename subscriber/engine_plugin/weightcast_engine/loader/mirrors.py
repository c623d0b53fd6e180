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


class Origins:
    """The weights behind the tensors that a loader computes. `weights`: storages of these, and of
    what else a model keeps."""

    def __init__(self, weights: Collection[int]) -> None:
        self._weights = weights
        self._made_of: dict[int, frozenset[int]] = {}
        self._copies: dict[int, Mirror] = {}
        """by storage, of the last copy: one is enough, and bounds the memory"""
        self.loads = 0
        """copies into weights until now"""

    def of(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        found = frozenset[int]()
        for tensor in tensors:
            key = storage(tensor)
            found |= {key} if key in self._weights else self._made_of.get(key, frozenset())
        return found

    def made(self, call: str, given: Sequence[Tensor], results: Iterable[Tensor]) -> None:
        """`results` were computed from `given`."""
        lie = {storage(tensor) for tensor in given}
        for result in results:
            key = storage(result)
            if key in lie or key in self._weights:
                continue
            self._forget(key)
            made_of = self.of(given)
            if made_of:
                self._made_of[key] = made_of
                if call in _COPIES and _same_form(result, given[0]) and result.is_contiguous():
                    self._copies = {key: Mirror(result, given[0], view_of(given[0]), self.loads)}

    def changed(self, tensor: Tensor, others: Iterable[Tensor]) -> None:
        """`tensor`, none of the weights, has something of `others` in it now."""
        key = storage(tensor)
        made_of = self.of([tensor, *others])
        self._forget(key)
        if made_of:
            self._made_of[key] = made_of

    def outlived(self, kept: Collection[int]) -> frozenset[int]:
        """Weights with a computed value that outlives the load, in none of the storages `kept`."""
        self._copies.clear()
        if not self._lasting(kept):
            return frozenset()
        gc.collect()  # what only refers to itself is nobody's
        return frozenset[int]().union(*self._lasting(kept))

    def _lasting(self, kept: Collection[int]) -> list[frozenset[int]]:
        made = {key: made_of for key, made_of in self._made_of.items() if key not in kept}
        if not made:
            return []
        return [made[key] for key in map(storage, living_tensors()) if key in made]

    def _forget(self, key: int) -> None:
        self._made_of.pop(key, None)
        self._copies.pop(key, None)

    def mirror(self, live: Tensor, tensor: Tensor) -> Mirror | None:
        """Of a copy of `tensor` into `live`; None where it holds anything but elements of one weight."""
        if storage(tensor) in self._weights:
            return Mirror(live, tensor, view_of(tensor), self.loads)
        copied = self._copies.get(storage(tensor))
        if copied is None or copied.weight.dtype != tensor.dtype:
            return None
        if storage(copied.weight) not in self._weights:
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


def _same_form(one: Tensor, other: Tensor) -> bool:
    return bool(one.dtype == other.dtype and one.shape == other.shape)


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
    plain = block.rows == 1 and not block.columns
    return plain and block.target <= other.source and other.source_end <= block.target + block.run


def _cut(piece: Piece, beside: Iterable[Piece]) -> Iterator[Piece]:
    """The blocks of a piece that are mirrored, and what is left of it between them."""
    own = piece.block
    keys = _with_gaps(sorted({other.block.key for other in beside}), own.source, own.source + own.run)
    if not tile([_moved(key, -own.source) for key in keys], own.run):
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


def _moved(key: Key, by: int) -> Key:
    source, rows, step, run = key
    return (source + by, rows, step, run)


def is_whole(pieces: Sequence[Piece]) -> bool:
    """Whether mirrors hold every element of their storage exactly once."""
    return tile([piece.block.place for piece in pieces], pieces[0].flat.numel())

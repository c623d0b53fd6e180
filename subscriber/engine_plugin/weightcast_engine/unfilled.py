"""What a loader makes while it is looked at. Weights go nowhere then, so that what is made to hold them stays
empty: nobody may find it afterwards."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Sequence

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from weightcast_engine.piece import storage

_EMPTY = frozenset({"empty", "zeros", "ones", "full", "empty_strided"})
"""calls that make memory of nothing; of what else comes from nothing, others may know the memory too"""


class Made:
    """Storages of one run. An unfilled one lacks what a load would have put there, a tensor on `meta` always.
    `kept`: those of the model."""

    def __init__(self, kept: Collection[int]) -> None:
        self._kept = kept
        self._own: dict[int, StorageWeakRef] = {}
        """the references keep the numbers from being given again"""
        self._unfilled: dict[int, StorageWeakRef] = {}

    def came(self, call: str, given: Sequence[Tensor], results: Iterable[Tensor]) -> None:
        """`results` were computed from `given`."""
        if not given and call not in _EMPTY:
            return
        lie = {storage(tensor) for tensor in given}
        unfilled = self.is_unfilled(given)
        for result in results:
            key = storage(result)
            if key not in lie and key not in self._kept:
                self._own[key] = StorageWeakRef(result.untyped_storage())
                if unfilled or result.is_meta:
                    self._unfilled[key] = self._own[key]

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


def are_left(references: Iterable[StorageWeakRef]) -> bool:
    """Whether any of these storages outlived the run."""
    if all(one.expired() for one in references):
        return False
    gc.collect()  # what only refers to itself is nobody's
    return not all(one.expired() for one in references)

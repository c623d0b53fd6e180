"""Several ranks in one process, one thread each, that meet in a real channel; and ways to cut a tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from core_cases import Model
from opening import open_publisher
from publisher_cases import Place, as_numpy

from weightcast.publisher import Handle, Publisher, PublishReport, Shard

Array = np.ndarray[Any, Any]
Given = Mapping[str, Any]
Cut = Callable[[Array, int, int], Any]
"""What rank `rank` of `world` gives of an array"""


def borders(size: int, world: int) -> list[int]:
    """As torch cuts: all pieces of the first one's size, as far as they reach."""
    piece = -(-size // world)
    return [min(size, rank * piece) for rank in range(world + 1)]


def along(dim: int) -> Cut:
    def cut(array: Array, rank: int, world: int) -> Any:
        if array.ndim <= dim:
            return array
        low, high = borders(array.shape[dim], world)[rank : rank + 2]
        place = tuple(slice(low, high) if n == dim else slice(None) for n in range(array.ndim))
        offsets = tuple(low if n == dim else 0 for n in range(array.ndim))
        return Shard(array[place].copy(), offsets, array.shape)

    return cut


def grid_of(rows: int, columns: int) -> Cut:
    """A mesh of two dimensions: dimension 0 by rows, dimension 1 by columns."""

    def cut(array: Array, rank: int, world: int) -> Any:
        if array.ndim < 2:
            return array
        row, column = divmod(rank, columns)
        low, high = borders(array.shape[0], rows)[row : row + 2]
        left, right = borders(array.shape[1], columns)[column : column + 2]
        piece = array[low:high, left:right].copy()
        return Shard(piece, (low, left, *(0,) * (array.ndim - 2)), array.shape)

    return cut


def replicated(cut: Cut, copies: int) -> Cut:
    """Groups of ranks that hold the same: as hybrid sharding does."""
    return lambda array, rank, world: cut(array, rank % (world // copies), world // copies)


def cut_model(model: Model, cut: Cut, world: int) -> dict[int, Given]:
    return {
        rank: {name: cut(as_numpy(one), rank, world) for name, one in model.items()} for rank in range(world)
    }


class World:
    def __init__(self, publishers: Sequence[Publisher], submits: bool) -> None:
        self._publishers, self._submits = publishers, submits

    def publish(self, given: Mapping[int, Any], step: int) -> list[PublishReport | Exception]:
        """What the calls of the ranks that give something came to, in rank order. A path is that of a
        checkpoint directory."""

        def one(rank: int) -> PublishReport | Exception:
            try:
                if isinstance(given[rank], Path):
                    return self._publishers[rank].publish_checkpoint(given[rank], step=step)
                if self._submits:
                    return self._publishers[rank].submit(given[rank], step=step).result(600)
                return self._publishers[rank].publish(given[rank], step=step)
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(given)) as pool:
            return list(pool.map(one, sorted(given)))

    def submit(self, rank: int, given: Any, **options: Any) -> Handle:
        return self._publishers[rank].submit(given, **options)


@contextlib.contextmanager
def world_of(
    place: Place, size: int, *, separate: bool = False, submits: bool = False, **options: Any
) -> Iterator[World]:
    """`separate`: each rank has a local checkpoint of its own, as on machines of their own. `submits`: from
    the second publication on ranks compare before they meet."""
    options = {"base": place.base, "deadline_seconds": 600.0, **options}
    with contextlib.ExitStack() as stack:
        publishers = [
            stack.enter_context(
                open_publisher(
                    place.channel,
                    local=place.root / f"pub-{rank if separate else 0}",
                    rank=rank,
                    world_size=size,
                    **options,
                )
            )
            for rank in range(size)
        ]
        yield World(publishers, submits)


def published(outcomes: Sequence[PublishReport | Exception]) -> int:
    """The version that all ranks report."""
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    (version,) = {one.version for one in outcomes if isinstance(one, PublishReport)}
    return version

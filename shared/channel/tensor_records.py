"""What an index says of its tensors, in columns: there may be several 100,000."""

from __future__ import annotations

from collections.abc import Iterator, KeysView, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.digest.lanes import Lanes, LanesArray
from weightcast.shared.words import TensorTable


class TensorRecord(NamedTuple):
    """A changed tensor (in an anchor: every tensor): raw lanes of its new bytes, changed elements."""

    lanes: Lanes
    changed: int


@dataclass(frozen=True, eq=False)
class TensorRecords(Mapping[str, TensorRecord]):
    """Records by name. `names` are unique; `lanes`: uint64[n, 2]; `changed`: int64[n]."""

    names: tuple[str, ...]
    lanes: LanesArray
    changed: NDArray[np.int64]

    @classmethod
    def numbered(
        cls, table: TensorTable, numbers: NDArray[np.int64], lanes: LanesArray, changed: NDArray[np.int64]
    ) -> TensorRecords:
        """Of some tensors of a table. `lanes`, `changed`: of all of its tensors."""
        names = tuple(table[number].name for number in numbers.tolist())
        return cls(names, lanes[numbers], changed[numbers])

    @cached_property
    def _rows(self) -> Mapping[str, int]:
        return {name: row for row, name in enumerate(self.names)}

    def numbers(self, table: TensorTable) -> NDArray[np.int64]:
        """int64[n]: of each its number in the table. Raises KeyError."""
        return np.fromiter(map(table.numbers.__getitem__, self.names), np.int64, len(self.names))

    def put(self, table: TensorTable, lanes: LanesArray) -> LanesArray:
        """`lanes`, of all tensors of the table, with these in their places."""
        lanes[self.numbers(table)] = self.lanes
        return lanes

    def __getitem__(self, name: str) -> TensorRecord:
        row = self._rows[name]
        return TensorRecord(Lanes(*self.lanes[row].tolist()), int(self.changed[row]))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def keys(self) -> KeysView[str]:
        return self._rows.keys()

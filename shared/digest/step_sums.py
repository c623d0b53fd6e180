"""What the step of a version does to the lanes of tensors, in arrays: there may be several 100,000."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.digest.lanes import LanesArray
from weightcast.shared.digest.touched import SpanSums


class StepSums:
    """`lanes`: uint64[tensors, 4], columns as in `SpanSums`; `words`: int64[tensors], changed ones."""

    def __init__(self, tensors: int) -> None:
        self.lanes = np.zeros((tensors, 4), np.uint64)
        self.words = np.zeros(tensors, np.int64)

    def add(self, sums: SpanSums) -> None:
        """One chunk's. A tensor may have several spans in it."""
        if len(sums) == 1:
            # what most chunks have; numpy's way for several takes longer than the rest
            tensor = int(sums.tensors[0])
            self.lanes[tensor] += sums.lanes[0]
            self.words[tensor] += sums.changed[0]
            return
        np.add.at(self.lanes, sums.tensors, sums.lanes)
        np.add.at(self.words, sums.tensors, sums.changed)

    @property
    def changed(self) -> NDArray[np.int64]:
        """Numbers of the tensors with changes, ascending."""
        return np.flatnonzero(self.words)

    def after(self, lanes: LanesArray) -> LanesArray:
        """Lanes of every tensor, if they were `lanes` before."""
        return lanes - self.lanes[:, :2] + self.lanes[:, 2:]

"""A trainer's masters in the precision of the run: fp32 against a bf16 base, cast when they are read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weightcast.publisher.api import Publisher
from weightcast.publisher.channel_init import ties_of
from weightcast.publisher.weights.given import (
    CastTensor,
    RawTensor,
    dtype_of,
    in_torch,
    pairs_of,
    torch_dtype,
)
from weightcast.publisher.weights.match import resolve
from weightcast.publisher.weights.precision import STORED, rounded, rounds
from weightcast.shared.base.elements import TensorTable
from weightcast.shared.base.errors import Refused
from weightcast.shared.checkpoint.update.sources import open_base


@dataclass(frozen=True)
class CastWeights:
    """Pairs for `publish` and `submit`. `tensors` and `elements`: how many are rounded to another dtype. A
    tensor is cast when its turn comes: at most two casts are in memory at a time."""

    pairs: tuple[tuple[str, Any], ...]
    tensors: int
    elements: int

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)


def cast_like(
    base: str | Path | Publisher, named_tensors: Iterable[tuple[str, Any]] | Mapping[str, Any]
) -> CastWeights:
    """Rounds floating-point tensors to the dtypes of the run: to the nearest, ties to even (F64 via F32).
    Tensors of the right dtype, and names that the run does not know, pass unchanged.

    Args:
        base: The publisher, or the base's checkpoint directory.
        named_tensors: As in `Publisher.publish`.

    Raises:
        Refused: Rounding cannot convert a tensor (integers, 8 bits).
    """
    table, ties = _run_of(base)
    pairs = list(pairs_of(named_tensors))
    names = resolve([name for name, _ in dict(pairs).items()], {*table.numbers, *ties}).run_names
    cast, tensors, elements = [], 0, 0
    for name, tensor in pairs:
        run_name = ties.get(names[name], names[name])
        number = table.numbers.get(run_name)
        wanted = None if number is None else table[number].dtype
        has = dtype_of(name, tensor)
        if wanted is None or wanted == has:
            cast.append((name, tensor))
            continue
        if not rounds(has, wanted):
            raise Refused(
                f"{name} is {has}, but the run has {wanted}: rounding cannot convert it",
                remedy="quantise before publishing (docs/quantised.md)",
            )
        cast.append((name, CastTensor(tensor, wanted, _converted)))
        tensors, elements = tensors + 1, elements + math.prod(tensor.shape)
    return CastWeights(tuple(cast), tensors, elements)


def _run_of(base: str | Path | Publisher) -> tuple[TensorTable, Mapping[str, str]]:
    if isinstance(base, Publisher):
        file, known = base.run
        return known.table, file.aliases
    checkpoint = open_base(Path(base))
    return checkpoint.table, ties_of(Path(base), checkpoint)


def _converted(tensor: Any, dtype: str) -> Any:
    if not in_torch(tensor):
        found = dtype_of("", tensor)
        flat = tensor.flat if isinstance(tensor, RawTensor) else np.ascontiguousarray(tensor).reshape(-1)
        return RawTensor(dtype, tuple(tensor.shape), rounded(flat.view(STORED[found]), found, dtype))
    return tensor.detach().to(torch_dtype(dtype))

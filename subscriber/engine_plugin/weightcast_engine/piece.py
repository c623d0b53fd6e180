"""Live storages, and which part of a checkpoint's tensor lies in one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weightcast_engine.blocks import Block, View
from weightcast_engine.words import INTEGERS


@dataclass(frozen=True)
class Piece:
    """A block of a checkpoint's tensor, and the live storage in which it lies."""

    flat: Tensor
    """the whole storage, as integers as wide as an element"""
    block: Block


def storage(tensor: Tensor) -> int:
    """The same number for all views of one."""
    return int(tensor.untyped_storage()._cdata)


def has_memory(tensor: Tensor) -> bool:
    """Whether its elements lie in a storage: not those of sparse ones, or of what only stands for others.
    Types are asked, not objects: some of an engine's answer in their own way."""
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.layout is torch.strided and not tensor.is_nested


def view_of(tensor: Tensor) -> View:
    return View(tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))


def flat_of(tensor: Tensor) -> Tensor:
    """All of a tensor's storage, as integers as wide as its elements."""
    held, width = tensor.untyped_storage(), tensor.element_size()
    flat = torch.empty(0, dtype=INTEGERS[width], device=tensor.device)
    flat.set_(held, 0, (held.nbytes() // width,), (1,))
    return flat

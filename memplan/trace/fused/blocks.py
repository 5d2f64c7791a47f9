"""Blocks of bytes, and strided views of them, which stand for tensors while Inductor's code is replayed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree


@dataclass(slots=True, eq=False, kw_only=True)
class Block:
    """The bytes behind one or more of Inductor's buffers, which share them in place or as views.

    `given`: the step's caller or model owns them. `constant`: the tensor, if the generated code holds it. `node`: the
    node of the graph that they hold, "" if none is known. `touched`: a kernel has used them already.
    """

    name: str
    device: torch.device
    nbytes: int
    given: bool = False
    constant: torch.Tensor | None = None
    node: str = ""
    touched: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockView:
    """The stand-in for a tensor: a strided view of a block."""

    block: Block
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def view(self, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> BlockView:
        """Return what `reinterpret_tensor` does: another view, `offset` elements behind this one."""
        return replace(self, shape=tuple(shape), strides=tuple(strides), offset=self.offset + offset)


def piece_of(block: Block, tensor: torch.Tensor) -> BlockView:
    """Return the piece that stands for a real or fake tensor whose bytes are `block`."""
    return BlockView(
        block=block,
        dtype=tensor.dtype,
        shape=tuple(map(int, tensor.shape)),
        strides=tuple(map(int, tensor.stride())),
        offset=int(tensor.storage_offset()),
    )


def extent(piece: BlockView) -> int:
    """Return the bytes from the start of its block to the end of a piece."""
    if not math.prod(piece.shape):
        return 0
    last = sum((n - 1) * stride for n, stride in zip(piece.shape, piece.strides, strict=True))
    return int((piece.offset + last + 1) * piece.dtype.itemsize)


def fills(piece: BlockView) -> bool:
    """Return whether a piece begins and ends where its block does."""
    return piece.offset == 0 and extent(piece) == piece.block.nbytes


def pieces_of(thing: Any) -> list[BlockView]:
    """Return the views in nested arguments."""
    leaves = pytree.tree_leaves(thing, is_leaf=lambda leaf: isinstance(leaf, BlockView))
    return [leaf for leaf in leaves if isinstance(leaf, BlockView)]

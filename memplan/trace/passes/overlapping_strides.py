"""Find strides that give several elements of a tensor the same bytes, as those of `expand` and `unfold` do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from memplan.trace.passes.aliasing import is_fixed
from memplan.trace.passes.rewrite import value


def may_overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether two elements of a tensor may lie at one address: its dimensions, by stride, are not nested.

    It is True also for the rare layout that interleaves without overlapping (shape (2, 2), strides (2, 3)).
    """
    if 0 in shape:
        return False
    last = 0  # the furthest element of the dimensions so far
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride <= last:
            return True
        last += stride * (size - 1)
    return False


def overlapping_tangents(graph: fx.Graph) -> bool:
    """Return whether a joint graph takes a gradient whose elements share bytes: it could not hold all gradients."""
    tangents = (value(n) for n in graph.find_nodes(op="placeholder") if n.meta["desc"].is_tangent())
    tensors = [t for t in tangents if isinstance(t, torch.Tensor)]  # the gradient of a DTensor has its mesh too
    return any(is_fixed(t) and may_overlap(t.shape, t.stride()) for t in tensors)

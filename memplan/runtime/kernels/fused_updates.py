"""Fuses consecutive parameter updates into one call: torch's fused optimizer kernels take lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from memplan.runtime.kernels.kernel_selection import BoundOp, CallForm
from memplan.trace.optimizer.updates import kind_of
from memplan.trace.traced import KernelCall, TracedGraph


def fuse_updates(traced: TracedGraph, bound: Sequence[BoundOp], order: Sequence[int]) -> Mapping[int, BoundOp | None]:
    """Return what to call at steps of consecutive updates of one kind: all updates at the first, None at the others.

    No other op runs in between, so that every gradient exists and is alive at the first of them.
    """
    found: dict[int, BoundOp | None] = {}
    kinds = [kind_of(k, traced.graph) if isinstance(k, KernelCall) else None for k in traced.kernels]
    start = 0
    while start < len(order):
        end = start + 1
        while end < len(order) and kinds[order[end]] == kinds[order[start]]:
            end += 1
        if end > start + 1 and kinds[order[start]] is not None and bound[order[start]].form is CallForm.IN_PLACE:
            found |= dict.fromkeys(range(start, end))
            found[start] = _fuse([bound[op] for op in order[start:end]])
        start = end
    return found


def _fuse(updates: Sequence[BoundOp]) -> BoundOp:
    """Return one call with the lists of all updates."""
    lists = zip(*(bound.args for bound in updates), strict=True)
    return replace(updates[0], args=tuple([item for one in of for item in one] for of in lists))

"""Updates that follow one another, run by one call: torch's fused optimizer kernels take lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from memplan.runtime.kernels.kernel_selection import BoundOp, CallForm
from memplan.trace.optimizer.update_groups import kind_of
from memplan.trace.traced import KernelCall, TracedGraph


def joined(traced: TracedGraph, bound: Sequence[BoundOp], order: Sequence[int]) -> Mapping[int, BoundOp | None]:
    """What to call at the steps where updates of one kind follow one another: all of them at the first, then nothing.

    Nothing runs in between, so that every gradient exists at the first of them, and is alive.
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
            found[start] = _one([bound[op] for op in order[start:end]])
        start = end
    return found


def _one(several: Sequence[BoundOp]) -> BoundOp:
    """A call with the lists of all of them."""
    lists = zip(*(bound.args for bound in several), strict=True)
    return replace(several[0], args=tuple([item for one in of for item in one] for of in lists))

"""Has sums take the bytes of their first summand in Inductor's code.

Inductor runs `addmm` with a result of its own, as where gradients of weights are added up block by block of rows. Where
nothing else reads the first summand afterwards, it adds in place, with the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch.utils._pytree as pytree

from memplan.trace.fused.kernel_runs import Block, BlockView, KernelRun, extent

_ADDMM = "extern_kernels.addmm"


def with_sums_in_place(
    runs: Sequence[KernelRun], outputs: Sequence[Any], inputs: Collection[Block]
) -> tuple[tuple[KernelRun, ...], tuple[Any, ...]]:
    """Return the calls of a graph's code and its outputs, where sums have the bytes of their first summand.

    The kernel is the same, and so are the bits: it copies that summand into its result before it adds to it. What the
    code is given (`inputs`) stays as it is.

    Example:
        >>> runs, outputs = with_sums_in_place(replay.run(), replay.outputs(), {view.block for view in views})
    """
    last: dict[Block, int] = {}
    first: dict[Block, int] = {}
    for i, run in enumerate(runs):
        for view in (*run.reads, *run.writes):
            last[view.block] = i
            first.setdefault(view.block, i)
    kept = {*inputs, *(view.block for view in outputs if isinstance(view, BlockView))}
    taken: dict[Block, Block] = {}
    for i, run in enumerate(runs):
        pair = _summand_and_result(run)
        if pair is None:
            continue
        summand, result = pair
        factors = pytree.tree_leaves(run.args[1:], is_leaf=lambda leaf: isinstance(leaf, BlockView))
        alone = all(not isinstance(view, BlockView) or view.block is not summand.block for view in factors)
        free = not summand.block.given and summand.block not in kept and last[summand.block] == i
        if alone and free and first[result.block] == i and result.block not in inputs:
            taken[result.block] = taken.get(summand.block, summand.block)

    def moved(leaf: Any) -> Any:
        return replace(leaf, block=taken[leaf.block]) if isinstance(leaf, BlockView) and leaf.block in taken else leaf

    def all_moved(tree: Any) -> Any:
        return pytree.tree_map(moved, tree, is_leaf=lambda leaf: isinstance(leaf, BlockView))

    if not taken:
        return tuple(runs), tuple(outputs)
    fields = ("args", "kwargs", "reads", "writes", "results", "overwritable")
    made = (replace(run, **{name: all_moved(getattr(run, name)) for name in fields}) for run in runs)
    return tuple(made), tuple(map(moved, outputs))


def _summand_and_result(run: KernelRun) -> tuple[BlockView, BlockView] | None:
    """Return what `addmm` adds to and its result, if both fill all of their bytes in the same way."""
    summand, result = (run.args[0] if run.args else None), run.kwargs.get("out")
    if run.name != _ADDMM or not isinstance(summand, BlockView) or not isinstance(result, BlockView):
        return None
    same = (summand.dtype, summand.shape, summand.strides) == (result.dtype, result.shape, result.strides)
    whole = all(view.offset == 0 and extent(view) == view.block.nbytes for view in (summand, result))
    return (summand, result) if same and whole else None

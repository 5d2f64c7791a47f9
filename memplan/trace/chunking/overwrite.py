"""Find the tensor whose bytes a chain's result may take: logits for their gradient, if only the chain reads them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from memplan.trace.chunking.row_chains import Chain
from memplan.trace.chunking.rows import SLICE, SLICE_BACKWARD, VIEWS
from memplan.trace.passes.aliasing import is_view, keys_of
from memplan.trace.passes.own_outputs import is_backward
from memplan.trace.passes.rewrite import storage_key, value


def overwritten(chain: Chain, sink: fx.Node, ours: set[fx.Node]) -> fx.Node | None:
    """Return the tensor whose rows the sink's rows may overwrite, or None.

    The chain reads that tensor row by row, and nothing else reads it. `ours`: the nodes made from the chain's so far.
    """
    if not is_backward(sink) or chain.sums or not chain.parts(sink).rows:
        return None
    for x in _read_by_backward(chain, sink):
        found = _same_layout(sink, x)
        if found is not None and _only_read_by({*chain.nodes, *ours}, found):
            return found
    return None


def _read_by_backward(chain: Chain, sink: fx.Node) -> Iterator[fx.Node]:
    """Yield what the sink's blocks are made from and the forward made: it is alive in the backward anyway."""
    members, seen, todo = set(chain.nodes), {sink}, [sink]
    while todo:
        for x in chain.parts(todo.pop()).rows:
            if x not in members and not is_backward(x):
                yield x
            elif x in members and x not in seen:
                seen.add(x)
                todo.append(x)


def _only_read_by(readers: set[fx.Node], tensor: fx.Node) -> bool:
    """Return whether an op made the tensor's bytes, and only `readers` read them, views aside."""
    key = storage_key(value(tensor))
    outside = {n for n in tensor.graph.nodes if n not in readers and key in keys_of(n)}
    made = [n for n in outside if n.op != "call_function" or not is_view(n)]
    if len(made) != 1 or made[0].op != "call_function" or not isinstance(made[0].meta["val"], torch.Tensor):
        return False
    return all(user in readers or user in outside for n in outside for user in n.users)


def _same_layout(sink: fx.Node, x: fx.Node) -> fx.Node | None:
    """Return the tensor that the sink can overwrite: `x`, or what `x` was sliced from if the sink undoes that slice."""
    result = value(sink)
    if sink.target is SLICE_BACKWARD:
        padding = list(sink.args[2:])
        while x.target in VIEWS:
            x = x.args[0]  # type: ignore[assignment]
        cut = [*x.args[1:], *([1] if len(x.args) == 4 else [])] if x.target is SLICE else None
        if cut != padding or value(x.args[0]).shape != result.shape:  # type: ignore[arg-type]
            return None
        x = x.args[0]  # type: ignore[assignment]
    given = value(x)
    same_elements = given.is_contiguous() and result.is_contiguous() and given.numel() == result.numel()
    return x if same_elements and (given.dtype, given.device) == (result.dtype, result.device) else None

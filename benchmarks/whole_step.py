"""A whole training step from a traced forward and backward: one in-place update per parameter, without torch.

Stands in for `compile_step`: an update reads the gradient and reads and writes the parameter, so that it must come
after every reader of the old weight. Gradients of parameters are planned; forward and backward are one call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from memplan.core.graph import Graph, Op, Origin, Phase, Storage, StorageKind
from memplan.core.in_place import with_inplace_candidates


def whole_step(graph: Graph, parameter_of: Mapping[int, int]) -> Graph:
    """`parameter_of`: gradient -> its parameter (value indices). Updates stand at the end, as an optimizer's do."""
    planned = {graph.values[gradient].storage for gradient in parameter_of}
    updates = tuple(
        Op(
            name=f"update_{graph.values[parameter].name}",
            target="aten._fused_sgd_.default",
            phase=Phase.FORWARD,
            reads=(gradient, parameter),
            writes=(parameter,),
            direct=True,
            random=False,
            origin=Origin(op="update"),
        )
        for gradient, parameter in parameter_of.items()
    )
    step = replace(
        graph,
        ops=tuple(replace(op, phase=Phase.FORWARD) for op in graph.ops) + updates,
        storages=tuple(_planned(s) if i in planned else s for i, s in enumerate(graph.storages)),
        gradients=tuple(g for g in graph.gradients if g not in parameter_of),
    )
    return (
        with_inplace_candidates(step) if any(op.inplace_candidates for op in graph.ops) else step
    )  # gradients may lie in place now


def _planned(storage: Storage) -> Storage:
    return replace(storage, planned=True, kind=StorageKind.GRADIENT)

"""Predicts the peak of a step in eager mode: the number that a budget given as a share is a share of."""

from __future__ import annotations

from collections.abc import Sequence

from memplan.core.graph import Graph
from memplan.core.in_place import without_candidates
from memplan.core.schedule import live_bytes
from memplan.core.totals import MODEL_KINDS, outside_profile
from memplan.evict.apply import apply
from memplan.evict.costs import DEVICES
from memplan.evict.policies.checkpoint import checkpoint
from memplan.evict.rng_states import only_used, with_saved_states
from memplan.evict.workload import Workload


def eager_total(graph: Graph, temporaries: Sequence[int] = ()) -> int:
    """Return the bytes that eager needs at the peak of a traced step.

    They are parameters, buffers, constants, inputs and optimizer state, and the highest sum of what is alive: in traced
    order, with nothing in place, activation checkpoints followed, gradients and outputs included. `temporaries`: the
    bytes that the kernel of each op allocates beside its results, if they are known.
    """
    temporaries = temporaries or [0] * len(graph.ops)
    separate = without_candidates(graph)
    order = tuple(range(len(graph.ops)))
    if any(op.checkpoint for op in graph.ops):
        workload = Workload(graph=separate, sources=order, costs=DEVICES["cpu"], budget=0)
        states = with_saved_states(workload)
        applied = apply(*only_used(states, checkpoint(states.workload)))
        separate, order = applied.graph, tuple(range(len(applied.graph.ops)))
        temporaries = [temporaries[source] if source >= 0 else 0 for source in applied.sources]
    results = outside_profile(separate, order, temporaries)
    alive = map(sum, zip(live_bytes(separate, order), results, strict=True))
    return graph.bytes_of(*MODEL_KINDS) + max(alive, default=0)

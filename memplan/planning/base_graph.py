"""The step of a plan before anything was evicted: each op once, in the order of its first run; and eager's need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from memplan.core.collectives import in_one_piece
from memplan.core.evictions import EvictionPlan
from memplan.core.graph import Graph, Op, Storage, StorageKind, Value
from memplan.core.graph_edit import GraphEdit, with_values
from memplan.core.in_place import without_candidates
from memplan.core.plan import Plan
from memplan.core.schedule import live_bytes, make_schedule
from memplan.core.totals import MODEL_KINDS, beside_results, known_transient, outside_profile
from memplan.errors import InvalidPlan
from memplan.evict.apply import apply
from memplan.evict.costs import DEVICES
from memplan.evict.equivalent import require_equivalent
from memplan.evict.policies.checkpoint import checkpoint
from memplan.evict.rng_states import only_used, with_saved_states
from memplan.evict.workload import Workload
from memplan.planning.make_plan import ScheduledGraph


def without_evictions(plan: Plan) -> ScheduledGraph:
    """Return the step of a plan as it was before anything was evicted, in the order of the first runs.

    Activation checkpoints of the model stay known. Raises `InvalidPlan` for a plan whose model is on another device
    than it runs on, or on several.
    """
    kept = plan.eviction
    if kept is None:
        return ScheduledGraph.of(plan)
    if kept.device or kept.sections:
        raise InvalidPlan("copies between devices are a part of the step", where="eviction.device")
    graph, order = _restored(plan.graph, kept, plan.schedule.order)
    require_equivalent(graph, plan.graph, kept.sources)
    scheduled = replace(plan, graph=graph, schedule=make_schedule(graph, order, plan.schedule.policy), eviction=None)
    return ScheduledGraph.of(scheduled)


def _restored(graph: Graph, kept: EvictionPlan, order: tuple[int, ...]) -> tuple[Graph, tuple[int, ...]]:
    """Return the traced graph, and the order of the first runs of its ops."""
    added = {further for _, further in kept.instances}
    added |= {i for i, s in enumerate(graph.storages) if s.kind in (StorageKind.HOST, StorageKind.RNG_STATE)}
    storages = graph.storages[: min(added, default=len(graph.storages))]
    values = tuple(takewhile(lambda value: _is_traced(value, storages), graph.values))
    number = {value.name: i for i, value in enumerate(values)}

    def traced(value: int) -> int:
        """Return the traced value that a value is, maybe in a further life of its storage."""
        return value if value < len(values) else number[graph.values[value].name.rpartition("@")[0]]

    first: dict[int, Op] = {}
    for i in in_one_piece(graph, order):
        source, op = kept.sources[i], graph.ops[i]
        if source >= 0 and source not in first:
            first[source] = replace(with_values(op, traced), starts=False)
    edit = GraphEdit(graph)
    del edit.values[len(values) :], edit.storages[len(storages) :]
    for i in sorted(first):
        edit.add(first[i], i)
    return edit.finish(), tuple(first)


def _is_traced(value: Value, storages: Sequence[Storage]) -> bool:
    """Return whether a value is no part of an eviction: in one of the traced `storages`, and not its bytes to copy."""
    return value.storage < len(storages) and value.name != f"{storages[value.storage].name}:bytes"


def eager_total(graph: Graph, temporaries: Sequence[int] = ()) -> int:
    """Return the bytes that eager needs at the peak of a traced step.

    They are parameters, buffers, constants, inputs and optimizer state, and the highest sum of what is alive: in traced
    order, with nothing in place, activation checkpoints followed, gradients and outputs included. `temporaries`: the
    bytes that the kernel of each op allocates beside its results; none: those that are known before anything ran.
    """
    temporaries = temporaries or beside_results(graph, known_transient(graph))
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

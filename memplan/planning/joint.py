"""The joint plan of several graphs that run in one training step, such as those into which dynamo breaks a model."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from memplan.core import lifetimes
from memplan.core.evictions import EvictionPlan
from memplan.core.graph import Graph, Op, Phase, Storage
from memplan.core.graph_edit import with_values
from memplan.core.plan import GraphSection, Plan
from memplan.core.schedule import Schedule, make_schedule
from memplan.solvers.base import finish


@dataclass(frozen=True, slots=True, kw_only=True)
class JointPart:
    """One graph of a joint plan.

    `plan` is its plan, whose offsets are those in the arena that all graphs share, from byte `start` on. `section`
    describes it. `shared` has a key for each storage (by index) that other graphs use too, and `names` the name of each
    such storage.
    """

    plan: Plan
    section: GraphSection
    start: int = 0
    shared: Mapping[int, Hashable]
    names: Mapping[int, str]


def join(
    model: str, parts: Sequence[JointPart], timeline: Sequence[tuple[int, bool]], *, budget: int | None = None
) -> Plan:
    """Return the plan of a step in which several graphs run, one after another, in one arena.

    A storage that several graphs use, such as a parameter or what one graph passes to the next, is there once. What
    a graph returns is counted until the step ends, and gradients that pass between graphs are counted in both. Ops that
    run after the first backward are of the phase `backward`.

    Args:
        model: the name of the model.
        parts: the graphs; at least one.
        timeline: (position in `parts`, whether its backward runs), in the order in which they run.
        budget: the limit of the total, in bytes, that the graphs keep together; None: there is none.

    Returns:
        The plan; `Plan.sections` has a section for each part.

    Example:
        >>> plan = join("Model", [one, two], [(0, False), (1, False), (1, True), (0, True)])
    """
    graph = joint_graph(parts, timeline)
    ran = _ran(parts, timeline)
    ops = graph.ops
    first = parts[0].plan
    schedule = make_schedule(graph, tuple(range(len(ops))), "graphs in turn")
    alignment, redzone = (max(getattr(p.plan, name) for p in parts) for name in ("alignment", "redzone"))
    problem = lifetimes.problem(graph, schedule, alignment=alignment, redzone=redzone)
    offsets = {
        f"{i}.{name}": part.start + offset
        for i, part in enumerate(parts)
        for name, offset in part.plan.solution.offsets.items()
    }
    solution = finish(problem, {b.id: offsets[b.id] for b in problem.buffers}, solver="joint", seconds=0.0)
    measured = all(part.plan.temporaries is not None for part in parts)
    return Plan(
        model=model,
        graph=graph,
        schedule=schedule,
        problem=problem,
        solution=solution,
        alignment=alignment,
        redzone=redzone,
        versions=first.versions,
        temporaries=tuple(parts[i].plan.transient[op] for i, op in ran) if measured else None,
        eviction=_eviction(parts, ran, graph, schedule, alignment=alignment, arena=solution.arena_size, budget=budget),
        reserve=first.reserve,
        sections=tuple(part.section for part in parts),
    )


def joint_graph(parts: Sequence[JointPart], timeline: Sequence[tuple[int, bool]]) -> Graph:
    """Return the graph of a step in which several graphs run, as `join` does; its ops are in the order they run in."""
    storages, storage_of = _storages(parts)
    starts = (0, *accumulate(len(part.plan.graph.values) for part in parts))
    values = [
        replace(v, name=f"{i}.{v.name}", storage=storage_of[i][v.storage])
        for i, part in enumerate(parts)
        for v in part.plan.graph.values
    ]
    return Graph(
        ops=_ops(parts, _ran(parts, timeline), starts),
        values=tuple(values),
        storages=storages,
        outputs=tuple(starts[i] + v for i, part in enumerate(parts) for v in part.plan.graph.outputs),
        gradients=tuple(starts[i] + v for i, part in enumerate(parts) for v in part.plan.graph.gradients),
    )


def _ran(parts: Sequence[JointPart], timeline: Sequence[tuple[int, bool]]) -> list[tuple[int, int]]:
    """Return (part, op of the part) of each op, in the order in which they run."""
    return [(i, op) for i, backward in timeline for op in _of_phase(parts[i].plan, backward=backward)]


def _storages(parts: Sequence[JointPart]) -> tuple[tuple[Storage, ...], list[list[int]]]:
    """Return all storages, each once, and for each part the index of each of its storages among them."""
    storages: list[Storage] = []
    found: dict[Hashable, int] = {}
    indices: list[list[int]] = []
    for i, part in enumerate(parts):
        indices.append([])
        for index, storage in enumerate(part.plan.graph.storages):
            key = part.shared.get(index, (i, index))
            if key not in found:
                found[key] = len(storages)
                storages.append(replace(storage, name=f"{i}.{part.names.get(index, storage.name)}"))
            same = storages[found[key]]
            storages[found[key]] = replace(same, nbytes=max(same.nbytes, storage.nbytes))
            indices[-1].append(found[key])
    return tuple(storages), indices


def _of_phase(plan: Plan, *, backward: bool) -> list[int]:
    """Return the ops of a plan's forward, or of its backward, in the order in which they run."""
    phase = Phase.BACKWARD if backward else Phase.FORWARD
    return [op for op in plan.schedule.order if plan.graph.ops[op].phase is phase]


def _ops(parts: Sequence[JointPart], ran: Sequence[tuple[int, int]], starts: Sequence[int]) -> tuple[Op, ...]:
    """Return the ops in the order in which they run, with the values of the joint graph."""
    made: list[Op] = []
    backward = False
    for i, index in ran:
        op, start = parts[i].plan.graph.ops[index], starts[i]
        backward = backward or op.phase is Phase.BACKWARD
        phase = Phase.BACKWARD if backward else Phase.FORWARD
        moved = with_values(op, start.__add__)
        made.append(replace(moved, name=f"{i}.{op.name}", phase=phase, checkpoint=0, within=()))
    return tuple(made)


def _eviction(
    parts: Sequence[JointPart],
    ran: Sequence[tuple[int, int]],
    graph: Graph,
    schedule: Schedule,
    *,
    alignment: int,
    arena: int,
    budget: int | None,
) -> EvictionPlan | None:
    """Return how the graphs together keep their budgets; None if none of them has one."""
    _, storage_of = _storages(parts)
    kept = [part.plan.eviction for part in parts]
    given = [one for one in kept if one is not None]
    if not given:
        return None
    sources = [range(len(p.plan.graph.ops)) if one is None else one.sources for p, one in zip(parts, kept, strict=True)]
    before = (0, *accumulate(max(numbers, default=-1) + 1 for numbers in sources))
    starts = accumulate((0 if one is None else one.host.arena_size for one in kept), initial=0)
    offsets = {
        f"{i}.{name}": start + offset
        for i, (one, start) in enumerate(zip(kept, starts, strict=False))
        for name, offset in ({} if one is None else one.host.offsets).items()
    }
    return EvictionPlan(
        policy=given[0].policy,
        costs=given[0].costs,
        budget=budget,
        arena_budget=arena,
        seconds=sum(one.seconds for one in given),
        base_seconds=sum(one.base_seconds for one in given),
        stall=sum(one.stall for one in given),
        sources=tuple(before[i] + sources[i][op] if sources[i][op] >= 0 else -1 for i, op in ran),
        instances=tuple(
            (storage_of[i][a], storage_of[i][b])
            for i, one in enumerate(kept)
            for a, b in (() if one is None else one.instances)
        ),
        host=finish(lifetimes.host_problem(graph, schedule, alignment=alignment), offsets, solver="joint", seconds=0.0),
    )

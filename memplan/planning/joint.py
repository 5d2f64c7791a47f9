"""The joint plan of several graphs that run in one training step, such as those into which dynamo breaks a model."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from memplan.core import lifetimes
from memplan.core.evictions import EvictionPlan
from memplan.core.graph import Graph, Phase
from memplan.core.graph_edit import GraphEdit, with_values
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
    graph, storage_of = _joined(parts, timeline)
    ran = _ran(parts, timeline)
    first = parts[0].plan
    schedule = make_schedule(graph, tuple(range(len(graph.ops))), "graphs in turn")
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
        eviction=_eviction(
            parts, ran, storage_of, graph, schedule, alignment=alignment, arena=solution.arena_size, budget=budget
        ),
        reserve=first.reserve,
        sections=tuple(part.section for part in parts),
    )


def joint_graph(parts: Sequence[JointPart], timeline: Sequence[tuple[int, bool]]) -> Graph:
    """Return the graph of a step in which several graphs run, as `join` does; its ops are in the order they run in."""
    return _joined(parts, timeline)[0]


def _joined(parts: Sequence[JointPart], timeline: Sequence[tuple[int, bool]]) -> tuple[Graph, list[list[int]]]:
    """Return the joint graph, and for each part the index there of each of its storages."""
    edit, found = GraphEdit(Graph()), dict[Hashable, int]()
    storage_of, value_of = list[list[int]](), list[tuple[int, ...]]()
    for i, part in enumerate(parts):
        storage_of.append([])
        for index, storage in enumerate(part.plan.graph.storages):
            key = part.shared.get(index, (i, index))
            if key not in found:
                found[key] = edit.storage(replace(storage, name=f"{i}.{part.names.get(index, storage.name)}"))
            same = edit.storages[found[key]]
            edit.storages[found[key]] = replace(same, nbytes=max(same.nbytes, storage.nbytes))
            storage_of[-1].append(found[key])
        value_of.append(edit.join(part.plan.graph, f"{i}.".__add__, dict(enumerate(storage_of[-1])), {}))
    backward = False
    for i, index in _ran(parts, timeline):
        op = parts[i].plan.graph.ops[index]
        backward = backward or op.phase is Phase.BACKWARD
        phase = Phase.BACKWARD if backward else Phase.FORWARD
        moved = with_values(op, value_of[i].__getitem__)
        edit.add(replace(moved, name=f"{i}.{op.name}", phase=phase, checkpoint=0, within=()))
    outputs = (value_of[i][v] for i, part in enumerate(parts) for v in part.plan.graph.outputs)
    gradients = (value_of[i][v] for i, part in enumerate(parts) for v in part.plan.graph.gradients)
    return replace(edit.finish(), outputs=tuple(outputs), gradients=tuple(gradients)), storage_of


def _ran(parts: Sequence[JointPart], timeline: Sequence[tuple[int, bool]]) -> list[tuple[int, int]]:
    """Return (part, op of the part) of each op, in the order in which they run."""
    return [(i, op) for i, backward in timeline for op in _of_phase(parts[i].plan, backward=backward)]


def _of_phase(plan: Plan, *, backward: bool) -> list[int]:
    """Return the ops of a plan's forward, or of its backward, in the order in which they run."""
    phase = Phase.BACKWARD if backward else Phase.FORWARD
    return [op for op in plan.schedule.order if plan.graph.ops[op].phase is phase]


def _eviction(
    parts: Sequence[JointPart],
    ran: Sequence[tuple[int, int]],
    storage_of: Sequence[Sequence[int]],
    graph: Graph,
    schedule: Schedule,
    *,
    alignment: int,
    arena: int,
    budget: int | None,
) -> EvictionPlan | None:
    """Return how the graphs together keep their budgets; None if none of them has one."""
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

"""The joint plan of the graphs that a backend runs, and what these graphs share.

Keeps a budget over all graphs of a step together: `keep_budgets`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from memplan.core.graph import Graph
from memplan.core.lifetimes import problem
from memplan.core.plan import GraphSection, Plan
from memplan.core.schedule import live_bytes, make_schedule
from memplan.core.units import format_bytes
from memplan.errors import BudgetInfeasible
from memplan.planning.base_graph import eager_total
from memplan.planning.joint import JointPart, join, joint_graph
from memplan.planning.options import read_budget
from memplan.runtime.builder import measured
from memplan.runtime.dynamo.planned_graph import GraphInstance
from memplan.runtime.options import RunOptions
from memplan.solvers import solve
from memplan.solvers.base import finish
from memplan.trace.planning import versions
from memplan.trace.traced import Source


def joint_plan(model: str, instances: Iterable[GraphInstance], names: Mapping[int, str]) -> Plan:
    """Return the plan of the last step that was laid out in one arena, or of all graphs that are known so far.

    Without a graph, it is the plan of no ops. Of steps with a backward and others, it is that of one with a backward.
    `names`: the name of each parameter and buffer in the model, by its id.
    """
    known = list(instances)
    training = [one for one in known if one.traced.training] or known
    layouts = [one.slot.layout for one in training if one.slot is not None]
    if layouts:
        layout = max(layouts, key=lambda layout: layout.number)
        alive = [(i, one) for i, ref in enumerate(layout.members) if (one := ref()) is not None]
        members, position = [one for _, one in alive], {i: k for k, (i, _) in enumerate(alive)}
        timeline = [(position[i], backward) for i, backward in layout.timeline if i in position]
        return join(model, [part_of_step(one, names) for one in members], timeline, budget=members[0].joint_budget)
    if not training:
        return _nothing(model)
    starts, start = [], 0
    for one in training:
        starts.append(start)
        start += one.runner.plan.arena_size
    order = range(len(training))
    timeline = [(i, False) for i in order] + [(i, True) for i in reversed(order) if training[i].traced.training]
    return join(
        model, [part_of_step(one, names, start=start) for one, start in zip(training, starts, strict=True)], timeline
    )


def part_of_step(
    instance: GraphInstance, names: Mapping[int, str], *, start: int = 0, plan: Plan | None = None
) -> JointPart:
    """Return the part of a joint plan that a graph is.

    `names`: as in `joint_plan`. `start`: the first byte of its arena. `plan`: another plan of it than the one it runs.
    """
    plan, traced = plan or instance.runner.plan, instance.traced
    tensors = dict((*instance.module.named_parameters(), *instance.module.named_buffers()))
    inputs = instance.inputs or {}
    shared: dict[int, Hashable] = {}
    called: dict[int, str] = {}
    for binding in traced.bindings:
        storage = traced.graph.values[binding.value].storage
        if binding.source in (Source.PARAMETER, Source.BUFFER):
            tensor = tensors[binding.name]
            shared[storage] = ("model", tensor.untyped_storage()._cdata)
            called[storage] = names.get(id(tensor), binding.name)
        elif binding.source is Source.INPUT and binding.index in inputs:
            shared[storage] = inputs[binding.index]
    for i, number in enumerate(traced.results.leaves):
        leaf = traced.results.returned[number]
        if leaf.value >= 0 and i in instance.results:
            shared.setdefault(traced.graph.values[leaf.value].storage, instance.results[i])
    by_name = {storage.name: i for i, storage in enumerate(plan.graph.storages)}
    place = {i: by_name[s.name] for i, s in enumerate(traced.graph.storages) if s.name in by_name}
    forward = plan.graph.forward_ops
    section = GraphSection(
        name=plan.model,
        ends=instance.ends,
        forward=forward,
        backward=len(plan.graph.ops) - forward,
        arena_size=instance.plan.arena_size,
    )
    return JointPart(
        plan=plan,
        section=section,
        start=start,
        shared={place[s]: key for s, key in shared.items() if s in place},
        names={place[s]: name for s, name in called.items() if s in place},
    )


def _nothing(model: str) -> Plan:
    """Return the plan of a model of which no graph is known yet."""
    graph = Graph()
    schedule = make_schedule(graph, (), "graphs in turn")
    buffers = problem(graph, schedule, alignment=1)
    return Plan(
        model=model,
        graph=graph,
        schedule=schedule,
        problem=buffers,
        solution=finish(buffers, {}, solver="joint", seconds=0.0),
        alignment=1,
        versions=versions(),
    )


_TRIES = 5  # budgets that are tried between the smallest arenas and those of the graphs on their own
_Timeline = Sequence[tuple[int, bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    """The bytes that plans of all graphs need together: the arena, and everything on the device at the peak."""

    plans: tuple[Plan, ...]
    arena: int
    total: int


def keep_budgets(options: RunOptions, instances: Sequence[GraphInstance], timeline: _Timeline) -> None:
    """Plan the graphs of a step anew, with smaller arenas, where all together exceed a budget.

    Their arenas shrink by the same share of what can be saved in each, to the largest ones that keep the budgets.
    `timeline`: (position in `instances`, whether its backward runs), in order. Raises `BudgetInfeasible` if the
    smallest arenas do not keep them.
    """
    total, arena = _limits(options, instances, timeline)
    for instance in instances:
        instance.joint_budget = total

    def keeps(need: _Need) -> bool:
        return (total is None or need.total <= total) and (arena is None or need.arena <= arena)

    if keeps(_need(instances, [one.plan for one in instances], timeline)):
        return
    least = [_planned(options, one, arena_budget="min") for one in instances]
    found = _need(instances, least, timeline)
    tries = _TRIES
    if not keeps(found) and total is not None:  # the smallest totals may have larger arenas, and less beside them
        smallest = [_planned(options, one, budget="min") for one in instances]
        found = min(found, _need(instances, smallest, timeline), key=lambda need: need.total)
        tries = 0
    if not keeps(found):
        raise _infeasible(found, total, arena)
    low, high = 0.0, 1.0
    for _ in range(tries):
        share = (low + high) / 2
        sizes = [
            p.arena_size + int(share * (one.plan.arena_size - p.arena_size))
            for one, p in zip(instances, least, strict=True)
        ]
        plans = [_planned(options, one, arena_budget=n) for one, n in zip(instances, sizes, strict=True)]
        tried = _need(instances, plans, timeline)
        low, high, found = (share, high, tried) if keeps(tried) else (low, share, found)
    for instance, plan in zip(instances, found.plans, strict=True):
        instance.replace_plan(plan)


def _limits(
    options: RunOptions, instances: Sequence[GraphInstance], timeline: _Timeline
) -> tuple[int | None, int | None]:
    """Return the limits of the total and of the arena of all graphs in bytes; None is no limit."""
    parts = [_as_traced(one) for one in instances]
    graph = joint_graph(parts, timeline)
    wholes: dict[str, Callable[[], int]] = {
        "budget": lambda: eager_total(graph),
        "arena_budget": lambda: max(live_bytes(graph, tuple(range(len(graph.ops)))), default=0),
    }
    found: list[int | None] = []
    for name, whole in wholes.items():
        given = getattr(options, name)
        limit = None if given is None else read_budget(given, name)
        found.append(int(limit * whole()) if isinstance(limit, float) else limit if isinstance(limit, int) else None)
    return found[0], found[1]


def _as_traced(instance: GraphInstance) -> JointPart:
    """Return a graph as it was traced, without evictions, as a part of a step."""
    graph = instance.traced.graph
    traced = replace(
        instance.plan, graph=graph, schedule=make_schedule(graph, tuple(range(len(graph.ops))), "traced"), eviction=None
    )
    return part_of_step(instance, {}, plan=traced)


def _planned(
    options: RunOptions, instance: GraphInstance, *, arena_budget: int | str | None = None, budget: str | None = None
) -> Plan:
    """Return a plan of one graph whose arena, or total, has at most so many bytes ("min": the fewest)."""
    known = measured(instance.runner, None)
    within = replace(options, budget=budget, arena_budget=arena_budget)
    return within.settle(known.traced, None, transient=known.transient)[1]


def _need(instances: Sequence[GraphInstance], plans: Sequence[Plan], timeline: _Timeline) -> _Need:
    """Return what the graphs need together with these plans."""
    parts = [part_of_step(one, {}, plan=plan) for one, plan in zip(instances, plans, strict=True)]
    joint = join("", parts, timeline)
    arena, beside = solve(joint.problem).arena_size, joint.total - joint.arena_size
    if instances[0].traced.runs_on:  # the model, the caller's tensors and what graphs pass on are on the host
        beside = max(plan.on_device - plan.arena_size for plan in plans)
    return _Need(plans=tuple(plans), arena=arena, total=arena + beside)


def _infeasible(found: _Need, total: int | None, arena: int | None) -> BudgetInfeasible:
    """Return the error of graphs that exceed a budget together with the smallest arenas that each can have."""
    over_total = total is not None and found.total > total
    need, limit = (found.total, total) if over_total else (found.arena, arena)
    assert limit is not None
    largest = max(found.plans, key=lambda plan: plan.arena_size)
    return BudgetInfeasible(
        f"the {len(found.plans)} graphs of the step need {format_bytes(need)} together, their budget is "
        f"{format_bytes(limit)}",
        op=largest.graph.ops[largest.schedule.order[largest.problem.peak_step]].name,
        smallest=need,
        where="budget" if over_total else "arena_budget",
        hint=f"give at least {need} bytes ({format_bytes(need)})",
    )

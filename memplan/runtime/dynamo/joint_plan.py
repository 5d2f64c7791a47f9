"""The joint plan of the graphs that a backend runs, and what these graphs share."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from memplan.core.graph import Graph
from memplan.core.lifetimes import problem
from memplan.core.plan import GraphSection, Plan
from memplan.core.schedule import make_schedule
from memplan.planning.joint import JointPart, join
from memplan.runtime.dynamo.planned_graph import GraphInstance
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
    graph = Graph(ops=(), values=(), storages=(), outputs=(), gradients=())
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

"""Plans graphs that run in one training step again, so that their arena and the update that follows fit together.

What an optimizer allocates comes on top of the arena of all graphs, which is idle then. So results leave it by what all
graphs need together, and each graph is planned with those of its own outside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from memplan.core.graph import Graph, Phase
from memplan.core.plan import GraphSection, Plan
from memplan.core.schedule import make_schedule
from memplan.evict.workload import Policy
from memplan.planning.caller_side import CallerSide, eager_with_caller, plan_with_caller
from memplan.planning.joint import JointPart, join, joint_graph
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.measured import AsEager
from memplan.planning.options import PlanOptions
from memplan.planning.outside_arena import left_by, need_with_update, with_storages_outside

Timeline = Sequence[tuple[int, bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningGraph:
    """A graph of a step: as it was `traced`, and the `plan` that it runs by, as if it had an arena of its own.

    `program`: the same number for all that run the same program, whose plan is the same. `caller`: what was seen to
    happen around it.
    """

    traced: Graph
    plan: Plan
    program: int
    caller: CallerSide = field(default_factory=CallerSide)


def room_together(
    graphs: Sequence[RunningGraph], timeline: Timeline, after: int, options: PlanOptions, *, least: int = 0
) -> tuple[Plan, ...] | None:
    """Return smaller plans of the graphs of one step, as what follows it allocates bytes beside their arena.

    Args:
        graphs: The graphs, without evictions, on one device; their plans have the temporaries of kernels.
        timeline: (position in `graphs`, whether its backward runs), in the order in which they run.
        after: The bytes that the optimizer's own `step()` allocates beside its state.
        options: Those of the graphs.
        least: The bytes that their arena has in any case, because other steps need them.

    Returns:
        A plan for each graph; None where the arena and the update need no more than eager, or no smaller plans are
        found.
    """
    if any(g.plan.eviction is not None or g.plan.devices or g.plan.redzone for g in graphs):
        return None
    now = _together(graphs, [g.plan for g in graphs], timeline, options)
    as_traced = [_as_eager(g) for g in graphs]
    step = AsEager(
        graph=joint_graph([_part(plan) for plan in as_traced], timeline),
        transient=list(_transient(as_traced, timeline)),
        options=options,
        replan=_no_evictions,
        saved=True,
        copies=False,
    )
    smaller = step.beside_update(now, after)
    if smaller is None:
        return None
    made = _of_each(graphs, left_by(now, smaller), options)
    needed = need_in_arena(_together(graphs, made, timeline, options), after, least)
    return made if needed < need_in_arena(now, after, least) else None


def need_in_arena(plan: Plan, after: int, least: int) -> int:
    """Return the most bytes of a step and the update that follows, in an arena that has at least so many bytes."""
    return need_with_update(plan, after) + max(least - plan.arena_size, 0)


def _of_each(graphs: Sequence[RunningGraph], left: frozenset[str], options: PlanOptions) -> tuple[Plan, ...]:
    """Return the plan of each graph with those storages outside that have left the arena of all graphs."""
    of: dict[int, set[str]] = {}
    for i, graph in enumerate(graphs):
        mine = {name.removeprefix(f"{i}.") for name in left if name.startswith(f"{i}.")}
        of.setdefault(graph.program, set()).update(mine)
    plans = {g.program: with_storages_outside(g.plan, of[g.program], options) for g in graphs}
    return tuple(plans[g.program] for g in graphs)


def _together(graphs: Sequence[RunningGraph], plans: Sequence[Plan], timeline: Timeline, options: PlanOptions) -> Plan:
    """Return the plan of the step in which the graphs run by these plans in one arena, with their callers' ops."""
    around = [plan_with_caller(plan, g.caller, earlier=False) for g, plan in zip(graphs, plans, strict=True)]
    joined = join("", [_part(plan) for plan in around], timeline)
    return replace(make_plan(ScheduledGraph.of(joined), options), temporaries=joined.transient, numbers=joined.numbers)


def _as_eager(graph: RunningGraph) -> Plan:
    """Return the plan of a graph as it was traced, in the order of the trace, with what eager has around it.

    One name may hold what several calls return, one after another: nothing is counted of the step before.
    """
    made = plan_with_caller(_in_order(graph), graph.caller, earlier=False)
    return replace(made, graph=eager_with_caller(graph.traced, graph.caller, earlier=False))


def _in_order(graph: RunningGraph) -> Plan:
    """Return the plan of a graph as it was traced, in the order of the trace."""
    order = tuple(range(len(graph.traced.ops)))
    return replace(graph.plan, graph=graph.traced, schedule=make_schedule(graph.traced, order, "traced"))


def _transient(plans: Sequence[Plan], timeline: Timeline) -> Iterator[int]:
    """Yield the bytes that each op allocates that runs, in the order of the traces."""
    for i, backward in timeline:
        for op, nbytes in zip(plans[i].graph.ops, plans[i].transient, strict=True):
            if (op.phase is Phase.BACKWARD) == backward:
                yield nbytes


def _part(plan: Plan) -> JointPart:
    """Return a graph as part of a step; what it shares with others counts for each, in eager too."""
    forward = plan.graph.forward_ops
    backward = len(plan.graph.ops) - forward
    section = GraphSection(name="", ends="", forward=forward, backward=backward, arena_size=plan.arena_size)
    return JointPart(plan=plan, section=section, shared={}, names={})


def _no_evictions(total: int, policy: str | Policy) -> Plan:
    raise AssertionError("what an update allocates is made room for by results outside the arena alone")

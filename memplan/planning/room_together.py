"""Plans graphs that run in one training step again, so that their arena and the update that follows fit together.

What an optimizer allocates comes on top of the arena of all graphs, which is idle then. So results leave it by what all
graphs need together, and each graph is planned with those of its own outside. Where that is not enough, the arena is
freed while it is idle.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
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

    `unevicted`: the plan without the evictions that keep the graph alone at eager's peak. `program`: the same number
    for all that run the same program, whose plan is the same. `caller`: what was seen to happen around it. `gradients`:
    by the name of a gradient's storage, what it is the gradient of, of which a sum is kept for all graphs.
    """

    traced: Graph
    plan: Plan
    unevicted: Plan
    program: int
    caller: CallerSide = field(default_factory=CallerSide)
    gradients: Mapping[str, Hashable] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTogether:
    """The graphs of one step, which share an arena.

    Attributes:
        graphs: They are on one device, and their plans have the temporaries of kernels.
        timeline: (position in `graphs`, whether its backward runs), in the order in which they run.
        options: Those of the graphs.
        after: The bytes that the optimizer's own `step()` allocates beside its state.
        least: The bytes that their arena has in any case, because other steps need them.
        freed: Whether the arena is freed while it is idle.
    """

    graphs: Sequence[RunningGraph]
    timeline: Timeline
    options: PlanOptions
    after: int
    least: int = 0
    freed: bool = False

    @property
    def can_be_smaller(self) -> bool:
        """Whether results may leave the arena."""
        return not any(g.unevicted.eviction is not None or g.plan.devices or g.plan.redzone for g in self.graphs)

    def smaller(self) -> tuple[Plan, ...] | None:
        """Return smaller plans of the graphs, as what follows the step allocates bytes beside their arena.

        Returns:
            A plan for each graph; None where the arena and the update need no more than eager, or no smaller plans are
            found.
        """
        if not self.can_be_smaller:
            return None
        base = self._together([g.unevicted for g in self.graphs])
        found = self._as_eager().beside_update(base, self.after)
        left = frozenset() if found is None else left_by(base, found)
        made = min((self._of_each(left, all_of=each) for each in (False, True)), key=self._need)
        return made if self._need(made) < self._need([g.plan for g in self.graphs]) else None

    def is_more_than_eager(self, plans: Sequence[Plan]) -> bool:
        """Return whether the step and its update need noticeably more than eager if the graphs run by these plans."""
        together = self._together(plans)
        beside = 0 if self.freed else max(self.least - together.arena_size, 0)
        return self._as_eager().is_more_than_eager(together, beside)

    def _as_eager(self) -> AsEager:
        as_traced = [_as_eager(g) for g in self.graphs]
        return AsEager(
            graph=joint_graph(self._parts(as_traced), self.timeline),
            transient=list(_transient(as_traced, self.timeline)),
            options=self.options,
            replan=_no_evictions,
            saved=True,
            copies=False,
            after=self.after,
            freed=self.freed,
        )

    def _need(self, plans: Sequence[Plan]) -> int:
        """Return the most bytes of the step by these plans, and of the update that follows."""
        together = self._together(plans)
        if self.freed:
            return need_with_update(together, self.after, freed=True)
        return need_in_arena(together, self.after, self.least)

    def _of_each(self, left: frozenset[str], *, all_of: bool) -> tuple[Plan, ...]:
        """Return the plan of each graph with those storages outside that have left the arena of all graphs.

        `all_of`: where several graphs run one program, those that have left in each of them; else in any.
        """
        of: dict[int, set[str]] = {}
        for i, graph in enumerate(self.graphs):
            mine = {name.removeprefix(f"{i}.") for name in left if name.startswith(f"{i}.")}
            before = of.get(graph.program, mine)
            of[graph.program] = before & mine if all_of else before | mine
        plans = {g.program: with_storages_outside(g.unevicted, of[g.program], self.options) for g in self.graphs}
        return tuple(plans[g.program] for g in self.graphs)

    def _parts(self, plans: Sequence[Plan]) -> list[JointPart]:
        return [_part(plan, graph.gradients) for graph, plan in zip(self.graphs, plans, strict=True)]

    def _together(self, plans: Sequence[Plan]) -> Plan:
        """Return the plan of the step in which the graphs run by these plans in one arena, with their callers' ops."""
        around = [plan_with_caller(plan, g.caller, earlier=False) for g, plan in zip(self.graphs, plans, strict=True)]
        joined = join("", self._parts(around), self.timeline)
        made = make_plan(ScheduledGraph.of(joined), self.options)
        return replace(made, temporaries=joined.transient, numbers=joined.numbers)


def need_in_arena(plan: Plan, after: int, least: int) -> int:
    """Return the most bytes of a step and the update that follows, in an arena that has at least so many bytes."""
    return need_with_update(plan, after) + max(least - plan.arena_size, 0)


def _as_eager(graph: RunningGraph) -> Plan:
    """Return the plan of a graph as it was traced, in the order of the trace, with what eager has around it.

    One name may hold what several calls return, one after another: nothing is counted of the step before.
    """
    made = plan_with_caller(_in_order(graph), graph.caller, earlier=False)
    return replace(made, graph=eager_with_caller(graph.traced, graph.caller, earlier=False))


def _in_order(graph: RunningGraph) -> Plan:
    """Return the plan of a graph as it was traced, in the order of the trace."""
    order = tuple(range(len(graph.traced.ops)))
    return replace(graph.unevicted, graph=graph.traced, schedule=make_schedule(graph.traced, order, "traced"))


def _transient(plans: Sequence[Plan], timeline: Timeline) -> Iterator[int]:
    """Yield the bytes that each op allocates that runs, in the order of the traces."""
    for i, backward in timeline:
        for op, nbytes in zip(plans[i].graph.ops, plans[i].transient, strict=True):
            if (op.phase is Phase.BACKWARD) == backward:
                yield nbytes


def _part(plan: Plan, gradients: Mapping[str, Hashable]) -> JointPart:
    """Return a graph as part of a step; what it shares with others, apart from sums of gradients, counts for each, in
    eager too."""
    forward = plan.graph.forward_ops
    backward = len(plan.graph.ops) - forward
    section = GraphSection(name="", ends="", forward=forward, backward=backward, arena_size=plan.arena_size)
    shared = {i: gradients[s.name] for i, s in enumerate(plan.graph.storages) if s.name in gradients and not s.planned}
    return JointPart(plan=plan, section=section, shared=shared, names={})


def _no_evictions(total: int, policy: str | Policy) -> Plan:
    raise AssertionError("what an update allocates is made room for by results outside the arena alone")

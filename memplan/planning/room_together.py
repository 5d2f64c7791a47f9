"""Plans graphs that run in one training step again, so that their arena and the update that follows fit together.

What an optimizer allocates comes on top of the arena of all graphs, which is idle then. So results leave it by what all
graphs need together, and each graph is planned with those of its own outside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from memplan.core.graph import Graph, Phase, StorageKind
from memplan.core.plan import GraphSection, Plan
from memplan.core.schedule import make_schedule
from memplan.evict.workload import Policy
from memplan.planning.caller_side import CallerSide, eager_with_caller, plan_with_caller
from memplan.planning.joint import JointPart, join, joint_graph
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.measured import NOTICEABLE_SHARE, AsEager, in_traced_order
from memplan.planning.options import PlanOptions
from memplan.planning.outside_arena import left_by, need_with_update, with_storages_outside, without_arena

_MOST_OF_ONE = 4  # calls of one program in a step, for which it may have a plan each
_Which = Literal["each", "any", "all"]
Timeline = Sequence[tuple[int, bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningGraph:
    """A graph of a step: as it was `traced`, and the `plan` that it runs by, as if it had an arena of its own.

    `unevicted`: the plan without the evictions that keep the graph alone at eager's peak. `program`: the same number
    for all that run the same program, whose plan is the same. `caller`: what was seen to happen around it. `shared`:
    keys, by the names of storages, of what it shares with other graphs: what one passes to another, and gradients of
    one parameter, of which a sum is kept.
    """

    traced: Graph
    plan: Plan
    unevicted: Plan
    program: int
    caller: CallerSide = field(default_factory=CallerSide)
    shared: Mapping[str, Hashable] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTogether:
    """The graphs of one step, which share an arena.

    Attributes:
        graphs: They are on one device, and their plans have the temporaries of kernels.
        timeline: (position in `graphs`, whether its backward runs), in the order in which they run.
        options: Those of the graphs.
        after: The bytes that the optimizer's own `step()` allocates beside its state.
        least: The bytes that their arena has in any case, because other steps need them.
    """

    graphs: Sequence[RunningGraph]
    timeline: Timeline
    options: PlanOptions
    after: int
    least: int = 0
    _made: dict[tuple[int, ...], tuple[Sequence[Plan], Plan]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

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
        made = min((self._of_each(left, which) for which in (self._ways if left else ("any",))), key=self._need)
        return made if self._need(made) < self._need([g.plan for g in self.graphs]) else None

    def without_arena(self, than: Sequence[Plan] | None) -> tuple[Plan, ...] | None:
        """Return plans of the graphs with all results outside of the arena; None if they need no less than others."""
        if not self.can_be_smaller:
            return None
        planned, traced = dict[int, Plan](), dict[int, Plan]()
        for graph in self.graphs:
            if graph.program not in planned:
                plan = graph.unevicted
                in_order = in_traced_order(plan, graph.traced, plan.transient, self.options)
                planned[graph.program] = without_arena(plan, self.options)
                traced[graph.program] = without_arena(in_order, self.options)
        ways = (tuple(of[graph.program] for graph in self.graphs) for of in (planned, traced))
        made = min(ways, key=self._need)
        return made if than is None or self._need(made) < self._need(than) else None

    def is_more_than_eager(self, plans: Sequence[Plan], reserved: int = 0) -> bool:
        """Return whether the step and its update need noticeably more than eager if the graphs run by these plans.

        False where they cannot be smaller. `reserved`: the bytes that their arena has at least.
        """
        if not self.can_be_smaller:
            return False
        together = self._together(plans)
        beside = max(self.least, reserved, together.arena_size) - together.arena_size
        return self._as_eager().is_more_than_eager(together, beside)

    def is_worth(self, plans: Sequence[Plan]) -> bool:
        """Return whether the step and its update need so much less by these plans that programs are made again."""
        now = self._need([graph.plan for graph in self.graphs])
        return now - self._need(plans) >= max(now * NOTICEABLE_SHARE, 1)

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
        )

    def _need(self, plans: Sequence[Plan]) -> int:
        """Return the most bytes of the step by these plans, and of the update that follows."""
        return need_in_arena(self._together(plans), self.after, self.least)

    def _of_each(self, left: frozenset[str], which: _Which) -> tuple[Plan, ...]:
        """Return the plan of each graph with those storages outside that have left the arena of all graphs."""
        keys = list(range(len(self.graphs))) if which == "each" else [graph.program for graph in self.graphs]
        of: dict[int, set[str]] = {}
        for i, key in enumerate(keys):
            mine = {name.removeprefix(f"{i}.") for name in left if name.startswith(f"{i}.")}
            before = of.get(key, mine)
            of[key] = before & mine if which == "all" else before | mine
        graph_of = dict(zip(keys, self.graphs, strict=True))
        made = {key: with_storages_outside(graph.unevicted, of[key], self.options) for key, graph in graph_of.items()}
        return tuple(made[key] for key in keys)

    @property
    def _ways(self) -> tuple[_Which, ...]:
        """The ways to choose what leaves of graphs that run one program: apart for each graph, where these are few."""
        most = max(Counter(graph.program for graph in self.graphs).values())
        return ("each",) if most == 1 else ("any", "all", "each") if most <= _MOST_OF_ONE else ("any", "all")

    def _parts(self, plans: Sequence[Plan]) -> list[JointPart]:
        passed = self._passed()
        return [_part(plan, graph.shared, passed) for graph, plan in zip(self.graphs, plans, strict=True)]

    def _passed(self) -> frozenset[Hashable]:
        """The keys of gradients that the backward of one graph passes to that of another."""
        ends: set[tuple[Hashable, bool]] = set()
        for graph in self.graphs:
            of = graph.traced
            gradients = {of.storages[of.values[v].storage].name for v in of.gradients}
            ends.update({(key, name in gradients) for name, key in graph.shared.items()})
        return frozenset(key for key, is_gradient in ends if is_gradient and (key, False) in ends)

    def _together(self, plans: Sequence[Plan]) -> Plan:
        """Return the plan of the step in which the graphs run by these plans in one arena, with their callers' ops.

        It is made once for the same plans, which are compared several times.
        """
        key = tuple(map(id, plans))
        if key not in self._made:
            self._made[key] = tuple(plans), self._planned_together(plans)
        return self._made[key][1]

    def _planned_together(self, plans: Sequence[Plan]) -> Plan:
        """Return what `_together` does."""
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


def _part(plan: Plan, shared: Mapping[str, Hashable], passed: Collection[Hashable]) -> JointPart:
    """Return a graph as part of a step; parameters count for each graph, in eager too.

    What is in `passed` is not kept to the end of the step.
    """
    graph = plan.graph
    keys = {i: shared[s.name] for i, s in enumerate(graph.storages) if s.name in shared and not s.planned}
    inner = {i for i, key in keys.items() if key in passed}
    if inner:
        kept = tuple(v for v in graph.gradients if graph.values[v].storage not in inner)
        storages = (replace(s, kind=StorageKind.ACTIVATION) if i in inner else s for i, s in enumerate(graph.storages))
        plan = replace(plan, graph=replace(graph, gradients=kept, storages=tuple(storages)))
    backward = len(graph.ops) - graph.forward_ops
    section = GraphSection(name="", ends="", forward=graph.forward_ops, backward=backward, arena_size=plan.arena_size)
    return JointPart(plan=plan, section=section, shared=keys, names={})


def _no_evictions(total: int, policy: str | Policy) -> Plan:
    raise AssertionError("what an update allocates is made room for by results outside the arena alone")

"""Resolves a symbolic plan for given values of its symbols.

`Resolver.place` returns offsets only, in well under a millisecond. `Resolver.resolve` returns the `Plan` that is run,
checked by the independent validator. If its arena is more than 1.25 times the proven lower bound, the step is planned
anew for these values, and the smaller of the two is taken. The last few resolved plans are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from memplan.core import lifetimes
from memplan.core.graph import Graph
from memplan.core.in_place import with_inplace_candidates
from memplan.core.plan import Plan
from memplan.core.problem import Problem, Solution, Status
from memplan.core.schedule import Evidence, Schedule, make_schedule, storage_intervals, working_set_bound
from memplan.core.validate import validate
from memplan.errors import ShapeOutOfRange
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.schedule import cut_bound, order
from memplan.symbolic.sizes import Sizes, Symbol, evaluator, graph_at, holder, values_of

if TYPE_CHECKING:
    from memplan.symbolic.place import SymbolicPlacer

_KEPT = 16  # resolved plans
_ENOUGH = 1.25  # times the proven lower bound: a larger arena is planned anew


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Offsets, arena size and max live, in bytes, of a symbolic plan for some values of its symbols."""

    values: Mapping[str, int]
    offsets: Mapping[str, int]
    arena_size: int
    max_live: int

    @property
    def usage(self) -> float:
        """max_live / arena_size, which is 1 - fragmentation; tract's word."""
        return self.max_live / self.arena_size if self.arena_size else 1.0


class Resolver:
    """Resolves one symbolic plan, whose parts it takes. `resolved` holds the last plans, by their values."""

    def __init__(self, symbols: Sequence[Symbol], conditions: Sequence[str], plan: Plan, sizes: Sizes) -> None:
        self.symbols, self.conditions, self.plan, self.sizes = symbols, conditions, plan, sizes
        self._names = [s.name for s in symbols]
        self._evaluate = evaluator(sizes.expressions, self._names)
        self._hold = holder(conditions, self._names)
        self.resolved: OrderedDict[tuple[tuple[int, ...], tuple[int, ...]], Plan] = OrderedDict()

    def covers(self, values: Mapping[str, int]) -> bool:
        """Return whether all conditions hold for values in range."""
        return all(self._hold(*values_of(self.symbols, values)))

    def place(self, values: Mapping[str, int], *, thorough: bool = False) -> Placement:
        """Return the offsets for these values; `thorough` is that of `SymbolicPlacer.place`.

        Raises `ShapeOutOfRange`.
        """
        numbers = self._evaluate(*self._checked(values))
        placed = self._placer.place([numbers[p] for p in self._buffer_sizes], thorough=thorough)
        pairs = zip(self._buffer_names, placed.offsets.tolist(), strict=True)
        return Placement(
            values=dict(values),
            offsets={name: offset for name, offset in pairs if offset >= 0},
            arena_size=placed.arena_size,
            max_live=placed.max_live,
        )

    def resolve(self, values: Mapping[str, int], within: Mapping[str, int] | None = None) -> Plan:
        """Return the plan for these values; see `SymbolicPlan.resolve`."""
        given = self._checked(values)
        key = (given, given if within is None else self._checked(within))
        if key in self.resolved:
            self.resolved.move_to_end(key)
            return self.resolved[key]
        plan = self._inside(values, self.resolve(within)) if within is not None and key[0] != key[1] else None
        self.resolved[key] = plan = plan or self._good_enough(self._planned(values))
        if len(self.resolved) > _KEPT:
            self.resolved.popitem(last=False)
        return plan

    # -- how it gets there -------------------------------------------------------------------------------

    def _checked(self, values: Mapping[str, int]) -> tuple[int, ...]:
        given = values_of(self.symbols, values)
        if not all(self._hold(*given)):
            broken = next(text for text, holds in zip(self.conditions, self._hold(*given), strict=True) if not holds)
            names = ", ".join(f"{name}={values[name]}" for name in self._names)
            hint = f"narrow the range, or make a plan of its own for {names}"
            raise ShapeOutOfRange(f"the step was traced under the condition {broken}", where=names, hint=hint)
        return given

    def _planned(self, values: Mapping[str, int]) -> Plan:
        """Return the validated plan for these values, in the order of the plan for the hints."""
        schedule, problem, graph = self._problem(values, self.plan)
        return self._with(graph, schedule, problem, self.place(values, thorough=True).offsets)

    def _inside(self, values: Mapping[str, int], upper: Plan) -> Plan | None:
        """Return the validated plan with the order and the offsets of `upper`; None if a buffer is larger than in
        `upper`.
        """
        schedule, problem, graph = self._problem(values, upper)
        largest = {b.id: b.size for b in upper.problem.buffers}
        if any(b.size > largest.get(b.id, -1) for b in problem.buffers):
            return None
        offsets = upper.solution.offsets
        return self._with(graph, schedule, problem, {b.id: offsets[b.id] for b in problem.buffers})

    def _problem(self, values: Mapping[str, int], base: Plan) -> tuple[Schedule, Problem, Graph]:
        """Return the schedule, the problem and the graph for these values, in the order of `base`."""
        graph = graph_at(self.plan.graph, self.sizes, self._evaluate(*values_of(self.symbols, values)))
        schedule = make_schedule(graph, base.schedule.order, base.schedule.policy)
        return schedule, lifetimes.problem(graph, schedule, alignment=base.alignment, redzone=base.redzone), graph

    def _with(self, graph: Graph, schedule: Schedule, problem: Problem, offsets: Mapping[str, int]) -> Plan:
        arena = max((offsets[b.id] + b.size for b in problem.buffers), default=0)
        solution = Solution(
            offsets=offsets,
            arena_size=arena,
            status=Status.OPTIMAL if arena == problem.max_live else Status.FEASIBLE,
            bound=problem.max_live,
            solver="symbolic",
        )
        validate(problem, solution)
        base = self.plan
        return replace(base, graph=graph, schedule=schedule, problem=problem, solution=solution, temporaries=None)

    def _good_enough(self, plan: Plan) -> Plan:
        """Return `plan`, or a new plan with a smaller arena if that of `plan` is more than 1.25 times the lower bound.

        The new plan, like the lower bound, may use every in-place candidate of these values. Plans with red zones,
        which are for tests, are not made anew.
        """
        if plan.redzone or not plan.arena_size:
            return plan
        graph = (
            with_inplace_candidates(plan.graph) if any(op.inplace_candidates for op in plan.graph.ops) else plan.graph
        )
        if plan.arena_size <= _ENOUGH * working_set_bound(graph) or plan.arena_size <= _ENOUGH * self._cut_bound(graph):
            return plan
        anew = make_plan(replace(ScheduledGraph.of(plan), graph=graph, schedule=order(graph)))
        return anew if anew.arena_size < plan.arena_size else plan

    def _cut_bound(self, graph: Graph) -> int:
        """Return the lower bound for `graph` by the cut that proved the bound of the plan for the hints.

        It is 0 without such a cut.
        """
        schedule = self.plan.schedule
        if schedule.evidence is Evidence.BETWEEN:
            return cut_bound(graph, None)
        index = next((i for i, op in enumerate(graph.ops) if op.name == schedule.proof), None)
        return 0 if index is None else cut_bound(graph, index)

    @cached_property
    def _buffers(self) -> tuple[int, ...]:
        """The planned storages (by index) that an op touches, in the order of their first use."""
        graph = self.plan.graph
        lives = storage_intervals(graph, self.plan.schedule.order)
        return tuple(i for i in lives if graph.storages[i].planned)

    @cached_property
    def _buffer_names(self) -> tuple[str, ...]:
        return tuple(self.plan.graph.storages[i].name for i in self._buffers)

    @cached_property
    def _buffer_sizes(self) -> tuple[int, ...]:
        return tuple(self.sizes.storages[i] for i in self._buffers)

    @cached_property
    def _placer(self) -> SymbolicPlacer:
        from memplan.symbolic.place import SymbolicPlacer

        base = self.plan
        lives = storage_intervals(base.graph, base.schedule.order)
        offsets = [base.solution.offsets.get(name, 0) for name in self._buffer_names]
        return SymbolicPlacer(
            [lives[i] for i in self._buffers], offsets, alignment=base.alignment, redzone=base.redzone
        )

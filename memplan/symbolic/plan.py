"""`SymbolicPlan`: one plan for a range of shapes. Made under a hint, resolved for any values of its symbols.

What never changes is fixed once: the ops, their order, lifetimes, which results take the bytes of which inputs, and
the order in which buffers are put down. Values then give sizes (`sizes.py`) and offsets (`place.py`). `place` is that
alone, in well under a millisecond. `resolve` is what memory is given by: a `Plan` like any other, checked by the
independent validator; where it needs more than 1.25 times what is proven to be needed, the step is planned anew for
these values, and the better of the two is taken. Resolved plans are kept, the last few.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from memplan import lifetimes
from memplan.errors import InvalidPlan, ShapeOutOfRange, UnknownName
from memplan.graph import Graph
from memplan.inplace import with_chances
from memplan.plan import Plan, check_consistency, make_plan
from memplan.problem import Problem, Solution, Status
from memplan.schedule import Schedule, cut_bound, make_schedule, order, working_set_bound
from memplan.schedule.base import Evidence, storage_intervals
from memplan.symbolic.expression import Evaluate, Expression, evaluator, holder
from memplan.symbolic.sizes import Sizes, always_alike, as_taken, check_sizes, graph_at
from memplan.symbolic.symbols import Symbol, check_symbols, values_of
from memplan.validate import validate

if TYPE_CHECKING:
    from memplan.symbolic.place import Placer

_KEPT = 16  # resolved plans
_ENOUGH = 1.25  # times what is proven to be needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the buffers of a symbolic plan lie for some values: bytes. `usage` is tract's word: max live / arena."""

    values: Mapping[str, int]
    offsets: Mapping[str, int]
    arena_size: int
    max_live: int

    @property
    def usage(self) -> float:
        """The share of the arena that is alive at the peak (1 - fragmentation)."""
        return self.max_live / self.arena_size if self.arena_size else 1.0


@dataclass(frozen=True, kw_only=True)
class SymbolicPlan:
    """A plan for every value of `symbols` in their ranges under which all `conditions` hold.

    `plan` is the one for the hints; `sizes` says what its sizes are for other values. `inputs` are the shapes of the
    tensors among the model's inputs, as expressions. Made by `make_symbolic`.
    """

    symbols: tuple[Symbol, ...]
    conditions: tuple[str, ...]
    inputs: tuple[tuple[str, ...], ...]
    plan: Plan
    sizes: Sizes

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles hold the plan, not what was resolved."""
        return _remake, ({f.name: getattr(self, f.name) for f in fields(self)},)

    @property
    def hint(self) -> dict[str, int]:
        """The values that `plan` was made for."""
        return {s.name: s.hint for s in self.symbols}

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the graph at the hint."""
        return self.plan.fingerprint

    # -- what it needs -----------------------------------------------------------------------------------

    def place(self, values: Mapping[str, int]) -> Placement:
        """Offsets for these values, as they are: no validator, no second plan. Raises `ShapeOutOfRange`."""
        return self._place(values, thorough=False)

    def _place(self, values: Mapping[str, int], *, thorough: bool) -> Placement:
        numbers = self._evaluate(*self._checked(values))
        placed = self._placer.place([numbers[p] for p in self._buffer_sizes], thorough=thorough)
        pairs = zip(self._buffer_names, placed.offsets.tolist(), strict=True)
        return Placement(
            values=dict(values),
            offsets={name: offset for name, offset in pairs if offset >= 0},
            arena_size=placed.arena_size,
            max_live=placed.max_live,
        )

    def arena_size(self, values: Mapping[str, int]) -> int:
        """Bytes of the arena for these values."""
        return self.resolve(values).arena_size

    def max_live(self, values: Mapping[str, int]) -> int:
        """Largest sum of live buffer sizes over all steps for these values, bytes, alignment included."""
        return self.place(values).max_live

    def resolve(self, values: Mapping[str, int], within: Mapping[str, int] | None = None) -> Plan:
        """The plan for these values, validated. Raises `ShapeOutOfRange`; `InvalidSolution` rather than a bad plan.

        `within`: larger values, a bucket's. Then order and offsets are those of the plan for these, shared by all
        values in the bucket, where every buffer is at most as large there (else the plan is for the values alone).
        """
        given = self._checked(values)
        key = (given, given if within is None else self._checked(within))
        if key in self._resolved:
            self._resolved.move_to_end(key)
            return self._resolved[key]
        plan = self._inside(values, self.resolve(within)) if within is not None and key[0] != key[1] else None
        self._resolved[key] = plan = plan or self._good_enough(self._planned(values))
        if len(self._resolved) > _KEPT:
            self._resolved.popitem(last=False)
        return plan

    def require_in_range(self, values: Mapping[str, int]) -> None:
        """Raise `ShapeOutOfRange` naming the first value that is out of its range."""
        values_of(self.symbols, values)

    def covers(self, values: Mapping[str, int]) -> bool:
        """Whether all conditions hold for values in range; where one does not, a step needs a plan of its own."""
        return all(self._hold(*values_of(self.symbols, values)))

    # -- how it gets there -------------------------------------------------------------------------------

    def _checked(self, values: Mapping[str, int]) -> tuple[int, ...]:
        given = values_of(self.symbols, values)
        if not all(self._hold(*given)):
            broken = next(text for text, holds in zip(self.conditions, self._hold(*given), strict=True) if not holds)
            names = ", ".join(f"{name}={values[name]}" for name in self.hint)
            hint = f"narrow the range, or make a plan of its own for {names}"
            raise ShapeOutOfRange(f"the step was traced under the condition {broken}", where=names, hint=hint)
        return given

    def _planned(self, values: Mapping[str, int]) -> Plan:
        """The plan in the order and by the layout of the hint, validated."""
        schedule, problem, graph = self._problem(values, self.plan)
        return self._with(graph, schedule, problem, self._place(values, thorough=True).offsets)

    def _inside(self, values: Mapping[str, int], upper: Plan) -> Plan | None:
        """The plan with order and offsets of `upper`, validated; None where a buffer is larger than there."""
        schedule, problem, graph = self._problem(values, upper)
        largest = {b.id: b.size for b in upper.problem.buffers}
        if any(b.size > largest.get(b.id, -1) for b in problem.buffers):
            return None
        offsets = upper.solution.offsets
        return self._with(graph, schedule, problem, {b.id: offsets[b.id] for b in problem.buffers})

    def _problem(self, values: Mapping[str, int], base: Plan) -> tuple[Schedule, Problem, Graph]:
        """What there is to place for these values in the order of `base`."""
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
        """`plan`, unless it may need more than 1.25 times what any order and layout does and a new one needs less.

        The new one, like the bound, may take every in-place chance that these values leave. Red zones are for tests,
        and no reason to plan anew.
        """
        if plan.redzone or not plan.arena_size:
            return plan
        graph = with_chances(plan.graph) if any(op.chances for op in plan.graph.ops) else plan.graph
        if plan.arena_size <= _ENOUGH * working_set_bound(graph) or plan.arena_size <= _ENOUGH * self._cut_bound(graph):
            return plan
        anew = make_plan(
            model=plan.model,
            graph=graph,
            schedule=order(graph),
            alignment=plan.alignment,
            versions=plan.versions,
        )
        return anew if anew.arena_size < plan.arena_size else plan

    def _cut_bound(self, graph: Graph) -> int:
        """What proved the order of the hint, asked again."""
        schedule = self.plan.schedule
        if schedule.evidence is Evidence.BETWEEN:
            return cut_bound(graph, None)
        index = next((i for i, op in enumerate(graph.ops) if op.name == schedule.proof), None)
        return 0 if index is None else cut_bound(graph, index)

    @cached_property
    def _resolved(self) -> OrderedDict[tuple[tuple[int, ...], tuple[int, ...]], Plan]:
        return OrderedDict()

    @cached_property
    def _evaluate(self) -> Evaluate:
        return evaluator(self.sizes.expressions, list(self.hint))

    @cached_property
    def _hold(self) -> Evaluate:
        return holder(self.conditions, list(self.hint))

    @cached_property
    def _buffers(self) -> tuple[int, ...]:
        """The planned storages (by index) that an op touches, in the order of their births."""
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
    def _placer(self) -> Placer:
        from memplan.symbolic.place import Placer

        base = self.plan
        lives = storage_intervals(base.graph, base.schedule.order)
        offsets = [base.solution.offsets.get(name, 0) for name in self._buffer_names]
        return Placer([lives[i] for i in self._buffers], offsets, alignment=base.alignment, redzone=base.redzone)

    # -- what people see ---------------------------------------------------------------------------------

    def size_of(self, name: str) -> str:
        """Bytes of a storage as an expression. Raises `UnknownName`."""
        index = next((i for i, s in enumerate(self.plan.graph.storages) if s.name == name), None)
        if index is None:
            raise UnknownName(f"the plan has no storage {name!r}", where=name, hint="to_text() lists the buffers")
        return self.sizes.expressions[self.sizes.storages[index]]

    def to_text(self) -> str:
        """Symbols, conditions, what some values need, and every buffer with its bytes as an expression."""
        from memplan.symbolic.text import to_text

        return to_text(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON to `path`, whole or not at all. Raises `UnreadableFile` when it cannot be written."""
        from memplan.symbolic.planfile import save_symbolic

        save_symbolic(self, path)


def _remake(own: dict[str, Any]) -> SymbolicPlan:
    return SymbolicPlan(**own)


def make_symbolic(
    *,
    symbols: Sequence[Symbol],
    sizes: Sizes,
    plan: Plan,
    conditions: Sequence[str] = (),
    inputs: Sequence[Sequence[str]] = (),
) -> SymbolicPlan:
    """A symbolic plan from the plan for the hint, whose graph must be `stable` (see there) under its own order.

    Raises `InvalidPlan` when sizes, conditions and plan do not belong together.
    """
    graph = as_taken(plan.graph, plan.schedule.order)
    made = SymbolicPlan(
        symbols=tuple(symbols),
        conditions=tuple(conditions),
        inputs=tuple(map(tuple, inputs)),
        plan=replace(plan, graph=graph, schedule=_proven(graph, plan.schedule)) if graph != plan.graph else plan,
        sizes=sizes,
    )
    check_symbolic(made)
    return made


def _proven(graph: Graph, schedule: Schedule) -> Schedule:
    """The same order, with what is proven of orders of `graph`, which has fewer in-place chances."""
    plain = make_schedule(graph, schedule.order, schedule.policy)
    if schedule.evidence not in (Evidence.CUT, Evidence.BETWEEN):
        return plain
    op = next((i for i, op in enumerate(graph.ops) if op.name == schedule.proof), None)
    bound = cut_bound(graph, op)
    return (
        replace(plain, bound=bound, evidence=schedule.evidence, proof=schedule.proof) if bound > plain.bound else plain
    )


def stable(graph: Graph, sizes: Sizes) -> Graph:
    """The graph to plan for the hint: with those in-place chances only that every other value has too."""
    return always_alike(graph, sizes)


def check_symbolic(made: SymbolicPlan) -> None:
    """Raise `InvalidPlan` unless every part of a symbolic plan follows from the others. The plan of the hint is not
    looked at (see `memplan.plan.check_consistency`), but for what it may not have."""
    check_symbols(made.symbols)
    names = [s.name for s in made.symbols]
    for i, text in enumerate(made.conditions):
        if not Expression(text, names, f"conditions[{i}]").condition:
            raise InvalidPlan(f"{text!r} is no condition", where=f"conditions[{i}]")
    for i, shape in enumerate(made.inputs):
        for text in shape:
            Expression(text, names, f"inputs[{i}]")
    if made.plan.eviction is not None:
        raise InvalidPlan("has evictions, which hold for one size only", where="plan.eviction")
    graph = made.plan.graph
    if always_alike(graph, made.sizes) != graph or as_taken(graph, made.plan.schedule.order) != graph:
        raise InvalidPlan("has in-place chances that other values do not have", where="plan.graph")
    check_sizes(graph, made.sizes, made.symbols, evaluator(made.sizes.expressions, names))
    hints = tuple(s.hint for s in made.symbols)
    if not all(holder(made.conditions, names)(*hints)):
        raise InvalidPlan("do not hold for the hint", where="conditions")


def check_whole(made: SymbolicPlan) -> None:
    """`check_symbolic`, and all that is checked of a plan: for what comes from a file."""
    check_consistency(made.plan)
    check_symbolic(made)

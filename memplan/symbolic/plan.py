"""`SymbolicPlan`: one plan for a range of shapes. Made under a hint, resolved for any values of its symbols.

What never changes is fixed once: the ops, their order, lifetimes, which results take the bytes of which inputs, and
the order in which buffers are put down. Values then give sizes (`sizes.py`), offsets (`place.py`) and whole plans
(`resolve.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from memplan.core.graph import Graph
from memplan.core.plan import Plan, as_loaded
from memplan.core.schedule import Evidence, Schedule, make_schedule
from memplan.errors import InvalidPlan, UnknownName
from memplan.planning.consistency import check_consistency
from memplan.schedule import cut_bound
from memplan.symbolic.expression import Expression, evaluator, holder
from memplan.symbolic.resolve import Placement, Resolver
from memplan.symbolic.sizes import Sizes, always_alike, as_taken, check_sizes
from memplan.symbolic.symbols import Symbol, check_symbols, values_of


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
        return self._resolver.place(values)

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
        return self._resolver.resolve(values, within)

    def require_in_range(self, values: Mapping[str, int]) -> None:
        """Raise `ShapeOutOfRange` naming the first value that is out of its range."""
        values_of(self.symbols, values)

    def covers(self, values: Mapping[str, int]) -> bool:
        """Whether all conditions hold for values in range; where one does not, a step needs a plan of its own."""
        return self._resolver.covers(values)

    @cached_property
    def _resolver(self) -> Resolver:
        return Resolver(self.symbols, self.conditions, self.plan, self.sizes)

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
    looked at (see `memplan.core.plan.check_consistency`), but for what it may not have."""
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


def whole_as_loaded(made: SymbolicPlan) -> SymbolicPlan:
    """A symbolic plan from a file after `check_whole`, marked with what that did not prove (see `as_loaded`)."""
    return replace(made, plan=as_loaded(made.plan))

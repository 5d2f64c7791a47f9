"""`SymbolicPlan`: one plan for a range of shapes, made for hint values and resolved for any values of its symbols.

The ops, their order, their live intervals and in-place reuse are the same for all values. The values give sizes
(`sizes.py`), which are placed as those of any plan are.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from memplan.core import lifetimes
from memplan.core.plan import Plan, as_loaded
from memplan.core.problem import Problem
from memplan.core.schedule import make_schedule
from memplan.core.units import format_bytes, format_share
from memplan.core.validate import validate
from memplan.errors import InvalidPlan, ShapeOutOfRange, UnknownName
from memplan.planning.planfile import FileFormat, check_consistency
from memplan.report.sections import printable
from memplan.solvers import solve
from memplan.solvers.base import finish
from memplan.symbolic.sizes import (
    Evaluate,
    Expression,
    Sizes,
    Symbol,
    check_sizes,
    check_symbols,
    evaluator,
    graph_at,
    holder,
    values_of,
    with_stable_candidates,
    with_used_candidates,
)

_KEPT = 16  # resolved plans
_WORK = 100_000  # units for each placement: a call of a new shape waits for it


@dataclass(frozen=True, kw_only=True)
class SymbolicPlan:
    """A plan for all values of `symbols` in their ranges for which all `conditions` hold.

    `memplan.plan` makes one if `dynamic_shapes` is given; `memplan.load_symbolic` reads one from a file.

    Args:
        symbols: the varying dimensions, with their ranges and hints.
        conditions: conditions of the trace on the symbols, as expressions.
        inputs: the shapes of the tensors among the model's inputs, as expressions.
        plan: the plan for the hints.
        sizes: the sizes of `plan` as expressions.

    Example:
        >>> symbolic = memplan.load_symbolic("model.plan.json")
        >>> symbolic.arena_size({"batch": 32})
        >>> plan = symbolic.resolve({"batch": 32})
    """

    symbols: tuple[Symbol, ...]
    conditions: tuple[str, ...]
    inputs: tuple[tuple[str, ...], ...]
    plan: Plan
    sizes: Sizes

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields, without the plans that were resolved, for `copy` and `pickle`."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def hint(self) -> dict[str, int]:
        """The values that `plan` was made for."""
        return {s.name: s.hint for s in self.symbols}

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the graph at the hint."""
        return self.plan.fingerprint

    # -- what it needs -----------------------------------------------------------------------------------

    def arena_size(self, values: Mapping[str, int]) -> int:
        """Return the bytes of the arena of the plan for these values.

        Args:
            values: a value for each symbol.

        Returns:
            Bytes.

        Raises:
            ShapeOutOfRange: a value is missing or out of its range, or a condition does not hold.

        Example:
            >>> symbolic.arena_size({"batch": 32})
        """
        return self.resolve(values).arena_size

    def max_live(self, values: Mapping[str, int]) -> int:
        """Return the largest sum of live buffer sizes over all steps for these values.

        Args:
            values: a value for each symbol.

        Returns:
            Bytes, with alignment padding.

        Raises:
            ShapeOutOfRange: a value is missing or out of its range, or a condition does not hold.

        Example:
            >>> symbolic.max_live({"batch": 32})
        """
        return self.resolve(values).max_live

    def resolve(self, values: Mapping[str, int], within: Mapping[str, int] | None = None) -> Plan:
        """Make the validated plan for these values, with the order of the plan for the hints.

        Args:
            values: a value for each symbol.
            within: larger values, those of a bucket. The offsets are then those of the plan for the bucket, which all
                values in the bucket share, if no buffer is larger than in that plan.

        Returns:
            The plan. The last plans are kept and returned again.

        Raises:
            ShapeOutOfRange: a value is missing or out of its range, or a condition does not hold.
            InvalidSolution: the placement is invalid (a bug of memplan).

        Example:
            >>> plan = symbolic.resolve({"batch": 32})
        """
        given = self._checked(values)
        key = (given, given if within is None else self._checked(within))
        if key not in self._resolved:
            self._resolved[key] = self._made(given, None if key[0] == key[1] else self.resolve(within or values))
            if len(self._resolved) > _KEPT:
                self._resolved.popitem(last=False)
        self._resolved.move_to_end(key)
        return self._resolved[key]

    def _made(self, values: tuple[int, ...], upper: Plan | None) -> Plan:
        """Return the plan for these values, with the offsets of `upper` if no buffer is larger than there."""
        base = self.plan
        graph = graph_at(base.graph, self.sizes, self._evaluate(*values))
        schedule = make_schedule(graph, base.schedule.order, base.schedule.policy)
        problem = lifetimes.problem(graph, schedule, alignment=base.alignment, redzone=base.redzone)
        if upper is not None and _are_within(problem, upper.problem):
            offsets = {b.id: upper.solution.offsets[b.id] for b in problem.buffers}
            solution = finish(problem, offsets, solver="symbolic", seconds=0.0)
            validate(problem, solution)
        else:
            solution = base.solution if problem == base.problem else solve(problem, work_limit=_WORK)
        return replace(base, graph=graph, schedule=schedule, problem=problem, solution=solution, temporaries=None)

    @cached_property
    def _evaluate(self) -> Evaluate:
        return evaluator(self.sizes.expressions, [s.name for s in self.symbols])

    @cached_property
    def _holds(self) -> Evaluate:
        return holder(self.conditions, [s.name for s in self.symbols])

    @cached_property
    def _resolved(self) -> OrderedDict[tuple[tuple[int, ...], tuple[int, ...]], Plan]:
        return OrderedDict()

    def _checked(self, values: Mapping[str, int]) -> tuple[int, ...]:
        """Return the values in the order of the symbols; raise `ShapeOutOfRange` where a condition does not hold."""
        given = values_of(self.symbols, values)
        for text, holds in zip(self.conditions, self._holds(*given), strict=True):
            if not holds:
                names = ", ".join(f"{s.name}={values[s.name]}" for s in self.symbols)
                hint = f"narrow the range, or make a plan of its own for {names}"
                raise ShapeOutOfRange(f"the step was traced under the condition {text}", where=names, hint=hint)
        return given

    def require_in_range(self, values: Mapping[str, int]) -> None:
        """Raise an error that names the first value that is missing or out of its range.

        Args:
            values: a value for each symbol.

        Raises:
            ShapeOutOfRange: a value is missing or out of its range.

        Example:
            >>> symbolic.require_in_range({"batch": 32})
        """
        values_of(self.symbols, values)

    def covers(self, values: Mapping[str, int]) -> bool:
        """Return whether all conditions hold for these values; those for which one does not need another plan.

        Args:
            values: a value for each symbol, in its range.

        Returns:
            True if all hold.

        Raises:
            ShapeOutOfRange: a value is missing or out of its range.

        Example:
            >>> symbolic.covers({"batch": 32})
        """
        return all(self._holds(*values_of(self.symbols, values)))

    # -- what people see ---------------------------------------------------------------------------------

    def size_of(self, name: str) -> str:
        """Return the bytes of a storage as an expression of the symbols.

        Args:
            name: the name of the storage in the plan's graph.

        Returns:
            The expression, such as "4096*batch".

        Raises:
            UnknownName: the plan has no such storage.

        Example:
            >>> symbolic.size_of("gelu")
        """
        index = next((i for i, s in enumerate(self.plan.graph.storages) if s.name == name), None)
        if index is None:
            raise UnknownName(f"the plan has no storage {name!r}", where=name, hint="to_text() lists the buffers")
        return self.sizes.expressions[self.sizes.storages[index]]

    def to_text(self) -> str:
        """Return the plan as text: symbols, conditions, sizes for some values, and each buffer's bytes.

        Returns:
            The text; the bytes of a buffer are an expression of the symbols.

        Example:
            >>> print(symbolic.to_text())
        """

        return to_text(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to `path` as JSON, completely or not at all.

        Args:
            path: the file to write; `memplan.load_symbolic` reads it.

        Raises:
            UnreadableFile: the file cannot be written.

        Example:
            >>> symbolic.save("model.plan.json")
        """
        _FORM.write(self, path)


def _are_within(problem: Problem, upper: Problem) -> bool:
    """Return whether no buffer of a problem is larger than that of its name in another one."""
    largest = {b.id: b.size for b in upper.buffers}
    return all(b.size <= largest.get(b.id, -1) for b in problem.buffers)


def make_symbolic(
    *,
    symbols: Sequence[Symbol],
    sizes: Sizes,
    plan: Plan,
    conditions: Sequence[str] = (),
    inputs: Sequence[Sequence[str]] = (),
) -> SymbolicPlan:
    """Make a symbolic plan from the plan for the hints, whose graph must come from `with_stable_candidates`.

    Raises `InvalidPlan` if sizes, conditions and plan do not belong together.
    """
    graph = with_used_candidates(plan.graph, plan.schedule.order)
    if graph != plan.graph:
        plan = replace(plan, graph=graph, schedule=make_schedule(graph, plan.schedule.order, plan.schedule.policy))
    made = SymbolicPlan(
        symbols=tuple(symbols),
        conditions=tuple(conditions),
        inputs=tuple(map(tuple, inputs)),
        plan=plan,
        sizes=sizes,
    )
    check_symbolic(made)
    return made


def check_symbolic(made: SymbolicPlan) -> None:
    """Raise `InvalidPlan` unless the parts of a symbolic plan agree.

    The plan for the hints is only checked for what a symbolic plan must not have; `check_whole` checks it completely.
    """
    check_symbols(made.symbols)
    names = [s.name for s in made.symbols]
    for i, text in enumerate(made.conditions):
        if not Expression(text, names, f"conditions[{i}]").condition:
            raise InvalidPlan(f"{text!r} is not a condition", where=f"conditions[{i}]")
    for i, shape in enumerate(made.inputs):
        for text in shape:
            Expression(text, names, f"inputs[{i}]")
    if made.plan.eviction is not None:
        raise InvalidPlan("has evictions, which hold for one size only", where="plan.eviction")
    graph = made.plan.graph
    check_sizes(graph, made.sizes, made.symbols)
    kept = with_used_candidates(with_stable_candidates(graph, made.sizes), made.plan.schedule.order)
    if kept != graph:
        raise InvalidPlan("has in-place candidates that other values do not have", where="plan.graph")
    if not all(made._holds(*(s.hint for s in made.symbols))):
        raise InvalidPlan("do not hold for the hint", where="conditions")


def check_whole(made: SymbolicPlan) -> None:
    """Check a symbolic plan from a file: its parts, as `check_symbolic` does, and its plan for the hints completely."""
    check_consistency(made.plan)
    check_symbolic(made)


SYMBOLIC_VERSION = 3
_FORM = FileFormat(
    holds=SymbolicPlan,
    called="symbolic plan",
    version_of="symbolic",
    version=SYMBOLIC_VERSION,
    root="symbolic",
    check=check_whole,
    mark=lambda made: replace(made, plan=as_loaded(made.plan)),  # what it did not prove is claimed
    hint="make the plan anew: memplan.plan(model, example_inputs, dynamic_shapes=...).save(path)",
)


def load_symbolic(path: str | os.PathLike[str]) -> SymbolicPlan:
    """Read a saved symbolic plan and check its parts, with the independent validator for the plan of the hints.

    Args:
        path: a file written by `SymbolicPlan.save`.

    Returns:
        The symbolic plan, equal to the one that was saved.

    Raises:
        UnreadableFile: the file cannot be read or is not JSON.
        InvalidPlan: the content is not a symbolic plan of this version; names the path of the first fault.
        InvalidSolution: the offsets are invalid.

    Example:
        >>> symbolic = memplan.load_symbolic("model.plan.json")
        >>> plan = symbolic.resolve({"batch": 32})
    """
    return _FORM.read(path)


def to_text(plan: SymbolicPlan) -> str:
    """Return the plan as plain text, with the sizes for the smallest values, the hints and the largest values."""
    graph = plan.plan.graph
    lines = [f"{plan.plan.model}: {len(graph.ops)} steps, {len(plan.plan.problem.buffers)} buffers"]
    lines += [f"  {s.name} = {s.min}..{s.max}, planned under {s.hint}" for s in plan.symbols]
    lines += [f"  where {text}" for text in plan.conditions]
    lines += [f"  input {i}: [{', '.join(shape)}]" for i, shape in enumerate(plan.inputs)]
    ends = [{s.name: getattr(s, end) for s in plan.symbols} for end in ("min", "hint", "max")]
    for values in [v for i, v in enumerate(ends) if v not in ends[:i]]:
        named = ", ".join(f"{name}={value}" for name, value in values.items())
        try:
            placed = plan.resolve(values)
        except ShapeOutOfRange as error:
            lines.append(f"  {named}: {error.what}")
        else:
            need = f"arena {format_bytes(placed.arena_size)}, max live {format_bytes(placed.max_live)}"
            lines.append(f"  {named}: {need}, usage {format_share(1 - placed.fragmentation)}")
    lines += ["", "buffer: bytes"]
    lines += [f"  {printable(b.id)}: {plan.size_of(b.id)}" for b in plan.plan.problem.buffers]
    counted = Counter(plan.size_of(b.id) for b in plan.plan.problem.buffers)
    lines += ["", "bytes: buffers", *(f"  {text}: {n}" for text, n in counted.most_common())]
    return "\n".join(lines) + "\n"

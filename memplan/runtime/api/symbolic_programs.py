"""The programs of a module for sizes that vary, in one arena: `memplan.compile(..., dynamic_shapes=...)`.

For each state of the module (modes, gradients) the step is traced once, with symbols for sizes. The first call of a
shape resolves the plan for that shape, inserts the sizes into the arguments of the kernels and generates code. It uses
the kernels that the trial run of the first shape chose: nothing is traced or tried again. The most recently used
programs are kept. A shape that the trace does not cover (a size of 1, or a size that takes another branch) gets a
trace of its own, with symbols if possible, so that it covers similar shapes. Shapes out of range are mismatches.

All shapes share one arena, which has the size that the largest shape so far needed (with `bucketing`, the largest of
its bucket). It grows if a shape needs more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from memplan.errors import InvalidShapes, ShapeOutOfRange, UnsupportedGraph
from memplan.runtime.api.module_builder import ModuleBuilder
from memplan.runtime.api.module_programs import CallState, ModulePrograms, require_autocast
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards.input_guards import laid_out
from memplan.runtime.kernels import BoundOp, with_arguments
from memplan.runtime.programs import Programs
from memplan.symbolic import SymbolicPlan
from memplan.trace.dynamic.dims import SymbolicTrace
from memplan.trace.traced import KernelCall, Source, TracedGraph

_KEPT = 16  # programs
_FAMILIES = 6  # traces for a state of the module
_SPECIAL = 2  # sizes up to this one are traced as constants: torch specializes on them


@dataclass(slots=True)
class Family:
    """All shapes of one state: their trace, their plan, and the bound ops of the first program's trial run."""

    trace: SymbolicTrace
    plan: SymbolicPlan
    kernels: tuple[KernelCall, ...] = ()
    bound: tuple[BoundOp, ...] | None = None

    def values(self, flat: Sequence[Any]) -> dict[str, int] | None:
        """Return the values of its symbols in a call with these leaves; None if it does not cover the call."""
        rows = zip(flat, self.trace.traced.example_inputs, self.trace.dims.leaves, strict=True)
        for x, example, varying in rows:
            if isinstance(x, torch.Tensor):
                pairs = enumerate(zip(x.shape, example.shape, strict=True))
                if any(size != planned and dim not in varying for dim, (size, planned) in pairs):
                    return None
        values = self.trace.values_of(flat)
        ranges = zip(values.values(), self.plan.symbols, strict=True)
        within = all(s.min <= value <= s.max for value, s in ranges)
        return values if within and self.plan.covers(values) else None

    def rebound(self, traced: TracedGraph) -> tuple[BoundOp, ...] | None:
        """Return the bound ops with the arguments of another shape; None before the first program."""
        if self.bound is None:
            return None
        kernels = [k for k in traced.kernels if isinstance(k, KernelCall)]
        rows = zip(self.bound, self.kernels, kernels, strict=True)
        return tuple(with_arguments(b, old, new) for b, old, new in rows)


class SymbolicPrograms(ModulePrograms):
    """Programs for every shape of a module's calls, made from a `Family` that covers it, or for this shape alone.

    `of_shapes`: the programs for shapes in range, in each state; the others are those of calls that differ otherwise.
    """

    def __init__(
        self,
        builder: ModuleBuilder,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        train: bool,
        backward_on_demand: bool = False,
    ) -> None:
        self.builder, self._module_guards = builder, builder.guards
        self._bucketing: Mapping[str, int] = builder.options.bucketing or {}
        self.family = Family(*builder.symbolic(args, kwargs, train, frozenset()))
        _check_buckets(self._bucketing, self.family)
        flat, self.spec = pytree.tree_flatten((args, kwargs))
        self._main_state = CallState(train, tuple(self._module_guards.modes()))
        self._families = {self._main_state: [self.family]}
        self.of_shapes = Programs[Runner]()
        self.of_shapes.most = _KEPT
        key = (self._main_state, _shapes(flat))
        main = self.of_shapes.of(key, lambda: self._new(self._main_state, flat, args, kwargs))
        super().__init__(builder, main, backward_on_demand=backward_on_demand)
        self.of_shapes.passing = self.passing

    def select(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Runner, list[Any]]:
        """Return the program for the current state and the shapes of the call, and the leaves as it takes them.

        Raises `InputMismatch` (for shapes, `ShapeOutOfRange`) naming the first difference from what is planned.
        """
        modes = self._module_guards.modes()
        grad = self._records(args, kwargs)
        require_autocast(self.main)
        self._check_modes(modes)
        flat = self.main.input_guards.leaves_of(args, kwargs)
        state = CallState(grad, tuple(modes))

        def make() -> Runner:
            self._require_free(self.builder.arena)
            made = self._made(state, flat, *pytree.tree_unflatten(flat, self.spec))
            self.main = made if state == self._main_state else self.main
            return made

        runner = self._found(self.of_shapes, state, (state, _shapes(flat)), make)
        self._require_free(runner.arena)
        return runner, runner.input_guards.flatten(args, kwargs, training=grad)

    def __iter__(self) -> Iterator[Runner]:
        return iter((*super().__iter__(), *self.of_shapes))

    # -- new programs ------------------------------------------------------------------------------------

    def _made(self, state: CallState, flat: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Runner:
        """Return a new program, after checking the call and that the model is still what was traced."""
        self._require_same_kind(flat)
        self.main.current()
        self.family.plan.require_in_range(self.family.trace.values_of(flat))
        return self._new(state, flat, args, kwargs)

    def _new(self, state: CallState, flat: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Runner:
        """Return a program of the first family that covers the call, else of a new family, else for this call alone."""
        families = self._families.setdefault(state, [])
        for family in families:
            values = family.values(flat)
            if values is not None:
                return self._program(family, values, flat)
        every = self.family.trace.values_of(flat)
        small = frozenset(name for name, value in every.items() if value <= _SPECIAL)
        if len(families) < _FAMILIES and len(small) < len(every):
            found = self._covering(state, flat, args, kwargs, small)
            if found is not None:
                family, values = found
                families.append(family)
                return self._program(family, values, flat)
        return self._built(args, kwargs, train=state.grad)

    def _covering(
        self,
        state: CallState,
        flat: Sequence[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fixed: frozenset[str],
    ) -> tuple[Family, dict[str, int]] | None:
        """Return a new family and the values of a call in it; None if no family of several sizes covers the call."""
        try:
            family = Family(*self.builder.symbolic(args, kwargs, state.grad, fixed))
        except (InvalidShapes, UnsupportedGraph):  # the model works for this size only, or no dimension can be a symbol
            return None
        values = family.values(flat)
        return None if values is None else (family, values)

    def _program(self, family: Family, values: Mapping[str, int], flat: Sequence[Any]) -> Runner:
        """Return the program of a family for some values of its symbols."""
        within = {
            s.name: min(_round_up(values[s.name], self._bucketing.get(s.name, 1)), s.max) for s in family.plan.symbols
        }
        if not family.plan.covers(within):
            within = dict(values)
        plan, room = family.plan.resolve(values, within), family.plan.resolve(within).arena_size
        traced = family.trace.at(values, flat)
        always_try = self.builder.options.sanitize is not None  # every program needs its own trial run
        runner = self.builder.assemble(
            replace(traced, example_inputs=_with_traced_strides(traced)),
            plan,
            room,
            None if always_try else family.rebound(traced),
        )
        if family.bound is None:
            family.bound = runner.program.bound
            family.kernels = tuple(k for k in traced.kernels if isinstance(k, KernelCall))
        return runner

    def _require_same_kind(self, flat: Sequence[Any]) -> None:
        """Raise `InputMismatch` if a leaf differs from the example in more than the dimensions that vary."""
        guards, varying = self.main.input_guards, self.family.trace.dims.leaves
        for i, (x, example) in enumerate(zip(flat, guards.examples, strict=True)):
            if not isinstance(example, torch.Tensor):
                guards.check_constant(i, x)
                continue
            guards.check_tensor(i, x, sizes=None)
            for dim, (size, planned) in enumerate(zip(x.shape, example.shape, strict=True)):
                if size != planned and dim not in varying[i]:
                    what = f"dimension {dim} is {size}, the plan was made for {planned}"
                    hint = "let it vary: name it in dynamic_shapes"
                    raise ShapeOutOfRange(what, where=guards.names[i], hint=hint)
        guards.check_ties(flat)


def _shapes(flat: Sequence[Any]) -> tuple[torch.Size | None, ...]:
    return tuple(x.shape if isinstance(x, torch.Tensor) else None for x in flat)


def _with_traced_strides(traced: TracedGraph) -> tuple[Any, ...]:
    """Return the example inputs with the traced strides, without their autograd history."""
    leaves = [
        x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in traced.example_inputs
    ]
    for b in traced.bound(Source.INPUT):
        x, strides = leaves[b.index], traced.graph.values[b.value].strides
        if x.stride() != strides:
            like = laid_out(x.detach(), strides, traced.input_name(b.index))
            leaves[b.index] = like.requires_grad_(x.requires_grad)
    return tuple(leaves)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _check_buckets(bucketing: Mapping[str, int], family: Family) -> None:
    names = [s.name for s in family.plan.symbols]
    for name, multiple in bucketing.items():
        if name not in names:
            raise InvalidShapes(
                f"there is no dimension {name!r}", where="bucketing", hint=f"one of: {', '.join(names)}"
            )
        if type(multiple) is not int or multiple < 1:
            hint = "give the multiple up to which its sizes are rounded"
            raise InvalidShapes(f"{multiple!r} is not a whole number from 1", where=f"bucketing[{name!r}]", hint=hint)

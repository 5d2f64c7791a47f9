"""Calls of many shapes in one arena: `memplan.compile(..., dynamic_shapes=...)`.

For each state of the module (modes, gradients) the step is traced once, with symbols for sizes. The first call of a
shape resolves the plan for it, fills the numbers into the kernels' arguments and generates code: what was bound to the
ops by the trial of the first shape is bound again, nothing is traced or tried. Such programs are kept, the last few
used. Shapes that the trace does not cover (a size of 1, or one for which a branch is taken otherwise) get a trace of
their own, if it can be with symbols again, so that it covers others like them. Shapes out of range are mismatches.

All of them run in one arena, which is as large as the largest shape so far has needed (with `bucketing`, the largest of
its bucket). When a shape needs more, a larger arena takes the place of the old one, and with it the programs made
there. A step in flight keeps its own arena until its backward has run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from memplan.errors import InputMismatch, InvalidShapes, ShapeOutOfRange, UnsupportedGraph
from memplan.runtime.api.builder import Builder
from memplan.runtime.api.select import Selector, State, require_autocast
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards.input_guards import laid_out
from memplan.runtime.kernels.kernel_selection import BoundOp, with_arguments
from memplan.symbolic import SymbolicPlan
from memplan.trace.dynamic.varying import SymbolicTrace
from memplan.trace.traced import KernelCall, Source, TracedGraph

_KEPT = 16  # programs
_FAMILIES = 6  # traces for a state of the module
_SPECIAL = 2  # sizes up to here are traced as what they are: torch does not take them for any size


@dataclass(slots=True)
class Family:
    """All shapes of one state: trace, plan, and what the first program's trial bound to the traced ops."""

    trace: SymbolicTrace
    plan: SymbolicPlan
    kernels: tuple[KernelCall, ...] = ()
    bound: tuple[BoundOp, ...] | None = None

    def values(self, flat: Sequence[Any]) -> dict[str, int] | None:
        """The values of its symbols in a call with these leaves; None for one that it does not cover."""
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
        """The bound ops with the arguments of another shape."""
        if self.bound is None:
            return None
        kernels = [k for k in traced.kernels if isinstance(k, KernelCall)]
        rows = zip(self.bound, self.kernels, kernels, strict=True)
        return tuple(with_arguments(b, old, new, traced.graph) for b, old, new in rows)


class ShapedSelector(Selector):
    """As `Selector`, with a program for every shape: of a `Family` where one covers it, else for this shape alone."""

    def __init__(
        self, builder: Builder, args: tuple[Any, ...], kwargs: dict[str, Any], *, train: bool, follows: bool = False
    ) -> None:
        self._builder, self._structure = builder, builder.structure
        self._bucketing: Mapping[str, int] = builder.options.bucketing or {}
        self.family = Family(*builder.symbolic(args, kwargs, train, frozenset()))
        _check_buckets(self._bucketing, self.family)
        flat, self.spec = pytree.tree_flatten((args, kwargs))
        self._main_state = State(train, tuple(self._structure.modes()))
        self._families = {self._main_state: [self.family]}
        self.programs: OrderedDict[Any, Runner] = OrderedDict()
        main = self._new(self._main_state, flat, args, kwargs)
        super().__init__(builder, main, follows=follows)
        self._keep((self._main_state, _shapes(flat)), main)

    def select(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Runner, list[Any]]:
        """The program for the current state and the shapes of the call, and the leaves as it takes them.

        Raises `InputMismatch` (of shapes, `ShapeOutOfRange`) naming the first difference from what is planned.
        """
        modes = self._structure.modes()
        grad = self._records(args, kwargs)
        require_autocast(self.main)
        self._check_modes(modes)
        flat = self.main.signature.leaves_of(args, kwargs)
        key = (State(grad, tuple(modes)), _shapes(flat))
        runner = self.programs.get(key)
        if runner is None:
            self._require_free(self._builder.arena)
            runner = self._made(key[0], flat, *pytree.tree_unflatten(flat, self.spec))
            self._keep(key, runner)
        self.programs.move_to_end(key)
        self._require_free(runner.arena)
        return runner, runner.signature.flatten(args, kwargs, training=grad)

    def replan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Runner, list[Any]]:
        """As `Selector.replan`, in the one arena."""
        runner, leaves = super().replan(args, kwargs)
        self._leave_other_arenas(runner)
        return runner, leaves

    # -- what is kept ------------------------------------------------------------------------------------

    def _keep(self, key: tuple[State, Any], runner: Runner) -> None:
        """Keep a program, and of those before the last few."""
        self.programs[key] = runner
        if key[0] == self._main_state:
            self.main = runner
        self._leave_other_arenas(runner)
        while len(self.programs) > _KEPT:
            self.programs.popitem(last=False)

    def _leave_other_arenas(self, runner: Runner) -> None:
        """Forget all programs that are not in the arena of `runner`, which has outgrown theirs."""
        for programs in (self.programs, self._runners):
            for key in [k for k, other in programs.items() if other.arena is not runner.arena]:
                del programs[key]
        if self.main.arena is not runner.arena:
            flat = self.main.traced.example_inputs
            args, kwargs = pytree.tree_unflatten(flat, self.spec)
            self.main = self._new(self._main_state, flat, args, kwargs)

    # -- what is made ------------------------------------------------------------------------------------

    def _made(self, state: State, flat: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Runner:
        """A new program. What varies is checked before anything is built, and that the model is what was traced."""
        self._require_alike(flat)
        self.main.current()
        self.family.plan.require_in_range(self.family.trace.values_of(flat))
        return self._new(state, flat, args, kwargs)

    def _new(self, state: State, flat: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Runner:
        """A program from the first family that covers the call, else from a new one, else for this call alone."""
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
        return self._built((state, _shapes(flat)), args, kwargs, train=state.grad)

    def _covering(
        self, state: State, flat: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any], fixed: frozenset[str]
    ) -> tuple[Family, dict[str, int]] | None:
        """A new family and the values of a call in it; None when no family of more than one size covers the call."""
        try:
            family = Family(*self._builder.symbolic(args, kwargs, state.grad, fixed))
        except (InvalidShapes, UnsupportedGraph):  # there the model works for one size only, or none can be a symbol
            return None
        values = family.values(flat)
        return None if values is None else (family, values)

    def _program(self, family: Family, values: Mapping[str, int], flat: Sequence[Any]) -> Runner:
        """The program of a family for some values."""
        within = {s.name: min(_up(values[s.name], self._bucketing.get(s.name, 1)), s.max) for s in family.plan.symbols}
        if not family.plan.covers(within):
            within = dict(values)
        plan, room = family.plan.resolve(values, within), family.plan.resolve(within).arena_size
        traced = family.trace.at(values, flat)
        always_try = self._builder.options.sanitize is not None  # a trial for every program
        runner = self._builder.assemble(
            replace(traced, example_inputs=_laid_out(traced)),
            plan,
            room,
            None if always_try else family.rebound(traced),
        )
        if family.bound is None:
            family.bound = runner.program.bound
            family.kernels = tuple(k for k in traced.kernels if isinstance(k, KernelCall))
        return runner

    def _require_alike(self, flat: Sequence[Any]) -> None:
        """Raise `InputMismatch` for a leaf that differs from the example in more than the dimensions that vary."""
        examples, varying = self.main.signature.examples, self.family.trace.dims.leaves
        for i, (x, example) in enumerate(zip(flat, examples, strict=True)):
            where, hint = f"input {i}", "pass what the example is like, or compile for this input too"
            if not isinstance(example, torch.Tensor):
                self.main.signature.check_constant(i, x)
            elif not isinstance(x, torch.Tensor):
                raise InputMismatch(f"is a {type(x).__name__}, the plan was made for a tensor", where=where, hint=hint)
            elif (x.dtype, x.device, x.dim()) != (example.dtype, example.device, example.dim()):
                wanted = f"{example.dtype} {tuple(example.shape)} on {example.device}"
                what = f"is {x.dtype} {tuple(x.shape)} on {x.device}, the plan was made for {wanted}"
                raise InputMismatch(what, where=where, hint=hint)
            else:
                for dim, (size, planned) in enumerate(zip(x.shape, example.shape, strict=True)):
                    if size != planned and dim not in varying[i]:
                        what = f"dimension {dim} is {size}, the plan was made for {planned}"
                        hint = "let it vary: name it in dynamic_shapes"
                        raise ShapeOutOfRange(what, where=where, hint=hint)
        self.main.signature.check_ties(flat)


def _shapes(flat: Sequence[Any]) -> tuple[torch.Size | None, ...]:
    return tuple(x.shape if isinstance(x, torch.Tensor) else None for x in flat)


def _laid_out(traced: TracedGraph) -> tuple[Any, ...]:
    """The example inputs with the strides that were traced, apart from what made them."""
    leaves = [
        x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in traced.example_inputs
    ]
    for b in traced.bound(Source.INPUT):
        x, strides = leaves[b.index], traced.graph.values[b.value].strides
        if x.stride() != strides:
            leaves[b.index] = laid_out(x.detach(), strides, f"input {b.index}").requires_grad_(x.requires_grad)
    return tuple(leaves)


def _up(value: int, multiple: int) -> int:
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

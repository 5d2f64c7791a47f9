"""Chooses the kernels of a model for `kernels="auto"`: both kinds run on the example, and the better one is kept."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from memplan.core.plan import Plan
from memplan.core.units import format_bytes
from memplan.errors import BudgetInfeasible, MemplanError, UnsupportedCall, UnsupportedGraph
from memplan.runtime.api.builder import Builder
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.execute.runner import Runner
from memplan.runtime.execute.step_time import step_seconds
from memplan.runtime.options import CompileOptions
from memplan.trace.capture.quiet import quiet

_log = logging.getLogger("memplan")
_ALIKE = 0.02  # a share of the shorter time: programs whose times differ by less are as fast as each other
_TURNS = 3  # of each program, so that what else the machine does meets both


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedKernels:
    """A program that was run on the example: its kernels, the seconds of a step, and its total in bytes."""

    kernels: Literal["aten", "inductor"]
    seconds: float
    total: int


@dataclass(slots=True, kw_only=True)
class _TriedProgram:
    """A program that can be run on the example, in an arena that is there only while it runs."""

    options: CompileOptions
    builder: Builder
    runner: Runner
    leaves: Sequence[Any]

    def seconds(self) -> float:
        """Return the seconds of a step."""
        self.runner = self.builder.again(self.runner)
        try:
            return step_seconds(self.runner, self.leaves)
        finally:
            self.builder.free_arena()


def with_chosen_kernels(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    options: CompileOptions,
    train: bool | None,
    given: Plan | None,
) -> CompileOptions:
    """Return the options with the kernels that are better for a call, and why.

    Both kinds are planned, and run on the example in turns; one arena is there at a time. Where only one kind can be
    planned, it is taken; where none can, "aten", whose error the caller gets.

    Raises `UnsupportedCall` beside a given plan, which names its kernels, and beside measured costs.
    """
    for name, is_given in (("plan", given is not None), ("costs='measure'", options.measures)):
        if is_given:
            hint = 'name the kernels: kernels="aten" or kernels="inductor"'
            raise UnsupportedCall(
                "cannot be combined with kernels='auto'", where=name, hint=hint, see="inductor-options"
            )
    train = model.training if train is None else train
    aten = replace(options, kernels="aten", prefer="time")
    try:
        fused = replace(options, kernels="inductor", prefer="time")
        with quiet():
            second = _built(model, args, kwargs, options=fused, train=train)
    except MemplanError as refused:
        return _chosen(aten, f"inductor's cannot be had: {str(refused).splitlines()[0]}")
    try:
        with quiet():
            first = _built(model, args, kwargs, options=aten, train=train)
    except BudgetInfeasible:
        return _chosen(fused, "no plan with eager's keeps the budget")
    except UnsupportedGraph:
        return aten
    eager, inductor = _tried_in_turns(first, second)
    best = choose(eager, inductor, prefer=options.prefer, within_budget=options.has_budget)
    other = inductor if best is eager else eager
    why = (
        f"{best.seconds * 1e3:.3g} ms and {format_bytes(best.total)} a step; "
        f"{other.kernels}: {other.seconds * 1e3:.3g} ms and {format_bytes(other.total)} (prefer={options.prefer!r})"
    )
    return _chosen(aten if best is eager else fused, why)


def choose(
    aten: TriedKernels, inductor: TriedKernels, *, prefer: Literal["time", "memory"], within_budget: bool
) -> TriedKernels:
    """Return the better of two programs.

    "memory" takes the one that needs less. "time" takes the faster one, and the one that needs less of two that are as
    fast; Inductor's kernels only if they need no more than eager's, or if both keep a budget.
    """
    less = min(aten, inductor, key=lambda one: (one.total, one.seconds))
    fastest = min(aten.seconds, inductor.seconds)
    if prefer == "memory" or abs(inductor.seconds - aten.seconds) <= _ALIKE * fastest:
        return less
    faster = inductor.seconds < aten.seconds and (within_budget or inductor.total <= aten.total)
    return inductor if faster else aten


def _built(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, options: CompileOptions, train: bool
) -> _TriedProgram:
    """Return a program, whose arena is freed."""
    builder = Builder(model, options, Hooks())
    runner = builder.build(args, kwargs, train)
    builder.free_arena()
    leaves = runner.input_guards.leaves_of(args, kwargs)
    return _TriedProgram(options=options, builder=builder, runner=runner, leaves=leaves)


def _tried_in_turns(*candidates: _TriedProgram) -> list[TriedKernels]:
    """Return the figures of each program: the fewest seconds of several turns, in each of which all of them run."""
    turns = [[candidate.seconds() for candidate in candidates] for _ in range(_TURNS)]
    found = []
    for candidate, seconds in zip(candidates, zip(*turns, strict=True), strict=True):
        kernels = candidate.options.kernels
        assert kernels != "auto"
        found.append(TriedKernels(kernels=kernels, seconds=min(seconds), total=candidate.runner.plan.total))
    return found


def _chosen(options: CompileOptions, why: str) -> CompileOptions:
    """Return the options with the reason for their kernels, and log it."""
    _log.info("kernels=%r: %s", options.kernels, why)
    return replace(options, why_kernels=f"{options.kernels}: {why}")

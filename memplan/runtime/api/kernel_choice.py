"""Chooses the kernels of a model for `kernels="auto"`: both kinds run on the example, and the better one is kept."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from memplan.core.plan import Plan
from memplan.core.units import format_bytes
from memplan.errors import BudgetInfeasible, MemplanError, UnsupportedCall, UnsupportedGraph
from memplan.runtime.api.builder import Builder
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.execute.runner import Runner
from memplan.runtime.execute.step_time import step_seconds
from memplan.runtime.options import CompileOptions
from memplan.trace.capture.front_ends import quiet

_log = logging.getLogger("memplan")
_ALIKE = 0.01  # a share of the shorter time: programs whose times differ by less are as fast as each other
_TURNS = 3  # of each program, so that what else the machine does meets both


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedKernels:
    """A program that was run on the example: its kernels, the seconds of a step, and its total in bytes."""

    kernels: Literal["aten", "inductor"]
    seconds: float
    total: int


@dataclass(slots=True, kw_only=True)
class _TriedProgram:
    """A program that is run on the example, in an arena that is there only while it runs.

    `seconds`: those of a step, the fewest so far. `failed`: what a run has raised, after which there are no more.
    """

    builder: Builder
    runner: Runner
    leaves: Sequence[Any]
    seconds: float = math.inf
    failed: MemplanError | torch.OutOfMemoryError | None = None

    def run(self) -> None:
        """Run the step a few times, and time it."""
        if self.failed is not None:
            return
        try:
            self.runner = self.builder.again(self.runner)
            self.seconds = min(self.seconds, step_seconds(self.runner, self.leaves))
        except (MemplanError, torch.OutOfMemoryError) as error:
            self.failed = error.with_traceback(None)  # which refers to what it has allocated
        finally:
            self.builder.free_arena()

    def tried(self, kernels: Literal["aten", "inductor"]) -> TriedKernels:
        """Return its figures."""
        return TriedKernels(kernels=kernels, seconds=self.seconds, total=self.runner.plan.total)


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
    planned, or run, it is taken; where none can be planned, "aten", whose error the caller gets.

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
    except UnsupportedGraph as refused:
        return _chosen(fused, f"eager's cannot be had: {str(refused).splitlines()[0]}")
    return _better((aten, first), (fused, second), options)


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
    return _TriedProgram(builder=builder, runner=runner, leaves=leaves)


def _better(
    eagers: tuple[CompileOptions, _TriedProgram], inductors: tuple[CompileOptions, _TriedProgram], asked: CompileOptions
) -> CompileOptions:
    """Return the options of the better one of two programs, which run in turns; of one that runs, if the other cannot.

    Raises what a program has raised if none runs.
    """
    (aten, first), (fused, second) = eagers, inductors
    with quiet():
        for _ in range(_TURNS):
            first.run()
            second.run()
    if first.failed is not None:
        if second.failed is not None:
            raise first.failed
        return _chosen(fused, f"eager's cannot run: {str(first.failed).splitlines()[0]}")
    if second.failed is not None:
        return _chosen(aten, f"inductor's cannot run: {str(second.failed).splitlines()[0]}")
    eager, inductor = first.tried("aten"), second.tried("inductor")
    best = choose(eager, inductor, prefer=asked.prefer, within_budget=asked.has_budget)
    other = inductor if best is eager else eager
    why = (
        f"{best.seconds * 1e3:.3g} ms and {format_bytes(best.total)} a step; "
        f"{other.kernels}: {other.seconds * 1e3:.3g} ms and {format_bytes(other.total)} (prefer={asked.prefer!r})"
    )
    return _chosen(aten if best is eager else fused, why)


def _chosen(options: CompileOptions, why: str) -> CompileOptions:
    """Return the options with the reason for their kernels, and log it."""
    _log.info("kernels=%r: %s", options.kernels, why)
    return replace(options, why_kernels=f"{options.kernels}: {why}")

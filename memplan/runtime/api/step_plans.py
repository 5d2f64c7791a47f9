"""The programs of a compiled step: for each kind of call one `StepPlan`, with a program for each update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from memplan.runtime.execute.optimizer_state import StepGuards
from memplan.runtime.execute.recorded_state import UpdateRun
from memplan.runtime.execute.runner import Runner
from memplan.trace.optimizer.updates import ACCUMULATED, COUNTERS
from memplan.trace.traced import Source, TracedGraph
from memplan.trace.whole_step import CapturedLoss

MOST_UPDATES = 8  # programs of one plan that differ in the optimizer's update
_MOST_RECORDED = 64  # recordings of updates that one plan keeps


@dataclass(slots=True)
class Assembled:
    """A program with the trace that it was assembled from, so that it can be assembled again in a larger arena.

    `counted`: the parameters whose step counters it has in one tensor.
    """

    traced: TracedGraph
    runner: Runner
    counted: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.counted = next((b.names for b in self.traced.bound(Source.STATE) if b.key == COUNTERS), ())


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateProgram:
    """The program of one update. `alone`: it keeps the gradients, and the optimizer's own `step()` runs after it."""

    program: Assembled
    alone: bool = False


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """The programs for calls of one kind: batches of one layout, in one state of the model.

    `loss`: its forward and backward. `modes` and `update_key`: the training flags of all submodules, and what
    `StepGuards.update_key` was. `adding`: the program of calls that only add to the sums of gradients. `fused`: the
    program with torch's fused update, or None: then `recorded` has each update that was seen, with its program.
    `forgotten`: its programs could not be assembled again, because the model has changed.
    """

    loss: CapturedLoss
    modes: list[bool]
    update_key: Any
    adding: Assembled | None = None
    fused: UpdateProgram | None = None
    recorded: list[tuple[UpdateRun | None, UpdateProgram]] = field(default_factory=list)
    current: tuple[UpdateRun | None, UpdateProgram] | None = None
    forgotten: bool = False

    @property
    def programs(self) -> list[Assembled]:
        """Its programs, each once."""
        updates = [self.fused] if self.fused is not None else [program for _, program in self.recorded]
        found = [self.adding, *(one.program for one in updates)]
        return list({id(one): one for one in found if one is not None}.values())

    def update(
        self, guards: StepGuards, build: Callable[[UpdateRun | None], UpdateProgram], *, begins: bool
    ) -> tuple[UpdateRun | None, UpdateProgram]:
        """Return the program of the optimizer's next update, and the recording of that (None: it needs none).

        `build` makes a new program; None stands for one that keeps the gradients. `begins`: the plan ran last too.
        """
        if self.fused is not None:
            return None, self.fused
        if self.current is not None and begins and _holds(self.current[0]):
            return self.current
        found = next((one for one in self.recorded if _holds(one[0])), None)
        if found is None:
            run = recorded_run(self.loss)
            programs = {one.recorded.signature: p for one, p in self.recorded if one is not None}
            if run is not None and run.recorded.signature not in programs and len(programs) >= MOST_UPDATES:
                run = None
            known = None if run is None else programs.get(run.recorded.signature)
            guards.expect({} if run is None else run.pending())
            found = run, build(run) if known is None else known
            self.recorded.append(found)
            if len(self.recorded) > _MOST_RECORDED:
                del self.recorded[0]
        guards.expect({} if found[0] is None else found[0].pending())
        self.current = found
        return found


def recorded_run(loss: CapturedLoss) -> UpdateRun | None:
    """Return the recording of the optimizer's next step; None if it cannot be traced, with a warning in the log."""
    recorded = loss.record_or_none()
    return None if recorded is None else UpdateRun(recorded, loss.model, loss.optimizer)


def _holds(run: UpdateRun | None) -> bool:
    return run is None or run.holds()


def step_alone(guards: StepGuards, runner: Runner, clip_grad_norm: float | None, *, sums: bool) -> None:
    """Run the optimizer's own step on the gradients that a program has kept. `sums`: they start from zero again."""
    optimizer = guards.optimizer
    bindings = runner.traced.bound(Source.STATE)
    kept = [guards.model.get_parameter(b.name) for b in bindings if b.key == ACCUMULATED]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = {p: p.grad for p in parameters}
    sums_of = guards.accumulated()
    gradients = {p: sums_of[p] for p in kept}
    try:
        for p in parameters:
            p.grad = gradients.get(p)
        if clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip_grad_norm)
        optimizer.step()
    finally:
        for p, gradient in before.items():
            p.grad = gradient
    if sums:
        for total in gradients.values():
            total.zero_()

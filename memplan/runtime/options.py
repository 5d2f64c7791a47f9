"""The options of `memplan.compile` and `memplan.compile_step`, validated when they are created."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memplan.core.division import compression_of, division_of
from memplan.core.legal_orders import require_legal
from memplan.core.plan import Plan
from memplan.errors import InputMismatch, InvalidShapes, MemplanError, PlanMismatch, UnsupportedCall
from memplan.planning.planfile import load
from memplan.runtime.debug.sanitizers import SANITIZERS, redzone_of
from memplan.trace import alignment_of, plan_traced, stay_in_arena
from memplan.trace.dynamic.dims import refuse_beside
from memplan.trace.graph.remap_to_plan import require_planned
from memplan.trace.traced import TracedGraph

ON_MISMATCH = ("error", "eager", "replan", "passive")
MEASURE = "measure"  # a value of `costs`


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options that decide how a traced step is planned and checked; every way to compile takes them.

    `memplan.compile` describes each of them.
    """

    budget: Any = None
    policy: Any = "auto"
    costs: Any = None
    divide: Any = None
    compress: str | None = None
    schedule: Any = "auto"
    solver: Any = "auto"
    layout: str = "auto"
    time_limit: float | None = None
    in_place: bool = True
    sanitize: str | None = None
    device: Any = None

    def __post_init__(self) -> None:
        require_choice("sanitize", self.sanitize, (None, *SANITIZERS))
        require_choice("in_place", self.in_place, (True, False))
        division_of(self.divide)
        compression_of(self.compress)

    @property
    def measures(self) -> bool:
        """Whether the first steps are measured. Raises `MemplanError` without a budget: costs have no effect then."""
        if not (isinstance(self.costs, str) and self.costs == MEASURE):
            return False
        if self.budget is None:
            hint = "give a budget (and no plan), or leave costs out"
            raise MemplanError(
                "without a budget, nothing depends on costs", where=f"costs={MEASURE!r}", hint=hint, see="measure"
            )
        return True

    def settle(self, traced: TracedGraph, given: Plan | None, *, room: int = 0) -> tuple[TracedGraph, Plan]:
        """Return the step, rewritten as its plan divides it, and the plan: the given one, or a new one.

        `room`: the bytes of an arena that exists already.
        """
        if given is not None:
            divided = traced.rewritten(given.division, given.compress)
            return replace(divided, again=None), self.require_fit(divided, given)
        plan = self.plan(traced, room=room)
        return replace(traced.rewritten(plan.division, plan.compress), again=None), plan

    def plan(self, traced: TracedGraph, *, room: int = 0) -> Plan:
        """Return a new plan of a traced step. `room`: the bytes of an existing arena, which the plan may use."""
        options = self.planning(traced.device)
        return plan_traced(traced, room=room, divide=self.divide, compress=self.compress, **options)

    def planning(self, device: torch.device) -> dict[str, Any]:
        """Return the keyword arguments for `plan_traced`."""
        return {
            **{"budget": self.budget, "policy": self.policy, "costs": self.costs},
            **{"schedule": self.schedule, "solver": self.solver, "layout": self.layout, "time_limit": self.time_limit},
            "redzone": redzone_of(self.sanitize, alignment_of(device)),
        }

    def require_fit(self, traced: TracedGraph, given: Plan) -> Plan:
        """Return the given plan if it can run this step.

        Raises `PlanMismatch` or `InputMismatch` with the reason if it cannot.
        """
        planned = "" if given.eviction is None else given.eviction.device
        if planned != ", ".join(traced.runs_on):
            what = (
                f"the given plan runs on {planned or 'the device of the model'}, but device={self.device!r} was passed"
            )
            raise PlanMismatch(what, where="device", hint="leave out device=, or make a new plan for it")
        require_planned(traced, given)
        require_legal(given.graph, given.schedule.order)
        needed = alignment_of(traced.device)
        if given.alignment % needed:
            what = f"the given plan aligns to {given.alignment} bytes, {traced.device} needs {needed}"
            raise PlanMismatch(what, hint="make a new plan on this kind of device")
        if given.redzone < redzone_of(self.sanitize, needed):
            what = "the given plan has no red zones around its buffers"
            raise InputMismatch(what, where="sanitize='redzone'", hint="leave out plan=, or leave out sanitize=")
        return given


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(PlanOptions):
    """All options of `memplan.compile`, apart from the model, its example inputs and a plan."""

    gradients: str = "safe"
    on_mismatch: str = "error"
    cuda_graph: bool = False
    dynamic_shapes: Any = None
    bucketing: Any = None

    def __post_init__(self) -> None:
        PlanOptions.__post_init__(self)
        require_choice("on_mismatch", self.on_mismatch, ON_MISMATCH)
        stay_in_arena(
            self.gradients,
            device=self.device,
            budget=self.budget,
            cuda_graph=self.cuda_graph,
            dynamic_shapes=self.dynamic_shapes,
        )
        if self.cuda_graph:
            require_recordable(self.device)
        if self.dynamic_shapes is None and self.bucketing is not None:
            hint = "name the dimensions that vary, or leave bucketing out"
            raise InvalidShapes("no dimension varies", where="bucketing without dynamic_shapes", hint=hint)
        if self.bucketing is not None and not isinstance(self.bucketing, Mapping):
            hint = "write {'batch': 8}: the multiple up to which the sizes of each dimension are rounded"
            raise InvalidShapes(f"is a {type(self.bucketing).__name__}", where="bucketing", hint=hint)
        if self.dynamic_shapes is not None and self.cuda_graph:
            hint = "record the shapes that matter, each compiled on its own"
            raise InvalidShapes(
                "a recorded step has one shape", where="cuda_graph with dynamic_shapes", hint=hint, see="one-shape"
            )
        if self.dynamic_shapes is not None:
            refuse_beside(device=self.device, divide=self.divide, compress=self.compress)


def require_recordable(device: Any) -> None:
    """Raise `UnsupportedCall` if `device` is set: a CUDA graph cannot follow host tensors that move."""
    if device is not None:
        what = "a recorded step cannot follow parameters and inputs on the host"
        raise UnsupportedCall(what, where=f"device={device!r}", hint="leave out cuda_graph=True", see="device")


def device_for(device: Any, given: Plan | None) -> Any:
    """Return the device that the user asked for, or the one that the given plan runs on."""
    if device is None and given is not None and given.eviction is not None:
        return given.eviction.device.split(", ") if given.eviction.device else None
    return device


def given_plan(plan: Plan | str | os.PathLike[str] | None, budget: Any) -> Plan | None:
    """Return the plan that the user passed, loaded if it is a path; None if there is none.

    Raises `MemplanError` if a budget is passed too: a plan has one already.
    """
    if plan is None:
        return None
    if budget is not None:
        hint = "pass one of them: a plan has its budget already"
        raise MemplanError(f"budget={budget!r} beside a plan", where="compile", hint=hint)
    found = load(plan) if isinstance(plan, (str, os.PathLike)) else plan
    if not isinstance(found, Plan):
        raise MemplanError(f"is a {type(found).__name__}", where="plan", hint="pass a memplan.Plan, or the path of one")
    return found


def require_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise `MemplanError` if `value` is none of `choices`."""
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        raise MemplanError(f"{name}={value!r}", hint=f"choose one of: {', '.join(map(repr, choices))}")

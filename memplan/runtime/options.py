"""The options of `memplan.compile`, `memplan.compile_step` and `Backend`: those of `memplan.plan`, and how a step runs.

Each of the three makes one value of its keywords and passes it down. Creating it checks every option.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from memplan.core.choices import Gradients, OnMismatch, Sanitize
from memplan.core.host_limit import host_memory
from memplan.core.in_place import COPY
from memplan.core.legal_orders import require_legal
from memplan.core.plan import Plan
from memplan.core.units import format_bytes
from memplan.devices.kinds import alignment_of, is_accelerator
from memplan.errors import BudgetInfeasible, InputMismatch, InvalidShapes, MemplanError, PlanMismatch, UnsupportedCall
from memplan.planning.options import BUDGETS, PlanKeywords, PlanOptions
from memplan.planning.planfile import load
from memplan.runtime.debug.sanitizers import redzone_of
from memplan.trace import CapturedCall, plan_step
from memplan.trace.graph.remap_to_plan import outside_as_in, require_planned
from memplan.trace.optimizer.host_updates import with_updates_as_in
from memplan.trace.traced import TracedGraph
from memplan.trace.tracing import retraced
from memplan.trace.whole_step import require_update

if TYPE_CHECKING:
    from memplan.planning.options import Device

MEASURE = "measure"  # a value of `costs`


class RunKeywords(PlanKeywords, total=False):
    """The keywords of `Backend`, apart from `gradients`."""

    in_place: bool
    sanitize: Sanitize | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The results of a trial run: `transient` are the bytes that each op of `traced` allocates outside the arena while
    it, or an op that computes it again, runs; `plan` is the plan that was tried."""

    traced: TracedGraph
    plan: Plan
    transient: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(PlanOptions):
    """The options that decide how a step is planned, checked and run; every way to compile takes them.

    `memplan.compile` describes each of them. Raises `MemplanError` for an option without a valid value.
    """

    in_place: bool = True
    sanitize: Sanitize | None = None
    on_mismatch: OnMismatch = "replan"
    fullgraph: bool = False
    cuda_graph: bool = False
    updating: int = 0  # the bytes of the host with which an optimizer updates there by itself
    measurable: ClassVar[bool] = False  # whether `costs` may be "measure"

    def __post_init__(self) -> None:
        if self.measures and not self.has_budget:
            hint = "give a budget (and no plan), or leave costs out"
            raise MemplanError(
                "without a budget, nothing depends on costs", where=f"costs={MEASURE!r}", hint=hint, see="measure"
            )
        if self.measures:
            self._require_measurable()
        PlanOptions.__post_init__(self)
        if self.cuda_graph and self.device is not None:
            what = "a recorded step cannot follow parameters and inputs on the host"
            raise UnsupportedCall(what, where=f"device={self.device!r}", hint="leave out cuda_graph=True", see="device")

    @property
    def measures(self) -> bool:
        """Whether the first steps are measured."""
        return self.measurable and isinstance(self.costs, str) and self.costs == MEASURE

    @property
    def gradients_in_arena(self) -> bool:
        """Whether gradients stay in the arena: not those of recorded steps."""
        return not self.cuda_graph and PlanOptions.gradients_in_arena.__get__(self)

    @property
    def gradients_copied(self) -> bool:
        """Whether gradients are made in the arena and copied out: not those of recorded steps."""
        return not self.cuda_graph and PlanOptions.gradients_copied.__get__(self)

    @property
    def tracing(self) -> dict[str, Any]:
        """The options that decide how a call is captured, for `capture_call`."""
        return {**PlanOptions.tracing.__get__(self), "in_place": self.in_place}

    def _require_known_costs(self) -> None:
        """Raise as `PlanOptions` does, except for "measure" where steps can be measured."""
        if not self.measures:
            PlanOptions._require_known_costs(self)

    def _require_measurable(self) -> None:
        """Raise `UnsupportedCall` for CUDA graphs, in which no op can be timed, for shapes and several devices."""
        if self.several_devices:
            hint = "pass costs of your own, or one device"
            raise UnsupportedCall("steps of one device are measured", where="costs='measure'", hint=hint, see="measure")
        if self.cuda_graph:
            hint = "measure without, save compiled.measurement.costs, and compile with costs='costs.json'"
            raise UnsupportedCall(
                "a recorded step is replayed without Python", where="costs='measure'", hint=hint, see="measure"
            )
        if self.dynamic_shapes is not None:
            hint = "measure one shape, save compiled.measurement.costs, and compile with costs='costs.json'"
            raise UnsupportedCall("steps of one shape are measured", where="costs='measure'", hint=hint, see="measure")

    def redzone(self, device: torch.device) -> int:
        """Return the bytes that a plan for `device` has to leave free on both sides of every buffer."""
        return redzone_of(self.sanitize, alignment_of(device))

    def settle(
        self,
        traced: TracedGraph,
        retracer: CapturedCall | None,
        given: Plan | None = None,
        *,
        room: int = 0,
        transient: Sequence[int] | None = None,
    ) -> tuple[TracedGraph, Plan]:
        """Return the variant of the step that its plan is for, and the plan: the given one, or a new one.

        `retracer`: traces other variants of the step, if it has any. `room`: the bytes of an arena that exists already.
        `transient`: as in `plan_step`.
        """
        if given is not None:
            variant = retraced(traced, retracer, given.division, given.compress)
            variant = outside_as_in(with_updates_as_in(variant, given), given, gradients=self.gradients == "arena")
            return variant, self.require_fit(variant, given)
        redzone, options = self.redzone(traced.device), self
        has = host_memory()
        if self.pinned_budget is None and len(traced.runs_on) == 1 and is_accelerator(traced.device) and has:
            options = replace(self, pinned_budget=has // 4)
        variant, plan = plan_step(traced, retracer, options, redzone=redzone, room=room, transient=transient)
        if plan.eviction is not None and self.updating:
            plan = replace(plan, eviction=replace(plan.eviction, updating=self.updating))
        return outside_as_in(variant, plan, gradients=self.gradients == "arena"), plan

    def replan(self, known: Measured, room: int) -> tuple[TracedGraph, Plan]:
        """Return a step that was tried, with a plan that keeps its budgets with what its kernels were seen to allocate.

        `room`: the bytes of an arena that exists already.
        """
        return self.again(known.plan).settle(known.traced, None, room=room, transient=known.transient)

    def again(self, tried: Plan) -> Self:
        """Return the options that plan a variant of a step anew, within the budgets of the plan that was tried."""
        return replace(self.keeping(tried), divide=None)

    def keeping(self, given: Plan) -> Self:
        """Return the options with the budgets of a plan, and with what it counts in them."""
        kept = given.eviction
        if kept is None or kept.policy == "checkpoint":  # then the arena is what following the checkpoints needs
            return replace(self, reserve=given.reserve)
        several = bool(kept.sections)
        return replace(
            self,
            budget=tuple(s.budget for s in kept.sections if s.budget is not None) or None if several else kept.budget,
            arena_budget=tuple(s.arena_budget for s in kept.sections) if several else kept.arena_budget,
            host_budget=kept.host_budget,
            pinned_budget=kept.pinned_budget,
            reserve=given.reserve,
        )

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
        if given.redzone < self.redzone(traced.device):
            what = "the given plan has no red zones around its buffers"
            raise InputMismatch(what, where="sanitize='redzone'", hint="leave out plan=, or leave out sanitize=")
        return given


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions(RunOptions):
    """All options of `memplan.compile`, apart from the model, its example inputs, its mode and a plan."""

    bucketing: Mapping[str, int] | None = None
    after: int = 0  # the bytes that an optimizer allocates beside its state, right after the backward
    measurable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        if self.bucketing is not None:
            _require_buckets(self.bucketing, varies=self.dynamic_shapes is not None)
        if self.dynamic_shapes is not None and self.cuda_graph:
            hint = "record the shapes that matter, each compiled on its own"
            raise InvalidShapes(
                "a recorded step has one shape", where="cuda_graph with dynamic_shapes", hint=hint, see="one-shape"
            )

    def require_room(self, plan: Plan, held: int) -> None:
        """Raise `BudgetInfeasible` if another call of `plan`, beside arenas of `held` bytes, breaks a budget."""
        kept = plan.eviction
        if kept is None:
            return
        total = (self.budget, kept.budget, plan.on_device + held)
        arena = (self.arena_budget, kept.arena_budget, plan.arena_size + held)
        for given, limit, need in (total, arena):
            if given is not None and limit is not None and need > limit:
                raise BudgetInfeasible(
                    f"another call while one waits for its backward needs {format_bytes(need)} in all, the budget is "
                    f"{format_bytes(limit)}",
                    op="",
                    smallest=need,
                    where="a second call in flight",
                    hint=f"call backward first, drop what the earlier call returned, or give at least {need} bytes",
                )

    @classmethod
    def of_step(cls, options: StepOptions, *, state: int, temporaries: int, several: bool) -> CompileOptions:
        """Return the options of forward and backward of a step, after which an optimizer runs by itself.

        `state` and `temporaries`: the bytes that it keeps, and allocates beside them. `several`: the step is several
        graphs.
        """
        shared = {f.name: getattr(options, f.name) for f in fields(cls) if hasattr(options, f.name)}
        away = options.device is not None
        plain = not (several or options.cuda_graph or away)
        as_op = plain and options.kernels == "aten"
        return cls(
            **{
                **shared,
                "gradients": "outside" if plain and options.accumulate > 1 else "arena",
                "reserve": options.reserved + (0 if away else state + (0 if as_op else temporaries)),
                "updating": state + temporaries if away else 0,
                "after": temporaries if as_op else 0,
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions(RunOptions):
    """All options of `memplan.compile_step`, apart from the model, the optimizer, the loss, the example and a plan."""

    clip_grad_norm: float | None = None
    accumulate: int = 1
    allow_unsynchronized: bool = False
    measurable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        require_update(self.accumulate, self.clip_grad_norm)


def _require_buckets(bucketing: object, *, varies: bool) -> None:
    """Raise `InvalidShapes` unless `bucketing` is a mapping and shapes vary."""
    if not varies:
        hint = "name the dimensions that vary, or leave bucketing out"
        raise InvalidShapes("no dimension varies", where="bucketing without dynamic_shapes", hint=hint)
    if not isinstance(bucketing, Mapping):
        hint = "write {'batch': 8}: the multiple up to which the sizes of each dimension are rounded"
        raise InvalidShapes(f"is a {type(bucketing).__name__}", where="bucketing", hint=hint)


def device_for(device: Device | None, given: Plan | None) -> Device | None:
    """Return the device that the user asked for, or the one that the given plan runs on."""
    if device is None and given is not None and given.eviction is not None:
        return given.eviction.device.split(", ") if given.eviction.device else None
    return device


def gradients_for(gradients: Gradients, given: Plan | None) -> Gradients:
    """Return where gradients are: where the user asked for, or outside where the given plan copies them out."""
    if given is None:
        return gradients
    made = set(given.graph.gradients)
    copies = any(op.target == COPY and made.intersection(op.writes) for op in given.graph.ops)
    return "outside" if copies else gradients


def given_plan(keywords: Mapping[str, Any]) -> Plan | None:
    """Return the plan that the user passed as `plan`, loaded if it is a path; None if there is none.

    Raises `MemplanError` if a budget, or what counts in it, is among the keywords too.
    """
    plan = keywords["plan"]
    if plan is None:
        return None
    for name in (*BUDGETS, "reserve"):
        if keywords[name] not in (None, 0):
            hint = "pass one of them: a plan has its budget already"
            raise MemplanError(f"{name}={keywords[name]!r} beside a plan", where="compile", hint=hint)
    found = load(plan) if isinstance(plan, (str, os.PathLike)) else plan
    if not isinstance(found, Plan):
        raise MemplanError(f"is a {type(found).__name__}", where="plan", hint="pass a memplan.Plan, or the path of one")
    return found

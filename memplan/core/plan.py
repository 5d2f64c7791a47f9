"""The plan of a step: what runs in which order, where every storage lies, and what lies outside the arena.

A `Plan` is plain data. It is saved as JSON, never pickled, and a file is believed only after the independent
validator and the graph itself agree with it (`planfile.py` reads and writes it).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from memplan.core import lifetimes
from memplan.core.compressed_storages import compressions_of
from memplan.core.division import Division
from memplan.core.evictions import DeviceArena, Eviction, EvictionPlan, check_record, evictions_of
from memplan.core.graph import Graph, StorageKind, check_graph
from memplan.core.in_place_reuse import placed
from memplan.core.problem import Problem, Solution, Status
from memplan.core.schedule import storage_intervals
from memplan.core.validate import validate
from memplan.errors import InvalidPlan
from memplan.schedule import (
    Schedule,
    is_proven_again,
    live_bytes,
    require_evidence,
    require_legal,
    working_set_bound,
)
from memplan.solvers import Solver, solve

if TYPE_CHECKING:
    from memplan.analysis.forecast import Forecast
    from memplan.report.summary import Report

SCHEMA_VERSION = 1
_MODEL_KINDS = (
    StorageKind.PARAMETER,
    StorageKind.OPTIMIZER_STATE,
    StorageKind.CONSTANT,
    StorageKind.INPUT,
    StorageKind.TANGENT,
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A validated plan. Sizes are bytes; steps are positions in `schedule.order`.

    What a fresh plan says of all orders and all layouts was proven here. Of a plan that was loaded, that holds where
    loading it proved it again; the rest is claimed: `schedule.claimed` (then `schedule.certified` is False) and
    `solution.claimed` say so, and `memplan check --verify` proves it again.

    `alignment` and `redzone` (bytes) shaped the problem. `temporaries[op]` are the bytes that the op's
    kernel allocates outside the arena by itself while it runs, measured when the plan was compiled; None
    means that it was not: kernels' own scratch memory cannot be known from fake tensors. `eviction`: how a
    budget is kept; then `graph` holds what is computed again and what is copied to the host and back. `division`: how
    ops of the traced graph were divided by rows, with nothing left open. `compress`: how what waits for the backward
    is made smaller ("bits": masks are packed, "int8": and activations), "" for not at all.
    """

    model: str
    graph: Graph
    schedule: Schedule
    problem: Problem
    solution: Solution
    alignment: int
    redzone: int = 0
    versions: Mapping[str, str]
    temporaries: tuple[int, ...] | None = None
    eviction: EvictionPlan | None = None
    division: Division | None = None
    compress: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", MappingProxyType(dict(self.versions)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles: a read-only mapping has neither."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return partial(Plan, **{**own, "versions": dict(self.versions)}), ()

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the graph: a plan fits exactly the models that trace to it."""
        return self.graph.fingerprint

    @cached_property
    def placed(self) -> Graph:
        """The graph as it lies in the arena: results that take the bytes of an input are values of its storage."""
        return placed(self.graph, self.schedule.order)

    @property
    def arena_size(self) -> int:
        """Bytes of the one preallocated arena."""
        return self.solution.arena_size

    @property
    def max_live(self) -> int:
        """Largest sum of live buffer sizes over all steps, alignment included: no layout needs less. On several devices
        the sum of what each needs at its own peak."""
        if self.devices:
            return sum(section.max_live for section in self.devices)
        return self.problem.max_live

    @property
    def devices(self) -> tuple[DeviceArena, ...]:
        """The arenas of a plan for several devices, in the order in which they were given; none for one device."""
        return self.eviction.sections if self.eviction else ()

    @property
    def fragmentation(self) -> float:
        """1 - max_live / arena_size: the share of the arena that no buffer can use at the peak."""
        return (self.arena_size - self.max_live) / self.arena_size if self.arena_size else 0.0

    @property
    def padding(self) -> int:
        """Bytes that alignment (and red zones) add to max live."""
        return self.problem.max_live - self.schedule.max_live

    @cached_property
    def evictions(self) -> tuple[Eviction, ...]:
        """Every absence of a storage from the arena that ends in a use, by the step at which it ends."""
        found = evictions_of(self.graph, self.eviction.instances) if self.eviction else ()
        return (*found, *(compressions_of(self.graph, self.schedule.order) if self.compress else ()))

    @property
    def host_size(self) -> int:
        """Bytes of the arena on the host that holds what is evicted by copy."""
        return self.eviction.host.arena_size if self.eviction else 0

    @cached_property
    def transient(self) -> tuple[int, ...]:
        """Bytes outside the arena while each op (by index) runs: measured if known, else its fallback results."""
        if self.temporaries is not None:
            return self.temporaries
        return tuple(self.graph.functional_bytes(op) for op in self.graph.ops)

    @cached_property
    def outside_profile(self) -> tuple[int, ...]:
        """Bytes allocated outside the arena at each step: what the caller keeps so far, and transients."""
        steps = len(self.schedule.order)
        change = [0] * (steps + 1)
        for index, live in storage_intervals(self.graph, self.schedule.order).items():
            storage = self.graph.storages[index]
            if not storage.planned and storage.kind not in (*_MODEL_KINDS, StorageKind.HOST):
                change[live.start] += storage.nbytes
        kept, profile = 0, []
        for step, op in enumerate(self.schedule.order):
            kept += change[step]
            profile.append(kept + self.transient[op])
        return tuple(profile)

    @cached_property
    def outside(self) -> Mapping[str, int]:
        """Bytes outside the arena, by kind; `fallbacks` and `temporaries` are the most at any one step.

        `fallbacks` are results of kernels that cannot write where they are told; `temporaries` what kernels
        allocate beyond that by themselves (0 until measured by `compile`).
        """
        g = self.graph
        fallbacks = [g.functional_bytes(op) for op in g.ops]
        extra = [max(t - f, 0) for t, f in zip(self.transient, fallbacks, strict=True)]
        return MappingProxyType(
            {
                "parameters": g.bytes_of(StorageKind.PARAMETER),
                "optimizer state": g.bytes_of(StorageKind.OPTIMIZER_STATE),
                "inputs": g.bytes_of(StorageKind.INPUT),
                "tangents": g.bytes_of(StorageKind.TANGENT),
                "constants": g.bytes_of(StorageKind.CONSTANT),
                "outputs": g.bytes_of(StorageKind.OUTPUT),
                "gradients": g.bytes_of(StorageKind.GRADIENT),
                "fallbacks": max(fallbacks, default=0),
                "temporaries": max(extra, default=0),
            }
        )

    @property
    def total(self) -> int:
        """Predicted peak of everything together: arena, model, inputs, and what lies outside at its highest."""
        return self.arena_size + self.graph.bytes_of(*_MODEL_KINDS) + max(self.outside_profile, default=0)

    @property
    def on_device(self) -> int:
        """Bytes that the device holds at the peak: the arena, and what kernels allocate beside it; and, where the step
        runs at the same place as its model and caller, everything of theirs: `total`."""
        if self.eviction is None or not self.eviction.device:
            return self.total
        return self.arena_size + max(self.transient, default=0)

    def forecast(self, name: str) -> Forecast:
        """Where the storage of that name is at each step, and when it is used (see `memplan.analysis.forecast`)."""
        from memplan.analysis.forecast import forecast

        return forecast(self, name)

    def report(self) -> Report:
        """The figures of this plan, ready to be shown (see `memplan.report`)."""
        from memplan.report.summary import make_report

        return make_report(self)

    def to_text(self) -> str:
        """The step x partition table of this plan as plain text (tract's picture), and for the layout `tstack` the
        addresses by step (ext-tstack's)."""
        from memplan.report.partition_table import partition_table
        from memplan.report.stack_text import stack_text

        stack = stack_text(self.problem, self.solution) if self.solution.solver == "tstack" else ""
        return partition_table(self.problem) + stack

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON to `path`, whole or not at all. Raises `UnreadableFile` when it cannot be written."""
        from memplan.planning.planfile import save

        save(self, path)


def make_plan(
    *,
    model: str,
    graph: Graph,
    schedule: Schedule,
    alignment: int,
    versions: Mapping[str, str],
    redzone: int = 0,
    solver: str | Solver = "auto",
    time_limit: float | None = None,
) -> Plan:
    """Place every storage of a scheduled graph. Raises `InvalidSolution` rather than return a bad plan."""
    problem = lifetimes.problem(graph, schedule, alignment=alignment, redzone=redzone)
    return Plan(
        model=model,
        graph=graph,
        schedule=schedule,
        problem=problem,
        solution=solve(problem, solver=solver, time_limit=time_limit),
        alignment=alignment,
        redzone=redzone,
        versions=versions,
    )


def check_consistency(plan: Plan) -> None:
    """Raise `InvalidPlan` or `InvalidSolution` unless every part of `plan` follows from its graph.

    Run on every plan that comes from a file. Two things it does not prove: see `as_loaded`.
    """
    check_graph(plan.graph)
    require_legal(plan.graph, plan.schedule.order)
    _check_schedule(plan.graph, plan.schedule)
    if plan.alignment < 1 or plan.redzone < 0 or plan.redzone % plan.alignment:
        raise InvalidPlan(f"alignment {plan.alignment}, red zone {plan.redzone}", where="alignment")
    if plan.problem != lifetimes.problem(plan.graph, plan.schedule, alignment=plan.alignment, redzone=plan.redzone):
        raise InvalidPlan("does not follow from the graph and the schedule", where="problem")
    if plan.temporaries is not None and (
        len(plan.temporaries) != len(plan.graph.ops) or min(plan.temporaries, default=0) < 0
    ):
        raise InvalidPlan("needs one number of bytes per op", where="temporaries")
    if plan.solution.status not in (Status.OPTIMAL, Status.FEASIBLE):
        raise InvalidPlan(f"is {plan.solution.status.name.lower()}", where="solution.status")
    validate(plan.problem, plan.solution)
    if plan.eviction is not None:
        check_record(plan.graph, plan.eviction)
        validate(lifetimes.host_problem(plan.graph, plan.schedule, alignment=plan.alignment), plan.eviction.host)
        check_sections(plan)
        require_budget(plan)


def as_loaded(plan: Plan) -> Plan:
    """A plan from a file after `check_consistency`, with what that did not prove again marked as claimed: the bound
    of a long search through all orders, and a bound of all layouts above max live."""
    return replace(
        plan,
        schedule=replace(plan.schedule, claimed=not is_proven_again(plan.schedule)),
        solution=replace(plan.solution, claimed=plan.solution.bound > plan.max_live),
    )


def check_sections(plan: Plan) -> None:
    """Raise `InvalidPlan` or `InvalidSolution` unless the arenas of several devices lie side by side, each with all
    buffers of its device and nothing else, as large as it says."""
    planned = {s.device for s in plan.graph.storages if s.planned}
    if not plan.devices:
        if len(planned) > 1:
            raise InvalidPlan(f"has no arena for each of {', '.join(sorted(planned))}", where="eviction.sections")
        return
    start = 0
    for i, section in enumerate(plan.devices):
        where = f"eviction.sections[{i}]"
        if section.start != start or section.device in {s.device for s in plan.devices[:i]}:
            raise InvalidPlan("does not begin where the one before it ends, or is of the same device", where=where)
        start += section.size
        part = lifetimes.device_problem(plan.problem, plan.graph, section.device)
        if section.max_live != part.max_live or (section.size > section.budget and not plan.redzone):
            raise InvalidPlan(f"has not {section.max_live} bytes alive, or more than its budget", where=where)
        offsets = {b.id: plan.solution.offsets[b.id] - section.start for b in part.buffers}
        low = part.max_live if plan.solution.status is Status.OPTIMAL else 0
        status = Status.OPTIMAL if low == section.size else Status.FEASIBLE
        validate(
            part, Solution(offsets=offsets, arena_size=section.size, status=status, bound=low, solver="", seconds=0.0)
        )
    if start != plan.arena_size or planned - {section.device for section in plan.devices}:
        raise InvalidPlan("do not hold the whole plan", where="eviction.sections")


def require_budget(plan: Plan) -> None:
    """Raise `InvalidPlan` when the arena (without red zones, which are for tests) is larger than the budget."""
    if plan.eviction is not None and plan.arena_size > plan.eviction.budget and not plan.redzone:
        what = f"the arena of {plan.arena_size} bytes is larger than its budget of {plan.eviction.budget}"
        raise InvalidPlan(what, where="eviction.budget")


def _check_schedule(graph: Graph, schedule: Schedule) -> None:
    measured = max(live_bytes(graph, schedule.order), default=0)
    if schedule.max_live != measured:
        raise InvalidPlan(f"says {schedule.max_live}, its order has {measured}", where="schedule.max_live")
    if not working_set_bound(graph) <= schedule.bound <= measured:
        raise InvalidPlan(
            f"{schedule.bound} is not between the largest working set and max live", where="schedule.bound"
        )
    require_evidence(graph, schedule)

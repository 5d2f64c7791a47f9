"""The plan of a step: what runs in which order, where every storage lies, and what lies outside the arena.

A `Plan` is plain data. It is saved as JSON, never pickled, and a file is believed only after the independent
validator and the graph itself agree with it (`planfile.py` reads and writes it).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from memplan.core.compressed_storages import compressions_of
from memplan.core.division import Division
from memplan.core.evictions import DeviceArena, Eviction, EvictionPlan, evictions_of
from memplan.core.graph import Graph, StorageKind
from memplan.core.in_place_reuse import placed
from memplan.core.problem import Problem, Solution
from memplan.core.schedule import (
    Schedule,
    is_proven_again,
    storage_intervals,
)

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


def _function(module: str, name: str) -> Any:
    """A function of a later room, imported when a method that delegates to it is called: `Plan` itself is data."""
    return getattr(import_module(module), name)


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
        forecast = _function("memplan.analysis.forecast", "forecast")
        found: Forecast = forecast(self, name)
        return found

    def report(self) -> Report:
        """The figures of this plan, ready to be shown (see `memplan.report`)."""
        make_report = _function("memplan.report.summary", "make_report")
        made: Report = make_report(self)
        return made

    def to_text(self) -> str:
        """The step x partition table of this plan as plain text (tract's picture), and for the layout `tstack` the
        addresses by step (ext-tstack's)."""
        partition_table = _function("memplan.report.partition_table", "partition_table")
        stack_text = _function("memplan.report.stack_text", "stack_text")
        stack = stack_text(self.problem, self.solution) if self.solution.solver == "tstack" else ""
        text: str = partition_table(self.problem) + stack
        return text

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON to `path`, whole or not at all. Raises `UnreadableFile` when it cannot be written."""
        save = _function("memplan.planning.planfile", "save")
        save(self, path)


def as_loaded(plan: Plan) -> Plan:
    """A plan from a file after `check_consistency`, with what that did not prove again marked as claimed: the bound
    of a long search through all orders, and a bound of all layouts above max live."""
    return replace(
        plan,
        schedule=replace(plan.schedule, claimed=not is_proven_again(plan.schedule)),
        solution=replace(plan.solution, claimed=plan.solution.bound > plan.max_live),
    )

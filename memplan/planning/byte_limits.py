"""Turns the budgets that a user gave into numbers of bytes, and measures by how much a plan exceeds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memplan.core.graph import Graph
from memplan.core.plan import Plan
from memplan.core.totals import most_within
from memplan.evict.judge.arrays import measure
from memplan.evict.policies.checkpoint import checkpoint
from memplan.evict.rng_states import only_used, with_saved_states
from memplan.evict.workload import Workload
from memplan.planning.eager_total import eager_total
from memplan.planning.options import PlanOptions, read_budget

_HIGHEST = 2**63 - 1  # the largest number of compiled loops


def budgets_in_bytes(
    options: PlanOptions, graph: Graph, workload: Workload, free: Callable[[], Plan] | None = None
) -> PlanOptions:
    """Return the options with the budgets of the total and the arena as numbers of bytes; "min" and None stay.

    A share of `budget` is one of what eager needs for the traced `graph` (`eager_total`) and `options.reserve`; a share
    of `arena_budget` is one of the live bytes without a budget: of the plan that `free` makes, or of `workload`
    (`live_without_budget`).
    """

    def total() -> int:
        return eager_total(graph) + options.reserved

    def arena() -> int:
        return live_without_budget(workload) if free is None else free().max_live

    def resolved(budget: object, name: str, whole: Any) -> Any:
        if budget is None:
            return None
        if isinstance(budget, Sequence) and not isinstance(budget, str):
            return tuple(resolved(one, name, whole) for one in budget)
        read = read_budget(budget, name)
        if isinstance(read, float):
            return int(whole() * read)
        return read if isinstance(read, str) else min(read, _HIGHEST)

    return replace(
        options,
        budget=resolved(options.budget, "budget", total),
        arena_budget=resolved(options.arena_budget, "arena_budget", arena),
    )


def live_without_budget(workload: Workload) -> int:
    """Return the most live bytes of a step that follows the model's checkpoints, and else evicts nothing."""
    states = with_saved_states(workload)
    return measure(*only_used(states, checkpoint(states.workload))).peak


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteLimits:
    """The limits of a plan on one device, in bytes; None is no limit.

    `host_budget` and `pinned_budget` limit the copies on the host, which are page-locked where `pinned`: the smaller
    power of two, since torch rounds what it locks up to one. `room` are the
    bytes of an arena that exists already: all of it may be used, and all of it counts in the total. `relative`: the
    total is a share of this step's own, which the existing arena may exceed.
    """

    total: int | None = None
    arena: int | None = None
    host_budget: int | None = None
    pinned_budget: int | None = None
    pinned: bool = False
    room: int = 0
    relative: bool = False

    @property
    def host(self) -> int | None:
        """The most bytes of copies on the host; None for no limit."""
        pinned = self.pinned_budget if self.pinned else None
        return _least(self.host_budget, None if pinned is None else most_within(pinned))

    def arena_beside(self, outside: int) -> int:
        """Return the most bytes that the arena may have beside `outside` bytes that are on the device too.

        An arena that does not fit into the existing one is a second one.
        """
        if self.total is None:
            return max(_HIGHEST if self.arena is None else self.arena, self.room)
        fits = self.relative or self.room + outside <= self.total
        within = max(self.total - outside - self.room, self.room if fits else 0)
        return within if self.arena is None else min(within, max(self.arena, self.room))

    def total_of(self, plan: Plan) -> int:
        """Return the bytes on the device at the peak of `plan`, with the existing arena."""
        return plan.on_device + (self.room - plan.arena_size if plan.arena_size <= self.room else self.room)

    def over(self, plan: Plan) -> int:
        """Return by how many bytes the arena of `plan` is too large, at most 0 where it is not. Red zones count."""
        return plan.arena_size - self.arena_beside(plan.on_device - plan.arena_size)

    def keeps(self, plan: Plan) -> bool:
        """Return whether `plan` is within all limits. Red zones, which are for tests, are not counted."""
        if self.host is not None and plan.host_size > self.host:
            return False
        within = self.total is None or self.relative or self.total_of(plan) <= self.total
        return bool(plan.redzone) or (self.over(plan) <= 0 and within)


def device_of(graph: Graph, workload: Workload) -> str:
    """Return the device of a step's arena; "" where nothing is planned."""
    return workload.device or next((s.device for s in graph.storages if s.planned), "")


def is_pinned(device: str) -> bool:
    """Return whether copies that a step on `device` has on the host are page-locked."""
    return bool(device) and not device.startswith("cpu")


def _least(one: int | None, two: int | None) -> int | None:
    """Return the smaller of two limits; None is no limit."""
    if one is None or two is None:
        return two if one is None else one
    return min(one, two)

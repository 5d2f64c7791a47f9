"""Decides what a plan leaves outside the arena once it is known what kernels allocate by themselves.

`memplan.compile` knows it from a trial run, and `memplan.fits` from kernels that it ran alone; both decide here.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from memplan.core.graph import Graph, StorageKind
from memplan.core.plan import Plan
from memplan.core.totals import beside_results
from memplan.core.units import format_bytes
from memplan.errors import BudgetInfeasible
from memplan.evict.workload import Policy
from memplan.planning.eager_total import eager_total
from memplan.planning.options import PlanOptions
from memplan.planning.outside_arena import plan_partly_outside

_PRECISION = 1000  # the prediction of eager's peak is exact to about one part in so many
_MOST_OVERHEAD = 0.1  # the predicted share of the step's time that needing no more than eager may cost
_log = logging.getLogger("memplan")


def with_temporaries(plan: Plan, transient: Sequence[int]) -> Plan:
    """Return a plan with the bytes that kernels allocate: `transient`, for each op of the step as it was traced."""
    kept = plan.eviction
    if kept is None:
        return replace(plan, temporaries=tuple(transient))
    return replace(plan, temporaries=tuple(0 if s < 0 else transient[s] for s in kept.sources))


@dataclass(frozen=True, slots=True, kw_only=True)
class AsEager:
    """Finds a plan of a step that needs no more than eager is predicted to need, where the first one needs more.

    Where kernels return new memory, as convolutions do, the arena and what is beside it may have their peaks at
    different steps, and eager's peak is below their sum.

    Attributes:
        graph: The step as it was traced.
        transient: The bytes that each op of `graph` allocates outside the arena.
        options: Those that the plan was made with; they have no budget.
        replan: Makes a plan of the step within a total by a policy, with what is known of its kernels.
        saved: Activations that the backward needs may leave the arena.
        copies: Results may be copied to the host.
    """

    graph: Graph
    transient: Sequence[int]
    options: PlanOptions
    replan: Callable[[int, str | Policy], Plan]
    saved: bool
    copies: bool

    def instead_of(self, plan: Plan) -> Plan | None:
        """Return the plan that takes the place of `plan`, which has its temporaries; None if `plan` stays."""
        away, need = _is_away(plan), _one_by_one(plan).on_device
        beside = beside_results(_placed(self.graph) if away else self.graph, self.transient)
        eager = eager_total(self.graph, beside)
        most = eager + plan.padding + self.options.reserved  # what eager needs, and what alignment adds
        limit = most - eager // _PRECISION
        if need <= limit or plan.redzone:
            return None
        found = self._outside(plan, limit, saved=need > most)
        if found is not None and found.on_device <= limit:
            return found
        cheaper = self._evicted(plan, limit, away=away)
        if cheaper is None:
            needed = format_bytes((found or plan).on_device)
            _log.info("%s: needs %s, and eager %s", plan.model, needed, format_bytes(limit))
        return cheaper or found

    def _outside(self, plan: Plan, limit: int, *, saved: bool) -> Plan | None:
        """Return a smaller plan of the same order with results outside the arena; None if there is none."""
        if plan.eviction is not None and plan.eviction.policy != "checkpoint":
            return None
        found = plan_partly_outside(plan, limit, self.options)
        # Each call allocates what is left to the backward: only where nothing else helps.
        if saved and self.saved and plan.eviction is None and (found is None or found.on_device > limit):
            found = plan_partly_outside(plan, limit, self.options, saved=True)
        return found

    def _evicted(self, plan: Plan, limit: int, *, away: bool) -> Plan | None:
        """Return a plan whose total is at most `limit` because results are evicted, in little more time than that of
        `plan`; None if there is none."""
        policy = self.options.policy if away else "auto" if self.copies else "recompute"
        with contextlib.suppress(BudgetInfeasible):
            cheaper = self.replan(limit, policy)
            kept = cheaper.eviction
            if kept is None:
                return cheaper
            before = kept.base_seconds if plan.eviction is None else plan.eviction.seconds
            if kept.seconds <= (1 + _MOST_OVERHEAD) * before:  # nobody asked for this budget
                return replace(cheaper, eviction=replace(kept, budget=None, arena_budget=cheaper.arena_size))
        return None


def _is_away(plan: Plan) -> bool:
    """Return whether a step runs on another device than its caller's."""
    return plan.eviction is not None and bool(plan.eviction.device)


def _one_by_one(plan: Plan) -> Plan:
    """Return the plan as if collectives had their results when they return: what they copy meanwhile is eager's too."""
    ops = tuple(replace(op, starts=False) if op.starts else op for op in plan.graph.ops)
    return replace(plan, graph=replace(plan.graph, ops=ops)) if ops != plan.graph.ops else plan


def _placed(graph: Graph) -> Graph:
    """Return the graph of a step on another device than its caller's, with results where their kernels write them: in
    the arena, from which they are copied to the caller."""
    results = (StorageKind.OUTPUT, StorageKind.GRADIENT)
    return replace(graph, storages=tuple(replace(s, planned=s.planned or s.kind in results) for s in graph.storages))

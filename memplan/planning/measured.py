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
from memplan.core.schedule import make_schedule
from memplan.core.totals import MODEL_KINDS, beside_results
from memplan.core.units import format_bytes
from memplan.errors import BudgetInfeasible
from memplan.evict.workload import Policy
from memplan.planning.caller_side import CallerSide, eager_with_caller, plan_with_caller, transient_with_caller
from memplan.planning.eager_total import eager_total
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.options import PlanOptions
from memplan.planning.outside_arena import (
    kept_bytes,
    left_by,
    need_with_update,
    plan_partly_outside,
    with_storages_outside,
)

_PRECISION = 1000  # the prediction of eager's peak is exact to about one part in so many
_MOST_OVERHEAD = 0.1  # the predicted share of the step's time that needing no more than eager may cost
NOTICEABLE_SHARE = 0.005  # of the peak: a program that runs is made again, or gives up its arena, for no less
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
        after: The bytes that the optimizer's own `step()` allocates, while the arena is idle; None before a first one.
    """

    graph: Graph
    transient: Sequence[int]
    options: PlanOptions
    replan: Callable[[int, str | Policy], Plan]
    saved: bool
    copies: bool
    after: int | None = None

    def instead_of(self, plan: Plan) -> Plan | None:
        """Return the plan that takes the place of `plan`, which has its temporaries; None if `plan` stays."""
        if not self._is_above(plan):
            return None
        away, most = _is_away(plan), self._most(plan)
        limit = self._limit(most, plan)
        found = self._outside(plan, limit, saved=self._need(_one_by_one(plan)) > most)
        if found is not None and self._need(found) <= limit:
            return found
        cheaper = None if self.after is not None else self._evicted(plan, limit, away=away)
        if cheaper is None:
            needed = format_bytes(self._need(found or plan))
            _log.info("%s: needs %s, and eager %s", plan.model, needed, format_bytes(limit))
        return cheaper or found

    def _most(self, plan: Plan) -> int:
        """Return the bytes that `plan` may need: what eager needs, and what alignment adds."""
        beside = beside_results(_placed(self.graph) if _is_away(plan) else self.graph, self.transient)
        eager = max(eager_total(self.graph, beside), self._eager_update(plan, self.after))
        return eager + plan.padding + self.options.reserved

    def _limit(self, most: int, plan: Plan) -> int:
        """Return the total that a smaller plan aims for; `most`: that of `_most`."""
        return most - (most - plan.padding - self.options.reserved) // _PRECISION

    def _is_above(self, plan: Plan) -> bool:
        """Return whether a plan needs more than eager, by so much that another one is worth it."""
        most = self._most(plan)
        need, limit = self._need(_one_by_one(plan)), self._limit(most, plan)
        if need <= limit or plan.redzone:
            return False
        return self.after is None or need - most >= max(most * NOTICEABLE_SHARE, 1)

    def is_more_than_eager(self, plan: Plan, beside: int = 0) -> bool:
        """Return whether a plan, with `beside` bytes of other arenas, needs noticeably more than eager."""
        most = self._most(plan)
        return self._need(plan) + beside - most >= most * NOTICEABLE_SHARE

    def beside_update(self, now: Plan, after: int) -> Plan | None:
        """Return the plan in the place of `now` if `step()` allocates `after` bytes beside it; None if it stays."""
        with_update = replace(self, after=after)
        found = with_update.instead_of(now)
        return found if found is not None and with_update._need(found) < with_update._need(now) else None

    def beside_caller(self, now: Plan, side: CallerSide, after: int, unevicted: Callable[[], Plan]) -> Plan | None:
        """Do the same with what the caller does around the step.

        `unevicted`: makes the same plan without evictions, with its temporaries: results leave the arena instead.
        Gradients of outputs have no bytes for a scheduler, which may keep them long; so eager's order is tried too.
        """
        if not self._exceeds(now, side, after):
            return None
        kept = now.eviction is None or now.eviction.policy == "checkpoint"
        base = now if kept else unevicted()
        best = self._beside(base, side, after)
        plain = now.eviction is None and now.division is None and not now.compress
        if plain and self._exceeds(now if best is None else best, side, after):
            in_order = in_traced_order(now, self.graph, self.transient, self.options)
            best = min(
                (plan for plan in (best, self._beside(in_order, side, after) or in_order) if plan is not None),
                key=lambda plan: _need_of(plan, side, after),
            )
        now_needs = _need_of(now, side, after)
        return (
            best
            if best is not None and now_needs - _need_of(best, side, after) >= max(now_needs * NOTICEABLE_SHARE, 1)
            else None
        )

    def _beside(self, base: Plan, side: CallerSide, after: int) -> Plan | None:
        """Return the plan of the same order with what is to be outside of the arena; None if nothing is."""
        before = plan_with_caller(base, side)
        found = self._with_caller(side).beside_update(before, after)
        return None if found is None else with_storages_outside(base, left_by(before, found), self.options)

    def _exceeds(self, plan: Plan, side: CallerSide, after: int) -> bool:
        """Return whether a plan needs more than eager with what the caller does, by so much that it is worth a plan."""
        return self.beside(side, after)._is_above(plan_with_caller(plan, side))

    def beside(self, side: CallerSide, after: int) -> AsEager:
        """Return the same with what the caller does, and with `after` bytes of an update."""
        return replace(self._with_caller(side), after=after)

    def _with_caller(self, side: CallerSide) -> AsEager:
        graph = eager_with_caller(self.graph, side)
        return replace(self, graph=graph, transient=transient_with_caller(self.graph, self.transient, side))

    def _need(self, plan: Plan) -> int:
        return plan.on_device if self.after is None else need_with_update(plan, self.after)

    def _eager_update(self, plan: Plan, after: int | None) -> int:
        """Return the bytes that eager has while the optimizer's own `step()` runs, beside the optimizer's state."""
        if after is None:
            return 0
        graph = plan.graph
        gradients = sum(graph.storages[s].nbytes for s in graph.gradients_in_arena)
        return graph.bytes_of(*MODEL_KINDS) + kept_bytes(plan) + gradients + after

    def _outside(self, plan: Plan, limit: int, *, saved: bool) -> Plan | None:
        """Return a smaller plan of the same order with results outside the arena; None if there is none."""
        if plan.eviction is not None and plan.eviction.policy != "checkpoint":
            return None
        found = plan_partly_outside(plan, limit, self.options, after=self.after or 0)
        # Each call allocates what is left to the backward: only where nothing else helps.
        if saved and self.saved and plan.eviction is None and (found is None or self._need(found) > limit):
            found = plan_partly_outside(plan, limit, self.options, saved=True, after=self.after or 0)
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


def _need_of(plan: Plan, side: CallerSide, after: int) -> int:
    """Return the bytes that a plan needs with what its caller does around the step."""
    return need_with_update(plan_with_caller(plan, side), after)


def in_traced_order(plan: Plan, graph: Graph, transient: Sequence[int], options: PlanOptions) -> Plan:
    """Return a plan in the order of the trace.

    Args:
        plan: A plan of the step without evictions.
        graph: The step as it was traced.
        transient: The bytes that each op of `graph` allocates outside the arena.
        options: Those of the plan.
    """
    schedule = make_schedule(graph, tuple(range(len(graph.ops))), "traced")
    made = make_plan(replace(ScheduledGraph.of(plan), graph=graph, schedule=schedule), options)
    return replace(made, temporaries=tuple(transient), numbers=plan.numbers, code=plan.code)


def _one_by_one(plan: Plan) -> Plan:
    """Return the plan as if collectives had their results when they return: what they copy meanwhile is eager's too."""
    ops = tuple(replace(op, starts=False) if op.starts else op for op in plan.graph.ops)
    return replace(plan, graph=replace(plan.graph, ops=ops)) if ops != plan.graph.ops else plan


def _placed(graph: Graph) -> Graph:
    """Return the graph of a step on another device than its caller's, with results where their kernels write them: in
    the arena, from which they are copied to the caller."""
    results = (StorageKind.OUTPUT, StorageKind.GRADIENT)
    return replace(graph, storages=tuple(replace(s, planned=s.planned or s.kind in results) for s in graph.storages))

"""Makes a scheduled graph keep a budget in bytes: the graph with evictions, checked, or the reason that none exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from memplan.core.graph import Graph
from memplan.core.graph_edit import in_order
from memplan.core.units import format_bytes
from memplan.errors import BudgetInfeasible, InvalidEviction
from memplan.evict.apply import apply
from memplan.evict.costs import CostModel
from memplan.evict.equivalent import require_equivalent
from memplan.evict.measure import MeasuredEvents, measure
from memplan.evict.policies.auto import auto, recompute
from memplan.evict.policies.delta import delta
from memplan.evict.policies.dtr import dtr
from memplan.evict.policies.flow import flow, genoa
from memplan.evict.rng_states import SavedStates, decide, with_saved_states, without_states
from memplan.evict.workload import Events, Policy, Workload, floor, host_resident_storages

_KEEP_RANDOM: tuple[Policy, ...] = (flow, genoa, dtr, delta)  # they copy, or free after the last use
_CLOSE = 0.005  # share of the smallest budget found: the precision of the bisection
_RUNGS = 32  # smaller budgets, as shares of the bytes without a budget, whose events are candidates for a larger one
_PATIENCE = 2  # smaller budgets in a row that bring nothing, after which no smaller one is tried
_OPS = 1024  # of all searches of rungs in a row that bring nothing, where that is more: small steps try all rungs


Asked = TypeVar("Asked")
Made = TypeVar("Made")


def plan_again(
    make: Callable[[Asked], Made], less: Callable[[Made, Asked], Asked | None], asked: Asked, *, tries: int = 4
) -> tuple[Made, bool]:
    """Plan, see what it needed, and plan with less: the loop of every budget. Return the last plan, and if it is kept.

    Args:
        make: Makes what is asked for, such as a plan within so many bytes.
        less: What to ask for next, from what was made; None to keep that.
        asked: What to ask for first.
        tries: How often something is made, at most.
    """
    made = make(asked)
    while (wanted := less(made, asked)) is not None:
        tries -= 1
        if not tries:
            return made, False
        asked = wanted
        del made  # it is freed before the next one is made
        made = make(asked)
    return made, True


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A step that keeps its budget.

    `graph` has the ops in the order in which they run; `sources` and `instances` are those of `EvictionPlan`.
    `measured` are the bytes and seconds of this step, `base` those of the step without a budget.
    """

    graph: Graph
    sources: tuple[int, ...]
    instances: tuple[tuple[int, int], ...]
    measured: MeasuredEvents
    base: MeasuredEvents


def make_workload(
    graph: Graph, order: tuple[int, ...], costs: CostModel, alignment: int, *, device: str = ""
) -> Workload:
    """Return the workload of a scheduled graph for eviction policies, with a budget of 0; `Workload.within` sets
    another.

    `device` is the device of a step whose model and inputs are on the host; "" if the step runs where they are.
    """
    return Workload(
        graph=in_order(graph, order),
        sources=order,
        costs=costs,
        budget=0,
        alignment=alignment,
        host_resident=host_resident_storages(graph) if device else frozenset(),
        device=device,
    )


def fit(traced: Graph, workload: Workload, policy: Policy) -> Fitted:
    """Make the step of `workload` keep its budget. `traced` is the traced graph, for the check of equivalence.

    Raises `BudgetInfeasible` if a budget is below an op's working set or the policy finds no solution (it does not
    search for the smallest budget that works: see `smallest`), and `InvalidEviction` if the policy's events are invalid
    or exceed the budget.
    """
    base = measure(workload, workload.plain)
    if workload.host_resident:  # even if everything fits, the step need not wait for all copies
        roomy = workload.within(base.peak)
        base = measure(roomy, flow(roomy))
    lowest, op = floor(workload)
    if base.peak <= workload.budget and not workload.host_resident:
        events = workload.plain
    elif lowest > workload.budget:
        raise _infeasible(workload, lowest, op)
    else:
        workload, events = _decided(workload, policy, base)
    measured = measure(workload, events)
    if measured.peak > workload.budget:
        what = f"the policy's events need {measured.peak} bytes, the budget is {workload.budget}"
        raise InvalidEviction(what, where=getattr(policy, "__name__", "policy"), hint="use policy='auto'")
    if measured.area > 0:  # of bytes on the host, which this policy does not count
        raise _infeasible(workload, lowest, op)
    applied = apply(workload, events)
    require_equivalent(traced, applied.graph, applied.sources)
    return Fitted(
        graph=applied.graph, sources=applied.sources, instances=applied.instances, measured=measured, base=base
    )


def _decided(workload: Workload, policy: Policy, base: MeasuredEvents) -> tuple[Workload, Events]:
    """Return the fastest of the events that `policy` finds for the budget, and for smaller ones, which it keeps too.

    A search may get stuck where it does not for a smaller budget. The smaller budgets are the same ones whatever was
    asked: the rungs of `_rungs`. If all of them were searched, no rung would take more time than a smaller one, because
    it has the smaller one's events among its own. That is so for small steps; of larger ones, rungs are searched until
    `_PATIENCE` of them in a row have brought nothing. Raises what `policy` raises where it finds nothing for any.
    """
    states = _states_for(workload, policy)
    best: tuple[Workload, Events] | None = None
    failed: BudgetInfeasible | None = None
    try:
        best = decide(states, policy)
    except BudgetInfeasible as error:
        failed = error
    least = base.seconds if best is None else measure(*best).seconds
    patience = most = max(_PATIENCE, _OPS // max(len(workload.graph.ops), 1))
    for budget in _rungs(workload, base.peak) if _searches(policy) else ():
        if not patience or (best is not None and least <= base.seconds):  # no step takes less time
            break
        try:
            within, events = decide(states.within(budget), policy)
        except BudgetInfeasible:
            break
        found = measure(within, events)
        if best is not None and (found.area > 0 or found.seconds >= least):
            patience -= 1
            continue
        patience = most
        best, least = (within.within(workload.budget), events), found.seconds
    if best is None:
        assert failed is not None
        raise failed
    return best


def _rungs(workload: Workload, peak: int) -> Iterator[int]:
    """Yield budgets below that of `workload`, from the largest on, which depend on its bytes without a budget alone."""
    lowest, _ = floor(workload)
    tried = (peak * k // _RUNGS for k in reversed(range(1, _RUNGS)))
    return (budget for budget in tried if lowest <= budget < workload.budget)


def _searches(policy: Policy) -> bool:
    """Return whether a policy is a search, which may find less for a larger budget than for a smaller one."""
    return getattr(policy, "func", policy) in (auto, recompute)


def smallest(workload: Workload, policy: Policy) -> int:
    """Return the smallest budget, bytes, for which `policy` finds a solution.

    It is found by bisection between the largest working set and the peak. The result is a budget that was tried: a
    policy that uses less than its budget need not find a solution for less.
    """
    quick, states = quick_of(policy), _states_for(workload, policy)
    least, high = floor(workload)[0], measure(workload, workload.plain).peak
    low, tried = least - 1, least
    while high - low > max(_CLOSE * high, workload.alignment):
        low, high = (low, tried) if _keeps(states, quick, tried) else (tried, high)
        tried = (low + high) // 2
    return high


def _keeps(states: SavedStates, policy: Policy, budget: int) -> bool:
    """Return whether `policy` finds a solution for a budget."""
    try:
        return measure(*decide(states.within(budget), policy)).area == 0
    except BudgetInfeasible:
        return False


def quick_of(policy: Policy) -> Policy:
    """Return a policy that needs about the same bytes as `policy`, in less time; `policy` itself if there is none."""
    return partial(policy, quick=True) if policy in (auto, recompute) else policy


def _states_for(workload: Workload, policy: Policy) -> SavedStates:
    """Return the workload in which random ops can run again, unless `policy` never runs them again."""
    keeps = getattr(policy, "func", policy) in _KEEP_RANDOM
    return without_states(workload) if keeps else with_saved_states(workload)


def _infeasible(workload: Workload, lowest: int, index: int) -> BudgetInfeasible:
    op = workload.graph.ops[index]
    needs, limit = format_bytes(lowest), format_bytes(workload.budget)
    what = f"needs at least {needs}, for {op.name}: no way was found to run the step in {limit}"
    return BudgetInfeasible(what, op=op.name, smallest=lowest, where="arena_budget")

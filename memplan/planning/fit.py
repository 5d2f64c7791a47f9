"""A scheduled graph and a budget in bytes -> the graph that keeps it, checked; or why it cannot be kept."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from memplan.core.graph import Graph
from memplan.core.units import format_bytes
from memplan.errors import BudgetInfeasible, InvalidEviction
from memplan.evict.costs import CostModel
from memplan.evict.graph.apply import apply
from memplan.evict.graph.equivalent import require_equivalent
from memplan.evict.host_resident import all_streamed
from memplan.evict.judge.arrays import MeasuredEvents, measure
from memplan.evict.policies.auto import auto, recompute
from memplan.evict.policies.flow import flow
from memplan.evict.working_set import floor
from memplan.evict.workload import Policy, Workload, in_order

_CLOSE = 0.005  # of the smallest budget found: what more precision would win


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The graph that runs (its ops in order), where its ops and storages come from, and what it needs and takes."""

    graph: Graph
    sources: tuple[int, ...]
    instances: tuple[tuple[int, int], ...]
    measured: MeasuredEvents
    base: MeasuredEvents


def make_workload(
    graph: Graph, order: tuple[int, ...], costs: CostModel, alignment: int, *, device: str = ""
) -> Workload:
    """The question, with a budget of 0: `within` sets another. `device`: where the step runs whose model and caller
    are on the host; "" where both are at one place."""
    return Workload(
        graph=in_order(graph, order),
        sources=order,
        costs=costs,
        budget=0,
        alignment=alignment,
        streamed=all_streamed(graph) if device else frozenset(),
        device=device,
    )


def fit(traced: Graph, workload: Workload, policy: Policy) -> Fitted:
    """The step of `workload` within its budget; `traced` is the graph as it was traced, for the oracle.

    Raises `BudgetInfeasible` when the budget is below an op's working set or the policy finds no way, and
    `InvalidEviction` when a policy's events are nonsense or break the budget.
    """
    base = measure(workload, workload.plain)
    if workload.streamed:  # with room for everything, still nobody waits for all of it
        roomy = workload.within(base.peak)
        base = measure(roomy, flow(roomy))
    lowest, op = floor(workload)
    if base.peak <= workload.budget and not workload.streamed:
        events = workload.plain
    elif lowest > workload.budget:
        raise _infeasible(workload, policy, f"cannot run in {format_bytes(workload.budget)}:", op)
    else:
        try:
            events = policy(workload)
        except BudgetInfeasible as error:
            what = f"no way was found to run the step in {format_bytes(workload.budget)}; its largest op"
            raise _infeasible(workload, policy, what, op) from error
    measured = measure(workload, events)
    if measured.peak > workload.budget:
        what = f"the policy's events need {measured.peak} bytes, the budget is {workload.budget}"
        raise InvalidEviction(what, where=getattr(policy, "__name__", "policy"), hint="use policy='auto'")
    applied = apply(workload, events)
    require_equivalent(traced, applied.graph, applied.sources)
    return Fitted(
        graph=applied.graph, sources=applied.sources, instances=applied.instances, measured=measured, base=base
    )


def smallest(workload: Workload, policy: Policy) -> int:
    """The smallest budget (bytes) that bisection between the floor and the peak finds at which `policy` finds a way.

    It is a budget that was tried: a policy that needs less than it may have need not find the same way with less.
    """
    own: Policy | None = getattr(policy, "quick", None)
    quick: Policy = own or (partial(policy, work=0) if policy in (auto, recompute) else policy)
    low, high = floor(workload)[0] - 1, measure(workload, workload.plain).peak
    tried = low + 1
    while high - low > max(_CLOSE * high, workload.alignment):
        try:
            at = workload.within(tried)
            kept = measure(at, quick(at)).peak <= tried
        except BudgetInfeasible:
            kept = False
        low, high = (low, tried) if kept else (tried, high)
        tried = (low + high) // 2
    return high


def _infeasible(workload: Workload, policy: Policy, what: str, index: int) -> BudgetInfeasible:
    lowest, _ = floor(workload)
    least = smallest(workload, policy)
    op = workload.graph.ops[index]
    module = f" in {op.origin.module}" if op.origin.module else ""
    return BudgetInfeasible(
        f"{what} {op.name} ({op.target}){module} reads and writes {format_bytes(lowest)}",
        op=op.name,
        smallest=least,
        where="budget",
        hint=f"give at least {least} bytes ({format_bytes(least)}), or budget='min'",
    )

"""What the tests of budgets share: prices that make copies cheap, a policy that copies all it can, and a runner."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from torch import nn

from memplan.core.choices import Sanitize
from memplan.core.plan import Plan
from memplan.devices.kinds import alignment_of
from memplan.evict.costs import DEVICES, Link
from memplan.evict.measure import measure
from memplan.evict.policies.auto import auto
from memplan.evict.workload import Event, Events, Kind, Workload
from memplan.planning.fit import make_workload
from memplan.planning.options import PlanOptions
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards.module_guards import ModuleGuards
from memplan.runtime.memory.arena import arena_for
from memplan.schedule import order
from memplan.trace import plan_traced
from memplan.trace.traced import TracedGraph
from tests.steps import Outcome, outcome_of

_LINK = Link(bytes_per_second=1e13, latency=1e-9)
FAST_LINK = replace(DEVICES["cpu"], name="fast link", launch=0.0, to_host=_LINK, to_device=_LINK)  # copies are free
_SLOWER = Link(bytes_per_second=8e9, latency=1e-7)
HOST_UPDATES = replace(  # kernels take no time, copies do, and the host is as fast as it has to be
    replace(FAST_LINK, matrix_flops=1e15, narrow_flops=1e15, bytes_per_second=1e13, draw=0.0),
    name="updates on the host",
    to_host=_SLOWER,
    to_device=_SLOWER,
    updates=1e12,
)
QUICK = partial(auto, quick=True)
QUICK_RECOMPUTE = partial(auto, quick=True, swaps=False)


def everything(workload: Workload) -> Events:
    """Copy every storage to the host over its longest gap; each copy lasts for one op, so that copies overlap."""
    after: dict[int, list[Event]] = defaultdict(list)
    before: dict[int, list[Event]] = defaultdict(list)
    for s, storage in enumerate(workload.graph.storages):
        uses, writers = workload.uses[s], workload.writers[s]
        if not storage.planned or not storage.nbytes or not writers:
            continue
        gaps = [(b - a, a, b) for a, b in pairwise(uses) if a >= writers[-1] and b - a > 3]
        if gaps:
            _, last, back = max(gaps)
            after[last].append(Event(Kind.OFFLOAD, s))
            after[last + 1].append(Event(Kind.OFFLOADED, s))
            after[back - 2].append(Event(Kind.RELOAD, s))
            before[back].append(Event(Kind.RELOADED, s))
    events = []
    for i in range(len(workload.graph.ops)):
        events += [*before[i], Event(Kind.RUN, i), *sorted(after[i], key=lambda e: e.kind is not Kind.OFFLOADED)]
    return tuple(events)


def plan_of_everything(traced: TracedGraph, *, redzone: int = 0) -> Plan:
    """The plan of that policy, with its own peak as the budget."""
    schedule = order(traced.graph)
    workload = make_workload(traced.graph, schedule.order, FAST_LINK, alignment_of(traced.device))
    budget = measure(workload, everything(workload)).peak
    plan = plan_traced(traced, PlanOptions(arena_budget=budget, policy=everything, costs=FAST_LINK), redzone=redzone)
    assert plan.evictions
    return plan


def runner_of(model: nn.Module, traced: TracedGraph, plan: Plan, sanitize: Sanitize | None = "poison") -> Runner:
    """What `memplan.compile(model, ..., plan=plan)` runs, without tracing once more."""
    return Runner(ModuleGuards(model), traced, plan, arena_for(plan, traced.device), sanitize=sanitize)


def step_of(runner: Runner, model: nn.Module, args: tuple[Any, ...], seed: int) -> Outcome:
    """The outcome of one forward and backward by `runner`."""

    def call(*given: Any) -> Any:
        return runner(runner.input_guards.flatten(given, {}), training=True)

    return outcome_of(model, call, *args, seed=seed)

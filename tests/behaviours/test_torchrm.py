"""The accelerator runtime that memplan learns from: prefetch, promises, hooks, strategies, import (rows T5-T10)."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import memplan
from benchmarks.zoo import ZOO
from memplan.analysis.forecast import Residence
from memplan.core.graph import Graph
from memplan.core.plan import Plan
from memplan.core.problem import Problem, Solution
from memplan.core.schedule import Schedule, make_schedule
from memplan.devices.kinds import alignment_of
from memplan.evict.costs import Link
from memplan.evict.measure import measure, overlapped
from memplan.evict.policies.flow import genoa
from memplan.evict.workload import Event, Events, Kind, Workload
from memplan.planning.fit import make_workload
from memplan.planning.options import PlanOptions
from memplan.runtime.copies import ThreadCopies
from memplan.runtime.debug.hooks import EventKind, StepEvent, Tracker, When
from memplan.solvers import solve
from memplan.trace import plan_traced, trace
from tests.runtime.budgets import FAST_LINK, everything, plan_of_everything


def _late(workload: Workload) -> Events:
    """What `everything` does, with each copy back started only where it is waited for."""
    found: list[Event] = []
    for event in everything(workload):
        if event.kind is not Kind.RELOAD:
            found += [Event(Kind.RELOAD, event.of)] if event.kind is Kind.RELOADED else []
            found.append(event)
    return tuple(found)


def test_T5_copies_that_start_early_stall_less_in_the_simulation() -> None:  # noqa: N802
    traced = trace(*ZOO["mlp"]("nano"))
    order = plan_traced(traced).schedule.order
    workload = make_workload(traced.graph, order, FAST_LINK, alignment_of(traced.device))
    second = max(workload.seconds)  # a copy takes about as long as the longest op
    link = Link(bytes_per_second=max(s.nbytes for s in traced.graph.storages) / second, latency=0.0)
    workload = make_workload(traced.graph, order, replace(FAST_LINK, to_host=link, to_device=link), 64)
    late, early = (measure(workload, policy(workload)) for policy in (_late, everything))
    assert early.stall < late.stall
    assert early.seconds < late.seconds
    roomy = replace(workload, budget=measure(workload, workload.plain).peak)
    assert measure(roomy, overlapped(roomy, _late(roomy))).stall < late.stall


def test_T5_copies_that_start_early_stall_less_at_run_time() -> None:  # noqa: N802
    model, args = ZOO["mlp"]("nano")
    traced = trace(model, args)
    order = plan_traced(traced).schedule.order
    workload = make_workload(traced.graph, order, FAST_LINK, alignment_of(traced.device))
    stalled = {}
    for policy in (_late, everything):
        budget = measure(workload, policy(workload)).peak
        plan = plan_traced(traced, PlanOptions(arena_budget=budget, policy=policy, costs=FAST_LINK))
        compiled = memplan.compile(model, args, plan=plan)
        copies = compiled._calls.arena.copies
        assert isinstance(copies, ThreadCopies)
        copies.before = lambda _: time.sleep(0.002)

        def long_op(event: StepEvent, copies: ThreadCopies = copies) -> None:
            """Ops that take as long as the copies that are under way when they begin."""
            if event.kind is EventKind.OP and event.when is When.END:
                copies.drain()

        compiled.hooks.add(long_op)
        compiled(*args).backward()
        stalled[policy] = compiled._calls.programs.main.program.stalled
    assert stalled[everything] < stalled[_late]


def test_T6_T7_T10_forecast_hooks_and_tracker_agree() -> None:  # noqa: N802
    model, args = ZOO["mlp"]("nano")
    compiled = memplan.compile(model, args, plan=plan_of_everything(trace(model, args)))
    tracker, events = Tracker(), list[StepEvent]()
    compiled.hooks.add(tracker)
    compiled.hooks.add(events.append)
    compiled(*args).backward()
    for name in {e.storage for e in compiled.plan.evictions}:
        forecast = compiled.plan.forecast(name)
        holders = {s.name for s in compiled.plan.graph.storages}
        for tracked in tracker.steps:
            if forecast.at(tracked.step).where is Residence.HOST:
                assert f"{name}@host" in tracked.host.tensors
                assert not set(forecast.lives) & set(tracked.arena.tensors)
        assert holders >= set(forecast.lives)
        starts = [e.step for e in events if e.kind is EventKind.RELOAD and e.when is When.START and e.storage == name]
        assert starts == [p.start for p in forecast.places if p.where is Residence.RETURNING]


class _Genoa:
    """A policy of evictions that is an object of the user's."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, workload: Workload) -> Events:
        self.asked += 1
        return genoa(workload)


def _as_traced(graph: Graph) -> Schedule:
    """An order of the user's."""
    return make_schedule(graph, tuple(range(len(graph.ops))), "mine")


class _Stacked:
    """A solver of the user's: every buffer behind the one before it."""

    name = "stacked"

    def refuses(self, problem: Problem) -> str | None:
        return None

    def solve(self, problem: Problem, **_: Any) -> Solution:
        return replace(solve(problem, solver="naive"), solver=self.name)


def test_T8_a_users_policy_goes_where_the_built_in_ones_go() -> None:  # noqa: N802
    model, args = ZOO["mlp"]("nano")
    mine = _Genoa()
    plans: list[Plan] = [
        memplan.plan(model, args, gradients="outside", arena_budget="min", policy=p) for p in (mine, "genoa")
    ]
    assert mine.asked
    assert plans[0].evictions == plans[1].evictions
    assert plans[0].solution == plans[1].solution
    compiled = memplan.compile(model, args, gradients="outside", arena_budget="min", policy=mine)
    assert compiled.plan.evictions == plans[0].evictions
    plan = memplan.plan(model, args, schedule=_as_traced, solver=_Stacked())
    assert (plan.schedule.policy, plan.solution.solver) == ("mine", "stacked")


_IMPORT = """
import sys
import torch

def snapshot():
    found = {}
    names = [n for n in sys.modules if n == "torch" or n.startswith("torch.")]
    for name in names:
        module = sys.modules[name]
        for key, value in list(getattr(module, "__dict__", {}).items()):
            found[name, key] = id(value)
    for kind in (torch.Tensor, torch.nn.Module, torch.nn.Parameter, torch.autograd.Function, torch.optim.Optimizer):
        for key, value in list(vars(kind).items()):
            found[kind.__qualname__, key] = id(value)
    return names, found

names, before = snapshot()
import memplan
after_names, after = snapshot()
assert after_names == names, set(after_names) - set(names)
changed = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
assert not changed, changed
"""


def test_T9_importing_patches_nothing_in_torch() -> None:  # noqa: N802
    subprocess.run([sys.executable, "-c", _IMPORT], check=True, timeout=300)


def test_T9_importing_brings_nothing_heavy() -> None:  # noqa: N802
    """What takes time to import is not imported: that is how it takes none."""
    code = "import sys, memplan; assert not {'torch', 'numpy', 'numba', 'ortools'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)

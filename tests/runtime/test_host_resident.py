"""Parameters and optimizer state that live on the host, and take arena bytes only while an op uses them."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from memplan.core.graph import StorageKind
from memplan.core.plan import Plan
from memplan.core.schedule import make_schedule
from memplan.devices.kinds import alignment_of
from memplan.evict.measure import measure
from memplan.evict.workload import Event, Events, Kind, Workload
from memplan.planning.fit import fit, make_workload
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.planner import eviction_of
from memplan.schedule import order
from memplan.trace import trace
from memplan.trace.traced import TracedGraph
from tests.models import TwoLayersLoss
from tests.runtime.budgets import FAST_LINK, runner_of
from tests.steps import gradients_of

STREAMED = (StorageKind.PARAMETER, StorageKind.OPTIMIZER_STATE)


def _streamed(workload: Workload) -> Events:
    """Each is loaded for each op that uses it, one op ahead; and written back when the op changed it."""
    events: list[Event] = []
    for i in range(len(workload.graph.ops)):
        used = [s for s in workload.graph.touched(workload.graph.ops[i]) if s in workload.host_resident]
        events += [Event(Kind.RELOAD, s) for s in used]
        events += [Event(Kind.RELOADED, s) for s in used]
        events.append(Event(Kind.RUN, i))
        changed = [s for s in used if i in workload.writers[s]]
        events += [Event(Kind.OFFLOAD, s) for s in changed]
        events += [Event(Kind.OFFLOADED, s) for s in changed]
        events += [Event(Kind.DROP, s) for s in used if s not in changed]
    return tuple(events)


def _plan(traced: TracedGraph) -> Plan:
    """The plan in which all parameters and all optimizer state are streamed."""
    host_resident = frozenset(i for i, s in enumerate(traced.graph.storages) if s.kind in STREAMED)
    alignment = alignment_of(traced.device)
    workload = make_workload(traced.graph, order(traced.graph).order, FAST_LINK, alignment)
    workload = replace(workload, host_resident=host_resident)
    workload = replace(workload, budget=measure(workload, _streamed(workload)).peak)
    assert workload.budget < measure(workload, workload.plain).peak
    fitted = fit(traced.graph, workload, _streamed)
    schedule = make_schedule(fitted.graph, tuple(range(len(fitted.graph.ops))), "traced")
    plan = make_plan(
        ScheduledGraph(model="streamed", graph=fitted.graph, schedule=schedule, alignment=alignment, versions={})
    )
    return replace(plan, eviction=eviction_of(fitted, plan, "streamed", workload.within(plan.arena_size)))


def test_gradients_are_those_of_eager_also_after_parameters_moved() -> None:
    net, x = TwoLayersLoss(16, 32), torch.randn(8, 16)
    eager, traced = copy.deepcopy(net), trace(net, (x,))
    plan = _plan(traced)
    assert plan.host_size == 0, "the parameters themselves are the copies on the host"
    runner = runner_of(net, traced, plan)
    for _ in range(2):
        net.zero_grad()
        eager.zero_grad()
        loss, expected = runner([x], training=True), eager(x)
        loss.backward()
        expected.backward()
        assert torch.equal(loss.detach(), expected.detach())
        torch.testing.assert_close(gradients_of(net), gradients_of(eager), rtol=0, atol=0)
        for p, q in zip(net.parameters(), eager.parameters(), strict=True):
            p.data = torch.randn(p.shape)
            q.data = p.data.clone()

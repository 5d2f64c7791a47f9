"""Pictures of lanes: how busy kernels and copies are over the predicted time of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import memplan
from memplan.analysis.lanes import PARTS, lanes_of
from memplan.core.plan import Plan
from memplan.evict.costs import busy_seconds, cost_model
from memplan.report.lines import report_markdown


def _plan(budget: str | None, device: str | None = "cpu") -> Plan:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch, mean = torch.empty(64, 256), lambda y: y.square().mean()
    return memplan.plan_step(model, optimizer, mean, batch, device=device, budget=budget, costs="rtx4090")


@pytest.mark.parametrize("budget", ["min", None])
def test_lanes_are_busy_for_as_long_as_the_clock_says(budget: str | None) -> None:
    plan = _plan(budget)
    expected = busy_seconds(plan.graph, cost_model("rtx4090"))
    step = expected.pop("step")
    lanes = plan.report().lanes
    assert {lane.name: pytest.approx(lane.busy) for lane in lanes} == expected
    for lane in lanes:
        assert len(lane.shares) == PARTS
        assert max(lane.shares) <= 1
        assert sum(lane.shares) * step / PARTS == pytest.approx(lane.busy)
    text, rows = str(plan.report()), report_markdown(plan.report())
    assert "what is busy in the predicted time of a step" in text
    assert all(f"| {lane.name} |" in rows for lane in lanes)
    assert "█" in text


def test_no_lanes_are_drawn_without_copies_or_costs() -> None:
    assert _plan(None, device=None).report().lanes == ()
    plan = _plan("min")
    assert plan.eviction is not None
    assert lanes_of(replace(plan, eviction=replace(plan.eviction, costs="measured here"))) == ()

"""A captured step is traced again in other variants; a step without a retracer keeps its variant."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memplan.core.code_options import CodeOptions
from memplan.core.division import Division
from memplan.planning.options import PlanOptions
from memplan.trace import TracedGraph, capture_call, plan_step


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 32)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.drop(self.linear(x)), target)


class Counting:
    """A retracer that remembers what it was asked for."""

    def __init__(self) -> None:
        self.captured = capture_call(Classifier(), (torch.randn(16, 8), torch.randint(0, 32, (16,))), train=True)
        self.asked: list[tuple[Division | None, str]] = []

    def retrace(
        self, *, division: Division | None = None, compress: str = "", code: CodeOptions | None = None
    ) -> TracedGraph:
        assert code is None
        self.asked.append((division, compress))
        return self.captured.retrace(division=division, compress=compress)


def test_a_captured_step_is_never_changed_by_tracing_it() -> None:
    captured = Counting().captured
    whole = captured.retrace()
    divided = captured.retrace(division=Division(blocks=4), compress="bits")
    assert len(divided.graph.ops) > len(whole.graph.ops)
    assert (divided.division is not None, divided.compress) == (True, "bits")
    assert captured.retrace().graph == whole.graph


def test_a_plan_is_of_the_form_that_comes_with_it() -> None:
    retracer: Any = Counting()
    traced = retracer.captured.retrace()
    variant, plan = plan_step(traced, retracer, PlanOptions(divide=4, compress="bits"))
    assert retracer.asked == [(None, "bits"), (Division(blocks=4), "bits")]
    assert variant is not traced
    assert (plan.division, plan.compress) == (variant.division, variant.compress)
    assert plan.graph == variant.graph

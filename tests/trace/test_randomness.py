"""Attention without dropout draws nothing: it may be made again, and needs no place among what draws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)

import memplan
from memplan.evict.costs import DEVICES, Link
from memplan.trace import trace
from memplan.trace.passes.nodes import draws

aten = torch.ops.aten
_ATTENTION = [
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_cudnn_attention_backward",
]


class Attends(nn.Module):
    def __init__(self, dropout: float = 0.0, layers: int = 3) -> None:
        super().__init__()
        self.dropout = dropout
        self.layers = nn.ModuleList(nn.Linear(32, 96) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (12, 8)).transpose(1, 2).chunk(3, 1)
            attended = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
            x = x + attended.transpose(1, 2).flatten(2)
        return x.square().mean()


@pytest.mark.parametrize("name", _ATTENTION)
def test_attention_draws_only_with_dropout(name: str) -> None:
    target = getattr(aten, name).default
    names = [a.name for a in target._schema.arguments]
    position = names.index("dropout_p")
    assert not draws(target, [None] * position + [0.0], {})
    assert not draws(target, (), {"dropout_p": 0})
    assert draws(target, [None] * position + [0.1], {})


@pytest.mark.parametrize(("dropout", "expected"), [(0.0, 0), (0.25, 3)])
def test_ops_of_a_trace_are_random_with_dropout_only(dropout: float, expected: int) -> None:
    graph = trace(Attends(dropout), torch.randn(2, 16, 32)).graph
    assert sum(op.random for op in graph.ops) == expected
    assert any("flash_attention_for_cpu" in op.target for op in graph.ops) == (not dropout)


def test_a_budget_runs_attention_again_where_that_is_best() -> None:
    torch.manual_seed(0)
    model, x = Attends(layers=6), torch.randn(2, 64, 32)
    whole = memplan.plan(model, x, gradients="outside")
    slow = Link(latency=1.0, bytes_per_second=1e3)  # nothing goes to the host
    costs = replace(DEVICES["cpu"], to_host=slow, to_device=slow)
    compiled = memplan.compile(model, x, arena_budget=whole.arena_size * 3 // 10, gradients="outside", costs=costs)
    names = [op.target for op in compiled.plan.graph.ops]
    assert names.count("aten._scaled_dot_product_flash_attention_for_cpu.default") > 6

    def results(call: Any) -> list[torch.Tensor]:
        model.zero_grad()
        loss = call(x)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    for ours, theirs in zip(results(compiled), results(model), strict=True):
        assert torch.equal(ours, theirs)

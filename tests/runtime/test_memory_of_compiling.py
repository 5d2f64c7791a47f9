"""Compiling needs no more than the plan's total: kernels are tried before the arena is allocated."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from benchmarks.zoo import ZOO
from memplan.core.graph import Graph
from tests.runtime.allocated import allocations
from tests.slow import slow

_TRACING = 10240  # bytes: small tensors that dynamo and AOTAutograd make


@pytest.fixture(autouse=True)
def _garbage_is_looked_for_as_often_as_users_have_it() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def _peak(call: Callable[[], Any]) -> int:
    """Return the most bytes allocated while a call runs; kernels are not measured then."""
    gc.collect()  # so that the collector runs at the same points of the call, whatever ran before
    return max(accumulate(allocations(call)))


def _one_op(graph: Graph) -> int:
    """The most bytes of one op's operands and two of its results."""
    operands = [sum(graph.storages[s].nbytes for s in graph.touched(op)) for op in graph.ops]
    results = [sum(graph.storages[s].nbytes for s in graph.written(op)) for op in graph.ops]
    return max(map(sum, zip(operands, results, strict=True)))


_OPTIONS: tuple[dict[str, Any], ...] = ({}, {"budget": "min", "policy": "recompute"}, {"gradients": "outside"})


@pytest.mark.parametrize("options", [_OPTIONS[0], _OPTIONS[1], slow(_OPTIONS[2])])
@pytest.mark.parametrize("name", ["mlp", slow("resnet"), slow("gpt2")])
def test_compiling_needs_no_more_than_the_step(name: str, options: dict[str, Any]) -> None:
    model, inputs = ZOO[name]("nano")
    plan = memplan.compile(model, inputs, **options).plan  # its total has the kernels' temporaries
    torch._dynamo.reset()
    peak = _peak(lambda: memplan.compile(model, inputs, **options))
    before = plan.outside["parameters"] + plan.outside["inputs"]
    limit = max(plan.total, before + _one_op(plan.graph))
    assert peak + before <= limit + _TRACING


class Indexes(nn.Module):
    """Reads integers that it computes: they are tried on real data, where zeros would not do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = x.argsort(dim=1)
        return torch.gather(x, 1, order).cumsum(1) + torch.take_along_dim(x, order.flip(1), 1)


def test_integers_that_are_computed_are_tried_on_real_data() -> None:
    x = torch.randn(3, 17, requires_grad=True)
    compiled = memplan.compile(Indexes(), (x,))
    y = torch.randn(3, 17, requires_grad=True)
    ours, theirs = compiled(y), Indexes()(y)
    assert torch.equal(ours, theirs)
    assert torch.equal(*(torch.autograd.grad(r.square().sum(), y)[0] for r in (ours, theirs)))


def test_the_random_state_is_left_alone() -> None:
    model, inputs = ZOO["mlp"]("nano")
    torch.manual_seed(3)
    before = torch.get_rng_state()
    memplan.compile(model, inputs)
    assert torch.equal(torch.get_rng_state(), before)

"""What a barrier on the gradients costs: found from the graph alone, and held against the step without it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from torch import nn
from torch.nn import functional as F  # noqa: N812

from memplan.core.graph import Graph, Phase, StorageKind
from memplan.core.plan import Plan
from memplan.core.units import format_bytes
from memplan.report.lines import report_markdown
from memplan.report.summary import report_json
from memplan.runtime import compile_step
from memplan.schedule import accumulated, order, price
from tests.graph_strategies import GraphBuilder, graphs


def _plan(*, clip: float | None, batch: int = 2, optimizer: str = "AdamW") -> Plan:
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    inputs = torch.randn(batch, 64), torch.randn(batch, 64)
    owner = getattr(torch.optim, optimizer)(net.parameters(), lr=0.1, fused=True)
    return compile_step(net, owner, F.mse_loss, inputs, clip_grad_norm=clip).plan


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_clipping_costs_what_the_step_without_it_saves(optimizer: str) -> None:
    free, clipped = (_plan(clip=clip, optimizer=optimizer).report() for clip in (None, 1.0))
    assert free.barrier is None
    assert clipped.barrier is not None
    assert clipped.barrier.gradients == 12
    assert clipped.barrier.nbytes == 6 * (64 * 64 + 64) * 4
    assert clipped.barrier.max_live == clipped.order_max_live
    assert clipped.barrier.without == free.order_max_live
    assert clipped.barrier.costs == clipped.order_max_live - free.order_max_live > clipped.barrier.nbytes // 2
    text = report_markdown(clipped)
    assert "holds all 12 gradients" in text
    assert f"costs {format_bytes(clipped.barrier.costs)} of max live" in text
    assert report_json(clipped)["barrier"]["without"] == free.order_max_live
    assert "gradients (" not in report_markdown(free)


def _updates(b: GraphBuilder, gradients: list[int], *more: int) -> None:
    for gradient in gradients:
        size = b.storages[b.values[gradient].storage].nbytes
        parameter = b.storage(StorageKind.PARAMETER, size, planned=False)
        b.op(Phase.FORWARD, (parameter, gradient, *more), (parameter,))


def _made(b: GraphBuilder, count: int, *reads: int) -> list[int]:
    found = [b.storage(StorageKind.ACTIVATION, 100, planned=True) for _ in range(count)]
    for value in found:
        b.op(Phase.FORWARD, reads, (value,))
    return found


def test_any_op_that_stands_between_all_gradients_and_all_updates_is_one() -> None:
    """Here one that looks for infinities; what all gradients come from is none."""
    b = GraphBuilder()
    source = b.storage(StorageKind.ACTIVATION, 10, planned=True)
    b.op(Phase.FORWARD, (), (source,))
    gradients = _made(b, 3, source)
    flag = b.storage(StorageKind.ACTIVATION, 1, planned=True)
    b.op(Phase.FORWARD, tuple(gradients), (flag,), target="aten.any")
    _updates(b, gradients, flag)
    graph = b.graph()
    found = price(graph, order(graph).max_live)
    assert found is not None
    assert (found.op, found.target, found.gradients, found.nbytes) == ("op4", "aten.any", 3, 300)
    assert (found.max_live, found.without) == (310, 110)


@given(graphs())
def test_graphs_without_updates_have_none(graph: Graph) -> None:
    if not any(graph.storages[s].kind is StorageKind.PARAMETER for op in graph.ops for s in graph.written(op)):
        assert price(graph, 0) is None
    assert accumulated(graph) == 0

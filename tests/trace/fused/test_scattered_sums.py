"""Tests of sums whose scattered summand needs no bytes of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from memplan.trace.fused import row_division
from memplan.trace.fused.sums import scatter_into_summands
from tests.runtime.test_inductor_division import WIDE, _made, _tokens

aten: Any = torch.ops.aten
ROWS, WIDTH = 6, 4


def _graph(base: str = "zeros", *, accumulate: bool = True, late: bool = False, reads_twice: bool = False) -> fx.Graph:
    """Return a graph that adds rows, scattered into `base`, to a product."""
    graph, mode = fx.Graph(), FakeTensorMode()

    def node(target: Any, *args: Any) -> fx.Node:
        made: fx.Node = graph.call_function(target, args)
        with mode:
            made.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
        return made

    def given(name: str, value: torch.Tensor) -> fx.Node:
        made = graph.placeholder(name)
        made.meta["val"] = mode.from_tensor(value)
        return made

    left, right = given("left", torch.rand(ROWS, 3)), given("right", torch.rand(3, WIDTH))
    rows, index = given("rows", torch.rand(5, WIDTH)), given("index", torch.tensor([0, 2, 2, 5, 1]))
    product = None if late else node(aten.mm.default, left, right)
    zeros = node(aten.full.default, [ROWS, WIDTH], 0.0 if base == "zeros" else 1.0)
    scattered = node(aten.index_put.default, zeros, [index], rows, accumulate)
    product = product or node(aten.mm.default, left, right)
    result = node(aten.add.Tensor, scattered, product)
    graph.output((result, scattered) if reads_twice else (result,))
    return graph


def _run(graph: fx.Graph) -> Any:
    torch.manual_seed(0)
    given = torch.rand(ROWS, 3), torch.rand(3, WIDTH), torch.rand(5, WIDTH), torch.tensor([0, 2, 2, 5, 1])
    return fx.GraphModule({}, graph)(*given)[0]


def test_rows_are_scattered_into_the_other_summand() -> None:
    graph = _graph()
    expected = _run(graph)
    assert scatter_into_summands(graph) == 1
    assert not graph.find_nodes(op="call_function", target=aten.add.Tensor)
    assert not graph.find_nodes(op="call_function", target=aten.full.default)
    torch.testing.assert_close(_run(graph), expected)


@pytest.mark.parametrize(
    "other", [{"base": "ones"}, {"accumulate": False}, {"late": True}, {"reads_twice": True}], ids=str
)
def test_other_sums_stay_as_they_are(other: dict[str, Any]) -> None:
    graph = _graph(**other)
    expected, code = _run(graph), str(graph)
    assert scatter_into_summands(graph) == 0
    assert str(graph) == code
    assert torch.equal(_run(graph), expected)


@pytest.mark.slow
def test_the_gradient_of_tied_weights_exists_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import memplan

    def plan() -> memplan.Plan:
        divide = memplan.Division(blocks=4, sums=True)
        return memplan.plan(_made(shifted=False), _tokens(), kernels="inductor", divide=divide)

    def gradients(plan: memplan.Plan) -> int:
        backward = [op for op in plan.graph.ops if op.phase.name == "BACKWARD"]
        written = {s for op in backward for s in plan.graph.written(op)}
        return sum(plan.graph.storages[s].nbytes == WIDE * 16 * 4 for s in written)

    made = plan()
    monkeypatch.setattr(row_division, "scatter_into_summands", lambda _: 0)
    assert (gradients(made), gradients(plan())) == (1, 2)

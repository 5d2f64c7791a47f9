"""Symbolic tracing: sizes as they are for other shapes, conditions that say where, fixed dimensions refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import memplan
from benchmarks.zoo import ZOO
from memplan.core.graph import Graph
from memplan.errors import InvalidShapes, UnsupportedGraph
from memplan.trace import trace
from memplan.trace.dynamic.symbolic import trace_symbolic
from memplan.trace.passes import lowering
from tests.slow import slow

BATCH, SEQ = Dim("batch", min=1, max=64), Dim("seq", min=2, max=48)


def _same(one: Graph, two: Graph) -> bool:
    """Equal graphs, names aside."""

    def told(g: Graph) -> Any:
        return (
            [(o.target, o.phase, o.reads, o.writes, o.direct, o.random, o.unrelated) for o in g.ops],
            [replace(v, name="") for v in g.values],
            [(s.nbytes, s.device, s.kind, s.planned) for s in g.storages],
            (g.outputs, g.gradients),
        )

    return bool(told(one) == told(two))


@pytest.mark.parametrize(
    ("name", "shapes", "values"),
    [
        ("mlp", ({0: BATCH}, {0: BATCH}), ({"batch": 3}, {"batch": 64})),
        slow("resnet", ({0: BATCH}, {0: BATCH}), ({"batch": 3}, {"batch": 40})),
    ],
)
def test_a_symbolic_trace_is_every_concrete_one(
    name: str, shapes: Any, values: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for means, whose count is a constant only where it does not vary."""
    for op in (torch.ops.aten.mean.default, torch.ops.aten.mean.dim):
        monkeypatch.delitem(lowering.RULES, op)
    monkeypatch.setattr(lowering, "mean", lambda *_, **__: None)  # the mean of a loss
    model, example = ZOO[name]("nano")
    symbolic = trace_symbolic(model, example, {}, dynamic_shapes=shapes, train=True)
    assert symbolic.conditions == ("batch >= 2",), "the guards of conv's backend are no condition: both sides agree"
    graphs = []
    for given in values:
        inputs = tuple(
            torch.zeros([d[i].at(given[d[i].symbol]) if i in d else n for i, n in enumerate(x.shape)], dtype=x.dtype)
            for x, d in zip(example, symbolic.dims.leaves, strict=True)
        )
        assert symbolic.values_of(inputs) == given
        ours, theirs = symbolic.at(given, inputs), trace(model, inputs, train=True)
        assert _same(ours.graph, theirs.graph)
        for one, two in zip(ours.kernels, theirs.kernels, strict=True):
            assert str(one) == str(two)
        kept = {b.value: b.source for b in ours.bindings}
        assert kept == {b.value: b.source for b in theirs.bindings}
        graphs.append(ours.graph)
    assert not _same(*graphs), "other sizes are other graphs"


def test_divided_sizes_are_expressions() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ReLU())
    shapes = ({0: BATCH, 2: 2 * Dim("half", min=2, max=32), 3: Dim("wide", min=4, max=64)},)
    symbolic = trace_symbolic(model, (torch.zeros(2, 3, 16, 20),), {}, dynamic_shapes=shapes, train=True)
    assert any("//" in text for text in symbolic.sizes.expressions)
    for half, wide in ((3, 9), (10, 64)):
        x = torch.zeros(4, 3, 2 * half, wide)
        ours = symbolic.at({"batch": 4, "half": half, "wide": wide}, (x,))
        assert _same(ours.graph, trace(model, (x,), train=True, in_place=False).graph)


class Branches(nn.Module):
    """Takes a branch by a size."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(8, 8), how

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if self.how == "long" and x.shape[0] > 10:
            return y.sin()
        if self.how == "fixed":
            return y.view(5, 8) + 1
        if self.how == "equal" and x.shape[0] == 5:
            return y * 2
        if self.how == "size":
            return torch.mul(y, x.shape[0] ** 0.5)
        return y.cos()


def test_a_branch_becomes_a_condition() -> None:
    plan = memplan.plan(Branches("long"), torch.zeros(5, 8), dynamic_shapes={"x": {0: BATCH}})
    assert plan.place({"batch": 10}).arena_size
    with pytest.raises(memplan.MemplanError, match="batch <= 10"):
        plan.resolve({"batch": 11})


def test_a_size_that_is_special_is_left_out() -> None:
    shapes = {"x": {0: Dim("batch", max=5000), 1: Dim.AUTO}}
    plan = memplan.plan(Branches("equal"), torch.zeros(6, 8), dynamic_shapes=shapes)
    assert [s.name for s in plan.symbols] == ["batch"], "the width is fixed by the layer, and may be"
    assert plan.place({"batch": 4}).arena_size < plan.place({"batch": 4000}).arena_size
    with pytest.raises(memplan.MemplanError, match="batch != 5"):
        plan.resolve({"batch": 5})


def test_an_example_of_the_special_size_is_refused_with_the_line() -> None:
    with pytest.raises(
        InvalidShapes, match=r"fixes batch: .* batch == 5, because of if self.how == .equal. and x.shape"
    ):
        memplan.plan(Branches("equal"), torch.zeros(5, 8), dynamic_shapes={"x": {0: BATCH}})


def test_numbers_that_follow_from_sizes_but_are_none() -> None:
    with pytest.raises(UnsupportedGraph, match=r"leave that dimension out|next step"):
        memplan.plan(Branches("size"), torch.zeros(5, 8), dynamic_shapes={"x": {0: BATCH}})


def test_budgets_and_meta_tensors_are_refused() -> None:
    x = torch.zeros(5, 8)
    with pytest.raises(InvalidShapes, match="one size only"):
        memplan.plan(Branches(""), x, dynamic_shapes={"x": {0: BATCH}}, arena_budget="50%")
    with pytest.raises(UnsupportedGraph, match="meta"):
        memplan.plan(Branches("").to("meta"), x, dynamic_shapes={"x": {0: BATCH}})

"""Symbolic tracing: `dynamic_shapes=`, sizes as they are for other shapes, and conditions that say where."""

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
from memplan.trace.dynamic.dims import Range, Varying, read_dims
from memplan.trace.dynamic.symbolic import trace_symbolic
from memplan.trace.dynamic.symbols import without_implied
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
def test_a_symbolic_trace_is_every_concrete_one(name: str, shapes: Any, values: Any) -> None:
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
    assert plan.arena_size({"batch": 10})
    with pytest.raises(memplan.MemplanError, match="batch <= 10"):
        plan.resolve({"batch": 11})


def test_a_size_that_is_special_is_left_out() -> None:
    shapes = {"x": {0: Dim("batch", max=5000), 1: Dim.AUTO}}
    plan = memplan.plan(Branches("equal"), torch.zeros(6, 8), dynamic_shapes=shapes)
    assert [s.name for s in plan.symbols] == ["batch"], "the width is fixed by the layer, and may be"
    assert plan.arena_size({"batch": 4}) < plan.arena_size({"batch": 4000})
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


class Two(nn.Module):
    def forward(self, x: Tensor, rest: dict[str, Any], flag: bool = False) -> Tensor:
        return x


X, Y = torch.zeros(4, 8), torch.zeros(4, 3)
B = Dim("batch", min=2, max=64)


def _read(given: Any, args: tuple[Any, ...] = (X, {"y": [Y, 7]}), **kwargs: Any) -> Any:
    return read_dims(Two(), args, kwargs, given)


@pytest.mark.parametrize(
    "given",
    [
        {"x": {0: B}, "rest": {"y": [{0: B}, None]}},
        ({0: B}, {"y": [{0: B}, None]}),
        {"x": (B, None), "rest": {"y": [(B, 3), None]}},
    ],
)
def test_by_name_and_by_position(given: Any) -> None:
    dims = _read(given)
    assert dims.symbols == (Range(name="batch", min=2, max=64, example=4, strict=True),)
    assert dims.leaves == ({0: Varying(symbol="batch")}, {0: Varying(symbol="batch")}, {})


def test_keyword_arguments_and_negative_dimensions() -> None:
    dims = read_dims(Two(), (), {"rest": {}, "x": X}, {"x": {-1: Dim("width", max=9)}})
    assert dims.leaves == ({1: Varying(symbol="width")},)
    assert (dims.symbols[0].min, dims.symbols[0].max) == (1, 9)


def test_hints_and_numbers() -> None:
    dims = _read({"x": {0: Dim.AUTO, 1: 8}, "rest": {"y": [{0: Dim.DYNAMIC(min=3, max=7), 1: Dim.STATIC}, None]}})
    assert [(s.name, s.min, s.max, s.strict) for s in dims.symbols] == [
        ("in0_dim0", 1, 2**31 - 1, False),
        ("in1_dim0", 3, 7, True),
    ]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({}, "no dimension varies"),
        ({"x": {0: None}}, "no dimension varies"),
        ({"z": {0: B}}, "no argument 'z'"),
        ([{0: B}], "shorter"),
        ("batch", "longer"),
        ({"x": B}, "Unexpected input tensor shape"),
        ({"x": {2: B}}, "out of range"),
        ({"x": {"0": B}}, "must be integers"),
        ({"x": (B,)}, "expected 2, but got 1"),
        ({"x": {0: "batch"}}, "expected None, an int, a Dim"),
        ({"x": {0: 5}}, "is 5, the example has 4"),
        ({"x": {0: B, 1: B}}, "batch is 4 and 8"),
        ({"x": {0: Dim("batch", max=3)}}, "outside of 1..3"),
        ({"x": {0: B, 1: Dim("batch", min=3, max=9)}}, "different definitions"),
        ({"x": {0: 3 * Dim("third", max=9)}}, r"is 3\*third, the example has 4"),
        ({"rest": {"y": [None, {0: B}]}}, "non-tensor type"),
        ({"rest": {"z": [{0: B}]}}, "mismatch"),
        ({"x": {0: B}, "rest": {"y": [{0: Dim("batch", min=2, max=65)}, None]}}, "different definitions"),
    ],
)
def test_nonsense_is_refused_by_path(given: Any, complaint: str) -> None:
    with pytest.raises(InvalidShapes, match=complaint):
        _read(given)


def _range(name: str, most: int) -> Range:
    return Range(name=name, min=1, max=most, example=5, strict=False)


def test_only_conditions_that_say_something_are_kept() -> None:
    assert without_implied([_range("a", 9)], ["a >= 1", "a > 2", "a >= 2", "a % (a - 3) == 0"]) == (
        "a > 2",
        "a % (a - 3) == 0",
    )

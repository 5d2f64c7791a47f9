"""What constants alone determine is computed once, with the same bits; all else runs in every step as before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)

import memplan
from benchmarks.zoo import ZOO
from memplan.core.graph import StorageKind
from memplan.evict.costs import DEVICES, Link
from memplan.report.lines import report_markdown
from memplan.trace import trace
from memplan.trace.passes.nodes import draws
from memplan.trace.traced import Source
from tests.runtime.reference import Interpreted
from tests.slow import slow
from tests.steps import outcome_of


class Apply(nn.Module):
    def __init__(self, function: Callable[..., Any], **held: torch.Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.25))
        self.function = function
        for name, tensor in held.items():
            setattr(self, name, tensor)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


X = torch.linspace(-2, 2, 12).reshape(3, 4)


def mask(m: Any, x: torch.Tensor) -> Any:
    causal = torch.arange(4)[None, :] <= torch.arange(3)[:, None]
    return torch.where(causal, x * m.w, torch.tensor(-1.5))


def buckets(m: Any, x: torch.Tensor) -> Any:
    distance = torch.arange(4) - torch.arange(3)[:, None]
    near = torch.log(distance.abs().float() + 1).round().long()
    return x * m.w + torch.full((8,), 0.5).cumsum(0)[near]


FOLDED = {
    "mask": (mask, 20),
    "buckets": (buckets, 48),
    "literal": (lambda m, x: x * m.w * torch.tensor([1.0, -0.0, 3.0, float("nan")]), 16),
    "views": (lambda m, x: (x * m.w + torch.arange(12.0).view(4, 3).t()) * torch.arange(12.0).view(3, 4), 48),
    "layout": (lambda m, x: x * m.w + torch.full((4, 3), 2.0).t().sin(), 48),
}


@pytest.mark.parametrize("name", FOLDED)
def test_a_folded_step_has_the_same_bits(name: str) -> None:
    function, nbytes = FOLDED[name]
    model = Apply(function)
    traced = trace(model, X)
    assert traced.graph.bytes_of(StorageKind.CONSTANT) == nbytes
    left = {op.target for op in traced.graph.ops if op.phase.value == "forward"}
    assert left <= {"aten.mul.Tensor", "aten.add.Tensor", "aten.where.self"}
    outputs, gradients, _ = Interpreted(model, (X,)).run(X)
    result = memplan.compile(model, X)(X)
    result.backward(torch.ones_like(result))
    torch.testing.assert_close(result, outputs[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(model.w.grad, gradients["w"], rtol=0, atol=0, equal_nan=True)


KEPT = {
    "random": lambda m, x: x * m.w + torch.rand(4),
    "uninitialised": lambda m, x: x * m.w + torch.empty(4).copy_(x[0]),
    "a parameter": lambda m, x: x * (m.w * torch.arange(4.0)),
    "an input": lambda m, x: x * m.w + x.new_ones(4) * x[0],
}


@pytest.mark.parametrize("name", KEPT)
def test_what_no_constant_determines_runs_in_every_step(name: str) -> None:
    model = Apply(KEPT[name])
    traced = trace(model, X)
    tensors = [b.tensor for b in traced.bound(Source.CONSTANT)]
    assert not any(op.random for op in traced.graph.ops) or name == "random"
    assert any(op.random for op in traced.graph.ops) or name != "random"
    assert all(t is not None and t.numel() <= 4 for t in tensors)
    compiled = memplan.compile(model, X)
    for x in (X, X.flip(0)):
        torch.manual_seed(0)
        expected = model(x)
        torch.manual_seed(0)
        assert torch.equal(compiled(x), expected)


def test_a_tensor_that_the_model_holds_may_change() -> None:
    model = Apply(lambda m, x: x * m.w * (m.scale * 2 + m.buffer * 3), scale=torch.ones(4))
    model.register_buffer("buffer", torch.ones(4))
    compiled = memplan.compile(model, X)
    for _ in range(2):
        assert torch.equal(compiled(X), model(X))
        model.__dict__["scale"].fill_(7.0)
        model.get_buffer("buffer").fill_(-3.0)


def test_what_the_caller_gets_is_made_anew() -> None:
    model = Apply(lambda m, x: (x * m.w + torch.arange(4.0), torch.arange(4.0), torch.arange(4.0)[1:]))
    compiled = memplan.compile(model, X)
    with torch.no_grad():
        for result in compiled(X)[1:]:
            result.fill_(99.0)
        again = compiled(X)
    for ours, theirs in zip(again, model(X), strict=True):
        assert torch.equal(ours, theirs)


def test_a_buffer_that_is_set_to_a_constant_is_set_by_every_step() -> None:
    class Sets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("state", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.get_buffer("state").copy_(torch.arange(4.0).add(1))
            return self.linear.forward(x)

    model = Sets()
    compiled = memplan.compile(model, X)
    for _ in range(2):
        model.get_buffer("state").zero_()
        compiled(X)
        assert torch.equal(model.get_buffer("state"), torch.arange(4.0).add(1))


@pytest.mark.parametrize("name", ["gpt2", slow("t5")])
def test_a_loaded_plan_folds_alike(name: str, tmp_path: Path) -> None:
    model, args = ZOO[name]("nano")
    plan = memplan.plan(model, args)
    plan.save(tmp_path / "plan.json")
    loaded = memplan.load(tmp_path / "plan.json")
    assert loaded.graph.folded_bytes == plan.graph.folded_bytes > 0
    compiled = memplan.compile(model, args, plan=loaded)
    torch.manual_seed(0)
    loss = compiled(*args)
    torch.manual_seed(0)
    assert torch.equal(loss, model(*args))
    assert "computed once" in report_markdown(plan.report())


_EMPTY: dict[str, Callable[[torch.Tensor], Any]] = {
    "new_empty(0)": lambda y: y.new_empty(0),
    "new_empty": lambda y: y.new_empty(4),
    "empty": lambda y: torch.empty(4, 2),
    "empty of integers": lambda y: torch.empty(3, dtype=torch.int64),
    "empty_like": torch.empty_like,
    "empty_strided": lambda y: torch.empty_strided((2, 3), (1, 2)),
    "new_empty_strided": lambda y: y.new_empty_strided((2, 3), (1, 2)),
    "empty_permuted": lambda y: torch.empty_permuted((2, 3), (1, 0)),
    "a view": lambda y: y.new_empty(4, 2).t(),
}


class Scaled(nn.Module):
    """x * w, and memory."""

    def __init__(self, empty: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))
        self.empty = empty

    def forward(self, x: torch.Tensor) -> Any:
        y = x * self.w
        return y, self.empty(y)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("empty", _EMPTY)
def test_returned_memory_is_the_callers(empty: str, *, train: bool) -> None:
    model, x = Scaled(_EMPTY[empty]), torch.randn(2, 3)
    compiled = memplan.compile(model, x, train=train)
    (_, theirs), (y, ours) = model(x), compiled(x)
    assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
    assert not ours.requires_grad
    ours.fill_(7)
    if train:
        y.sum().backward()
    _, again = compiled(x)
    assert (ours == 7).all(), "the next call has memory of its own"
    assert again.untyped_storage().data_ptr() != ours.untyped_storage().data_ptr() or not ours.numel()


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
    assert outcome_of(model, compiled, x).same_as(outcome_of(model, model, x))

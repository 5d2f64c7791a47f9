"""Every lowering rule gives the bits of the op that it replaces."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from memplan.runtime import compile as memplan_compile
from memplan.trace import CapturedCall, capture_call, plan_traced
from memplan.trace.passes.lowering import RULES
from tests.models import Apply
from tests.runtime.budgets import runner_of
from tests.runtime.reference import Interpreted
from tests.steps import outcome_of

X = torch.linspace(-2, 2, 24).reshape(2, 3, 4)
INDEX = torch.tensor([[0, 2, 1], [2, 2, 0]])
SPECIAL = torch.tensor([-0.0, 0.0, 1e-40, -1e-45, 3e38, -3e38, 1.1, float("inf"), -7.0, 0.3]).outer(torch.ones(10))
INFINITE = torch.tensor([0.0, float("inf"), 0.0]).view(3, 1)
aten = torch.ops.aten

CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "clone": (lambda w, x: (x * w).transpose(1, 2).contiguous() * 2, (X,)),
    "_to_copy": (lambda w, x: (x * w).double().float() * w, (X,)),
    "mul.Scalar": (lambda w, x: aten.mul.Scalar(x * w, 3), (X,)),
    "div.Scalar": (lambda w, x: (x * w).mean(), (X,)),
    "add.Scalar": (lambda w, x: aten.add.Scalar(x * w, 1.5), (X,)),
    "sub.Scalar": (lambda w, x: aten.sub.Scalar(x * w, 1.5), (X,)),
    "relu": (lambda w, x: torch.relu(x * w), (torch.tensor([-0.0, 0.0, float("nan"), -1.0]),)),
    "sum": (lambda w, x: (x * w).sum(), (X,)),
    "sum that keeps a dimension nobody sees": (lambda w, x: (x * w).sum(1, keepdim=True).view(2, 4).sin(), (X,)),
    "sum that keeps two": (lambda w, x: (x * w).sum((0, 2), True, dtype=torch.double).view(3).float(), (X,)),
    "sum of what is transposed": (lambda w, x: (x * w).transpose(0, 2).sum(1, True).view(4, 2).sin(), (X,)),
    "sum seen in another shape": (lambda w, x: (x * w).sum(1, keepdim=True).view(4, 2).sin(), (X,)),
    "mean": (lambda w, x: (x * w).mean() * x, (X,)),
    "mean.dim": (lambda w, x: (x * w).mean((0, -1)) * x.mean(1, keepdim=True).sum() * w, (X,)),
    "mean of a transposed double": (lambda w, x: (x * w).double().transpose(0, 1).mean(1).float(), (X,)),
    "mean of half": (lambda w, x: (x * w).bfloat16().mean(1).float(), (X,)),
    "mean as double": (lambda w, x: (x * w).mean(1, dtype=torch.double).float(), (X,)),
    "mean of nothing": (lambda w, x: (x * w)[:, :0].mean(1), (X,)),
    "mean of infinite and nan": (lambda w, x: (x * w).mean(-1), (SPECIAL,)),
    "embedding": (lambda w, i: F.embedding(i, w * torch.ones(5, 4)), (INDEX,)),
    "embedding_dense_backward": (lambda w, i: F.embedding(i, w * torch.ones(5, 4), padding_idx=2).sin(), (INDEX,)),
    "arange": (lambda w, x: x * w * torch.arange(4) + torch.arange(1, 5) + torch.arange(0, 8, 2), (X,)),
    "native_dropout": (lambda w, x: F.dropout(x * w, 0.3), (X,)),
    "native_dropout of double": (lambda w, x: F.dropout(x.double() * w.double(), 0.1).float() * x, (X,)),
    "batch_norm": (lambda w, x: F.batch_norm(x * w, torch.zeros(3), torch.ones(3), training=True), (X,)),
    "batch_norm of what is transposed": (
        lambda w, x: F.batch_norm((x * w).transpose(1, 2), torch.zeros(4), torch.ones(4), training=True).contiguous(),
        (X,),
    ),
    "slice_backward": (lambda w, x: (x * w)[:, 1:3, ::2] * 2, (X,)),
    "select_backward": (lambda w, x: (x * w)[1] * 2, (X,)),
    "slice_scatter": (lambda w, x: torch.slice_scatter(x * w, x[:, :1] * w, 1, 1, 2), (X,)),
    "select_scatter": (lambda w, x: torch.select_scatter(x * w, x[:, 0] * w, 1, 2), (X,)),
    "as_strided_scatter": (lambda w, x: torch.as_strided_scatter(x * w, x[0, 0] * w, (4,), (2,), 3), (X,)),
    "diagonal_scatter": (lambda w, x: torch.diagonal_scatter(x * w, x[:, 0, :3] * w, 1, 1, 2), (X,)),
    "index_add": (lambda w, x, i: torch.index_add(x * w, 1, i[0], x[:, :3] * w, alpha=2), (X, INDEX)),
    "index_copy": (lambda w, x, i: torch.index_copy(x * w, 1, i[0, :2], x[:, :2] * w), (X, INDEX)),
    "index_fill": (lambda w, x, i: torch.index_fill(x * w, 1, i[0, :2], 2.5), (X, INDEX)),
    "scatter.src": (lambda w, x, i: torch.scatter(x * w, 0, i[:, None] % 2, (x * w)[:, :1, :3]), (X, INDEX)),
    "scatter.value": (lambda w, x, i: torch.scatter(x * w, 0, i[:, None] % 2, 2.5), (X, INDEX)),
    "scatter_add": (lambda w, x, i: torch.scatter_add(x * w, 0, i[:, None] % 2, (x * w)[:, :1, :3]), (X, INDEX)),
    "constant_pad_nd": (lambda w, x: F.pad(x * w, (1, 2, 0, 1), value=3.5), (X,)),
    "masked_fill.Scalar": (lambda w, x: (x * w).masked_fill(x > 0, float("-inf")).clamp_min(-9), (X,)),
    "masked_fill.Tensor": (lambda w, x: (x * w).masked_fill(x > 0, torch.tensor(2.0)), (X,)),
    "index_put": (lambda w, x, i: torch.index_put(x * w, (i[0, :2],), x[0] * w, accumulate=True), (X, INDEX % 2)),
    "zeros": (lambda w, x: torch.zeros(3, 4) + x * w, (X,)),
    "ones": (lambda w, x: torch.ones(3, 4) + x * w, (X,)),
    "zeros_like": (lambda w, x: torch.zeros_like(x) + x * w, (X,)),
    "ones_like": (lambda w, x: torch.ones_like(x) + x * w, (X,)),
    "new_zeros": (lambda w, x: x.new_zeros(4) + x * w, (X,)),
    "new_ones": (lambda w, x: x.new_ones(4) + x * w, (X,)),
    "full": (lambda w, x: torch.full((4,), float("inf")).clamp(max=3) + x * w, (X,)),
    "full_like": (lambda w, x: torch.full_like(x, 7.0) + x * w, (X,)),
    "new_full": (lambda w, x: x.new_full((4,), 7.0) + x * w, (X,)),
    "scalar_tensor": (lambda w, x: torch.where(x > 0, x * w, 2.0), (X,)),
    "lift_fresh_copy": (lambda w, x: torch.tensor([1.0, 2.0, 3.0, 4.0]) * x * w, (X,)),
    "copy": (lambda w, x: torch.empty(2, 3, 4).copy_(x * w) * 2, (X,)),
    "_safe_softmax": (lambda w, x: aten._safe_softmax((x * w).masked_fill(x < -1, float("-inf")), -1) * x, (X,)),
    "_safe_softmax of half": (lambda w, x: aten._safe_softmax((x * w).bfloat16(), 1).float() * x, (X,)),
    "_safe_softmax of nothing but -inf": (lambda w, x: aten._safe_softmax(x * w - INFINITE, -1) * x, (X,)),
    "_safe_softmax of nan": (lambda w, x: aten._safe_softmax((x * w).sqrt(), -1).nan_to_num() * x, (X,)),
    "mul of a scaled factor": (lambda w, x: (x * w) * ((x + w) * 1.1), (SPECIAL,)),
    "mul of a factor scaled by a Scalar": (lambda w, x: aten.mul.Scalar(x + w, -0.3) * (x * w), (SPECIAL,)),
    "mul of a factor divided by a power of two": (lambda w, x: ((x + w) / 64) * (x * w), (SPECIAL,)),
    "mul of a factor divided by three": (lambda w, x: ((x + w) / 3) * (x * w), (SPECIAL,)),
    "mul of a part that is scaled": (lambda w, x: ((x * w)[:, 1:] * 0.5) * x[:, :-1].sin(), (X,)),
    "mse_loss mean": (lambda w, x: F.mse_loss(x * w, x.sin()), (X,)),
    "mse_loss sum": (lambda w, x: F.mse_loss(x * w, x.sin(), reduction="sum"), (X,)),
    "mse_loss none": (lambda w, x: F.mse_loss(x * w, x.sin(), reduction="none"), (X,)),
}


@cache
def _captured(name: str) -> tuple[Apply, CapturedCall]:
    """The model of a case and its captured step, which all tests share."""
    model = Apply(CASES[name][0])
    return model, capture_call(model, CASES[name][1], train=True)


@pytest.mark.parametrize("name", CASES)
def test_a_rule_gives_the_same_bits(name: str) -> None:
    (model, step), xs = _captured(name), CASES[name][1]
    traced = step.retrace()
    runner = runner_of(model, traced, plan_traced(traced))
    torch.manual_seed(0)
    outputs, gradients, _ = Interpreted(model, xs, captured=step.captured).run(*xs)
    torch.manual_seed(0)
    out = runner(runner.input_guards.flatten(xs, {}), training=True)
    out.backward(torch.ones_like(out))
    assert out.dtype == outputs[0].dtype
    assert torch.equal(out.detach().view(-1).nan_to_num(99), outputs[0].reshape(-1).nan_to_num(99))
    assert model.w.grad is not None
    assert torch.equal(model.w.grad.nan_to_num(99), gradients["w"].nan_to_num(99))


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_dropout_of_halves_has_eagers_bits(dtype: torch.dtype, p: float) -> None:
    """Which rounds the scale before it multiplies; the kernel that is traced for it rounds once."""
    model = Apply(lambda w, x: F.dropout(x.to(dtype) * w.to(dtype), p).float() * x)
    compiled = memplan_compile(model, (X,))
    results = []
    for run in (model, compiled):
        torch.manual_seed(3)
        out = run(X)
        (gradient,) = torch.autograd.grad(out, model.w, torch.ones_like(out))
        results.append((out.detach(), gradient))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_every_rule_is_exercised() -> None:
    """Each op that has a rule occurs in a captured case, and none is left after lowering where the rule applies."""
    seen: set[Any] = set()
    left: set[str] = set()
    for _, step in map(_captured, CASES):
        seen |= {n.target for n in step.captured.graph_module.graph.nodes}
        left |= {op.target for op in step.retrace().graph.ops}
    assert {str(t) for t in RULES} - {str(t) for t in seen} == set()
    # Run functionally: reduction="none", which has nothing to reduce, normalisations of
    # what is transposed.
    functional = {"aten.mse_loss.default", "aten._native_batch_norm_legit_functional.default"}
    fewer_operands = {"aten.native_batch_norm_backward.default"}
    assert {str(t) for t in RULES} & left <= functional | fewer_operands


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("affine", [True, False])
def test_the_backward_of_a_batch_norm_has_the_bits_of_eager(dtype: torch.dtype, affine: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, affine=affine), nn.ReLU()).to(dtype)
    if dtype is torch.bfloat16 and affine:
        model[1].float()  # as mixed precision has it
    twin, x = copy.deepcopy(model), torch.randn(2, 3, 5, 5, dtype=dtype)
    compiled = memplan_compile(model, x)
    for _ in range(2):
        ours, theirs = (
            outcome_of(one, lambda x, call=call: call(x).float().square().sum(), x)
            for one, call in ((model, compiled), (twin, twin))
        )
        assert len(ours.gradients) == len(list(model.parameters()))
        assert ours.same_as(theirs)

"""LSTMs run the kernels that eager runs: the same bits, forward and backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.errors import UnsupportedGraph
from memplan.runtime import compile as memplan_compile
from memplan.trace import trace
from tests.runtime.budgets import QUICK_RECOMPUTE

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
    reason="torch was built without oneDNN",
)
_KERNELS = ["aten.mkldnn_rnn_layer.default", "aten.mkldnn_rnn_layer_backward.default"]


class Reads(nn.Module):
    """All results of an LSTM, of which the loss needs two."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.into, self.rnn = nn.Linear(6, 6), nn.LSTM(6, 8, **options)

    def forward(self, x: torch.Tensor) -> Any:
        out, (hidden, cell) = self.rnn(torch.tanh(self.into(x)))
        return out.square().mean() + cell.sum(), hidden.detach()


def _step(model: nn.Module, call: Any, x: torch.Tensor, seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    model.zero_grad()
    loss, hidden = call(x)
    loss.backward()
    grads = [p.grad for p in model.parameters()]
    return [loss.detach(), hidden, *(g.clone() for g in (x.grad, *grads) if g is not None)]


@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.5},
        {"num_layers": 2, "bias": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_training_gives_the_bits_of_eager(options: dict[str, Any], mode: str) -> None:
    torch.manual_seed(0)
    model, x = Reads(**options).train(mode == "training"), torch.randn(3, 5, 6)
    eager = copy.deepcopy(model)
    compiled = memplan_compile(model, x.clone().requires_grad_(), train=True, guard="poison")
    targets = [op.target for op in compiled.plan.graph.ops]
    runs = options["num_layers"] * (1 + options.get("bidirectional", False))
    assert [targets.count(kernel) for kernel in _KERNELS] == [runs, runs]
    for seed in range(3):
        for one, two in zip(_step(model, compiled, x, seed), _step(eager, eager, x, seed), strict=True):
            assert torch.equal(one, two)


def test_inference_needs_no_workspace() -> None:
    torch.manual_seed(0)
    model, x = Reads(num_layers=2).eval(), torch.randn(3, 5, 6)
    compiled = memplan_compile(model, x, train=False)
    assert not any(v.dtype == "uint8" and v.shape != (0,) for v in compiled.plan.graph.values)
    with torch.no_grad():  # with gradients, eager takes another kernel of oneDNN's
        expected = model(x)
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            assert all(torch.equal(a, b) for a, b in zip(compiled(x), expected, strict=True))


def test_workspaces_are_planned_and_may_be_made_again() -> None:
    torch.manual_seed(0)
    model, x = Reads(num_layers=3), torch.randn(16, 4, 6)
    eager = copy.deepcopy(model)
    plan = memplan.plan(model, x.requires_grad_())
    workspaces = [v for v in plan.graph.values if v.dtype == "uint8"]
    assert len(workspaces) == 3
    assert all(plan.graph.storages[v.storage].planned and v.shape > (0,) for v in workspaces)
    compiled = memplan_compile(model, x, budget=0.9, policy=QUICK_RECOMPUTE)
    again = [op for op in compiled.plan.graph.ops if op.target == _KERNELS[0]]
    assert len(again) > 3
    for one, two in zip(_step(model, compiled, x.detach(), 0), _step(eager, eager, x.detach(), 0), strict=True):
        assert torch.equal(one, two)


def test_what_onednn_does_not_run_is_decomposed() -> None:
    x = torch.randn(5, 2, 4)
    for model, given in ((nn.LSTM(4, 8, proj_size=3), x), (nn.LSTM(4, 8).double(), x.double())):
        assert not {op.target for op in trace(model, given).graph.ops} & {*_KERNELS}
    with pytest.raises(UnsupportedGraph, match="dropout"):
        trace(nn.LSTM(4, 8, num_layers=2, dropout=0.5, proj_size=3), x)


def test_the_users_settings_stay_as_they_are() -> None:
    before = torch._C._get_mkldnn_enabled()
    for enabled in (False, True):
        torch._C._set_mkldnn_enabled(enabled)
        try:
            targets = {op.target for op in trace(nn.LSTM(4, 8), torch.randn(5, 2, 4)).graph.ops}
            assert torch._C._get_mkldnn_enabled() == enabled
        finally:
            torch._C._set_mkldnn_enabled(before)
        assert bool(targets & set(_KERNELS)) == enabled

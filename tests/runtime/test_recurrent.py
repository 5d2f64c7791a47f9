"""Recurrent layers run the kernels that eager runs: the same bits, forward and backward."""

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
from memplan.trace.capture.joint_graph import capture
from tests.models import Made
from tests.runtime.budgets import QUICK_RECOMPUTE
from tests.slow import slow
from tests.steps import outcome_of, under_autocast

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
    reason="torch was built without oneDNN",
)
_CUDA = torch.device("cuda")
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
    [{"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.5}, {"num_layers": 2, "bias": False}],
    ids=str,
)
@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_training_gives_the_bits_of_eager(options: dict[str, Any], mode: str) -> None:
    torch.manual_seed(0)
    model, x = Reads(**options).train(mode == "training"), torch.randn(3, 5, 6)
    eager = copy.deepcopy(model)
    compiled = memplan_compile(model, x.clone().requires_grad_(), train=True, budget="1GiB", sanitize="poison")
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
    compiled = memplan_compile(model, x, arena_budget=0.9, policy=QUICK_RECOMPUTE)
    again = [op for op in compiled.plan.graph.ops if op.target == _KERNELS[0]]
    assert len(again) > 3
    for one, two in zip(_step(model, compiled, x.detach(), 0), _step(eager, eager, x.detach(), 0), strict=True):
        assert torch.equal(one, two)


def _casts(kind: Any, size: int, **options: Any) -> Made:
    """A recurrent layer between two others; what it makes is read in full precision."""
    parts = {"into": nn.Linear(6, 6), "rnn": kind(6, size, **options), "out": nn.Linear(32, 3)}
    return Made(lambda m, x: m.out(m.rnn(m.into(x))[0].float()).float().square().mean(), **parts)


@pytest.mark.parametrize("autocast", [True, slow(False)])
def test_lstms_under_autocast_are_eagers(autocast: bool) -> None:
    """Both are compiled in one process: whoever comes first leaves the other's workspace as large as it is."""
    torch.manual_seed(0)
    x = torch.randn(3, 7, 6)
    for under in (not autocast, autocast):
        model = _casts(nn.LSTM, 32, num_layers=2, dropout=0.3, batch_first=True)
        eager = copy.deepcopy(model)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=under):
            compiled = memplan_compile(model, x)
        ours, theirs = (under_autocast(call, enabled=under) for call in (compiled, eager))
        assert outcome_of(model, ours, x, seed=1).same_as(outcome_of(eager, theirs, x, seed=1))


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        slow(nn.GRU, {"num_layers": 2, "dropout": 0.5}),
        (nn.RNN, {"nonlinearity": "relu", "num_layers": 2, "dropout": 0.5}),
        slow(nn.LSTM, {"proj_size": 32, "num_layers": 2, "dropout": 0.5}),
    ],
)
def test_what_onednn_does_not_run_is_what_eager_calls(kind: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = _casts(kind, 64 if "proj_size" in options else 32, **options), torch.randn(2, 2, 6)
    eager = copy.deepcopy(model)
    compiled = memplan_compile(model, x)
    assert not {op.target for op in compiled.plan.graph.ops} & {*_KERNELS}
    assert outcome_of(model, compiled, x, seed=1).same_as(outcome_of(eager, eager, x, seed=1))


class ByFunction(nn.Module):
    """The function of `torch` on parameters of one's own, which dynamo reads."""

    def __init__(self, name: str) -> None:
        super().__init__()
        kind: Any = {"gru": nn.GRU, "lstm": nn.LSTM}[name]
        self.name, self.weights = name, nn.ParameterList(kind(32, 32, 2)._flat_weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(2, x.shape[1], 32)
        given = (h, h) if self.name == "lstm" else h
        run = getattr(torch, self.name)
        made: torch.Tensor = run(x, given, list(self.weights), True, 2, 0.5, self.training, False, False)[0].sum()
        return made


def test_an_lstm_whose_shapes_vary_is_refused() -> None:
    shapes = {"x": {1: torch.export.Dim("batch", min=2, max=9)}}
    with pytest.raises(UnsupportedGraph, match="workspace"):
        memplan.plan(ByFunction("lstm"), torch.randn(5, 3, 32), train=True, dynamic_shapes=shapes)


def test_dropout_that_tracing_loses_for_other_devices_is_refused() -> None:
    with pytest.raises(UnsupportedGraph, match="dropout between its layers"):
        capture(nn.GRU(4, 8, num_layers=2, dropout=0.5), (torch.randn(5, 2, 4),), {}, train=True, device=_CUDA)


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

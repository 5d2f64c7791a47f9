"""`cuda_graph=True`: the protocol of recording and replaying, on any device by a recorder that runs the step again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils import _pytree as pytree

from benchmarks.zoo import ZOO
from memplan.errors import MemplanError, UnsupportedCall, UnsupportedGraph
from memplan.runtime import compile, compile_step
from memplan.runtime.execute.cuda_graphs import make_recorder
from tests.models import Made
from tests.runtime.reference import same_parameters
from tests.slow import slow
from tests.steps import loss_of, outcome_after


class Rerun:
    """Records by remembering the function: a replay runs it, and leaves its results in the memory of the first."""

    pool_bytes = 17

    def __init__(self) -> None:
        self.recorded = 0

    def warm_up(self, function: Callable[[], Any]) -> None:
        function()

    def record(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.recorded += 1
        results = function()

        def replay() -> None:
            with torch.no_grad():
                for old, new in zip(pytree.tree_leaves(results), pytree.tree_leaves(function()), strict=True):
                    if old is not new:
                        old.copy_(new)

        return replay, results


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Rerun:
    made = Rerun()
    monkeypatch.setattr("memplan.runtime.builder.make_recorder", lambda device, sanitize: made)
    return made


@pytest.mark.parametrize("name", ["small", slow("lstm"), slow("resnet")])
def test_replays_are_the_steps_themselves(name: str, recorder: Rerun) -> None:
    """Dropout, running statistics and accumulated gradients included."""
    model, args = (_normed(), (_batch()[0],)) if name == "small" else ZOO[name]("nano")
    other = copy.deepcopy(model)
    recorded = compile(model, args, cuda_graph=True, gradients="outside")
    for seed in range(4):
        outcomes = []
        for net, call in ((model, recorded), (other, other)):
            loss = loss_of(lambda *given, call=call: call(*given).mean(), *args, seed=seed)
            outcomes.append(outcome_after(net, loss))
        assert outcomes[0].same_as(outcomes[1])
        if seed == 1:
            for m in (model, other):
                m.zero_grad()
    assert recorder.recorded == 2
    assert recorded.pool_bytes == 17
    with torch.no_grad():
        recorded(*args)
    assert recorded.pool_bytes == 2 * 17, "of each program"


def test_results_are_the_callers_and_moved_parameters_are_recorded_anew(recorder: Rerun) -> None:
    """The model has dropout: what is recorded anew, while a result is held, has the random numbers of its seed."""
    model, (x, _) = _normed(), _batch()
    compiled = compile(model, x, cuda_graph=True)
    held = compiled(x)
    held.sum().backward()
    before, recorded = held.detach().clone(), recorder.recorded
    for p in model.parameters():
        p.data = p.data.clone() * 0.5
    eager = copy.deepcopy(model)
    for seed in range(2):
        torch.manual_seed(seed)
        found = compiled(x)
        torch.manual_seed(seed)
        assert torch.equal(found, eager(x))
        found.sum().backward()
    assert recorder.recorded == 2 * recorded
    assert torch.equal(held, before)


def _normed() -> nn.Sequential:
    return nn.Sequential(*_net(), nn.BatchNorm1d(4), nn.Tanh())


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 4))


def _batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 8, generator=generator), torch.randn(5, 4, generator=generator)


@pytest.mark.parametrize(("make", "accumulate"), [(torch.optim.AdamW, 1), (torch.optim.SGD, 2)])
def test_a_recorded_step_follows_its_schedule(make: Any, accumulate: int, recorder: Rerun) -> None:
    net, other = _net(), _net()
    groups = [[{"params": n[0].parameters()}, {"params": n[2].parameters(), "lr": 0.125}] for n in (net, other)]
    ours, theirs = (make(g, lr=0.5, fused=True) for g in groups)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (ours, theirs)]
    step = compile_step(net, ours, F.mse_loss, _batch(), cuda_graph=True, accumulate=accumulate)
    plain = compile_step(other, theirs, F.mse_loss, _batch(), accumulate=accumulate)
    for seed in range(3 * accumulate):
        losses = []
        for one in (step, plain):
            torch.manual_seed(seed)
            losses.append(one(*_batch(seed)))
        assert torch.equal(*losses)
        if step.pending == 0:
            for schedule in schedules:
                schedule.step()
    assert same_parameters(net, other)
    assert recorder.recorded == accumulate
    for o in (ours, theirs):
        o.param_groups[0]["weight_decay"] = 0.25
    for one in (step, plain):
        for seed in range(accumulate):
            torch.manual_seed(seed)
            one(*_batch(seed))
    assert same_parameters(net, other)
    assert (recorder.recorded > accumulate) is (accumulate == 1), "the update of several batches is not recorded"


def test_a_recording_that_fails_leaves_parameters_as_they_were(
    recorder: Rerun, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compile_step(model, optimizer, lambda y: y.square().mean(), x, cuda_graph=True)
    before = [p.detach().clone() for p in model.parameters()]
    monkeypatch.setattr(recorder, "record", MagicMock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError):
        step(x)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_what_cannot_be_recorded_says_so() -> None:
    with pytest.raises(UnsupportedCall, match="CUDA device"):
        compile(_net(), _batch()[0], cuda_graph=True)
    with pytest.raises(MemplanError, match="redzone"):
        make_recorder(torch.device("cuda"), "redzone")


def test_inputs_that_are_changed_are_refused(recorder: Rerun) -> None:
    with pytest.raises(UnsupportedGraph, match="is changed"):
        compile(Made(lambda m, x: x.add_(1) * m.w, w=nn.Parameter(torch.ones(4))), torch.ones(4), cuda_graph=True)

"""Updates of a whole step: small ones share a call and nothing else changes; counters stay the optimizer's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from memplan.runtime import CompiledStep, compile_step
from tests.slow import slow
from tests.steps import Training

_LAYERS = 3


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [m for _ in range(_LAYERS) for m in (nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh())]
    return nn.Sequential(nn.Linear(8, 128), nn.Linear(128, 8), *layers)


def _groups(net: nn.Sequential) -> list[dict[str, Any]]:
    """Weights decay, the rest does not."""
    return [
        {"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in net.parameters() if p.dim() == 1], "weight_decay": 0.0, "lr": 0.02},
    ]


def _adamw(net: nn.Sequential) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_groups(net), lr=0.01, fused=True)


def _sgd(net: nn.Sequential) -> torch.optim.Optimizer:
    return torch.optim.SGD(_groups(net), lr=0.01, momentum=0.9, fused=True)


def _batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 8, generator=generator), torch.randn(16, 8, generator=generator)


def _calls(step: CompiledStep) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(*_batch())
    return sum("aten::_fused" in event.name for event in profile.events() or ())


def _updates(step: CompiledStep) -> int:
    return sum("_fused_" in op.target for op in step.plan.graph.ops)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11 says so of any profile
@pytest.mark.parametrize("make", [_adamw, slow(_sgd)])
def test_small_updates_share_calls_and_change_nothing(make: Any) -> None:
    net = _net()
    training = Training(net, make, F.mse_loss, *_batch(), sanitize="poison")
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (training.ours, training.theirs)]
    for i in range(4):
        training.both(*_batch(i))
        for schedule in schedules:
            schedule.step()
    for p, q in zip(net.parameters(), training.eager.parameters(), strict=True):
        assert all(torch.equal(training.ours.state[p][key], t) for key, t in training.theirs.state[q].items())
    step = training.step
    assert _updates(step) == len(list(net.parameters()))
    assert _calls(step) < _updates(step) / 2


def test_counters_are_the_optimizers() -> None:
    net = _net()
    optimizer = _adamw(net)
    step = compile_step(net, optimizer, F.mse_loss, _batch())

    def counted() -> set[float]:
        return {float(state["step"]) for state in optimizer.state_dict()["state"].values()}

    step(*_batch())
    saved = copy.deepcopy(optimizer.state_dict())
    step(*_batch())
    assert counted() == {2.0}
    optimizer.load_state_dict(saved)
    step(*_batch())
    assert counted() == {2.0}
    for state in optimizer.state.values():
        state["step"] = torch.tensor(10.0)
    step(*_batch())
    assert counted() == {11.0}
    for state in optimizer.state.values():
        state["step"].fill_(20.0)
    step(*_batch())
    assert counted() == {21.0}
    F.mse_loss(net(_batch()[0]), _batch()[1]).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    step(*_batch())
    assert counted() == {23.0}

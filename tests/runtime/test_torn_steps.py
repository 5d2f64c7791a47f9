"""A step that ends early leaves all of the model and the optimizer's state as it was, or says so at the next call."""

from __future__ import annotations

import copy
import signal
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.errors import TornStep
from memplan.runtime.debug.hooks import StepEvent, When
from tests.slow import slow

X = torch.randn(16, 24, generator=torch.Generator().manual_seed(1))
AWAY: dict[str, Any] = {"device": "cpu", "budget": "min"}
CLIPPED: dict[str, Any] = {"clip_grad_norm": 0.5}


def _made(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return model, optimizer, memplan.compile_step(model, optimizer, lambda y: y.square().mean(), X, **options)


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return copies of parameters, optimizer state and counters of steps."""
    state = [t for of in optimizer.state.values() for t in of.values()]
    return [t.detach().clone() for t in (*model.parameters(), *state)]


def _same(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


def _stop(event: StepEvent) -> None:
    raise ArithmeticError(event.op)


def _interrupt(event: StepEvent) -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("options", "stop"), [(AWAY, _stop), ({}, _stop), slow(CLIPPED, _stop), (AWAY, _interrupt), slow({}, _interrupt)]
)
def test_a_step_that_ends_early_is_none_or_says_so(options: dict[str, Any], stop: Any) -> None:
    model, optimizer, step = _made(**options)
    step(X)
    before, states = _held(model, optimizer), copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    loss, after = step(X), _held(model, optimizer)
    ends, torn = 2 * len(step.plan.schedule.order), 0
    for at in range(0, ends, max(ends // 60, 1)):
        model.load_state_dict(states[0])
        optimizer.load_state_dict(copy.deepcopy(states[1]))

        def hook(event: StepEvent, at: int = at) -> None:
            if 2 * event.step + (event.when is When.END) == at:
                stop(event)

        with step.hooks.add(hook):
            try:
                step(X)
                continue  # nothing is reported there
            except (ArithmeticError, KeyboardInterrupt):
                pass
        if _same(_held(model, optimizer), before):
            assert torch.equal(step(X), loss), "a step that did not begin to update is as if it had not been called"
        else:
            torn += 1
            with pytest.raises(TornStep, match="in the middle of its update"):
                step(X)
            model.load_state_dict(states[0])
            with pytest.raises(TornStep, match="in the middle of its update"):
                step(X)  # the optimizer's state is torn too
            optimizer.load_state_dict(copy.deepcopy(states[1]))
            assert torch.equal(step(X), loss)
        assert _same(_held(model, optimizer), after)
    assert torn

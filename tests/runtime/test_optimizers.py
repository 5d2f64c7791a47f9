"""`compile_step` with every optimizer of torch, and with others: losses, parameters and state are bitwise eager's."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from memplan.errors import UnsupportedGraph
from memplan.runtime import compile_step

Optimizer = torch.optim.Optimizer
Make = Callable[[Any], Optimizer]
O = torch.optim  # noqa: E741


class Lion(Optimizer):
    """Lion, as its authors write it."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                beta1, beta2 = group["betas"]
                update = state["exp_avg"].clone().mul_(beta1).add(p.grad, alpha=1 - beta1).sign_()
                p.add_(update, alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1 - beta2)


class Counting(Optimizer):
    """Adam as it was written before counters were tensors: Python numbers in the state and in the groups."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["calls"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["old"], state["sum"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                state["sum"] = state["sum"] * 0.9 + p.grad * 0.1  # a new tensor at each step
                rate = group["lr"] / (1 - 0.9 ** state["step"]) * (1 + 1 / group["calls"])
                p.sub_(rate * state["sum"] + 0.01 * state["old"])
                state["old"].copy_(p.grad)


class Peeking(Optimizer):
    """An update that no program can follow: a gradient's value decides what is computed."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad if p.grad.norm() > 0.1 else p.grad.sign(), alpha=-group["lr"])


_PLAIN: dict[str, tuple[Any, dict[str, Any]]] = {
    "adadelta": (O.Adadelta, {"weight_decay": 0.1}),
    "adadelta-max": (O.Adadelta, {"maximize": True, "rho": 0.8}),
    "adafactor": (O.Adafactor, {"lr": 0.1, "weight_decay": 0.1}),
    "adagrad": (O.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1}),
    "adam": (O.Adam, {"weight_decay": 0.1, "maximize": True}),
    "adam-ams": (O.Adam, {"amsgrad": True}),
    "adamw": (O.AdamW, {"amsgrad": True}),
    "adamax": (O.Adamax, {"weight_decay": 0.1}),
    "asgd": (O.ASGD, {"t0": 3.0, "lambd": 0.1, "weight_decay": 0.1}),
    "nadam": (O.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam": (O.RAdam, {"weight_decay": 0.1}),
    "radam-decoupled": (O.RAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True, "betas": (0.8, 0.9)}),
    "rmsprop": (O.RMSprop, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    "rmsprop-plain": (O.RMSprop, {}),
    "rprop": (O.Rprop, {}),
    "sgd": (O.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "nesterov": (O.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
}


def _makers() -> dict[str, Make]:
    found: dict[str, Make] = {}
    for name, (kind, options) in _PLAIN.items():
        for foreach in (False, True, None):
            if foreach is None and kind in (O.Adam, O.AdamW, O.SGD):
                options = {**options, "fused": True if "dampening" not in options else None}  # noqa: PLW2901
            given = {"lr": 0.05, **options, "foreach": foreach}
            found[f"{name}-{foreach}"] = lambda groups, kind=kind, given=given: kind(groups, **given)
    found["lion"] = Lion
    found["counting"] = Counting
    found["tensor-lr"] = lambda groups: O.Adam([{**g, "lr": torch.tensor(0.05)} for g in groups], foreach=False)
    found["tensor-betas-none"] = lambda groups: O.AdamW(groups, fused=False, foreach=False)
    return found


MAKERS = _makers()


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def _batch(seed: int = 0, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, 3, generator=generator)


def _groups(net: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": list(net[0].parameters()), "lr": 0.02}, {"params": list(net[2].parameters())}]


def _eager(net: nn.Module, optimizer: Optimizer, batch: Any, clip: float | None = None) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(net(batch[0]), batch[1])
    loss.backward()  # type: ignore[no-untyped-call]
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(list(net.parameters()), clip)
    optimizer.step()
    return loss.detach()


def _require_same_state(one: Optimizer, two: Optimizer) -> None:
    """Assert that two optimizers have the same `state_dict`, bit by bit."""
    ours, theirs = one.state_dict(), two.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        assert list(ours["state"][index]) == list(state), index
        for key, value in state.items():
            mine = ours["state"][index][key]
            assert type(mine) is type(value), (index, key)
            assert torch.equal(mine, value) if isinstance(value, torch.Tensor) else mine == value, (index, key)


def _require_same(one: nn.Module, two: nn.Module) -> None:
    for name, p in one.named_parameters():
        assert torch.equal(p, two.get_parameter(name)), name


@pytest.mark.parametrize("name", MAKERS)
def test_six_steps_are_bitwise_eagers(name: str) -> None:
    nets = _net(), _net()
    ours, theirs = (MAKERS[name](_groups(net)) for net in nets)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.7) for o in (ours, theirs)]
    step = compile_step(nets[0], ours, F.mse_loss, _batch(), sanitize="poison")
    for seed in range(8):
        assert torch.equal(step(*_batch(seed)), _eager(nets[1], theirs, _batch(seed))), seed
        for schedule in schedules:
            schedule.step()
        _require_same(*nets)
        _require_same_state(ours, theirs)
    assert all(p.grad is None for p in nets[0].parameters())

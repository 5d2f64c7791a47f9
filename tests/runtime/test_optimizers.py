"""`compile_step` with every optimizer of torch, and with others: losses, parameters and state are bitwise eager's."""

from __future__ import annotations

import copy
import logging
import random
import sys
import types
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from memplan.errors import InputMismatch, UnsupportedGraph
from memplan.runtime import compile_step
from memplan.runtime.memory.arena import arena_for_all
from tests.slow import slow

Optimizer = torch.optim.Optimizer
Make = Callable[[Any], Optimizer]
O = torch.optim  # noqa: E741


class Lion(Optimizer):
    """Lion, as its authors write it."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
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
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
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


class Clipped(Optimizer):
    """An update with an op of two results."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    largest, _ = p.grad.abs().max(dim=-1, keepdim=True)
                    p.addcdiv_(p.grad, largest + 1, value=-group["lr"])


class Peeking(Optimizer):
    """An update that no program can follow: a gradient's value decides what is computed."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
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
            found[f"{name}-{foreach}"] = partial(kind, **given)
    found["lion"] = Lion
    found["counting"] = Counting
    found["clipped"] = Clipped
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


# Without a choice, torch updates on the CPU as with foreach=False, but where an optimizer is fused.
_AS_FALSE = {f"{name}-None" for name, (kind, _) in _PLAIN.items() if kind not in (O.Adam, O.AdamW, O.SGD)}


@pytest.mark.parametrize("name", [slow(name) if name in _AS_FALSE else name for name in MAKERS])
def test_six_steps_are_bitwise_eagers(name: str, caplog: pytest.LogCaptureFixture) -> None:
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
    assert "runs by itself" not in caplog.text


@pytest.mark.parametrize("name", ["adam-False", "sgd-False", "radam-True", "lion", "counting", "asgd-None"])
def test_a_run_is_resumed_from_state_dicts(name: str) -> None:
    nets = _net(), _net()
    ours, theirs = (MAKERS[name](_groups(net)) for net in nets)
    step = compile_step(nets[0], ours, F.mse_loss, _batch())
    for seed in range(3):
        step(*_batch(seed))
        _eager(nets[1], theirs, _batch(seed))
    resumed = _net()
    resumed.load_state_dict(nets[0].state_dict())
    again = MAKERS[name](_groups(resumed))
    again.load_state_dict(copy.deepcopy(ours.state_dict()))
    next_step = compile_step(resumed, again, F.mse_loss, _batch())
    for seed in range(3, 7):
        assert torch.equal(next_step(*_batch(seed)), _eager(nets[1], theirs, _batch(seed)))
    _require_same(resumed, nets[1])
    _require_same_state(again, theirs)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))  # into the step that runs
    nets[0].load_state_dict(nets[1].state_dict())
    for seed in range(7, 9):
        assert torch.equal(step(*_batch(seed)), _eager(nets[1], theirs, _batch(seed)))
    _require_same_state(ours, theirs)


@pytest.mark.parametrize("name", ["adamw-None", "adamw-False", "rmsprop-True", "lion"])
def test_groups_that_change_are_planned_anew(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Groups change as in fine-tuning: a layer is unfrozen and added, options change, a layer is frozen again."""
    caplog.set_level(logging.INFO, "memplan")
    nets = _net(), _net()
    for net in nets:
        net[0].requires_grad_(False)
    ours, theirs = (MAKERS[name]([{"params": list(net[2].parameters())}]) for net in nets)
    step = compile_step(nets[0], ours, F.mse_loss, _batch())

    def both(steps: int) -> None:
        for seed in range(steps):
            assert torch.equal(step(*_batch(seed)), _eager(nets[1], theirs, _batch(seed)))
        _require_same(*nets)
        _require_same_state(ours, theirs)

    both(2)
    for net, optimizer in zip(nets, (ours, theirs), strict=True):
        net[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(net[0].parameters()), "lr": 0.3})
    both(3)
    assert "planned anew" in caplog.text
    for optimizer in (ours, theirs):
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.param_groups[1]["weight_decay"] = 0.5
    both(2)
    for net in nets:
        net[2].requires_grad_(False)
    both(2)


@pytest.mark.parametrize("name", ["adamw-None", "adam-False", "sgd-True"])
def test_batches_of_other_sizes_get_plans_in_one_arena(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "memplan")
    nets = _net(), _net()
    ours, theirs = (MAKERS[name](_groups(net)) for net in nets)
    step = compile_step(nets[0], ours, F.mse_loss, _batch(), clip_grad_norm=0.1, sanitize="redzone")
    for seed, rows in enumerate((5, 2, 5, 2, 64, 5, 64, 2)):
        batch = _batch(seed, rows)
        assert torch.equal(step(*batch), _eager(nets[1], theirs, batch, clip=0.1)), rows
    _require_same(*nets)
    _require_same_state(ours, theirs)
    assert len(step._builder.plans) == 3
    assert len({id(p.runner.arena.ownership) for plan in step._builder.plans for p in plan.programs}) == 1
    assert "the arena grows" in caplog.text
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_beyond_the_limit_steps_run_eagerly_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    nets = _net(), _net()
    ours, theirs = (MAKERS["adam-False"](_groups(net)) for net in nets)
    step = compile_step(nets[0], ours, F.mse_loss, _batch(rows=1), clip_grad_norm=0.5)
    for rows in (*range(1, 12), 3, 11, 1):
        batch = _batch(rows, rows)
        assert torch.equal(step(*batch), _eager(nets[1], theirs, batch, clip=0.5)), rows
    _require_same(*nets)
    _require_same_state(ours, theirs)
    assert len(step._builder.plans) == 8
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "(9, 6)" in warning
    assert "drop_last" in warning


@pytest.mark.parametrize("mode", ["replan", "eager", "passive"])
def test_evaluation_mode_and_autocast_are_other_calls(mode: Any) -> None:
    nets = [nn.Sequential(_net(), nn.Dropout(0.5)) for _ in range(2)]
    ours, theirs = (MAKERS["adam-False"](net.parameters()) for net in nets)
    step = compile_step(nets[0], ours, F.mse_loss, _batch(), on_mismatch=mode)
    for seed in range(4):
        for net in nets:
            net.train(seed % 2 == 0)
        torch.manual_seed(seed)
        with torch.autocast("cpu", torch.bfloat16, enabled=seed == 3):
            one = step(*_batch(seed))
        torch.manual_seed(seed)
        theirs.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=seed == 3):
            two = F.mse_loss(nets[1](_batch(seed)[0]), _batch(seed)[1])
        two.backward()  # type: ignore[no-untyped-call]
        theirs.step()
        assert torch.equal(one, two.detach())
    _require_same(*nets)


@pytest.mark.parametrize("name", ["adam-False", "sgd-None", "lion", "peeking"])
def test_accumulation(name: str) -> None:
    make: Make = Peeking if name == "peeking" else MAKERS[name]
    nets = _net(), _net()
    ours, theirs = (make(_groups(net)) for net in nets)
    step = compile_step(nets[0], ours, F.mse_loss, _batch(), accumulate=2, clip_grad_norm=0.1)
    for seed in range(8):
        loss = F.mse_loss(nets[1](_batch(seed)[0]), _batch(seed)[1])
        (loss / 2).backward()  # type: ignore[no-untyped-call]
        if seed % 2:
            torch.nn.utils.clip_grad_norm_(list(nets[1].parameters()), 0.1)
            theirs.step()
            theirs.zero_grad()
        assert torch.equal(step(*_batch(seed)), loss.detach())
    _require_same_state(ours, theirs)
    _require_same(*nets)


def test_complex_parameters_are_updated() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).abs()

    nets = Scaled(), Scaled()
    ours, theirs = (torch.optim.Adam(net.parameters(), lr=0.1, foreach=False) for net in nets)
    batch = torch.ones(3, 2), torch.zeros(3, 2)
    step = compile_step(nets[0], ours, F.mse_loss, batch)
    for _ in range(3):
        assert torch.equal(step(*batch), _eager(nets[1], theirs, batch))
    _require_same(*nets)


def test_an_update_that_cannot_be_traced_runs_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    nets = _net(), _net()
    ours, theirs = (Peeking(_groups(net)) for net in nets)
    step = compile_step(nets[0], ours, F.mse_loss, _batch())
    for seed in range(4):
        assert torch.equal(step(*_batch(seed)), _eager(nets[1], theirs, _batch(seed)))
    _require_same(*nets)
    assert all(p.grad is None for p in nets[0].parameters())
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "Peeking: its step() runs by itself" in warning


class Sam(Optimizer):
    """Two steps, between which the loss is computed again."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.1})

    def first_step(self) -> None:
        raise NotImplementedError

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "Sam requires closure"


def test_optimizers_with_a_closure_are_refused() -> None:
    for make in (torch.optim.LBFGS, Sam):
        net = _net()
        with pytest.raises(UnsupportedGraph, match="closure") as caught:
            compile_step(net, make(net.parameters()), F.mse_loss, _batch())
        assert "memplan.compile" in str(caught.value.hint)


def test_averages_of_weights_beside_the_step() -> None:
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
    nets = _net(), _net()
    averages = [torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=average) for net in nets]
    ours, theirs = (MAKERS["nadam-False"](_groups(net)) for net in nets)
    step = compile_step(nets[0], ours, F.mse_loss, _batch())
    for seed in range(4):
        step(*_batch(seed))
        _eager(nets[1], theirs, _batch(seed))
        for net, averaged in zip(nets, averages, strict=True):
            averaged.update_parameters(net)
    _require_same(averages[0], averages[1])
    assert not torch.equal(averages[0].get_parameter("module.0.weight"), nets[0].get_parameter("0.weight"))


def test_the_total_counts_state_before_it_exists() -> None:
    net = _net()
    step = compile_step(net, MAKERS["sgd-False"](_groups(net)), F.mse_loss, _batch())
    nbytes = sum(p.numel() * 4 for p in net.parameters())
    assert not step._module_guards.optimizer.state
    assert step.plan.outside["optimizer state"] == nbytes
    for seed in range(2):
        step(*_batch(seed))
    assert step.plan.outside["optimizer state"] == nbytes


def test_the_optimizer_is_not_touched_by_tracing() -> None:
    net = _net()
    optimizer = MAKERS["adam-False"](_groups(net))
    before, groups = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())
    compile_step(net, optimizer, F.mse_loss, _batch())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert optimizer.state_dict() == groups
    assert not hasattr(sys.modules["torch.optim.adam"], "max")


class _Scaled(Optimizer):
    """SGD whose rate is multiplied by what `scale` returns."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.prepare()

    def prepare(self) -> None:
        """Set attributes."""

    def scale(self) -> float:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        scale = self.scale()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * scale)


class _Nested(_Scaled):
    def prepare(self) -> None:
        self.cfg: dict[str, Any] = {"scale": [1.0, {"more": (1.0,)}]}
        self.schedule = [1.0]

    def scale(self) -> float:
        return float(self.cfg["scale"][0] * self.cfg["scale"][1]["more"][0] * self.schedule[0])


class _Holder(_Scaled):
    def prepare(self) -> None:
        self.held = types.SimpleNamespace(v=1.0)

    def scale(self) -> float:
        self.held.v *= 0.5
        return float(self.held.v)


class _Drawing(_Scaled):
    def scale(self) -> float:
        return random.random()


class _DrawingNumpy(_Scaled):
    def scale(self) -> float:
        return float(np.random.rand())


_SCALES = [1.0]
_SETTINGS = types.SimpleNamespace(scale=1.0)
_scale = 1.0
_calls = 0


class _Defaults:
    scale = 1.0


class _OfList(_Scaled):
    def scale(self) -> float:
        return _SCALES[0]


class _OfObject(_Scaled):
    def scale(self) -> float:
        return float(_SETTINGS.scale)


class _OfNumber(_Scaled):
    def scale(self) -> float:
        return _helper()


def _helper() -> float:
    return _scale * _Defaults.scale


class _OfClass(_Scaled):
    factor = 1.0

    def scale(self) -> float:
        return self.factor


class _CountedByGlobal(_Scaled):
    def scale(self) -> float:
        global _calls  # noqa: PLW0603
        _calls += 1
        return 1 / _calls


class _CountedByClass(_Scaled):
    calls = 0

    def scale(self) -> float:
        type(self).calls += 1
        return 1 / self.calls


def _change_nested(seed: int, optimizer: Any) -> None:
    if seed == 1:
        optimizer.schedule[0] = 0.5
    elif seed == 2:
        optimizer.cfg["scale"][0] = 0.25
    elif seed == 3:
        optimizer.cfg["scale"][1]["more"] = (3.0,)


def _change_globals(seed: int, optimizer: Any) -> None:
    global _scale
    _SCALES[0] = _SETTINGS.scale = 1.0 / (1 + seed)
    _scale, _Defaults.scale, _OfClass.factor = 1.0 + seed % 2, 1.0 + seed // 2, 2.0 - seed / 4


def _seed_all(seed: int, optimizer: Any) -> None:
    random.seed(seed)
    np.random.seed(seed)


def _count_anew(seed: int, optimizer: Any) -> None:
    global _calls  # noqa: PLW0603
    _calls = _CountedByClass.calls = seed


_CHANGES: dict[str, tuple[Any, Any, bool]] = {
    "nested": (_Nested, _change_nested, True),
    "object": (_Holder, lambda seed, optimizer: None, False),
    "random": (_Drawing, _seed_all, False),
    "random-numpy": (_DrawingNumpy, _seed_all, False),
    "global-list": (_OfList, _change_globals, False),
    "global-object": (_OfObject, _change_globals, False),
    "global-number": (_OfNumber, _change_globals, True),
    "class": (_OfClass, _change_globals, True),
    "counted-by-global": (_CountedByGlobal, _count_anew, False),
    "counted-by-class": (_CountedByClass, _count_anew, False),
}


@pytest.mark.parametrize("name", _CHANGES)
def test_what_step_reads_beside_its_state_may_change(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, change, recorded = _CHANGES[name]
    nets = _net(), _net()
    change(0, make(_groups(_net())))
    ours, theirs = (make(_groups(net)) for net in nets)
    step = compile_step(nets[0], ours, F.mse_loss, _batch())
    for seed in range(6):
        change(seed, ours)
        one = step(*_batch(seed))
        change(seed, theirs)
        assert torch.equal(one, _eager(nets[1], theirs, _batch(seed))), seed
        _require_same(*nets)
    assert ("runs by itself" not in caplog.text) is recorded


def test_recording_draws_no_random_numbers() -> None:
    net = _net()
    before = random.getstate(), repr(np.random.get_state())
    for make in (_Drawing, _DrawingNumpy):
        compile_step(net, make(_groups(net)), F.mse_loss, _batch())
        assert (random.getstate(), repr(np.random.get_state())) == before


class _SharedState(Optimizer):
    """One tensor of the state for all biases."""

    def __init__(self, params: Iterable[Any], *, filled: bool) -> None:
        super().__init__(params, {"lr": 0.1})
        self.filled = filled

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [p for group in self.param_groups for p in group["params"]]
        if not self.state:
            total = torch.zeros(8) if self.filled else every[0].grad.sum(1)
            for p in every:
                self.state[p]["v"] = total
        for p in every:
            self.state[p]["v"].mul_(0.5).add_(p.grad.sum())
            p.sub_(self.state[p]["v"].sum(), alpha=0.001)


@pytest.mark.parametrize("filled", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_parameters_with_one_tensor_of_state(filled: bool, begun: bool) -> None:
    nets = _net(), _net()
    ours, theirs = (_SharedState(_groups(net), filled=filled) for net in nets)
    if begun:
        for net, optimizer in zip(nets, (ours, theirs), strict=True):
            _eager(net, optimizer, _batch())
            optimizer.zero_grad()
    step = compile_step(nets[0], ours, F.mse_loss, _batch())
    for seed in range(4):
        assert torch.equal(step(*_batch(seed)), _eager(nets[1], theirs, _batch(seed))), seed
        _require_same(*nets)
    assert len({id(state["v"]) for state in ours.state.values()}) == 1


@pytest.mark.parametrize("name", ["adamw-None", "adam-False"])
@pytest.mark.parametrize("when", [0, 2])
def test_a_step_that_is_replaced_on_the_optimizer_is_called(name: str, when: int) -> None:
    nets = _net(), _net()
    ours, theirs = (MAKERS[name](_groups(net)) for net in nets)
    calls = []

    def replace(optimizer: Any) -> None:
        def step() -> None:
            calls.append(optimizer)
            type(optimizer).step(optimizer)
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for p in group["params"]:
                        p.mul_(0.9)

        optimizer.step = step

    if when == 0:
        replace(ours)
        replace(theirs)
    step = compile_step(nets[0], ours, F.mse_loss, _batch())
    for seed in range(5):
        if seed == when > 0:
            replace(ours)
            replace(theirs)
        assert torch.equal(step(*_batch(seed)), _eager(nets[1], theirs, _batch(seed))), seed
        _require_same(*nets)
    assert calls.count(ours) == calls.count(theirs) == 5 - when


def test_dampening_begins_with_fused_sgd(caplog: pytest.LogCaptureFixture) -> None:
    nets = _net(), _net()
    ours, theirs = (torch.optim.SGD(_groups(net), lr=0.1, momentum=0.9, fused=True) for net in nets)
    step = compile_step(nets[0], ours, F.mse_loss, _batch())
    for seed in range(6):
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["dampening"] = 0.0 if seed < 2 else 0.3
        assert torch.equal(step(*_batch(seed)), _eager(nets[1], theirs, _batch(seed))), seed
        _require_same(*nets)
    assert "runs by itself" not in caplog.text


@pytest.mark.parametrize(
    ("option", "value"), [("foreach", True), ("fused", False), ("lr", "tensor")], ids=["foreach", "fused", "lr"]
)
def test_another_kernel_of_the_optimizer_is_noticed(option: str, value: Any) -> None:
    """The fused program is left for the update of the kernels that eager takes then."""
    nets = _net(), _net()
    ours, theirs = (torch.optim.Adam(_groups(net), lr=0.1, fused=True) for net in nets)
    step = compile_step(nets[0], ours, F.mse_loss, _batch())
    for seed in range(5):
        if seed == 2:
            for optimizer in (ours, theirs):
                for group in optimizer.param_groups:
                    group["fused"] = None if option != "lr" else False
                    group[option] = torch.tensor(0.1) if value == "tensor" else value
        assert torch.equal(step(*_batch(seed)), _eager(nets[1], theirs, _batch(seed))), seed
        _require_same(*nets)
    assert len(step._builder.plans) == 2
    promised = compile_step(nets[0], ours, F.mse_loss, _batch(), on_mismatch="error")
    ours.param_groups[0]["foreach"] = not ours.param_groups[0]["foreach"]
    with pytest.raises(InputMismatch, match="foreach changed from"):
        promised(*_batch())


@pytest.mark.parametrize("fails", [False, True])
def test_a_larger_arena_takes_the_place_of_the_first(*, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one at a time; if no larger one comes, earlier programs go on."""
    nets = _net(), _net()
    ours, theirs = (MAKERS["adam-False"](_groups(net)) for net in nets)
    step = compile_step(nets[0], ours, F.mse_loss, _batch())
    assert torch.equal(step(*_batch()), _eager(nets[1], theirs, _batch()))
    first, sizes = step._builder._arena, []
    make = arena_for_all
    assert first is not None

    def made(*args: Any) -> Any:
        sizes.append(first.nbytes)
        if fails and len(sizes) == 1:
            raise RuntimeError("no memory")
        return make(*args)

    monkeypatch.setattr("memplan.runtime.api.step_builder.arena_for_all", made)
    if fails:
        with pytest.raises(RuntimeError, match="no memory"):
            step(*_batch(rows=64))
    else:
        assert torch.equal(step(*_batch(rows=64)), _eager(nets[1], theirs, _batch(rows=64)))
    assert sizes[0] == 0
    for seed in range(3):
        assert torch.equal(step(*_batch(seed)), _eager(nets[1], theirs, _batch(seed)))
    _require_same(*nets)
    _require_same_state(ours, theirs)

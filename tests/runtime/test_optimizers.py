"""`compile_step` with every optimizer of torch, and with others: losses, parameters and state are bitwise eager's."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate as running_sums
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.peak_measure import live_bytes
from memplan.errors import InputMismatch, UnsupportedGraph
from memplan.planning.planfile import check_consistency
from memplan.runtime import compile_step
from tests.models import Made
from tests.runtime.allocated import allocations
from tests.runtime.reference import same_parameters
from tests.slow import slow
from tests.steps import Training, assert_same_state, itself

Optimizer = torch.optim.Optimizer
Make = Callable[[Any], Any]
O = torch.optim  # noqa: E741


class _Own(Optimizer):
    """An optimizer that updates each parameter by `update`."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, group, self.state[p])

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(_Own):
    """Lion, as its authors write it."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        p.data.mul_(1 - group["lr"] * 0.1)
        if len(state) == 0:
            state["exp_avg"] = torch.zeros_like(p)
        update = state["exp_avg"].clone().mul_(0.9).add(grad, alpha=0.1).sign_()
        p.add_(update, alpha=-group["lr"])
        state["exp_avg"].mul_(0.99).add_(grad, alpha=0.01)


class Keeping(_Own):
    """An update that keeps the gradient itself, and a view of it, and changes the gradient in place."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if "old" in state:
            p.add_(state["old"] + state["view"].sum(), alpha=-group["lr"])
        state["old"], state["view"] = grad, grad.view(-1)[:2]
        p.add_(grad.mul_(0.5).data, alpha=-group["lr"])


class Noticing(_Own):
    """An update that depends on what no tensor shows: random numbers, and what the optimizer holds."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        self.held = [*getattr(self, "held", ()), 1]
        p.add_(grad, alpha=-float(torch.rand(())) / len(self.held))


class Subclass(torch.optim.AdamW):
    """AdamW whose weights are averaged, as libraries derive from torch's optimizers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p, state in self.state.items():
            state.setdefault("average", p.clone()).lerp_(p, 0.1)


class Lookahead:
    """A wrapper that is no optimizer of torch's: every second step, weights go half way back."""

    def __init__(self, groups: Any) -> None:
        self.inner = torch.optim.RMSprop(groups, lr=0.01)
        self.slow = [p.detach().clone() for group in groups for p in group["params"]]
        self.calls = 0

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        self.inner.step()
        self.calls += 1
        held = [p for group in self.param_groups for p in group["params"]]
        for p, slow_weight in zip(held, self.slow, strict=True) if self.calls % 2 == 0 else ():
            p.copy_(slow_weight.lerp_(p, 0.5))


def _with_hook(groups: Any) -> Optimizer:
    """Return an optimizer whose hooks change gradients before a step, and parameters after it."""
    made = torch.optim.Adagrad(groups, lr=0.05)

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)

    made.register_step_pre_hook(before)
    made.register_step_post_hook(lambda o, args, kwargs: o.param_groups[0]["params"][0].data.mul_(0.99))
    return made


def _tensor_rate(groups: Any) -> Optimizer:
    return O.Adam([{**g, "lr": torch.tensor(0.05)} for g in groups], foreach=False)


MAKERS: dict[str, Make] = {
    "adafactor": partial(O.Adafactor, lr=0.1, weight_decay=0.1),
    "adagrad": partial(O.Adagrad, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.1),
    "adam": partial(O.Adam, lr=0.05, weight_decay=0.1, maximize=True, fused=True),
    "adamw": partial(O.AdamW, lr=0.05, amsgrad=True, fused=True),
    "rmsprop-foreach": partial(O.RMSprop, momentum=0.9, centered=True, weight_decay=0.1, foreach=True),
    "nesterov": partial(O.SGD, lr=0.05, momentum=0.9, nesterov=True, maximize=True, fused=True),
    "tensor-lr": _tensor_rate,
    "lion": Lion,
    "keeping": Keeping,
    "noticing": Noticing,
    "subclass": Subclass,
    "lookahead": Lookahead,
    "hooks": _with_hook,
}
_PLANNED = ("adam", "adamw", "nesterov")  # by torch's fused kernels
_OFTEN = (*_PLANNED, "rmsprop-foreach", "lion", "keeping", "noticing", "lookahead", "hooks")


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def _batch(seed: int = 0, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, 3, generator=generator)


def _groups(net: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": list(net[0].parameters()), "lr": 0.02}, {"params": list(net[2].parameters())}]


def _training(name: str, **options: Any) -> Training:
    return Training(_net(), lambda net: MAKERS[name](_groups(net)), F.mse_loss, *_batch(), **options)


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", [name if name in _OFTEN else slow(name) for name in MAKERS])
def test_steps_are_bitwise_eagers(name: str, caplog: pytest.LogCaptureFixture) -> None:
    found: list[Any] = []
    for planned in (False, True):
        net = _net()
        optimizer = MAKERS[name](_groups(net))
        schedule = None if name == "lookahead" else torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        torch.manual_seed(0)
        step = compile_step(net, optimizer, F.mse_loss, _batch(), sanitize="poison") if planned else None
        losses = []
        for seed in range(6):
            x, y = _batch(seed)
            if step is None:
                optimizer.zero_grad()
                loss = F.mse_loss(net(x), y)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            losses.append(loss.detach() if step is None else step(x, y))
            if schedule is not None:
                schedule.step()
        optimizer.zero_grad()
        found.append((losses, net, optimizer))
        if step is not None:
            assert all(p.grad is None for p in net.parameters())
            check_consistency(step.plan)
            assert bool(step.plan.outside["optimizer state"]) is (name in _PLANNED)
    (losses, theirs, reference), (mine, ours, optimizer) = found
    assert all(map(torch.equal, losses, mine))
    assert same_parameters(ours, theirs)
    if name != "lookahead":
        assert_same_state(optimizer, reference)
    assert len(_warnings(caplog)) == (name == "keeping")  # which keeps bytes of the arena by a view


@pytest.mark.parametrize("name", ["adamw", "rmsprop-foreach"])
def test_groups_that_change_are_followed(name: str) -> None:
    """Groups change as in fine-tuning: a layer is unfrozen and added, options change, a layer is frozen again."""
    net: Any = _net()
    net[0].requires_grad_(False)
    training = Training(net, lambda m: MAKERS[name]([{"params": list(m[2].parameters())}]), F.mse_loss, *_batch())
    nets: Any = (training.model, training.eager)
    optimizers = (training.ours, training.theirs)

    def both(steps: int) -> None:
        for seed in range(steps):
            training.both(*_batch(seed))
        training.assert_same_state()

    both(2)
    for net, optimizer in zip(nets, optimizers, strict=True):
        net[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(net[0].parameters()), "lr": 0.3})
    both(3)
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.param_groups[1]["weight_decay"] = 0.5
    both(2)
    for net in nets:
        net[2].requires_grad_(False)
    both(2)


@pytest.mark.parametrize("name", ["adamw", slow("rmsprop-foreach")])
def test_batches_of_other_sizes(name: str, caplog: pytest.LogCaptureFixture) -> None:
    training = _training(name, clip=0.1, sanitize="redzone")
    for seed, rows in enumerate((5, 2, 5, 64, 5, 64, 2)):
        training.both(*_batch(seed, rows))
    training.assert_same_state()
    assert not _warnings(caplog)


class _SharesItsBias(nn.Module):
    """A parameter that its owner lends to a layer, as heads of transformers do: the trace meets it last."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.bias = self.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.last(self.first(x).tanh()).square().mean()
        return loss


def _of_two_groups(params: Any) -> Optimizer:
    """Return AdamW of the last parameters before the others."""
    given = list(params)
    groups: Any = [{"params": given[2:], "lr": 1e-2}, {"params": given[:2]}]
    return O.AdamW(groups, fused=True)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("make", [lambda params: O.AdamW(params, fused=True), _of_two_groups])
def test_state_and_clipping_are_in_the_optimizers_order(make: Make, clip: float | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    training = Training(_SharesItsBias(), lambda model: make(model.parameters()), itself, x, clip=clip)
    for seed in range(2):
        training.both(x, seed=seed)
    training.assert_same_state()


@pytest.mark.parametrize(
    ("mode", "name"), [("replan", "adamw"), ("eager", "rmsprop-foreach"), slow("passive", "adamw")]
)
def test_evaluation_mode_and_autocast_are_other_calls(mode: Any, name: str) -> None:
    net = nn.Sequential(_net(), nn.Dropout(0.5))
    training = Training(net, lambda m: MAKERS[name](m.parameters()), F.mse_loss, *_batch(), on_mismatch=mode)
    for seed in range(4):
        for one in (training.model, training.eager):
            one.train(seed % 2 == 0)
        with torch.autocast("cpu", torch.bfloat16, enabled=seed == 3):
            training.both(*_batch(seed), seed=seed)


def test_complex_parameters_are_updated() -> None:
    model = Made(lambda m, x: (x * m.weight).abs(), weight=nn.Parameter(torch.tensor([1 + 2j, 3 - 1j])))

    batch = torch.ones(3, 2), torch.zeros(3, 2)
    training = Training(model, lambda m: torch.optim.Adam(m.parameters(), lr=0.1), F.mse_loss, *batch)
    for _ in range(3):
        training.both(*batch)


def test_optimizers_with_a_closure_are_refused() -> None:
    class Sam(_Own):
        """Two steps, between which the loss is computed again."""

        def first_step(self) -> None:
            raise NotImplementedError

    for make in (torch.optim.LBFGS, Sam):
        net = _net()
        with pytest.raises(UnsupportedGraph, match="closure") as caught:
            compile_step(net, make(net.parameters()), F.mse_loss, _batch())
        assert "memplan.compile" in str(caught.value.hint)


def _wide() -> Made:
    """Layers of which the parameters are as large as the activations, and a loss."""
    layers = (layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.GELU()))
    return Made(lambda m, x: m.layers(x).square().mean(), layers=nn.Sequential(*layers))


def _peak(make: Make, x: torch.Tensor, accumulate: int, *, planned: bool) -> tuple[int, nn.Module, Any]:
    """Return the peak of an update beside the batch, the model after it, and the step."""
    gc.collect()
    before = live_bytes()
    torch.manual_seed(0)
    model = _wide()
    optimizer = make(model.parameters())
    compiled: Any = None
    if planned:
        compiled = compile_step(model, optimizer, lambda loss: loss, x, accumulate=accumulate)

    def update() -> None:
        for _ in range(accumulate):
            if planned:
                compiled(x)
            else:
                (model(x) / accumulate).backward()
        if not planned:
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(3):
        update()
    allocations(update)  # from here on, the profiler knows all that is freed
    gc.collect()
    return live_bytes() - before + max(running_sums(allocations(update))), model, compiled


@pytest.mark.parametrize("name", ["adagrad", "rmsprop-foreach", slow("lion")])
@pytest.mark.parametrize(("rows", "accumulate"), [(128, 1), (128, 2)])
def test_peaks_are_planned_and_not_above_eagers(name: str, rows: int, accumulate: int) -> None:
    x = torch.randn(rows, 128)
    eager, theirs, _ = _peak(MAKERS[name], x, accumulate, planned=False)
    peak, ours, step = _peak(MAKERS[name], x, accumulate, planned=True)
    total = step.plan.total - x.nbytes  # which was there before
    assert peak <= eager * 1.005 + step.plan.padding
    assert peak <= total + 64
    assert total <= peak * 1.01 + 64 or accumulate > 1  # sums end with the update
    assert same_parameters(ours, theirs)


def test_a_budget_covers_state_and_temporaries() -> None:
    x = torch.randn(1024, 128)
    make = partial(torch.optim.RMSprop, foreach=True)
    model = _wide()
    plain = compile_step(model, make(model.parameters()), lambda loss: loss, x).plan
    nbytes = sum(p.nbytes for p in model.parameters())
    assert nbytes <= plain.outside["reserve"] <= 1.01 * nbytes
    assert plain.outside["temporaries"] >= nbytes
    limit = int(0.8 * plain.total)
    training = Training(model, lambda m: make(m.parameters()), itself, x, budget=limit)
    assert plain.total * 0.7 < training.step.plan.total <= limit
    for _ in range(3):
        training.both(x)


def test_what_does_not_run_on_fake_tensors_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Addressed(_Own):
        """An update by addresses, as that of a library in C."""

        def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
            assert grad.data_ptr()
            p.sub_(grad, alpha=group["lr"])

    training = Training(_net(), lambda m: Addressed(_groups(m)), F.mse_loss, *_batch(), reserve=1000)
    for seed in range(3):
        training.both(*_batch(seed))
    assert training.step.plan.outside["reserve"] == 1000
    (warning,) = _warnings(caplog)
    assert "Addressed: what its step() keeps and allocates is not known ahead" in warning


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_a_step_that_is_replaced_on_the_optimizer_is_called(name: str, caplog: pytest.LogCaptureFixture) -> None:
    training = _training(name)

    def replace(optimizer: Any) -> None:
        def replaced() -> None:
            type(optimizer).step(optimizer)
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for p in group["params"]:
                        p.mul_(0.9)

        optimizer.step = replaced

    for seed in range(4):
        if seed == 2:
            replace(training.ours)
            replace(training.theirs)
        training.both(*_batch(seed))
    assert len(_warnings(caplog)) == (name == "adamw")


@pytest.mark.parametrize(
    "options", [{"foreach": True, "fused": None}, {"lr": torch.tensor(0.1), "fused": False}], ids=["foreach", "lr"]
)
def test_an_update_that_is_no_longer_planned_runs_as_eager(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(_net(), lambda m: O.Adam(_groups(m), lr=0.1, fused=True), F.mse_loss, *_batch())
    for seed in range(4):
        if seed == 2:
            for group in (*training.ours.param_groups, *training.theirs.param_groups):
                group.update(options)
        training.both(*_batch(seed))
    (warning,) = _warnings(caplog)
    assert "its update is no longer one of torch's fused kernels" in warning
    promised = Training(
        _net(), lambda m: O.Adam(_groups(m), lr=0.1, fused=True), F.mse_loss, *_batch(), on_mismatch="error"
    )
    promised.ours.param_groups[0].update(options)
    with pytest.raises(InputMismatch, match="changed from"):
        promised.step(*_batch())


def test_a_step_that_raises_ends_its_batches() -> None:
    """The next update has the gradients of all its batches, and none of an update that failed."""

    class Fails(torch.optim.Adagrad):
        """An optimizer whose first `step()` raises."""

        failed = False

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if not self.failed:
                self.failed = True
                raise ValueError("once")
            super().step()

    x, training = (
        torch.randn(8, 6),
        Training(_net(), lambda m: Fails(m.parameters()), torch.mean, torch.randn(8, 6), accumulate=2),
    )
    training.theirs.failed = True
    training.step(x)
    with pytest.raises(ValueError, match="once"):
        training.step(x)
    assert training.step.pending == 0
    for _ in range(2):
        training.both(x)

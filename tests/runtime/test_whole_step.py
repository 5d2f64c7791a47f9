"""`compile_step`: a whole training step in one arena equals eager with the fused optimizer, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.zoo import ZOO
from memplan.errors import InputMismatch, MemplanError, PlanMismatch, UnsupportedCall, UnsupportedGraph
from memplan.planning.options import PlanOptions
from memplan.runtime import CompiledStep, compile, compile_step
from memplan.trace import plan as memplan_plan
from tests.models import Made
from tests.runtime.reference import same_parameters
from tests.runtime.test_optimizers import Lion
from tests.slow import slow
from tests.steps import Training, itself

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1, maximize=True, fused=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=1e-3, nesterov=True, fused=True),
    "lion": Lion,
}


@pytest.mark.parametrize(
    ("name", "kind"), [*(slow(name, "adamw") for name in ZOO if name != "mlp"), ("mlp", "momentum")]
)
def test_bitwise_equal_to_eager(name: str, kind: str) -> None:
    model, batch = ZOO[name]("nano")
    training = _training(kind, model, itself, *batch, sanitize="poison")
    for seed in range(3):
        training.both(*batch, seed=seed)
    training.assert_same_state()
    assert all(p.grad is None for p in model.parameters())


def _training(kind: str, model: nn.Module, loss_fn: Any, *example: Any, **options: Any) -> Training:
    return Training(model, lambda m: OPTIMIZERS[kind](m.parameters()), loss_fn, *example, **options)


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def _batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 8, generator=generator), torch.randn(5, 4, generator=generator)


def test_gradients_die_on_the_spot() -> None:
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    x = torch.randn(1, 64)

    def loss(out: torch.Tensor) -> torch.Tensor:
        return out.square().mean()

    step = compile_step(net, torch.optim.SGD(net.parameters(), lr=0.1), loss, x)
    gradients = sum(p.numel() * 4 for p in net.parameters())
    assert step.plan.outside["gradients"] == 0
    assert step.plan.arena_size < gradients / 2
    assert memplan_plan(net, x, options=PlanOptions(gradients="outside")).outside["gradients"] == gradients


def test_a_saved_plan_is_followed(tmp_path: Path) -> None:
    def step_of(**options: Any) -> tuple[nn.Module, CompiledStep]:
        net = _net()
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        return net, compile_step(net, sgd, F.mse_loss, _batch(), **options)

    one, first = step_of(layout="tstack", schedule="traced")
    assert first.plan.solution.solver == "tstack"
    assert first.plan.schedule.policy == "traced"
    first.plan.save(tmp_path / "plan.json")
    two, second = step_of(plan=tmp_path / "plan.json")
    assert second.plan.solution.offsets == first.plan.solution.offsets
    for _ in range(2):
        batch = _batch()
        assert torch.equal(first(*batch), second(*batch))
    assert same_parameters(one, two)
    with pytest.raises(MemplanError, match="beside a plan"):
        step_of(plan=first.plan, arena_budget=0.5)
    other = memplan_plan(nn.Linear(8, 4), torch.randn(5, 8))
    with pytest.raises(PlanMismatch):
        step_of(plan=other)


def test_misuse_raises() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    step = compile_step(net, sgd, F.mse_loss, (x, y), on_mismatch="error")
    with pytest.raises(InputMismatch, match=r"\(4, 8\)"):
        step(torch.randn(4, 8), torch.randn(4, 8))
    with pytest.raises(InputMismatch, match=r"the parameter .*weight"):
        step(net.get_parameter("0.weight").detach(), y)
    net.eval()
    with pytest.raises(InputMismatch, match="training=False"):
        step(x, y)
    net.train()
    sgd.add_param_group({"params": nn.Parameter(torch.zeros(3))})
    with pytest.raises(InputMismatch, match="optimizer"):
        step(x, y)
    with pytest.raises(UnsupportedGraph, match="loss_fn"):
        compile_step(net, torch.optim.SGD(net.parameters(), lr=0.1), F.mse_loss, x)
    with pytest.raises(UnsupportedGraph, match="the batch has 1 parts"):
        compile_step(net, torch.optim.SGD(net.parameters(), lr=0.1), F.mse_loss, [x, y, y])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("sgd", {"momentum": 0.9}),
        slow("momentum", {"momentum": 0}),
        ("momentum", {"dampening": 0.5, "nesterov": False}),
        ("adamw", {"amsgrad": True}),
        slow("adam", {"decoupled_weight_decay": True}),
        slow("adam", {"capturable": True}),
    ],
)
def test_options_that_decide_the_update_may_not_change(kind: str, options: dict[str, Any]) -> None:
    training = _training(kind, _net(), F.mse_loss, *_batch(), on_mismatch="error")
    training.both(*_batch())
    before, group = copy.deepcopy(training.model.state_dict()), training.ours.param_groups[0]
    kept = dict(group)
    group.update(options)
    with pytest.raises(InputMismatch, match=f"group 0: {next(iter(options))} changed"):
        training.step(*_batch())
    assert all(torch.equal(value, before[name]) for name, value in training.model.state_dict().items())
    group.update(kept)
    training.both(*_batch())


def test_parameters_may_not_move_to_another_group() -> None:
    net = _net()
    weights = [p for p in net.parameters() if p.ndim > 1]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": [net.get_parameter("0.bias")], "lr": 1e-3}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    step = compile_step(net, optimizer, F.mse_loss, _batch(), on_mismatch="error")
    first, second = optimizer.param_groups
    second["params"].insert(0, first["params"].pop())
    with pytest.raises(InputMismatch, match="groups do not have the parameters"):
        step(*_batch())


def test_autocast_is_part_of_the_step() -> None:
    training = _training("adamw", _net(), F.mse_loss, *_batch(), on_mismatch="error")
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(InputMismatch, match=r"under autocast to torch\.bfloat16"):
            training.step(*_batch())
        training = _training("adamw", _net(), F.mse_loss, *_batch(), on_mismatch="error")
    for seed in range(3):
        with torch.autocast("cpu", torch.bfloat16):  # one for each step: it keeps what it has cast until its end
            training.both(*_batch(seed))
    with pytest.raises(InputMismatch, match="called without autocast"):
        training.step(*_batch())


def test_inputs_that_want_gradients_are_refused() -> None:
    """Eager's gradient would go on to what computed them."""
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y = _batch()
    with pytest.raises(UnsupportedCall, match="input 0 of the example batch: requires a gradient") as caught:
        compile_step(net, optimizer, F.mse_loss, (x.requires_grad_(), y))
    assert caught.value.hint
    step = compile_step(net, optimizer, F.mse_loss, (x.detach(), y), on_mismatch="error")
    with pytest.raises(InputMismatch, match="input 0: requires a gradient"):
        step(x * 2, y)


@pytest.mark.parametrize("kind", ["momentum", "amsgrad"])
def test_state_is_made_for_what_has_gradients(kind: str) -> None:
    """As in eager: no state, no update and no weight decay for what the loss does not depend on, or is frozen."""
    net: Any = _net()
    net[1].spare = nn.Linear(3, 3)
    net[0].bias.requires_grad_(False)
    training = _training(kind, net, F.mse_loss, *_batch())
    for seed in range(3):
        training.both(*_batch(seed))
    training.assert_same_state()


def test_a_step_that_is_refused_leaves_the_optimizer_as_it_was() -> None:
    net, (x, y) = _net(), _batch()
    optimizer = torch.optim.AdamW(net.parameters())
    with pytest.raises(UnsupportedGraph):
        compile_step(net, optimizer, lambda out: out.sum() * float(out.sum()), x, fullgraph=True)
    assert not optimizer.state
    F.mse_loss(net(x), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(UnsupportedGraph, match="'max_exp_avg_sq'") as caught:
        compile_step(net, optimizer, F.mse_loss, (x, y))
    assert caught.value.hint


def test_a_step_that_would_minimise_nothing_is_refused() -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, _ = _batch()
    with pytest.raises(UnsupportedGraph, match=r"loss_fn: returns a tensor of shape \(5, 4\)"):
        compile_step(net, optimizer, lambda y: y.square(), x)
    with pytest.raises(UnsupportedGraph, match="loss_fn: returns 2 values"):
        compile_step(net, optimizer, lambda y: (y.mean(), y), x)  # type: ignore[arg-type, return-value]
    with pytest.raises(UnsupportedGraph, match="depends on none of its parameters"):
        compile_step(net, torch.optim.SGD(_net().parameters(), lr=0.1), lambda y: y.mean(), x)
    training = _training("sgd", net, lambda y: y.square().mean().reshape(1, 1), x)
    for seed in range(2):
        training.both(_batch(seed)[0])


class WithLoss(nn.Module):
    """A network and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _net()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.net(x), y)


def test_a_batch_by_keywords() -> None:
    model, (x, y) = WithLoss(), _batch()
    twin = copy.deepcopy(model)
    ours, theirs = (OPTIMIZERS["adamw"](m.parameters()) for m in (model, twin))
    step = compile_step(model, ours, itself, example_kwargs={"x": x, "y": y}, on_mismatch="error")
    for seed in range(2):
        x, y = _batch(seed)
        loss = twin(x, y)
        loss.backward()
        theirs.step()
        theirs.zero_grad()
        assert torch.equal(step(y=y, x=x), loss)  # their order says nothing
    assert same_parameters(model, twin)
    with pytest.raises(InputMismatch, match="keywords x"):
        step(x=x)
    with pytest.raises(InputMismatch, match="input 'x'"):
        step(x=x[:1], y=y)


def _takes(weight: torch.Tensor) -> Made:
    """A parameter of any kind."""
    return Made(lambda m, x: (x * m.weight).abs().sum(), weight=nn.Parameter(weight))


def test_parameters_that_fused_kernels_cannot_update_are_refused() -> None:
    model = _takes(torch.randn(4, 2)[:, 0])
    with pytest.raises(UnsupportedGraph, match="gaps") as caught:
        compile_step(model, torch.optim.SGD(model.parameters(), lr=0.1), itself, torch.randn(3, 4))
    assert caught.value.hint


def _hook(*_: object) -> None:
    """Of any kind."""


HOOKS: dict[str, Callable[[nn.Linear, torch.optim.Optimizer], Any]] = {
    "gradient": lambda net, _: net.weight.register_hook(_hook),  # type: ignore[no-untyped-call]
    "accumulated": lambda net, _: net.weight.register_post_accumulate_grad_hook(_hook),  # type: ignore[no-untyped-call]
    "node": lambda net, _: torch.autograd.graph.get_gradient_edge(net.weight).node.register_hook(_hook),
    "several": lambda net, _: torch.autograd.graph.register_multi_grad_hook([net.weight, net.bias], _hook),
    "before": lambda _, optimizer: optimizer.register_step_pre_hook(_hook),
    "after": lambda _, optimizer: optimizer.register_step_post_hook(_hook),
    "of all": lambda *_: register_optimizer_step_post_hook(_hook),
}


def test_hooks_that_a_step_would_not_call_raise() -> None:
    net = nn.Linear(8, 4)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    node = torch.autograd.graph.get_gradient_edge(net.weight).node  # lives while somebody holds it
    step = compile_step(net, sgd, F.mse_loss, _batch())
    step(*_batch())
    for kind, hook in HOOKS.items():
        before = net.weight.clone()
        handle = hook(net, sgd)
        for _ in range(2):
            with pytest.raises(UnsupportedCall, match="hook"):
                step(*_batch())
        with pytest.raises(UnsupportedCall, match="hook"):
            compile_step(net, sgd, F.mse_loss, _batch())
        assert torch.equal(net.weight, before), kind
        handle.remove()
        step(*_batch())
        assert not torch.equal(net.weight, before), kind
    assert node is not None


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("kind", ["adamw", "momentum", "lion", slow("sgd")])
def test_accumulation_is_that_of_eager(kind: str, clip: float | None) -> None:
    """Updates of 3 micro-batches each, with a schedule, against (loss / 3).backward() three times, then step()."""
    training = _training(kind, _net(), F.mse_loss, *_batch(), accumulate=3, clip=clip, sanitize="poison")
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (training.ours, training.theirs)]
    weight = training.model.get_parameter("0.weight")
    for update in range(4):
        for micro in range(3):
            before = weight.clone()
            assert training.step.pending == micro
            training.both(*_batch(3 * update + micro))
            assert (micro < 2) is torch.equal(before, weight)
        for schedule in schedules:
            schedule.step()
    training.assert_same_state()
    assert all(p.grad is None for p in training.model.parameters())


def test_batches_of_a_loader_are_lists() -> None:
    data = torch.utils.data.TensorDataset(*(torch.cat(parts) for parts in zip(*map(_batch, range(2)), strict=True)))
    loader = torch.utils.data.DataLoader(data, batch_size=len(_batch()[0]))
    training = _training("sgd", _net(), F.mse_loss, next(iter(loader)))
    for batch in loader:
        training.both(*batch)


def test_accumulated_gradients_are_counted() -> None:
    net = _net()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    step = compile_step(net, sgd, F.mse_loss, _batch(), accumulate=2)
    assert step.plan.reserve == sum(p.nbytes for p in net.parameters())
    assert not sgd.state_dict()["state"].get(0), "they are not the optimizer's"


@pytest.mark.parametrize("kind", [slow(kind) if kind == "adamw" else kind for kind in OPTIMIZERS])
def test_schedules_and_checkpoints_interchange_with_eager(kind: str) -> None:
    """Every four steps each side goes on from the other's checkpoint, and at last another step goes on from it."""

    def make(net: Any) -> torch.optim.Optimizer:
        groups: Any = [
            {"params": net[0].parameters(), "lr": 0.05},
            {"params": net[2].parameters(), "weight_decay": 0.2},
        ]
        return OPTIMIZERS[kind](groups)

    training = Training(_net(), make, F.mse_loss, *_batch())
    models, optimizers = (training.model, training.eager), (training.ours, training.theirs)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 20) for o in optimizers]
    for seed in range(8):
        training.both(*_batch(seed))
        for schedule in schedules:
            schedule.step()
        if seed % 4 == 3:
            saved = [copy.deepcopy((m.state_dict(), o.state_dict())) for m, o in zip(models, optimizers, strict=True)]
            for model, optimizer, (weights, state) in zip(models, optimizers, reversed(saved), strict=True):
                model.load_state_dict(weights)
                optimizer.load_state_dict(state)
    training.both(*_batch(8))

    def resumed(net: Any) -> torch.optim.Optimizer:
        made = make(net)
        made.load_state_dict(copy.deepcopy(training.theirs.state_dict()))
        return made

    again = Training(copy.deepcopy(training.model), resumed, F.mse_loss, *_batch())
    again.both(*_batch(9))
    again.assert_same_state()


def test_modules_and_steps_show_their_plan() -> None:
    model, batch = _net(), _batch()
    compiled = compile(model, batch[0], budget="1MiB")
    assert "arena" in repr(compiled)
    assert "kernels='aten', budget 1.00 MiB" in repr(compiled)
    assert "planned at the first call" in repr(compile(model))
    step = compile_step(model, OPTIMIZERS["adamw"](model.parameters()), F.mse_loss, batch)
    assert repr(step).startswith("<compiled step: total ")


@pytest.mark.parametrize("on_mismatch", ["replan", "error", "eager", "passive"])
def test_a_batch_is_taken_as_a_loader_yields_it(on_mismatch: Any) -> None:
    model, batch = nn.Linear(4, 2), [torch.randn(8, 4), torch.randn(8, 2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = compile_step(model, optimizer, F.mse_loss, batch, on_mismatch=on_mismatch)
    for given in (batch, tuple(batch)):
        expected = F.mse_loss(model(batch[0]), batch[1]).detach()
        assert torch.equal(step(given), expected)
    assert step.passive is None
    assert len(step._builder.plans) == 1

"""The default never needs more than eager: what is dead when kernels need most is outside the arena by then."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from benchmarks.peak_measure import checkpoint_blocks
from benchmarks.zoo import ZOO
from memplan.devices.measure import peak_bytes
from tests.models import Made, Saves
from tests.runtime.budgets import QUICK
from tests.runtime.reference import same_gradients, same_parameters
from tests.slow import slow

CPU = torch.device("cpu")


def _measured(call: Callable[[], Any], model: nn.Module | None = None) -> int:
    call()
    if model is not None:
        model.zero_grad()
    peak: int = peak_bytes([call], CPU)[0]
    return peak


def _inference(model: nn.Module, inputs: tuple[Any, ...]) -> Callable[[], Any]:
    def call() -> Any:
        with torch.no_grad():
            return model(*inputs)

    return call


def _training(model: nn.Module, inputs: tuple[Any, ...]) -> Callable[[], Any]:
    def call() -> None:
        model(*inputs).backward()

    return call


def _peaks() -> tuple[nn.Module, torch.Tensor]:
    """A large result first; then a convolution that needs much for itself, when little else is alive."""
    torch.manual_seed(0)
    model = Made(
        lambda m, x: m.last(nn.functional.avg_pool2d(torch.tanh(x), 16)).mean((2, 3)),
        last=nn.Conv2d(64, 512, 3, padding=1),
    )
    return model.eval(), torch.randn(2, 64, 64, 64)


@pytest.mark.parametrize(
    ("name", "train"),
    [("resnet", False), slow("lstm", False), slow("llama", True), ("vit", True), slow("resnet", True)],
)
def test_the_peak_of_a_model_is_at_most_eagers(name: str, train: bool) -> None:
    torch.manual_seed(0)
    model, inputs = ZOO[name]("nano")
    model.train(train)
    reference = copy.deepcopy(model)
    step = _training if train else _inference
    eager = _measured(step(reference, inputs), reference)
    compiled = memplan.compile(model, inputs, train=train)
    call = step(compiled, inputs)
    measured = _measured(call, model) + compiled.plan.arena_size
    assert measured <= eager + compiled.plan.padding
    if not train:
        assert torch.equal(step(reference, inputs)(), call())
    assert same_gradients(model, reference)


def test_the_peak_of_a_checkpointed_model_is_at_most_eagers_with_the_checkpoints(tmp_path: Path) -> None:
    """Convolutions need much memory for themselves, when the arena is nearly empty."""
    torch.manual_seed(0)
    model, inputs = ZOO["convnext"]("nano")
    checkpoint_blocks(model)
    reference = copy.deepcopy(model)
    eager = _measured(_training(reference, inputs), reference)
    compiled = memplan.compile(model, inputs)
    call = _training(compiled, inputs)
    measured = _measured(call, model) + compiled.plan.arena_size
    assert measured <= eager + compiled.plan.padding
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, gradients, (p.grad for p in reference.parameters() if p.grad is not None)))
    compiled.plan.save(tmp_path / "plan.json")
    del compiled
    model.zero_grad()
    again = memplan.compile(model, inputs, plan=memplan.load(tmp_path / "plan.json"))
    again(*inputs).backward()
    assert all(map(torch.equal, gradients, (p.grad for p in model.parameters() if p.grad is not None)))


@pytest.mark.parametrize("name", [slow("resnet"), "lstm", slow("vit")])
def test_the_peak_of_a_whole_step_is_at_most_eagers(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = ZOO[name]("nano")
    reference = copy.deepcopy(model)
    theirs, ours = (torch.optim.AdamW(m.parameters(), fused=True) for m in (reference, model))
    step = memplan.compile_step(model, ours, lambda loss: loss, inputs)

    def eager() -> None:
        torch.manual_seed(1)
        reference(*inputs).backward()
        theirs.step()
        theirs.zero_grad()

    def planned() -> None:
        torch.manual_seed(1)
        step(*inputs)

    peaks = [_measured(call) for call in (eager, planned)]
    assert peaks[1] + step.plan.arena_size <= peaks[0] + step.plan.padding
    assert same_parameters(model, reference)


def test_the_device_of_a_step_on_the_host_holds_about_what_eager_would() -> None:
    """Nothing is evicted without a budget for what kernels of convolutions allocate beside the arena."""
    torch.manual_seed(0)
    model, inputs = ZOO["resnet"]("nano")
    reference = copy.deepcopy(model)
    holds = sum(t.nbytes for t in (*reference.parameters(), *reference.buffers(), *inputs))
    peak = _measured(_training(reference, inputs), reference) + holds
    compiled = memplan.compile(model, inputs, device="cpu", policy=QUICK)
    for _ in range(2):
        model.zero_grad()
        compiled(*inputs).backward()
    assert compiled.plan.on_device <= 1.05 * peak
    assert same_gradients(model, reference)


def test_what_is_outside_is_freed_after_its_last_use_and_a_saved_plan_has_it(tmp_path: Path) -> None:
    model, x = _peaks()
    plan = memplan.compile(model, (x,), train=False).plan
    assert plan.report().outside.intermediate == plan.outside["intermediate"] > plan.arena_size
    plan.save(tmp_path / "plan.json")
    call = _inference(memplan.compile(model, (x,), train=False, plan=memplan.load(tmp_path / "plan.json")), (x,))
    assert _measured(call) <= max(plan.outside_profile) < _measured(_inference(model, (x,)))
    assert torch.equal(call(), _inference(model, (x,))())


def _saves(**options: Any) -> tuple[nn.Module, nn.Module, memplan.runtime.CompiledModule, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Saves(), torch.randn(8, 1, 16, 16)
    reference = copy.deepcopy(model)
    compiled = memplan.compile(model, x, **options)
    assert compiled._calls.programs.main.program.left, "no activation that the backward needs is outside the arena"
    return model, reference, compiled, x


def _gradients(model: nn.Module, loss: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    model.zero_grad()
    loss.backward(**options)  # type: ignore[no-untyped-call]
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return len(one) == len(two) > 0 and all(map(torch.equal, one, two))


def test_what_the_backward_needs_may_be_outside_too() -> None:
    model, reference, compiled, x = _saves()
    eager = _measured(lambda: reference(x).sum().backward(), reference)
    beside = _measured(lambda: compiled(x).sum().backward(), model)
    assert beside <= max(compiled.plan.outside_profile) + 64  # the caller's sum, its gradient
    assert beside + compiled.plan.arena_size <= eager + compiled.plan.padding
    assert _same(_gradients(model, compiled(x).sum()), _gradients(reference, reference(x).sum()))


@pytest.mark.parametrize("option", [{}, slow({"gradients": "outside"})])
def test_what_is_left_to_the_backward_outside_is_that_of_its_own_forward(option: dict[str, Any]) -> None:
    model, reference, compiled, x = _saves(**option)
    expected = _gradients(reference, reference(x).square().sum())
    compiled(-x)  # no backward follows
    assert _same(_gradients(model, compiled(x).square().sum()), expected)
    loss = compiled(x).square().sum()
    assert _same(_gradients(model, loss, retain_graph=True), expected)
    assert _same(_gradients(model, loss), expected), "the forward runs again"
    with compiled.hooks.add(lambda event: None):
        assert _same(_gradients(model, compiled(x).square().sum()), expected)
    model.zero_grad()
    one, two = compiled(x), compiled(-x)  # several in flight
    (one.square().sum() + 3 * two.sum()).backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert _same(found, _gradients(reference, reference(x).square().sum() + 3 * reference(-x).sum()))


def test_activations_outside_the_arena_die_with_the_graph_that_no_backward_runs_for() -> None:
    model, reference, compiled, x = _saves()
    left = compiled._calls.programs.main.left_outside
    kept = compiled(x)
    assert left
    del kept
    assert not left
    losses = []
    for call in (compiled, reference):
        first = call(x).sum()
        torch.autograd.backward(first)
        second = call(x).square().sum()  # the first graph dies while the second waits for its backward
        del first
        torch.autograd.backward(second)
        losses.append(second.detach())
    assert torch.equal(*losses)
    assert same_gradients(model, reference)


def _mlp() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())])
    return model, copy.deepcopy(model)


def _loop(call: Callable[[torch.Tensor], Any], model: nn.Module, batches: list[torch.Tensor]) -> Callable[[], None]:
    """Return a loop over batches; `call` returns a loss for its backward, or has trained on the batch itself."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        for x in batches:
            loss = call(x)
            if loss.requires_grad:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    return loop


@pytest.mark.parametrize("how", ["passive", "eager in flight", "eager step"])
def test_an_arena_is_given_back_while_calls_run_without_a_plan(how: str) -> None:
    model, reference = _mlp()
    batches = [torch.randn(256 - 16 * n, 64) for n in range(8)]
    on_mismatch: Any = how.split(maxsplit=1)[0]
    if "step" in how:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = memplan.compile_step(
            model, optimizer, lambda y: y.square().mean(), (batches[0],), on_mismatch=on_mismatch
        )
        loop = _loop(step, model, batches * 2)
    else:
        compiled = memplan.compile(model, batches[0], on_mismatch=on_mismatch)
        if "in flight" in how:
            torch.autograd.grad(compiled(batches[0]).sum() + compiled(batches[0]).sum(), list(model.parameters()))
        loop = _loop(lambda x: compiled(x).square().mean(), model, batches * 2)
    expected = _loop(lambda x: reference(x).square().mean(), reference, batches * 2)
    kept = []  # so that the arena is elsewhere when it is taken again
    for _ in range(3):
        loop()
        expected()
        kept.append([torch.zeros(n) for n in range(1000, 200000, 1000)])
    assert same_parameters(model, reference)
    if "step" in how:
        arena = step._builder.arena
        assert arena is not None
        assert not arena.held
    else:
        pending = compiled._calls.pending
        assert not any(arena.held for arena in ([compiled._calls.arena] if pending is None else pending.arenas))


class Tied(nn.Module):
    """Layers of which two share their weight, and one is called twice."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.tied = tied
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(5))
        if tied:
            self.layers[4].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, *self.layers[1 : 1 + self.tied]):
            x = torch.tanh(layer(x))
        return x


def _stepping(parameters: list[nn.Parameter], every: int) -> None:
    """Set hooks that step the optimizer of each parameter every so many calls, and free its gradient."""
    optimizers = {p: torch.optim.Adam([p], lr=0.01) for p in parameters}
    calls = dict.fromkeys(parameters, 0)

    def hook(p: torch.Tensor) -> None:
        assert isinstance(p, nn.Parameter)
        assert p.grad is not None, "called again"
        calls[p] += 1
        if calls[p] % every == 0:
            optimizers[p].step()
            p.grad = None

    for p in parameters:
        p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


HOOKED = ["all", "some", "accumulated", "both", "also on gradients"]


@pytest.mark.parametrize("how", ["compile", "backend"])
@pytest.mark.parametrize("kind", HOOKED)
def test_an_optimizer_in_the_backward_has_eagers_bits(kind: str, how: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = Tied(tied=kind != "both")  # else eager adds up in another order
    x = torch.randn(32, 128)
    reference = copy.deepcopy(model)

    def train(one: nn.Module, called: Any) -> None:
        parameters = list(one.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        _stepping(parameters[::2] if kind == "some" else parameters, 2 if kind == "accumulated" else 1)
        if kind == "also on gradients":
            for p in parameters[1:3]:
                p.register_hook(lambda g: g * 0.5)  # type: ignore[no-untyped-call]
        for _ in range(3):
            loss = called(x).square().mean()
            if kind == "both":
                loss = loss + called(x * 0.5).square().mean()
            loss.backward()
            if kind == "some":
                optimizer.step()
                optimizer.zero_grad()

    train(reference, reference)
    train(model, memplan.compile(model, x) if how == "compile" else torch.compile(model, backend="memplan"))
    assert same_parameters(model, reference)
    assert same_gradients(model, reference)


def test_a_parameter_that_a_hook_changes_is_read_no_more() -> None:
    """The gradient of a weight can be made before that of what it multiplies, which reads the weight."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    reference, x = copy.deepcopy(model), torch.randn(8, 16)

    def zero(p: torch.Tensor) -> None:
        with torch.no_grad():
            p.zero_()

    compiled = memplan.compile(model, x)
    for one, called in ((model, compiled), (reference, reference)):
        for p in one.parameters():
            p.register_post_accumulate_grad_hook(zero)  # type: ignore[no-untyped-call]
        called(x).square().sum().backward()
    pairs = list(zip(model.parameters(), reference.parameters(), strict=True))
    assert all(torch.equal(p.grad, q.grad) and not p.any() for p, q in pairs)  # type: ignore[arg-type]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())

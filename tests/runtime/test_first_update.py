"""Tests of room for an optimizer's first update: what it allocates beside an idle arena is measured and planned for."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from benchmarks.peak_measure import live_bytes
from memplan.core.units import format_bytes
from memplan.planning import measured
from memplan.runtime.api.compiled_module import CompiledModule
from memplan.trace.optimizer.update_bytes import bytes_of_step
from tests.runtime.allocated import allocations
from tests.slow import slow

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


class WithLoss(nn.Module):
    """Layers of which the parameters are as large as the activations, and a loss."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(width, width), nn.GELU())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).square().mean()
        return loss


def _plain(called: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    called(x).backward()
    optimizer.step()


def _late(called: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Train a step that finds the gradients of the last one still set when the model is called."""
    loss = called(x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _accumulated(called: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Train a step of two batches."""
    optimizer.zero_grad()
    for part in x.chunk(2):
        called(part).backward()
    optimizer.step()


def _two_waiting(called: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Train a step of two calls, of which one waits for its backward while the other runs."""
    optimizer.zero_grad()
    losses = [called(part) for part in x.chunk(2)]
    sum(losses).backward()
    optimizer.step()


def _in_closure(called: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Train a step as Lightning does: `step()` calls the model."""

    def again() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = called(x)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(again)  # type: ignore[arg-type]


def _trained(
    make: MakeOptimizer,
    *,
    planned: bool,
    width: int = 256,
    update: Callable[..., None] | None = None,
    kind: type[nn.Module] = WithLoss,
    backend: memplan.Backend | None = None,
) -> tuple[int, list[torch.Tensor], Any]:
    """Return the peak of the sixth step of a model, its parameters then, and the compiled model.

    `update`: trains one step, in the place of a plain loop's. `kind`: the model. `backend`: it is compiled by this.
    """
    torch._dynamo.reset()
    gc.collect()
    before = live_bytes()
    torch.manual_seed(0)
    model, x = kind(width), torch.randn(width, width)
    called: Any = memplan.compile(model, x) if planned and backend is None else model
    if backend is not None:
        model.compile(backend=backend)
    optimizer = make(model.parameters())

    def step() -> None:
        (update or _plain)(called, optimizer, x)

    for _ in range(4):
        step()
    allocations(step)  # from here on, the profiler knows all that is freed
    gc.collect()
    standing = live_bytes() - before
    peak = standing + max(accumulate(allocations(step)))
    return peak, [p.detach().clone() for p in model.parameters()], called


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "one by one": torch.optim.AdamW,
    "foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
}


@pytest.mark.parametrize("name", ["foreach", slow("one by one")])
def test_arena_and_update_need_no_more_than_eager(name: str, caplog: pytest.LogCaptureFixture) -> None:
    eager, expected, _ = _trained(OPTIMIZERS[name], planned=False)
    with caplog.at_level(logging.INFO, logger="memplan"):
        peak, found, called = _trained(OPTIMIZERS[name], planned=True)
    assert peak <= eager + called.plan.padding
    smaller = next(r for r in caplog.records if "AdamW.step() allocates" in r.message)
    assert f"an arena of {format_bytes(called.plan.arena_size)} instead" in smaller.message
    assert all(map(torch.equal, expected, found))


def test_where_no_room_was_made_later_programs_leave_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.runtime.dynamo.planned_graph.made_room", lambda *_: ())
    backend = memplan.Backend()
    _trained(OPTIMIZERS["foreach"], planned=True, width=64, backend=backend)
    assert [graph._after for graph in backend.graphs] == [0]


class _Two:
    """Two optimizers of one model, of which the second one allocates more."""

    def __init__(self, parameters: Any) -> None:
        first, *others = parameters
        self.optimizers = [OPTIMIZERS["foreach"](some) for some in ([first, *others[:3]], others[3:])]

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def test_of_several_optimizers_the_one_that_allocates_most_has_room(caplog: pytest.LogCaptureFixture) -> None:
    make: Any = _Two
    eager, expected, _ = _trained(make, planned=False)
    with caplog.at_level(logging.INFO, logger="memplan"):
        peak, found, called = _trained(make, planned=True)
    assert peak <= eager + called.plan.padding
    assert sum("AdamW.step() allocates" in r.message for r in caplog.records) == 2
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("update", [_in_closure, slow(_late), _accumulated, _two_waiting])
def test_loops_of_other_kinds_and_their_update_need_no_more_than_eager(update: Callable[..., None]) -> None:
    eager, expected, _ = _trained(OPTIMIZERS["foreach"], planned=False, update=update)
    peak, found, called = _trained(OPTIMIZERS["foreach"], planned=True, update=update)
    assert peak <= eager + called.plan.padding
    assert all(map(torch.equal, expected, found))


def _padding(backend: memplan.Backend) -> int:
    """Return the bytes of alignment in the plans of a backend's graphs."""
    return sum(plan.padding for graph in backend.graphs for plan in graph.plans)


@pytest.mark.parametrize("update", [_plain, slow(_in_closure), _late, slow(_accumulated), _two_waiting])
def test_the_arena_of_a_graph_of_dynamo_and_the_update_need_no_more_than_eager(update: Callable[..., None]) -> None:
    backend = memplan.Backend()
    eager, expected, _ = _trained(OPTIMIZERS["foreach"], planned=False, update=update)
    peak, found, _ = _trained(OPTIMIZERS["foreach"], planned=True, update=update, backend=backend)
    assert [graph.plans[0].outside.get("intermediate", 0) > 0 for graph in backend.graphs] == [True]
    assert peak <= eager + _padding(backend)
    assert all(map(torch.equal, expected, found))


class Classifier(nn.Module):
    """A model whose activations take more than its results and gradients."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(x), torch.zeros(len(x), dtype=torch.long))


def test_a_graph_whose_gradients_move_out_still_leaves_room_for_the_update() -> None:
    backend = memplan.Backend()
    foreach = OPTIMIZERS["foreach"]
    eager, expected, _ = _trained(foreach, planned=False, update=_late, kind=Classifier, width=64)
    peak, found, _ = _trained(foreach, planned=True, update=_late, kind=Classifier, width=64, backend=backend)
    assert peak <= eager + _padding(backend)
    assert all(map(torch.equal, expected, found))


class InTwo(WithLoss):
    """The same, in two graphs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = len(self.layers) // 2
        x = self.layers[:half](x)
        torch._dynamo.graph_break()
        loss: torch.Tensor = self.layers[half:](x).square().mean()
        return loss


def test_the_arena_of_several_graphs_and_the_update_need_no_more_than_eager() -> None:
    backend = memplan.Backend()
    eager, expected, _ = _trained(OPTIMIZERS["foreach"], planned=False, kind=InTwo)
    peak, found, _ = _trained(OPTIMIZERS["foreach"], planned=True, kind=InTwo, backend=backend)
    assert len(backend.graphs) == 2
    assert peak <= eager + _padding(backend)
    assert all(map(torch.equal, expected, found))


def test_a_small_model_needs_no_more_than_eager_either() -> None:
    eager, expected, _ = _trained(OPTIMIZERS["foreach"], planned=False, width=48)
    peak, found, called = _trained(OPTIMIZERS["foreach"], planned=True, width=48)
    assert peak <= eager + called.plan.padding
    assert all(map(torch.equal, expected, found))


def _plan_of_now(make: MakeOptimizer, step: Callable[[Any, torch.optim.Optimizer, torch.Tensor], None]) -> bool:
    """Return whether the plan of a small model changed in three steps."""
    torch.manual_seed(0)
    model, x = WithLoss(96), torch.randn(96, 96)
    called = memplan.compile(model, x)
    first, optimizer = called.plan, make(model.parameters())
    for _ in range(3):
        model.zero_grad()
        step(called, optimizer, x)
    return called.plan is not first


def test_bytes_that_are_not_worth_it_change_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    foreach = OPTIMIZERS["foreach"]
    monkeypatch.setattr(measured, "NOTICEABLE_SHARE", 1.0)
    assert not _plan_of_now(foreach, _plain)
    monkeypatch.setattr(measured, "NOTICEABLE_SHARE", 0.0)
    assert _plan_of_now(foreach, _plain)


def test_what_allocates_nothing_or_is_not_known_changes_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "NOTICEABLE_SHARE", 0.0)

    class Own(torch.optim.AdamW):
        """An optimizer of a user, which might hold anything."""

    assert not _plan_of_now(lambda parameters: torch.optim.AdamW(parameters, fused=True), _plain)
    assert not _plan_of_now(lambda parameters: Own(parameters, foreach=True), _plain)
    assert not _plan_of_now(lambda _: torch.optim.AdamW(nn.Linear(64, 64).parameters()), _plain), "other parameters"


def test_gradients_that_something_else_refers_to_keep_their_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "NOTICEABLE_SHARE", 0.0)
    torch.manual_seed(0)
    model, x = WithLoss(96), torch.randn(96, 96)
    called = memplan.compile(model, x)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    called(x).backward()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    view, was = gradient.numpy(), gradient.clone()
    optimizer.step()
    assert torch.equal(torch.from_numpy(view), was), "an address that is kept keeps its bytes"
    plan = called.plan
    del view, gradient
    called(x).backward()  # the gradients are still set, so that they leave the arena for good
    assert called.plan is not plan


@pytest.mark.parametrize("alias", [lambda g: g.data, lambda g: g.detach(), lambda g: g.view(-1)])
def test_what_shares_bytes_with_a_gradient_still_does_after_the_update(
    alias: Callable[[Any], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "NOTICEABLE_SHARE", 0.0)
    torch.manual_seed(0)
    model, x = WithLoss(96), torch.randn(96, 96)
    called = memplan.compile(model, x)
    plan = called.plan
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    called(x).backward()
    kept = [alias(p.grad) for p in model.parameters()]
    optimizer.step()
    for one in kept:
        one.zero_()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None), "as in eager"
    del kept, one
    for _ in range(2):
        optimizer.zero_grad()
        _plain(called, optimizer, x)
    optimizer.zero_grad()
    called(x)
    assert called.plan.arena_size < plan.arena_size, "a later step makes room"


def test_a_second_optimizer_is_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "NOTICEABLE_SHARE", 0.0)
    torch.manual_seed(0)
    model, x = WithLoss(96), torch.randn(96, 96)
    called = memplan.compile(model, x)
    first, *others = model.parameters()
    optimizers = [torch.optim.AdamW([first], fused=True), torch.optim.AdamW(others, foreach=True)]
    plan = called.plan
    for _ in range(2):
        model.zero_grad()
        called(x).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert called.plan.arena_size < plan.arena_size


def test_an_evaluation_after_the_first_update_has_its_results_in_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "NOTICEABLE_SHARE", 0.0)
    torch.manual_seed(0)
    model, x = WithLoss(96), torch.randn(96, 96)
    called = memplan.compile(model, x)
    _plain(called, torch.optim.AdamW(model.parameters(), foreach=True), x)
    model.zero_grad()
    expected = WithLoss(96)
    expected.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(called(x), expected(x))
    assert called._calls.arena.nbytes >= x.nbytes


def test_a_step_that_dynamo_traces_measures_nothing() -> None:
    torch.manual_seed(0)
    model, x = WithLoss(96), torch.randn(96, 96)
    called = memplan.compile(model, x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    called(x).backward()
    torch.compile(optimizer.step, backend="eager")()
    assert called.plan.total == memplan.compile(WithLoss(96), x).plan.total


def test_other_calls_and_evaluations_share_the_smaller_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "NOTICEABLE_SHARE", 0.0)
    torch.manual_seed(0)
    model = WithLoss(64)
    reference = WithLoss(64)
    reference.load_state_dict(model.state_dict())
    called = memplan.compile(model, torch.randn(64, 64))
    optimizers = [torch.optim.AdamW(one.parameters(), foreach=True) for one in (model, reference)]
    for rows in (64, 48, 64, 48, 32, 64):
        x = torch.randn(rows, 64)
        for one, optimizer in zip((called, reference), optimizers, strict=True):
            optimizer.zero_grad()
            one(x).backward()
            optimizer.step()
        with torch.no_grad():
            assert torch.equal(called(x), reference(x))
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    assert isinstance(called, CompiledModule)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "NAdam", "RAdam", "Adamax"])
def test_bytes_of_a_step_are_those_that_it_allocates(name: str, foreach: bool) -> None:
    model = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 100))
    extra = {"momentum": 0.9, "nesterov": True} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, foreach=foreach, **extra)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    was = [p.detach().clone() for p in model.parameters()]
    predicted = bytes_of_step(optimizer)
    assert all(map(torch.equal, was, model.parameters())), "nothing has been updated"
    assert not any("exp_avg" in state for state in optimizer.state.values())
    for _ in range(2):
        optimizer.step()
        schedule.step()
    real = max(accumulate(allocations(optimizer.step)), default=0)
    numbers = 256  # bytes: counters of steps, and numbers that kernels take as tensors, are on the host
    assert predicted is not None
    assert predicted <= real <= predicted + numbers

"""Several calls of a compiled module that wait for their backward: eager's bits, in one arena."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.errors import BudgetInfeasible
from memplan.runtime import CompiledModule, compile
from memplan.runtime.memory.arena import Arena
from tests.models import Halves
from tests.runtime.reference import same_gradients, same_parameters
from tests.slow import slow

Step = Callable[[Any, int], torch.Tensor]


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.3), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))


def _x(seed: int, rows: int = 16) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


def _train(step: Step, *, steps: int = 3, **options: Any) -> CompiledModule:
    """Train a copy with eager and a compiled one with the same steps; losses, gradients and parameters are the same."""
    options.setdefault("sanitize", "poison")
    eager = _net()
    net = copy.deepcopy(eager)
    compiled = compile(net, _x(0), **options)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in (eager, net)]
    for n in range(steps):
        losses = []
        for call, optimizer in ((eager, optimizers[0]), (compiled, optimizers[1])):
            torch.manual_seed(n)
            losses.append(step(call, n))
            optimizer.step()
            optimizer.zero_grad(set_to_none=bool(n % 2))
        assert torch.equal(*losses)
        assert same_parameters(eager, net)
    return compiled


def _run(loss: torch.Tensor) -> torch.Tensor:
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def _contrastive(call: Any, n: int) -> torch.Tensor:
    one, two, three = (call(_x(n + k)) for k in range(3))
    loss = (one * two).mean() - (one * three).mean()
    return _run(loss)


def _first_backward_first(call: Any, n: int) -> torch.Tensor:
    one, two = call(_x(n)).square().sum(), call(_x(n + 1)).square().sum()
    if n % 2:
        two.backward()
        one.backward()
    else:
        one.backward()
        two.backward()
    return torch.stack([one, two]).detach()


def _acting(call: Any, n: int) -> torch.Tensor:
    waiting = call(_x(n)).square().sum()
    with torch.no_grad():
        target = call(_x(n + 1)) + call(_x(n + 2))
    loss = waiting + (call(_x(n + 3)) - target).square().sum()
    return _run(loss)


def _other_batches(call: Any, n: int) -> torch.Tensor:
    one, two = call(_x(n)).square().sum(), call(_x(n + 1, 5 + n % 2)).square().sum()
    loss = one + two
    return _run(loss)


@pytest.mark.parametrize("gradients", ["arena", "outside"])
@pytest.mark.parametrize("step", [_contrastive, _first_backward_first, _acting, _other_batches])
def test_calls_in_flight_train_as_eager(step: Step, gradients: Any) -> None:
    _train(step, gradients=gradients)


def test_a_rollout_beyond_the_limit_runs_eagerly_with_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memplan.runtime.execute.instances.MAX_IN_FLIGHT", 3)
    eager = _net()
    net = copy.deepcopy(eager)
    compiled = compile(net, _x(0), sanitize="poison")
    for n in range(3):
        results = []
        for call in (eager, compiled):
            torch.manual_seed(n)
            rewards = [call(_x(n + k)).square().mean() for k in range(7)]
            loss = torch.stack(rewards).sum()
            results.append(_run(loss))
        assert torch.equal(*results)
        assert same_gradients(eager, net)
    assert sum("wait for their backward; further ones run eagerly" in r.message for r in caplog.records) == 1
    assert compiled._calls.pending is not None
    (instances,) = compiled._calls.pending._instances.values()
    assert len(instances) == 3


def test_a_budget_that_holds_one_call_says_so() -> None:
    net, x = _net(), _x(0)
    compiled = compile(net, x, budget=memplan.plan(net, x).total + 2048)
    waiting = compiled(x).sum()
    with pytest.raises(BudgetInfeasible, match="another call while one waits for its backward needs") as caught:
        compiled(x)
    waiting.backward()
    net.zero_grad()
    compiled(x).sum().backward()
    net.zero_grad()
    large = compile(net, x, budget=2 * caught.value.smallest)
    (large(x) + large(x)).sum().backward()


def test_copies_and_evaluation_after_calls_have_waited(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="memplan"):
        compiled = _train(_contrastive)
    assert sum("while another one waits for its backward" in r.message for r in caplog.records) == 1
    twin = copy.deepcopy(compiled)
    compiled.eval()
    twin.eval()
    with torch.no_grad():
        assert torch.equal(compiled(_x(3)), twin(_x(3)))
        assert torch.equal(compiled(_x(3, 5)), twin(_x(3, 5)))


def test_dropped_outputs_free_their_programs() -> None:
    compiled = _train(_contrastive, sanitize=None)
    held = [compiled(_x(k)) for k in range(6)]
    assert compiled._calls.pending is not None
    assert len(compiled._calls.pending.coordinator.waiting) == 6
    del held
    gc.collect()
    assert not compiled._calls.pending.coordinator.waiting


@pytest.mark.parametrize("rows", [slow((512, 512, 512, 512)), (512, 500, 490, 480)])
def test_a_budget_holds_for_all_calls_in_flight(rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with the arena of the first call, and for the first call of another shape."""
    alive: weakref.WeakSet[Arena] = weakref.WeakSet()
    real = Arena.__init__

    def init(self: Arena, *args: Any) -> None:
        real(self, *args)
        alive.add(self)

    monkeypatch.setattr(Arena, "__init__", init)
    net, x = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU()), torch.randn(512, 64)
    alone = memplan.plan(net, x, gradients="outside")
    budget = alone.total + alone.arena_size * 3 // 2
    compiled = memplan.compile(net, x, budget=budget)
    results: list[torch.Tensor] = []

    def call_all() -> None:
        for n in rows:
            results.append(compiled(x[:n]))
            blocks = {
                id(t): t.untyped_storage().nbytes()
                for arena in alive
                for memory in arena.memories
                for t in memory.allocated
            }
            assert alone.outside["parameters"] + alone.outside["inputs"] + sum(blocks.values()) <= budget

    with pytest.raises(BudgetInfeasible, match="another call while one waits"):
        call_all()
    assert results


def test_evaluation_leaves_the_arena_in_which_graphs_keep_a_budget() -> None:
    one, two = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2))
    x, backend = torch.randn(64, 64), memplan.Backend(arena_budget="1MiB")
    compiled = torch.compile(Halves(one, two), backend=backend)
    sizes = []
    for train in (True, True, True, *[False] * 7, True, True):
        with torch.set_grad_enabled(train):
            y = compiled(x)
        if train:
            y.sum().backward()
        sizes.append(backend.arena_size)
    assert sizes[-1] == sizes[2] <= 2**20

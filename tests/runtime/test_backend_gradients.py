"""Gradients of `torch.compile(backend=memplan.Backend())`: in the arena where a step is one graph, and never wrong."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memplan
from benchmarks.zoo import ZOO
from memplan import Backend
from tests.models import Halves
from tests.runtime.reference import same_gradients, same_parameters
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _block(size: int = 16) -> nn.Sequential:
    """A small model whose activations are larger than its gradients."""
    return nn.Sequential(nn.Linear(size, 4 * size), nn.ReLU(), nn.Linear(4 * size, size), nn.Tanh())


def _pair(seed: int = 0, size: int = 16) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(seed)
    model = _block(size)
    return model, copy.deepcopy(model)


def _compiled(model: nn.Module, backend: Backend) -> Callable[[Tensor], Tensor]:
    compiled: Callable[[Tensor], Tensor] = torch.compile(model, backend=backend)
    return compiled


def _same(model: nn.Module, eager: nn.Module) -> None:
    assert same_parameters(model, eager)
    assert same_gradients(model, eager)


def _in_arena(model: nn.Module, backend: Backend) -> list[bool]:
    """Return for each parameter whether its gradient has bytes of an arena."""
    arenas = [instance.runner.arena.memory for graph in backend.graphs for instance in graph.instances]
    spans = [(arena.data_ptr(), arena.data_ptr() + arena.nbytes) for arena in arenas]
    places = [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
    return [any(low <= place < high for low, high in spans) for place in places]


def _gradients(backend: Backend) -> list[str]:
    """Return where the gradients of each graph are."""
    plans = [plan for graph in backend.graphs for plan in graph.plans]
    return ["arena" if plan.graph.gradients_in_arena else "outside" for plan in plans]


def _step(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    for p in model.parameters():
        p.grad = None
    torch.autograd.backward(run(x).square().mean())


def _update(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.data.sub_(p.grad, alpha=0.1)


def test_gradients_of_one_graph_are_in_the_arena() -> None:
    model, eager = _pair()
    backend = Backend(sanitize="poison")
    run = _compiled(model, backend)
    for i in range(4):
        x = torch.randn(32, 16)
        for one, call in ((model, run), (eager, eager)):
            _step(one, call, x)
            _update(one)
        _same(model, eager)
        assert all(_in_arena(model, backend)), i
    assert _gradients(backend) == ["arena"]


def test_the_total_is_that_of_compile() -> None:
    model, inputs = ZOO["mlp"]("nano")
    backend = Backend()
    run = torch.compile(model, backend=backend)
    run(*inputs)
    (graph,) = backend.graphs
    assert graph.plans[0].total <= memplan.compile(model, inputs).plan.total


def test_gradients_that_are_still_set_are_added_to(caplog: pytest.LogCaptureFixture) -> None:
    model, eager = _pair()
    backend = Backend(sanitize="poison")
    run = _compiled(model, backend)
    with caplog.at_level(logging.INFO, "memplan"):
        for i in range(6):
            x = torch.randn(32, 16)
            for one, call in ((model, run), (eager, eager)):
                if i == 3:
                    for p in one.parameters():
                        p.grad = None
                call(x).square().mean().backward()
            _same(model, eager)
    assert not any(_in_arena(model, backend))
    assert _gradients(backend) == ["arena"]
    assert not [r.message for r in caplog.records if "from now on" in r.message]


def test_gradients_are_outside_within_a_budget_and_with_a_graph_break() -> None:
    limited, broken = Backend(budget="95%"), Backend()
    x = torch.randn(256, 16)
    runs = []
    for backend, model in ((limited, _block()), (broken, Halves(_block(), _block()))):
        runs.append(run := _compiled(model, backend))
        for _ in range(3):
            _step(model, run, x)
            assert not any(_in_arena(model, backend))
    assert _gradients(limited) == ["outside"]
    assert _gradients(broken)[0] == "outside"


class _Loops:
    """Two models with one backend, and their copies in eager, in a random loop."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.backend = Backend(sanitize="poison")
        self.pairs = [_pair(i, 8 + 8 * i) for i in range(2)]
        self.runs = [_compiled(model, self.backend) for model, _ in self.pairs]
        self.waiting: list[tuple[Tensor, Tensor]] = []  # losses whose backward has not run
        self.held: list[tuple[Tensor, Tensor]] = []
        self.most_waiting = self.choose.choice([1, 3, 3, 3])

    def call(self, i: int) -> None:
        if len(self.waiting) == self.most_waiting:
            return
        x = torch.randn(4 + self.choose.randrange(2), 8 + 8 * i)
        losses = self.runs[i](x).square().mean(), self.pairs[i][1](x).square().mean()
        self.waiting.append(losses)
        assert torch.equal(*losses)

    def backward(self, _: int) -> None:
        if self.waiting:
            for loss in self.waiting.pop(self.choose.randrange(len(self.waiting))):
                torch.autograd.backward(loss)

    def evaluate(self, i: int) -> None:
        x = torch.randn(4, 8 + 8 * i)
        with torch.no_grad():
            assert torch.equal(self.runs[i](x), self.pairs[i][1](x))

    def zero_grad(self, i: int) -> None:
        for model in self.pairs[i]:
            model.zero_grad()

    def update(self, i: int) -> None:
        if not self.waiting:
            for model in self.pairs[i]:
                _update(model)

    def hold(self, i: int) -> None:
        ours, theirs = (next(model.parameters()).grad for model in self.pairs[i])
        if ours is not None and theirs is not None:
            self.held.append((ours.view(-1)[:2], theirs.view(-1)[:2]))

    def drop(self, _: int) -> None:
        self.held.clear()

    def release(self, _: int) -> None:
        self.backend.release()


@pytest.mark.parametrize("seed", [seed if seed < 3 else slow(seed) for seed in range(40)])
def test_random_loops_train_like_eager(seed: int) -> None:
    """Calls, backwards, updates, evaluations and references to gradients in random orders, with poisoned bytes."""
    loops = _Loops(seed)
    does = [loops.call, loops.backward, loops.evaluate, loops.zero_grad, loops.update, loops.hold, loops.drop]
    for _ in range(30):
        loops.choose.choice([*does, loops.release])(loops.choose.randrange(2))
        for ours, theirs in loops.held:
            assert torch.equal(ours, theirs)
        for model, eager in loops.pairs:
            _same(model, eager)

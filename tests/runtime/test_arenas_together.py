"""Arenas that are no longer needed are freed before others are allocated, by the allocator's own events."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import memplan
from memplan.devices.measure import quiet_kineto
from memplan.runtime.dynamo.backend import Backend
from tests.models import BreaksInEval, Halves
from tests.steps import gradients_of

WIDTH, ROWS = 64, 2048
SMALL = ROWS * WIDTH  # bytes: a quarter of one activation


def _x(rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))


def _models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = BreaksInEval()
    return model, copy.deepcopy(model)


def _held(call: Callable[[], Any]) -> list[tuple[int, int]]:
    """Return what each memory event of a call allocates, and the bytes that then exist beyond those of before."""
    with quiet_kineto(), torch.autograd.profiler.profile(profile_memory=True) as profiler:
        call()
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())]
    return list(zip(sizes, itertools.accumulate(sizes), strict=True))


def _with(arena: int, held: list[tuple[int, int]]) -> int:
    """Return the bytes that exist, beyond those of before, when an arena of this size was allocated."""
    return max(now for size, now in held if size == arena)


def _train(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.zero_grad()
    loss = module(x).square().sum()
    loss.backward()
    return loss.detach()  # type: ignore[no-any-return]


def test_one_graph_and_several_have_their_arenas_in_turn() -> None:
    model, _ = _models()
    model.two = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
    eager = copy.deepcopy(model)
    x = _x()
    compiled = memplan.compile(model, x)
    for module in (compiled, eager):
        module.zero_grad()
        (module(x) + module(x)).sum().backward()
    assert torch.equal(_train(compiled, x), _train(eager, x))
    assert compiled._calls.pending is not None
    for training in (False, True):
        before = (
            compiled._calls.arena.held
            if compiled._calls.several is None
            else compiled._calls.several.backend.arena_size
        )
        for module in (compiled, eager):
            module.zero_grad()
            module.train(training)
        held = _held(lambda: _train(compiled, x))
        assert compiled._calls.several is not None
        one, several = compiled._calls.arena.held, compiled._calls.several.backend.arena_size
        assert (one > 2 * SMALL, several > 2 * SMALL) == (training, not training)
        if training:
            assert _with(one, held) < one - before + SMALL
    _train(eager, x)
    torch.testing.assert_close(gradients_of(model), gradients_of(eager), rtol=0, atol=0)


def test_graphs_whose_arena_was_freed_share_one_again() -> None:
    """The first of the two is freed from the arena before the second has its peak."""
    torch.manual_seed(0)
    parts = (nn.Sequential(nn.Linear(n, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for n in (8, WIDTH))
    model, backend = Halves(*parts), Backend()
    compiled = torch.compile(model, backend=backend)
    for _ in range(3):
        expected = _train(compiled, _x())
    backend.place()
    together = backend.arena_size
    alone = sum(i.plan.arena_size for graph in backend.graphs for i in graph.instances)
    assert together < alone
    model.zero_grad()
    assert backend.release()
    assert backend.arena_size == 0
    assert torch.equal(_train(compiled, _x()), expected)
    assert backend.arena_size == together
    (memory,) = {i.runner.arena.memory for graph in backend.graphs for i in graph.instances}
    assert memory.nbytes == together


def test_a_copy_has_an_arena_from_its_first_call_on_and_for_evaluation_alone_if_it_is_only_evaluated() -> None:
    model, eager = _models()
    x = _x()
    compiled = memplan.compile(model, x)
    copies: list[Any] = []
    held = _held(lambda: copies.append(copy.deepcopy(compiled)))
    parameters = sum(p.nbytes for p in model.parameters())
    assert held[-1][1] < parameters + x.nbytes + 2 * 4096, "the copy has parameters and the example, and no arena"
    average, theirs = copies[0], copy.deepcopy(eager)
    _train(compiled, x)
    _train(eager, x)
    for one, two in ((average, model), (theirs, eager)):
        one.requires_grad_(False)
        for ours, new in zip(one.parameters(), two.parameters(), strict=True):
            ours.mul_(0.9).add_(new.detach(), alpha=0.1)
    assert torch.equal(average(x), theirs(x)), "called with gradients enabled, and none to compute"
    whole = memplan.plan(theirs.requires_grad_(), x).arena_size
    evaluation = memplan.plan(theirs, x, train=False).arena_size
    assert average._calls.arena.nbytes == evaluation < whole
    average.requires_grad_()
    assert torch.equal(_train(average, x), _train(theirs, x)), "a copy can be trained later"
    torch.testing.assert_close(gradients_of(average), gradients_of(theirs), rtol=0, atol=0)
    assert average.plan.fingerprint == compiled.plan.fingerprint

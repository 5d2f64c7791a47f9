"""Arenas that are no longer needed are freed before others are allocated, by the allocator's own events."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.devices.measure import quiet_kineto
from memplan.errors import BudgetInfeasible
from memplan.runtime import measured_budget
from memplan.runtime.api import step_builder
from memplan.runtime.dynamo.backend import Backend
from memplan.runtime.memory.shared_arena import release_arenas

WIDTH, ROWS = 64, 2048
SMALL = ROWS * WIDTH  # bytes: a quarter of one activation


class BreaksInEval(nn.Module):
    """Looks at its results in evaluation only."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.one(x).tanh()
        if not self.training and hidden.sum() > 0:
            hidden = hidden * 2
        out: torch.Tensor = self.two(hidden)
        return out


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


@pytest.mark.parametrize("several_wait", [False, True])
def test_one_graph_and_several_have_their_arenas_in_turn(several_wait: bool) -> None:
    model, eager = _models()
    x = _x()
    compiled = memplan.compile(model, x)
    if several_wait:
        for module in (compiled, eager):
            module.zero_grad()
            (module(x) + module(x)).sum().backward()
    assert torch.equal(_train(compiled, x), _train(eager, x))
    assert (compiled._calls.pending is not None) is several_wait
    for training in (False, True):
        before = (
            compiled._calls.arena.nbytes
            if compiled._calls.several is None
            else compiled._calls.several.backend.arena_size
        )
        for module in (compiled, eager):
            module.zero_grad()
            module.train(training)
        held = _held(lambda: _train(compiled, x))
        assert compiled._calls.several is not None
        one, several = compiled._calls.arena.nbytes, compiled._calls.several.backend.arena_size
        assert (one > 2 * SMALL, several > 2 * SMALL) == (training, not training)
        if training:
            assert _with(one, held) < one - before + SMALL
    _train(eager, x)
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


def test_a_new_program_is_tried_after_the_arena_of_several_graphs_was_freed() -> None:
    model, _ = _models()
    compiled = memplan.compile(model, _x(8))
    model.eval()
    _held(lambda: _train(compiled, _x()))  # the profiler sees what is freed if it saw its allocation
    model.zero_grad()
    model.train()
    assert compiled._calls.several is not None
    several = compiled._calls.several.backend.arena_size
    held = _held(lambda: _train(compiled, _x()))  # another batch: a program of its own
    arena = compiled._calls.arena.nbytes
    assert arena > 2 * SMALL
    assert _with(arena, held) < arena - several + SMALL


class TwoHalves(nn.Module):
    """Two graphs, the first of which is freed from the arena before the second has its peak."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.one(x).tanh()
        torch._dynamo.graph_break()
        found: torch.Tensor = self.two(hidden).tanh()
        return found


def _halves() -> tuple[nn.Module, Backend, Callable[..., Any]]:
    torch.manual_seed(0)
    model, backend = TwoHalves(), Backend()
    return model, backend, torch.compile(model, backend=backend)


def test_graphs_whose_arena_was_freed_share_one_again() -> None:
    model, backend, compiled = _halves()
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


def test_arenas_of_other_threads_are_freed_too() -> None:
    _, backend, compiled = _halves()
    losses = [_train(compiled, _x())]
    inside, may_end = threading.Event(), threading.Event()

    def hook(event: Any) -> None:
        inside.set()
        assert may_end.wait(20)

    def work() -> None:
        losses.append(_train(compiled, _x()))
        with backend.hooks.add(hook), torch.no_grad():
            compiled(_x())

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(20)
    before = backend.arena_size
    assert not backend.release(), "another thread runs a call"
    assert backend.arena_size == before > 0
    may_end.set()
    thread.join()
    losses.append(_train(compiled, _x()))
    assert backend.release()
    assert backend.arena_size == 0
    losses.append(_train(compiled, _x()))
    assert all(torch.equal(loss, losses[0]) for loss in losses)


def test_graphs_that_other_threads_make_meanwhile_are_no_error() -> None:
    _, backend, compiled = _halves()
    _train(compiled, _x())
    (first, *_) = backend.graphs

    def adds_one(instances: Any) -> Any:
        for n, instance in enumerate(instances):
            first._instances[n] = []  # as another thread's first call does
            yield instance

    assert release_arenas(adds_one(instance for graph in backend.graphs for instance in graph.instances))
    assert backend.arena_size == 0


def test_a_program_that_is_refused_leaves_no_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    model, eager = _models()
    compiled = memplan.compile(model, _x(8), budget="8MiB")
    _train(compiled, _x(8))
    model.zero_grad()
    with monkeypatch.context() as patched:
        patched.setattr(measured_budget, "excess", lambda runner: 1)  # whatever is planned needs too much
        caught: list[Any] = []

        def refused() -> None:
            with pytest.raises(BudgetInfeasible) as error:
                compiled(_x())
            caught.append(error)  # its traceback has the frames of the refused program

        held = _held(refused)
    assert max(size for size, _ in held) > 4 * SMALL
    assert held[-1][1] < SMALL
    assert torch.equal(_train(compiled, _x(8)), _train(eager, _x(8)))


def test_a_step_that_is_refused_leaves_no_arena_and_tries_have_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, eager = _models()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (model, eager)]
    loss = nn.MSELoss()
    step = memplan.compile_step(
        model, optimizers[0], lambda out: loss(out, torch.zeros_like(out)), _x(8), budget="8MiB"
    )
    step(_x(8))
    tried: list[Any] = []
    rooms: list[int] = []

    def excess(runner: Any) -> int:
        tried.append(runner)  # something refers to it while others are tried
        return 1

    def replan(*args: Any, room: int) -> Any:
        rooms.append(room)
        return measured_budget.replan(*args, room=room)

    with monkeypatch.context() as patched:
        patched.setattr(measured_budget, "excess", excess)
        patched.setattr(step_builder, "replan", replan)
        caught: list[Any] = []

        def refused() -> None:
            with pytest.raises(BudgetInfeasible) as error:
                step._builder.build((_x(),), {})
            caught.append(error)

        held = _held(refused)
    arena = max(size for size, _ in held)
    assert arena > 4 * SMALL
    assert sum(size == arena for size, _ in held) > 1
    assert _with(arena, held) < arena + SMALL
    assert held[-1][1] < SMALL
    assert len(tried) > 1
    assert set(rooms) == {step.plan.arena_size}, "what the arena has in any case, for the other program"
    ours = [step(_x(8)), step(_x())]
    theirs = []
    for x in (_x(8), _x(8), _x()):
        optimizers[1].zero_grad()
        out = eager(x)
        theirs.append(loss(out, torch.zeros_like(out)))
        theirs[-1].backward()
        optimizers[1].step()
    assert all(map(torch.equal, ours, theirs[1:]))


def test_a_copy_has_an_arena_from_its_first_call_on_and_for_evaluation_alone_if_it_is_only_evaluated() -> None:
    model, eager = _models()
    x = _x()
    compiled = memplan.compile(model, x)
    copies: list[Any] = []
    held = _held(lambda: copies.append(copy.deepcopy(copy.deepcopy(compiled))))
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
    for p, q in zip(average.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
    assert average.plan.fingerprint == compiled.plan.fingerprint
    for module in (average, theirs):
        module.zero_grad()
        (module(x) + module(x)).sum().backward()
    assert average._calls.pending is not None, "several calls wait, as in what it is a copy of"
    for p, q in zip(average.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


def test_a_copy_that_breaks_when_it_is_first_evaluated_runs_as_several_graphs() -> None:
    model, eager = _models()
    compiled = copy.deepcopy(memplan.compile(model, _x(8)))
    with torch.no_grad():
        assert torch.equal(compiled.eval()(_x(8)), eager.eval()(_x(8)))
    assert compiled._calls.several is not None
    assert torch.equal(_train(compiled.train(), _x(8)), _train(eager.train(), _x(8)))

"""Ops that only raise, and the sanitizers: what eager refuses is refused; what reads or writes elsewhere is seen."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.core.choices import Sanitize
from memplan.core.problem import Buffer
from memplan.errors import ArenaCorruption, UnsupportedGraph
from memplan.runtime import CompiledModule, compile_step
from memplan.runtime import compile as memplan_compile
from memplan.runtime.debug.hooks import StepEvent, When
from memplan.runtime.debug.sanitizers import Sanitizers
from memplan.runtime.execute.cuda_graphs import CudaGraphProgram
from memplan.trace import trace
from tests.models import Made
from tests.slow import slow
from tests.steps import Outcome, outcome_of

Op = Callable[[torch.Tensor], torch.Tensor]
_Error: type[Exception] = torch.linalg.LinAlgError  # type: ignore[attr-defined]
_SINGULAR = torch.zeros(2, 6, 6)


def _well_conditioned(y: torch.Tensor) -> torch.Tensor:
    return y @ y.mT + y.square().sum() * torch.eye(6)


class _MatrixOp(nn.Module):
    """Scales, applies an op to a matrix that is singular where the input is zero, and counts its calls."""

    calls: torch.Tensor

    def __init__(self, op: Op) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.op = op
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.scale = nn.Parameter(torch.randn(6, 6))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.op(_well_conditioned(x * self.weight))
        return (y * self.scale).tanh().sum()


OPS: dict[str, Op] = {
    "inv": torch.linalg.inv,
    "solve": lambda a: torch.linalg.solve(a, a.sin()),
    "cholesky": torch.linalg.cholesky,
    "tensorinv": lambda a: torch.linalg.tensorinv(a[0].reshape(2, 3, 3, 2), ind=2).reshape(6, 6),
    "matrix_power": lambda a: torch.linalg.matrix_power(a, -2),
}


def _assert_equal(ours: Outcome, theirs: Outcome) -> None:
    assert len(ours.gradients) == 2
    assert ours.same_as(theirs)


@pytest.mark.parametrize("name", ["inv", *map(slow, ("solve", "cholesky", "tensorinv", "matrix_power"))])
def test_numbers_are_eagers_and_so_is_the_error(name: str) -> None:
    net, x = _MatrixOp(OPS[name]), torch.randn(2, 6, 6)
    eager = copy.deepcopy(net)
    compiled = memplan_compile(net, (x,), sanitize="poison")
    for _ in range(2):
        _assert_equal(outcome_of(compiled, compiled, x), outcome_of(eager, eager, x))
        x = torch.randn(2, 6, 6)
    with pytest.raises(_Error) as theirs:
        eager(_SINGULAR)
    with pytest.raises(_Error) as ours:
        compiled(_SINGULAR)
    assert str(ours.value) == str(theirs.value)
    assert torch.equal(net.calls + 1, eager.calls), "eager has counted the call that failed"
    with torch.no_grad():
        net.calls.copy_(eager.calls)
    _assert_equal(outcome_of(compiled, compiled, x), outcome_of(eager, eager, x))


def test_a_step_that_fails_changes_nothing() -> None:
    net, x = _MatrixOp(torch.linalg.inv), torch.randn(2, 6, 6)
    eager = copy.deepcopy(net)
    ours, theirs = (torch.optim.SGD(n.parameters(), lr=0.1, momentum=0.9, fused=True) for n in (net, eager))
    step = compile_step(net, ours, lambda loss: loss, (x,), sanitize="poison")
    for given in (x, _SINGULAR, x.sin()):
        before = [p.clone() for p in (*net.parameters(), net.calls)]
        if given is _SINGULAR:
            with pytest.raises(_Error, match=r"linalg\.inv"):
                step(given)
            assert all(torch.equal(p, q) for p, q in zip((*net.parameters(), net.calls), before, strict=True))
        else:
            theirs.zero_grad()
            loss = eager(given)
            loss.backward()
            theirs.step()
            assert torch.equal(step(given), loss.detach())
            assert all(torch.equal(p, q) for p, q in zip(net.parameters(), eager.parameters(), strict=True))


def test_an_example_that_eager_refuses_can_be_compiled() -> None:
    net, x = _MatrixOp(torch.linalg.cholesky), torch.randn(2, 6, 6)
    compiled = memplan_compile(net, (_SINGULAR,))
    eager = copy.deepcopy(net)
    _assert_equal(outcome_of(compiled, compiled, x), outcome_of(eager, eager, x))


def test_a_recorded_step_takes_no_check() -> None:
    net, x = _MatrixOp(torch.linalg.inv), torch.randn(2, 6, 6)
    program: Any = type("Program", (), {"traced": trace(net, (x,)), "inputs": ()})
    with pytest.raises(UnsupportedGraph, match="recorded step"):
        CudaGraphProgram(program, None, whole=False)  # type: ignore[arg-type]


def _compiled(sanitize: Sanitize | None) -> tuple[CompiledModule, torch.Tensor]:
    """A model with activations of numbers, and a mask."""
    torch.manual_seed(0)
    x = torch.randn(5, 6)
    model = Made(
        lambda m, x: m.two(torch.where((h := m.one(x)) > 0, h, h.sin()).tanh()).square().mean(),
        one=nn.Linear(6, 8),
        two=nn.Linear(8, 8),
    )
    return memplan.compile(model, x, gradients="outside", sanitize=sanitize), x


def _bytes(compiled: CompiledModule, buffer: Buffer) -> torch.Tensor:
    """Return the bytes of the storage in the arena, without what surrounds it."""
    storage = next(s for s in compiled.plan.graph.storages if s.name == buffer.id)
    start = compiled.plan.solution.offsets[buffer.id] + compiled.plan.redzone
    return compiled._calls.arena.memory[start : start + storage.nbytes]


def _is_poisoned(memory: torch.Tensor) -> bool:
    numbers = memory.numel() % 4 == 0 and bool(memory.view(torch.float32).isnan().all())
    return numbers or bool((memory == 0x7F).all())


def test_poison_leaves_what_is_alive_alone() -> None:
    compiled, _ = _compiled("poison")
    guards, plan = compiled._calls.programs.main.program.sanitizers, compiled.plan
    for buffer in plan.problem.buffers:
        memory = _bytes(compiled, buffer).zero_()
        for step in range(buffer.live.start, buffer.live.end):
            for hook in (*(guards.before(step) if step > buffer.live.start else ()), *guards.after(step)):
                if step < buffer.live.end - 1:
                    hook()
        assert not memory.any(), buffer


@pytest.mark.parametrize("sanitize", ["poison", None])
def test_a_late_reader_sees_poison(sanitize: Sanitize | None) -> None:
    """After the step, nothing in the arena is alive: whoever reads there now reads too late."""
    compiled, x = _compiled(sanitize)
    compiled(x).backward()
    seen = [_is_poisoned(_bytes(compiled, buffer)) for buffer in compiled.plan.problem.buffers]
    assert seen
    assert all(seen) is (sanitize == "poison")


def test_an_early_reader_sees_poison() -> None:
    """An op that reads what nobody has written finds it: here, the first op of a storage."""
    compiled, x = _compiled("poison")
    plan = compiled.plan
    found: dict[int, bool] = {}
    births = {b.live.start: b for b in plan.problem.buffers}

    def look(step: int) -> None:
        found[step] = _is_poisoned(_bytes(compiled, births[step]))

    steps = range(len(plan.schedule.order))
    befores = tuple((partial(look, step),) if step in births else () for step in steps)
    meter = Sanitizers(befores, tuple(() for _ in steps))
    compiled._calls.arena.memory.zero_()
    compiled._calls.programs.main.time(meter)
    compiled(x).backward()
    assert found == dict.fromkeys(births, True)


@pytest.mark.parametrize("past_the_end", [True, False])
def test_a_write_outside_of_a_buffer_raises(*, past_the_end: bool) -> None:
    compiled, x = _compiled("redzone")
    plan = compiled.plan
    buffer = max(plan.problem.buffers, key=lambda b: b.live.end - b.live.start)
    step = buffer.live.start + 1
    inside = _bytes(compiled, buffer)
    at = inside.storage_offset() + (inside.numel() if past_the_end else -1)
    if past_the_end:
        at = plan.solution.offsets[buffer.id] + buffer.size - plan.redzone
    compiled(x).backward()

    def write(event: StepEvent) -> None:
        if event.step == step and event.when is When.START:
            compiled._calls.arena.memory[at] ^= 1

    with (
        compiled.hooks.add(write),
        pytest.raises(ArenaCorruption, match=f"at step {step}: bytes next to buffer {re.escape(repr(buffer.id))}"),
    ):
        compiled(x).backward()

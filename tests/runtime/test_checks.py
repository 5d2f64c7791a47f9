"""Ops that only raise: eager's numbers where they do not, eager's error and an unchanged model where they do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memplan.errors import UnsupportedGraph
from memplan.runtime import compile as memplan_compile
from memplan.runtime import compile_step
from memplan.runtime.execute.cuda_graphs import CudaGraphProgram
from memplan.trace import trace
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

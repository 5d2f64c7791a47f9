"""`memplan.record`: allocations of a run that cannot be traced, placed by the solver."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memplan
from memplan.core.validate import validate
from memplan.errors import MemplanError


def test_known_allocations_are_found_and_placed() -> None:
    kept: list[torch.Tensor] = []

    def step() -> None:
        one = torch.ones(1000)
        two = torch.ones(2000)
        del one
        three = torch.ones(500)
        kept[:] = [two.sum(), three.clone()]

    recording = memplan.record(step)
    sizes = sorted(b.size for b in recording.problem.buffers)
    assert sizes[-3:] == [2048, 4032, 8000], "rounded up to 64 bytes"
    assert recording.kept == 4 + 2000
    assert recording.max_live == recording.arena_size == 4032 + 8000
    assert recording.peak >= recording.max_live - 64
    assert recording.fragmentation == 0
    validate(recording.problem, recording.solution)
    assert "aten::" in recording.report()
    assert recording.to_text()


class Experts(nn.Module):
    """Which expert runs depends on the data, which no tracer follows."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            chosen = (x.sum(1) % 4).long() == i
            if bool(chosen.any()):
                out[chosen] = expert(x[chosen])
        return out


def test_a_training_step_that_cannot_be_traced() -> None:
    model, x = Experts(), torch.randn(64, 32)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    with pytest.raises(memplan.MemplanError):
        memplan.plan(model, x)
    recording = memplan.record(step, warm_up=2)
    assert recording.max_live <= recording.arena_size
    assert recording.max_live + recording.kept > 0
    validate(recording.problem, recording.solution)
    before = [p.clone() for p in model.parameters()]
    memplan.record(step, warm_up=0)
    assert not all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True)), "the step really ran"


def test_nothing_allocated_and_a_profiler_in_the_way() -> None:
    recording = memplan.record(lambda: None)
    assert (recording.arena_size, recording.kept, recording.peak) == (0, 0, 0)
    assert recording.report()
    with torch.autograd.profiler.profile(), pytest.raises(MemplanError, match="profiler"):
        memplan.record(lambda: None)

"""The sanitizers themselves: a read outside of a buffer's life sees NaN, a write outside of its bytes raises."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from torch import nn

import memplan
from memplan.core.choices import Sanitize
from memplan.core.problem import Buffer
from memplan.errors import ArenaCorruption
from memplan.runtime import CompiledModule
from memplan.runtime.debug.hooks import StepEvent, When
from memplan.runtime.debug.sanitizers import Sanitizers


class Masking(nn.Module):
    """Activations of numbers, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.one(x)
        out: torch.Tensor = self.two(torch.where(h > 0, h, h.sin()).tanh())
        return out.square().mean()


def _compiled(sanitize: Sanitize | None) -> tuple[CompiledModule, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(5, 6)
    return memplan.compile(Masking(), x, gradients="outside", sanitize=sanitize), x


def _bytes(compiled: CompiledModule, buffer: Buffer) -> torch.Tensor:
    """Those of the storage in the arena, without what surrounds it."""
    storage = next(s for s in compiled.plan.graph.storages if s.name == buffer.id)
    start = compiled.plan.solution.offsets[buffer.id] + compiled.plan.redzone
    return compiled._calls.arena.memory[start : start + storage.nbytes]


def _is_poisoned(memory: torch.Tensor) -> bool:
    numbers = memory.numel() % 4 == 0 and bool(memory.view(torch.float32).isnan().all())
    return numbers or bool((memory == 0x7F).all())


def test_poison_leaves_what_is_alive_alone() -> None:
    compiled, _ = _compiled("poison")
    guards, plan = compiled._calls.selector.main.program.sanitizers, compiled.plan
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
    """What a storage's first op finds there, as an op that reads what nobody has written would."""
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
    compiled._calls.selector.main.time(meter)
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

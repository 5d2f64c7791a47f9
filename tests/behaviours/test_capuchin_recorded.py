"""Capuchin: graph-agnostic (row P8): what cannot be traced, recorded once and replayed at planned addresses."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch

import memplan
from memplan.recording.allocator import Allocator, host_backing
from memplan.runtime.recorded import recording_of


def test_P8_a_step_that_no_tracer_reads_is_planned() -> None:  # noqa: N802
    """How often the loop runs depends on data."""

    class Loop(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            while bool(x.abs().mean() > 0.1):
                x = self.layer(x).tanh() * 0.5
            return x.square().mean()

    model = Loop()

    def step() -> None:
        model(torch.ones(128, 64)).backward()

    with pytest.raises(memplan.MemplanError):
        memplan.plan(model, torch.ones(128, 64))
    recording = memplan.record(step, warm_up=2)
    assert recording.problem.buffers
    assert recording.max_live <= recording.arena_size <= sum(recording.tape.sizes)


def test_P8_later_steps_are_served_from_the_plan_until_one_differs() -> None:  # noqa: N802
    """Through the C functions that PyTorch's allocator hook takes; the host's memory stands for the GPU's."""
    allocator = Allocator(host_backing())
    word = ctypes.c_size_t
    allocate = ctypes.CFUNCTYPE(word, word, ctypes.c_int, word)(allocator.pointers[0])
    release = ctypes.CFUNCTYPE(None, word, word, ctypes.c_int, word)(allocator.pointers[1])

    def step(layers: int) -> list[int]:
        """Saves an activation for each layer, and gives them up on the way back."""
        sizes = random.Random(0).choices([4096, 8192, 20_000], k=layers)
        saved = [(allocate(size, 0, 0), size) for size in sizes]
        for address, size in reversed(saved):
            gradient = allocate(size, 0, 0)
            release(address, size, 0, 0)
            release(gradient, size, 0, 0)
        return [address for address, _ in saved]

    allocator.start_recording()
    step(6)
    recording = recording_of(allocator.stop_recording(), 512, allocator)
    with recording.replay():
        one = step(6)
    with recording.replay():
        two = step(6)
    assert one == two, "planned addresses, every time"
    assert max(one) - min(one) < recording.arena_size
    with recording.replay():
        three = step(7)
    assert three[:6] == one, "as far as it is the recorded step"
    assert not min(one) <= three[6] < min(one) + recording.arena_size, "ordinary memory from there on"
    assert (allocator.replayed, allocator.differences, allocator.in_arena) == (2, 1, 0)

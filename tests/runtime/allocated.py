"""Holds what a compiled module allocates in a step, seen from outside by torch's profiler, against its plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.peak_measure import covered, live_bytes
from memplan.devices.measure import quiet_kineto
from memplan.runtime import CompiledModule

_TANGENT = 4  # bytes: the gradient of a float32 loss, which autograd itself makes


def allocations(step: Any) -> list[int]:
    """Signed bytes of every allocation and release on the CPU during `step()`, in order."""
    with quiet_kineto(), torch.autograd.profiler.profile(profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    return [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]


def other_bytes(model: nn.Module, args: tuple[Any, ...]) -> int:
    """Bytes of all live tensors but parameters, buffers and inputs: a U-Net of diffusers has constants of its own."""
    storages = [t.untyped_storage() for t in (*model.parameters(), *model.buffers(), *args) if torch.is_tensor(t)]
    return live_bytes() - covered((s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages)


def assert_allocates_what_it_plans(
    model: nn.Module, args: tuple[Any, ...], compiled: CompiledModule, before: int = 0
) -> None:
    """Assert that a step allocates what the plan says beside the arena, and that its total has all bytes on the device.

    `before`: the bytes of all tensors that were alive and no part of the step.
    """
    kept: list[torch.Tensor] = []

    def step() -> None:
        loss = compiled(*args)
        loss.backward()
        kept.append(loss)

    step()
    kept.clear()
    model.zero_grad()
    standing = live_bytes() - before
    deltas = allocations(step)
    now = peak = 0
    for delta in deltas:
        now += delta
        peak = max(peak, now)
    plan = compiled.plan
    owned = plan.outside["outputs"] + plan.outside["gradients"]
    predicted = max(plan.outside_profile) + _TANGENT
    assert now == pytest.approx(owned, rel=0.01, abs=_TANGENT), "what the caller holds after the step"
    assert peak == pytest.approx(predicted, rel=0.01, abs=_TANGENT), "the most that was allocated during the step"
    assert standing + peak <= plan.total, "all tensors that were alive before the step, and the most that it allocated"

"""What is allocated while a step runs, seen from outside by torch's profiler, is what the plan says is outside."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.peak_measure import covered, live_bytes
from benchmarks.zoo import ZOO
from memplan.core.evictions import TRANSFERS
from memplan.devices.measure import quiet_kineto
from memplan.runtime import CompiledModule, compile_step
from memplan.runtime import compile as memplan_compile
from tests.runtime.budgets import FAST_LINK, QUICK, QUICK_RECOMPUTE

_TANGENT = 4  # bytes: the gradient of a float32 loss, which autograd itself makes


def _allocations(step: Any) -> list[int]:
    """Signed bytes of every allocation and release on the CPU during `step()`, in order."""
    with quiet_kineto(), torch.autograd.profiler.profile(profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    return [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]


def _others(model: nn.Module, args: tuple[Any, ...]) -> int:
    """Bytes of all live tensors but parameters, buffers and inputs: a U-Net of diffusers has constants of its own."""
    storages = [t.untyped_storage() for t in (*model.parameters(), *model.buffers(), *args) if torch.is_tensor(t)]
    return live_bytes() - covered((s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages)


def _assert_honest(model: nn.Module, args: tuple[Any, ...], compiled: CompiledModule, before: int = 0) -> None:
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
    deltas = _allocations(step)
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


@pytest.mark.parametrize("name", ZOO)
def test_allocated_bytes_equal_the_plan(name: str) -> None:
    model, args = ZOO[name]("nano")
    before = _others(model, args)
    compiled = memplan_compile(model, args)
    _assert_honest(model, args, compiled, before)
    assert compiled.plan.numbers <= 4 * len(compiled.plan.graph.ops)


@pytest.mark.parametrize("policy", [QUICK, QUICK_RECOMPUTE], ids=["offload", "recompute"])
@pytest.mark.parametrize("name", ["gpt2", "resnet", "vit"])
def test_allocated_bytes_equal_the_plan_under_a_budget(name: str, policy: Any) -> None:
    model, args = ZOO[name]("nano")
    before = _others(model, args)
    compiled = memplan_compile(model, args, arena_budget=0.7, policy=policy, costs=FAST_LINK, gradients="safe")
    plan, program = compiled.plan, compiled._selector.main.program
    assert plan.eviction is not None
    assert plan.evictions
    allocated = {"arena": program.arena.memory.untyped_storage().nbytes(), "host": program.host.memory.nbytes}
    assert allocated == {"arena": plan.arena_size, "host": plan.host_size}
    assert plan.arena_size <= plan.eviction.arena_budget
    moves = [i for i, op in enumerate(plan.graph.ops) if op.target in TRANSFERS]
    assert not any(plan.transient[i] for i in moves), "copies allocate nothing"
    _assert_honest(model, args, compiled, before + plan.host_size)


@pytest.mark.parametrize(("name", "batches"), [("mlp", 1), ("gpt2", 1), ("gpt2", 2)])
def test_all_bytes_of_a_whole_step_are_in_its_total(name: str, batches: int) -> None:
    """`batches`: those of an update. Two programs share constants that are computed, and the tensors of numbers."""
    own = 8 * (batches - 1)  # bytes of the constants that each trace holds, and that might be the user's
    before = live_bytes()
    model, inputs = ZOO[name]("nano")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = compile_step(model, optimizer, lambda loss: loss, inputs, accumulate=batches)
    for _ in range(2 * batches):
        step(*inputs)
    for _ in range(batches):
        standing = live_bytes() - before
        assert standing + max(accumulate(_allocations(lambda: step(*inputs))), default=0) <= step.plan.total + own


def test_nothing_is_left_out_of_the_total() -> None:
    model, args = ZOO["gpt2"]("nano")
    plan = memplan_compile(model, args).plan
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert plan.outside["parameters"] >= parameters
    parts = plan.arena_size + plan.outside["parameters"] + plan.outside["inputs"] + plan.outside["constants"]
    parts += plan.outside["tangents"]
    assert plan.numbers
    assert plan.total == parts + plan.numbers + max(plan.outside_profile)
    assert max(plan.outside_profile) >= plan.outside["outputs"] + plan.outside["gradients"]
    assert plan.temporaries is not None

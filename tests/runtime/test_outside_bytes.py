"""What is allocated while a step runs, seen from outside by torch's profiler, is what the plan says is outside."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from benchmarks.peak_measure import live_bytes
from benchmarks.zoo import ZOO
from memplan.core.evictions import TRANSFERS
from memplan.runtime import compile as memplan_compile
from memplan.runtime import compile_step
from tests.runtime.allocated import allocations, assert_allocates_what_it_plans, other_bytes
from tests.runtime.budgets import FAST_LINK, QUICK, QUICK_RECOMPUTE
from tests.slow import slow


def test_allocated_bytes_equal_the_plan_of_an_lstm() -> None:
    """The other models of the zoo are held to it in `test_zoo.py`, which compiles them."""
    model, args = ZOO["lstm"]("nano")
    before = other_bytes(model, args)
    assert_allocates_what_it_plans(model, args, memplan_compile(model, args), before)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("resnet", "offload"), slow("resnet", "recompute"), slow("gpt2", "offload"), slow("gpt2", "recompute"),
    ],
)  # fmt: skip
def test_allocated_bytes_equal_the_plan_under_a_budget(name: str, how: str) -> None:
    (model, args), policy = ZOO[name]("nano"), QUICK if how == "offload" else QUICK_RECOMPUTE
    before = other_bytes(model, args)
    compiled = memplan_compile(model, args, arena_budget=0.7, policy=policy, costs=FAST_LINK, gradients="outside")
    plan, program = compiled.plan, compiled._calls.selector.main.program
    assert plan.eviction is not None
    assert plan.evictions
    allocated = {"arena": program.arena.memory.untyped_storage().nbytes(), "host": program.host.memory.nbytes}
    assert allocated == {"arena": plan.arena_size, "host": plan.host_size}
    assert plan.arena_size <= plan.eviction.arena_budget
    moves = [i for i, op in enumerate(plan.graph.ops) if op.target in TRANSFERS]
    assert not any(plan.transient[i] for i in moves), "copies allocate nothing"
    assert_allocates_what_it_plans(model, args, compiled, before + plan.host_size)


@pytest.mark.parametrize(("name", "batches"), [("mlp", 1), ("mlp", 2), slow("gpt2", 2)])
def test_all_bytes_of_a_whole_step_are_in_its_total(name: str, batches: int) -> None:
    """`batches`: those of an update. Two programs share the constants that passes make, and the tensors of numbers."""
    before = live_bytes()
    model, inputs = ZOO[name]("nano")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = compile_step(model, optimizer, lambda loss: loss, inputs, accumulate=batches)
    for _ in range(2 * batches):
        step(*inputs)
    for _ in range(batches):
        standing = live_bytes() - before
        assert (
            standing + max(accumulate(allocations(lambda: step(*inputs))), default=0) <= step.plan.total + 64
        )  # and what kernels make of numbers

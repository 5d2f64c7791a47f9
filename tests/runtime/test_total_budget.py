"""A budget is the total: what is measured from outside is never above it, nor above what the plan says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from benchmarks.peak_measure import live_bytes
from memplan.core.plan import Plan
from memplan.devices.measure import peak_bytes
from memplan.errors import BudgetInfeasible, MemplanError
from memplan.runtime.execute.runner import Runner
from memplan.trace.traced import Source
from tests.models import Made
from tests.runtime.allocated import allocations
from tests.runtime.budgets import FAST_LINK, QUICK, QUICK_RECOMPUTE
from tests.runtime.reference import same_gradients
from tests.slow import slow

CLOSE = 0.003  # share of the total by which the prediction may be above what is measured


def _mlp() -> list[nn.Module]:
    """Layers with a saved activation each."""
    return [layer for _ in range(5) for layer in (nn.Linear(128, 128), nn.GELU())]


def _convolutions() -> list[nn.Module]:
    """Layers whose kernels allocate temporaries."""
    blocks = ((nn.Conv2d(c, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for c in (3, 16, 16, 16))
    return [layer for block in blocks for layer in block]


MODELS: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    "mlp": (_mlp, (1024, 128)),
    "convolutions": (_convolutions, (8, 3, 48, 48)),
}


POLICIES = {"offload": QUICK, "recompute": QUICK_RECOMPUTE}


def _model(name: str) -> tuple[nn.Module, torch.Tensor]:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    return Made(lambda m, x: m.layers(x).square().mean(), layers=nn.Sequential(*make())), torch.randn(shape)


def _held(runner: Runner) -> int:
    """Bytes that are there before a step: parameters, buffers, state, constants, inputs and the arena."""
    tensors = [*runner.parameter_guards.tensors(), *(b.tensor for b in runner.traced.bindings if b.tensor is not None)]
    tensors += [runner.traced.example_inputs[b.index] for b in runner.traced.bound(Source.INPUT)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values()) + runner.arena.memory.untyped_storage().nbytes()


def _peak(step: Any) -> int:
    """The most bytes that `step()` allocates beside what is there before, by torch's profiler."""
    return max(accumulate(allocations(step)))


def _measured(compiled: Any, x: torch.Tensor) -> int:
    """The peak of a training step, measured from outside."""
    kept: list[torch.Tensor] = []

    def step() -> None:
        kept[:] = [compiled(x)]
        kept[0].backward()  # type: ignore[no-untyped-call]

    step()
    kept.clear()
    compiled.zero_grad()
    return _held(compiled._calls.programs.main) + _peak(step)


def _assert_kept(plan: Plan, measured: int) -> None:
    assert plan.eviction is not None
    assert plan.eviction.budget is not None
    assert measured <= plan.total <= plan.eviction.budget
    assert measured >= (1 - CLOSE) * plan.total


def _combinations() -> list[Any]:
    """Each model within each budget by each policy; only the smallest model is fast, and convolutions once."""
    quick = [("mlp", 0.75, "offload"), ("mlp", "min", "recompute"), ("convolutions", 0.9, "recompute")]
    every = [(name, budget, policy) for name in MODELS for budget in (0.9, 0.75, "min") for policy in POLICIES]
    return [one if one in quick else slow(*one) for one in every]


@pytest.mark.parametrize(("name", "budget", "how"), _combinations())
def test_the_measured_peak_is_within_the_budget_and_the_plan(name: str, budget: Any, how: str) -> None:
    (model, x), policy = _model(name), POLICIES[how]
    try:
        compiled = memplan.compile(model, x, budget=budget, policy=policy, costs=FAST_LINK)
    except BudgetInfeasible as error:
        compiled = memplan.compile(model, x, budget=error.smallest, policy=policy, costs=FAST_LINK)
    assert compiled.plan.evictions
    assert compiled.plan.temporaries is not None
    _assert_kept(compiled.plan, _measured(compiled, x))


@pytest.mark.parametrize("kind", [slow(torch.optim.SGD), torch.optim.AdamW])
def test_a_whole_step_is_kept_with_its_optimizer_state(kind: Any) -> None:
    """The state does not exist before the step is compiled, and counts all the same."""
    model, x = _model("mlp")
    optimizer = kind(model.parameters(), lr=1e-3)
    step = memplan.compile_step(model, optimizer, lambda loss: loss, x, budget=0.75, policy=QUICK_RECOMPUTE)
    step(x)
    assert step.plan.outside["optimizer state"] >= sum(
        t.nbytes for state in optimizer.state.values() for t in state.values() if t.ndim
    )
    measured = _held(step._main.program) + _peak(lambda: step(x))
    _assert_kept(step.plan, measured)


@pytest.mark.slow
def test_temporaries_that_break_a_budget_are_planned_around_or_refused() -> None:
    model, x = _model("convolutions")
    plain = memplan.compile(model, x, budget="1GiB")  # not held against eager
    predicted, measured = memplan.plan(model, x).total, plain.plan.total
    assert predicted < measured, "the kernels of this model allocate temporaries"
    kept = memplan.compile(model, x, budget=predicted, policy=QUICK_RECOMPUTE)
    assert memplan.plan(model, x, budget=predicted).evictions == ()
    assert kept.plan.evictions, "with the temporaries, it does not fit as it is"
    _assert_kept_at_most(kept, x, predicted)
    least = memplan.plan(model, x, budget="min", policy=QUICK_RECOMPUTE).total
    with pytest.raises(BudgetInfeasible, match="temporaries") as caught:
        memplan.compile(model, x, budget=least, policy=QUICK_RECOMPUTE)
    assert caught.value.where == "budget"
    assert caught.value.smallest > least
    _assert_kept_at_most(
        memplan.compile(model, x, budget=caught.value.smallest, policy=QUICK_RECOMPUTE), x, caught.value.smallest
    )


def _assert_kept_at_most(compiled: Any, x: torch.Tensor, budget: int) -> None:
    assert compiled.plan.eviction.budget == budget
    assert _measured(compiled, x) <= compiled.plan.total <= budget


def test_what_is_reserved_counts() -> None:
    model, x = _model("mlp")
    plain, reserved = memplan.plan(model, x), memplan.plan(model, x, reserve="1MiB")
    assert reserved.total == plain.total + (1 << 20)
    assert "reserve" in str(reserved.report())
    kept = memplan.plan(model, x, budget=plain.total, reserve="1MiB", policy=QUICK_RECOMPUTE)
    assert kept.total <= plain.total
    assert kept.evictions
    with pytest.raises(MemplanError, match="negative"):
        memplan.plan(model, x, reserve=-1)


def test_a_saved_plan_keeps_what_was_asked(tmp_path: Any) -> None:
    model, x = _model("mlp")
    total = int(memplan.plan(model, x).total * 0.8)
    compiled = memplan.compile(model, x, budget=total, reserve=4096, policy=QUICK_RECOMPUTE)
    compiled.plan.save(tmp_path / "plan.json")
    loaded = memplan.load(tmp_path / "plan.json")
    assert loaded.eviction is not None
    assert (loaded.eviction.budget, loaded.reserve) == (total, 4096)
    again = memplan.compile(model, x, plan=loaded)
    assert _measured(again, x) + 4096 <= total
    options = again._calls.builder.options
    assert (options.budget, options.reserve) == (total, 4096), "programs of other modes keep the same budget"
    model.zero_grad()
    with torch.no_grad():
        assert torch.equal(again(x), model(x))
    others: tuple[dict[str, Any], ...] = ({"budget": total}, {"arena_budget": 1}, {"host_budget": 1}, {"reserve": 1})
    for other in others:
        with pytest.raises(MemplanError, match="beside a plan"):
            memplan.compile(model, x, plan=loaded, **other)


def test_what_is_on_a_device_of_its_own_is_limited() -> None:
    model, x = _model("mlp")
    free = memplan.plan(model, x, device="cpu").on_device
    budget = int(free * 0.8)
    plan = memplan.compile(model, x, device="cpu", budget=budget, policy="flow", costs=FAST_LINK).plan
    assert plan.on_device <= budget < free
    with pytest.raises(BudgetInfeasible) as caught:
        memplan.plan(model, x, device="cpu", budget=4096, policy="flow", costs=FAST_LINK)
    assert caught.value.where == "budget"
    least = caught.value.smallest
    assert memplan.plan(model, x, device="cpu", budget=least, policy="flow", costs=FAST_LINK).on_device <= least


def test_the_total_of_each_of_several_devices_is_limited() -> None:
    model, x = _model("mlp")
    devices = ["cpu:0", "cpu:1"]
    free = memplan.plan(model, x, device=devices, reserve=1024)
    limit = max(free.on_section(section) for section in free.devices)
    assert limit == free.on_device == max(section.size for section in free.devices) + max(free.transient) + 1024
    with pytest.raises(BudgetInfeasible) as caught:
        memplan.plan(model, x, device=devices, budget=limit // 8, reserve=1024)
    assert caught.value.where == "budget"
    least = caught.value.smallest
    plan = memplan.plan(model, x, device=devices, budget=least, reserve=1024)
    assert all(section.budget == least for section in plan.devices)
    assert all(plan.on_section(section) <= least for section in plan.devices)


def test_programs_of_other_modes_keep_the_total() -> None:
    model, x = _model("mlp")
    total = int(memplan.plan(model, x).total * 0.8)
    compiled = memplan.compile(model, x, budget=total, policy=QUICK_RECOMPUTE)
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
    (_, other) = compiled._calls.programs
    assert other.arena.memory.data_ptr() == compiled._calls.arena.memory.data_ptr()
    kept = other.plan.eviction
    assert kept is not None
    assert kept.budget == total
    assert other.plan.total + other.arena.nbytes - other.plan.arena_size <= total


@pytest.mark.parametrize(("how", "none"), [("compile", True), ("backend", False)])
def test_gradients_accumulate_within_a_budget(how: str, none: bool) -> None:
    budget = 0.8
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.GELU())])
    reference, x = copy.deepcopy(model), torch.randn(256, 128)
    ones = torch.ones(256, 128)
    before = live_bytes() - sum(p.nbytes for p in model.parameters()) - x.nbytes - ones.nbytes
    called: Any = torch.compile(model, backend=memplan.Backend(budget=budget, policy="recompute"))
    if how == "compile":
        called = memplan.compile(model, x, budget=budget, policy="recompute", gradients="outside")
    for _ in range(2):
        for _ in range(3):
            called(x).backward(ones)
            reference(x).backward(ones)
        assert same_gradients(model, reference)
        for one in (model, reference):
            one.zero_grad(set_to_none=none)
    reference.zero_grad()
    called(x).backward(ones)
    standing = live_bytes() - before
    peak = standing + peak_bytes([lambda: called(x).backward(ones)], torch.device("cpu"))[0]
    limit = memplan.plan(model, x, budget=budget, policy="recompute").eviction
    assert limit is not None
    assert limit.budget is not None
    assert peak <= limit.budget

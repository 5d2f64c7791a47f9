"""Updates on the CPU's cores in a step with `device=`: the bits of a step without it, and state that stays at home."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import memplan
from benchmarks.zoo import ZOO
from memplan.core.evictions import TRANSFERS
from memplan.core.graph import StorageKind
from memplan.core.happens_before import CALLER, follow
from memplan.core.plan import Plan
from memplan.evict.costs import busy_seconds, simulate
from memplan.runtime import CompiledStep
from memplan.runtime.copies import ThreadCopies
from memplan.trace.optimizer import host_updates
from tests.runtime.budgets import HOST_UPDATES
from tests.slow import slow

Bits = list[torch.Tensor]
ADAMW, SGD = torch.optim.AdamW, torch.optim.SGD


def _step(
    name: str = "mlp", make: Callable[..., Any] = ADAMW, **options: Any
) -> tuple[CompiledStep, Callable[[], Bits]]:
    """Return a compiled step, and a function that trains it from the same start and returns what is left."""
    torch.manual_seed(0)
    model, batch = ZOO[name]("nano")
    optimizer = make(model.parameters(), lr=1e-2, **({} if make is ADAMW else {"momentum": 0.9}))
    step = memplan.compile_step(model, optimizer, lambda loss: loss, batch, divide=False, **options)
    before = {key: t.clone() for key, t in model.state_dict().items()}

    def states() -> Bits:
        return [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]

    def train() -> Bits:
        torch.manual_seed(1)
        model.load_state_dict(before)
        for t in states():
            t.zero_()
        losses = [step(*batch).clone() for _ in range(3)]
        return [*losses, *(t.detach().clone() for t in (*model.parameters(), *states()))]

    return step, train


def _same(one: Bits, two: Bits) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def _counts(plan: Plan) -> tuple[int, int]:
    """How many updates run on the host, and how many there are."""
    updates = [op for op in plan.graph.ops if "_fused_" in op.target and op.target.startswith("aten")]
    return sum(op.on_host for op in updates), len(updates)


def _lanes(step: CompiledStep) -> ThreadCopies:
    assert step._builder.arena is not None
    copies = step._builder.arena.copies
    assert isinstance(copies, ThreadCopies)
    return copies


@pytest.mark.parametrize(
    ("name", "kernels", "make", "clip", "budget"),
    [
        ("mlp", "aten", ADAMW, None, "min"),
        ("mlp", "aten", SGD, 0.1, 0.5),
        slow("gpt2", "aten", ADAMW, 0.1, 0.5),
        slow("gpt2", "inductor", ADAMW, None, "min"),
        slow("llama", "aten", SGD, None, None),
        slow("llama", "inductor", ADAMW, None, 0.5),
    ],
)
def test_a_step_has_the_bits_that_it_has_where_all_is_in_one_memory(
    name: str, kernels: Any, make: Any, clip: float | None, budget: Any
) -> None:
    how: dict[str, Any] = {"kernels": kernels, "clip_grad_norm": clip}
    expected = _step(name, make, **how)[1]()
    step, train = _step(name, make, device="cpu", costs=HOST_UPDATES, budget=budget, **how)
    plan = step.plan
    assert _counts(plan)[0] > 0
    assert _same(train(), expected)
    state = {
        s
        for op in plan.graph.ops
        if op.on_host
        for s in plan.graph.touched(op)
        if plan.graph.storages[s].kind is StorageKind.OPTIMIZER_STATE
    }
    copied = {s for op in plan.graph.ops if op.target in TRANSFERS for s in plan.graph.touched(op)}
    assert state
    assert not state & copied, "state never crosses the link"
    assert plan.eviction is not None
    assert simulate(plan.graph, HOST_UPDATES)[0] == pytest.approx(plan.eviction.seconds, rel=1e-9), "two clocks"
    assert busy_seconds(plan.graph, HOST_UPDATES)["updates on the host"] > 0
    assert "updates on the host" in str(plan.report())


def test_copies_and_updates_that_run_late_give_the_same_bits() -> None:
    step, train = _step(device="cpu", costs=HOST_UPDATES, budget="min")
    expected, chance = train(), random.Random(0)
    _lanes(step).before = lambda _: time.sleep(chance.random() * 2e-3)
    _lanes(step).host.before = lambda: time.sleep(chance.random() * 4e-3)
    for _ in range(3):
        assert _same(train(), expected)


def test_an_update_that_fails_ends_the_step_and_the_next_one_is_whole() -> None:
    step, train = _step(device="cpu", costs=HOST_UPDATES, budget="min")
    expected, begun = train(), list[int]()

    def fail() -> None:
        begun.append(len(begun))
        if len(begun) == 2:
            raise ValueError("the second op of the host")

    _lanes(step).host.before = fail
    with pytest.raises(ValueError, match="the second op of the host"):
        train()
    assert len(begun) == sum(op.on_host for op in step.plan.graph.ops), "the step ends when all have ended"
    _lanes(step).host.before = None
    assert _same(train(), expected)


def test_a_step_that_ends_early_leaves_no_update_running() -> None:
    step, train = _step(device="cpu", costs=HOST_UPDATES, budget="min")
    expected = train()
    last = max(i for i, op in enumerate(step.plan.graph.ops) if op.on_host)
    done: list[int] = []

    def slowly() -> None:
        time.sleep(2e-3)
        done.append(0)

    _lanes(step).host.before = slowly

    def stop(event: Any) -> None:
        if event.step == last:
            raise KeyError(event.op)

    with step.hooks.add(stop), pytest.raises(KeyError):
        train()
    ended = len(done)
    time.sleep(2e-2)
    assert len(done) == ended > 0
    _lanes(step).host.before = None
    assert _same(train(), expected)


@pytest.mark.parametrize(
    ("costs", "worth", "moved"),
    [
        (HOST_UPDATES, 0.01, True),
        (HOST_UPDATES, 0.99, False),  # it would have to save nearly all
        (replace(HOST_UPDATES, updates=0.0), 0.01, False),  # nothing is known of the host
        (replace(HOST_UPDATES, updates=1e6), 0.01, False),  # it is slower than the link
    ],
)
def test_updates_run_where_the_costs_say(costs: Any, worth: float, moved: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(host_updates, "_WORTH", worth)
    plan = _step(device="cpu", costs=costs, budget="min")[0].plan
    assert (_counts(plan)[0] > 0) == moved


def test_a_slower_host_has_fewer_updates() -> None:
    counts = [
        _counts(_step(device="cpu", costs=replace(HOST_UPDATES, updates=rate))[0].plan)[0] for rate in (1e12, 6e9)
    ]
    assert counts[0] > counts[1] > 0


def test_a_saved_plan_runs_with_its_updates_on_the_host(tmp_path: Path) -> None:
    step, train = _step(device="cpu", costs=HOST_UPDATES, budget="min")
    step.plan.save(tmp_path / "plan.json")
    loaded, again = _step(device="cpu", plan=tmp_path / "plan.json")
    assert _counts(loaded.plan) == _counts(step.plan)
    assert _same(again(), train())


def test_an_update_that_does_not_wait_for_its_gradient_is_a_race() -> None:
    plan = _step(device="cpu", costs=HOST_UPDATES, budget="min")[0].plan
    assert not follow(plan).races
    ops = [plan.graph.ops[i] for i in plan.schedule.order]
    for position, op in enumerate(ops):
        if op.on_host and "_fused_" in op.target:
            races = follow(plan, unordered={position}).races
            assert any(op.name in (race.first, race.second) for race in races)
    unsettled = follow(plan, unsettled={1, 3}).races
    assert any(CALLER in (race.first, race.second) for race in unsettled)

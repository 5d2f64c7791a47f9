"""torch.TensorRef: groups of recurrent ops are divided among devices, transfers are planned ops (row T4)."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import memplan
from benchmarks.zoo import ZOO
from memplan.core import lifetimes
from memplan.core.evictions import SEND, SEND_WAIT, TRANSFERS, DeviceArena
from memplan.core.graph import Phase
from memplan.core.plan import Plan
from memplan.core.totals import transient_on
from memplan.errors import BudgetInfeasible, InvalidSize, MemplanError, PlanMismatch, UnsupportedDevice
from memplan.planning.planfile import check_consistency
from memplan.runtime.debug.hooks import EventKind, StepEvent, Tracker
from tests.runtime.budgets import FAST_LINK
from tests.slow import slow
from tests.steps import outcome_of

TWO = ("cpu:0", "cpu:1")


@cache
def _plan(name: str, devices: tuple[str, ...] = TWO) -> Plan:
    return memplan.plan(*ZOO[name]("nano"), device=devices, costs=FAST_LINK)


@pytest.mark.parametrize("name", ["gpt2", slow("resnet")])
def test_T4_each_device_has_an_arena_of_its_own_at_its_own_max_live(name: str) -> None:  # noqa: N802
    plan = _plan(name)
    check_consistency(plan)
    assert [section.device for section in plan.devices] == list(TWO)
    alone = memplan.plan(*ZOO[name]("nano"), device="cpu", costs=FAST_LINK)
    for section in plan.devices:
        part = lifetimes.device_problem(plan.problem, plan.graph, section.device)
        assert section.size == section.max_live == part.max_live
        assert section.size < alone.arena_size
    assert sum(section.size for section in plan.devices) == plan.arena_size == plan.max_live


def test_T4_blocks_stay_whole_and_their_backward_is_where_their_forward_is() -> None:  # noqa: N802
    graph = _plan("gpt2").graph
    homes: dict[str, set[str]] = {}
    for op in graph.ops:
        if op.target not in TRANSFERS and ".h." in op.origin.module:
            block = ".".join(op.origin.module.split(".")[:4])
            homes.setdefault(block, set()).update(graph.storages[s].device for s in graph.written(op))
    assert sorted(homes) == ["model.transformer.h.0", "model.transformer.h.1"]
    assert [len(found) for found in homes.values()] == [1, 1]
    assert len(set.union(*homes.values())) == 2


def test_T4_transfers_are_ops_and_every_op_finds_all_on_one_device() -> None:  # noqa: N802
    plan = _plan("gpt2")
    graph = plan.graph
    sends = [op for op in graph.ops if op.target == SEND]
    assert sends
    assert len(sends) == sum(op.target == SEND_WAIT for op in graph.ops)
    assert {op.phase for op in sends} == {Phase.FORWARD, Phase.BACKWARD}
    for op in graph.ops:
        if op.target not in TRANSFERS:
            assert len({graph.storages[s].device for s in graph.touched(op)}) == 1
    report = plan.report()
    assert report.kept is not None
    assert report.kept.sent == sum(graph.values[op.reads[0]].shape[0] for op in sends)
    name = graph.storages[graph.values[sends[0].writes[0]].storage].name
    assert plan.forecast(name).uses


@pytest.mark.parametrize(("name", "count"), [slow("vit", 2), ("resnet", 3)])
def test_T4_two_arenas_give_the_same_bits_as_one(name: str, count: int) -> None:  # noqa: N802
    model, inputs = ZOO[name]("nano")
    twin = copy.deepcopy(model)
    reference = memplan.compile(twin, inputs)
    devices = [f"cpu:{i}" for i in range(count)]
    compiled = memplan.compile(model, inputs, device=devices, costs=FAST_LINK, sanitize="poison")
    tracker, seen = Tracker(), list[EventKind]()

    def see(event: StepEvent) -> None:
        seen.append(event.kind)

    for seed in range(2):
        with compiled.hooks.add(tracker), compiled.hooks.add(see):
            ours = outcome_of(model, compiled, *inputs, seed=seed)
        assert ours.same_as(outcome_of(twin, reference, *inputs, seed=seed))
        assert len(ours.gradients) == len(list(model.parameters()))
    for section in compiled.plan.devices:  # row T10, on each device
        assert tracker.peak_of(section.device) == section.max_live
    assert {EventKind.SEND, EventKind.SEND_WAIT} <= set(seen)
    model.eval()
    reference.eval()
    with torch.no_grad():
        assert torch.equal(compiled(*inputs), reference(*inputs))


def test_T4_whole_steps_with_a_budget_for_each_device() -> None:  # noqa: N802
    models = [ZOO["mlp"]("nano")[0] for _ in range(2)]
    inputs = ZOO["mlp"]("nano")[1]
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01, fused=True) for m in models)
    twin = copy.deepcopy(models[0])
    others = torch.optim.AdamW(twin.parameters(), lr=0.01, fused=True)
    alone = memplan.compile_step(twin, others, lambda x: x, inputs, device="cpu")
    budgets = [alone.plan.arena_size, alone.plan.arena_size - 4096]
    step = memplan.compile_step(models[0], ours, lambda x: x, inputs, device=TWO, arena_budget=budgets)
    plain = memplan.compile_step(models[1], theirs, lambda x: x, inputs)
    assert all(s.size <= b for s, b in zip(step.plan.devices, budgets, strict=True))
    for seed in range(4):
        torch.manual_seed(seed)
        loss = step(*inputs)
        torch.manual_seed(seed)
        assert torch.equal(loss, plain(*inputs))
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", ["gpt2", slow("resnet")])
def test_T4_the_budgets_that_a_plan_without_one_needs_are_enough(name: str) -> None:  # noqa: N802
    free = _plan(name)
    beside = [transient_on(free.graph, free.transient, device) for device in TWO]
    budget = [section.size + b for section, b in zip(free.devices, beside, strict=True)]
    plan = memplan.plan(*ZOO[name]("nano"), device=TWO, costs=FAST_LINK, budget=budget)
    assert [s.budget for s in plan.devices] == budget
    assert all(s.size <= (s.arena_budget or 0) for s in plan.devices)
    with pytest.raises(BudgetInfeasible):
        memplan.plan(*ZOO[name]("nano"), device=TWO, costs=FAST_LINK, budget=[b // 2 for b in budget])


def test_T4_plan_files_and_what_does_not_belong_together(tmp_path: Path) -> None:  # noqa: N802
    model, inputs = ZOO["mlp"]("nano")
    plan = memplan.plan(model, inputs, device=TWO)
    plan.save(tmp_path / "plan.json")
    loaded = memplan.load(tmp_path / "plan.json")
    assert loaded.devices == plan.devices
    compiled = memplan.compile(model, inputs, plan=loaded)
    reference = memplan.compile(model, inputs)
    torch.manual_seed(0)
    loss = compiled(*inputs)
    torch.manual_seed(0)
    assert torch.equal(loss, reference(*inputs))
    with pytest.raises(PlanMismatch, match="cpu:0, cpu:1"):
        memplan.compile(model, inputs, plan=loaded, device="cpu")
    for devices, match in (((), "no device"), (("cpu", "cpu:0"), "twice"), (("cpu:0", "nowhere"), "no device")):
        with pytest.raises(UnsupportedDevice, match=match):
            memplan.plan(model, inputs, device=devices)
    with pytest.raises(InvalidSize, match="3 budgets for 2 devices"):
        memplan.plan(model, inputs, device=TWO, arena_budget=[1, 2, 3])
    with pytest.raises(InvalidSize, match="not a budget of one"):
        memplan.plan(model, inputs, device=TWO, arena_budget="min")
    with pytest.raises(InvalidSize, match="is not a budget"):
        memplan.plan(model, inputs, device="cpu", arena_budget=[1, 2])
    with pytest.raises(MemplanError, match="evict nothing"):
        memplan.plan(model, inputs, device=TWO, policy="genoa")
    with pytest.raises(BudgetInfeasible) as caught:
        memplan.plan(model, inputs, device=TWO, arena_budget="4KiB")
    assert memplan.plan(model, inputs, device=TWO, arena_budget=caught.value.smallest).devices


def test_T4_a_plan_whose_arenas_do_not_hold_its_buffers_is_refused() -> None:  # noqa: N802
    plan = _plan("gpt2")
    assert plan.eviction is not None
    one, two = plan.devices
    cases: dict[str, tuple[tuple[DeviceArena, ...], ...]] = {
        "has no arena for each of cpu:0, cpu:1": ((),),
        "does not start where the one before it ends": (
            *((two, one), (replace(one, start=64), two), (one, replace(two, start=two.start - 64))),
            (one, replace(two, device=one.device)),
        ),
        "bytes alive, or more than its budget": (
            *((replace(one, max_live=one.max_live + n), two) for n in (-64, 64)),
            *((one, replace(two, **less)) for less in ({"arena_budget": two.size - 1}, {"device": "cpu:2"})),
            (one, replace(two, budget=plan.on_section(two) - 1)),
        ),
        "is not inside the arena": (
            (replace(one, size=one.size - 64), replace(two, start=two.start - 64, size=two.size + 64)),
        ),
        "do not hold the whole plan": ((one,),),
    }
    for words, wrong in cases.items():
        for sections in wrong:
            with pytest.raises(MemplanError, match=words):
                check_consistency(replace(plan, eviction=replace(plan.eviction, sections=sections)))
    for more in (0, 1):
        budgets: Any = {"budget": plan.on_section(two) + more, "arena_budget": two.size + more}
        check_consistency(replace(plan, eviction=replace(plan.eviction, sections=(one, replace(two, **budgets)))))

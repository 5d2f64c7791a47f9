"""Capuchin: measured execution, guided execution, feedback (rows P1, P2, P6)."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from benchmarks.zoo import ZOO
from memplan.core.evictions import TRANSFERS
from memplan.evict.costs import signature_of
from memplan.evict.measure import measure
from memplan.planning.fit import make_workload
from memplan.runtime import CompiledModule
from memplan.runtime.copies import Direction
from memplan.runtime.profiling.op_timer import Measurement
from memplan.runtime.profiling.profile_guided import SAMPLES, WARM
from memplan.trace import trace
from tests.models import Layers
from tests.runtime.budgets import FAST_LINK, everything
from tests.runtime.virtual import virtual
from tests.slow import slow
from tests.steps import outcome_of

_MOST = 100  # steps


def _net() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Layers(layers=8), torch.randn(64, 16)


def _peak(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes that `everything` needs."""
    plan = memplan.plan(model, x, gradients="outside")
    workload = make_workload(plan.graph, plan.schedule.order, FAST_LINK, plan.alignment)
    return measure(workload, everything(workload)).peak


def _train(compiled: CompiledModule, model: nn.Module, args: tuple[Any, ...]) -> list[Measurement]:
    """Train until nothing is measured any more, each step held against one without a budget."""
    free = memplan.compile(model, args)
    for step in range(_MOST):
        ours, expected = (outcome_of(model, module, *args, seed=step) for module in (compiled, free))
        assert ours.same_as(expected)
        if compiled._calls.guide is None:
            return list(compiled.measurements)
    raise AssertionError("it never ends")


def _late(measured: Measurement) -> float:
    return sum(copy.stall for copy in measured.late)


# -- P1 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [slow("gpt2"), "mlp"])
def test_P1_the_first_steps_record_every_access_op_and_copy(name: str) -> None:  # noqa: N802
    model, args = ZOO[name]("nano")
    compiled = memplan.compile(model, args, arena_budget=0.9, gradients="outside", policy="flow", costs="measure")
    assert compiled.measurement is None
    measured = _train(compiled, model, args)[0]
    plan = measured.plan
    graph, ops = plan.graph, [plan.graph.ops[i] for i in plan.schedule.order]
    assert measured.samples == SAMPLES
    assert len(measured.op_seconds) == len(measured.begun) == len(ops)
    assert list(measured.begun) == sorted(measured.begun)
    assert all(seconds > 0 for seconds in measured.op_seconds)
    # every op of the step has a price, and both links have one
    assert {signature_of(graph, op) for op in ops if op.target not in TRANSFERS} == set(measured.costs.measured)
    assert measured.costs.to_host.bytes_per_second > 0
    # every planned copy was timed
    reloads = [e for e in plan.evictions if plan.graph.ops[plan.schedule.order[e.in_trigger]].target in TRANSFERS]
    back = [c for c in measured.copies if c.direction is Direction.TO_DEVICE]
    assert [c.started for c in back] == sorted(e.in_trigger for e in reloads)
    assert all(c.started < c.waited and c.seconds > 0 and c.nbytes > 0 for c in measured.copies)
    # the accesses of each storage: count, order, times, the op that made it and what that read
    for storage in graph.storages[: len(trace(model, args).graph.storages)]:
        found = measured.accesses(storage.name)
        lives = {i for i, s in enumerate(graph.storages) if s.name.split("@")[0] == storage.name}
        touching = [step for step, op in enumerate(ops) if lives & set(graph.touched(op))]
        assert [a.step for a in found.accesses] == touching
        assert found.count == len(touching)
        assert [a.seconds for a in found.accesses] == [measured.begun[step] for step in touching]
        writers = [op for op in ops if lives & set(graph.written(op)) and op.target not in TRANSFERS]
        assert found.producer == (writers[0].name if writers else "")
        if writers:
            read = {graph.storages[graph.values[v].storage].name.split("@")[0] for v in writers[0].reads}
            assert set(found.inputs) <= read


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_P1_P2_on_cuda_events_are_the_clock() -> None:  # noqa: N802
    model, args = ZOO["gpt2"]("nano")
    model, args = model.cuda(), tuple(x.cuda() if isinstance(x, torch.Tensor) else x for x in args)
    compiled = memplan.compile(model, args, arena_budget=0.7, gradients="outside", policy="flow", costs="measure")
    measured = _train(compiled, model, args)[0]
    assert all(seconds > 0 for seconds in measured.op_seconds)
    assert measured.copies
    assert all(0 < copy.seconds < 1 for copy in measured.copies)
    assert all(0 <= copy.stall <= measured.seconds for copy in measured.copies)


# -- P2 --------------------------------------------------------------------------------------------------


def test_P2_later_steps_follow_the_plan_made_from_the_measurement(  # noqa: N802
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A link so slow that nothing should be copied: the roofline's CPU does not know that."""
    model, x = _net()
    with virtual(monkeypatch, lambda nbytes: 1000.0), caplog.at_level(logging.INFO, "memplan"):
        compiled = memplan.compile(
            model, x, arena_budget=0.7, gradients="outside", costs="measure", policy=_copies_unless_dear
        )
        safe = compiled.plan
        arena = compiled._calls.arena
        seen = []
        for _ in range(WARM + SAMPLES + 1):
            seen.append(compiled.plan.fingerprint)
            compiled(x).backward()
        assert set(seen) == {safe.fingerprint}  # the first steps: one plan, until all are measured
        measured = _train(compiled, model, (x,))
    assert compiled.plan.fingerprint != safe.fingerprint
    assert any(copy.stall > 0 for copy in measured[0].copies)
    assert not measured[-1].copies
    assert measured[-1].seconds < measured[0].seconds
    assert compiled.plan.eviction is not None
    assert compiled.plan.eviction.costs == measured[0].costs.name
    assert compiled.plan.arena_size <= compiled.plan.eviction.arena_budget == safe.eviction.arena_budget  # type: ignore[union-attr]
    assert compiled._calls.programs.main.arena is arena
    (record,) = [r.getMessage() for r in caplog.records if "->" in r.getMessage()]
    for said in (safe.fingerprint[:12], compiled.plan.fingerprint[:12], "predicted", "measured"):
        assert said in record


def _copies_unless_dear(workload: Any) -> Any:
    """Copies where a copy takes no longer than the step, else recomputes."""
    from memplan.evict.policies.auto import recompute
    from memplan.evict.policies.flow import flow

    return (flow if max(workload.to_host) < sum(workload.seconds) else recompute)(workload)


# -- P6 --------------------------------------------------------------------------------------------------


def _triggers(measured: Measurement) -> dict[tuple[int, int], int]:
    return {(c.storage, c.nth): c.started for c in measured.copies if c.direction is Direction.TO_DEVICE}


@pytest.mark.parametrize("slow", [3.0, 6.0])
def test_P6_a_late_reload_starts_earlier_until_none_stalls(  # noqa: N802
    slow: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A copy takes `slow` ops, and alone it takes one: what happens in training is not what a probe says."""
    model, x = _net()
    budget = 2 * _peak(model, x)
    with virtual(monkeypatch, lambda _: slow, lambda _: 1.0), caplog.at_level(logging.INFO, "memplan"):
        options: Any = {"arena_budget": budget, "policy": everything, "costs": "measure"}
        compiled = memplan.compile(model, x, gradients="outside", **options)
        measured = _train(compiled, model, (x,))
    stalls = [_late(m) for m in measured]
    assert stalls[0] > 0
    assert all(after < before for before, after in pairwise(stalls))
    assert stalls[-1] == 0
    assert "no reload stalls" in [r for r in caplog.records if r.name == "memplan"][-1].getMessage()
    for one, two in pairwise(measured):
        before, after = _triggers(one), _triggers(two)
        assert before.keys() == after.keys()
        late = {(c.storage, c.nth) for c in one.late}
        assert all(after[key] <= before[key] for key in before)
        assert any(after[key] < before[key] for key in late)


def test_P6_where_there_is_no_room_the_stall_stays_and_the_budget_is_kept(  # noqa: N802
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = _net()
    budget = _peak(model, x)
    with virtual(monkeypatch, lambda nbytes: 20.0), caplog.at_level(logging.INFO, "memplan"):
        options: Any = {"arena_budget": budget, "policy": everything, "costs": "measure"}
        compiled = memplan.compile(model, x, gradients="outside", **options)
        measured = _train(compiled, model, (x,))
    stalls = [_late(m) for m in measured]
    assert all(after <= before for before, after in pairwise(stalls))
    assert stalls[-1] > 0
    assert "no room" in [r for r in caplog.records if r.name == "memplan"][-1].getMessage()
    assert all(m.plan.arena_size <= budget for m in measured)

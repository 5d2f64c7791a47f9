"""Random ops that run again: with the state of the generator that was saved directly before their first run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from memplan.core.evictions import RNG_STATE_BYTES, SAVE_RNG, EvictionPlan, check_record
from memplan.core.graph import Graph, Op, Phase, StorageKind
from memplan.core.graph_edit import in_order
from memplan.core.problem import Solution
from memplan.errors import BudgetInfeasible, InvalidEviction, InvalidPlan
from memplan.evict.apply import Applied
from memplan.evict.costs import signature_of
from memplan.evict.equivalent import require_equivalent
from memplan.evict.measure import measure
from memplan.evict.rng_states import SavedStates, decide, only_used, with_saved_states
from memplan.evict.select import POLICIES, fit_policy
from memplan.evict.workload import Event, Events, Kind, Workload
from memplan.planning.fit import fit, smallest
from tests.evict.judge import judged, workload_of
from tests.graph_strategies import GraphBuilder

_MASK = 8192


def _graph(masks: int = 2, nbytes: int = _MASK) -> Graph:
    """Masks are drawn one after another, each is read in the forward and once more in the backward, the last first."""
    b = GraphBuilder()
    x = b.storage(StorageKind.INPUT, 64, planned=False)
    drawn = [b.storage(StorageKind.ACTIVATION, nbytes, planned=True) for _ in range(masks)]
    out = [b.storage(StorageKind.OUTPUT, 64, planned=False) for _ in range(masks)]
    grad = [b.storage(StorageKind.GRADIENT, 64, planned=False) for _ in range(masks)]
    for mask, result in zip(drawn, out, strict=True):
        b.op(Phase.FORWARD, (), (mask,), random=True)
        b.op(Phase.FORWARD, (x, mask), (result,))
    for mask, result in reversed(list(zip(drawn, grad, strict=True))):
        b.op(Phase.BACKWARD, (mask,), (result,))
    return b.graph(tuple(out), tuple(grad))


def _again(states: SavedStates, wanted: tuple[int, ...] = (0,)) -> Events:
    """Drop the masks of the `wanted` draws (by number) after the forward, and draw each again before its reader."""
    w = states.workload
    draws = [i for i, op in enumerate(w.graph.ops) if op.random and op.target != SAVE_RNG]
    masks = {w.writes[draws[k]][0]: draws[k] for k in wanted}
    found = []
    for i in range(len(w.graph.ops)):
        found += [Event(Kind.RUN, masks[s]) for s in w.reads[i] if s in masks and i >= w.graph.forward_ops]
        found.append(Event(Kind.RUN, i))
        if i == w.graph.forward_ops - 1:
            found += [Event(Kind.DROP, s) for s in masks]
    return tuple(found)


def _applied() -> Applied:
    """The graph in which both masks are drawn again."""
    states = with_saved_states(workload_of(_graph()))
    return judged(_graph(), *only_used(states, _again(states, (0, 1))))[0]


def test_the_bytes_of_a_state_are_those_of_torchs_generator() -> None:
    assert torch.get_rng_state().numel() == RNG_STATE_BYTES


def test_only_states_that_are_used_are_saved_and_take_bytes() -> None:
    traced = _graph()
    plain = workload_of(traced)
    states = with_saved_states(plain)
    assert [op.target for op in states.workload.graph.ops].count(SAVE_RNG) == 2
    workload, events = only_used(states, _again(states, (0,)))
    applied, measured = judged(traced, workload, events)
    assert [op.name for op in applied.graph.ops] == ["save_rng:op0", "op0", "op1", "op2", "op3", "op4", "op0@1", "op5"]
    assert measured.peak == _MASK + RNG_STATE_BYTES  # one mask at a time, and the state of the first
    again = applied.graph.ops[6]
    assert (applied.graph.ops[1].random, again.random) == (True, False)
    assert applied.graph.saved_state(applied.graph.ops[1]) is None
    assert applied.graph.saved_state(again) == applied.graph.ops[0].writes[0]
    assert signature_of(applied.graph, again) == signature_of(traced, traced.ops[0])
    nothing = only_used(states, states.workload.plain)
    assert nothing == (plain, plain.plain)
    assert judged(traced, *nothing)[1].peak == 2 * _MASK


def test_results_that_are_no_larger_than_a_state_are_kept() -> None:
    assert not with_saved_states(workload_of(_graph(nbytes=RNG_STATE_BYTES))).state_of
    assert len(with_saved_states(workload_of(_graph(nbytes=RNG_STATE_BYTES + 1))).state_of) == 2
    on_gpu = _graph()
    storages = tuple(replace(s, device="cuda:0") for s in on_gpu.storages)
    assert not with_saved_states(workload_of(replace(on_gpu, storages=storages))).state_of


def test_where_states_do_not_fit_all_random_results_are_kept() -> None:
    states = with_saved_states(workload_of(_graph(), budget=2 * _MASK))
    asked: list[Workload] = []

    def keeps(workload: Workload) -> Events:
        asked.append(workload)
        if measure(workload, workload.plain).peak > workload.budget:
            raise BudgetInfeasible("no", op="", smallest=0)
        return workload.plain

    assert decide(states, keeps) == (states.plain, states.plain.plain)
    assert asked == [states.workload, states.plain]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_keeps_budgets_with_random_ops(name: str) -> None:
    traced = _graph(masks=4, nbytes=4 * _MASK)
    plain, policy = workload_of(traced), fit_policy(name)
    peak = measure(plain, plain.plain).peak
    least = smallest(plain, policy)
    if name in ("auto", "recompute"):
        assert least < 0.75 * peak
    for budget in (peak, (peak + least) // 2, least):
        fitted = fit(traced, plain.within(budget), policy)
        assert fitted.measured.peak <= budget
        saved = [op for op in fitted.graph.ops if op.target == SAVE_RNG]
        assert len(saved) == sum(fitted.graph.saved_state(op) is not None for op in fitted.graph.ops if "@" in op.name)
        used = {i for op in fitted.graph.ops for i in fitted.graph.touched(op)}
        assert used >= {i for i, s in enumerate(fitted.graph.storages) if s.kind is StorageKind.RNG_STATE}


_Change = Callable[[Graph], Graph]


def _ops(change: Callable[[list[Op]], Any]) -> _Change:
    def changed(graph: Graph) -> Graph:
        ops = list(graph.ops)
        change(ops)
        return replace(graph, ops=tuple(ops))

    return changed


def _named(ops: list[Op], name: str) -> int:
    return next(i for i, op in enumerate(ops) if op.name == name)


def _set(ops: list[Op], name: str, **fields: Any) -> None:
    at = _named(ops, name)
    ops[at] = replace(ops[at], **fields)


def _swap_states(ops: list[Op]) -> None:
    one, two = _named(ops, "op0@1"), _named(ops, "op2@1")
    states = ops[one].reads, ops[two].reads
    ops[one], ops[two] = replace(ops[one], reads=states[1]), replace(ops[two], reads=states[0])


_FAULTS = [
    (_ops(_swap_states), "op2@1: does not draw with the generator's state right before its first run"),
    (_ops(lambda ops: _set(ops, "op0@1", reads=())), "op0@1: draws random numbers again, without"),
    (_ops(lambda ops: _set(ops, "op0@1", random=True)), "op0@1: draws random numbers again, without"),
    (_ops(lambda ops: _set(ops, "op0", random=False)), "op0: draws random numbers where the traced op does not"),
    (_ops(lambda ops: _set(ops, "save_rng:op0", random=False)), "save_rng:op0: does not save the state"),
    (_ops(lambda ops: _set(ops, "save_rng:op0", writes=ops[1].writes)), "save_rng:op0: does not save the state"),
]


@pytest.mark.parametrize(("change", "says"), _FAULTS)
def test_an_op_that_draws_with_another_state_is_refused(change: _Change, says: str) -> None:
    applied = _applied()
    with pytest.raises(InvalidEviction, match=says):
        require_equivalent(_graph(), change(applied.graph), applied.sources)


def test_a_state_that_is_saved_before_another_random_op_is_refused() -> None:
    applied = _applied()
    at = _named(list(applied.graph.ops), "save_rng:op2")
    order = (at, *(i for i in range(len(applied.graph.ops)) if i != at))
    moved = in_order(applied.graph, order)
    sources = tuple(applied.sources[i] for i in order)
    with pytest.raises(InvalidEviction, match="op2@1: does not draw with the generator's state"):
        require_equivalent(_graph(), moved, sources)
    record = _record(replace(applied, graph=moved, sources=sources))
    with pytest.raises(InvalidPlan, match=r"op2@1.*does not draw with the generator state"):
        check_record(moved, record)


def _record(applied: Applied) -> EvictionPlan:
    figures = {"arena_budget": 1, "seconds": 1.0, "base_seconds": 1.0, "stall": 0.0}
    host = cast(Solution, None)  # that nothing is copied to
    lists = {"sources": applied.sources, "instances": applied.instances}
    return EvictionPlan(policy="test", costs="a100", host=host, **figures, **lists)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_FAULTS[0][0], "op2@1.*does not draw with the generator state saved right before"),
        (_FAULTS[1][0], "op0@1.*does not draw with the generator state saved right before"),
        (_FAULTS[2][0], "op0@1.*does not draw with the generator state saved right before"),
        (_ops(lambda ops: _set(ops, "op1", reads=(*ops[2].reads, ops[0].writes[0]))), "op1.*needs no generator state"),
        (_FAULTS[4][0], "save_rng:op0.*does not save the state"),
        (_FAULTS[5][0], "eviction.instances: are not the storages"),
    ],
)
def test_a_plan_file_with_another_state_is_refused(change: _Change, says: str) -> None:
    applied = _applied()
    check_record(applied.graph, _record(applied))
    with pytest.raises(InvalidPlan, match=says):
        check_record(change(applied.graph), _record(applied))

"""Capuchin (rows P4, P5 and P8): what a plan names of an eviction, swaps that hide, and recorded allocations."""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace
from functools import cache

import pytest

from memplan.core.evictions import RELOAD, TRANSFERS, Action
from memplan.core.graph import Graph, Phase, StorageKind
from memplan.core.plan import Plan
from memplan.evict.costs import DEVICES, Link, signature_of
from memplan.evict.measure import measure
from memplan.evict.policies.capuchin import capuchin, gaps_of, recompute_seconds
from memplan.evict.workload import Kind, Workload
from memplan.planning.options import PlanOptions
from memplan.recording.allocator import Allocator
from memplan.runtime.recorded import recording_of
from memplan.trace import plan_traced
from tests.evict.judge import judged, workload_of
from tests.graph_strategies import GraphBuilder
from tests.models import traced_nano
from tests.runtime.backing import counted, host_backing
from tests.runtime.budgets import FAST_LINK, QUICK, QUICK_RECOMPUTE, plan_of_everything
from tests.slow import slow

_OP = 1.0  # seconds
_SIZE = 100  # bytes


def _chain(depth: int, *, bandwidth: float, slow: int = -1) -> tuple[Graph, Workload]:
    """`depth` activations, each made from the one before it, and used once more on the way back.

    `slow`: the op that takes ten times as long. `bandwidth`: bytes per second to the host and back.
    """
    b = GraphBuilder()
    given = b.storage(StorageKind.INPUT, _SIZE, planned=False)
    made = [b.storage(StorageKind.ACTIVATION, _SIZE, planned=True) for _ in range(depth)]
    for i, value in enumerate(made):
        b.op(Phase.FORWARD, (made[i - 1] if i else given,), (value,), target=f"f{i}")
    out = []
    for i in reversed(range(depth)):
        out.append(b.storage(StorageKind.GRADIENT, _SIZE, planned=False))
        b.op(Phase.BACKWARD, (made[i],), (out[-1],), target=f"b{i}")
    graph = b.graph((), tuple(out))
    link = Link(bytes_per_second=bandwidth, latency=0.0)
    measured = {signature_of(graph, op): (10 * _OP if i == slow else _OP) for i, op in enumerate(graph.ops)}
    costs = replace(DEVICES["a100"], measured=measured, to_host=link, to_device=link)
    workload = workload_of(graph, costs=costs)
    return graph, replace(workload, budget=measure(workload, workload.plain).peak - _SIZE)


def test_P5_free_time_is_the_gap_less_the_way_out_and_back() -> None:  # noqa: N802
    _, workload = _chain(4, bandwidth=200.0)
    first = gaps_of(workload)[0]
    assert (first.evicted_access, first.back_access) == (1, 7)
    assert first.free_time == pytest.approx(5 * _OP - 0.5 - 0.5)


def test_P5_a_swap_that_hides_is_free() -> None:  # noqa: N802
    graph, workload = _chain(6, bandwidth=200.0)
    events = capuchin(workload)
    _, figures = judged(graph, workload, events)
    assert figures.peak <= workload.budget
    assert figures.seconds == pytest.approx(sum(workload.seconds))
    assert [event.of for event in events if event.kind is Kind.OFFLOAD] == [gaps_of(workload)[0].storage]


def test_P5_where_none_hides_the_most_bytes_per_second_are_computed_again() -> None:  # noqa: N802
    graph, workload = _chain(6, bandwidth=1.0, slow=0)
    events = capuchin(workload)
    assert judged(graph, workload, events)[1].peak <= workload.budget
    runs = [event.of for event in events if event.kind is Kind.RUN]
    again = [op for k, op in enumerate(runs) if op in runs[:k]]
    assert again == [1]  # of those that cost least the first; op 0 costs ten times as much
    assert not any(event.kind is Kind.OFFLOAD for event in events)


def test_P5_a_source_that_is_gone_is_counted_too() -> None:  # noqa: N802
    _, workload = _chain(6, bandwidth=1.0)
    made = [writes[0] for writes in workload.writes[:6]]
    back = workload.uses[made[3]][-1]
    assert recompute_seconds(workload, made[3], frozenset(), back) == pytest.approx(_OP)
    assert recompute_seconds(workload, made[3], frozenset({made[2]}), back) == pytest.approx(2 * _OP)
    assert recompute_seconds(workload, made[3], frozenset({made[2], made[1]}), back) == pytest.approx(3 * _OP)
    assert recompute_seconds(workload, made[3], frozenset({made[1]}), back) == pytest.approx(_OP)


@cache
def _plan(kind: str, model: str) -> Plan:
    traced = traced_nano(model)
    if kind == "everything":
        return plan_of_everything(traced)
    policy = QUICK if kind == "copies" else QUICK_RECOMPUTE
    return plan_traced(traced, PlanOptions(arena_budget="min", policy=policy, costs=FAST_LINK))


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        *(("mlp", kind) for kind in ("everything", "copies", "recompute")),
        *(slow("gpt2", kind) for kind in ("everything", "copies", "recompute")),
    ],
)
def test_P4_evicted_access_in_trigger_and_back_access_are_ops_of_the_plan(kind: str, model: str) -> None:  # noqa: N802
    plan = _plan(kind, model)
    graph, index = plan.graph, {s.name: i for i, s in enumerate(plan.graph.storages)}
    ops = [graph.ops[i] for i in plan.schedule.order]
    assert plan.evictions
    lives: dict[str, set[int]] = {}
    for e in plan.evictions:
        storage, instance = index[e.storage], index[e.instance]
        lives.setdefault(e.storage, {storage})
        assert e.evicted_access < e.in_trigger < e.back_access
        # the evicted access used it, and nothing does from then to the trigger
        assert lives[e.storage] & set(graph.touched(ops[e.evicted_access]))
        between = [op for op in ops[e.evicted_access + 1 : e.in_trigger] if op.target not in TRANSFERS]
        assert not any((lives[e.storage] | {instance}) & set(graph.touched(op)) for op in between)
        # the trigger makes the new life, and is the first to touch it
        trigger = ops[e.in_trigger]
        assert instance in graph.written(trigger)
        assert (trigger.target == RELOAD) is (e.action is Action.OFFLOAD)
        assert not any(instance in graph.touched(op) for op in ops[: e.in_trigger])
        # the back access is the first op that reads it again
        reads = [
            step
            for step, op in enumerate(ops)
            if instance in graph.touched(op) and instance not in graph.written(op) and op.target not in TRANSFERS
        ]
        assert reads[0] == e.back_access
        lives[e.storage].add(instance)


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
    assert (counted(allocator, "STEPS"), allocator.differences, counted(allocator, "LIVE")) == (2, 1, 0)

"""The ext-tstack design note: what is released is planned, and leaves one contiguous hole (rows E1 to E5)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import memplan
from benchmarks import zoo
from benchmarks.evict import AddressSpace
from memplan.core import lifetimes
from memplan.core.evictions import OFFLOAD, RELOAD, evictions_of
from memplan.core.graph import Graph, Phase, StorageKind
from memplan.core.in_place import placed
from memplan.core.problem import Buffer, Interval, Problem
from memplan.core.schedule import make_schedule
from memplan.errors import MemplanError, UnsupportedProblem
from memplan.evict.costs import DEVICES, signature_of
from memplan.evict.measure import measure
from memplan.evict.policies.auto import auto, recompute
from memplan.evict.policies.delta import Released, delta, direct
from memplan.evict.policies.dtr import Candidate, dtr, h_dtr
from memplan.evict.policies.flow import flow
from memplan.evict.simulator import EvictionKind
from memplan.evict.workload import Events, Kind, Policy, Workload
from memplan.report.text_diagrams import stack_text
from memplan.solvers import solve
from tests.evict.judge import judged, workload_of
from tests.graph_strategies import GraphBuilder
from tests.models import traced_nano

_CAPACITY, _END = 80, 10


def _note(*, released: tuple[str, ...] = ("B",)) -> Problem:
    """The note's example from step S = 0: A -> B, (A, B) -> C, load D. `released` die before D is loaded."""
    lives = {"A": Interval(0, _END), "B": Interval(1, _END), "C": Interval(2, _END), "D": Interval(4, _END)}
    for name in released:
        lives[name] = Interval(lives[name].start, 3)
    sizes = {"A": 16, "B": 16, "C": 30, "D": 30}
    return Problem(
        buffers=tuple(Buffer(id=name, size=sizes[name], live=lives[name]) for name in sizes), capacity=_CAPACITY
    )


def test_E2_a_tensor_to_be_released_lies_after_the_result_computed_from_it() -> None:  # noqa: N802
    problem = _note()
    solution = solve(problem, solver="tstack")
    assert dict(solution.offsets) == {"A": 0, "C": 16, "B": 46, "D": 46}
    assert solution.arena_size == problem.max_live == 76


def test_E2_the_default_layout_reaches_the_same_arena() -> None:  # noqa: N802
    assert solve(_note(), minimize=True).arena_size == 76


def test_E2_the_layout_of_a_real_graph_is_drawn_too() -> None:  # noqa: N802
    model, args = zoo.ZOO["mlp"]("nano")
    plan = memplan.plan(model, args, layout="tstack")
    assert plan.to_text().rstrip().endswith(f"max live {plan.max_live} bytes")
    ends = {b.id: b.live.end for b in plan.problem.buffers}
    lowest = [name for name, offset in plan.solution.offsets.items() if offset == 0 and ends[name] > 0]
    assert max(ends.values()) in {ends[name] for name in lowest}
    with pytest.raises(MemplanError, match="layout"):
        memplan.plan(model, args, layout="stack")  # type: ignore[call-overload]
    with pytest.raises(UnsupportedProblem, match="greedy"):
        memplan.plan(model, args, layout="tstack", solver="greedy")


def test_E3_placing_in_order_of_time_needs_C_released_too() -> None:  # noqa: N802
    # What DTR does: allocate first-fit as results come, so B's release leaves holes of 16 and 18 bytes.
    in_time = solve(Problem(buffers=_note().buffers), solver="online-first")
    assert (in_time.offsets["B"], in_time.offsets["C"]) == (16, 32)
    assert in_time.arena_size == 92 > _CAPACITY
    both = solve(Problem(buffers=_note(released=("B", "C")).buffers), solver="online-first")
    assert both.arena_size <= _CAPACITY


def test_E2_drawn_as_text() -> None:  # noqa: N802
    problem = _note()
    assert stack_text(problem, solve(problem, solver="tstack")).splitlines() == [
        "bytes | 0 | 1 | 2 | 3 | 4-9",
        "62-76 | . | . | . | . |  D",
        "46-62 | . | B | B | . |  D",
        "16-46 | . | . | C | C |  C",
        " 0-16 | A | A | A | A |  A",
        "arena 76 bytes; max live 76 bytes",
    ]


_SECONDS = (100.0, 1.0, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0)  # loading A again costs more than anything


def _step() -> tuple[Graph, Workload]:
    """The note's step as ops: load A; A -> B; (A, B) -> C; something with A; load D; D -> E in place; then E is read
    alone, and C with B and A."""
    b = GraphBuilder()
    host = [b.storage(StorageKind.INPUT, size, planned=False) for size in (16, 30)]
    names = {name: b.storage(StorageKind.ACTIVATION, size, planned=True) for name, size in _SIZES.items()}
    out = [b.storage(StorageKind.OUTPUT, 1 + k, planned=False) for k in range(3)]
    ops: list[tuple[str, str, int]] = [("", "A", host[0]), ("A", "B", -1), ("AB", "C", -1), ("A", "", out[0])]
    ops += [("", "D", host[1]), ("D", "E", -1), ("E", "", out[1]), ("ABC", "", out[2])]
    for k, (reads, writes, other) in enumerate(ops):
        loaded = (other,) if writes and other >= 0 else ()
        read = (*(names[x] for x in reads), *loaded)
        write = tuple(names[x] for x in writes) or (other,)
        inplace_candidates = ((names["E"], names["D"]),) if writes == "E" else ()
        b.op(Phase.FORWARD, read, write, target=f"note.op{k}")
        b.ops[-1] = replace(b.ops[-1], inplace_candidates=inplace_candidates)
    for name, value in names.items():
        b.storages[b.values[value].storage] = replace(b.storages[b.values[value].storage], name=name)
    graph = b.graph(tuple(out))
    measured = {signature_of(graph, op): s for op, s in zip(graph.ops, _SECONDS, strict=True)}
    return graph, workload_of(graph, budget=_CAPACITY, costs=replace(DEVICES["a100"], measured=measured))


_SIZES = {"A": 16, "B": 16, "C": 30, "D": 30, "E": 30}


def _names(graph: Graph, events: Events, kind: Kind) -> list[str]:
    """What is dropped (storages), or runs again (ops), in order."""
    found, ran = [], set()
    for event in events:
        if event.kind is Kind.DROP is kind:
            found.append(graph.storages[event.of].name)
        elif event.kind is Kind.RUN is kind and event.of in ran:
            found.append(graph.ops[event.of].name)
        ran.add(event.of) if event.kind is Kind.RUN else None
    return found


def test_E3_dtr_at_addresses_releases_B_and_C_and_computes_both_again() -> None:  # noqa: N802
    graph, workload = _step()
    events = dtr(workload, memory=AddressSpace(workload.budget))
    before_D = events[: events.index((Kind.RUN, 4))]  # noqa: N806
    assert _names(graph, before_D, Kind.DROP) == ["B", "C"]
    assert _names(graph, events, Kind.RUN) == ["op1", "op2"]
    assert judged(graph, workload, events)[1].peak <= _CAPACITY


def test_E3_where_bytes_only_count_and_where_it_is_planned_B_alone_goes() -> None:  # noqa: N802
    graph, workload = _step()
    for policy in (dtr, recompute):
        events = policy(workload)
        assert _names(graph, events, Kind.RUN) == ["op1"]
        assert judged(graph, workload, events)[1].peak == 76
    graph = judged(graph, workload, events)[0].graph
    schedule = make_schedule(graph, tuple(range(len(graph.ops))), "evicted")
    solution = solve(lifetimes.problem(graph, schedule, alignment=1), solver="tstack")
    assert {name: solution.offsets[name] for name in "ABCD"} == {"A": 0, "B": 46, "C": 16, "D": 46}
    assert solution.arena_size == 76


@cache
def _gpt2() -> tuple[Graph, Workload]:
    graph = traced_nano("gpt2").graph
    workload = workload_of(graph, alignment=64)
    return graph, replace(workload, budget=measure(workload, workload.plain).peak // 2)


def test_E1_what_is_released_and_when_is_known_before_anything_runs() -> None:  # noqa: N802
    graph, workload = _gpt2()
    for policy in (recompute, delta):
        applied, figures = judged(graph, workload, policy(workload))
        assert figures.peak <= workload.budget
        evictions = evictions_of(applied.graph, applied.instances)
        assert evictions
        for one in evictions:
            assert one.evicted_access < one.in_trigger <= one.back_access < len(applied.graph.ops)


@pytest.mark.parametrize("policy", [auto, delta, flow])
def test_E4_a_load_is_an_op_and_the_backward_sends_no_forward_tensor_away(policy: Policy) -> None:  # noqa: N802
    graph, workload = _gpt2()
    costs = replace(workload.costs, bytes_per_second=1e8)  # ops as long as those of large models, which hide copies
    workload = replace(workload_of(graph, alignment=64, costs=costs), budget=workload.budget)
    ops = judged(graph, workload, policy(workload))[0].graph.ops
    assert {op.phase for op in ops if op.target == RELOAD} == {Phase.BACKWARD}
    made = {graph.storages[s].name for op in graph.ops if op.phase is Phase.FORWARD for s in graph.written(op)}
    sent = [op for op in ops if op.target == OFFLOAD and op.name.removeprefix("offload:") in made]
    assert sent
    assert {op.phase for op in sent} == {Phase.FORWARD}


def test_E4_the_backward_releases_a_forward_tensor_at_its_last_use() -> None:  # noqa: N802
    graph, workload = _gpt2()
    graph = judged(graph, workload, auto(workload))[0].graph
    schedule = make_schedule(graph, tuple(range(len(graph.ops))), "evicted")
    buffers = lifetimes.problem(graph, schedule, alignment=64).buffers
    graph = placed(graph, schedule.order)
    last = {graph.storages[s].name: step for step, op in enumerate(graph.ops) for s in graph.touched(op)}
    assert {b.id: b.live.end for b in buffers} == {b.id: last[b.id] + 1 for b in buffers}


def test_E5_h_is_cost_over_size_times_staleness_and_pays_for_the_dropped_neighbourhood() -> None:  # noqa: N802
    one = Candidate(storage=0, size=10, seconds=2.0, around=3.0, staleness=4.0, ahead=1.0)
    assert h_dtr(one) == pytest.approx(5.0 / 40.0)
    seen: list[Candidate] = []

    def record(candidate: Candidate) -> float:
        seen.append(candidate)
        return h_dtr(candidate)

    graph, workload = _step()
    dtr(workload, memory=AddressSpace(workload.budget), heuristic=record)
    name = [s.name for s in graph.storages]
    before, after = (next(c for c in seen[k:] if name[c.storage] == "C") for k in (0, 3))
    assert (before.around, after.around) == (0.0, 1.0)  # B was dropped in between, and C is made from it
    assert {name[c.storage]: c.seconds for c in seen} == {"A": 100.0, "B": 1.0, "C": 4.0}


def test_E5_delta_has_a_filter_and_a_director() -> None:  # noqa: N802
    hidden = Released(recompute=1.0, out=0.0, back=2.0, gap=2.0)
    assert direct(hidden) is EvictionKind.SWAP
    assert direct(replace(hidden, gap=1.0)) is direct(replace(hidden, out=2.0)) is EvictionKind.DROP
    graph, workload = _gpt2()
    kinds = {}
    for way in EvictionKind:
        events = delta(workload, filter=lambda c: -c.size, director=lambda _, way=way: way)  # type: ignore[misc]
        kinds[way] = {event.kind for event in events}
        assert judged(graph, workload, events)[1].peak <= workload.budget
    assert Kind.OFFLOAD in kinds[EvictionKind.SWAP]

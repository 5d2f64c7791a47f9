"""tract's memory schema (rows C1 to C6): lifetimes, greedy partitioning, flush lists, symbolic sizes, the table."""

from __future__ import annotations

from functools import cache

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

import memplan
from benchmarks.zoo import Block
from memplan.core.graph import StorageKind
from memplan.core.plan import Plan
from memplan.core.problem import Buffer, Interval, Problem
from memplan.core.validate import validate
from memplan.planning.options import PlanOptions
from memplan.planning.planfile import check_consistency
from memplan.solvers import solve
from memplan.solvers.baselines import partitions
from memplan.symbolic import SymbolicPlan
from memplan.trace import plan
from tests.models import Made
from tests.strategies import problems


def test_C1_lifetimes_are_half_open() -> None:  # noqa: N802
    life = Interval(2, 5)
    assert len(life) == 3
    assert not life.is_empty
    assert Interval(4, 4).is_empty
    assert [life.is_alive_at_step(step) for step in (1, 2, 4, 5)] == [False, True, True, False]
    assert life.is_disjoint(Interval(5, 7))
    assert Interval(0, 2).is_disjoint(life)
    assert not life.is_disjoint(Interval(4, 6))


def test_C3_each_buffer_joins_the_compatible_partition_with_the_largest_total() -> None:  # noqa: N802
    made = tuple(
        Buffer(id=name, size=size, live=Interval(start, end))
        for name, size, start, end in (("a", 9, 0, 2), ("b", 8, 0, 2), ("c", 5, 2, 4), ("d", 4, 2, 4), ("e", 1, 4, 6))
    )
    problem = Problem(buffers=made)
    assert [[b.id for b in group] for group in partitions(problem)] == [["a", "c", "e"], ["b", "d"]]
    assert solve(problem, solver="partition").arena_size == 17


@given(problem=problems(aligned=False))
def test_C3_the_arena_is_the_sum_of_the_partitions_maxima(problem: Problem) -> None:  # noqa: N802
    groups = partitions(problem)
    for group in groups:
        for i, one in enumerate(group):
            assert all(a.is_disjoint(b) for two in group[:i] for a in one.segments for b in two.segments)
    expected = sum(max(b.size for b in group) for group in groups)
    assert solve(problem, solver="partition").arena_size == expected


def test_C5_usage_and_peak_follow_alignment() -> None:  # noqa: N802
    made = [Buffer(id=str(i), size=100, live=Interval(0, 1), alignment=64) for i in range(2)]
    solution = solve(made)
    assert solution.offsets == {"0": 0, "1": 128}
    assert (solution.arena_size, solution.bound) == (228, 228)


def _language() -> Made:
    """A model of language with one block, which is traced sooner than GPT-2. Returns a loss."""
    torch.manual_seed(0)
    parts = {"embed": nn.Embedding(256, 64), "block": Block(64, 2), "head": nn.Linear(64, 256)}
    loss = nn.functional.cross_entropy
    return Made(lambda m, t: loss(m.head(m.block(m.embed(t)))[:, :-1].flatten(0, 1), t[:, 1:].flatten()), **parts)


def _tokens(batch: int, seq: int) -> torch.Tensor:
    return torch.zeros(batch, seq, dtype=torch.int64)


@cache
def _plan() -> Plan:
    return plan(_language(), _tokens(4, 24), options=PlanOptions(gradients="outside"))


def test_C2_a_lifetime_ends_after_the_last_use_and_outputs_are_not_planned() -> None:  # noqa: N802
    p = _plan()
    graph, order = p.placed, p.schedule.order
    touches: dict[str, list[int]] = {}
    for step, op in enumerate(order):
        for s in graph.touched(graph.ops[op]):
            touches.setdefault(graph.storages[s].name, []).append(step)
    for b in p.problem.buffers:
        assert (b.live.start, b.live.end) == (touches[b.id][0], touches[b.id][-1] + 1), b.id
    planned = {b.id for b in p.problem.buffers}
    kept = {graph.storages[graph.values[v].storage].name for v in (*graph.outputs, *graph.gradients)}
    outside = {s.name for s in graph.storages if s.kind in (StorageKind.INPUT, StorageKind.PARAMETER)}
    assert kept
    assert outside
    assert not planned & (kept | outside)


def test_C6_a_table_of_steps_and_partitions() -> None:  # noqa: N802
    p = _plan()
    groups = partitions(p.problem)
    head, *rows = [line.split("|") for line in p.to_text().splitlines() if "|" in line]
    assert [cell.strip() for cell in head[1:]] == [str(i) for i in range(len(groups))], "a column for each partition"
    assert rows[-1][0].strip() == "bytes"
    assert len(rows) > 2
    assert all(len(cells) == len(groups) + 1 for cells in rows)
    text = p.to_text()
    assert str(sum(max(b.size for b in group) for group in groups)) in text.replace(",", "")
    assert str(p.max_live) in text.replace(",", "")


LONGEST = 48
batches, lengths = st.integers(2, 32), st.integers(3, LONGEST)


@cache
def _symbolic() -> SymbolicPlan:
    shapes = {"inputs": ({0: Dim("batch", min=2, max=32), 1: Dim("seq", min=3, max=LONGEST)},)}
    return memplan.plan(_language(), _tokens(4, 24), dynamic_shapes=shapes)


def _anew(batch: int, seq: int) -> Plan:
    return memplan.plan(_language(), _tokens(batch, seq))


@given(batch=batches, seq=lengths)
@settings(max_examples=6)
def test_C4_resolved_for_any_values_the_schema_is_valid(batch: int, seq: int) -> None:  # noqa: N802
    plan = _symbolic().resolve({"batch": batch, "seq": seq})
    validate(plan.problem, plan.solution)
    assert plan.arena_size <= 1.25 * plan.max_live, "nothing needs less than max live, whatever it is planned with"


def test_C4_sizes_are_expressions_of_the_symbols() -> None:  # noqa: N802
    symbolic = _symbolic()
    assert symbolic.conditions == ()
    texts = {symbolic.size_of(b.id) for b in symbolic.plan.problem.buffers}
    assert {"768*batch*seq", "4*batch*seq"} <= texts
    assert "768*batch*seq" in symbolic.to_text()
    assert symbolic.plan.problem.buffers == symbolic.resolve(symbolic.hint).problem.buffers


def test_C4_good_for_the_hint_and_not_bad_anywhere() -> None:  # noqa: N802
    symbolic = _symbolic()
    assert symbolic.hint == {"batch": 4, "seq": 24}
    assert symbolic.arena_size(symbolic.hint) <= 1.03 * _anew(4, 24).arena_size
    for batch, seq in ((2, LONGEST), (32, 3)):
        resolved, anew = symbolic.resolve({"batch": batch, "seq": seq}), _anew(batch, seq)
        assert resolved.arena_size <= 1.25 * anew.arena_size
        check_consistency(resolved)


@given(batch=batches, seq=lengths)
@settings(max_examples=6)
def test_C5_peak_and_usage_for_given_values(batch: int, seq: int) -> None:  # noqa: N802
    symbolic = _symbolic()
    values = {"batch": batch, "seq": seq}
    plan = symbolic.resolve(values)
    assert symbolic.max_live(values) == plan.max_live == plan.problem.max_live
    assert plan.problem.max_live >= plan.schedule.max_live, "aligned sizes are counted"
    assert all(b.size % 64 == 0 for b in plan.problem.buffers)
    assert abs(1 - plan.fragmentation - plan.max_live / plan.arena_size) < 1e-12

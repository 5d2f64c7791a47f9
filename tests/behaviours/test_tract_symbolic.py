"""tract's symbolic schema on a traced GPT-2 (rows C4 and C5): built once under a hint, resolved for any values."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.export import Dim

import memplan
from benchmarks.zoo import ZOO
from memplan.core.plan import Plan
from memplan.core.validate import validate
from memplan.planning.planfile import check_consistency
from memplan.symbolic import SymbolicPlan
from memplan.trace import trace

LONGEST = 48
batches, lengths = st.integers(2, 32), st.integers(3, LONGEST)


@cache
def _symbolic() -> SymbolicPlan:
    model, _ = ZOO["gpt2"]("nano")
    shapes = {"tokens": {0: Dim("batch", min=2, max=32), 1: Dim("seq", min=3, max=LONGEST)}}
    return memplan.plan(model, torch.zeros(4, 24, dtype=torch.int64), dynamic_shapes=shapes)


def _anew(batch: int, seq: int) -> Plan:
    return memplan.plan(ZOO["gpt2"]("nano")[0], torch.zeros(batch, seq, dtype=torch.int64))


@given(batch=batches, seq=lengths)
@settings(max_examples=6)
def test_C4_resolved_for_any_values_the_schema_is_valid(batch: int, seq: int) -> None:  # noqa: N802
    plan = _symbolic().resolve({"batch": batch, "seq": seq})
    validate(plan.problem, plan.solution)
    assert plan.arena_size <= 1.25 * plan.max_live, "nothing needs less than max live, whatever it is planned with"
    placed = _symbolic().place({"batch": batch, "seq": seq})
    assert placed.arena_size >= plan.arena_size
    assert dict(placed.offsets).keys() == dict(plan.solution.offsets).keys()


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


def test_C4_sizes_are_those_of_a_trace_with_these_values(monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: N802
    # but for what numbers allow and symbols do not: then both traces have the same storages
    numbers = ("tracing.fold", "tracing.simplify", "dynamic.symbolic_capture.fold", "passes.products._scaled")
    for name in (*numbers, "capture.front_ends.drop_constant_masks"):
        monkeypatch.setattr(f"memplan.trace.{name}", lambda *_: None)
    symbolic = _symbolic.__wrapped__()
    for batch, seq in ((4, 24), (2, LONGEST), (32, 3)):
        resolved = symbolic.resolve({"batch": batch, "seq": seq})
        anew = trace(ZOO["gpt2"]("nano")[0], (torch.zeros(batch, seq, dtype=torch.int64),))
        assert [s.nbytes for s in resolved.graph.storages] == [s.nbytes for s in anew.graph.storages]


@given(batch=batches, seq=lengths)
@settings(max_examples=6)
def test_C5_peak_and_usage_for_given_values(batch: int, seq: int) -> None:  # noqa: N802
    symbolic = _symbolic()
    values = {"batch": batch, "seq": seq}
    plan, placed = symbolic.resolve(values), symbolic.place(values)
    assert symbolic.max_live(values) == placed.max_live
    if plan.solution.solver == "symbolic":
        assert plan.problem.max_live == placed.max_live
    else:  # planned anew, for these sizes alone
        assert plan.arena_size < placed.arena_size
    assert plan.problem.max_live >= plan.schedule.max_live, "aligned sizes are counted"
    assert all(b.size % 64 == 0 for b in plan.problem.buffers)
    assert placed.usage == placed.max_live / placed.arena_size
    assert abs(1 - plan.fragmentation - plan.max_live / plan.arena_size) < 1e-12

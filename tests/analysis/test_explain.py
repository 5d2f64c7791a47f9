"""Explanations, levers, differences and records: what they say follows from the plan, to the byte."""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from memplan.analysis.buffers import alive_at, touches
from memplan.analysis.diff import diff
from memplan.analysis.explain import BufferRole, explain, levers
from memplan.core.graph import Phase, StorageKind
from memplan.core.plan import Plan
from memplan.errors import InvalidSize
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.report.forms import diff_form, explain_form
from memplan.report.sections import markdown
from memplan.schedule import traced
from tests.graph_strategies import GraphBuilder, plans
from tests.samples import deep_plan, sample_plan
from tests.slow import slow


def test_the_sample_is_explained() -> None:
    found = explain(sample_plan(alignment=1))
    assert (found.at.step, found.at.target, found.at.phase) == (3, "aten.expand", "backward")
    assert (found.live, found.max_live) == (260, 260)
    assert {h.holder.id: (h.role, h.holds_until and h.holds_until.step, h.idle) for h in found.held} == {
        "activation_2": (BufferRole.WAITS, 4, 2),
        "activation_5": (BufferRole.MADE, 4, 0),
        "activation_3": (BufferRole.LAST_USE, None, 0),
    }


def test_a_step_that_does_not_exist_is_bad_input() -> None:
    for step in (-1, 5, 99):
        with pytest.raises(InvalidSize, match="its steps are 0 to 4"):
            explain(sample_plan(), step)


@given(plans(), st.data())
def test_everything_that_is_alive_is_explained(plan: Plan, data: st.DataObject) -> None:
    assume(plan.schedule.order)
    step = data.draw(st.integers(0, len(plan.schedule.order) - 1))
    found = explain(plan, step)
    assert [h.holder for h in found.held] == list(alive_at(plan, step))
    assert found.live == sum(b.size for b in plan.problem.alive_at(step)) == sum(g.bytes for g in found.groups)
    steps = touches(plan)
    for held in found.held:
        used = steps[held.holder.id]
        assert (held.role in (BufferRole.WAITS, BufferRole.KEPT)) == (step not in used) == (held.idle > 0)
        if held.holds_until is not None:
            assert held.holds_until.step == used[-1] > step
            assert held.next_use is not None
            assert not any(step < u < held.next_use.step for u in used)
    form = explain_form(found)
    assert json.loads(json.dumps(form.data))["live"] == found.live
    assert f"step {step} ({found.at.phase})" in form.title
    assert f"{len(found.held)} buffers are alive" in markdown(form)


# Levers.


def _chain(op: str, sizes: tuple[int, int, int]) -> Plan:
    """input -> a -> b -> output, where `op` makes b out of a."""
    b = GraphBuilder()
    x = b.storage(StorageKind.INPUT, 8, planned=False)
    one = b.storage(StorageKind.ACTIVATION, sizes[0], planned=True)
    b.op(Phase.FORWARD, (x,), (one,), target="aten.mm.default")
    two = b.storage(StorageKind.ACTIVATION, sizes[1], planned=True)
    b.op(Phase.FORWARD, (one,), (two,), target=op)
    out = b.storage(StorageKind.OUTPUT, sizes[2], planned=False)
    b.op(Phase.FORWARD, (two,), (out,), target="aten.sum.default")
    graph = b.graph((out,))
    return make_plan(ScheduledGraph(model="chain", graph=graph, schedule=traced(graph), alignment=1, versions={}))


def test_what_waits_for_the_backward_can_be_evicted() -> None:
    (lever,) = levers(sample_plan(alignment=1))
    # Without activation_2 (100 B) at the peak, 160 B are alive there, and 200 B when it comes back.
    assert lever.saves == 60
    assert "100 B of activations wait for the backward" in lever.text


@given(plans())
def test_no_lever_promises_more_than_there_is(plan: Plan) -> None:
    for lever in levers(plan):
        assert 0 <= lever.saves <= max(plan.max_live, plan.arena_size)
        assert lever.text


# Differences.


@given(plans())
def test_a_plan_does_not_differ_from_itself(plan: Plan) -> None:
    found = diff(plan, plan)
    assert found.same
    assert found.same_graph
    assert "the plans are the same" in markdown(diff_form(found))


@given(plans(), plans())
def test_every_buffer_is_matched_once_or_came_or_went(one: Plan, two: Plan) -> None:
    found, back = diff(one, two), diff(two, one)
    assert sum(row.delta for row in found.rows) == two.max_live - one.max_live
    assert (set(found.came), set(found.went)) == (set(back.went), set(back.came))
    pairs = len(one.problem.buffers) - len(found.went)
    assert pairs == len(two.problem.buffers) - len(found.came)
    for a, b in (*found.grew, *found.shrank, *found.to_peak, *found.off_peak):
        assert a.id in {x.id for x in one.problem.buffers}
        assert b.id in {x.id for x in two.problem.buffers}
    matched = sum(b.size for b in two.problem.buffers) - sum(h.size for h in found.came)
    before = sum(b.size for b in one.problem.buffers) - sum(h.size for h in found.went)
    assert matched - before == sum(b.size - a.size for a, b in (*found.grew, *found.shrank))
    form = diff_form(found)
    assert json.loads(json.dumps(form.data, allow_nan=False))["format"] == "memplan-diff-1"
    assert form.title
    assert markdown(form)


def test_what_grew_is_paired_with_what_it_was() -> None:
    found = diff(_chain("aten.relu.default", (100, 100, 8)), _chain("aten.relu.default", (100, 150, 8)))
    assert [(a.size, b.size) for a, b in found.grew] == [(100, 150)]
    assert not found.came
    assert not found.went
    assert not found.same_graph
    assert "100" in found.first_difference


# Plans with a budget.


def _advised(plan: Plan, step: int) -> str:
    return next((lever.text for lever in levers(plan, step)), "")


@pytest.mark.parametrize("policy", [slow("recompute"), "genoa", "flow"])
def test_no_advice_to_evict_what_is_evicted(policy: str) -> None:
    plan = deep_plan(policy)
    origins = {s.name: s.origin.module for s in plan.graph.storages}
    gone = {e.storage: e for e in plan.evictions}
    for step in range(len(plan.schedule.order)):
        text = _advised(plan, step)
        for storage, eviction in gone.items():
            if eviction.evicted_access < step:  # before its last use in the forward it could still leave for longer
                assert origins[storage] not in text
    assert "recomputing or offloading them saves" in _advised(deep_plan(), deep_plan().problem.peak_step)


@pytest.mark.parametrize("policy", ["recompute", "genoa"])
def test_further_lives_of_a_storage_show_its_module(policy: str) -> None:
    plan = deep_plan(policy)
    origins = {s.name: s.origin for s in plan.graph.storages}
    again = [h for step in range(len(plan.schedule.order)) for h in alive_at(plan, step) if "@" in h.id]
    assert again
    for holder in again:
        origin = origins[holder.id.partition("@")[0]]
        assert (holder.module, holder.source) == (origin.module, origin.source)


def test_the_differences_of_a_budget_are_said_as_such() -> None:
    plain, kept = deep_plan(), deep_plan("recompute")
    found = diff(plain, kept)
    assert not found.same_graph
    text = markdown(diff_form(found))
    assert "no budget before, an arena budget of 5,242,880 B kept by 'recompute' with 2 evictions after" in text
    module = {s.name: s.origin.module for s in plain.graph.storages}
    evicted = {module[one.storage] for one in kept.evictions}
    assert {h.module for h in found.came} | {b.module for _, b in found.shrank} <= evicted
    assert diff(kept, kept).same


@given(plans())
def test_there_is_a_row_for_each_buffer(plan: Plan) -> None:
    rows = plan.to_records()
    assert [row["buffer"] for row in rows] == [b.id for b in plan.problem.buffers]
    assert max((row["offset"] + row["nbytes"] for row in rows), default=0) == plan.arena_size
    assert sum(row["nbytes"] for row in rows if row["at_peak"]) == plan.max_live
    assert all(0 <= row["start"] < row["end"] <= len(plan.schedule.order) for row in rows)
    assert len({frozenset(row) for row in rows}) <= 1, "the same columns in each row"


def test_a_row_says_where_its_buffer_is_from() -> None:
    row = next(r for r in sample_plan(alignment=1).to_records() if r["nbytes"] == 100)
    assert (row["module"], row["source"], row["kind"]) == ("h.0.attn", "model.py:12", "activation")

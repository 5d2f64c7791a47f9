from __future__ import annotations

import dataclasses

from hypothesis import given

from memplan.core.plan import Plan
from memplan.report.lines import verdict
from memplan.report.summary import LARGEST, make_report
from tests.graph_strategies import plans
from tests.samples import sample_plan


def test_every_figure_of_a_plan_counted_by_hand() -> None:
    report = sample_plan(alignment=1).report()
    assert (report.max_live, report.arena_size, report.fragmentation, report.padding) == (260, 260, 0.0, 0)
    assert (report.outside.inputs, report.outside.parameters, report.outside.constants) == (40, 100, 0)
    assert (report.outside.outputs, report.outside.gradients, report.outside.fallbacks) == (8, 100, 60)
    assert report.outside.temporaries is None
    assert report.outside.during == 108  # output and gradient, at the last step; the fallback came before
    assert report.total == 260 + 140 + 108
    assert report.backward
    assert report.peak is not None
    assert (report.peak.step, report.peak.target, report.peak.alive) == (3, "aten.expand", 3)
    assert [(f.target, f.calls, f.bytes, f.most) for f in report.functional] == [("aten.native_layer_norm", 1, 60, 60)]
    first = report.largest[0]
    assert (first.size, first.module, first.source) == (100, "h.0.attn", "model.py:12")


def test_padding_is_what_alignment_adds_to_max_live() -> None:
    report = sample_plan(alignment=64).report()
    assert report.max_live == 128 + 64 + 128
    assert report.padding == report.max_live - 260


def test_measured_temporaries_have_their_own_line() -> None:
    report = sample_plan(temporaries=(0, 100, 0, 0, 7)).report()
    assert report.outside.temporaries == 40  # 100 during the norm, 60 of which are its results
    assert report.outside.during == 8 + 100 + 7


@given(plans())
def test_nothing_is_left_out_of_the_total(plan: Plan) -> None:
    report = make_report(plan)
    assert report.total == plan.total == report.arena_size + report.outside_total
    out = report.outside
    assert report.outside_total == out.during + out.inputs + out.parameters + out.constants
    assert out.during <= out.outputs + out.gradients + out.fallbacks + (out.temporaries or 0)
    assert out.during >= max(out.fallbacks if plan.temporaries is None else 0, 0)


@given(plans())
def test_the_peak_and_the_largest_are_those_of_the_problem(plan: Plan) -> None:
    report = make_report(plan)
    assert len(report.largest) == min(LARGEST, report.buffers)
    sizes = sorted((b.size for b in plan.problem.buffers), reverse=True)
    assert [holder.size for holder in report.largest] == sizes[:LARGEST]
    if report.peak is None:
        assert report.max_live == 0
    else:
        alive = plan.problem.alive_at(report.peak.step)
        assert sum(b.size for b in alive) == report.max_live
        assert report.peak.alive == len(alive)


@given(plans())
def test_functional_bytes_add_up(plan: Plan) -> None:
    report = make_report(plan)
    assert sum(row.bytes for row in report.functional) == sum(plan.graph.functional_bytes(op) for op in plan.graph.ops)
    assert max((row.most for row in report.functional), default=0) == report.outside.fallbacks


def test_advice_and_certificate_follow_from_the_plan() -> None:
    report = sample_plan().report()
    assert [lever.name for lever in report.advice] == ["evict", "order"]
    assert verdict(report).endswith("proven that no layout can need less in this order")
    assert "down to" in verdict(dataclasses.replace(report, status="feasible"))
    certified = verdict(dataclasses.replace(report, order_certified=True))
    assert certified.endswith("no order and no layout can need less, alignment (60 B) apart")

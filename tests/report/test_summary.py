from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import memplan
from memplan.analysis.needs import STATES, needed
from memplan.core.plan import Plan
from memplan.core.units import format_bytes
from memplan.errors import InvalidModel
from memplan.report.lines import answer_lines, report_form, verdict
from memplan.report.pages import page_data
from memplan.report.picture import picture_of_plan
from memplan.report.summary import LARGEST, make_report
from memplan.trace.optimizer.update_bytes import update_bytes
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


@given(plans(), st.sampled_from(sorted(STATES)))
def test_parts_of_the_answer_add_up_to_what_is_needed(plan: Plan, optimizer: str) -> None:
    report = plan.report(optimizer=optimizer)
    need = report.needed
    assert sum(need.parts.values()) == need.total == plan.total + need.state
    assert need.eager is None or need.eager >= need.state
    assert answer_lines(report)[0].startswith(f"This step needs {format_bytes(need.total)}")


def test_the_answer_comes_first_in_every_form() -> None:
    """Show what is needed, where it peaks and what would shrink it; a reserve stands for the optimizer's state."""
    plan = sample_plan()
    text = list(answer_lines(plan.report()))
    shown = " ".join(str(plan).splitlines()[2:8])
    assert shown.startswith(" ".join(text))
    assert text[0] == (
        "This step needs 768 B with AdamW (eager: 648 B): 320 B activations, 200 B AdamW's state, 100 B parameters, "
        "100 B gradients, 40 B inputs, 8 B results and temporaries."
    )
    assert text[1] == "It peaks in the backward (aten.expand); the largest tensor there has 128 B, of h.0.attn."
    assert text[2].startswith("Cheapest way to make it smaller: a budget. Recomputing or offloading activations")
    report = plan.report()
    assert text == list(report_form(report).sections[0].lines)
    assert text == list(picture_of_plan(plan).answer) == page_data(picture_of_plan(plan))["answer"]
    firsts = {name: answer_lines(plan.report(optimizer=name))[0].partition(":")[0] for name in ("SGD", "none")}
    assert firsts == {"SGD": "This step needs 568 B with SGD (eager", "none": "This step needs 568 B (eager"}
    aside = dataclasses.replace(plan, reserve=200)
    assert answer_lines(aside.report())[0] == text[0], "as much was set aside"
    assert "300 B set aside" in answer_lines(dataclasses.replace(plan, reserve=300).report())[0]
    with pytest.raises(InvalidModel, match=r"name one of .*AdamW.*none"):
        plan.report(optimizer="Lion")


@pytest.mark.parametrize("name", sorted(set(STATES) - {"none"}))
def test_states_are_those_of_torchs_optimizers(name: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(64, 32))
    assert update_bytes(name, [parameter], foreach=True).state == STATES[name] * parameter.nbytes


def test_the_verdict_follows_from_the_plan() -> None:
    report = sample_plan().report()
    assert verdict(report).endswith("no layout can need less in this order")
    assert "down to" in verdict(dataclasses.replace(report, status="feasible"))


def test_the_state_is_that_of_trained_parameters_and_not_of_inputs() -> None:
    model = nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.ReLU(), nn.Linear(64, 64))
    plan = memplan.plan(model, torch.randn(4096, 64, requires_grad=True))
    assert needed(plan, "AdamW").state == 2 * sum(p.nbytes for p in model[2].parameters())


def test_bytes_that_were_set_aside_are_no_optimizers_that_keeps_nothing() -> None:
    plan = memplan.plan(nn.Linear(8, 8), torch.randn(4, 8), reserve="1MiB")
    for name in ("SGD", "none"):
        assert needed(plan, name).optimizer == ""

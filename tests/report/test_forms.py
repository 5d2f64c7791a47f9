"""The report's readable forms: complete, literal, and as wide as the terminal."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from hypothesis import given
from rich.console import Console

from memplan.core.plan import Plan
from memplan.report.lines import report_form, report_markdown
from memplan.report.summary import report_json
from memplan.report.terminal import rendered
from tests.graph_strategies import plans
from tests.samples import MIB, branching_plan, deep_plan, sample_plan


def _drawn(plan: Plan, width: int, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    Console(file=file, width=width).print(rendered(report_form(plan.report()), width))
    file.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("auto", "'least last + repair': optimal: no order of these ops needs less than 150 B, proven by the cut"),
        ("traced", "order by 'traced': 190 B, at most 35.71 % more"),
    ],
)
def test_the_certificate_stands_in_every_form(policy: str, says: str) -> None:
    plan = branching_plan(policy)
    for text in (_drawn(plan, 200), report_markdown(plan.report()).replace("\\_", "_")):
        assert says in text
        assert ("traced, they need 190 B" in text) == (policy != "traced")
    figures = report_json(plan.report())
    assert figures["order_max_live"] == plan.schedule.max_live
    assert figures["order_bound"] == plan.schedule.bound
    assert figures["order_proof"] == plan.schedule.proof
    assert figures["order_traced"] == 190


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_has_a_line_for_everything(width: int) -> None:
    text = _drawn(sample_plan(), width)
    for label in ("total", "parameters", "optimizer state", "inputs", "beside the arena", "peak (max live)", "padding"):
        assert label in text
    for label in ("arena", "outputs", "gradients", "fallbacks", "kernels' temporaries", "not measured"):
        assert label in text
    assert "constants" not in text, "there are none"
    assert "aten.native_layer_norm" in text
    assert "at step 3" in text or width < 60


def test_on_an_accelerator_the_report_says_what_no_plan_knows() -> None:
    plan = sample_plan()
    storages = tuple(replace(s, device="cuda:0") for s in plan.graph.storages)
    there = replace(plan, graph=replace(plan.graph, storages=storages))
    assert there.on_accelerator
    assert not plan.on_accelerator
    for shown in (_drawn, lambda plan, width: report_markdown(plan.report())):
        assert "workspaces" in shown(there, 200)
        assert "not known" in shown(there, 200)
        assert "workspaces" not in shown(plan, 200)
    assert there.report().total == plan.report().total


@given(plans())
def test_every_form_exists_for_every_plan(plan: Plan) -> None:
    report = plan.report()
    assert _drawn(plan, 80)
    markdown = report_markdown(report)
    table = [line.replace("\\|", "") for line in markdown.splitlines() if line.startswith("| ")]
    assert {line.count("|") for line in table[:8]} == {5}
    data = json.loads(json.dumps(report_json(report), allow_nan=False))
    assert data["format"] == "memplan-report-1"
    assert data["arena_size"] == plan.arena_size
    assert data["outside"]["temporaries"] is None or plan.temporaries is not None
    assert len(data["largest"]) == len(report.largest)


@pytest.mark.parametrize(
    ("policy", "how"),
    [
        ("recompute", "kept by 'recompute': 2.00 MiB computed again (2 recomputes); predicted +"),
        ("genoa", "kept by 'genoa': 17.00 MiB copied back from the host (17 reloads; up to 6.00 MiB lie there); pred"),
    ],
)
def test_how_a_budget_is_kept_stands_in_every_form(policy: str, how: str) -> None:
    plan = deep_plan(policy)
    for text in (_drawn(plan, 400), report_markdown(plan.report()).replace("\\_", "_")):
        assert f"budget 5.00 MiB (5,242,880 B), {how}" in text
        assert "by the costs of a100 (data sheet)" in text
    kept = report_json(plan.report())["kept"]
    assert (kept["arena_budget"], kept["policy"], kept["costs"]) == (5 * MIB, policy, "a100")
    assert kept["recomputes"] + kept["offloads"] == len(plan.evictions)
    assert kept["recomputed"] + kept["offloaded"] == MIB * len(plan.evictions)
    assert kept["host_size"] == plan.host_size
    assert kept["seconds"] > kept["base_seconds"] > 0


def test_a_budget_that_evicts_nothing_says_so_and_none_says_nothing() -> None:
    text = report_markdown(deep_plan("recompute", 7 * MIB).report())
    assert "budget 7.00 MiB (7,340,032 B), kept by 'recompute': nothing is evicted" in text
    assert "kept by" not in report_markdown(deep_plan().report())
    assert report_json(deep_plan().report())["kept"] is None

"""What a plan file says of all orders or layouts, and loading it does not prove again, is claimed and never proven."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from memplan.core.plan import Plan
from memplan.core.problem import Status
from memplan.core.schedule import Evidence
from memplan.errors import InvalidPlan
from memplan.planning.planfile import load
from memplan.report.lines import verdict
from memplan.report.summary import report_json
from tests.samples import branching_plan


def false_layout() -> Plan:
    """Every buffer above the one before it, 200 bytes where 150 are possible, said to be the smallest arena."""
    plan = branching_plan("auto")
    offsets, end = {}, 0
    for buffer in plan.problem.buffers:
        offsets[buffer.id] = end
        end += buffer.size
    assert plan.max_live < end
    said = dataclasses.replace(plan.solution, offsets=offsets, arena_size=end, bound=end, status=Status.OPTIMAL)
    return dataclasses.replace(plan, solution=said)


def loaded(plan: Plan, folder: Path) -> Plan:
    plan.save(folder / "plan.json")
    return load(folder / "plan.json")


@pytest.mark.parametrize("policy", ["auto", "traced"])
def test_what_loading_proves_again_is_not_claimed(policy: str, tmp_path: Path) -> None:
    plan = branching_plan(policy)
    found = loaded(plan, tmp_path)
    assert not found.solution.claimed
    assert found.schedule.certified is plan.schedule.certified
    assert verdict(found.report()) == verdict(plan.report())


def test_the_false_claim_of_an_order_is_refused(tmp_path: Path) -> None:
    """The traced order needs 190 bytes where 150 are possible."""
    plan = branching_plan("traced")
    said = dataclasses.replace(plan.schedule, bound=190, evidence=Evidence.CUT, proof="op3")
    dataclasses.replace(plan, schedule=said).save(tmp_path / "plan.json")
    with pytest.raises(InvalidPlan, match="says 190, its evidence gives 150"):
        load(tmp_path / "plan.json")


def test_the_false_claim_of_a_layout_is_shown_as_a_claim(tmp_path: Path) -> None:
    plan = loaded(false_layout(), tmp_path)
    assert plan.solution.claimed
    report = plan.report()
    assert "that no smaller arena than 200 B exists in this order is claimed by the plan file" in verdict(report)
    figures = report_json(report)
    assert (figures["status"], figures["layout_claimed"]) == ("claimed", True)


def test_a_file_cannot_say_that_it_is_proven(tmp_path: Path) -> None:
    false_layout().save(tmp_path / "plan.json")
    assert "claimed" not in json.loads((tmp_path / "plan.json").read_text())["solution"]

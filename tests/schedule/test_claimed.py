"""What a plan file says of all orders or layouts, and loading it does not prove again, is claimed and never proven."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from pathlib import Path

import pytest

from memplan.cli import main
from memplan.core.plan import Plan
from memplan.core.problem import Status
from memplan.planning.planfile import load
from memplan.report.lines import certificate, verdict
from memplan.report.summary import report_json
from memplan.schedule import Evidence
from memplan.symbolic import load_symbolic
from tests.samples import branching_plan
from tests.symbolic.test_plan import _example


def false_order() -> Plan:
    """The traced order, which needs 190 bytes where 150 are possible, said to be the best of a long search."""
    plan = branching_plan("traced")
    said = dataclasses.replace(plan.schedule, bound=190, evidence=Evidence.LONG_SEARCH, proof="")
    return dataclasses.replace(plan, schedule=said)


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


def test_a_long_search_is_proven_where_it_ran_and_claimed_where_it_was_loaded(tmp_path: Path) -> None:
    plan = branching_plan("exact")
    assert plan.schedule.evidence is Evidence.LONG_SEARCH
    assert plan.schedule.certified
    assert not plan.schedule.claimed
    found = loaded(plan, tmp_path)
    assert found == plan
    assert found.schedule.claimed
    assert not found.schedule.certified
    for again in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert again.schedule.claimed


@pytest.mark.parametrize("policy", ["auto", "traced"])
def test_what_loading_proves_again_is_not_claimed(policy: str, tmp_path: Path) -> None:
    plan = branching_plan(policy)
    found = loaded(plan, tmp_path)
    assert not found.schedule.claimed
    assert not found.solution.claimed
    assert found.schedule.certified is plan.schedule.certified
    assert verdict(found.report()) == verdict(plan.report())


def test_the_false_claim_of_an_order_is_shown_as_a_claim(tmp_path: Path) -> None:
    report = loaded(false_order(), tmp_path).report()
    assert "190 B; that no order of these ops needs less than 190 B, by a long search" in certificate(report)
    assert "is claimed by the plan file, and was not proved again here" in certificate(report)
    figures = report_json(report)
    assert (figures["order_claimed"], figures["order_certified"], figures["layout_claimed"]) == (True, False, False)


def test_the_false_claim_of_a_layout_is_shown_as_a_claim(tmp_path: Path) -> None:
    plan = loaded(false_layout(), tmp_path)
    assert plan.solution.claimed
    report = plan.report()
    assert "that no smaller arena than 200 B exists in this order is claimed by the plan file" in verdict(report)
    figures = report_json(report)
    assert (figures["status"], figures["layout_claimed"], figures["order_claimed"]) == ("claimed", True, False)


def test_a_gap_above_a_claimed_bound_is_a_claim_too(tmp_path: Path) -> None:
    plan = branching_plan("traced")
    said = dataclasses.replace(plan.schedule, bound=180, evidence=Evidence.LONG_SEARCH, proof="")
    text = certificate(loaded(dataclasses.replace(plan, schedule=said), tmp_path).report())
    assert "190 B; that no order of these ops needs less than 180 B" in text
    assert "is claimed by the plan file" in text


_COMMANDS = (
    ("report", "plan.json"),
    ("report", "plan.json", "--format", "json"),
    ("report", "plan.json", "--format", "markdown"),
    ("report", "plan.json", "--html", "page.html"),
    ("check", "plan.json", "--max-arena", "1KiB"),
    ("check", "plan.json", "--max-arena", "1B", "--format", "json"),
    ("check", "plan.json", "--max-arena", "1B", "--format", "markdown"),
    ("check", "plan.json", "--max-arena", "1B", "--format", "github"),
    ("diff", "plan.json", "plan.json"),
    ("explain", "plan.json"),
)


@pytest.mark.parametrize("command", _COMMANDS, ids=" ".join)
def test_no_command_calls_a_false_claim_proven(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    false_order().save("plan.json")
    assert main(list(command)) in (0, 1)
    shown = "".join(capsys.readouterr())
    assert shown
    written = [path.read_text() for path in tmp_path.glob("*.html")]
    assert len(written) == ("--html" in command)
    for text in (shown, *written):
        assert "proven" not in text.lower()
        assert "optimal" not in text.lower().replace('"status": "optimal"', "")


def test_the_plan_of_a_symbolic_file_is_held_alike(tmp_path: Path) -> None:
    made = _example(["batch < 50"])
    said = dataclasses.replace(made.plan.schedule, bound=made.plan.schedule.max_live, evidence=Evidence.LONG_SEARCH)
    path = tmp_path / "plan.json"
    dataclasses.replace(made, plan=dataclasses.replace(made.plan, schedule=dataclasses.replace(said, proof=""))).save(
        path
    )
    assert load_symbolic(path).plan.schedule.claimed


def test_a_file_cannot_say_that_it_is_proven(tmp_path: Path) -> None:
    branching_plan("exact").save(tmp_path / "plan.json")
    assert "claimed" not in json.loads((tmp_path / "plan.json").read_text())["schedule"]

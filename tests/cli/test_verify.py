"""`memplan check --verify`: exit 1 unless all that a plan says is proven again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memplan.planning.planfile import load
from tests.cli.helpers import Run
from tests.samples import branching_plan
from tests.schedule.test_evidence import false_order


def test_the_command_exits_by_what_is_proven(run: Run, tmp_path: Path) -> None:
    branching_plan("exact").save("good.json")
    code, out, _ = run("check", "--verify", "good.json")
    assert code == 0
    assert "good.json: proven again: no order of its ops needs less than 150 B" in " ".join(out.split())
    false_order().save("false.json")
    for form in ("table", "markdown", "json", "github"):
        code, out, _ = run("check", "--verify", "good.json", "false.json", "--format", form)
        assert code == 1
        assert "that no order of its ops needs less than 190 B" in " ".join(out.split()) or form == "json"
        assert "within their limits" not in out
    data = json.loads(run("check", "--verify", "false.json", "--format", "json")[1])
    assert (data["ok"], data["checked"][0]["ok"]) == (False, False)
    states = [(proof["of"], proof["state"], proof["bound"]) for proof in data["checked"][0]["proofs"]]
    assert states == [("order", "false", 190), ("layout", "proven", 190)]


def test_a_long_search_that_does_not_finish_in_time_stays_claimed(run: Run) -> None:
    branching_plan("exact").save("plan.json")
    code, out, _ = run("check", "--verify", "plan.json", "--time-limit", "0.001")
    assert code == 1
    text = " ".join(out.split())
    assert "FAIL plan.json: claimed, and not proved again: no order of its ops needs less than 150 B" in text
    assert "the long search 'exact' did not end within 0.001 s" in text
    assert load("plan.json").schedule.claimed


def test_limits_and_proofs_are_checked_together(run: Run) -> None:
    false_order().save("plan.json")
    assert run("check", "plan.json", "--max-arena", "1KiB")[0] == 0
    assert run("check", "plan.json", "--max-arena", "1KiB", "--verify")[0] == 1
    branching_plan("auto").save("plan.json")
    assert run("check", "plan.json", "--max-arena", "1KiB", "--verify")[0] == 0
    assert run("check", "plan.json", "--max-arena", "1B", "--verify")[0] == 1


def test_an_unproven_plan_writes_no_baseline(run: Run, tmp_path: Path) -> None:
    false_order().save("plan.json")
    code, _, err = run("check", "plan.json", "--verify", "--baseline", "base.json", "--update-baseline")
    assert code == 1
    assert "base.json was not written: something is not proven" in " ".join(err.split())
    assert not (tmp_path / "base.json").exists()


@pytest.mark.parametrize("options", [("--time-limit", "1"), ("--verify", "--time-limit", "0")])
def test_a_time_limit_without_sense_is_refused(run: Run, options: tuple[str, ...]) -> None:
    branching_plan("auto").save("plan.json")
    code, _, err = run("check", "plan.json", *options)
    assert code == 2
    assert "--time-limit" in err

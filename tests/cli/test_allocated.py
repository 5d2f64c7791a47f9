"""`memplan diff snapshot.pickle plan.json`."""

from __future__ import annotations

import json
from pathlib import Path

from memplan.report.picture import picture_of_plan
from memplan.report.trace_events import snapshot
from tests.analysis.test_allocated import Hostile, write
from tests.cli.helpers import Run
from tests.samples import sample_plan


def test_the_command_line_compares_it_with_a_plan(run: Run, tmp_path: Path) -> None:
    plan = sample_plan()
    plan.save(tmp_path / "plan.json")
    write(tmp_path / "own.pickle", snapshot(picture_of_plan(plan)))
    code, out, err = run("diff", tmp_path / "own.pickle", tmp_path / "plan.json")
    assert (code, err) == (0, "")
    assert "320 B allocated at the peak" in out
    assert "reserved by the allocator" in out
    data = json.loads(run("diff", tmp_path / "own.pickle", tmp_path / "plan.json", "--format", "json")[1])
    assert (data["peak"], data["arena"], data["total"]) == (plan.max_live, plan.arena_size, plan.total)
    assert sum(line["planned"] for line in data["lines"]) == plan.max_live
    write(tmp_path / "bad.pkl", Hostile())
    code, out, err = run("diff", tmp_path / "bad.pkl", tmp_path / "plan.json")
    assert (code, out) == (2, "")
    assert "plain data only" in err
    assert run("diff", tmp_path / "none.pkl", tmp_path / "plan.json")[0] == 2
